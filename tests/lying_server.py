"""A lying server before the shipped client of a fixed group, and what its lies tell it.

The server is a script: it makes work of whatever it likes, speaks encoded messages, and adds up
what it is sent. Members are shipped roles over a small model with a vector of each member's own
(`Taste`): a member that has trained less often moves its rows less, and one that was given another
model moves them otherwise. Every row here has one holder, so that an opened sum shows each member's
values row by row, and the only question is whose they are: B = 1 / 10.

A rule is off if the lines that enforce it are removed (`off`); an attack says which they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pytest

from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy, SystemEntropy
from tessera.crypto.keys import SigningKey
from tessera.crypto.prg import Label
from tessera.errors import ServerFault
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.averaging import TableMean
from tessera.learning.softmax import SampledSoftmax
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart, TableUpdate
from tessera.learning.tables.table import DenseTable, DerivedMap, TableSpec
from tessera.plan import GroupsPlan, ModelPlan, Plan, Scheme, TablePlan, UnionPlan
from tessera.privacy.index.period import MemoryPeriods, PeriodStore
from tessera.protocols.epochs import member, messages
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.epochs.member import GroupMember
from tessera.protocols.epochs.messages import (
    Assignment,
    Delivered,
    Delivery,
    DeliveryCertificate,
)
from tessera.protocols.union.choice import EncodingChoice
from tessera.rounds import encode
from tessera.rounds.epochs import group
from tessera.rounds.epochs.client import EpochClient, EpochClientSetup
from tessera.rounds.epochs.group import EpochWork, GroupEpochs, MemoryVectors, OpenEpoch
from tessera.rounds.party import LocalState, ServerModel

SIZE, EACH, WIDTH = 10, 7, 4
ROWS: Final = SIZE * EACH
TABLE, KINDS = "things", "kinds"
RATE: Final = 0.6
B: Final = 1 / SIZE
SURE: Final = 3.0902  # of one side of a normal distribution 99.9 % are below

Floats = npt.NDArray[np.float32]


def plan_of() -> Plan:
    return Plan(
        scheme=Scheme.SECURE_SUBMODEL,
        cohort=SIZE,
        federation="attacked",
        tables=(
            TablePlan(name=TABLE, rows=ROWS, width=WIDTH),
            TablePlan(name=KINDS, rows=ROWS, width=1, derived_from=TABLE),
        ),
        model=ModelPlan(dense=1),
        groups=GroupsPlan(size=SIZE, period=1),
        union=UnionPlan(max_rows=2 * EACH, encoding=EncodingChoice.SUM_TABLE),
    )


def model_of(plan: Plan) -> ServerModel:
    """Rows that have something in common, as those of a model that was trained for a while."""
    rng = np.random.default_rng(1)
    rows = 0.5 + 0.15 * rng.normal(size=(ROWS, WIDTH))
    tables = {TABLE: rows, KINDS: np.zeros((ROWS, 1))}
    return ServerModel(
        plan,
        dense=np.zeros(1, np.float32),
        tables={n: DenseTable.from_array(n, v.astype(np.float32)) for n, v in tables.items()},
        derived=kinds_by(np.arange(ROWS)),
        counts=weighed_by(np.ones(ROWS)).counts_digest,
    )


def weighed_by(counts: npt.NDArray[np.float64]) -> SampledSoftmax:
    """What public counts make of rows: how much each stands for."""
    return SampledSoftmax(TABLE, target=TABLE, negatives=1, weights=counts)


def kinds_by(images: npt.NDArray[np.integer[Any]]) -> dict[str, DerivedMap]:
    """A public map from things to kinds."""
    things = TableSpec(name=TABLE, size=ROWS, width=WIDTH)
    kinds = TableSpec(name=KINDS, size=ROWS, width=1)
    return {KINDS: DerivedMap(things, kinds, images)}


# --- members --------------------------------------------------------------------------------------


class Taste:
    """A member's own vector, which never leaves it: pending until the epoch is certified."""

    def __init__(self, vector: Floats) -> None:
        self.vector, self._offered = vector, vector
        self.pending: RoundId | None = None

    def offer(self, round_id: RoundId, rows: Mapping[str, TablePart]) -> None:
        self.pending, self._offered = round_id, rows["taste"].values[0]

    def settle(self, *, counted: bool) -> None:
        if counted:
            self.vector = self._offered
        self.pending = None

    def trained(
        self,
        submodel: Submodel,
        order: npt.NDArray[np.intp],
        examples: npt.NDArray[np.int64],
        weighed: SampledSoftmax,
    ) -> tuple[ModelUpdate, Floats]:
        """Logistic factors, one step. Dot products are added up in this order of columns, and a
        row's score is raised by what it stands for beside one of equal counts."""
        ids = submodel.trained[TABLE]
        rows, own = submodel.tables[TABLE].of(ids), self.vector
        score = np.zeros(len(ids), np.float32)
        for column in order:
            score += rows[:, column] * own[column]
        stands_for = weighed.log_weights(ROWS, ids, np.zeros(0, np.uint64))
        score += stands_for - np.float32(np.log(ROWS))
        error = np.float32(RATE) / (1 + np.exp(score))
        moves = error[:, None] * own
        kinds = submodel.trained[KINDS]
        tables = {
            TABLE: TableUpdate(moves, examples[: len(ids)]),
            KINDS: TableUpdate(np.full((len(kinds), 1), 0.1), np.ones(len(kinds), np.int64)),
        }
        update = ModelUpdate(np.zeros(1), len(ids), tables)
        return update, own + (error[:, None] * rows).mean(axis=0)


