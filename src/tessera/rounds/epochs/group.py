"""GroupEpochs: one fixed group from the server's side, epoch after epoch.

A union opens a period, then updates follow, each from a base that is fixed when the first member
asks for it: the dense part and the union's rows as the model has them at that moment. When all
members have delivered, the sum opens; a union that does not decode is asked for again under another
salt, a sum that honest members cannot have reached is not merged, and after `retire_after` of
either in a row the group is retired: its members stop with these rows for good.

How the vectors come to a sum is one of two: under masks (`CarriedVectors`, the protocol's own role)
or in the memory of a simulation (`MemoryVectors`), as the trusted party of a proof would do it.

What members of a group are given for an epoch, and the header that binds all of it.

Server and member build the header from the same things by the same function (`header_of`): a member
compares the one that it was assigned with the one that follows from what it has received itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Protocol

from tessera import wire
from tessera.crypto.group import Words
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import Ids
from tessera.learning.tables.table import DerivedMap
from tessera.plan import Plan
from tessera.protocols.epochs.group import FixedGroup
from tessera.protocols.epochs.messages import ComeBack, EpochHeader, EpochKind
from tessera.protocols.epochs.server import GroupServer
from tessera.protocols.machine import REASON
from tessera.rounds import encode, select
from tessera.rounds.delivery import SentModel
from tessera.rounds.encode import UpdateLayout
from tessera.rounds.messages import Download, RoundResult, UnionOpened
from tessera.rounds.party import ServerModel
from tessera.rounds.resolve import resolve
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


UNDECODED: Final = "its unions do not decode"
MAX_EPOCHS: Final = 1 << 24
OUTSIDE: Final = "its sums are not those of honest members"

Cutoffs = Callable[[int], int | None]
"""The cut-off of a period's data, by the period's number, in seconds since 1970. None: none has
passed yet that is later than the last one, and the period does not begin."""


def all_data(period: int) -> int | None:
    """No cut-off: everything is there from the beginning."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEpoch:
    """An epoch that is fixed: its header, and what members are given for it."""

    header: EpochHeader
    record: PeriodRecord
    union: MaybeUnion = field(repr=False)
    base: Annotated[Kept[Download] | None, wire.Maybe(ByDigest(Download))] = field(repr=False)
    """None in a union's epoch."""
    round_id: Annotated[RoundId, wire.U64]
    """In which it was fixed."""


class Vectors(Protocol):
    """How the vectors of a group come to a sum."""

    def fix(self, header: EpochHeader) -> None:
        """The next epoch."""

    @property
    def missing(self) -> frozenset[ClientId]:
        """Whose vectors have not come."""

    @property
    def total(self) -> Words | None:
        """The sum, once all have come."""

    def retire(self, reason: str) -> None:
        """Use and keep nothing of an open epoch."""


@dataclass(slots=True)
class MemoryVectors:
    """In the memory of a simulation; only whole sums are ever read."""

    members: frozenset[ClientId]
    header: EpochHeader | None = None
    there: set[ClientId] = field(default_factory=set)
    sum: Words | None = field(default=None, repr=False)

    def fix(self, header: EpochHeader) -> None:
        self.header, self.there = header, set()
        self.sum = header.ring.zeros(header.length)

    def add(self, member: ClientId, words: Words) -> None:
        """One member's vector; once."""
        if self.header is None or self.sum is None or member not in self.missing:
            raise MisuseError(f"no vector of client {member} is due")
        self.header.ring.iadd(self.sum, words)
        self.there.add(member)

    @property
    def missing(self) -> frozenset[ClientId]:
        return self.members - self.there

    @property
    def total(self) -> Words | None:
        return self.sum if self.header is not None and not self.missing else None

    def retire(self, reason: str) -> None:
        self.header = self.sum = None


class CarriedVectors:
    """Under masks, by messages."""

    def __init__(self, role: GroupServer) -> None:
        self.role = role

    def fix(self, header: EpochHeader) -> None:
        self.role.fix(header)

    @property
    def missing(self) -> frozenset[ClientId]:
        return frozenset(c for c in self.role.expected if not isinstance(c, str))

    @property
    def total(self) -> Words | None:
        opened = self.role.opened
        return None if opened is None else opened.total

    def retire(self, reason: str) -> None:
        self.role.retire(reason)


@dataclass(slots=True, kw_only=True)
class GroupProgress:
    """Where a group is; `number` counts its epochs, `updates` those of updates in this period."""

    number: Annotated[int, wire.U64] = 0
    period: Annotated[int, wire.U32] = 1
    cutoff: Annotated[int | None, wire.Maybe(wire.U64)] = None
    """Of the data of this period; None before it is named, with the first epoch."""
    updates: Annotated[int, wire.U32] = 0
    failures: Annotated[int, wire.U32] = 0
    """In a row: unions that did not decode, or sums that were out of bounds."""
    union: MaybeUnion = field(default=None, repr=False)
    union_epoch: Annotated[int, wire.U64] = 0
    """In which it was summed: who has delivered a later one has it."""
    history: Annotated[tuple[int, ...], wire.Sequence(wire.VARINT, MAX_EPOCHS)] = ()
    """Of every epoch that has opened: twice its period, and 1 more if it was one of updates."""
    open: Annotated[OpenEpoch | None, wire.Maybe(wire.Nested(OpenEpoch))] = None
    retired: Annotated[str, REASON] = ""


