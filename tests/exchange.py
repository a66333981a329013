"""The whole view of a federation, recorded at its carrier; and two members who change places.

What anybody outside a client can see of it: who sent which kind of message to whom, how long, in
which order, what it said where that is not random, who was refused and who was silent, and every
exact sum that was opened. Whatever carries messages can be recorded; nothing here knows of phases.

A fixed group hides a holder because its members are exchangeable: with data, secrets and local
state of two of them swapped, and ids, keys and availability as they were, the view is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final
from unittest import mock

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples
from tessera.data.ratings import RatingData
from tessera.errors import WireError
from tessera.ids import SERVER, ClientId, Party, RoundId, StageId
from tessera.learning import bound_model
from tessera.protocols.epochs.messages import EpochKind
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg import server
from tessera.protocols.secagg.phases import StageSum
from tessera.rounds.course import client_role
from tessera.rounds.encode import UpdateLayout
from tessera.rounds.epochs.client import EpochClient
from tessera.rounds.epochs.group import GroupEpochs
from tessera.rounds.party import ClientRoundSetup, StoredRole
from tessera.rounds.root import lasting_secret
from tessera.simulation.epochs import CarriedGroup, Carrier
from tessera.simulation.faults import Fault
from tessera.simulation.federation import Federation
from tessera.simulation.simulator import Outcome, Simulator
from tessera.tasks import Task
from tessera.wire.index_set import client_array

# --- the view -------------------------------------------------------------------------------------

UNIFORM: Final[Mapping[str, frozenset[str]]] = {
    "Advert": frozenset({"channel_key", "nonce", "stages", "signature"}),
    "Member": frozenset({"channel_key", "nonce", "stages", "signature"}),
    "ShareBoxes": frozenset({"boxes"}),
    "ForwardedShares": frozenset({"boxes"}),
    "MaskedInput": frozenset({"dense", "tables"}),
    "ConsistencySignature": frozenset({"signature"}),
    "Endorsement": frozenset({"signature"}),
    "RevealedShares": frozenset({"self_masks", "mask_keys", "row_keys"}),
    "Delivered": frozenset({"link", "vector", "mask_key", "signature"}),
    "Delivery": frozenset({"vector"}),
    "Fetch": frozenset({"visit"}),
    "Assignment": frozenset({"visit"}),
    "ComeBack": frozenset({"visit"}),
}
"""By kind of record the fields that are keys, signatures, ciphertexts, shares or masked words.

They look uniform to whoever sees them, so that only their length counts; what masked words add up
to is compared where it is opened. Every other field of every message is compared as it is."""
NESTED: Final[Mapping[str, frozenset[str]]] = {"EpochWork": frozenset({"assignment"})}
"""Fields that are messages themselves."""


@dataclass(frozen=True, slots=True)
class Line:
    """Something that happened at the carrier."""

    what: str
    who: tuple[Party, ...]
    kind: str = ""
    length: int = 0
    content: Any = field(default=None, repr=False)


@dataclass(slots=True)
class CarrierView:
    """All lines in their order."""

    lines: list[Line] = field(default_factory=list, repr=False)

    _read: dict[bytes, Any] = field(default_factory=dict, repr=False)  # many are sent to all

    def message(self, what: str, sender: Party, receiver: Party, data: bytes) -> None:
        kind = wire.kind_of(data)
        if data not in self._read:
            self._read[data] = _content(data)
        name = "" if kind is None else kind.__name__
        self.lines.append(Line(what, (sender, receiver), name, len(data), self._read[data]))

    def happened(self, what: str, *who: Party, content: Any = None) -> None:
        self.lines.append(Line(what, who, content=content))

    def count(self, what: str) -> int:
        return sum(line.what == what for line in self.lines)


def _content(data: bytes) -> Any:
    try:
        return seen(wire.decode(data))
    except WireError:  # somebody broke the protocol
        return data


def seen(value: Any) -> Any:
    """What is to be seen of a value, in a form that can be compared."""
    if is_dataclass(value) and not isinstance(value, type):
        uniform, nested = (by.get(type(value).__name__, frozenset()) for by in (UNIFORM, NESTED))

        def of_field(name: str, given: Any) -> Any:
            if name in uniform:
                return shape_of(given)
            return _content(given) if name in nested else seen(given)

        return tuple((f.name, of_field(f.name, getattr(value, f.name))) for f in fields(value))
    return _walked(value, seen, lambda leaf: leaf)


def shape_of(value: Any) -> Any:
    """How much there is of something that looks uniform, and of whom."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple((f.name, shape_of(getattr(value, f.name))) for f in fields(value))
    if isinstance(value, int):  # a number that is drawn for this message
        return "a number"
    return _walked(value, shape_of, lambda leaf: ("bytes", len(leaf)))