class Device:
    """A client as it is shipped, with its data, and all that a disk has of it."""

    def __init__(self, plan: Plan, group: FixedGroup, me: ClientId, rows: Any, seed: int) -> None:
        vector = np.random.default_rng([seed, int(me)]).normal(size=WIDTH)
        self.taste = Taste((0.1 * vector / np.linalg.norm(vector)).astype(np.float32))
        self.setup = EpochClientSetup(
            plan=plan,
            group=group,
            party=me,
            key=signing_key(me),
            local=LocalState(
                real={TABLE: rows},
                periods=MemoryPeriods(),
                derived=kinds_by(np.arange(ROWS)),
                rows=self.taste,
            ),
            entropy=ScriptedEntropy(b"device %d of %d" % (me, seed)),
        )
        self.given_counts(np.ones(ROWS))
        self.role, (deposit,) = EpochClient.join(self.setup)
        self.joined = deposit.data
        self.order = np.arange(WIDTH)
        self.examples = np.ones(EACH, np.int64)  # of each of its rows

    def given_counts(self, counts: npt.NDArray[np.float64]) -> None:
        """These are the public counts, as far as it knows."""
        self.weighed = weighed_by(counts)
        self.setup.local.counts = self.weighed.counts_digest

    def with_periods(self, periods: PeriodStore) -> Self:
        """The same device, before it joined, with another store of its periods."""
        other = deepcopy(self)
        other.setup = replace(other.setup, local=replace(other.setup.local, periods=periods))
        other.role, (deposit,) = EpochClient.join(other.setup)
        assert deposit.data == other.joined
        return other

    def answer(self, data: bytes) -> Delivery:
        """What it sends after it was given this; `ServerFault` if it leaves."""
        out = self.role.receive(SERVER, data)
        if (submodel := self.role.pending) is not None:
            update, own = self.taste.trained(submodel, self.order, self.examples, self.weighed)
            rows = {"taste": TablePart(np.zeros(1, np.uint64), own[None])}
            self.setup.local.keep_pending(RoundId(self.role.base_round), rows)
            out = self.role.supply(update)
        (sent,) = out
        delivery: Delivery = wire.decode(sent.data)
        return delivery

    def restored(self) -> Self:
        """The same device from a copy of its disk: what it draws from now on is not the same."""
        back = deepcopy(self)
        back.setup = replace(back.setup, entropy=ScriptedEntropy(b"restored"))
        stored = back.role.snapshot(), dict(back.role.messages)
        back.role = EpochClient.wake(*stored, back.setup)
        back.order = back.order[::-1]
        return back


def signing_key(client: int) -> SigningKey:
    return SigningKey.from_secret(ScriptedEntropy(b"attacked").secret(Label.IDENTITY, client))


# --- the server -----------------------------------------------------------------------------------


