"""The same sums in the clear: for the plain schemes, and to compare the secure ones with.

Stages, inputs and outcomes are those of `protocols/secagg/`, so that a round does not care which of
the two adds up. Nothing is masked: the server sees every client's rows and words, and a row needs
no group. Without keys there are no shares and no unmasking; a dropout is a missing input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.group import Group, Words
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError
from tessera.ids import SERVER, ClientId, Party, RoundId, StageId, TableId
from tessera.protocols.machine import (
    Aborted,
    Closes,
    Coordinator,
    Follower,
    Left,
    Moved,
    Outbound,
    Steps,
)
from tessera.protocols.secagg.groups import distinct
from tessera.protocols.secagg.masking import Input, check_input
from tessera.protocols.secagg.messages import MAX_POSITION, MAX_ROWS, RevealedRows
from tessera.protocols.secagg.params import MAX_COHORT, MAX_TABLES, StageSpec
from tessera.protocols.secagg.phases import InputSum, StageSum, TableSum
from tessera.protocols.secagg.states import Reveal
from tessera.protocols.secagg.unmask import surviving
from tessera.wire.index_set import IndexSet, client_array
from tessera.wire.stored import ByDigest, Kept

STAGE: Final = StageId(0)

Rows = npt.NDArray[np.uint64]
Cut = Callable[[Sequence[Words]], list[Words]]


@wire.record(tag=0x0301)
@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRows:
    """Client to server: the rows it wants, by table."""

    round_id: Annotated[RoundId, wire.U64]
    sender: Annotated[ClientId, wire.U32]
    tables: Annotated[
        tuple[RevealedRows, ...], wire.Sequence(wire.Nested(RevealedRows), MAX_TABLES)
    ] = field(repr=False)


@wire.record(tag=0x0302)
@dataclass(frozen=True, slots=True, kw_only=True)
class PlainInput:
    """Client to server: its words as they are, packed to the group's bits."""

    round_id: Annotated[RoundId, wire.U64]
    sender: Annotated[ClientId, wire.U32]
    dense: Annotated[bytes, wire.UpTo(wire.DEFAULT_CAP)] = field(repr=False)
    tables: Annotated[tuple[bytes, ...], wire.Sequence(wire.UpTo(wire.DEFAULT_CAP), MAX_TABLES)] = (
        field(repr=False)
    )


@wire.record(tag=0x0303)
@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePlainInput:
    """Client to server: the same, where most dense words are zeros: the others, and their places.

    Sent where clients send their largest changes only, if it is the shorter of the two.
    """

    round_id: Annotated[RoundId, wire.U64]
    sender: Annotated[ClientId, wire.U32]
    places: Annotated[Rows, IndexSet(MAX_ROWS)] = field(repr=False)
    dense: Annotated[bytes, wire.UpTo(wire.DEFAULT_CAP)] = field(repr=False)
    tables: Annotated[tuple[bytes, ...], wire.Sequence(wire.UpTo(wire.DEFAULT_CAP), MAX_TABLES)] = (
        field(repr=False)
    )


FROM_CLIENT: Final = (PlainRows, PlainInput, SparsePlainInput)


def context_of(spec: StageSpec, round_id: RoundId) -> bytes:
    """A digest of a plain round's parameters."""
    body = bytearray()
    wire.Nested(StageSpec).write(body, spec)
    return hashlib.sha256(encode_context(Label.PLAIN_ROUND, round_id, bytes(body))).digest()


# --- a client -------------------------------------------------------------------------------------


@wire.record(tag=0x0380)
@dataclass(frozen=True, slots=True, kw_only=True)
class ChoosingRows:
    """Waits for its caller to name rows."""


@wire.record(tag=0x0381)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingWords:
    """Has named its rows, if there are tables; waits for its caller's words."""

    rows: Annotated[dict[TableId, Rows], wire.ByKey(wire.U16, IndexSet(MAX_ROWS), MAX_TABLES)] = (
        field(repr=False)
    )


