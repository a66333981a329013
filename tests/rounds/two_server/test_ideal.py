"""Ideal rounds between two servers: the real rounds over ideal roles give the model to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rounds.population import GOODS, federation
from rounds.shops import ROUND, Roles, alike, finished, model_of, two_server_plan
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import ServerStep
from tessera.plan import Plan, SimulationPlan
from tessera.protocols.two_server.key_period import living
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.ideal import IdealSharedSum
from tessera.rounds.two_server.leader import LeaderRound
from tessera.simulation.faults import Drop, Fault, dropout_places, random_dropouts
from tessera.simulation.federation import Federation

UNITING = ("advertise", "share", "collect", "consistency", "unmask")
SAMPLED = SimulationPlan(crypto="sampled", crypto_every=10_000)
"""Round 0 is real, all others are ideal."""
NONE = SimulationPlan(crypto="none")
MOMENTUM = ServerStep(optimizer="momentum", rate=0.5, shrinkage=0.01)


def both(settings: Plan, rounds: int = 2, faults=None, simulation: SimulationPlan = SAMPLED):
    """The same rounds, real and ideal; and the events of each."""
    ends, models = [], []
    for each in (settings, replace(settings, simulation=simulation)):
        fed = federation(each, clients=12, faults=faults)
        ends.append(finished(fed, rounds))
        models.append(model_of(fed))
    return ends, models


@pytest.mark.parametrize("dropout", [0.0, 0.15])
@pytest.mark.parametrize(
    "way",
    [
        {"write": "dpf"},
        {"write": "dense", "check": False},
        {"write": "dpf", "verify": False, "stash": 2},
        {"domain": "union"},
        {"domain": "union", "write": "dpf", "verify": False},
    ],
    ids=str,
)
def test_an_ideal_round_is_the_real_one_to_the_bit(way, dropout):
    settings = two_server_plan(way, server=MOMENTUM, union={"max_rows": 15})
    faults = random_dropouts(dropout, 3, settings) if dropout else None
    (real, ideal), models = both(settings, rounds=4, faults=faults)
    assert models[0] == models[1]
    assert [type(e) for e in real] == [type(e) for e in ideal] == [RoundFinished] * 4
    assert alike(real) == alike(ideal)
    assert [e.measured for e in ideal] == [True, False, False, False]
    assert not any(e.bytes_between for e in ideal[1:])
    assert any(e.rows_over_cap for e in real)
    if dropout:
        assert any(e.survivors < 8 for e in real)


@pytest.mark.parametrize(
    ("way", "place", "visit"),
    [
        (way, place, visit)
        for way in ({}, {"domain": "union"})
        for place, visit in dropout_places(two_server_plan(way))
    ]
    + [({"domain": "union"}, place, 0) for place in UNITING],
    ids=str,
)
def test_a_client_that_leaves_is_missing_where_it_would_be(way, place, visit):
    def faults(_: RoundId, cohort) -> list[Fault]:
        return [Drop(cohort[2], place, stage=visit)]

    settings = two_server_plan(way)
    (real, ideal), models = both(settings, faults=faults)
    assert models[0] == models[1]
    assert alike(real) == alike(ideal)
    assert [e.survivors for e in real] == [7, 7]
    everybody = federation(settings, clients=12)
    finished(everybody, 2)
    assert model_of(everybody) != models[0]


@pytest.mark.parametrize("answering", [0, 1])
@pytest.mark.parametrize("place", [*UNITING, "query"])
def test_an_ideal_round_is_aborted_where_the_real_one_is(place, answering):
    def faults(_: RoundId, cohort) -> list[Fault]:
        return [Drop(c, place) for c in cohort[answering:]]

    (real, ideal), models = both(two_server_plan({"domain": "union"}), faults=faults)
    assert [type(e) for e in ideal] == [RoundAbort] * 2
    told = [[(e.phase, e.answered, e.needed) for e in ends] for ends in (real, ideal)]
    assert told[0] == told[1] and models[0] == models[1]


def test_pseudonyms_change_who_is_named_and_not_what_is_learnt():
    settings = two_server_plan({"domain": "union"}, privacy={"pseudonyms": True})
    _, models = both(settings)
    assert models[0] == models[1]
    fed = federation(settings, clients=12)
    finished(fed, 2)
    named = [set(names) for names in fed.cohorts.pseudonyms.values()]
    assert not named[0] & named[1] and not named[0] & set(range(12))


# --- keys that last -------------------------------------------------------------------------------

LASTING = {"write": "dpf", "domain": "whole", "key_rounds": 3, "min_cohort": 5}
EVERY_SECOND = SimulationPlan(crypto="sampled", crypto_every=2)


@pytest.mark.parametrize(
    ("gone", "absent", "simulation"),
    [
        ({0: "query"}, "refuse", SAMPLED),
        ({0: "collect"}, "refuse", NONE),  # its keys are made, and the servers never have them
        ({0: "collect", 1: "query"}, "refuse", EVERY_SECOND),
        ({1: "collect", 2: "query"}, "refuse", NONE),
        ({0: "collect", 1: "query"}, "allow", SAMPLED),
        ({1: "collect", 2: "query"}, "allow", NONE),
        ({1: "query"}, "allow", EVERY_SECOND),
    ],
    ids=lambda each: getattr(each, "crypto", str(each)),
)
def test_whose_keys_last_is_the_same_in_ideal_rounds(gone, absent, simulation):
    def faults(round_id: RoundId, cohort) -> list[Fault]:
        place = gone.get(round_id % 3)
        return [Drop(cohort[2 + round_id % 3], place)] if place else []

    settings = two_server_plan({**LASTING, "absent": absent})
    (real, ideal), models = both(settings, 5, faults, simulation)
    assert alike(real) == alike(ideal) and models[0] == models[1]
    later = any(gone.get(at) for at in (1, 2))
    assert any(isinstance(e, RoundAbort) for e in real) == (later and absent == "refuse")
    exposed = [e.rows_exposed for e in real if isinstance(e, RoundFinished)]
    assert any(exposed) == (later and absent == "allow")


@pytest.mark.parametrize("simulation", [SAMPLED, NONE])
def test_a_period_that_begins_with_an_aborted_round_begins_again(simulation):
    def faults(round_id: RoundId, cohort) -> list[Fault]:
        return [Drop(c, "collect") for c in cohort[: 7 if round_id == 3 else 0]]

    (real, ideal), models = both(two_server_plan(LASTING), 5, faults, simulation)
    assert alike(real) == alike(ideal) and models[0] == models[1]
    assert [isinstance(e, RoundAbort) for e in real] == [False, False, False, True, False]


def test_a_round_in_which_keys_are_made_is_real_for_all_that_are_written_with_them():
    settings = two_server_plan(LASTING, simulation=SimulationPlan(crypto="sampled", crypto_every=4))
    ends = finished(federation(settings, clients=12), 9)
    assert [e.measured for e in ends] == [True, False, False, True, True, False, True, False, True]
    assert [e.bytes_between > 0 for e in ends] == [e.measured for e in ends]


@pytest.mark.parametrize("simulation", [SAMPLED, NONE])
def test_rows_that_came_since_keys_were_made_wait_in_ideal_rounds_too(simulation):
    models = []
    for each in (SimulationPlan(), simulation):
        found = []
        for key_rounds in (1, 3):
            settings = two_server_plan({**LASTING, "key_rounds": key_rounds}, simulation=each)
            fed = federation(settings, clients=8)
            finished(fed, 1)
            for participant in fed.participants.values():
                real = participant.local.real
                moved = np.unique((real["goods"] + np.uint64(1)) % np.uint64(GOODS))
                participant.local.real = {**real, "goods": moved}
            finished(fed, 1)
            found.append(model_of(fed))
        assert found[0] != found[1]
        models.append(found)
    assert models[0] == models[1]


def test_a_real_round_is_not_written_with_what_an_ideal_one_stored_for_keys(monkeypatch):
    fed = federation(two_server_plan(LASTING, simulation=NONE), clients=8)
    finished(fed, 1)
    monkeypatch.setattr(Federation, "_is_real", lambda *given: True)
    with pytest.raises(MisuseError, match="keys of round 0: that round was ideal, and made none"):
        finished(fed, 1)


@pytest.mark.parametrize("of", ["server", "client"])
def test_what_an_ideal_round_stored_for_keys_has_a_name_at_every_party(of):
    """Before the first real message leaves, and in an ideal round they are what they are."""
    fed = federation(two_server_plan(LASTING, simulation=NONE), clients=8)
    finished(fed, 1)
    setup, params = fed.two_server, fed.last.state.over.domain.params
    store = setup.leader_keys if of == "server" else fed.participants[ClientId(0)].local.own_keys
    assert living(params, store, RoundId(1), ideal=True) is not None
    with pytest.raises(MisuseError, match="round 1 cannot be written with the keys of round 0"):
        living(params, store, RoundId(1))


# --- in memory, and nowhere else ------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["whole", "union"])
def test_an_ideal_round_cannot_be_stored(domain):
    roles = Roles(two_server_plan({"domain": domain}))
    model = roles.model()
    ideal = IdealSharedSum(roles.settings, ROUND, roles.signers, model["dense"], model["tables"])
    leader = LeaderRound(replace(roles.leader_setup(), ideal=ideal))
    helper = HelperRound(replace(roles.helper_setup(), ideal=ideal))
    client = TwoServerClientRound(replace(roles.client_setup(), ideal=ideal))
    client.start()
    leader.start()
    for role in (leader, helper, client):
        if domain == "whole" or role is not helper:
            with pytest.raises(MisuseError, match="cannot be stored"):
                role.snapshot()
    begun = roles.leader(), roles.helper()
    assert begun[0].snapshot() and begun[1].snapshot()