def work_of(assigned: Assignment, epoch: OpenEpoch) -> bytes:
    """What a member is sent."""
    base, union = epoch.base, epoch.union
    return wire.encode(
        EpochWork(
            assignment=wire.encode(assigned),
            record=epoch.record,
            union=b"" if base is None or union is None else union.data,
            base=b"" if base is None else base.data,
        )
    )


class LyingServer:
    """One group at a server that says what it likes; what it opens is by rows, in their order."""

    def __init__(self, seed: int) -> None:
        self.plan = plan_of()
        self.model = model_of(self.plan)
        clients = [ClientId(c) for c in np.random.default_rng(seed).permutation(SIZE).tolist()]
        rows = np.random.default_rng([seed, 1]).permutation(ROWS).reshape(SIZE, EACH)
        self.group = FixedGroup(
            federation=self.plan.federation,
            plan=self.plan.lasting_digest,
            number=seed,
            snapshot=1,
            snapshot_digest=b"s" * 32,
            values=(b"1" * 32, b"2" * 32),
            beacon=b"b" * 32,
            leaves=tuple(
                Leaf(
                    federation=self.plan.federation,
                    client=client,
                    key=signing_key(client).public,
                    serial=int(client),
                )
                for client in clients
            ),
        )
        self.rows = {c: np.sort(rows[k]).astype(np.uint64) for k, c in enumerate(clients)}
        self.devices = {c: Device(self.plan, self.group, c, self.rows[c], seed) for c in clients}
        vectors = MemoryVectors(frozenset(clients))
        self.epochs = GroupEpochs(self.plan, self.group, vectors)
        self.said: dict[ClientId, Delivered] = {
            c: wire.decode(device.joined).statement for c, device in self.devices.items()
        }
        self.visits = 0
        self.opened: Mapping[str, TableMean] = {}

    @classmethod
    def after(cls, seed: int, epochs: int) -> Self:
        """After so many honest epochs, of which the first is the union."""
        server = cls(seed)
        for _ in range(epochs):
            server.epoch()
        return server

    def copy(self) -> Self:
        """Another server before the same members, at the same moment."""
        return deepcopy(self)

    @property
    def certificate(self) -> DeliveryCertificate:
        """What each member has said last."""
        return DeliveryCertificate(entries=tuple(self.said[c] for c in self.group.members))

    def fixed(self, model: ServerModel | None = None) -> OpenEpoch:
        """The next epoch, over this model."""
        return self.epochs._fixed(model or self.model, RoundId(self.epochs.at.number))

    def begin_period(self) -> None:
        """The next epoch is the union of another period."""
        at = self.epochs.at
        at.period, at.union = at.period + 1, None

    def ask(
        self,
        client: ClientId,
        epoch: OpenEpoch,
        keys: DeliveryCertificate | None = None,
        own: Delivered | None = None,
    ) -> Delivery:
        """One member's delivery of whatever it is told; `ServerFault` if it refuses.

        `own` is its own delivery of this epoch, which an honest server shows.
        """
        self.visits += 1
        assigned = Assignment(
            visit=self.visits,
            header=epoch.header,
            certificate=keys or self.certificate,
            own=own,
        )
        return self.devices[client].answer(work_of(assigned, epoch))

    def collect(self, told: Mapping[ClientId, OpenEpoch]) -> Floats | None:
        """An epoch in which these members are told this; what opens, if anything does."""
        deliveries = {client: self.ask(client, epoch) for client, epoch in told.items()}
        self.said |= {client: delivery.statement for client, delivery in deliveries.items()}
        return self.sum(deliveries.values(), next(iter(told.values())))

    def sum(self, deliveries: Iterable[Delivery], epoch: OpenEpoch) -> Floats | None:
        """What every row has moved by; None if masks do not cancel, and of a union."""
        header = epoch.header
        total = header.ring.zeros(header.length)
        for delivery in deliveries:
            header.ring.add_packed(total, delivery.vector)
        self.epochs.at.number = header.epoch
        if epoch.base is None:
            self.epochs._take_union(total, header)
            return None
        return self.moves(total, epoch)

    def moves(self, total: Any, epoch: OpenEpoch) -> Floats | None:
        """Words of an update, by rows."""
        layout = self.epochs._layout(self.model)
        result = encode.means(
            self.plan.group_plan, layout.summed(total, self.group.members), union=layout.union
        )
        self.opened = result.tables
        found = result.tables[TABLE]
        within = not result.out_of_bounds and len(found.ids) == ROWS
        return found.mean.astype(np.float32) if within else None

    def epoch(self) -> Floats | None:
        """An honest one."""
        return self.collect(dict.fromkeys(self.group.members, self.fixed()))


