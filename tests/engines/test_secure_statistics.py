"""Sums beside the rounds are exact, masked where they should be, and take everybody once."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from engines import raters
from tessera.crypto.entropy import ScriptedEntropy
from tessera.engines.secure_statistics import population_sum, secure_sum
from tessera.engines.setup import set_up
from tessera.engines.training import complete
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.rounds.plan import Plan

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
    with pytest.raises(ConfigError, match="signed keys"):
        secure_sum(vectors(5), agreed(security={"threat": "active"}), "x", RoundId(0), ENTROPY)


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
