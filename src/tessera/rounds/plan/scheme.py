"""Scheme: who is trusted with what in a round."""

from __future__ import annotations

from enum import StrEnum


class Scheme(StrEnum):
    """Who is trusted with what; the same loop runs under each, but for central training."""

    CENTRAL = "central"
    FEDAVG = "fedavg"
    SUBMODEL = "submodel"
    SECURE_FEDAVG = "secure-fedavg"
    SECURE_SUBMODEL = "secure-submodel"
    TWO_SERVER = "two-server"

    @property
    def secure(self) -> bool:
        """Whether clients mask their inputs with each other."""
        return self in (Scheme.SECURE_FEDAVG, Scheme.SECURE_SUBMODEL)

    @property
    def hides(self) -> bool:
        """Whether no single server sees a client's update, by masks or by shares."""
        return self.secure or self is Scheme.TWO_SERVER

    @property
    def by_rows(self) -> bool:
        return self in (Scheme.SUBMODEL, Scheme.SECURE_SUBMODEL, Scheme.TWO_SERVER)

    @property
    def in_the_open(self) -> Scheme:
        """The same sums without masks."""
        plain = {Scheme.SECURE_FEDAVG: Scheme.FEDAVG, Scheme.SECURE_SUBMODEL: Scheme.SUBMODEL}
        return plain.get(self, self)
