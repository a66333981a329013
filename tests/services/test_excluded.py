"""Both servers' services name the number of clients that were excluded after their list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rounds.population import plan
from rounds.two_server.test_excluded import LyingLeader
from services.service_lab import Lab
from tessera.ids import HELPER, RoundId
from tessera.plan import Plan, TwoServerPlan
from tessera.rounds.two_server import shared_sum
from tessera.services.journal import outcome_of


@pytest.fixture(autouse=True)
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that has all clients but two excluded."""
    monkeypatch.setattr(shared_sum, "WriteLeader", LyingLeader)


def seven(dropout: float) -> Plan:
    two = TwoServerPlan(domain="whole", write="dpf", min_cohort=2)
    return plan("two-server", cohort=7, two_server=two, security={"dropout": dropout})


def test_both_name_the_number_where_the_plan_allows_it(tmp_path: Path) -> None:
    lab = Lab(seven(0.72), tmp_path / "lab")
    lab.run(1)
    assert lab.parties[HELPER].ended == {"included": 2, "excluded": 5}
    ended = outcome_of(json.loads(lab.leader.outcome(RoundId(0))))
    assert (ended["survivors"], ended["excluded"]) == (2, 5)
    lab.close()


def test_a_helper_that_refuses_says_why_and_its_model_stays(tmp_path: Path) -> None:
    lab = Lab(seven(0.2), tmp_path / "lab")
    helper = lab.parties[HELPER]
    before = helper.model.digest
    with pytest.raises(AssertionError, match="the round hangs"):
        lab.run(1)
    assert "5 of 7 reports were excluded" in helper.left and helper.is_over
    assert helper.model.digest == before
    lab.leader.close_overdue()
    assert outcome_of(json.loads(lab.leader.outcome(RoundId(0))))["outcome"] == "aborted"
    lab.close()