# --- rules ----------------------------------------------------------------------------------------


def _chain_of_one(previous: bytes, group: FixedGroup, header: Any, certificate: bytes) -> Any:
    return messages.link(b"", group, header, certificate)


@dataclass(frozen=True, slots=True)
class Line:
    """A line that enforces a rule, and what is in its place while it is off."""

    where: Any
    name: str
    instead: Any


NUMBER: Final = Line(member, "follows", lambda last, header: True)
CERTIFICATE: Final = Line(DeliveryCertificate, "fault", lambda *given: "")
CHAIN: Final = Line(member, "link", _chain_of_one)
MAPS: Final = Line(group, "maps_digest", lambda plan, union, derived: bytes(32))
COUNTS: Final = Line(group, "counts_input", lambda digest: {})
INPUTS: Final = Line(messages, "received", lambda header: [])
MEMORY: Final = Line(GroupMember, "_check_memory", lambda self, message: None)
COINS: Final = Line(GroupMember, "coins", property(lambda self: SystemEntropy()))
SIGNATURE: Final = Line(Delivered, "is_signed", lambda self, group: True)


def off(patch: pytest.MonkeyPatch, lines: Iterable[Line]) -> None:
    for line in lines:
        patch.setattr(line.where, line.name, line.instead)


# --- what comes of it -----------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Guesses at the holders of rows; those about one member are right or wrong together."""

    right: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    closed: int = 0
    """Sums that did not open."""

    def add(self, guessed: npt.ArrayLike, held: npt.ArrayLike) -> None:
        """Rows that are taken for a member's, and those that it holds."""
        self.right.append(int(np.isin(guessed, held).sum()))
        self.rows.append(np.size(guessed))

    @property
    def rate(self) -> float:
        return sum(self.right) / sum(self.rows)

    @property
    def above(self) -> float:
        """What the probability of a right guess is above, with 99.9 %; members are clusters."""
        right, rows = np.array(self.right, float), np.array(self.rows, float)
        spread = math.sqrt(((right - self.rate * rows) ** 2).sum()) / rows.sum()
        return self.rate - SURE * spread

    def shown(self, attack: str, rule: str) -> None:
        """The line that campaigns print."""
        print(
            f"{attack}, {rule}: {100 * self.rate:.1f} % (above {100 * self.above:.1f} %) of "
            f"{sum(self.rows)} rows of {len(self.rows)} members"
            + (f"; refused {len(self.refused)} times: {self.refused[0]}" if self.refused else "")
            + (f"; {self.closed} sums did not open" if self.closed else "")
        )


Attack = Callable[[LyingServer, ClientId], Floats | None]
"""Of one victim: how far each row has moved in the sum that the lie is about."""
Reading = Callable[[Floats], npt.NDArray[Any]]
"""Which rows are the victim's, from how rows have moved."""


def moved_least(moves: Floats) -> npt.NDArray[Any]:
    return np.argsort(np.linalg.norm(moves, axis=1))[:EACH]


def moved(moves: Floats) -> npt.NDArray[Any]:
    return np.flatnonzero(moves.any(axis=1))


def moved_most(moves: Floats) -> npt.NDArray[Any]:
    return np.argsort(-np.linalg.norm(moves, axis=1))[:EACH]


def attacked(
    attack: Attack, *, groups: int, epochs: int, victims: int = SIZE, reading: Reading = moved_least
) -> Tally:
    """Every member of every group as the victim, after so many honest epochs.

    Where nothing opens, or a member refuses, the server guesses by chance.
    """
    tally, rng = Tally(), np.random.default_rng(7)
    for seed in range(groups):
        before = LyingServer.after(seed, epochs)
        for victim in sorted(before.group.members)[:victims]:
            server, moves = before.copy(), None
            try:
                moves = attack(server, victim)
                tally.closed += moves is None
            except ServerFault as fault:
                tally.refused.append(fault.reason)
            guessed = rng.choice(ROWS, EACH, replace=False) if moves is None else reading(moves)
            tally.add(guessed, server.rows[victim])
    return tally
