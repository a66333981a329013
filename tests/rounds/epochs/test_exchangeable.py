"""Members of a fixed group are exchangeable over epochs: the property behind B.

Two members swap their data, secrets, local state and the test entropy that is addressed to them;
ids, keys, and the script of visits, restarts and lies stay. The whole view at the server is equal:
every message's kind, length and place, what it says where that is not uniform, every exact sum,
and who leaves when and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from exchange import CarrierView, SwappedEntropy, difference
from group_training import Training, grouped
from rounds.population import DENSE, derived, trainer
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import PeerError, ServerFault
from tessera.ids import SERVER, ClientId
from tessera.learning.tables.submodel import ModelUpdate
from tessera.plan import Plan
from tessera.privacy.index.period import MemoryPeriods
from tessera.protocols.epochs.messages import Assignment, DeliveryCertificate
from tessera.protocols.machine import Outbound
from tessera.rounds.epochs.client import EpochClient
from tessera.rounds.epochs.group import EpochWork
from tessera.rounds.party import LocalState

SIZE, ROWS, EPOCHS = 4, 200, 5
Pair = tuple[ClientId, ClientId]
Break = Callable[[ModelUpdate], ModelUpdate | None]

VARIANTS: Final[Mapping[str, dict[str, Any]]] = {
    "one period": {},
    "periods of two updates": {"period": 2},
    "periods of one update": {"period": 1},
    "bloom": {"union": {"encoding": "bloom"}},
    "rows kept by chance": {"privacy": {"keep": 0.8}},
}
SCRIPTS, ALL_SCRIPTS = 3, 40  # of each variant


def plan_of(variant: str) -> Plan:
    more = dict(VARIANTS[variant])
    period = more.pop("period", 0)
    made = grouped(SIZE, **more)
    return replace(made, groups=replace(made.groups, period=period))


def holdings(seed: int) -> dict[ClientId, np.ndarray]:
    """No rows, as many as may be, and more than a client may name."""
    rng = np.random.default_rng(seed)
    sizes = rng.permutation([0, 1, 3, 7, 20, 39, 60])[:SIZE]
    return {
        ClientId(c): np.sort(rng.choice(ROWS, n, replace=False)).astype(np.uint64)
        for c, n in enumerate(sizes)
    }


# --- lies -----------------------------------------------------------------------------------------
#
# What a server may make of an answer, from what it has itself.


def _assignment(work: EpochWork) -> Assignment:
    assigned: Assignment = wire.decode(work.assignment)
    return assigned


def _with(work: EpochWork, assigned: Assignment) -> EpochWork:
    return replace(work, assignment=wire.encode(assigned))


def _next_number(work: EpochWork) -> EpochWork:
    at = _assignment(work)
    return _with(work, replace(at, header=replace(at.header, epoch=at.header.epoch + 1)))


def _next_period(work: EpochWork) -> EpochWork:
    at = _assignment(work)
    return _with(work, replace(at, header=replace(at.header, period=at.header.period + 1)))


def _doubled_signature(work: EpochWork) -> EpochWork:
    at = _assignment(work)
    first, _, *others = at.certificate.entries
    return _with(
        work, replace(at, certificate=DeliveryCertificate(entries=(first, first, *others)))
    )


def _fewer_signatures(work: EpochWork) -> EpochWork:
    at = _assignment(work)
    entries = at.certificate.entries[1:]
    return _with(work, replace(at, certificate=DeliveryCertificate(entries=entries)))


def _strange_key(work: EpochWork) -> EpochWork:
    at = _assignment(work)
    first, *others = at.certificate.entries
    strange = replace(first, mask_key=bytes([9]) + bytes(31))
    return _with(work, replace(at, certificate=DeliveryCertificate(entries=(strange, *others))))


def _other_record(work: EpochWork) -> EpochWork:
    return replace(work, record=replace(work.record, cutoff=work.record.cutoff + 1))


def _no_base(work: EpochWork) -> EpochWork:
    return replace(work, base=b"")


def _another_delivery(work: EpochWork) -> EpochWork:
    at = _assignment(work)
    return _with(work, replace(at, own=at.certificate.entries[0]))


def _nothing_readable(work: EpochWork) -> EpochWork:
    return replace(work, assignment=bytes(len(work.assignment)))


Lie = Callable[[EpochWork], EpochWork]
LIES: Final[tuple[Lie, ...]] = (
    _next_number,
    _next_period,
    _doubled_signature,
    _fewer_signatures,
    _strange_key,
    _other_record,
    _no_base,
    _another_delivery,
    _nothing_readable,
)


# --- a group whose members may have changed places ------------------------------------------------


class Exchanged(Training):
    """One group, recorded at its server; what is broken goes with the data."""

    def __init__(
        self, chosen: Plan, swap: Pair | None, seed: int, breaks: Mapping[ClientId, Break]
    ) -> None:
        super().__init__(SIZE, chosen)
        self.view, self.gone = CarrierView(), set[ClientId]()
        self.whose = {c: c for c in self.setups}
        if swap is not None:
            a, b = swap
            self.whose[a], self.whose[b] = b, a
        self.breaks = breaks
        entropy = SwappedEntropy(ScriptedEntropy(b"exchange %d" % seed), swap)
        held, maps = holdings(seed), derived()
        self.setups = {
            c: replace(
                setup,
                entropy=entropy,
                local=LocalState(
                    real={"goods": held[self.whose[c]]}, periods=MemoryPeriods(), derived=maps
                ),
            )
            for c, setup in self.setups.items()
        }

    def say(self, client: ClientId, out: list[Outbound]) -> list[Outbound]:
        for message in out:
            self.view.message("sent", client, SERVER, message.data)
        try:
            return super().say(client, out)
        except PeerError as error:
            self.view.happened("refused", client, content=error.reason)
            return []

    def hear(self, client: ClientId, answers: list[Outbound]) -> list[Outbound]:
        for answer in answers:
            self.view.message("answered", SERVER, client, answer.data)
        try:
            return super().hear(client, answers)
        except ServerFault as fault:
            self.view.happened("left", client, content=fault.reason)
            self.gone.add(client)
            return []

    def train(self, client: ClientId) -> list[Outbound]:
        role, owner = self.clients[client], self.whose[client]
        update = self.breaks.get(owner, lambda given: given)(trainer(owner)(role.pending))
        out = role.supply(update)
        self.store(client)
        return list(out)

    def visit(self, client: ClientId, lie: Lie | None = None) -> None:
        answers = self.ask(client)
        if lie is not None:
            answers = [_lied(answer, lie) for answer in answers]
        self.say(client, self.hear(client, answers))
        if client not in self.gone and self.clients[client].pending is not None:
            self.say(client, self.train(client))

    def opens(self) -> None:
        """Whatever is full is opened, and the model stepped."""
        if self.server.full:
            self.view.happened("opened", content=self.server.epochs.vectors.total.tobytes())
            self.take()
            self.view.happened("model", content=self.model.digest)


def _lied(answer: Outbound, lie: Lie) -> Outbound:
    if answer.kind != EpochWork.__name__:
        return answer
    return Outbound.of(answer.to, lie(wire.decode(answer.data)))


def lived(
    chosen: Plan,
    swap: Pair | None,
    seed: int,
    *,
    calm: bool = False,
    breaks: Mapping[ClientId, Break] | None = None,
) -> CarrierView:
    """The view of some epochs: who comes when, is restarted, sends again and is lied to follows
    from the seed and the ids. `calm`: everybody comes once an epoch, and nothing happens."""
    rng = np.random.default_rng([seed, 5])
    run = Exchanged(chosen, swap, seed, breaks or {})
    run.join()
    members = sorted(run.setups)
    if calm:
        for _ in range(EPOCHS):
            for client in members:
                if client not in run.gone:
                    run.visit(client)
            run.opens()
        return run.view
    liar = int(rng.integers(20, 60))  # from this visit on, until somebody leaves
    for number in range(80):
        client = members[int(rng.integers(SIZE))]
        restarts, again, lie = rng.random() < 0.3, rng.random() < 0.3, int(rng.integers(len(LIES)))
        if client in run.gone:
            continue
        if restarts:
            run.kill(client)
        run.visit(client, LIES[lie] if number >= liar and not run.gone else None)
        if client not in run.gone and again:
            run.say(client, run.clients[client].resend())
        run.opens()
    return run.view


def a_pair(seed: int) -> Pair:
    a, b = np.random.default_rng([seed, 6]).choice(SIZE, 2, replace=False).tolist()
    return ClientId(a), ClientId(b)


def exchanged(variant: str, seed: int) -> CarrierView:
    """The view of a random script, which two members' change of places did not change."""
    chosen, pair = plan_of(variant), a_pair(seed)
    one, other = (lived(chosen, swap, seed) for swap in (None, pair))
    found = difference(one, other)
    assert not found, f"seed {seed}, {pair}: {found}"
    return one


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_members_who_change_places_change_nothing(variant: str) -> None:
    views = [exchanged(variant, seed) for seed in range(SCRIPTS)]
    assert sum(view.count("opened") for view in views) >= 2 * SCRIPTS, "sums were opened"
    assert sum(view.count("left") for view in views) > 0, "and somebody left"


