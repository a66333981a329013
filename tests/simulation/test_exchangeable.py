"""Members of a fixed group are exchangeable in a simulation of all groups, with real messages.

Two members swap their data, secrets, local state and the test entropy that is addressed to them;
ids, keys and the script of absences and restarts stay. The whole view at the carrier is equal, with
other groups and the steps of the model in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest

from exchange import CarrierView, Script, SwappedEntropy, difference, recorded, restarting
from rounds.population import DENSE, derived, plan, specs, trainer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.ids import ClientId
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan
from tessera.privacy.index.period import MemoryPeriods
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.party import LocalState
from tessera.simulation.epochs import federation_for
from tessera.simulation.faults import Drop
from tessera.simulation.subcohort import Participant, one_by_one

CLIENTS, GROUP, ROWS, ROUNDS = 8, 4, 200, 6
Pair = tuple[ClientId, ClientId]

VARIANTS: Final[Mapping[str, dict[str, Any]]] = {
    "one period": {},
    "a cohort of six": {"cohort": 6},
    "periods of two updates": {"groups": {"size": GROUP, "period": 2}},
    "bloom": {"union": {"encoding": "bloom"}},
    "rows kept by chance": {"privacy": {"keep": 0.8}},
    "groups of two": {"groups": {"size": 2}},
    "whole models": {"scheme": "secure-fedavg"},
}
"""Plans with a bound on naming a holder."""
SCRIPTS, ALL_SCRIPTS = 2, 30  # of each variant


def plan_of(variant: str) -> Plan:
    more = {"cohort": CLIENTS, "groups": {"size": GROUP}, **VARIANTS[variant]}
    return plan(more.pop("scheme", "secure-submodel"), **more)


def a_pair(chosen: Plan, rng: np.random.Generator) -> Pair:
    """Two members of a group."""
    groups = cohorts_of(chosen).formed([ClientId(c) for c in range(CLIENTS)])
    group = groups[int(rng.integers(len(groups)))]
    a, b = rng.choice(len(group), 2, replace=False)
    return group[int(a)], group[int(b)]


def a_script(rng: np.random.Generator) -> Script:
    """Who is absent in which round, and who is put to bytes and woken in it."""
    everybody, rounds = [ClientId(c) for c in range(CLIENTS)], range(ROUNDS)
    absent = {
        at: tuple(Drop(c, "collect") for c in everybody if rng.random() < 0.25) for at in rounds
    }
    woken = [(at, c) for at in rounds for c in everybody if rng.random() < 0.3]
    return Script(absent, dict.fromkeys(woken, frozenset({0})))


def holdings(seed: int) -> dict[ClientId, np.ndarray]:
    """As many rows as may be, none, and more than a client may name."""
    rng = np.random.default_rng(seed)
    sizes = rng.permutation([0, 1, 3, 7, 20, 25, 39, 60])
    return {
        ClientId(c): np.sort(rng.choice(ROWS, n, replace=False)).astype(np.uint64)
        for c, n in enumerate(sizes)
    }


def view_of(chosen: Plan, script: Script, swap: Pair | None, seed: int) -> CarrierView:
    """The whole view of some rounds over synthetic rows."""
    everybody = [ClientId(c) for c in range(CLIENTS)]
    whose = {c: c for c in everybody}
    if swap is not None:
        a, b = swap
        whose[a], whose[b] = b, a
    entropy = SwappedEntropy(ScriptedEntropy(b"exchange %d" % seed), swap)
    signers = identities(everybody, entropy, chosen.federation)
    held, maps = holdings(seed), derived()
    federation = federation_for(chosen)(
        chosen,
        {
            c: Participant(
                LocalState(real={"goods": held[whose[c]]}, periods=MemoryPeriods(), derived=maps),
                signers[c],
            )
            for c in everybody
        },
        trainer=one_by_one({c: trainer(whose[c]) for c in everybody}),
        dense=np.zeros(DENSE, dtype=np.float32),
        tables={name: LazyTable(spec) for name, spec in specs().items()},
        derived=maps,
        entropy=entropy,
        faults=script.of_round,
    )
    with recorded() as view, restarting(script.restarts):
        for _ in federation.run(ROUNDS):
            pass
    return view


def exchanged(variant: str, seed: int) -> CarrierView:
    """The view of a random script, which two members' change of places did not change."""
    chosen = plan_of(variant)
    rng = np.random.default_rng([seed, *map(ord, variant)])
    pair, script = a_pair(chosen, rng), a_script(rng)
    one, other = (view_of(chosen, script, swap, seed) for swap in (None, pair))
    found = difference(one, other)
    assert not found, f"seed {seed}, {pair}: {found}"
    return one


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_members_who_change_places_change_nothing(variant: str) -> None:
    opened = sum(exchanged(variant, seed).count("opened") for seed in range(SCRIPTS))
    assert opened >= 3 * SCRIPTS, "sums were opened"


@pytest.mark.campaign
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_hundred_scripts_change_nothing(variant: str) -> None:
    views = [exchanged(variant, seed) for seed in range(SCRIPTS, SCRIPTS + ALL_SCRIPTS)]
    opened = sum(view.count("opened") for view in views)
    print(f"{variant}: {ALL_SCRIPTS} scripts, {opened} sums, no difference")
