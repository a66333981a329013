"""Pairs under noise per user: one clipped vector of each client, noise on every cell."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tessera.audit.canary_training import lower_bound
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.sequences import Sequences, one_of, sequence_data
from tessera.errors import ConfigError
from tessera.learning.averaging import ServerStep
from tessera.learning.models.noisy_pairs import NoisyPairs, threshold_for
from tessera.learning.models.pairs import TABLE
from tessera.plan import Plan, SimulationPlan
from tessera.plan.dp import DPPlan
from tessera.rounds.no_noise import Figure
from tessera.rounds.noise import noise_of
from tessera.runs.training import Training, complete
from tessera.tasks.sequences import NEXT, sequence_task

USERS, ITEMS = 24, 30
TRUSTED = {"scheme": "submodel", "trust": "server", "rows": "all"}
EACH = {"scheme": "two-server", "trust": "each", "rows": "own"}
LISTED = {"scheme": "secure-submodel", "trust": "shares", "rows": "all"}


def events(seed: int = 2, users: int = USERS) -> Sequences:
    rng = np.random.default_rng(seed)
    own = [
        (rng.integers(ITEMS) + np.cumsum(rng.integers(1, 3, rng.integers(8, 15)))) % ITEMS
        for _ in range(users)
    ]
    user = np.repeat(np.arange(users), [len(each) for each in own])
    return Sequences.sorted(user, np.concatenate(own), None, users=users, items=ITEMS)


def a_task(of: Sequences | None = None, **options):
    data = sequence_data(
        "steps",
        of or events(),
        items=ITEMS,
        length=8,
        attributes={"decade": one_of(np.arange(ITEMS) // 10), "parity": one_of(np.arange(30) % 2)},
    )
    return sequence_task(data, title="steps", recommended=NEXT, model="pairs", **options)


def a_plan(how, task, *, crypto="none", threshold=0.0, **section) -> Plan:
    section = {"epsilon": 10.0, "delta": 1e-5, **section}
    plan = Plan(
        scheme=how["scheme"],
        cohort=task.data.clients,
        server=ServerStep(optimizer="sum", threshold=threshold) if threshold else None,
        simulation=SimulationPlan(rounds=1, crypto=crypto),
        dp=DPPlan(unit="user", trust=how["trust"], rows=how["rows"], **section),
    )
    return complete(plan, task)


def trained(how, task=None, *, secret=b"pairs", **more) -> Training:
    task = task or a_task()
    run = Training(task, a_plan(how, task, **more), entropy=ScriptedEntropy(secret))
    for _ in run.run(1):
        pass
    return run


def cells(run: Training) -> np.ndarray:
    return run.tables[TABLE].values(np.arange(ITEMS**2, dtype=np.uint64))[:, 0].astype(np.float64)


def exact(task) -> tuple[np.ndarray, np.ndarray]:
    """Both sums without noise, by their definition."""
    pairs = NoisyPairs(ITEMS, task.data.attributes)
    of_cells, dense = np.zeros(ITEMS**2), np.zeros(pairs.dense)
    for user in range(task.data.clients):
        cell, weight, own = pairs.part(task.data.events.of(user))
        of_cells[cell] += weight
        dense += own
    return of_cells, dense


# --- a client's vector ----------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("attributes", [{}, {"half": one_of(np.arange(ITEMS) // 15)}])
@pytest.mark.parametrize("many", [1, 2, 3, 30])
def test_everybodys_vector_has_length_one_at_most(ordered, attributes, many):
    pairs = NoisyPairs(ITEMS, attributes, ordered)
    own = np.random.default_rng(many).permutation(ITEMS)[:many]
    cell, weight, dense = pairs.part(own)
    square = float(np.square(weight).sum() + np.square(dense).sum())
    assert square <= 1.0 + 1e-9
    assert square == pytest.approx(1.0) or many == 1
    assert len(cell) <= pairs.most_pairs and len(dense) == pairs.dense


def test_shares_of_the_budget_are_those_that_are_stated():
    pairs = NoisyPairs(ITEMS, {"half": one_of(np.arange(ITEMS) // 15)})
    _, weight, dense = pairs.part(np.arange(20))
    squares = [np.square(part).sum() for part in (weight, dense[:4], dense[4:])]
    assert_allclose(squares, [0.6, 0.2, 0.2])


def test_pairs_count_by_how_far_apart_they_are_and_the_oldest_items_do_not():
    pairs = NoisyPairs(300)
    cell, weight, _ = pairs.part(np.arange(5))
    by = dict(zip(cell.tolist(), (weight / weight.max()).tolist(), strict=True))
    assert (
        by[1] == 1.0
        and by[2] == pytest.approx(np.exp(-1 / 3))
        and by[4] == pytest.approx(np.exp(-1.0))
    )
    assert 0 not in by and 300 not in by  # not an item with itself, nor back
    cell, _, dense = pairs.part(np.arange(300))
    assert cell.min() // 300 == 100 and not dense[:100].any()  # the latest 200


# --- sums with noise ------------------------------------------------------------------------------


@pytest.mark.parametrize("crypto", ["none", "every"])
@pytest.mark.parametrize("how", [TRUSTED, EACH, LISTED], ids=["trusted", "each", "shares"])
def test_every_cell_has_noise_of_the_stated_deviation_and_the_sum_is_right(how, crypto):
    """Also those that nobody holds; with a budget so large that the sum shows."""
    task = a_task()
    run = trained(how, task, crypto=crypto, epsilon=10.0)
    of_cells, dense = exact(task)
    stated = noise_of(run.plan).on_a_sum
    spread = np.std(run.dense - dense)
    assert spread == pytest.approx(stated, rel=0.35)
    assert cells(run).max() == 0.0 or cells(run)[cells(run) > 0].min() > 4.2 * stated
    open_ = trained(how, task, crypto=crypto, threshold=1e-9)
    merged = cells(open_) > 0
    off = (cells(open_) - of_cells)[merged]
    empty = merged & (of_cells == 0)
    assert 0.35 < np.mean(merged[of_cells == 0]) < 0.65 and empty.any()  # half are above zero
    assert np.sqrt(np.mean(np.square((cells(open_))[empty]))) == pytest.approx(stated, rel=0.2)
    assert np.abs(off).max() < 6.5 * stated


def test_both_kinds_of_noise_are_on_the_sum_of_the_same_vectors():
    """With hardly any of it."""
    task = a_task()
    runs = [
        trained(how, task, crypto="every", noise=1e-3, epsilon=0.0, threshold=1e-9)
        for how in (TRUSTED, EACH)
    ]
    of_cells, dense = exact(task)
    for run in runs:
        there = of_cells > 0.1
        assert_allclose(cells(run)[there], of_cells[there], atol=0.02)
        assert_allclose(run.dense, dense, atol=0.02)


def test_the_epsilon_is_the_ledgers_and_covers_which_cells_are_written():
    for how in (TRUSTED, EACH):
        run = trained(how)
        noise = noise_of(run.plan)
        assert noise.exact == () and noise.covers_rows
        found = noise.guarantee(run.clients[run.clients.eligible[0]].local.ledger)
        assert found is not None and 9.9 < found.epsilon <= 10.0 and found.delta == 1e-5
    # What a client names to a trusted server is as long as its pairs are many.
    assert not noise_of(a_plan(TRUSTED, a_task())).covers(Figure.ROWS)
    assert noise_of(a_plan(EACH, a_task())).covers(Figure.ROWS)


def test_a_budget_large_enough_ranks_better_than_popularity():
    task = a_task(events(users=300))
    run = trained(TRUSTED, task)
    figures = run.evaluation.measures(run.dense, run.tables)
    assert figures["NDCG@10"] > task.metric.baselines(task.data)["most frequent"] + 0.2


def test_thresholds_follow_from_the_budget_alone():
    assert [threshold_for(epsilon) for epsilon in (10.0, 6.0, 3.0, 1.0)] == [4.2, 4.2, 5.0, 6.0]
    task = a_task()
    assert a_plan(EACH, task, epsilon=3.0).server.threshold == 5.0
    assert a_plan(EACH, task).server.threshold == 4.2


# --- a canary user --------------------------------------------------------------------------------

CANARY = np.array([20, 23, 26, 29, 21, 24])
"""Items in an order that nobody else has."""
TRIES = 60


def guessed(how) -> int:
    """How often who compares the released model with the canary's own vector is right about
    whether it took part, by the likelier side."""
    others = [np.arange(first, first + 6) for first in range(0, 10, 2)]
    vector = NoisyPairs(ITEMS, a_task().data.attributes).part(CANARY[:-1])
    sides = []
    for people in ([*others, CANARY], others):
        user = np.repeat(np.arange(len(people)), 6)
        items = np.concatenate(people)
        of = Sequences.sorted(user, items, None, users=len(people), items=ITEMS)
        task = a_task(of)
        sides.append((task, a_plan(how, task, epsilon=1.0, threshold=1e-9)))
    without = exact(sides[1][0])
    right = 0
    for trial in range(TRIES):
        task, plan = sides[trial % 2]
        run = Training(task, plan, entropy=ScriptedEntropy(b"canary %d" % trial))
        for _ in run.run(1):
            pass
        off = (run.dense - without[1]) @ vector[2]
        off += (cells(run) - without[0])[vector[0]] @ vector[1]
        right += bool(off > 0.5) is (trial % 2 == 0)
    return right


@pytest.mark.parametrize("how", [TRUSTED, EACH], ids=["trusted", "each"])
def test_a_canary_user_is_not_found_beyond_the_ledgers_epsilon_and_is_without_noise(
    how, monkeypatch
):
    def bound(right: int) -> float:
        return lower_bound(canaries=TRIES, guesses=TRIES, correct=right, delta=1e-5, level=0.99)

    assert bound(guessed(how)) <= 1.0
    for module in ("tessera.rounds.noise", "tessera.protocols.two_server.write.sums"):
        monkeypatch.setattr(f"{module}.add_noise", lambda ring, deviation, words, stream: words)
    assert bound(guessed(how)) > 1.0


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "more", "match"),
    [
        (dict(TRUSTED, rows="own"), {}, "which cells are written says which pairs exist"),
        (dict(TRUSTED, trust="local"), {}, "with scheme = 'submodel'"),
        (dict(EACH, trust="local"), {}, "which cells are written says which pairs exist"),
        (EACH, {"clip": 2.0}, "their vectors have length 1"),
        (EACH, {"counts": 0.1}, "no counts"),
    ],
)
def test_noise_that_would_not_cover_the_cells_is_refused(how, more, match):
    with pytest.raises(ConfigError, match=match) as caught:
        a_plan(how, a_task(), **more)
    assert caught.value.hint


def test_pairs_without_noise_are_refused_unless_their_sums_may_be_exact():
    plan = Plan(scheme="two-server", cohort=USERS, simulation=SimulationPlan(rounds=1))
    with pytest.raises(ConfigError, match="from pair to pair") as caught:
        complete(plan, a_task())
    assert "exact_pairs = true" in (caught.value.hint or "")
    complete(plan, a_task(exact_pairs=True))


def test_several_rounds_of_noise_are_refused():
    plan = Plan(
        scheme="two-server",
        cohort=8,
        simulation=SimulationPlan(rounds=3),
        dp=DPPlan(unit="user", epsilon=10.0, trust="each"),
    )
    with pytest.raises(ConfigError, match="noise of its own on every cell"):
        complete(plan, a_task())


def test_too_many_items_are_refused_with_the_cost():
    with pytest.raises(ConfigError, match="400,000,000 cells"):
        NoisyPairs(20_000)


def test_attributes_of_other_items_are_refused():
    with pytest.raises(ConfigError, match="attribute 'year' of 3 items"):
        NoisyPairs(ITEMS, {"year": np.eye(3)})
