"""An ideal round gives the model that the real one gives, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rounds.population import GOODS, federation, plan
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId
from tessera.plan import SimulationPlan
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.simulation.faults import Delay, Drop, dropout_places, random_dropouts

SAMPLED = SimulationPlan(crypto="sampled", crypto_every=10_000)
"""Round 0 is real, all others are ideal."""


def model_of(fed) -> tuple[bytes, bytes]:
    return fed.dense.tobytes(), fed.tables["goods"].values(
        np.arange(GOODS, dtype=np.uint64)
    ).tobytes()


def both(settings, rounds: int = 3, faults=None, **more):
    """The same rounds, real and ideal from the second on; and the events of each."""
    ends, models = [], []
    for each in (settings, replace(settings, simulation=SAMPLED)):
        fed = federation(each, clients=12, faults=faults, **more)
        ends.append([e for e in fed.run(rounds) if isinstance(e, RoundFinished | RoundAbort)])
        models.append(model_of(fed))
    return ends, models


@pytest.mark.parametrize("scheme", ["fedavg", "submodel", "secure-fedavg", "secure-submodel"])
@pytest.mark.parametrize("dropout", [0.0, 0.15])
def test_the_model_is_the_same_to_the_bit(scheme, dropout):
    settings = plan(scheme)
    faults = random_dropouts(dropout, 3, settings) if dropout else None
    ends, models = both(settings, rounds=6, faults=faults)
    assert models[0] == models[1]
    assert [type(e) for e in ends[0]] == [type(e) for e in ends[1]]
    real, ideal = ([e for e in of if isinstance(e, RoundFinished)] for of in ends)
    assert len(real) >= 4
    assert [e.measured for e in ideal] == [e.round_id == 0 for e in ideal]
    assert not any(sum(e.bytes_up.values()) for e in ideal if e.round_id)
    for name in ("survivors", "union_rows", "rows_opened", "rows_below_quorum", "rows_shrunk"):
        assert [getattr(e, name) for e in real] == [getattr(e, name) for e in ideal]
    assert [e.epsilon for e in real] == [e.epsilon for e in ideal]
    if dropout:
        assert any(e.survivors < 8 for e in real)


@pytest.mark.parametrize(("place", "stage"), dropout_places(plan("secure-submodel")))
def test_a_client_that_leaves_is_missing_where_it_would_be(place, stage):
    settings = plan("secure-submodel", privacy={"level": "cpp4", "decoys": 0.0})
    (real, ideal), models = both(
        settings, faults=lambda _, cohort: [Drop(cohort[2], place, stage=stage)]
    )
    assert models[0] == models[1]
    assert [e.survivors for e in real] == [e.survivors for e in ideal]
    assert [e.union_rows for e in real] == [e.union_rows for e in ideal]


def test_with_no_cryptography_at_all_the_first_round_is_ideal_too():
    models, measured = [], []
    for crypto in ("every", "none"):
        fed = federation(plan(simulation=SimulationPlan(crypto=crypto)), clients=12)
        measured.append([e.measured for e in fed.run(2) if isinstance(e, RoundFinished)])
        models.append(model_of(fed))
    assert models[0] == models[1]
    assert measured == [[True, True], [False, False]]


def test_an_ideal_round_that_too_few_survive_is_aborted():
    (real, ideal), models = both(
        plan(), faults=lambda _, cohort: [Drop(c, "collect") for c in cohort[:4]]
    )
    assert all(isinstance(e, RoundAbort) for e in (*real, *ideal))
    assert models[0] == models[1]


def test_clients_with_a_quorum_of_their_own_are_heard():
    settings = plan("secure-submodel", privacy={"level": "cpp2", "decoys": 0.0})
    models = []
    for each in (settings, replace(settings, simulation=SAMPLED)):
        fed = federation(each, clients=12)
        for client in range(6):
            fed.participants[ClientId(client)].local.quorum = 3 + client % 3
        list(fed.run(3))
        models.append(model_of(fed))
    assert models[0] == models[1]


def test_a_strict_quorum_cannot_be_an_ideal_round():
    with pytest.raises(ConfigError, match="strict_quorum"):
        replace(plan(privacy={"strict_quorum": True}), simulation=SAMPLED)


def test_an_ideal_round_knows_no_other_faults():
    settings = replace(plan(), simulation=SAMPLED)
    fed = federation(settings, faults=lambda _, cohort: [Delay(cohort[0], "collect", 1.0)])
    list(fed.run(1))
    with pytest.raises(MisuseError, match="dropouts only"):
        list(fed.run(1))


@pytest.mark.parametrize("first", [1, 3])
def test_going_on_at_a_round_is_like_having_been_there(first):
    """Charges, periods and who may still take part are those of a run that was never stopped."""
    settings = plan(privacy={"level": "cpp3", "period_rounds": 2}, cohorts={"drawn": "schedule"})
    whole = federation(settings, clients=24)
    events = [e for e in whole.run(5) if isinstance(e, RoundFinished)]
    part = federation(settings, clients=24)
    list(part.run(first))
    rest = federation(settings, clients=24)
    rest.model.dense = part.dense
    for name, table in part.tables.items():
        ids = np.arange(table.size, dtype=np.uint64)
        rest.tables[name].put(ids, table.values(ids), np.ones(len(ids), dtype=np.int64))
    rest.go_on_at(first)
    later = [e for e in rest.run(5 - first) if isinstance(e, RoundFinished)]
    assert [e.round_id for e in later] == list(range(first, 5))
    assert [e.epsilon for e in later] == [e.epsilon for e in events[first:]]
    assert model_of(rest) == model_of(whole)
