"""Members of a fixed group are exchangeable: the property behind the bound on naming a holder.

Two members swap their data, secrets, local state and the test entropy that is addressed to them;
ids, keys and the script of dropouts and restarts stay. The whole view at the carrier is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from exchange import (
    CarrierView,
    Script,
    SwappedEntropy,
    difference,
    recorded,
    restarting,
)
from rounds.population import DENSE, derived, plan, specs, trainer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.ids import ClientId, Party
from tessera.learning.tables.submodel import ModelUpdate, Submodel
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan
from tessera.privacy.index.period import MemoryPeriods
from tessera.protocols.machine import Outbound
from tessera.rounds.client import ClientRound
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.local_state import LocalState
from tessera.simulation.faults import Delay, Drop, Duplicate, Fault, Reorder, dropout_places
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import Participant, one_by_one

CLIENTS, COHORT, GROUP, ROWS = 8, 8, 4, 200
ROUNDS = 3
Pair = tuple[ClientId, ClientId]
Break = Callable[[ModelUpdate], ModelUpdate]

VARIANTS: Mapping[str, dict[str, Any]] = {
    "semi-honest": {},
    "active": {"security": {"threat": "active"}},
    "bloom": {"union": {"encoding": "bloom"}},
    "strict quorum": {"privacy": {"strict_quorum": True}},
    "corrupt": {"security": {"corrupt": 2}},
    "short periods": {"privacy": {"period_rounds": 1}},
    "rows kept by chance": {"privacy": {"keep": 0.8, "period_rounds": 2}},
    "groups of two": {"groups": {"size": 2}},
}
"""Plans with a bound on naming a holder: all are of secure-submodel in fixed groups."""
SCRIPTS, ALL_SCRIPTS = 3, 25  # of each variant


def grouped(**more: Any) -> Plan:
    return plan(cohort=COHORT, **{"groups": {"size": GROUP}, **more})


def a_pair(chosen: Plan, rng: np.random.Generator) -> Pair:
    """Two members of a group."""
    groups = cohorts_of(chosen).formed([ClientId(c) for c in range(CLIENTS)])
    group = groups[int(rng.integers(len(groups)))]
    a, b = rng.choice(len(group), 2, replace=False)
    return group[int(a)], group[int(b)]


def a_script(chosen: Plan, rng: np.random.Generator) -> Script:
    """Dropouts in any phase, late, doubled and reordered messages, restarts after any step."""
    places = dropout_places(chosen.group_plan)
    faults: dict[int, tuple[Fault, ...]] = {}
    restarts = {}
    for number in range(ROUNDS):
        found: list[Fault] = []
        for client in map(ClientId, range(CLIENTS)):
            phase, stage = places[int(rng.integers(len(places)))]
            kind = rng.choice(
                ["drop", "after", "delay", "twice", ""], p=[0.06, 0.04, 0.1, 0.1, 0.7]
            )
            if kind in ("drop", "after"):
                found.append(Drop(client, phase, stage=stage, after=kind == "after"))
            elif kind == "delay":
                found.append(Delay(client, phase, float(rng.choice([0.01, 1.0, 20.0])), stage))
            elif kind == "twice":
                found.append(Duplicate(client, phase, stage=stage))
            if rng.random() < 0.3:
                steps = rng.choice(12, int(rng.integers(1, 5)), replace=False)
                restarts[number, client] = frozenset(map(int, steps))
        if rng.random() < 0.3:
            phase, stage = places[int(rng.integers(len(places)))]
            found.append(Reorder(phase, int(rng.integers(1000)), stage))
        faults[number] = tuple(found)
    return Script(faults, restarts)


def holdings(seed: int) -> dict[ClientId, np.ndarray]:
    """As many rows as may be, none, and more than a client may name."""
    rng = np.random.default_rng(seed)
    sizes = rng.permutation([0, 1, 3, 7, 20, 25, 39, 60])
    return {
        ClientId(c): np.sort(rng.choice(ROWS, n, replace=False)).astype(np.uint64)
        for c, n in enumerate(sizes)
    }


def view_of(
    chosen: Plan,
    script: Script,
    swap: Pair | None,
    *,
    seed: int = 0,
    breaks: Mapping[ClientId, Break] | None = None,
    rounds: int = ROUNDS,
) -> CarrierView:
    """The whole view of some rounds over synthetic rows. `breaks` goes with the data."""
    everybody = [ClientId(c) for c in range(CLIENTS)]
    whose = {c: c for c in everybody}
    if swap is not None:
        a, b = swap
        whose[a], whose[b] = b, a
    entropy = SwappedEntropy(ScriptedEntropy(b"exchange %d" % seed), swap)
    signers = identities(everybody, entropy, chosen.federation)
    held, maps = holdings(seed), derived()

    def training(owner: ClientId) -> Callable[[Submodel], ModelUpdate]:
        train = trainer(owner)
        change = (breaks or {}).get(owner, lambda update: update)
        return lambda submodel: change(train(submodel))

    federation = Federation(
        chosen,
        {
            c: Participant(
                LocalState(real={"goods": held[whose[c]]}, periods=MemoryPeriods(), derived=maps),
                signers[c],
            )
            for c in everybody
        },
        trainer=one_by_one({c: training(whose[c]) for c in everybody}),
        dense=np.zeros(DENSE, dtype=np.float32),
        tables={name: LazyTable(spec) for name, spec in specs().items()},
        derived=maps,
        entropy=entropy,
        faults=script.of_round,
    )
    with recorded() as view, restarting(script.restarts):
        for _ in federation.run(rounds):
            pass
    return view


NOTHING_HAPPENS = Script({}, {})


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_members_who_change_places_change_nothing(variant: str) -> None:
    opened = sum(exchanged(variant, seed).count("opened") for seed in range(SCRIPTS))
    assert opened > 6, "sums were opened"


@pytest.mark.campaign
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_hundred_scripts_change_nothing(variant: str) -> None:
    for seed in range(SCRIPTS, SCRIPTS + ALL_SCRIPTS):
        exchanged(variant, seed)
    print(f"{variant}: {ALL_SCRIPTS} scripts, no difference")


def exchanged(variant: str, seed: int) -> CarrierView:
    """The view of a random script, which two members' change of places did not change."""
    chosen = grouped(**VARIANTS[variant])
    rng = np.random.default_rng([seed, *map(ord, variant)])
    pair, script = a_pair(chosen, rng), a_script(chosen, rng)
    one = view_of(chosen, script, None, seed=seed)
    other = view_of(chosen, script, pair, seed=seed)
    found = difference(one, other)
    assert not found, f"seed {seed}, {pair}: {found}"
    return one