def _walked(value: Any, inner: Callable[[Any], Any], leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, leaf(value.tobytes()))
    if isinstance(value, bytes | bytearray | memoryview):
        return leaf(bytes(value))
    if isinstance(value, Mapping):
        return tuple((key, inner(each)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(inner(each) for each in value)
    return value


def difference(one: CarrierView, other: CarrierView) -> str:
    """Where two views differ first, in words; "" if they are equal."""
    for at, (a, b) in enumerate(zip(one.lines, other.lines, strict=False)):
        if a != b:
            return f"line {at}: {a} against {b}{_differing(a, b)}"
    if len(one.lines) != len(other.lines):
        longer = max(one.lines, other.lines, key=len)
        extra = longer[min(len(one.lines), len(other.lines))]
        return f"{len(one.lines)} lines against {len(other.lines)}; the first more: {extra}"
    return ""


@dataclass(frozen=True, slots=True)
class Apart:
    """How far the sums in two views are apart: rows and dense words that differ, and by how much
    at most, in steps of the quantiser."""

    rows: int
    of_rows: int
    dense: int
    of_dense: int
    steps: int


def apart(one: CarrierView, other: CarrierView, ring: Ring) -> Apart:
    """Of two views of the same sums, which are of this ring; unions are equal, or it is said."""
    rows, of_rows, dense, of_dense, steps = 0, 0, 0, 0, 0
    for (a, in_a), (b, in_b) in zip(_sums(one), _sums(other), strict=True):
        found = _steps(a, b, ring)
        dense, of_dense = dense + int(np.count_nonzero(found)), of_dense + found.size
        steps = max(steps, int(found.max(initial=0)))
        for x, y in zip(in_a, in_b, strict=True):
            found = _steps(x, y, ring)
            rows, of_rows = rows + int(found.any(axis=1).sum()), of_rows + len(found)
            steps = max(steps, int(found.max(initial=0)))
    return Apart(rows, of_rows, dense, of_dense, steps)


def _steps(a: np.ndarray, b: np.ndarray, ring: Ring) -> np.ndarray:
    assert a.shape == b.shape, "other unions"
    return np.minimum((a - b) % ring.order, (b - a) % ring.order)


def _sums(view: CarrierView) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Every opened sum: its dense words, and those of its tables row by row."""

    def words(stored: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
        dtype, shape, raw = stored
        return np.frombuffer(raw, dtype).astype(np.int64).reshape(shape)

    for line in view.lines:
        if line.what == "opened":
            parts = dict(line.content)
            tables = [words(dict(table)["words"]) for _, table in parts["tables"]]
            yield words(parts["dense"]).reshape(-1), tables


def _differing(a: Line, b: Line) -> str:
    if replace(a, content=None) != replace(b, content=None) or not isinstance(a.content, tuple):
        return ""
    names = [x[0] for x, y in zip(a.content, b.content, strict=False) if x != y]
    return f", in {', '.join(map(str, names))}"


@contextmanager
def recorded() -> Iterator[CarrierView]:
    """The view of everything that is simulated meanwhile, sums besides the rounds' included."""
    view = CarrierView()
    run, record = Simulator.run, Simulator._record

    def recording(
        self: Simulator, sender: Party, receiver: Party, kind: str, data: bytes, *, arrived: bool
    ) -> None:
        view.message("arrived" if arrived else "sent", sender, receiver, data)
        record(self, sender, receiver, kind, data, arrived=arrived)

    def running(self: Simulator) -> Outcome:
        view.happened("begins", *sorted(self.clients))
        outcome = run(self)
        for error in outcome.refused:
            view.happened("refused", error.peer or "", content=error.reason)
        for client in outcome.left:
            view.happened("left", client)
        if (error := outcome.aborted) is not None:
            view.happened("aborted", content=(error.phase, error.answered, error.needed))
        return outcome

    with ExitStack() as stack:
        stack.enter_context(opened_sums(view))
        stack.enter_context(mock.patch.object(Simulator, "_record", recording))
        stack.enter_context(mock.patch.object(Simulator, "run", running))
        stack.enter_context(carried_epochs(view))
        yield view


@contextmanager
def carried_epochs(view: CarrierView) -> Iterator[None]:
    """What groups that wait send, and every sum of theirs that opens."""
    take, record, retire = GroupEpochs.take, Carrier.record, GroupEpochs.retire

    def taking(self: GroupEpochs, *given: Any) -> Any:
        total, members = self.vectors.total, client_array(self.group.members)
        assert total is not None and self.at.open is not None
        if self.at.open.header.kind is EpochKind.UNION:
            union = StageSum(stage=StageId(0), survivors=members, dense=total, tables={})
            view.happened("opened", content=seen(union))
        return take(self, *given)

    summed = UpdateLayout.summed

    def summing(self: UpdateLayout, *given: Any) -> StageSum:
        total = summed(self, *given)
        view.happened("opened", content=seen(total))
        return total

    def recording(self: Carrier, client: ClientId, to: Party, message: Outbound) -> None:
        view.message("sent", client if to == SERVER else SERVER, to, message.data)
        record(self, client, to, message)

    def retiring(self: GroupEpochs, reason: str) -> None:
        view.happened("retired", *self.group.members, content=reason)
        retire(self, reason)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GroupEpochs, "take", taking))
        stack.enter_context(mock.patch.object(GroupEpochs, "retire", retiring))
        stack.enter_context(mock.patch.object(UpdateLayout, "summed", summing))
        stack.enter_context(mock.patch.object(Carrier, "record", recording))
        yield


