"""The ideal sum: no masks, no keys and no encodings, behind the interface of the real ones.

It is computed in the clear, as by the trusted party of a proof in the ideal world. Simulations of
many rounds take it for the rounds between those with real cryptography. `ClientRound` and
`ServerRound` are the real ones, and so are phases, groups and quorums: a client that leaves is
missing where it would be. What clients give lies in memory (`TrustedParty`), and messages carry no
bytes. So an ideal round changes the model as the real one would, to the bit, wherever the union's
encoding gives back exactly what went in. Its bytes and protocol seconds are not measured, and it
cannot be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Words
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, PeerError, RoundAborted
from tessera.ids import SERVER, ClientId, Party, RoundId, StageId, TableId
from tessera.learning.tables.submodel import Ids, distinct
from tessera.plan import Plan
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg import groups
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.messages import Advert
from tessera.protocols.secagg.params import SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.protocols.secagg.states import Reveal
from tessera.protocols.secagg.transcript import Received
from tessera.protocols.secagg.unmask import shrunk, surviving
from tessera.rounds import schemes
from tessera.rounds.messages import RowWords
from tessera.rounds.sums import ClientSetup, ServerSetup, Sum, SumClient, SumServer
from tessera.wire.index_set import client_array, client_set
from tessera.wire.stored import Kept


@dataclass(frozen=True, slots=True)
class Offered:
    """A client's part of the union, as it is."""

    ids: Ids = field(repr=False)


@dataclass(frozen=True, slots=True)
class SparseInput:
    """A whole model with counts, of which a client has few rows."""

    dense: Words = field(repr=False)
    tables: Mapping[str, RowWords]


T = TypeVar("T")
Given = Reveal | Input | Offered | SparseInput
NONE: Final = np.zeros(0, dtype=np.uint64)


class TrustedParty:
    """What a sum's ideal server and clients share: the phase, and what has been given in it."""

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        cohort: Iterable[ClientId],
        union: SecAggParams | None = None,
    ) -> None:
        """`union`: it is of a union that stands by itself, and not the plan's own."""
        self.plan, self.round_id = plan, round_id
        self.stages = plan.stages if union is None else union.stages
        self.masked = schemes.of(plan).masks or union is not None
        self.threat = plan.security.threat if union is None else union.threat
        self.needed = plan.least_survivors if union is None else union.min_survivors
        self.order = tuple(self._phases())
        self.at = 0
        self.participants = frozenset(cohort)
        self.given: dict[ClientId, Given] = {}  # on its way to the server
        self.members: dict[TableId, dict[ClientId, Ids]] = {}
        self.united = NONE  # the ids of the union, once they are opened

    def _phases(self) -> Iterable[tuple[str, StageId]]:
        """The phases of the real sum, in order."""
        if self.masked:
            yield from (("advertise", StageId(0)), ("share", StageId(0)))
        for stage, spec in enumerate(self.stages):
            if stage:
                yield "between", StageId(stage)
            if spec.tables:
                yield "reveal", StageId(stage)
            yield "collect", StageId(stage)
            if self.masked:
                if self.threat is Threat.ACTIVE:
                    yield "consistency", StageId(stage)
                yield "unmask", StageId(stage)
        yield "done", StageId(len(self.stages) - 1)

    @property
    def phase(self) -> str:
        return self.order[self.at][0]

    @property
    def stage(self) -> StageId:
        return self.order[self.at][1]

    @property
    def spec(self) -> StageSpec:
        return self.stages[self.stage]


class IdealRole:
    """A role whose messages carry nothing and are never lost."""

    def resend(self) -> list[Outbound]:
        return []

    def snapshot(self) -> bytes:
        raise MisuseError("an ideal round cannot be stored")

    @property
    def messages(self) -> Mapping[bytes, bytes]:
        raise MisuseError("an ideal round cannot be stored")


