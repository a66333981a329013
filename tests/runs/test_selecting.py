"""Rows selected with noise: its size, its price, what it lets through; what a union shows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs import raters, toy
from tessera.api import simulate
from tessera.audit.canary_training import Guessing
from tessera.crypto.entropy import RootedEntropy, ScriptedEntropy
from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId
from tessera.learning.popularity import LEAST, NOISY, Popularity
from tessera.plan import CohortsPlan, DPPlan, Plan, SimulationPlan
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.events import THE_POPULARITY
from tessera.privacy.dp.guarantee import Adjacency
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.noise import noise_of
from tessera.runs.setup import RowSelection, marked, select_rows
from tessera.runs.statistics import NoisyStatistic, SharedTotal
from tessera.runs.training import Training, complete
from tessera.simulation.federation import Federation

NOISE = 0.8
SECTION = DPPlan(unit="user", noise=NOISE, trust="server", rows="selected", delta=1e-5)
BIASES = {"factors": 0, "mask": "linear", "penalty": 1.0, "refit": True}
FILMS = 40


def planned(scheme: str = "fedavg", task=None, **dp_keys) -> Plan:
    task = task or raters.task(**BIASES)
    section = replace(SECTION, **dp_keys)
    plan = Plan(
        scheme=scheme,
        cohort=20,
        simulation=SimulationPlan(rounds=3, evaluate_every=1, crypto="none"),
        dp=section,
    )
    return complete(plan, task)


def selecting(plan: Plan, seed: bytes, task=None) -> Popularity:
    task = task or raters.task(**BIASES)
    bound = task.bind(task.build(0))
    clients = [ClientId(c) for c in range(task.data.clients)]
    return RowSelection(task.data, bound, plan, ScriptedEntropy(seed)).popularity(clients, None)


STATISTIC = NoisyStatistic(
    plan=replace(Plan(scheme="fedavg", cohort=2), dp=SECTION),
    entropy=ScriptedEntropy(b"marks"),
    what="selection",
    noise=1.0,
    words=110,
)


# --- marks ----------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 99), max_size=100), st.sets(st.integers(0, 9)))
def test_nobodys_marks_are_longer_than_one(items, tags):
    rows = {
        "items": np.array(sorted(items), np.uint64),
        "tags": np.array(sorted(tags), np.uint64),
    }
    marks = STATISTIC.rounded(marked(rows, {"items": 100, "tags": 10}))
    assert math.sqrt(float((marks.astype(np.float64) ** 2).sum())) <= STATISTIC.scale
    assert set(np.flatnonzero(marks)) == {*items, *(100 + t for t in tags)}
    assert len(set(marks[marks > 0].tolist())) <= 1


SOURCES = {"server": 1.0, "local": 20.0, "each": 2.0}


@pytest.mark.parametrize("trust", ["server", "local", "each", "shares"])
def test_the_histogram_has_the_noise_that_it_says_whoever_adds_it(trust):
    """Within five standard errors of a deviation over 40 runs: wrong once in a million."""
    scheme = {"each": "two-server", "shares": "secure-fedavg"}.get(trust, "fedavg")
    plan = replace(planned(), dp=None)
    plan = replace(plan, scheme=scheme)
    plan = replace(plan, dp=replace(SECTION, trust=trust))
    exact = selecting(replace(plan, dp=replace(SECTION, trust=trust, noise=1e-2)), b"exact")
    runs = [selecting(plan, b"%d" % seed) for seed in range(40)]
    off = np.concatenate([run.marks["items"] - exact.marks["items"] for run in runs])
    assert off.std() == pytest.approx(runs[0].deviation, rel=5.0 / math.sqrt(2.0 * off.size))
    assert abs(off.mean()) < 5.0 * runs[0].deviation / math.sqrt(off.size)
    honest = plan.least_survivors - plan.corrupt_shares
    sources = SOURCES.get(trust, 20.0 / max(honest, 1))
    alone = noise_of(plan).statistic_noise(THE_POPULARITY)
    assert runs[0].deviation == pytest.approx(alone * math.sqrt(sources))


def test_masked_shares_add_up_to_the_marks_and_all_shares_of_the_noise():
    """The secure sum opens what the clear one gives, to the bit."""
    plan = replace(planned(), dp=None)
    plan = replace(plan, scheme="secure-fedavg")
    plan = replace(plan, dp=replace(SECTION, trust="shares"))
    masked = plan.with_simulation(crypto="every")
    clear, hidden = selecting(plan, b"x"), selecting(masked, b"x")
    np.testing.assert_array_equal(clear.marks["items"], hidden.marks["items"])


# --- one pass of a schedule -----------------------------------------------------------------------


def scheduled(**more) -> Plan:
    plan = replace(planned(), dp=None, scheme="two-server", cohort=6)
    section = CohortsPlan(drawn="schedule", **more)
    return replace(plan, dp=replace(SECTION, trust="each"), cohorts=section)


def test_marks_of_a_pass_are_held_in_shares_and_opened_once(monkeypatch):
    """Cohort after cohort; neither server has anything but random words before the end."""
    plan, opened, held = scheduled(), [], []
    truly, add = SharedTotal.opened, SharedTotal.add

    def opening(self, noise):
        opened.append([n.copy() for n in noise])
        return truly(self, noise)

    def adding(self, leader, helper):
        add(self, leader, helper)
        held.append((self.leader.copy(), self.helper.copy()))

    monkeypatch.setattr(SharedTotal, "opened", opening)
    monkeypatch.setattr(SharedTotal, "add", adding)
    task = raters.task(**BIASES)
    found = selecting(plan, b"marks", task)
    assert len(opened) == 1 and len(opened[0]) == 2
    assert (opened[0][0] != opened[0][1]).any()
    assert len(held) == found.clients == task.data.clients
    for shares in zip(*held, strict=True):  # of 48 bits: no word is small, as a sum of marks is
        words = np.concatenate(shares)
        assert (words > 2**40).mean() > 0.98
        assert len(np.unique(words)) == len(words)
    # The same sum and noise as over everybody at once, to the bit.
    at_once = selecting(replace(plan, cohorts=CohortsPlan(), cohort=task.data.clients), b"marks")
    np.testing.assert_array_equal(found.marks["items"], at_once.marks["items"])


def test_a_pass_has_the_rounds_of_the_schedule():
    plan, clients = scheduled(), [ClientId(c) for c in range(20)]
    rule = cohorts_of(plan)
    schedule = rule.scheduled(clients)
    assert rule.one_pass(clients) == [schedule.of_round(r) for r in range(schedule.rounds)]
    assert sorted(c for part in rule.one_pass(clients) for c in part) == clients


def test_a_sum_in_shares_is_opened_once_and_then_closed():
    total, nothing = SharedTotal(2), np.zeros(2, np.int64)
    total.add(np.array([1, 2], np.uint64), np.array([3, 4], np.uint64))
    assert total.opened([nothing, nothing]).tolist() == [4, 6]
    with pytest.raises(MisuseError, match="opened once"):
        total.opened([nothing, nothing])
    with pytest.raises(MisuseError, match="no other part"):
        total.add(np.array([1, 2], np.uint64), np.array([3, 4], np.uint64))


def test_a_choice_under_a_schedule_is_charged_to_everybody_once():
    task = raters.task(**BIASES)
    section = {"drawn": "schedule"}
    plan = Plan(
        scheme="two-server",
        cohort=5,
        cohorts=section,
        simulation=SimulationPlan(rounds=4, evaluate_every=4, crypto="none"),
        dp=replace(SECTION, trust="each"),
    )
    plan = complete(plan, task)
    assert plan.participation.most == 1 and plan.cohorts.separation == 4
    with Training(task, plan, entropy=ScriptedEntropy(b"charges")) as training:
        list(training.run(4))
        for client in training.clients.eligible:
            entries = training.clients[client].local.ledger.entries
            whats = [getattr(e.event, "what", "") for e in entries]
            assert whats.count(THE_POPULARITY) == 1 and whats[0] == THE_POPULARITY
            assert len({e.event.round_id for e in entries if e.reason.startswith("round")}) == 1


# --- the price ------------------------------------------------------------------------------------


def test_popularity_and_rounds_together_keep_the_budget():
    plan = planned(noise=0.0, epsilon=3.0)
    found, selection = noise_of(plan).dp.noise, noise_of(plan).statistic_noise(THE_POPULARITY)
    total = 1.0 / math.sqrt(3 / found**2 + 1 / selection**2)
    assert 1 / selection**2 == pytest.approx(0.1 / total**2)
    one = epsilon_of([(GaussianNoise(total), 1)], adjacency=Adjacency.ZERO_OUT, delta=1e-5)
    assert one == pytest.approx(3.0, rel=1e-3) and one <= 3.0 + 1e-6
    assert noise_of(plan).lasts == 3
    bare = planned(noise=0.0, epsilon=3.0, rows="own")
    assert noise_of(bare).dp.noise < found


def test_every_client_is_charged_for_its_marks_before_it_trains():
    task, plan = raters.task(**BIASES), planned(noise=0.0, epsilon=3.0)
    with Training(task, plan, entropy=ScriptedEntropy(b"charges")) as training:
        list(training.run(3))
        for client in training.clients.eligible:
            ledger = training.clients[client].local.ledger
            whats = [getattr(e.event, "what", "") for e in ledger.entries]
            assert whats.count(THE_POPULARITY) == 1 and whats[0] == THE_POPULARITY
        spent = noise_of(plan).guarantee(ledger)
    assert spent is not None and 2.99 < spent.epsilon <= 3.0 and not spent.condition


# --- what it is good for --------------------------------------------------------------------------


def test_sums_are_divided_by_popularity_and_rows_below_the_threshold_rest():
    found = Popularity(
        marks={"items": np.array([4.0, -1.0, 0.5, 9.0])}, clients=20, deviation=0.5, threshold=2.0
    )
    np.testing.assert_array_equal(found.selected["items"], [0, 3])
    ids, half = np.arange(4, dtype=np.uint64), np.full(4, 10)
    divided = found.divisors("items", ids, half, clip=2.0, noise=3.0)
    np.testing.assert_allclose(divided[[0, 3]], 2.0 * (np.array([2.0, 4.5]) + NOISY * 3.0))
    assert np.isinf(divided[[1, 2]]).all()
    least = found.divisors("items", ids, half, clip=1.0, noise=0.0)
    assert least[0] == pytest.approx(2.0 + LEAST / 2)  # half of the clients
    assert found.false_positives == pytest.approx(0.02275, abs=1e-5)


def test_rows_that_are_not_selected_stay_as_they_began(tmp_path):
    task = raters.task(**BIASES)
    plan = planned(threshold=1.0)
    with Training(task, plan, entropy=ScriptedEntropy(b"rows")) as training:
        list(training.run(2))
        chosen = training.popularity.selected["items"].astype(int)
        moved = np.flatnonzero(training.parameters()["items.weight"][:, 0])
    assert 0 < len(chosen) < FILMS
    np.testing.assert_array_equal(moved, chosen)


def test_a_run_over_selected_rows_is_stopped_and_goes_on(tmp_path):
    task, plan = raters.task(**BIASES), planned(noise=0.05)
    settings = {"insecure_test_entropy": "selected"}
    whole = simulate(task, plan, 3, out=tmp_path / "whole", **settings)
    simulate(task, plan, 1, out=tmp_path / "parts", **settings)
    parts = simulate(task, plan, 3, out=tmp_path / "parts", resume=True)
    assert [r["metric"] for r in parts.rounds] == [r["metric"] for r in whole.rounds]
    assert whole.facts["selection"]["tables"]["items"]["rows"] == FILMS
    assert whole.metric < min(whole.facts["trivial"].values())
    assert parts.export(task).exists()


def test_what_cannot_be_selected_is_refused():
    task = raters.task(**BIASES)
    own = replace(task, data=replace(task.data, public_rows=False))
    with pytest.raises(ConfigError, match="made of the data"):
        planned(task=own)
    with pytest.raises(ConfigError, match="row_limit = 30"):
        planned(row_limit=30)
    with pytest.raises(ConfigError, match="divided by the popularity"):
        plan = planned()
        replace(plan, update=replace(plan.update, average="rows"))
    with pytest.raises(ConfigError, match="scheme = 'submodel'"):
        planned("submodel")
    bare, fresh = replace(planned(), dp=None), RootedEntropy.fresh()
    assert select_rows(task.data, None, bare, [], fresh, lambda _: None) is None


# --- a client with a row of its own ---------------------------------------------------------------

OWN = 39
"""A film that client 0 alone may have rated."""


def with_own_row(present: bool):
    data = raters.films()
    keep = data.train["item"] != OWN
    keep |= data.train["user"] == 0
    items = np.where(data.train["item"] == OWN, 38, data.train["item"])
    first = int(data.offsets[0])
    items[first] = OWN if present else 0
    train = Examples({**data.train.fields, "item": items})
    return raters.task(replace(data, train=train), **BIASES)


@pytest.mark.slow
def test_the_exact_union_shows_a_row_of_ones_own_whatever_the_noise_on_values():
    """100 of 100: rows that open are a fact about who holds them, and no noise is on it."""
    right = 0
    for run in range(100):
        present = run % 2 == 0
        task = with_own_row(present)
        plan = complete(
            replace(
                raters.plan(
                    "secure-submodel",
                    cohort=20,
                    simulation={"crypto": "none"},
                    privacy={"level": "cpp4", "decoys": 0.0},
                ),
                dp=DPPlan(unit="user", noise=50.0, trust="server"),
            ),
            task,
        )
        with Training(task, plan, entropy=ScriptedEntropy(b"%d" % run)) as training:
            federation: Federation = training.federation
            list(federation.round())
            opened = federation.last.union["items"]
        right += (OWN in opened.astype(int)) is present
    assert right == 100


def guesses(plan: Plan, runs: int) -> Guessing:
    """An attacker who sees all marks, and knows everything but whether the row is there."""
    tasks = {present: with_own_row(present) for present in (False, True)}
    coins = np.random.default_rng(7).random(runs) < 0.5
    scores = [
        selecting(plan, b"own %d" % run, tasks[bool(present)]).marks["items"][OWN]
        for run, present in enumerate(coins)
    ]
    return Guessing(np.array(scores), coins)


def test_selection_hides_a_row_of_ones_own_within_its_claim_and_not_without_noise():
    plan = planned(noise=0.0, epsilon=1.0, selection=0.9)
    claim = epsilon_of(
        [(GaussianNoise(noise_of(plan).statistic_noise(THE_POPULARITY)), 1)],
        adjacency=Adjacency.ZERO_OUT,
        delta=1e-5,
    )
    assert claim < 1.0
    assert guesses(plan, 400).bound(delta=1e-5, level=0.99) <= claim
    loud = replace(plan, dp=replace(noise_of(plan).dp, noise=0.02, epsilon=0.0))
    assert guesses(loud, 400).bound(delta=1e-5, level=0.99) > claim


def test_selected_rows_of_a_model_with_derived_tables_are_learnt(tmp_path):
    plan = replace(toy.plan("fedavg"), dp=replace(SECTION, noise=0.1, threshold=0.0), training=None)
    plan = replace(plan, update=replace(plan.update, average="examples", clip=0.0))
    with Training(toy.task(), complete(plan, toy.task())) as training:
        list(training.run(1))
        assert {"items", "categories"} == set(training.popularity.selected)
