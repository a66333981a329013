"""The sparse graph: regular, the same for everybody, its degree computed from a bound."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.protocols.secagg import graph
from tessera.protocols.secagg.graph import Topology


@given(st.integers(6, 60), st.data())
def test_everybody_has_the_same_number_of_neighbours_and_links_are_mutual(n, data):
    degree = 2 * data.draw(st.integers(1, (n - 2) // 2))
    members = tuple(range(5, 5 + 2 * n, 2))
    topology = Topology(degree=degree, threshold=degree // 2 + 1, complete=False)
    hood = graph.arrange(members, topology, data.draw(st.binary(min_size=32, max_size=32)))
    for client in members:
        near = hood.neighbours(client)
        assert len(near) == degree
        assert client not in near
        assert hood.holders(client) == near
        assert all(client in hood.neighbours(peer) for peer in near)
        assert all(hood.holds(peer, client) for peer in near)


def test_on_the_complete_graph_a_client_holds_a_share_of_its_own():
    hood = graph.arrange((3, 5, 9), Topology(degree=2, threshold=2, complete=True), bytes(32))
    assert hood.holders(5) == [3, 5, 9]
    assert hood.neighbours(5) == [3, 9]


def test_another_seed_is_another_graph():
    topology = Topology(degree=4, threshold=3, complete=False)
    members = tuple(range(30))
    one = graph.arrange(members, topology, bytes(32))
    two = graph.arrange(members, topology, bytes([1] * 32))
    assert one.links != two.links


@pytest.mark.parametrize(
    ("n", "corrupt", "dropout", "degree"),
    [(100, 0.1, 0.2, 42), (100, 0.2, 0.2, 54), (200, 0.2, 0.2, 72), (1000, 0.2, 0.2, 124)],
)
def test_known_degrees(n, corrupt, dropout, degree):
    topology = graph.sparse_topology(n, corrupt_share=corrupt, dropout_share=dropout)
    assert topology is not None
    assert topology.degree == degree
    assert topology.threshold > degree // 2


def test_small_cohorts_get_the_complete_graph():
    assert graph.sparse_topology(5, corrupt_share=0.2, dropout_share=0.2) is None
    assert graph.sparse_topology(50, corrupt_share=0.33, dropout_share=0.2) is None


@pytest.mark.parametrize("n", [40, 100, 300])
def test_the_bound_agrees_with_an_independent_hypergeometric(n):
    corrupt, gone = n // 10, n // 5
    for degree, threshold in [(20, 12), (30, 16), (30, 25)]:
        oracle = n * stats.hypergeom(n - 1, corrupt, degree).sf(threshold - 1)
        oracle += n * stats.hypergeom(n - 1, n - 1 - gone, degree).cdf(threshold - 1)
        run, removed = degree // 2, corrupt + gone
        oracle += n * comb(n - run, removed - run) / comb(n, removed) if removed >= run else 0
        ours = graph.failure(n, degree, threshold, corrupt=corrupt, gone=gone)
        assert ours == pytest.approx(oracle, rel=1e-6, abs=1e-15)


def test_one_degree_less_would_break_the_bound():
    n, corrupt, gone = 100, 20, 20
    topology = graph.sparse_topology(n, corrupt_share=0.2, dropout_share=0.2)
    best = min(
        graph.failure(n, topology.degree - 2, t, corrupt=corrupt, gone=gone)
        for t in range(topology.degree // 2, topology.degree - 1)
    )
    assert best > graph.FAILURE
    kept = graph.failure(n, topology.degree, topology.threshold, corrupt=corrupt, gone=gone)
    assert kept <= graph.FAILURE


def test_the_three_events_are_as_rare_as_the_bound_says_by_simulation():
    """A graph so thin that failures can be counted: 4,000 draws, within the union bound."""
    n, degree, threshold, corrupt, gone = 24, 8, 5, 4, 6
    members = tuple(range(n))
    topology = Topology(degree=degree, threshold=threshold, complete=False)
    rng = np.random.default_rng(1)
    failures, trials = 0, 4_000
    for trial in range(trials):
        hood = graph.arrange(members, topology, trial.to_bytes(32, "little"))
        picked = rng.permutation(n)
        bad, lost = set(picked[:corrupt].tolist()), set(picked[corrupt : corrupt + gone].tolist())
        assert hood.links is not None
        honest = set(members) - bad - lost
        failures += (
            any(len(hood.links[c] & bad) >= threshold for c in members)
            or any(len(hood.links[c] - lost) < threshold for c in members)
            or not connected(honest, hood.links)
        )
    bound = graph.failure(n, degree, threshold, corrupt=corrupt, gone=gone)
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