@contextmanager
def opened_sums(view: CarrierView) -> Iterator[None]:
    """Every secure sum that a server opens meanwhile is in the view, to the bit."""

    def opened(**parts: Any) -> StageSum:
        total = StageSum(**parts)
        view.happened("opened", content=seen(total))
        return total

    with mock.patch.object(server, "StageSum", opened):
        yield


# --- two members change places --------------------------------------------------------------------

CLIENT_AT: Final[Mapping[str, int]] = {
    Label.PARTY_ROOT: 2,
    Label.CLIENT_SECRET: 1,
    Label.PERIOD_SECRET: 0,
    Label.EPOCH_ROOT: 2,
}
"""Where a request for what belongs to a client's data names the client, among its contexts.

A round's root goes with them: rounding, examples and their order follow from it. So do the round's
keys, which look uniform wherever they are."""
STAYS: Final = frozenset({Label.IDENTITY, Label.ROUND_ROOT, Label.GRAPH, Label.COHORT_COINS})
"""Requests for keys that stay with an id, and for what is nobody's."""


class SwappedEntropy:
    """Test entropy in which two clients have each other's secrets."""

    def __init__(self, entropy: Entropy, pair: tuple[ClientId, ClientId] | None) -> None:
        self._entropy = entropy
        a, b = (int(c) for c in pair) if pair else (-1, -1)
        self._other = {a: b, b: a}

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        assert label in STAYS or label in CLIENT_AT, f"whose is {label!r}? Say so in CLIENT_AT"
        parts: list[Any] = list(context)
        if label in CLIENT_AT:
            at = CLIENT_AT[label]
            parts[at] = self._other.get(parts[at], parts[at])
        return self._entropy.secret(label, *parts, size=size)


def swapped(task: Task, pair: tuple[ClientId, ClientId] | None) -> Task:
    """The task with the data of two clients swapped; fields that have the client's number stay."""
    if pair is None:
        return task
    a, b = map(int, pair)
    data = task.data
    train, offsets = _swapped_part(data.train, data.offsets, a, b, _own_numbers(data))
    test, test_offsets = _swapped_part(data.test, data.test_offsets, a, b, _own_numbers(data))
    more: dict[str, Any] = {}
    if isinstance(data, RatingData):
        values = data.profiles.values.copy()
        values[[a, b]] = values[[b, a]]
        more["profiles"] = replace(data.profiles, values=values)
    changed = replace(
        data, train=train, offsets=offsets, test=test, test_offsets=test_offsets, **more
    )
    return replace(task, data=changed)


