"""The same sums in the clear: for the plain schemes, and to compare the secure ones with.

Stages, inputs and outcomes are those of `protocols/secagg/`, so that a round does not care which of
the two adds up. Nothing is masked: the server sees every client's rows and words, and a row needs
no group. Without keys there are no shares and no unmasking; a dropout is a missing input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Group
from tessera.errors import MisuseError, PeerError, RoundAborted, ServerFault, WireError
from tessera.ids import SERVER, ClientId, RoundId, StageId, TableId
from tessera.protocols import wire
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg.masking import Input, check_input
from tessera.protocols.secagg.messages import MAX_POSITION, RevealedRows
from tessera.protocols.secagg.params import MAX_TABLES, StageSpec
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.protocols.secagg.states import Reveal

STAGE: Final = StageId(0)

Rows = npt.NDArray[np.uint64]


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


FROM_CLIENT: Final = (PlainRows, PlainInput)


class PlainClient:
    """A client's side: name the rows, then send the words."""

    def __init__(self, spec: StageSpec, round_id: RoundId, me: ClientId) -> None:
        self._spec, self._round_id, self._me = spec, round_id, me
        self._rows: dict[TableId, Rows] | None = None if spec.tables else {}
        self._sent = False

    @property
    def phase(self) -> str:
        if self._sent:
            return "Finished"
        return "Choosing" if self._rows is None else "Training"

    @property
    def wants(self) -> StageSpec | None:
        return None if self._sent else self._spec

    @property
    def stage(self) -> StageId:
        return STAGE

    @property
    def awaits_rows(self) -> bool:
        return self._rows is None

    @property
    def included(self) -> Mapping[TableId, Rows]:
        return self._rows or {}

    def receive(self, data: bytes) -> list[Outbound]:
        raise ServerFault(
            "sent a message that a plain sum does not know",
            round_id=self._round_id,
            phase=self.phase,
        )

    def submit(self, contribution: Reveal | Input) -> list[Outbound]:
        if isinstance(contribution, Reveal):
            if not self.awaits_rows or contribution.tables.keys() != {
                t.table for t in self._spec.tables
            }:
                raise MisuseError("rows are not due, or of other tables")
            rows = {t: np.asarray(r, dtype=np.uint64) for t, r in contribution.tables.items()}
            tables = tuple(RevealedRows(table=t, rows=rows[t]) for t in sorted(rows))
            message: Any = PlainRows(round_id=self._round_id, sender=self._me, tables=tables)
            out = [Outbound.of(SERVER, message)]
            self._rows = rows
            return out
        if self._rows is None or self._sent:
            raise MisuseError("an input is not due")
        check_input(self._spec, contribution, self._rows)
        group = self._spec.group
        dense = b"" if contribution.dense is None else group.pack(contribution.dense)
        packed = tuple(group.pack(contribution.tables[t.table]) for t in self._spec.tables)
        message = PlainInput(round_id=self._round_id, sender=self._me, dense=dense, tables=packed)
        out = [Outbound.of(SERVER, message)]
        self._sent = True
        return out


class PlainServer:
    """The server's side: adds up what it is sent."""

    def __init__(
        self, spec: StageSpec, round_id: RoundId, invited: Iterable[ClientId], *, needed: int
    ) -> None:
        self._spec, self._round_id, self._needed = spec, round_id, needed
        self.invited = frozenset(invited)
        self.phase = "reveal" if spec.tables else "collect"
        self.revealed: dict[ClientId, dict[TableId, Rows]] = {}
        self._inputs: dict[ClientId, tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]] = {}
        self.sums: tuple[StageSum, ...] = ()

    @property
    def expected(self) -> frozenset[ClientId]:
        if self.phase == "reveal":
            return self.invited - self.revealed.keys()
        if self.phase == "collect":
            expected = frozenset(self.revealed) if self._spec.tables else self.invited
            return expected - self._inputs.keys()
        return frozenset()

    def receive(self, sender: ClientId, data: bytes) -> None:
        if sender not in self.invited:
            raise self._refuse(sender, "is not in this cohort")
        try:
            message = wire.decode(data, expect=FROM_CLIENT)
        except WireError as error:
            raise self._refuse(sender, f"sent an invalid message: {error}") from error
        due = PlainRows if self.phase == "reveal" else PlainInput
        if message.sender != sender or message.round_id != self._round_id:
            raise self._refuse(sender, "sent a message of another client or round")
        if not isinstance(message, due) or sender not in self.expected:
            raise self._refuse(sender, f"sent {type(message).__name__}, which is not due")
        if isinstance(message, PlainRows):
            if [t.table for t in message.tables] != [t.table for t in self._spec.tables]:
                raise self._refuse(sender, "named rows of other tables")
            if any(len(t.rows) and int(t.rows[-1]) >= MAX_POSITION for t in message.tables):
                raise self._refuse(sender, "named a row position over 2^40")
            self.revealed[sender] = {t.table: t.rows for t in message.tables}
            return
        group = self._spec.group
        rows = self.revealed.get(sender, {})
        shapes = [(len(rows[t.table]), t.width) for t in self._spec.tables]
        if len(message.tables) != len(shapes):
            raise self._refuse(sender, "sent other tables")
        self._inputs[sender] = (
            self._unpacked(group, message.dense, (self._spec.dense,), sender),
            [
                self._unpacked(group, data, shape, sender)
                for data, shape in zip(message.tables, shapes, strict=True)
            ],
        )

    def close_phase(self) -> list[Outbound]:
        answered = self.revealed if self.phase == "reveal" else self._inputs
        if len(answered) < self._needed:
            name, self.phase = self.phase, "aborted"
            raise RoundAborted(
                round_id=self._round_id, phase=name, answered=len(answered), needed=self._needed
            )
        if self.phase == "reveal":
            self.phase = "collect"
            return []
        self.sums = (self._added(),)
        self.phase = "done"
        return []

    def _added(self) -> StageSum:
        group = self._spec.group
        dense = group.zeros(self._spec.dense)
        tables: dict[TableId, TableSum] = {}
        for words, _ in self._inputs.values():
            group.iadd(dense, words)
        for i, spec in enumerate(self._spec.tables):
            members = {c: self.revealed[c][spec.table] for c in sorted(self._inputs)}
            rows = np.unique(np.concatenate([*members.values(), np.zeros(0, dtype=np.uint64)]))
            total = group.zeros((len(rows), spec.width))
            for client, (_, by_table) in self._inputs.items():
                at = np.searchsorted(rows, members[client])
                total[at] = group.add(total[at], by_table[i])
            tables[spec.table] = TableSum(
                rows=rows, words=total, members=members, below_quorum=0, shrunk=0
            )
        survivors = np.array(sorted(self._inputs), dtype=np.uint64)
        return StageSum(stage=STAGE, survivors=survivors, dense=dense, tables=tables)

    def _unpacked(
        self, group: Group, data: bytes, shape: tuple[int, ...], sender: ClientId
    ) -> npt.NDArray[Any]:
        try:
            return group.unpack(data, int(np.prod(shape))).reshape(*shape, *group.limbs)
        except ValueError as error:
            raise self._refuse(sender, "sent words of the wrong number or group") from error

    def _refuse(self, peer: ClientId, reason: str) -> PeerError:
        return PeerError(reason, round_id=self._round_id, phase=self.phase, peer=peer)