class GroupEpochs:
    """One group: which epoch is open, what members are given, and what came of it."""

    def __init__(
        self,
        plan: Plan,
        group: FixedGroup,
        vectors: Vectors,
        at: GroupProgress | None = None,
        cutoffs: Cutoffs = all_data,
    ) -> None:
        """`plan` is the federation's; the agreement within the group follows from it."""
        self.plan, self.group, self.vectors = plan.group_plan, group, vectors
        self.at, self._cutoffs = at or GroupProgress(), cutoffs
        agreed = resolve(self.plan)
        self._noise, self._rows = agreed.noise, agreed.rows

    # --- what is due ----------------------------------------------------------------------------

    @property
    def next_kind(self) -> EpochKind:
        """Of the epoch that is open, or will be."""
        if self.at.open is not None:
            return self.at.open.header.kind
        return EpochKind.UNION if self._needs_union else EpochKind.UPDATE

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that is open, or will be."""
        return len(self.at.history) + 1

    @property
    def _needs_union(self) -> bool:
        return self._rows.union and self.at.union is None

    @property
    def due(self) -> frozenset[ClientId]:
        """Members that have not delivered the epoch that is open, or will be."""
        if self.at.retired:
            return frozenset()
        if self.at.open is None:
            return frozenset(self.group.members)
        return self.vectors.missing

    def met_by(self, member: ClientId) -> Iterator[tuple[int, int, EpochKind]]:
        """(number, period, kind) of every epoch that this member has delivered."""
        for number, code in enumerate(self.at.history, 1):
            yield number, code // 2, EpochKind.UPDATE if code % 2 else EpochKind.UNION
        if self.at.open is not None and member not in self.due:
            header = self.at.open.header
            yield header.epoch, header.period, header.kind

    @property
    def begun(self) -> bool:
        """Whether somebody has delivered already."""
        return self.at.open is not None and len(self.due) < self.group.size

    def opened(self, model: ServerModel, round_id: RoundId) -> OpenEpoch:
        """The epoch that is open; if none is, the next is fixed now, from this model."""
        if self.at.retired:
            raise MisuseError(f"group {self.group.number} is retired: {self.at.retired}")
        if self.at.open is None:
            self.at.open = self._fixed(model, round_id)
            self.vectors.fix(self.at.open.header)
        return self.at.open

    @property
    def record(self) -> PeriodRecord:
        """Of the period under way: named with its first epoch, and the same to its end."""
        if self.at.cutoff is None:
            self.at.cutoff = self._cutoffs(self.at.period)
        if self.at.cutoff is None:
            raise MisuseError(f"group {self.group.number}: period {self.at.period} has no cut-off")
        return PeriodRecord(period=self.at.period, cutoff=self.at.cutoff)

    def _fixed(self, model: ServerModel, round_id: RoundId) -> OpenEpoch:
        at, plan = self.at, self.plan
        record, base = self.record, None
        if not self._needs_union:
            rows = self._union_rows(model)
            sent = SentModel(plan, model.dense, model.tables, lambda: rows)
            base = Kept.of(sent.download(round_id, rows or None))
        header = header_of(plan, at.number + 1, record, at.union, base, model.derived, model.counts)
        return OpenEpoch(header=header, record=record, union=at.union, base=base, round_id=round_id)

    def _layout(self, model: ServerModel) -> UpdateLayout:
        return UpdateLayout(self.plan, self._union_rows(model))

    def _union_rows(self, model: ServerModel) -> Mapping[str, Ids]:
        if self.at.union is None:
            return {}
        return select.union_rows(self.plan, self.at.union.message, model.derived)

    # --- what came of it ------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether everybody has delivered, and the sum waits to be taken."""
        return not self.at.retired and self.at.open is not None and self.vectors.total is not None

    def take(self, model: ServerModel, noise: Secret) -> RoundResult | None:
        """What a full epoch came to: means, or None of a union. Once: the next may be fixed then.

        What a trusted server adds to a sum follows from `noise`.
        """
        total, at = self.vectors.total, self.at
        if total is None or at.open is None:
            raise MisuseError(f"group {self.group.number}: not all members have delivered")
        header, at.open, at.number = at.open.header, None, at.number + 1
        at.history = (*at.history, 2 * header.period + (header.kind is EpochKind.UPDATE))
        if header.kind is EpochKind.UNION:
            self._take_union(total, header)
            return None
        layout = self._layout(model)
        opened = layout.summed(total, self.group.members)
        opened = self._noise.on_sum(opened, (noise,), RoundId(header.epoch))
        result = encode.means(self.plan, opened, union=layout.union)
        if result.out_of_bounds:
            self._failed(OUTSIDE)
            return replace(result, tables={})
        at.failures = 0
        at.updates += 1
        if self.plan.groups.is_over(at.updates):
            self._begin_period()
        return result

    def _begin_period(self) -> None:
        """The next period, if a later cut-off has passed; or else after a later update."""
        at = self.at
        if (cutoff := self._cutoffs(at.period + 1)) is not None:
            at.period, at.cutoff, at.updates, at.union = at.period + 1, cutoff, 0, None

    def _take_union(self, total: Words, header: EpochHeader) -> None:
        decoded = self.plan.union_encoding(RoundId(header.epoch)).decode(total)
        if decoded.residual:
            self._failed(UNDECODED)
            return
        message = select.opened_union(self.plan, RoundId(header.epoch), decoded.ids)
        self.at.union, self.at.failures = Kept.of(message), 0
        self.at.union_epoch = header.epoch

    def _failed(self, reason: str) -> None:
        self.at.failures += 1
        if self.at.failures >= self.plan.groups.retire_after:
            self.retire(reason)

    def retire(self, reason: str) -> None:
        """For good: nothing of an open epoch is used, and nobody is regrouped."""
        self.vectors.retire(reason)
        self.at.retired, self.at.open = reason, None
