"""Scheme: who is trusted with what in a round."""

from __future__ import annotations

from enum import StrEnum


class Scheme(StrEnum):
    """Who is trusted with what; the same loop runs under each, but for central training."""

    CENTRAL = "central"
    """All data in one place: the accuracy that the others are compared with."""
    FEDAVG = "fedavg"
    """The full model, averaged in the clear; the server sees every update."""
    SUBMODEL = "submodel"
    """Only the rows a client needs, in the clear; the server sees rows and updates."""
    SECURE_FEDAVG = "secure-fedavg"
    """The full model under secure aggregation; the server sees the sum."""
    SECURE_SUBMODEL = "secure-submodel"
    """Only rows, under secure aggregation; the server sees the union and sums by row."""
    TWO_SERVER = "two-server"
    """Only rows, fetched and written unseen by either of two servers; both see the sum."""

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
    def unmasked(self) -> Scheme:
        """The same sums without masks."""
        plain = {Scheme.SECURE_FEDAVG: Scheme.FEDAVG, Scheme.SECURE_SUBMODEL: Scheme.SUBMODEL}
        return plain.get(self, self)