# --- what the comparison finds --------------------------------------------------------------------


def _many(role: ClientRound) -> bool:
    """Something about a client's data that the others of its group do not share."""
    return len(role._local.real["goods"]) > 10


def _longer(role: ClientRound, out: list[Outbound]) -> list[Outbound]:
    return [replace(m, data=m.data + b"\0") if m.kind == "MaskedInput" else m for m in out]


def _asks_for_nothing(role: ClientRound, out: list[Outbound]) -> list[Outbound]:
    return [m for m in out if m.kind != "RevealedSet"]


def _sends_again(role: ClientRound, out: list[Outbound]) -> list[Outbound]:
    return [m for m in out for _ in range(1 + (m.kind == "MaskedInput"))]


def _leaves(role: ClientRound, out: list[Outbound]) -> list[Outbound]:
    if any(m.kind == "RevealedSet" for m in out):
        raise role._leave(role._fault("sent a union that takes too much memory"))
    return out


Change = Callable[[ClientRound, list[Outbound]], list[Outbound]]
CHANGED: Mapping[str, tuple[Change, str]] = {
    "a longer message": (_longer, "MaskedInput"),
    "a skipped fetch": (_asks_for_nothing, "RevealedSet"),
    "an early leave": (_leaves, "RevealedSet"),
    "one more retry": (_sends_again, "MaskedInput"),
}
"""What a client does, and the kind of message at which it shows first."""
DRAWN: Final = "a draw from the id"


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose behaviour follows from their data, or from who they are."""
    receive, supply = ClientRound.receive, ClientRound.supply

    def receiving(self: ClientRound, sender: Party, data: bytes) -> list[Outbound]:
        out = receive(self, sender, data)
        return CHANGED[fault][0](self, out) if _many(self) else out

    def supplying(self: ClientRound, update: ModelUpdate) -> list[Outbound]:
        drawn = np.random.default_rng([self.plan.seed, int(self.round_id), int(self.me)])
        return supply(self, replace(update, dense=update.dense + drawn.normal(size=DENSE) / 100))

    if fault == DRAWN:
        monkeypatch.setattr(ClientRound, "supply", supplying)
    else:
        monkeypatch.setattr(ClientRound, "receive", receiving)


def unlike(seed: int = 0) -> Pair:
    """Two members of a group, of whom one has many rows and the other few."""
    held = holdings(seed)
    for group in cohorts_of(grouped()).formed(sorted(held)):
        few = [c for c in group if 0 < len(held[c]) <= 10]
        many = [c for c in group if len(held[c]) > 10]
        if few and many:
            return few[0], many[0]
    raise AssertionError("another seed has such a group")


@pytest.mark.parametrize("fault", [*CHANGED, DRAWN])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, pair = grouped(), unlike()

    def found() -> str:
        return difference(
            view_of(chosen, NOTHING_HAPPENS, None, rounds=1),
            view_of(chosen, NOTHING_HAPPENS, pair, rounds=1),
        )

    assert not found()
    plant(fault, monkeypatch)
    shows_at = CHANGED[fault][1] if fault in CHANGED else "opened"
    assert shows_at in found()


# --- what fails because of a client's data is sent as zeros ---------------------------------------


def _raises(_: ModelUpdate) -> ModelUpdate:
    raise ValueError("these examples cannot be trained on")


def _not_finite(update: ModelUpdate) -> ModelUpdate:
    return replace(update, dense=np.full(DENSE, np.nan))


def _one_row_not_finite(update: ModelUpdate) -> ModelUpdate:
    values = update.tables["goods"].values.copy()
    values[:1] = np.inf
    goods = replace(update.tables["goods"], values=values)
    return replace(update, tables={**update.tables, "goods": goods})


@pytest.mark.parametrize("break_", [_raises, _not_finite, _one_row_not_finite])
def test_a_member_that_cannot_train_sends_zeros_and_looks_like_the_others(break_: Break) -> None:
    chosen, pair = grouped(), unlike()
    broken = {pair[1]: break_}
    one = view_of(chosen, NOTHING_HAPPENS, None, breaks=broken, rounds=2)
    other = view_of(chosen, NOTHING_HAPPENS, pair, breaks=broken, rounds=2)
    assert not difference(one, other)
    whole = view_of(chosen, NOTHING_HAPPENS, None, rounds=2)
    assert one.count("opened") == whole.count("opened"), "the group goes on"
    assert one.count("sent") == whole.count("sent")