@wire.record(tag=0x0382)
@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Has sent its words; nothing more is due."""


@dataclass(frozen=True, slots=True)
class PlainClientSetup:
    """`sparse`: most dense words will be zeros, and need not be sent."""

    spec: StageSpec
    round_id: RoundId
    party: ClientId
    sparse: bool = False

    @property
    def context(self) -> bytes:
        return context_of(self.spec, self.round_id)


class PlainClient(Follower[PlainClientSetup]):
    """A client's side: name the rows, then send the words. It hears nothing."""

    ROLE = "client of plain sums"
    STATES = (ChoosingRows, AwaitingWords, Submitted, Left)
    PHASES: ClassVar = {
        ChoosingRows: "Choosing",
        AwaitingWords: "Training",
        Submitted: "Finished",
    }
    FROM_SERVER = ()

    def __init__(self, setup: PlainClientSetup) -> None:
        super().__init__(setup, ChoosingRows() if setup.spec.tables else AwaitingWords(rows={}))

    @property
    def wants(self) -> StageSpec | None:
        return self.setup.spec if isinstance(self.state, ChoosingRows | AwaitingWords) else None

    @property
    def stage(self) -> StageId:
        return STAGE

    @property
    def awaits_rows(self) -> bool:
        return isinstance(self.state, ChoosingRows)

    @property
    def included(self) -> Mapping[TableId, Rows]:
        return self.state.rows if isinstance(self.state, AwaitingWords) else {}

    @property
    def included_among_named(self) -> Mapping[TableId, Rows]:
        """Which of the rows it named these are, by table: all."""
        return {t: np.arange(len(rows), dtype=np.uint64) for t, rows in self.included.items()}

    @property
    def knows_groups(self) -> bool:
        """Never: in the clear nobody is in a group, and nobody learns who survived."""
        return False

    def smallest_group(self, table: TableId) -> int:
        raise MisuseError("a plain sum has no groups")

    def knows_survivors(self, stage: StageId) -> bool:
        return False

    def submit(self, contribution: Reveal | Input) -> list[Outbound]:
        step = self.STEPS.get((type(self.state), type(contribution)))
        if step is None:
            raise MisuseError(f"{type(contribution).__name__} is not due in state {self.phase}")
        following, out = step(self, self.state, contribution)
        self._move(following, b"")
        return list(out)

    def _on_reveal(self, state: ChoosingRows, wish: Reveal) -> Moved:
        if wish.tables.keys() != {t.table for t in self.setup.spec.tables}:
            raise MisuseError("rows of other tables than the stage has")
        rows = {t: np.asarray(r, dtype=np.uint64) for t, r in wish.tables.items()}
        tables = tuple(RevealedRows(table=t, rows=rows[t]) for t in sorted(rows))
        message = PlainRows(round_id=self.round_id, sender=self.setup.party, tables=tables)
        return AwaitingWords(rows=rows), [Outbound.of(SERVER, message)]

    def _on_input(self, state: AwaitingWords, given: Input) -> Moved:
        check_input(self.setup.spec, given, state.rows)
        group, me = self.setup.spec.group, self.setup.party
        dense = b"" if given.dense is None else group.pack(given.dense)
        packed = tuple(group.pack(given.tables[t.table]) for t in self.setup.spec.tables)
        message = PlainInput(round_id=self.round_id, sender=me, dense=dense, tables=packed)
        sent = Outbound.of(SERVER, message)
        if self.setup.sparse and given.dense is not None and not group.limbs:
            places = np.flatnonzero(given.dense).astype(np.uint64)
            sparse = SparsePlainInput(
                round_id=self.round_id,
                sender=me,
                places=places,
                dense=group.pack(given.dense[places]),
                tables=packed,
            )
            sent = min(sent, Outbound.of(SERVER, sparse), key=lambda out: len(out.data))
        return Submitted(), [sent]


CLIENT_STEPS: Final[Steps] = {
    (ChoosingRows, Reveal): PlainClient._on_reveal,
    (AwaitingWords, Input): PlainClient._on_input,
}
PlainClient.STEPS = CLIENT_STEPS


