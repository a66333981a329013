"""Sums beside the rounds are exact, masked where they should be, and take everybody once."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from runs import raters
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.rounds.events import RoundFinished
from tessera.runs import statistics
from tessera.runs.setup import set_up
from tessera.runs.statistics import cohort_sum, population_sum, secure_sum
from tessera.runs.training import Training, complete

ENTROPY = ScriptedEntropy(b"tally")


def agreed(scheme: str = "secure-submodel", **more) -> Plan:
    return complete(raters.plan(scheme, **more), raters.task())


def vectors(clients: int, words: int = 3) -> dict[ClientId, np.ndarray]:
    rng = np.random.default_rng(clients)
    return {ClientId(c): rng.integers(0, 2**30, words) for c in range(clients)}


def test_the_sum_is_exact():
    given = vectors(7)
    found = secure_sum(given, agreed(), "things", RoundId(0), ENTROPY)
    assert_array_equal(found, sum(given.values()))


@pytest.mark.parametrize(
    ("scheme", "crypto", "masked"),
    [
        ("secure-submodel", "every", 3),
        ("secure-fedavg", "sampled", 1),
        ("secure-fedavg", "none", 0),
        ("two-server", "every", 3),
        ("submodel", "every", 0),
        ("central", "every", 0),
    ],
)
def test_everybody_is_in_one_group(scheme, crypto, masked):
    given = vectors(26)
    found = population_sum(given, agreed(scheme, simulation={"crypto": crypto}), "things", ENTROPY)
    assert_array_equal(found.sum, sum(given.values()))
    assert (found.clients, found.groups, found.secure_groups) == (26, 3, masked)


def test_a_group_is_never_smaller_than_a_cohort_unless_there_are_no_more():
    assert population_sum(vectors(15), agreed(), "things", ENTROPY).groups == 1
    assert population_sum(vectors(5), agreed(), "things", ENTROPY).groups == 1


def test_an_active_server_needs_keys_that_are_not_there():
    active = agreed(privacy={"level": "cpp5"}, security={"threat": "active"})
    with pytest.raises(ConfigError, match="signed keys"):
        secure_sum(vectors(5), active, "x", RoundId(0), ENTROPY)


@pytest.mark.parametrize("scheme", ["secure-submodel", "submodel"])
def test_the_set_up_of_ratings_releases_their_mean(scheme):
    task = raters.task()
    ready_task, ready = set_up(task, agreed(scheme), ENTROPY)
    mean = float(task.data.train["label"].mean())
    assert ready.facts["mean"] == pytest.approx(mean, abs=1e-6)
    assert ready.facts["ratings"] == len(task.data.train)
    assert ready.facts["sum"]["clients"] == raters.USERS
    for part in (ready_task.data.train, ready_task.data.test):
        assert part["base"] == pytest.approx(np.full(len(part), mean), abs=1e-6)


def test_a_task_without_a_set_up_stays_as_it_is():
    task = raters.task()
    bare = type(task)(name="x", data=task.data, module=task.module, tables=task.tables)
    assert set_up(bare, agreed(), ENTROPY) == (bare, None)


# --- fixed groups ---------------------------------------------------------------------------------


def in_groups(**more) -> Plan:
    return agreed(cohort=8, privacy={"level": "groups"}, groups={"size": 4}, **more)


@pytest.fixture
def opened(monkeypatch):
    """The clients of every secure sum that is opened, and whether it needs all of them."""
    seen = []

    def watched(vectors, *given, whole=False, **more):
        seen.append((frozenset(vectors), whole))
        return secure_sum(vectors, *given, whole=whole, **more)

    monkeypatch.setattr(statistics, "secure_sum", watched)
    return seen


def test_the_set_up_of_a_plan_with_groups_opens_whole_groups_only(opened):
    """Those of the rounds, to the member, also where some clients have too little to take part."""
    task, plan = raters.task(), in_groups(simulation={"min_examples": 12})
    with Training(task, plan, entropy=ENTROPY) as run:
        groups = run.federation.cohorts.groups
        assert 0 < len(run.clients) and len(groups) == len(run.clients) // 4
        assert opened == [(frozenset(group), True) for group in groups]
        members = [c for group in groups for c in group]
        labels = np.concatenate([task.data.of(int(c))["label"] for c in members])
        assert run.setup.facts["ratings"] == len(labels)
        assert run.setup.facts["mean"] == pytest.approx(float(labels.mean()), abs=1e-6)
        assert run.setup.facts["sum"]["groups"] == len(groups)


def test_metrics_of_a_plan_with_groups_open_whole_groups_only(opened):
    plan = in_groups(simulation={"metrics": "federated", "evaluate_every": 1, "crypto": "none"})
    with Training(raters.task(), plan, entropy=ENTROPY) as run:
        del opened[:]
        events = [e for e in run.run(2) if isinstance(e, RoundFinished)]
        groups = {frozenset(group) for group in run.federation.cohorts.groups}
        assert len(opened) == 4  # two groups in each round
        assert {members for members, _ in opened} <= groups and all(w for _, w in opened)
        one = run.evaluation.measures(run.federation.dense, run.tables | run.local)["RMSE"]
        assert events[-1].metric == pytest.approx(one, rel=0.25)  # over eight of twenty


def test_a_group_that_is_not_whole_is_in_no_sum(opened):
    given, groups = vectors(8), [tuple(map(ClientId, range(4))), tuple(map(ClientId, range(4, 8)))]
    del given[ClientId(5)]
    found = cohort_sum(given, groups, in_groups(), "things", RoundId(0), ENTROPY)
    assert_array_equal(found, sum(given[c] for c in groups[0]))
    assert opened == [(frozenset(groups[0]), True)]
    del given[ClientId(0)]
    assert cohort_sum(given, groups, in_groups(), "things", RoundId(0), ENTROPY) is None


def test_a_plan_with_groups_has_no_other_population_sum():
    with pytest.raises(MisuseError, match="in these, and no others"):
        population_sum(vectors(26), in_groups(), "things", ENTROPY)
    few = raters.task(raters.films(users=3))
    with pytest.raises(ConfigError, match="3 clients with data make no group of 4"):
        set_up(few, in_groups(), ENTROPY)
