"""Sums that are no updates, with noise: lengths, enough shares, charges first, what is hidden."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from runs import raters
from tessera.api import simulate
from tessera.audit.canary_training import Guessing
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.ring import Ring
from tessera.data.examples import LABEL, Examples
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.compression import signed
from tessera.learning.metrics import ClassMetric, ClickMetric, RatingMetric
from tessera.plan import DPPlan, Plan, SimulationPlan
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.events import THE_METRICS, THE_SETUP_SUM
from tessera.privacy.dp.guarantee import Adjacency, Observer
from tessera.privacy.dp.ledger import BudgetExceeded
from tessera.privacy.dp.mechanism import GaussianNoise, GaussianShares
from tessera.privacy.dp.noise_setting import LEAST_SHARE
from tessera.rounds.events import RoundFinished
from tessera.rounds.noise import noise_of
from tessera.runs import statistics
from tessera.runs.statistics import WORDS, NoisyStatistic, SharedTotal, sum_params
from tessera.runs.training import Training, complete

SCHEMES = {"each": "two-server", "shares": "secure-fedavg", "server": "fedavg", "local": "fedavg"}
SECTION = DPPlan(unit="user", noise=0.5, trust="server", delta=1e-5)


def planned(trust: str = "server", *, metrics: str = "federated", task=None, **keys) -> Plan:
    plan = Plan(
        scheme=SCHEMES[trust],
        cohort=10,
        simulation=SimulationPlan(rounds=4, evaluate_every=2, crypto="none", metrics=metrics),
        dp=replace(SECTION, trust=trust, **keys),
    )
    return complete(plan, task or raters.task())


def statistic(plan: Plan, seed: bytes = b"x", **more) -> NoisyStatistic:
    given = {"what": "metrics", "noise": 2.0, "words": 3, **more}
    return NoisyStatistic(plan=plan, entropy=ScriptedEntropy(seed), **given)


# --- lengths and shares ---------------------------------------------------------------------------

ANY = arrays(np.float64, 3, elements=st.floats(width=64))


@given(ANY)
def test_no_part_is_longer_than_it_is_accounted_for(part):
    found = statistic(bare_plan())
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = found.rounded(part)
    assert sum(int(x) ** 2 for x in rounded) <= found.scale**2
    if not np.isfinite(part).all():
        assert not rounded.any()


def bare_plan(trust: str = "server", cohort: int = 10) -> Plan:
    return replace(Plan(scheme=SCHEMES[trust], cohort=cohort), dp=replace(SECTION, trust=trust))


@pytest.mark.parametrize("members", [*range(10, 20), 250])
def test_shares_are_enough_for_the_fewest_survivors_of_their_own_sum(members):
    """A group is up to twice a cohort, and may lose as large a part of it."""
    plan = bare_plan("shares")
    found = statistic(plan)
    fewest = sum_params(plan, "metrics", RoundId(0), members, 3).min_survivors
    assert found.counted(members) == fewest - plan.corrupt_shares
    lost_of_a_cohort = plan.cohort - plan.least_survivors
    if members > 13:  # what a cohort loses at most is not what they do
        assert members - lost_of_a_cohort > fewest


def test_shares_that_are_not_enough_open_nothing():
    def part(_):
        raise AssertionError("nobody is asked")

    assert statistic(bare_plan("shares")).over_cohort([ClientId(1)], part) is None
    with pytest.raises(ConfigError, match="nobody is left"):
        statistic(bare_plan("shares")).over_all([ClientId(1)], part)


@pytest.mark.parametrize("trust", SCHEMES)
def test_the_sum_has_the_noise_that_it_says(trust):
    """Within five standard errors of a deviation: wrong once in a million."""
    plan, clients = bare_plan(trust), [ClientId(c) for c in range(12)]
    part = {c: np.array([0.1 * c, -0.3, 0.0]) for c in clients}
    exact = sum(p * min(1.0, 1.0 / np.linalg.norm(p)) for p in part.values())
    runs = [
        statistic(plan, b"%d" % seed).over_cohort(clients, part.__getitem__) for seed in range(30)
    ]
    off = np.concatenate([run.sum - exact for run in runs])
    assert off.std() == pytest.approx(runs[0].deviation, rel=5.0 / math.sqrt(2.0 * off.size))
    assert runs[0].deviation >= 2.0


@pytest.mark.parametrize("trust", ["shares", "each"])
def test_the_account_is_not_below_that_of_the_integers_that_are_summed(trust):
    """An upper bound over every number of words and shares that there can be."""
    plan = planned(trust, noise=2.0)
    (event,) = noise_of(plan).setting.metrics_events()
    claimed = event.view(Observer.CLIENTS)
    assert isinstance(claimed, GaussianShares)
    for members in (10, 19, 1000):
        found = statistic(plan, noise=noise_of(plan).statistic_noise(THE_METRICS))
        honest = found.counted(members) if trust == "shares" else 1
        deviation = found.noise * found.scale / math.sqrt(honest)
        assert deviation >= LEAST_SHARE
        real = GaussianShares(deviation=deviation, shares=honest, moves=found.scale, words=2**20)
        assert real.concentrated <= claimed.concentrated * (1.0 + 1e-12)


@pytest.mark.parametrize("trust", ["server", "each"])
def test_a_liar_at_the_wrap_of_the_ring_learns_nothing_of_a_part(trust, monkeypatch):
    """A sum that is centred before its noise jumps by the whole ring with the victim's part: 20 of
    20. Of 20 with noise of 20 lengths 10.4 on average, 18 or more by chance once in 3,000."""
    plan, wrap = planned(trust), 2**47 - 1
    exact, truly, lies = NoisyStatistic._summed, SharedTotal.opened, np.array([wrap, 0, 0])

    def opened(self, noise):
        self.leader = WORDS.add(self.leader, WORDS.from_ints(lies))
        return truly(self, noise)

    def centred(self, noise):
        sums = WORDS.add(WORDS.add(self.leader, WORDS.from_ints(lies)), self.helper)
        return signed(sums, WORDS) + np.sum(noise, axis=0)

    monkeypatch.setattr(SharedTotal, "opened", opened)

    def found(there: bool, seed: int) -> float:
        def summed(self, members, part, group):
            total, masked = exact(self, members, part, group)
            return signed(WORDS.from_ints(total + lies), WORDS), masked

        monkeypatch.setattr(NoisyStatistic, "_summed", summed)
        given = statistic(plan, b"wrap %d" % seed, noise=20.0)
        own = np.array([1.0 if there else 0.0, 0.0, 0.0])
        return float(
            given.over_cohort([ClientId(c) for c in range(4)], lambda c: own * (c == 1)).sum[0]
        )

    def right() -> int:
        return sum((found(bool(s % 2), s) < 0) == bool(s % 2) for s in range(20))

    assert 3 <= right() <= 17
    if trust == "each":
        monkeypatch.setattr(SharedTotal, "opened", centred)
    else:
        monkeypatch.setattr(statistics, "WORDS", Ring(62))  # noise on sums that were centred
    assert right() == 20


def test_noise_that_is_too_narrow_is_refused():
    with pytest.raises(ConfigError, match="out of range"):
        statistic(bare_plan(), noise=1e-5)


# --- charges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", SCHEMES)
def test_set_up_and_tests_are_charged_within_the_budget(trust):
    task = raters.task()
    plan = planned(trust, noise=0.0, epsilon=3.0)
    assert noise_of(plan).dp.setup
    assert noise_of(plan).lasts == plan.participation.most < 4  # the seed has nobody in all rounds
    with Training(task, plan, entropy=ScriptedEntropy(b"charged")) as training:
        ends = [e for e in training.run(4) if isinstance(e, RoundFinished)]
        ledgers = [training.clients[c].local.ledger for c in training.clients.eligible]
    assert [end.metric is not None for end in ends] == [False, True, False, True]
    whats = [[e.event.what for e in ledger.entries] for ledger in ledgers]
    assert all(w[0] == THE_SETUP_SUM and w.count(THE_SETUP_SUM) == 1 for w in whats)
    assert sum(w.count(THE_METRICS) for w in whats) == 2 * plan.cohort
    for ledger in ledgers:
        spent = noise_of(plan).guarantee(ledger)
        assert spent is not None and spent.epsilon <= 3.0 + 1e-6 and not spent.condition


def test_nobodys_part_leaves_before_everybody_is_charged(monkeypatch):
    """A budget that does not cover it is an error, and no word has left."""
    left = []
    monkeypatch.setattr(NoisyStatistic, "over_all", lambda *_: left.append(1))
    plan = planned(noise=0.0, epsilon=3.0)
    small = replace(plan, dp=replace(noise_of(plan).dp, epsilon=0.01))
    with pytest.raises(BudgetExceeded):
        Training(raters.task(), small)
    selected = replace(
        small,
        dp=replace(noise_of(small).dp, rows="selected", setup=0.0),
        update=replace(small.update, average="examples"),
    )
    with pytest.raises(BudgetExceeded):
        Training(raters.task(factors=0, mask="linear", penalty=1.0, refit=True), selected)
    assert not left


def test_units_that_a_clients_part_does_not_bound_are_given_the_exact_sums():
    plan = planned("local")
    item = replace(
        plan,
        dp=DPPlan(unit="subject", noise=1.0, trust="local"),
        training=replace(plan.training, weight_decay=0.0, epochs=1, batch=4),
    )
    assert THE_METRICS in noise_of(item).exact and not noise_of(item).noisy_metrics
    assert {THE_METRICS, THE_SETUP_SUM} <= set(noise_of(item).setting_with(setup=True).sight.exact)
    assert not {THE_METRICS, THE_SETUP_SUM} & set(
        noise_of(plan).setting_with(setup=True).sight.exact
    )


def test_a_test_that_the_plan_does_not_have_is_not_taken():
    plan = planned()
    with Training(raters.task(), plan, entropy=ScriptedEntropy(b"early")) as training:
        ends = [e for e in training.run(1) if isinstance(e, RoundFinished)]
    assert ends[0].metric is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"setup": 1.0}, "share of the budget"),
        ({"metrics": 0.0}, "share of the budget"),
        ({"counted": 0}, "counted is 1 or more"),
        ({"setup": 0.1, "unit": "subject"}, "bounds nobody else"),
    ],
)
def test_shares_of_the_budget_that_cannot_be(keys, says):
    with pytest.raises(ConfigError) as refused:
        replace(SECTION, **{"trust": "local", **keys})
    assert says in f"{refused.value} {refused.value.hint}"


def test_shares_of_the_budget_leave_some_for_the_rounds():
    plan = planned()
    with pytest.raises(ConfigError, match="nothing for the rounds"):
        noise_of(replace(plan, dp=replace(SECTION, setup=0.5, metrics=0.5))).events(RoundId(0))


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", SCHEMES)
def test_with_little_noise_figures_are_those_without(trust):
    task, plan = raters.task(), planned(trust, noise=0.05, counted=5)
    means, scores = [], []
    for each in (plan, plan.with_simulation(metrics="central")):
        with Training(task, each, entropy=ScriptedEntropy(b"same")) as training:
            ends = [e for e in training.run(4) if isinstance(e, RoundFinished)]
            means.append(training.setup.facts["mean"])
            scores.append(ends[-1].metric)
    exact = float(task.data.train[LABEL].mean())
    assert means[0] != exact and means[0] == pytest.approx(exact, rel=0.3)
    assert scores[0] != scores[1] and scores[0] == pytest.approx(scores[1], rel=0.3)


def test_few_numbers_give_the_same_metric():
    rng = np.random.default_rng(0)
    labels = (rng.random(400) < 0.4).astype(np.float32)
    scores = (labels + rng.normal(0, 1.0, 400)).astype(np.float32)
    clicks = Examples({LABEL: labels})
    click = ClickMetric()
    assert click.from_few(click.few(scores, clicks)) == pytest.approx(
        click.measures(scores, clicks)["AUC"], abs=0.02
    )
    stars = Examples({LABEL: rng.integers(1, 6, 400).astype(np.float32)})
    rating = RatingMetric(1.0, 5.0)
    guess = np.full(400, 3.2)
    assert rating.from_few(rating.few(guess, stars)) == pytest.approx(
        rating.measures(guess, stars)["RMSE"]
    )
    assert math.isnan(rating.from_few(np.array([-3.0, 1.0])))
    assert math.isnan(rating.from_few(np.array([3.0, -1.0])))
    right = ClassMetric(classes=2)
    logits, classes = rng.normal(size=(50, 2)), Examples({LABEL: rng.integers(0, 2, 50)})
    assert right.from_few(right.few(logits, classes)) == pytest.approx(
        right.measures(logits, classes)["accuracy"]
    )


# --- what is hidden -------------------------------------------------------------------------------


def guesses(plan: Plan, noise: float, runs: int) -> Guessing:
    """An attacker who sees every sum, and knows all parts but whether one client sent its own."""
    clients = [ClientId(c) for c in range(10)]
    coins = np.random.default_rng(3).random(runs) < 0.5
    own = np.array([0.6, 0.8, 0.0])
    scores = []
    for run, there in enumerate(coins):
        parts = {c: np.full(3, 0.1) for c in clients} | {ClientId(0): own * bool(there)}
        total = statistic(plan, b"run %d" % run, noise=noise).over_cohort(clients, parts.get)
        scores.append(float(total.sum @ own))
    return Guessing(np.array(scores), coins)


@pytest.mark.parametrize("trust", ["server", "shares", "each"])
def test_a_client_is_hidden_in_a_statistic_within_the_claim_and_not_without_noise(trust):
    plan = bare_plan(trust)
    claim = epsilon_of([(GaussianNoise(2.0), 1)], adjacency=Adjacency.ZERO_OUT, delta=1e-5)
    assert guesses(plan, 2.0, 200).bound(delta=1e-5, level=0.99) <= claim
    assert guesses(plan, 0.02, 200).bound(delta=1e-5, level=0.99) > claim


def test_with_shares_for_the_cohort_only_a_larger_group_is_short_of_noise(monkeypatch):
    """What was wrong: leader and dropouts of a group of 19 leave less noise than is claimed."""
    plan, members = bare_plan("shares"), 19
    lost = plan.cohort - plan.least_survivors
    monkeypatch.setattr(NoisyStatistic, "counted", lambda self, n: n - lost - plan.corrupt_shares)
    found = statistic(plan)
    fewest = sum_params(plan, "metrics", RoundId(0), members, 3).min_survivors
    left = (fewest - plan.corrupt_shares) / found.counted(members)
    assert left < 1.0
    monkeypatch.undo()
    assert (fewest - plan.corrupt_shares) / found.counted(members) >= 1.0


# --- stopped and gone on --------------------------------------------------------------------------


def test_a_run_that_goes_on_does_not_release_its_sums_again_with_other_noise(tmp_path):
    """Two noises on one sum are two releases, and are charged as one: such a run is refused, as
    one over other data is."""
    task, plan = raters.task(), planned()
    simulate(task, plan, 2, out=tmp_path / "run", insecure_test_entropy="kept")
    longer = plan.with_simulation(rounds=8)
    with pytest.raises(ConfigError, match="released twice"):
        simulate(task, longer, out=tmp_path / "run", resume=True)
    labels = task.data.train[LABEL].copy()
    labels[0] = 5.0 if labels[0] < 5.0 else 1.0
    other = replace(task, data=replace(task.data, train=task.data.train.with_field(LABEL, labels)))
    with pytest.raises(ConfigError, match="other data"):
        simulate(other, plan, 4, out=tmp_path / "run", resume=True)
    again = simulate(task, plan, 4, out=tmp_path / "run", resume=True)
    assert len(again.rounds) == 4


@pytest.mark.parametrize("width_in_address", [True, False])
def test_one_sum_at_two_scales_of_noise_shows_no_exact_value(width_in_address, monkeypatch):
    """With the same coins at both scales an attacker takes most of the noise off."""
    if not width_in_address:
        same = property(lambda self: (self.plan.federation, self.what, 0))
        monkeypatch.setattr(NoisyStatistic, "_address", same)
    plan, clients = bare_plan(), [ClientId(0), ClientId(1)]
    marks = np.random.default_rng(0).normal(size=300)
    marks /= 2.0 * np.linalg.norm(marks)

    def seen(noise):
        found = statistic(plan, noise=noise, words=300).over_cohort(clients, lambda _: marks)
        return found.sum

    one, two = 3.0, 2.0
    solved = (seen(one) * two - seen(two) * one) / (two - one)
    error = float(np.abs(solved - 2.0 * marks).mean())
    independent = 0.8 * math.hypot(two * one, one * two)  # mean size of a Gaussian
    assert (error > 0.7 * independent) is width_in_address


def test_the_same_noise_is_never_under_two_statistics():
    """Each is told apart by its name and round; drawn again it is the same."""
    plan, clients = bare_plan(), [ClientId(0), ClientId(1)]
    parts = {c: np.zeros(3) for c in clients}
    sums = [
        statistic(plan, what=what, round_id=RoundId(at)).over_cohort(clients, parts.get).sum
        for what in ("metrics", "set-up")
        for at in (0, 1)
    ]
    assert len({tuple(s) for s in sums}) == 4
    again = statistic(plan, what="metrics").over_cohort(clients, parts.get).sum
    np.testing.assert_array_equal(sums[0], again)


# --- a client whose training fails ----------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["two-server"])
def test_a_client_that_adds_its_own_noise_does_so_when_its_training_fails(scheme, monkeypatch):
    """Else zeros without noise would show who failed, which follows from its data."""
    task = raters.task(factors=0, mask="linear", penalty=1.0, refit=True)
    plan = Plan(
        scheme=scheme,
        cohort=6,
        simulation=SimulationPlan(rounds=1, crypto="none"),
        dp=replace(SECTION, trust="local", noise=1.0),
    )
    with Training(task, complete(plan, task), entropy=ScriptedEntropy(b"fails")) as training:
        learner, sent = training.learner.learner, {}
        whole = learner.train

        def train(jobs, **given):
            if any(job.client == 3 for job in jobs):
                raise ValueError("a bad example")
            return whole(jobs, **given)

        kept = training._train_cohort

        def watched(round_id, submodels):
            outcome = kept(round_id, submodels)
            sent.update(outcome.updates)
            return outcome

        monkeypatch.setattr(learner, "train", train)
        training.federation._trainer = watched
        training.federation.course.cohorts.sample = lambda _: [ClientId(c) for c in range(6)]
        list(training.federation.round())
    failed = sent[ClientId(3)]
    assert failed.weight == 1
    assert all(part.values.all() for part in failed.tables.values())  # noise on every value
