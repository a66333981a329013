"""RoundDomain: over which rows a round between two servers goes, and the parameters that follow.

All rows of the tables, or those of the cohort's union where the plan narrows them. A stored state
names the union by its digest; parameters are worked out again when it is woken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self, TypeAlias

from tessera import wire
from tessera.errors import Malformed
from tessera.ids import RoundId
from tessera.learning.tables.arrays import Ids
from tessera.learning.tables.spec import DerivedMap
from tessera.plan import Plan
from tessera.protocols.two_server.params import Servers, TwoServerParams
from tessera.rounds import select
from tessera.rounds.messages import UnionOpened
from tessera.rounds.two_server.params import two_server_params
from tessera.wire.stored import ByDigest, Kept, Supplied

NAME: Final = "domain"


@dataclass(frozen=True, slots=True, eq=False)
class RoundDomain:
    """`rows` has the union by table, derived tables included; it is empty without one."""

    union: Kept[UnionOpened] | None
    rows: Mapping[str, Ids] = field(repr=False)
    params: TwoServerParams

    @classmethod
    def of(
        cls,
        plan: Plan,
        round_id: RoundId,
        servers: Servers,
        union: Kept[UnionOpened] | None,
        maps: Mapping[str, DerivedMap],
    ) -> Self:
        """`ConfigError`: the plan cannot work with this union."""
        if union is None:
            return cls(None, {}, two_server_params(plan, round_id, servers))
        rows = select.union_rows(plan, union.message, maps)
        return cls(union, rows, two_server_params(plan, round_id, servers, rows))


def check_stored(plan: Plan, union: Kept[UnionOpened] | None) -> None:
    """A stored state has a union if the plan narrows tables to one, and otherwise none."""
    if plan.narrows != (union is not None):
        raise Malformed("a stored state with a union where there is none, or without one")


FindDomain = Callable[[Kept[UnionOpened] | None], RoundDomain]


class _ByUnion(wire.Codec):
    """A domain by its union's digest; a round that is woken gives what makes it again."""

    least = 1
    _union: Final = wire.Maybe(ByDigest(UnionOpened))
    _made: Final = Supplied(NAME)

    def write(self, out: bytearray, value: RoundDomain) -> None:
        self._union.write(out, value.union)

    def read(self, source: wire.Reader) -> RoundDomain:
        make: FindDomain = self._made.read(source)
        return make(self._union.read(source))

    def references(self, value: RoundDomain) -> Iterator[Any]:
        return self._union.references(value.union)


StoredDomain: TypeAlias = Annotated[RoundDomain, _ByUnion()]