@contextmanager
def own_rows_swapped(
    task: Task, pair: tuple[ClientId, ClientId] | None, entropy: Entropy, federation: str
) -> Iterator[None]:
    """A client's own row may have the client's number. It is then part of the address under which
    the row is first drawn from the client's secret, and goes with the secret: under any other key,
    and so where a row is drawn from anything public, it stays."""
    if pair is None or not _own_numbers(task.data):
        yield
        return
    names = [table.name for table in task.bind(task.build(0)).tables if table.local]
    keys = {
        secret.derive(Label.OWN_ROWS, name, size=bound_model.KEY_BYTES).reveal()
        for secret in (lasting_secret(entropy, federation, int(c)) for c in pair)
        for name in names
    }
    expand, (a, b) = bound_model.units, map(np.uint64, pair)

    def swapping(key: bytes, ids: np.ndarray, width: int) -> np.ndarray:
        other = np.where(ids == a, b, np.where(ids == b, a, ids))
        return expand(key, other if key in keys else ids, width)

    with mock.patch.object(bound_model, "units", swapping):
        yield


def _own_numbers(data: ClientData) -> list[str]:
    """Fields that have the number of the client an example is with, and nothing else."""
    whose = np.repeat(np.arange(data.clients), np.diff(data.offsets))
    return [
        name
        for name, column in data.train.fields.items()
        if column.ndim == 1 and column.dtype.kind == "i" and np.array_equal(column, whose)
    ]


def _swapped_part(
    examples: Examples, offsets: np.ndarray, a: int, b: int, own: list[str]
) -> tuple[Examples, np.ndarray]:
    order = np.arange(len(offsets) - 1)
    order[[a, b]] = order[[b, a]]
    places = np.concatenate([np.arange(offsets[c], offsets[c + 1]) for c in order])
    found, lengths = examples.take(places), np.diff(offsets)[order]
    whose = np.repeat(np.arange(len(order)), lengths)
    for name in own:
        found = found.with_field(name, whose.astype(examples[name].dtype))
    return found, np.concatenate([[0], np.cumsum(lengths)]).astype(offsets.dtype)


# --- restarts -------------------------------------------------------------------------------------

Restarts = Mapping[tuple[int, ClientId], frozenset[int]]
"""By round and client: after which of its steps it is put to bytes and woken from them."""


@contextmanager
def restarting(restarts: Restarts) -> Iterator[None]:
    """Clients of simulated rounds are dropped after some steps, and woken from what they stored."""
    made = Federation._client

    def client(
        self: Federation, drawn: Any, part: Any, name: ClientId, signers: Any, ideal: Any = None
    ) -> Any:
        role = made(self, drawn, part, name, signers, ideal)
        steps = restarts.get((int(drawn.round_id), part.named[name]), frozenset())
        if not steps:
            return role
        setup = ClientRoundSetup(
            plan=part.plan,
            round_id=drawn.round_id,
            party=name,
            local=self.participants[part.named[name]].local,
            entropy=_Exhausted(),
            identity=signers[name],
        )

        def wake(stored: StoredRole) -> Any:
            return client_role(setup, stored)

        return _Restarted(role, steps, wake)

    exchange = CarriedGroup.exchange

    def exchanging(
        self: CarriedGroup, who: ClientId, out: Any, carrier: Carrier, *more: Any
    ) -> None:
        exchange(self, who, out, carrier, *more)
        if (int(carrier.now), who) in restarts:
            role = self.clients[who]
            stored = role.snapshot(), dict(role.messages)
            self.clients[who] = EpochClient.wake(*stored, role.setup)

    with (
        mock.patch.object(Federation, "_client", client),
        mock.patch.object(CarriedGroup, "exchange", exchanging),
    ):
        yield


class _Exhausted:
    """Who has begun a round draws nothing more."""

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        raise AssertionError(f"{label} is drawn once more")


class _Restarted:
    """A client's role that is another object after some of its steps."""

    def __init__(self, role: Any, steps: frozenset[int], wake: Callable[[StoredRole], Any]) -> None:
        self._role, self._steps, self._wake, self._step = role, steps, wake, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def _done(self, out: list[Outbound]) -> list[Outbound]:
        if self._step in self._steps:
            stored = StoredRole(self._role.snapshot(), dict(self._role.messages))
            self._role = self._wake(stored)
        self._step += 1
        return out

    def start(self) -> list[Outbound]:
        return self._done(self._role.start())

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        return self._done(self._role.receive(sender, data))

    def supply(self, update: Any) -> list[Outbound]:
        return self._done(self._role.supply(update))


# --- scripts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Script:
    """Who is not there when, and who is restarted; it stays with ids whoever's data they hold."""

    faults: Mapping[int, tuple[Fault, ...]]
    restarts: Restarts

    def of_round(self, round_id: RoundId, cohort: Any) -> list[Fault]:
        return list(self.faults.get(int(round_id), ()))
