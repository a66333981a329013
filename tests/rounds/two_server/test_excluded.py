"""A leader that lies has clients excluded after their list is closed: by the plan, and in a run.

The rule itself is in tests/protocols/two_server/write/test_excluded.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import two_servers
from rounds.population import federation
from rounds.shops import finished, two_server_plan
from tessera.ids import RoundId
from tessera.protocols.two_server.messages import CheckCoin
from tessera.protocols.two_server.write.leader import AwaitingCoin, AwaitingExclusions, WriteLeader
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.two_server import shared_sum
from tessera.rounds.two_server.domain import two_server_params
from tessera.wire.stored import Kept


class LyingLeader(WriteLeader):
    """It says wrong sums of tags of all clients but two, and asks for the sum over these."""

    def _on_coin(self, phase, kept):
        following, _ = super()._on_coin(phase, kept)
        said = following.sums.message
        wrong = {c: bytes(b ^ 1 for b in said.sums[c]) for c in sorted(said.sums)[2:]}
        lie = Kept.of(replace(said, sums=said.sums | wrong))
        following = AwaitingExclusions(held=phase.held, sums=lie, noise=phase.noise)
        return following, self._to_helper(following)

    def _check_list(self, held, excluded=0):
        pass


LyingLeader.STEPS = WriteLeader.STEPS | {(AwaitingCoin, CheckCoin): LyingLeader._on_coin}


def led_by_a_liar(monkeypatch: pytest.MonkeyPatch, dropout: float):
    """The outcome of one round with seven honest clients."""
    monkeypatch.setattr(shared_sum, "WriteLeader", LyingLeader)
    way = {"min_cohort": 2, "write": "dpf"}
    fed = federation(two_server_plan(way, cohort=7, security={"dropout": dropout}))
    (end,) = finished(fed, 1)
    return end


def test_a_sum_over_two_of_seven_is_not_released_and_the_number_is_named(monkeypatch):
    end = led_by_a_liar(monkeypatch, 0.2)
    assert isinstance(end, RoundAbort)
    assert end.reason == (
        "the helper left, for the leader requested a sum where 5 of 7 reports were excluded "
        "after their list was closed; the plan allows 1"
    )


def test_a_plan_that_lets_five_be_missing_opens_it_and_counts_them(monkeypatch):
    end = led_by_a_liar(monkeypatch, 0.72)
    assert isinstance(end, RoundFinished) and end.survivors == 2
    assert sum(end.excluded.values()) == 5


@pytest.mark.parametrize(("dropout", "bound"), [(0.0, 0), (0.2, 1), (0.5, 3)])
def test_the_bound_is_the_plans_on_missing_clients_however_few_reports_it_sums(dropout, bound):
    plan = two_server_plan({"min_cohort": 2}, cohort=7, security={"dropout": dropout})
    found = two_server_params(plan, RoundId(0), two_servers.servers())
    assert (found.min_cohort, found.most_excluded) == (2, bound)