class IdealClient(IdealRole):
    """A client's side. It reads from the trusted party where the sum is."""

    def __init__(self, party: TrustedParty, me: ClientId) -> None:
        self._party, self._me = party, me
        self._named: Mapping[TableId, Ids] = {}

    def begin(self) -> list[Outbound]:
        """Its first word, where the first phase is not one to contribute to."""
        return self.receive(SERVER, b"")

    @property
    def phase(self) -> str:
        return self._party.phase

    @property
    def stage(self) -> StageId:
        return self._party.stage

    @property
    def wants(self) -> StageSpec | None:
        """The stage this client waits for its caller to contribute to, if it does."""
        party = self._party
        due = party.phase in ("reveal", "collect") and self._me in party.participants
        return party.spec if due and self._me not in party.given else None

    @property
    def awaits_rows(self) -> bool:
        return self.wants is not None and self._party.phase == "reveal"

    @property
    def knows_groups(self) -> bool:
        party = self._party
        return party.phase == "collect" and bool(party.members) and self.wants is not None

    @property
    def included_among_named(self) -> Mapping[TableId, Ids]:
        """Which of the rows it named have met the quorum, by table: their values are due now."""
        return {
            table: np.searchsorted(self._named[table], by_client[self._me]).astype(np.uint64)
            for table, by_client in self._party.members.items()
        }

    def smallest_group(self, table: TableId) -> int:
        """0 if a row that it named was left out. No member is: nobody lies in an ideal sum."""
        members = self._party.members[table]
        return len(members) if len(members[self._me]) == len(self._named[table]) else 0

    def knows_survivors(self, stage: StageId) -> bool:
        return self._party.stage > stage or self.phase == "done"

    def submit(self, contribution: Given) -> list[Outbound]:
        if self.wants is None:
            raise MisuseError(f"{type(contribution).__name__} is not due in phase {self.phase}")
        self._party.given[self._me] = contribution
        if isinstance(contribution, Reveal):
            self._named = contribution.tables
        return [_nudge(SERVER)]

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """The sum has gone on; where nothing is to be contributed, this client says it is there."""
        return [] if self.phase in ("reveal", "collect", "done") else [_nudge(SERVER)]


class IdealServer(IdealRole):
    """The server's side: who has answered decides who is in the sum, as it does in the real one."""

    def __init__(self, party: TrustedParty) -> None:
        self._party = party
        self._answers: dict[ClientId, Given | None] = {}
        self._tables: dict[TableId, TableSum] = {}
        self._total: StageSum | None = None
        self.sums: tuple[StageSum, ...] = ()

    @property
    def phase(self) -> str:
        return self._party.phase

    @property
    def expected(self) -> frozenset[Party]:
        waits = self.phase not in ("between", "done")
        return frozenset(self._party.participants - self._answers.keys()) if waits else frozenset()

    @property
    def revealed(self) -> dict[ClientId, dict[TableId, Ids]]:
        return {
            c: dict(given.tables)
            for c, given in sorted(self._answers.items())
            if isinstance(given, Reveal)
        }

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        due = sender in self._party.participants and sender not in self._answers
        if isinstance(sender, str) or not due:
            raise PeerError(
                "is not due", round_id=self._party.round_id, phase=self.phase, peer=sender
            )
        self._answers[sender] = self._party.given.pop(sender, None)
        return []

    def close_phase(self) -> list[Outbound]:
        party, needed = self._party, self._party.needed
        if len(self._answers) < needed:
            raise RoundAborted(
                round_id=party.round_id,
                phase=party.phase,
                answered=len(self._answers),
                needed=needed,
            )
        party.participants = frozenset(self._answers)
        if party.phase == "reveal":
            self._form_groups()
        if party.phase == "collect":
            self._add_up()
        if party.phase == ("unmask" if party.masked else "collect"):
            opened = self._opened()
            self.sums = (*self.sums, opened)
            # Who misses the unmasking is in the sum all the same.
            party.participants = client_set(opened.survivors)
        return self._go_on()

    def begin_stage(
        self, context: bytes = bytes(32), rows: Mapping[TableId, int] | None = None
    ) -> list[Outbound]:
        return self._go_on()

    def _go_on(self) -> list[Outbound]:
        self._answers = {}
        self._party.given.clear()
        self._party.at += 1
        if self.phase in ("between", "done"):
            return []
        return [_nudge(c) for c in sorted(self._party.participants)]

    def _form_groups(self) -> None:
        party = self._party
        answers = {c: g for c, g in sorted(self._answers.items()) if isinstance(g, Reveal)}
        for spec in party.spec.tables:
            revealed = {c: given.tables[spec.table] for c, given in answers.items()}
            if party.masked:
                least = party.plan.quorum
                quorums = {c: given.quorum or least for c, given in answers.items()}
                members = groups.form(revealed, quorums)
            else:
                members = revealed
            rows = distinct(np.concatenate([*members.values(), NONE]))
            wanted = distinct(np.concatenate([*revealed.values(), NONE]))
            self._tables[spec.table] = TableSum(
                rows=rows,
                words=party.spec.group.zeros((len(rows), spec.width)),
                members=members,
                below_quorum=len(wanted) - len(rows),
            )
            party.members[spec.table] = members

    def _add_up(self) -> None:
        party, group = self._party, self._party.spec.group
        answers = sorted(self._answers.items())
        offered = [given.ids for _, given in answers if isinstance(given, Offered)]
        if offered:
            party.united = distinct(np.concatenate([*offered, NONE]))
        dense = group.zeros(0 if offered else party.spec.dense)
        tables = self._tables if party.spec.tables else {}
        for client, given in answers:
            if isinstance(given, SparseInput):
                self._add_sparse(dense, given)
            elif isinstance(given, Input):
                assert given.dense is not None
                group.iadd(dense, given.dense)
                for table, part in tables.items():
                    at = part.index(client)
                    part.words[at] = group.add(part.words[at], given.tables[table])
        survivors = client_array(self._answers)
        self._total = StageSum(stage=party.stage, survivors=survivors, dense=dense, tables=tables)

    def _add_sparse(self, total: Words, given: SparseInput) -> None:
        plan, ring = self._party.plan, self._party.plan.ring
        start = plan.model.dense
        ends = np.concatenate([np.arange(start), [len(total) - 1]])
        total[ends] = ring.add(total[ends], given.dense)
        for t in plan.tables:
            stop = start + t.rows * (t.width + 1)
            rows, part = total[start:stop].reshape(t.rows, t.width + 1), given.tables[t.name]
            rows[part.ids] = ring.add(rows[part.ids], part.words)
            start = stop

    def _opened(self) -> StageSum:
        """The stage's sum as the real one opens it."""
        total, party = self._total, self._party
        assert total is not None
        alive = client_set(total.survivors)
        if party.masked:
            tables = {
                table: replace(part, shrunk=shrunk(part, alive, party.plan.quorum))
                for table, part in total.tables.items()
            }
        else:  # nobody is in a group: a row is there if somebody sent it
            tables = {}
            for table, part in total.tables.items():
                there = surviving(part, alive) > 0
                tables[table] = replace(part, rows=part.rows[there], words=part.words[there])
        return replace(total, tables=tables)