@pytest.mark.campaign
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_hundred_scripts_change_nothing(variant: str) -> None:
    views = [exchanged(variant, seed) for seed in range(SCRIPTS, SCRIPTS + ALL_SCRIPTS)]
    opened, left = (sum(view.count(what) for view in views) for what in ("opened", "left"))
    print(f"{variant}: {ALL_SCRIPTS} scripts, {opened} sums, {left} left; no difference")


# --- what the comparison finds --------------------------------------------------------------------


def _many(role: EpochClient) -> bool:
    """Something about a client's data that the others of its group do not share."""
    return len(role.setup.local.real["goods"]) > 10


def unlike() -> tuple[int, Pair]:
    """A seed, and two members of whom one has many rows and the other few."""
    for seed in range(50):
        held = holdings(seed)
        few = [c for c in held if 0 < len(held[c]) <= 10]
        many = [c for c in held if len(held[c]) > 10]
        if few and many:
            return seed, (few[0], many[0])
    raise AssertionError("no such seed")


def _longer(role: EpochClient, out: list[Outbound]) -> list[Outbound]:
    return [replace(m, data=m.data + b"\0") for m in out]


def _sends_again(role: EpochClient, out: list[Outbound]) -> list[Outbound]:
    return [m for m in out for _ in range(2)]


