"""What members of a group are given for an epoch, and the header that binds all of it.

Server and member build the header from the same things by the same function (`header_of`): a member
compares the one that it was assigned with the one that follows from what it has received itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from tessera import wire
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import RoundId
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.epochs.chain import EpochHeader, EpochKind
from tessera.protocols.epochs.messages import ComeBack
from tessera.rounds import select
from tessera.rounds.encode import UpdateLayout
from tessera.rounds.messages import Download, UnionOpened
from tessera.wire.stored import ByDigest, Kept

MaybeUnion = Annotated[Kept[UnionOpened] | None, wire.Maybe(ByDigest(UnionOpened))]


@wire.record(tag=0x0210)
@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodRecord:
    """What a period is: examples and rows are those up to `cutoff`, which has passed.

    In seconds since 1970; 0: all data there are, in a simulation, where everything is there from
    the beginning. It is named before anybody has fixed its data for the period: what appeared on
    Wednesday is not held by a member that fixed its data on Monday.
    """

    period: Annotated[int, wire.U32]
    cutoff: Annotated[int, wire.U64]


@wire.record(tag=0x0211)
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWork:
    """Server to member: an assignment, and everything that its header has digests of.

    The union is sent with the first update of its period; afterwards a member has it. In a union's
    epoch there is no base.
    """

    assignment: Annotated[bytes, wire.UpTo(wire.DEFAULT_CAP)] = field(repr=False)
    record: PeriodRecord
    union: Annotated[bytes, wire.PartUpTo(wire.DEFAULT_CAP)] = field(default=b"", repr=False)
    base: Annotated[bytes, wire.PartUpTo(wire.DEFAULT_CAP)] = field(default=b"", repr=False)


FROM_SERVER: Final = (EpochWork, ComeBack)


def header_of(
    plan: Plan,
    epoch: int,
    record: PeriodRecord,
    union: Kept[UnionOpened] | None,
    base: Kept[Download] | None,
    derived: Mapping[str, DerivedMap],
    counts: bytes = b"",
) -> EpochHeader:
    """Of the epoch with this number, by the agreement within the group; a union's without a base.

    Its inputs are the digests of all that what is sent may depend on, beside plan and group, which
    the chain names already.
    """
    inputs = {"record": wire.digest(record), **counts_input(counts)}
    if base is None:
        encoding = plan.union_encoding(RoundId(epoch))
        kind, ring, length = EpochKind.UNION, encoding.group, encoding.length
    else:
        rows = {} if union is None else select.union_rows(plan, union.message, derived)
        layout = UpdateLayout(plan, rows)
        kind, ring, length = EpochKind.UPDATE, layout.ring, layout.length
        inputs["base"] = base.digest
        if union is not None:
            inputs["union"] = union.digest
            inputs["maps"] = maps_digest(plan, rows, derived)
    return EpochHeader(
        period=record.period, kind=kind, epoch=epoch, ring=ring, length=length, inputs=inputs
    )


def counts_input(digest: bytes) -> dict[str, bytes]:
    """The counts by which negatives are drawn, before a union, and weighed, in every update."""
    return {"counts": digest} if digest else {}


def maps_digest(plan: Plan, union: Mapping[str, Ids], derived: Mapping[str, DerivedMap]) -> bytes:
    """Of the public maps to derived tables, as far as a union's rows reach."""
    parts = [
        part
        for t in plan.tables
        if t.derived_from
        for part in (t.name, derived[t.name].images(union[t.derived_from]).tobytes())
    ]
    return hashlib.sha256(encode_context(Label.EPOCH_MAPS, *parts)).digest()
