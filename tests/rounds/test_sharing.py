"""Sums in the clear beside masked ones, and whole models that carry their rows' counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rounds.population import GOODS, federation, plan
from tessera.errors import ConfigError
from tessera.plan import Scheme, Sharing, SimulationPlan, UpdatePlan
from tessera.rounds.events import RoundFinished
from tessera.simulation.faults import Drop

ROWS = UpdatePlan(average="rows")
EVERYTHING = {"level": "cpp5", "decoys": 0.0}


def rows_of(fed) -> np.ndarray:
    return fed.tables["goods"].values(np.arange(GOODS, dtype=np.uint64))


def trained(settings, rounds: int = 3, faults=None, choose=None):
    fed = federation(settings, clients=12, faults=faults)
    if choose is not None:
        choose(fed.participants)
    events = [e for e in fed.run(rounds) if isinstance(e, RoundFinished)]
    return fed, events


@pytest.mark.parametrize("scheme", ["fedavg", "secure-fedavg"])
def test_a_whole_model_with_counts_is_averaged_as_rows_are(scheme):
    """The same integers meet in both, so that nothing at all is different."""
    by_rows, _ = trained(plan("submodel"))
    whole, events = trained(plan(scheme, update=ROWS))
    assert_array_equal(rows_of(whole), rows_of(by_rows))
    assert_array_equal(whole.dense, by_rows.dense)
    assert all(e.survivors == 8 for e in events)
    other, _ = trained(plan(scheme))
    assert (rows_of(other) != rows_of(by_rows)).any()


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "secure-fedavg", "update": ROWS},
        {"scheme": "secure-submodel", "security": {"sharing": "auto", "indicator": 0.5}},
        {
            "scheme": "secure-fedavg",
            "update": ROWS,
            "security": {"sharing": "auto", "indicator": 0.5},
        },
    ],
)
def test_ideal_rounds_of_these_are_the_real_ones_to_the_bit(settings, dropout):
    def choose(members):
        for client, member in members.items():
            member.local.indicator = 0.1 if client % 3 == 0 else 0.9

    models, survivors = [], []
    for crypto in ({}, {"simulation": SimulationPlan(crypto="sampled", crypto_every=1000)}):
        faults = (lambda _, cohort: [Drop(cohort[3], "collect")]) if dropout else None
        fed, events = trained(plan(**settings, **crypto), faults=faults, choose=choose)
        models.append((fed.dense.tobytes(), rows_of(fed).tobytes()))
        survivors.append([e.survivors for e in events])
    assert models[0] == models[1] and survivors[0] == survivors[1]
    assert min(survivors[0]) == (7 if dropout else 8)


def test_masked_and_open_sums_give_one_model_within_quantisation():
    """Whoever sends in the clear, the sum is over everybody, and every rounding is unbiased."""

    def third(members):
        for client, member in members.items():
            member.local.sharing = Sharing.PLAIN if client % 3 == 0 else None

    settings = plan("secure-submodel", privacy=EVERYTHING)
    masked, _ = trained(settings, rounds=1)
    mixed, events = trained(settings, rounds=1, choose=third)
    plain, _ = trained(plan("submodel"), rounds=1)
    assert 0 < events[0].unmasked < 8 and events[0].survivors == 8 and events[0].secure
    step = settings.quantizer.clip / settings.quantizer.top
    for other in (mixed, plain):
        assert_allclose(rows_of(other), rows_of(masked), atol=8 * step)
        assert_allclose(other.dense, masked.dense, atol=8 * step)
    assert (rows_of(masked) != 0).any()


def test_a_mask_that_is_close_to_its_ratings_goes_in_the_open_by_itself():
    settings = plan("secure-submodel", security={"sharing": "auto", "indicator": 0.03})
    values = {0: 0.03, 1: 0.02, 2: 0.031, 3: None, 4: float("nan"), 5: 0.5}

    def choose(members):
        for client, member in members.items():
            member.local.indicator = values.get(int(client), 0.9)

    fed = federation(settings, clients=12)
    choose(fed.participants)
    bare = {int(c) for c, m in fed.participants.items() if m.local.sends_unmasked(settings)}
    assert bare == {0, 1}
    secure = replace(settings, security=replace(settings.security, sharing=Sharing.SECURE))
    assert not any(m.local.sends_unmasked(secure) for m in fed.participants.values())


def test_everybody_is_masked_where_too_few_would_be_left_to_it():
    def all_but_two(members):
        for client, member in members.items():
            member.local.sharing = Sharing.SECURE if client < 2 else Sharing.PLAIN

    _, events = trained(plan("secure-submodel"), choose=all_but_two, rounds=6)
    several = [e.unmasked for e in events]
    assert set(several) <= {0, 8}  # nobody in the clear, or no masked client in the cohort
    assert 0 in several


def test_all_in_the_open_is_the_plain_scheme():
    open_, events = trained(plan("secure-submodel", security={"sharing": "plain"}))
    plain, _ = trained(plan("submodel"))
    assert_array_equal(rows_of(open_), rows_of(plain))
    assert all(e.unmasked == 8 and not e.secure for e in events)


def test_what_cannot_be_split_is_refused():
    for security in ({"threat": "active"}, {"threshold": 6}):
        with pytest.raises(ConfigError, match="sharing = 'auto'"):
            plan("secure-submodel", security={"sharing": "auto", **security})
    with pytest.raises(ConfigError, match="sometimes"):
        plan("secure-submodel", security={"sharing": "sometimes"})


def test_part_of_a_cohort_has_a_plan_of_its_own():
    whole = plan("secure-fedavg", update=ROWS)
    part = whole.part(secure=False, clients=3)
    assert (part.scheme, part.cohort) == (Scheme.FEDAVG, 3) and part.counts_rows
    assert part.digest != whole.digest
