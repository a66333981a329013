"""A simulation of groups that wait, at rest: what a checkpoint has beside the model.

Vectors that wait to be summed were trained, and training is not repeated to the bit: they are
stored, and so is what training made of their clients' own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np

from tessera import wire
from tessera.crypto.group import Words
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.compression import Offer
from tessera.learning.tables.submodel import TablePart
from tessera.plan import Plan
from tessera.protocols.epochs.group import MAX_GROUP, FixedGroup
from tessera.rounds.epochs.group import Cutoffs, GroupEpochs, GroupProgress, MemoryVectors
from tessera.rounds.party import LocalState
from tessera.simulation.subcohort import SimulatedRows
from tessera.wire import stored
from tessera.wire.stored import MAX_STATE_BYTES, ClientSet, Context, Owner

MANY: Final = 1 << 31
_BYTES: Final = wire.UpTo(MAX_STATE_BYTES)
_WORDS: Final = wire.Words(MAX_STATE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAtRest:
    """A role's snapshot, and the messages that it names."""

    snapshot: Annotated[bytes, _BYTES] = field(repr=False)
    messages: Annotated[tuple[bytes, ...], wire.Sequence(_BYTES, MANY)] = field(repr=False)

    @classmethod
    def of(cls, role: Any) -> RoleAtRest:
        return cls(snapshot=role.snapshot(), messages=tuple(role.messages.values()))

    def woken(self, kind: type[Any], setup: Any) -> Any:
        return kind.wake(self.snapshot, self.by_digest, setup)

    @property
    def by_digest(self) -> dict[bytes, bytes]:
        return {wire.digest_of(data): data for data in self.messages}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAtRest:
    """One group: its server, and its clients where messages are real."""

    server: RoleAtRest
    clients: Annotated[
        Mapping[ClientId, RoleAtRest], wire.ByKey(wire.U32, wire.Nested(RoleAtRest), MAX_GROUP)
    ] = field(default_factory=dict)
    visits: Annotated[int, wire.U64] = 0


@wire.record(tag=0x0293)
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """A group whose vectors are summed in memory: where it is, and the sum of who has come."""

    at: GroupProgress
    there: Annotated[frozenset[ClientId], ClientSet(MAX_GROUP)]
    sum: Annotated[Words | None, wire.Maybe(_WORDS)] = field(repr=False)


def memory_at_rest(group: GroupEpochs) -> RoleAtRest:
    vectors = group.vectors
    assert isinstance(vectors, MemoryVectors)
    state = MemoryGroup(at=group.at, there=frozenset(vectors.there), sum=vectors.sum)
    return RoleAtRest(
        snapshot=stored.packed(_owner(group.group), state, frozenset(), b""),
        messages=tuple(stored.references(state).values()),
    )


def memory_woken(plan: Plan, group: FixedGroup, found: RoleAtRest, cutoffs: Cutoffs) -> GroupEpochs:
    context = Context(found.by_digest)
    state, _ = stored.unpacked(found.snapshot, _owner(group), (MemoryGroup,), context)
    header = None if state.at.open is None else state.at.open.header
    vectors = MemoryVectors(frozenset(group.members), header, set(state.there), state.sum)
    return GroupEpochs(plan, group, vectors, at=state.at, cutoffs=cutoffs)


def _owner(group: FixedGroup) -> Owner:
    number = RoundId(group.number)
    return Owner(role="group in memory", party=SERVER, round_id=number, params=group.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """Rows of a local table."""

    ids: Annotated[np.ndarray, _WORDS] = field(repr=False)
    values: Annotated[bytes, _BYTES] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRows:
    """What a client carries over if its epoch counts: own rows, and a residual."""

    round_id: Annotated[int, wire.U64]
    rows: Annotated[Mapping[str, StoredPart], wire.ByKey(wire.TEXT, wire.Nested(StoredPart), 64)]
    residual: Annotated[tuple[bytes, ...], wire.Sequence(_BYTES, 2)] = field(repr=False)
    """All that was due and what was sent of it, where the plan keeps the rest."""

    @classmethod
    def of(cls, local: LocalState) -> PendingRows | None:
        if (at := local.unsettled) is None:
            return None
        offer = None if local.residual is None else local.residual.offer
        arrays = () if offer is None else (offer.total, offer.sent)
        offered = local.rows.offered if isinstance(local.rows, SimulatedRows) else {}
        return cls(
            round_id=int(at),
            rows={
                name: StoredPart(ids=part.ids, values=np.asarray(part.values, "<f4").tobytes())
                for name, part in offered.items()
            },
            residual=tuple(np.asarray(each, "<i8").tobytes() for each in arrays),
        )

    def restore(self, local: LocalState) -> None:
        """Pending again, as it was."""
        if local.rows is not None and self.rows:
            rows = {}
            for name, part in self.rows.items():
                values = np.frombuffer(part.values, "<f4").reshape(len(part.ids), -1)
                rows[name] = TablePart(part.ids, values.astype(np.float32))
            local.rows.offer(RoundId(self.round_id), rows)
        if local.residual is not None and self.residual:
            total, sent = (np.frombuffer(each, "<i8") for each in self.residual)
            local.residual.offer = Offer(self.round_id, total, sent)


@wire.record(tag=0x0294)
@dataclass(frozen=True, slots=True, kw_only=True)
class FederationAtRest:
    """All groups that somebody was invited of, and what clients carry over."""

    next_round: Annotated[int, wire.U64]
    counted: Annotated[tuple[ClientId, ...], wire.Sequence(wire.U32, MANY)]
    groups: Annotated[
        Mapping[int, GroupAtRest], wire.ByKey(wire.U32, wire.Nested(GroupAtRest), MANY)
    ] = field(repr=False)
    pending: Annotated[
        Mapping[ClientId, PendingRows], wire.ByKey(wire.U32, wire.Nested(PendingRows), MANY)
    ] = field(repr=False)
