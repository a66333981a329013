"""Sums of gradients: what they reveal, and that no wrong rating is reported."""

from __future__ import annotations

import numpy as np
import pytest

from audit.factors import TRAINING, Rater
from runs import raters
from tessera.audit.ratings.gradient import factors_of, gradients
from tessera.audit.ratings.labels import Labels, Rated
from tessera.audit.ratings.record import RatingRound, SumRows
from tessera.audit.ratings.sums import OpenedSums, alone, initial_factors, linked, mixtures
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan, TablePlan
from tessera.runs.training import complete

QUANTUM = 0.5 / 2**14


class Cohort:
    """Clients with ratings of some items each, and the sum of one round of theirs."""

    def __init__(
        self, sets: list[list[int]], factors: int, *, items: int, seed: int = 0, alike: float = 0.0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.table = np.column_stack([rng.normal(0, 0.1, (items, factors)), np.zeros(items)])
        self.first = rng.normal(0, 0.1, (len(sets), factors))
        self.first += alike * rng.normal(size=factors)  # what all have in common
        self.clients = [
            Rater(s, rng.integers(1, 6, len(s)) - 3.5, first)
            for s, first in zip(sets, self.first, strict=True)
        ]
        total, count = np.zeros_like(self.table), np.zeros(items, np.int64)
        for client in self.clients:
            at = client.items.astype(np.int64)
            deltas = client.train(self.table[at])
            total[at] += np.floor(deltas / QUANTUM + rng.random(deltas.shape)) * QUANTUM
            count[at] += 1
        on = np.flatnonzero(count)
        self.rows = SumRows(
            0, on.astype(np.uint64), self.table[on], total[on] / count[on, None], count[on], QUANTUM
        )

    def raters(self, place: int) -> list[int]:
        item = self.rows.items[place]
        return [c for c, client in enumerate(self.clients) if item in client.items]

    def truth(self, client: int, place: int) -> float:
        """The rating less its base, and less the client's own level."""
        me = self.clients[client]
        return float(me.values[me.items == self.rows.items[place]][0] - me.bias)


def random_cohort(
    clients: int, each: int, items: int, factors: int, seed: int = 0, alike: float = 0.0
) -> Cohort:
    rng = np.random.default_rng([seed, 1])
    sets = [sorted(rng.choice(items, each, replace=False).tolist()) for _ in range(clients)]
    return Cohort(sets, factors, items=items, seed=seed, alike=alike)


def test_exactly_the_rows_with_one_rater_open_as_one_clients_gradient() -> None:
    cohort = random_cohort(12, 12, 100, 8)
    _, factors, ratings = alone(cohort.rows, TRAINING)
    sole = 0
    for place in range(len(cohort.rows.items)):
        near = [
            np.abs(factors[place] - cohort.clients[c].factors).max() < 0.05
            and abs(ratings[place] - cohort.truth(c, place)) < 0.02
            for c in cohort.raters(place)
        ]
        if np.isfinite(ratings[place]):
            assert any(near) == (len(near) == 1) == (cohort.rows.counts[place] == 1)
            sole += len(near) == 1
    assert sole > 10


def test_sole_rows_are_linked_by_whose_they_are() -> None:
    cohort = random_cohort(12, 12, 100, 8)
    groups = linked(cohort.rows, TRAINING)
    whose = [{cohort.raters(int(at))[0] for at in group.at} for group in groups]
    assert all(len(one) == 1 for one in whose)
    assert len(set().union(*whose)) == len(groups) > 6  # nobody is taken for two
    linked_rows = sum(len(group.at) for group in groups)
    assert linked_rows >= 0.9 * (cohort.rows.counts == 1).sum()
    for group, (client,) in zip(groups, whose, strict=True):
        np.testing.assert_allclose(group.factors, cohort.clients[client].factors, atol=0.02)
        truth = [cohort.truth(client, int(at)) for at in group.at]
        np.testing.assert_allclose(group.ratings, truth, atol=0.02)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_rows_of_known_clients_come_apart_and_others_do_not(seed: int, alike: float) -> None:
    cohort = random_cohort(10, 14, 90, 16, seed, alike)
    groups = linked(cohort.rows, TRAINING)
    whose = [cohort.raters(int(group.at[0]))[0] for group in groups]
    found = mixtures(cohort.rows, groups, TRAINING)
    several = np.flatnonzero(cohort.rows.counts > 1)
    solvable = [p for p in several if set(cohort.raters(int(p))) <= set(whose)]
    assert len(found) >= 0.8 * len(solvable) > 0
    for mixture in found:
        raters = cohort.raters(mixture.at)
        assert len(raters) > 1
        for place, x in zip(mixture.raters, mixture.ratings, strict=True):
            assert whose[place] in raters
            assert x == pytest.approx(cohort.truth(whose[place], mixture.at), abs=0.05)


def test_who_adds_nothing_to_a_row_is_not_said_to_be_in_it() -> None:
    """Two ratings, one of them met to the digit: its error is nothing, and might be anybody's."""
    rng = np.random.default_rng(0)
    factors = rng.normal(0, 0.5, (3, 8))
    step = TRAINING.rate * TRAINING.table_rate
    one = [step * e * np.append(factors[c], 1.0) for c, e in ((0, 1.5), (1, -2.0), (2, 1.0))]
    both = (one[0] + 0.0 * one[1]) / 2
    rows = SumRows(
        0,
        np.arange(4, dtype=np.uint64),
        np.zeros((4, 9)),
        np.array([*one, both]),
        np.array([1, 1, 1, 2]),
        QUANTUM,
    )
    groups = linked(rows, TRAINING)
    (mixture,) = mixtures(rows, groups, TRAINING)
    assert [groups[c].at.tolist() for c in mixture.raters] == [[0]]
    assert mixture.ratings == pytest.approx((1.5,), abs=0.01)


def test_a_row_with_a_client_that_nobody_knows_stays_closed() -> None:
    """Client 2 has no row of its own, so nothing that it is in comes apart."""
    cohort = Cohort([[0, 1, 2, 6], [3, 4, 2, 7], [6, 7, 2]], 8, items=8)
    groups = linked(cohort.rows, TRAINING)
    assert len(groups) == 2
    assert mixtures(cohort.rows, groups, TRAINING) == []


def test_everybodys_factors_in_every_row_say_nothing() -> None:
    """All rate the same items: no row is anybody's own, and nothing opens."""
    cohort = Cohort([[0, 1, 2, 3]] * 5, 8, items=4)
    assert linked(cohort.rows, TRAINING) == []
    assert mixtures(cohort.rows, [], TRAINING) == []


def test_factors_come_from_all_rows_of_a_client_together() -> None:
    cohort = Cohort([[0, 1, 2, 3, 4]], 8, items=5)
    errors, products = gradients(cohort.rows.rows, cohort.rows.means, TRAINING, 0)
    best = np.linalg.lstsq(errors[:, None], products, rcond=None)[0][0]
    np.testing.assert_allclose(factors_of(errors, products), best)


def named(cohort: Cohort, starts: np.ndarray) -> float:
    """How often a client of rows of its own is named in a dense sum, by what clients began with."""
    labels = Labels(
        of={
            ClientId(c): Rated(client.items, client.values + 3.5, np.full(len(client.items), 3.5))
            for c, client in enumerate(cohort.clients)
        },
        mean=3.5,
        low=1.0,
        high=5.0,
        step=1.0,
        model="factors",
        mask="none",
        penalty=0.0,
    )
    plan = Plan(
        scheme="secure-fedavg",
        cohort=len(cohort.clients),
        tables=(TablePlan(name="items", rows=len(cohort.table), width=cohort.table.shape[1]),),
        training=TRAINING,
    )
    attack = OpenedSums(plan, labels, starts)
    everybody = tuple(ClientId(c) for c in range(len(cohort.clients)))
    attack.take(RatingRound(RoundId(0), {}, frozenset(), cohort.rows, everybody, None))
    sole, _, by_group, by_start = attack.findings()
    assert sole.measured == pytest.approx(sole.claimed, abs=0.02)
    assert by_group.claimed == by_start.claimed == pytest.approx(1 / len(everybody))
    return by_start.measured


def test_public_first_factors_name_their_client_and_equal_ones_do_not() -> None:
    cohort = random_cohort(20, 12, 200, 16)
    assert named(cohort, cohort.first) == 1.0
    assert named(cohort, np.zeros_like(cohort.first)) < 0.3


def test_what_clients_begin_with_is_what_the_task_begins_with() -> None:
    task = raters.task()
    plan = complete(raters.plan("secure-fedavg"), task)
    begun = task.build(plan.seed).users.weight.detach().numpy()[:, :-1]
    first = initial_factors(plan, task.data.clients)
    longest = [max(np.abs(values).max(), 1e-12) for values in (first, begun)]  # spreads may differ
    np.testing.assert_allclose(first / longest[0], begun / longest[1], rtol=1e-6)
