"""Training ends when the validation part has had enough, and the test part has no say in it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from runs import toy
from tessera.api import simulate
from tessera.audit.canary_training import Guessing
from tessera.crypto.entropy import Entropy, ScriptedEntropy
from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.split import with_validation
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.metrics import ClickMetric
from tessera.plan import DPPlan, Plan
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.events import THE_METRICS
from tessera.privacy.dp.guarantee import Adjacency, Observer
from tessera.rounds.events import RoundFinished
from tessera.rounds.noise import noise_of
from tessera.runs.evaluation import EarlyStopping, Evaluation
from tessera.runs.folder import RunFolder
from tessera.runs.training import Training, complete


def test_the_last_tenth_of_every_client_is_held_out():
    data = ClientData(
        name="x",
        train=Examples({"at": np.arange(34)}),
        offsets=np.array([0, 20, 29, 34]),
        test=Examples({"at": np.arange(3)}),
        test_offsets=np.array([0, 1, 2, 3]),
        sizes={},
    )
    fewer, held = with_validation(data)
    assert_array_equal(held.test["at"], [18, 19])
    assert [len(held.test_of(client)) for client in range(3)] == [2, 0, 0]
    assert fewer.offsets.tolist() == [0, 18, 27, 32]
    assert_array_equal(fewer.train["at"], np.delete(np.arange(34), [18, 19]))
    assert fewer.test is data.test


@pytest.mark.parametrize("lower", [False, True])
def test_patience_by_hand(lower):
    sign = -1.0 if lower else 1.0
    stopping = EarlyStopping(2, lower, toy.task().data)
    for value, ends in ((0.5, False), (0.4, False), (0.6, False), (0.6, False), (0.1, True)):
        stopping.seen(sign * value)
        assert bool(stopping.reason) == ends
    again = EarlyStopping(2, lower, toy.task().data)
    again.go_on_from([None, sign * 0.5, None, sign * 0.4, sign * 0.6, sign * 0.6])
    assert not again.reason
    again.seen(sign * 0.1)
    assert again.reason == stopping.reason


def lines(folder):
    return [(r["round_id"], r["metric"], r["validation"]) for r in RunFolder.load(folder).rounds()]


@pytest.mark.parametrize("scheme", ["submodel", "central"])
def test_a_run_ends_early_and_a_resumed_one_at_the_same_round(tmp_path, scheme, monkeypatch):
    """The figure falls after the second test, whatever is trained."""
    falling = iter(np.linspace(0.9, 0.1, 40))
    monkeypatch.setattr(
        EarlyStopping, "after", lambda self, event, measure: _scripted(self, event, falling)
    )
    plan = toy.plan(scheme, simulation={"patience": 2, "evaluate_every": 1})
    run = simulate(toy.task(), plan, 10, out=tmp_path / "a", progress=False)
    assert len(lines(run.folder)) == 3
    (ended,) = [e for e in RunFolder.load(run.folder).events() if e["event"] == "TrainingEnded"]
    assert "validation part" in ended["reason"]
    # Stopped after two rounds and gone on: the tests before count.
    falling = iter(np.linspace(0.9, 0.1, 40))
    half = simulate(toy.task(), plan, 2, out=tmp_path / "b", progress=False)
    assert len(lines(half.folder)) == 2
    simulate(toy.task(), plan, 10, out=tmp_path / "b", resume=True, progress=False)
    assert len(lines(half.folder)) == 3


def _scripted(stopping, event, values):
    if not isinstance(event, RoundFinished) or event.metric is None:
        return event
    value = float(next(values))
    stopping.seen(value)

    return replace(event, validation=value)


def test_the_validation_figure_is_that_of_the_held_out_part(tmp_path):
    plan = toy.plan("submodel", simulation={"patience": 50, "evaluate_every": 2, "rounds": 4})
    run = simulate(toy.task(), plan, 4, out=tmp_path / "a", progress=False)
    found = lines(run.folder)
    assert [round_id for round_id, metric, _ in found if metric is not None] == [1, 3]
    for _, metric, validation in found:
        assert (metric is None) == (validation is None)
        assert metric is None or metric != validation


def test_without_ten_examples_there_is_nothing_to_hold_out():
    data = toy.task().data
    few = ClientData(
        name="few",
        train=data.train.take(slice(0, 8)),
        offsets=np.array([0, 4, 8]),
        test=data.test.take(slice(0, 2)),
        test_offsets=np.array([0, 1, 2]),
        sizes=data.sizes,
        category_of=data.category_of,
    )

    with pytest.raises(ConfigError, match="patience = 3"):
        EarlyStopping.of(
            replace(toy.task(), data=few), toy.plan("submodel", simulation={"patience": 3})
        )


# --- with noise -----------------------------------------------------------------------------------

NOISE = {"unit": "user", "epsilon": 3.0, "delta": 1e-5, "trust": "server"}
TESTS = 8


def noisy_plan(**more) -> Plan:
    simulation = {"patience": 2, "evaluate_every": 1, "rounds": TESTS, "metrics": "federated"}
    simulation |= more.pop("simulation", {})
    section = DPPlan(**{**NOISE, **more})
    return complete(toy.plan("fedavg", dp=section, simulation=simulation), toy.task())


@pytest.mark.parametrize(
    "more",
    [
        {"simulation": {"metrics": "central"}},
        {"unit": "item", "epsilon": 0.0, "noise": 1.0, "trust": "local"},
    ],
)
def test_patience_without_a_charged_metric_is_refused(more):
    with pytest.raises(ConfigError, match=r"patience = 2 with .dp. and no charged metric") as error:
        noisy_plan(**more)
    assert error.value.hint is not None and "leave patience out" in error.value.hint


def test_both_sums_of_a_test_are_charged_within_the_budget(tmp_path):
    plan = noisy_plan(simulation={"patience": 50})
    once = noisy_plan(simulation={"patience": 0})
    assert noise_of(plan)._tests == 2 * noise_of(once)._tests == 2 * TESTS
    # The same share of the budget over twice as many sums: more noise on each.
    assert noise_of(plan).setting.metrics == pytest.approx(
        np.sqrt(2.0) * noise_of(once).setting.metrics
    )
    with Training(toy.task(), plan) as training:
        ends = [e for e in training.run(TESTS) if isinstance(e, RoundFinished)]
        ledgers = [training.clients[c].local.ledger for c in training.clients.eligible]
    assert any(end.validation is not None and end.validation != end.metric for end in ends)
    for ledger in ledgers:
        tests = [e.event for e in ledger.entries if e.event.what == THE_METRICS]
        rounds = {e.event.round_id for e in ledger.entries if e.event.what != THE_METRICS}
        assert {e.round_id for e in tests} == rounds and all(e.times == 2 for e in tests)
        spent = noise_of(plan).guarantee(ledger)
        assert spent is not None and spent.epsilon <= 3.0 + 1e-6 and not spent.condition


class Scripted(Evaluation):
    """Scores that get better for some rounds and then do not, whatever the model is."""

    def __init__(self, script: int) -> None:
        super().__init__(toy.task(), None, None)
        self.rng_seed, self.round_id = script, 0

    def scores(self, dense, tables, examples):
        strength = min(self.round_id, 3 + self.rng_seed % 4) / 4.0
        drawn = np.random.default_rng([self.rng_seed, self.round_id]).normal(size=toy.USERS)
        own = drawn[examples["user"]]  # everybody holds out one example
        return (strength * (2.0 * examples["truth"] - 1.0) + own).astype(np.float32)


@cache
def worlds(flipped: int) -> tuple[ClientData, ClientData]:
    """The validation parts, and the same with all labels of one person flipped."""
    _, held = with_validation(toy.task().data)
    held = replace(held, test=held.test.with_field("truth", held.test[LABEL]))
    own = held.test["user"] == flipped
    labels = np.where(own, 1.0 - held.test[LABEL], held.test[LABEL]).astype(np.float32)
    return held, replace(held, test=held.test.with_field(LABEL, labels))


def stopped(held: ClientData, script: int, plan: Plan, entropy: Entropy | None) -> int:
    """The round after which training ends, by the shipped figures and the shipped rule."""
    evaluation = Scripted(script)
    everybody = {ClientId(c): ClientId(c) for c in range(held.clients)}

    def measure(held: ClientData, round_id: RoundId) -> float | None:
        evaluation.round_id = int(round_id)
        if entropy is None:  # as it was
            scores = np.concatenate(
                [evaluation.scores(None, {}, held.test_of(c)) for c in range(held.clients)]
            )
            return ClickMetric().measures(scores, held.test)["AUC"]
        return evaluation.federated(plan, round_id, everybody, None, {}, entropy, validation=held)

    stopping = EarlyStopping(plan.simulation.patience, False, held)
    for round_id in range(TESTS):
        stopping.after(finished(round_id), measure)
        if stopping.reason:
            return round_id
    return TESTS


def finished(round_id: int) -> RoundFinished:
    counts = ("cohort", "survivors", "union_rows", "union_residual", "rows_opened", "weight")
    rows = ("rows_below_quorum", "rows_shrunk", "rows_lost")
    costs = ("bytes_up", "bytes_down", "client_seconds", "server_seconds")
    return RoundFinished(
        round_id=round_id,
        measured=False,
        secure=False,
        epsilon=0.0,
        condition="",
        metric=0.5,
        **dict.fromkeys((*counts, *rows), 0),
        **{name: {} for name in costs},
    )


def flips(script: int, plan: Plan) -> list[int]:
    """Whose labels, flipped, have training end at another round by exact figures."""
    usual = stopped(worlds(0)[0], script, plan, None)
    everybody = range(toy.USERS)
    return [one for one in everybody if stopped(worlds(one)[1], script, plan, None) != usual]


def test_exact_figures_stop_at_another_round_for_one_persons_labels():
    """As it was: in most of 12 runs somebody's labels alone move the last round."""
    plan = noisy_plan()
    assert sum(bool(flips(script, plan)) for script in range(12)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("runs", [300, pytest.param(3000, marks=pytest.mark.campaign)])
def test_the_stopping_round_tells_no_more_than_is_claimed(runs):
    """Who knows everything but one person's labels guesses them by when training ended.

    A bound above the claim at a level of 99.9 % would fail an honest account once in 1,000 tests.
    """
    plan, coins = noisy_plan(), np.random.default_rng(5).random(runs) < 0.5
    script = next(s for s in range(12) if flips(s, plan))
    parts = worlds(flips(script, plan)[0])
    (event,) = noise_of(plan).setting.metrics_events(TESTS)
    claim = epsilon_of(
        [(event.view(Observer.READERS), TESTS)], adjacency=Adjacency.ZERO_OUT, delta=1e-5
    )
    ends = {
        noisy: np.array(
            [
                stopped(
                    parts[int(there)], script, plan, ScriptedEntropy(b"%d" % run) if noisy else None
                )
                for run, there in enumerate(coins[: runs if noisy else 60])
            ]
        )
        for noisy in (True, False)
    }
    # The best guess by the round, from the first half; judged by the second.
    for noisy, found in ends.items():
        half = len(found) // 2
        first, there = found[:half], coins[:half]
        odds = {
            end: (((first == end) & there).sum() + 1.0) / (((first == end) & ~there).sum() + 1.0)
            for end in range(TESTS + 1)
        }
        scores = np.array([odds[int(end)] for end in found[half:]])
        guessed = Guessing(scores, coins[half : len(found)])
        bound = guessed.bound(delta=1e-5, level=0.999)
        right = np.mean((scores > 1.0) == coins[half : len(found)])
        print(
            f"attack 8, in memory, {'charged' if noisy else 'exact'} figures: {len(found)} draws, "
            f"{right:.1%} right, epsilon >= {bound:.3f}, claimed {claim:.3f}"
        )
        assert (bound <= claim) is noisy
