"""Histories that are followed in sums of pairs: in exact ones, as published, and under noise."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.api import simulate
from tessera.audit.finding import Verdict
from tessera.audit.pair_sums import FOLLOWED, pair_task
from tessera.audit.suite import audited
from tessera.data.sequences import Sequences, sequence_data
from tessera.learning.models.pairs import Pairs
from tessera.learning.pair_chains import PairSums, known_row_figure, linked
from tessera.plan import Plan, SimulationPlan
from tessera.plan.dp import DPPlan
from tessera.plan.sections import GroupsPlan
from tessera.tasks.sequences import NEXT, sequence_task

USERS, ITEMS = 30, 60


def events(users: int = USERS, items: int = ITEMS) -> Sequences:
    """Everybody has items in an order of its own."""
    rng = np.random.default_rng(4)
    own = [rng.permutation(items)[: rng.integers(10, 16)] for _ in range(users)]
    user = np.repeat(np.arange(users), [len(each) for each in own])
    return Sequences.sorted(user, np.concatenate(own), None, users=users, items=items)


def sums(pairs: Pairs, of: Sequences) -> PairSums:
    _, cell, weight = pairs.counts(of)
    row, at, holders = np.unique(cell, return_inverse=True, return_counts=True)
    return PairSums.of_rows(pairs, row, np.bincount(at.reshape(-1), weights=weight), holders)


@pytest.mark.parametrize("tau", [6.0, 0.0], ids=["in order", "without times"])
def test_a_history_is_read_from_one_known_item_and_not_from_what_is_published(tau):
    of = events(users=20, items=400 if tau else 2_000)
    pairs = Pairs(items=400 if tau else 2_000, tau=tau)
    exact = sums(pairs, of)
    assert known_row_figure(exact, of, tries=20) > 0.8
    published = exact.published(5)
    assert published.holders is None and known_row_figure(published, of, tries=20) < 0.1


def test_what_is_followed_is_one_persons_and_nobody_elses():
    of = events(users=20, items=200)
    exact = sums(Pairs(items=200), of)
    for user in range(20):
        found = exact.followed(int(of.of(user)[3]))
        whole = [set(found) <= set(of.of(other).tolist()) for other in range(20)]
        assert found and any(whole)


def test_the_figure_counts_what_is_wrong_against_what_is_right():
    own = np.arange(11)
    assert linked([1, 2, 3, 4, 5], [own]) == 0.5
    assert linked([1, 2, 3, 77, 78], [own]) == pytest.approx(0.1)
    assert linked([77, 78], [own]) == 0.0 == linked([], [own])


def findings(tmp_path, scheme: str, **more):
    options = {"exact_pairs": "dp" not in more, "min_holders": 5}
    if "dp" in more:
        del options["min_holders"]
    data = sequence_data("orders", events(), items=ITEMS, length=8)
    task = sequence_task(data, title="orders", recommended=NEXT, model="pairs", **options)
    simulation = SimulationPlan(rounds=1, crypto="every")
    plan = Plan(scheme=scheme, cohort=USERS, simulation=simulation, **more)
    simulate(task, plan, out=tmp_path / "run", record_views=True, insecure_test_entropy="pairs")
    found = audited(tmp_path / "run").findings
    return {one.name.rpartition(", ")[2]: one for one in found if one.name.startswith(FOLLOWED)}


@pytest.mark.parametrize("scheme", ["two-server", "secure-submodel"])
def test_who_has_exact_sums_reads_histories_and_a_reader_does_not(tmp_path, scheme):
    groups = {"groups": GroupsPlan(size=10)} if scheme == "secure-submodel" else {}
    found = findings(tmp_path, scheme, **groups)
    server, reader = found["whoever has the sums"], found["a reader of the model"]
    assert server.measured > 0.5 and server.verdict is Verdict.UNCLAIMED
    assert reader.measured < 0.1 and reader.verdict is Verdict.HOLDS


def test_nobody_reads_a_history_from_noisy_sums(tmp_path):
    dp = DPPlan(unit="user", epsilon=10.0, delta=1e-5, trust="each")
    (found,) = findings(tmp_path, "two-server", dp=dp).values()
    assert found.measured < 0.1 and found.verdict is Verdict.HOLDS and found.trials


def test_only_tables_of_pairs_are_taken_for_such():
    plan = Plan.parse(
        'scheme = "two-server"\ncohort = 4\n[[table]]\nname = "goods"\nrows = 9\nwidth = 2\n'
    )
    assert pair_task(plan) is None
