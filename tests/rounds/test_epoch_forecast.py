"""What is predicted of groups that wait is what happens: a member's bytes, and how long sums wait.

Bytes are compared with the roles of one group, message by message; waiting with the invitations of
a simulation in which the same share of clients is absent.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from group_training import Training, grouped
from rounds.population import DENSE, derived, members, plan, specs, trainer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import ClientId
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan
from tessera.report.figures import waited
from tessera.rounds.events import RoundFinished, as_json
from tessera.rounds.forecast import Forecast
from tessera.rounds.forecast.epochs import EpochTraffic, waiting
from tessera.simulation.epochs import EpochFederation
from tessera.simulation.faults import Drop
from tessera.simulation.subcohort import one_by_one

SIZE = 4


class Weighed(Training):
    """A group that counts the bytes of one member, by what the server or the member sends."""

    def __init__(self, settings: Plan) -> None:
        super().__init__(SIZE, settings)
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()
        self.of = next(iter(self.setups))

    def say(self, client: ClientId, out: Any) -> Any:
        answers = super().say(client, out)
        if client == self.of:
            for one in out:
                self.up[one.kind] += len(one.data)
            for one in answers:
                self.down[one.kind] += len(one.data)
        return answers

    def weighed(self) -> tuple[int, int]:
        """Of the epoch that they go through now."""
        self.up.clear()
        self.down.clear()
        self.epoch()
        assert set(self.up) == {"Fetch", "Delivery"} and set(self.down) == {"EpochWork"}
        return sum(self.up.values()), sum(self.down.values())


def traffic_of(training: Training, union: dict[str, np.ndarray]) -> EpochTraffic:
    """The forecast, over the rows that the group's union does have."""
    tables = [
        SimpleNamespace(name=t.name, union=len(union.get(t.name, ())), derived=bool(t.derived_from))
        for t in training.plan.tables
    ]
    rows: Any = SimpleNamespace(plan=training.plan.group_plan, tables=tables)
    return EpochTraffic(rows)


def test_a_member_sends_and_receives_what_is_predicted():
    training = Weighed(grouped(SIZE))
    training.join()
    union_up, union_down = training.weighed()
    first_up, first_down = training.weighed()  # with the rows of the union
    up, down = training.weighed()
    at = training.server.epochs.at.union
    rows = training.clients[training.of].work.union_of(at.message)
    traffic = traffic_of(training, rows)
    assert up == first_up == sum(size for _, size in traffic.up())
    assert down == pytest.approx(sum(size for _, size in traffic.down()), abs=3)
    predicted = traffic.union()
    assert union_up == predicted[0]
    told = union_down + (first_down - down)
    assert told == pytest.approx(predicted[1], rel=0.03)


def test_whole_models_have_no_union():
    training = Weighed(plan("secure-fedavg", cohort=SIZE, groups={"size": SIZE}))
    training.join()
    up, down = training.weighed()
    traffic = traffic_of(training, {})
    assert up == sum(size for _, size in traffic.up()) and traffic.union() == (0.0, 0.0)
    assert down == pytest.approx(sum(size for _, size in traffic.down()), abs=3)


def test_a_forecast_of_groups_is_about_one_update_of_one_group():
    settings = plan(cohort=3 * SIZE + 1, groups={"size": SIZE, "period": 5})
    forecast = Forecast(settings, 20)
    assert (forecast.groups, forecast.plan.cohort, forecast.invited) == (3, SIZE, 13)
    assert set(forecast.bytes_up()) == {"update"} and set(forecast.bytes_down()) == {"rows down"}
    assert min(forecast.union_bytes) > 0 and forecast.bytes_between() == 0.0
    assert forecast.work is not None and forecast.work.openings == 0
    cohort_wide = Forecast(plan(cohort=13), 20)
    assert cohort_wide.union_bytes == (0.0, 0.0) and "union" in cohort_wide.bytes_up()


def with_absent(clients: int, cohort: int, absent: float, rounds: int) -> list[RoundFinished]:
    """Rounds of a simulation in which everybody, by itself, is absent with this probability."""
    settings = plan(cohort=cohort, groups={"size": SIZE}, simulation={"crypto": "none"})
    participants = members(clients)

    def faults(round_id: Any, there: Any) -> list[Drop]:
        rng = np.random.default_rng([7, int(round_id)])
        return [Drop(c, "collect") for c in there if rng.random() < absent]

    federation = EpochFederation(
        settings,
        participants,
        trainer=one_by_one({client: trainer(client) for client in participants}),
        dense=np.zeros(DENSE, dtype=np.float32),
        tables={name: LazyTable(spec) for name, spec in specs().items()},
        derived=derived(),
        entropy=ScriptedEntropy(b"waiting"),
        faults=faults,
    )
    return [list(federation.round())[-1] for _ in range(rounds)]


@pytest.mark.parametrize("absent", [0.0, 0.2, 0.4])
def test_sums_wait_as_long_as_predicted(absent: float) -> None:
    done = with_absent(32, 12, absent, 60)[10:]  # the first ones wait for unions
    merged, invited = sum(e.survivors for e in done), sum(e.cohort for e in done)
    opened, age = sum(e.groups_opened for e in done), waited(map(as_json, done))["waited"]["mean"]
    found = waiting(cohort=12, size=SIZE, absent=absent, groups=8)
    assert found.counted == pytest.approx(merged / invited, abs=0.05)
    assert found.opened == pytest.approx(opened / len(done), rel=0.08)
    assert found.mean == pytest.approx(age, abs=0.25)


def test_nobody_absent_is_nobody_waited_for_and_groups_out_of_reach_change_nothing():
    found = waiting(cohort=40, size=10, absent=0.0, groups=50)
    assert (found.counted, found.mean, found.p95, found.opened) == (1.0, 0.0, 0.0, 4.0)
    far = waiting(cohort=40, size=10, absent=0.2, groups=100_000)
    assert far.counted == pytest.approx(0.8, abs=0.02) and far.p95 == 3.0