# --- the server -----------------------------------------------------------------------------------

RowSets = Annotated[
    dict[ClientId, Kept[PlainRows]], wire.ByKey(wire.U32, ByDigest(PlainRows), MAX_COHORT)
]


@wire.record(tag=0x0390)
@dataclass(frozen=True, slots=True, kw_only=True)
class NamingRows:
    """Collects the rows that clients name."""

    answers: RowSets = field(default_factory=dict, repr=False)


@wire.record(tag=0x0391)
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingInputs:
    """Adds up the words as they come."""

    total: InputSum

    @property
    def answers(self) -> dict[ClientId, bool]:
        return self.total.answers


@wire.record(tag=0x0392)
@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """The sum is made."""

    total: StageSum


@dataclass(frozen=True, slots=True)
class PlainServerSetup:
    """`cut` makes of one client's words, dense and by table, what an honest one may send."""

    spec: StageSpec
    round_id: RoundId
    invited: Collection[ClientId]
    _: KW_ONLY
    needed: int
    cut: Cut | None = None

    party: ClassVar[Party] = SERVER

    @property
    def context(self) -> bytes:
        return context_of(self.spec, self.round_id)


class PlainServer(Coordinator[PlainServerSetup]):
    """The server's side: adds up what it is sent."""

    ROLE = "server of plain sums"
    STATES = (NamingRows, CollectingInputs, Summed, Aborted)
    PHASES: ClassVar = {
        NamingRows: "reveal",
        CollectingInputs: "collect",
        Summed: "done",
        Aborted: "aborted",
    }
    FROM_CLIENT = FROM_CLIENT

    def __init__(self, setup: PlainServerSetup) -> None:
        super().__init__(setup, NamingRows() if setup.spec.tables else _collecting(setup.spec, {}))

    def _set_up(self, setup: PlainServerSetup) -> None:
        super()._set_up(setup)
        self.invited = frozenset(setup.invited)

    @property
    def sums(self) -> tuple[StageSum, ...]:
        return (self.state.total,) if isinstance(self.state, Summed) else ()

    @property
    def revealed(self) -> dict[ClientId, dict[TableId, Rows]]:
        """The rows that clients have named so far, during the reveal phase."""
        if not isinstance(self.state, NamingRows):
            return {}
        return {
            c: {t.table: t.rows for t in kept.message.tables}
            for c, kept in self.state.answers.items()
        }

    def begin_stage(
        self, context: bytes = bytes(32), rows: Mapping[TableId, int] | None = None
    ) -> list[Outbound]:
        raise MisuseError("a plain sum has one stage")

    @property
    def expected(self) -> frozenset[Party]:
        state = self.state
        if not isinstance(state, NamingRows | CollectingInputs):
            return frozenset()
        return frozenset(self._due(state) - state.answers.keys())

    def _due(self, state: NamingRows | CollectingInputs) -> frozenset[ClientId]:
        if isinstance(state, CollectingInputs) and self.setup.spec.tables:
            return frozenset(next(iter(state.total.tables.values())).members)
        return self.invited

    def _check_due(self, sender: Party, message: Any) -> None:
        if sender not in self._due(self.state) or sender in self.state.answers:
            raise self._refuse(sender, f"sent {type(message).__name__}, which is not due")

    def _take_rows(self, state: NamingRows, kept: Kept[PlainRows]) -> Moved:
        message, sender = kept.message, kept.message.sender
        if [t.table for t in message.tables] != [t.table for t in self.setup.spec.tables]:
            raise self._refuse(sender, "named rows of other tables")
        if any(len(t.rows) and int(t.rows[-1]) >= MAX_POSITION for t in message.tables):
            raise self._refuse(sender, "named a row position over 2^40")
        state.answers[sender] = kept
        return state, []

    def _take_input(
        self, state: CollectingInputs, kept: Kept[PlainInput] | Kept[SparsePlainInput]
    ) -> Moved:
        message, sender, total = kept.message, kept.message.sender, state.total
        group, specs = self.setup.spec.group, self.setup.spec.tables
        shapes = [(len(total.tables[t.table].members[sender]), t.width) for t in specs]
        if len(message.tables) != len(shapes):
            raise self._refuse(sender, "sent other tables")
        if isinstance(message, SparsePlainInput):
            dense = self._placed(message, sender)
        else:
            dense = self._words(group, message.dense, (self.setup.spec.dense,), sender)
        rows = [
            self._words(group, data, shape, sender)
            for data, shape in zip(message.tables, shapes, strict=True)
        ]
        if self.setup.cut is not None:
            dense, *rows = self.setup.cut([dense, *rows])
        group.iadd(total.dense, dense)
        for spec, words in zip(specs, rows, strict=True):
            part = total.tables[spec.table]
            at = part.index(sender)
            part.words[at] = group.add(part.words[at], words)
        total.answers[sender] = True
        return state, []

    def _placed(self, message: SparsePlainInput, sender: ClientId) -> npt.NDArray[Any]:
        """All dense words, of which some were sent."""
        group, places = self.setup.spec.group, message.places
        if group.limbs or (len(places) and int(places[-1]) >= self.setup.spec.dense):
            raise self._refuse(sender, "sent words in places that the stage does not have")
        dense = group.zeros(self.setup.spec.dense)
        dense[places] = self._words(group, message.dense, (len(places),), sender)
        return dense

    def _words(
        self, group: Group, data: bytes, shape: tuple[int, ...], sender: ClientId
    ) -> npt.NDArray[Any]:
        try:
            return group.unpack(data, int(np.prod(shape))).reshape(*shape, *group.limbs)
        except ValueError as error:
            raise self._refuse(sender, "sent words of the wrong number or group") from error

    def _close_rows(self, state: NamingRows) -> Moved:
        self._need(len(state.answers))
        return _collecting(self.setup.spec, state.answers), []

    def _close_inputs(self, state: CollectingInputs) -> Moved:
        self._need(len(state.answers))
        survivors = client_array(state.answers)
        tables = {t: _of_those(part, state.answers) for t, part in state.total.tables.items()}
        total = StageSum(stage=STAGE, survivors=survivors, dense=state.total.dense, tables=tables)
        return Summed(total=total), []

    def _need(self, answered: int) -> None:
        if answered < self.setup.needed:
            raise self._too_few(answered, self.setup.needed)