def _nudge(to: Party) -> Outbound:
    """Of the sum, and no more than that: a server tells by the kind whose message it is."""
    return signal(SERVER, Advert) if to == SERVER else Outbound(to, "Ideal", b"")


def signal(to: Party, kind: type[Any]) -> Outbound:
    """A message of this kind that carries nothing: what it would is in memory."""
    return Outbound(to, kind.__name__, wire.head_of(kind))


@dataclass(frozen=True, slots=True)
class InMemory(Outbound):
    """A message that is handed over as it is, and never encoded."""

    message: Kept[Any] = field(repr=False)

    @classmethod
    def of_one(cls, to: Party, message: Any) -> InMemory:
        kept = message if isinstance(message, Kept) else Kept.received(message, b"", b"")
        return cls(to, type(kept.message).__name__, b"", kept)


class Shared:
    """What is the same for everybody in an ideal round, made for the first who asks."""

    def __init__(self) -> None:
        self._made: tuple[object, Any] | None = None

    def once(self, key: object, make: Callable[[], T]) -> T:
        if self._made is None or (self._made[0] is not key and self._made[0] != key):
            self._made = (key, make())
        found: T = self._made[1]
        return found


class IdealSum(Shared, Sum):
    """The sum of a round in memory: phases and survivors are those of the plan's own sum."""

    federated = True

    def __init__(self, party: TrustedParty) -> None:
        super().__init__()
        self._party = party
        self.masks = party.masked

    def join(
        self, setup: ClientSetup, root: Entropy, last_round: RoundId | None
    ) -> tuple[SumClient, list[Outbound]]:
        client = IdealClient(self._party, setup.party)
        return client, client.begin()

    def serve(self, setup: ServerSetup, root: Entropy) -> SumServer:
        return IdealServer(self._party)

    def union_input(self, plan: Plan, round_id: RoundId, ids: Ids, coins: Secret) -> Offered:
        return Offered(ids)

    def whole_input(
        self, plan: Plan, dense: Words, rows: Mapping[str, RowWords], received: Received
    ) -> SparseInput:
        return SparseInput(dense, rows)

    def kept(self, record: T) -> Kept[T]:
        return Kept.received(record, b"", b"")  # never stored, and so not encoded

    def post(self, clients: Iterable[ClientId], message: Any) -> list[Outbound]:
        return posted(clients, message)

    def opened_ids(self, plan: Plan, round_id: RoundId, total: SumServer) -> tuple[Ids, int]:
        return self._party.united, 0


def posted(clients: Iterable[ClientId], message: Any) -> list[Outbound]:
    """One message to some clients, handed over as it is."""
    return [InMemory.of_one(c, message) for c in sorted(clients)]