CHANGED: Final = {"a longer message": _longer, "one more retry": _sends_again}


def calm_views() -> str:
    seed, pair = unlike()
    chosen = plan_of("one period")
    return difference(*(lived(chosen, swap, seed, calm=True) for swap in (None, pair)))


@pytest.mark.parametrize("fault", CHANGED)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not calm_views()
    supply = EpochClient.supply

    def supplying(self: EpochClient, update: ModelUpdate | None) -> list[Outbound]:
        out = supply(self, update)
        return CHANGED[fault](self, out) if _many(self) else out

    monkeypatch.setattr(EpochClient, "supply", supplying)
    assert "Delivery" in calm_views()


def test_an_early_leave_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = EpochClient.receive

    def receiving(self: EpochClient, sender: Any, data: bytes) -> list[Outbound]:
        out = receive(self, sender, data)
        if self.pending is not None and _many(self):
            raise self._fault("sent more than this device has memory for")
        return out

    monkeypatch.setattr(EpochClient, "receive", receiving)
    assert "left" in calm_views()


def test_a_draw_from_the_id_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    supply = EpochClient.supply

    def supplying(self: EpochClient, update: ModelUpdate) -> list[Outbound]:
        drawn = np.random.default_rng(int(self.setup.party)).normal(size=DENSE) / 100
        return supply(self, replace(update, dense=update.dense + drawn))

    monkeypatch.setattr(EpochClient, "supply", supplying)
    assert "opened" in calm_views()


# --- what fails because of a client's data is sent as zeros ---------------------------------------


def _nothing(_: ModelUpdate) -> None:
    return None


def _not_finite(update: ModelUpdate) -> ModelUpdate:
    return replace(update, dense=np.full(DENSE, np.nan))


def _one_row_not_finite(update: ModelUpdate) -> ModelUpdate:
    values = update.tables["goods"].values.copy()
    values[:1] = np.inf
    goods = replace(update.tables["goods"], values=values)
    return replace(update, tables={**update.tables, "goods": goods})


@pytest.mark.parametrize("break_", [_nothing, _not_finite, _one_row_not_finite])
def test_a_member_that_cannot_train_sends_zeros_and_looks_like_the_others(break_: Break) -> None:
    seed, pair = unlike()
    chosen, broken = plan_of("one period"), {pair[1]: break_}
    one, other = (lived(chosen, swap, seed, calm=True, breaks=broken) for swap in (None, pair))
    assert not difference(one, other)
    whole = lived(chosen, None, seed, calm=True)
    assert one.count("opened") == whole.count("opened") == EPOCHS, "the group goes on"
    assert one.count("sent") == whole.count("sent")