def _collecting(stage: StageSpec, answers: Mapping[ClientId, Kept[PlainRows]]) -> CollectingInputs:
    group, tables = stage.group, {}
    for i, spec in enumerate(stage.tables):
        members = {c: answers[c].message.tables[i].rows for c in sorted(answers)}
        rows = distinct(np.concatenate([*members.values(), np.zeros(0, dtype=np.uint64)]))
        words = group.zeros((len(rows), spec.width))
        tables[spec.table] = TableSum(rows=rows, words=words, members=members, below_quorum=0)
    return CollectingInputs(total=InputSum(dense=group.zeros(stage.dense), tables=tables))


def _of_those(part: TableSum, answered: Mapping[ClientId, bool]) -> TableSum:
    """A table's sum without the rows of those only who named them and sent no words."""
    there = surviving(part, answered.keys()) > 0
    return replace(
        part,
        rows=part.rows[there],
        words=part.words[there],
        members={c: rows for c, rows in part.members.items() if c in answered},
    )


SERVER_STEPS: Final[Steps] = {
    (NamingRows, PlainRows): PlainServer._take_rows,
    (CollectingInputs, PlainInput): PlainServer._take_input,
    (CollectingInputs, SparsePlainInput): PlainServer._take_input,
}
SERVER_CLOSES: Final[Closes] = {
    NamingRows: PlainServer._close_rows,
    CollectingInputs: PlainServer._close_inputs,
}
PlainServer.STEPS, PlainServer.CLOSES = SERVER_STEPS, SERVER_CLOSES
