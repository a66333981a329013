"""The sparse graph: regular, the same for everybody, its degree computed from a bound."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.protocols.secagg import params
from tessera.protocols.secagg.params import Topology


@given(st.integers(6, 60), st.data())
def test_everybody_has_the_same_number_of_neighbours_and_links_are_mutual(n, data):
    degree = 2 * data.draw(st.integers(1, (n - 2) // 2))
    members = tuple(range(5, 5 + 2 * n, 2))
    topology = Topology(degree=degree, threshold=degree // 2 + 1, complete=False)
    hood = params.arrange(members, topology, data.draw(st.binary(min_size=32, max_size=32)))
    for client in members:
        near = hood.neighbours(client)
        assert len(near) == degree
        assert client not in near
        assert hood.holders(client) == near
        assert all(client in hood.neighbours(peer) for peer in near)
        assert all(hood.holds(peer, client) for peer in near)


def test_on_the_complete_graph_a_client_holds_a_share_of_its_own():
    hood = params.arrange((3, 5, 9), Topology(degree=2, threshold=2, complete=True), bytes(32))
    assert hood.holders(5) == [3, 5, 9]
    assert hood.neighbours(5) == [3, 9]


def test_another_seed_is_another_graph():
    topology = Topology(degree=4, threshold=3, complete=False)
    members = tuple(range(30))
    one = params.arrange(members, topology, bytes(32))
    two = params.arrange(members, topology, bytes([1] * 32))
    assert one.links != two.links


@pytest.mark.parametrize(
    ("n", "corrupt", "dropout", "degree", "threshold"),
    [
        (100, 10, 0.2, 42, 22),
        (100, 20, 0.2, 54, 28),
        (200, 40, 0.2, 76, 40),
        (1000, 200, 0.2, 144, 77),
    ],
)
def test_known_degrees(n, corrupt, dropout, degree, threshold):
    topology = params.sparse_topology(n, corrupt=corrupt, dropout_share=dropout)
    assert topology == Topology(degree=degree, threshold=threshold, complete=False)
    assert oracle(n, n, degree, threshold, corrupt, n - n // 5) <= params.FAILURE


def test_small_cohorts_get_the_complete_graph():
    assert params.sparse_topology(5, corrupt=1, dropout_share=0.2) is None
    assert params.sparse_topology(50, corrupt=17, dropout_share=0.2) is None
    assert params.sparse_topology(50, corrupt=45, dropout_share=0.2) is None, (
        "more than may be left"
    )


def oracle(n, roster, degree, threshold, corrupt, fewest):
    """The three events over a roster of this size, by scipy."""
    gone, run = roster - fewest, degree // 2
    removed = corrupt + gone
    opened = stats.hypergeom(roster - 1, corrupt, degree).sf(threshold - 1)
    stuck = stats.hypergeom(roster - 1, roster - 1 - gone, degree).cdf(threshold - 1)
    split = comb(roster - run, removed - run) / comb(roster, removed) if removed >= run else 0
    return n * (opened + stuck + split)


@pytest.mark.parametrize("n", [40, 100, 300])
def test_the_bound_agrees_with_an_independent_hypergeometric(n):
    corrupt, fewest = n // 10, n - n // 5
    for degree, threshold in [(20, 12), (28, 16), (28, 25)]:
        smallest = n * stats.hypergeom(fewest - 1, corrupt, degree).sf(threshold - 1)
        largest = n * stats.hypergeom(n - 1, corrupt, degree).sf(threshold - 1)
        expected = oracle(n, n, degree, threshold, corrupt, fewest) - largest + smallest
        ours = params.failure(n, degree, threshold, corrupt=corrupt, fewest=fewest)
        assert ours == pytest.approx(expected, rel=1e-6, abs=1e-15)


@given(st.integers(20, 200), st.data())
def test_no_roster_that_the_plan_allows_is_worse_than_the_bound(n, data):
    fewest = data.draw(st.integers(n // 2, n))
    roster = data.draw(st.integers(fewest, n))
    corrupt = data.draw(st.integers(0, fewest // 3))
    degree = 2 * data.draw(st.integers(2, (fewest - 3) // 2))
    threshold = data.draw(st.integers(degree // 2 + 1, degree))
    bound = params.failure(n, degree, threshold, corrupt=corrupt, fewest=fewest)
    there = oracle(roster, roster, degree, threshold, corrupt, fewest)
    assert there <= bound * (1 + 1e-6) + 1e-13


def test_one_degree_less_would_break_the_bound():
    n, corrupt, fewest = 100, 20, 80
    topology = params.sparse_topology(n, corrupt=corrupt, dropout_share=0.2)
    best = min(
        params.failure(n, topology.degree - 2, t, corrupt=corrupt, fewest=fewest)
        for t in range(topology.degree // 2, topology.degree - 1)
    )
    assert best > params.FAILURE
    kept = params.failure(n, topology.degree, topology.threshold, corrupt=corrupt, fewest=fewest)
    assert kept <= params.FAILURE


def test_the_three_events_are_as_rare_as_the_bound_says_by_simulation():
    """A graph so thin that failures can be counted: 4,000 draws, within the union bound."""
    n, degree, threshold, corrupt, gone = 24, 8, 5, 4, 6
    members = tuple(range(n))
    topology = Topology(degree=degree, threshold=threshold, complete=False)
    rng = np.random.default_rng(1)
    failures, trials = 0, 4_000
    for trial in range(trials):
        hood = params.arrange(members, topology, trial.to_bytes(32, "little"))
        picked = rng.permutation(n)
        bad, lost = set(picked[:corrupt].tolist()), set(picked[corrupt : corrupt + gone].tolist())
        assert hood.links is not None
        honest = set(members) - bad - lost
        failures += (
            any(len(hood.links[c] & bad) >= threshold for c in members)
            or any(len(hood.links[c] - lost) < threshold for c in members)
            or not connected(honest, hood.links)
        )
    bound = params.failure(n, degree, threshold, corrupt=corrupt, fewest=n - gone)
    # Three standard errors above the bound would be a contradiction.
    assert failures / trials <= min(1.0, bound) + 3 * (0.25 / trials) ** 0.5
    assert failures > 0, "thin enough for failures to be seen at all"


def connected(clients: set, links: dict) -> bool:
    todo = [next(iter(clients))]
    reached = set(todo)
    while todo:
        near = (links[todo.pop()] & clients) - reached
        reached |= near
        todo += near
    return reached == clients
