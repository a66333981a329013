"""What a server knows of time: when a member came, and how long it took.

*Data frozen on arrival.* A thing that appeared on Wednesday is not held by a member that came on
Monday. The period's record names a cut-off that has passed before anybody comes, and the shipped
client takes its data up to then: everything had appeared. A cut-off that has not passed is refused.

*Slots that some miss.* What a member sends leaves at a fixed delay after its download. If some need
longer for their examples they are late because of their data, and the rows with most examples are
theirs. With capped work and a delay that everybody meets nobody is late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lying_server import EACH, ROWS, TABLE, B, LyingServer, Tally
from tessera.errors import ServerFault
from tessera.ids import ClientId
from tessera.rounds.epochs.client import MemberWork
from tessera.rounds.epochs.group import PeriodRecord

# --- data frozen on arrival -----------------------------------------------------------------------

FIRST, LAST = 7.0, 14.0  # days in which members come
DAY = 86_400
Days = np.ndarray


@dataclass(frozen=True)
class Calendar:
    """When each row's thing appeared, when its holder had it, and when each member came."""

    appeared: Days
    held: Days
    came: dict[ClientId, float]


def calendar(server: LyingServer, seed: int) -> Calendar:
    rng = np.random.default_rng([seed, 2])
    held = rng.uniform(4.0, LAST, ROWS)
    appeared = held - rng.uniform(0.0, 0.5, ROWS)
    came = {c: float(rng.uniform(FIRST, LAST)) for c in server.group.members}
    return Calendar(appeared, held, came)


@dataclass
class GrowingData:
    """A member's own data, with the moment at which it had each row."""

    rows: np.ndarray
    held: Days
    came: float
    timed: bool = True

    def up_to(self, cutoff: int) -> dict[str, np.ndarray]:
        return {TABLE: self.rows[self.held[self.rows.astype(int)] * DAY <= cutoff]}


def on_arrival(work: MemberWork, record: PeriodRecord) -> None:
    """The rule is off: `MemberWork.begin` without the cut-off takes what is there."""
    data = work.local.data
    assert isinstance(data, GrowingData)
    work.local.real = data.up_to(int(data.came * DAY))


def union_of(server: LyingServer, days: Calendar, cutoff: float) -> np.ndarray:
    """The group's rows, as shipped clients that come at their times offer them."""
    for client, device in server.devices.items():
        came = days.came[client]
        device.setup.local.data = GrowingData(server.rows[client], days.held, came)
        device.role.fetch(1, now=came * DAY)
    server.epochs.at.cutoff = int(cutoff * DAY)
    server.epoch()
    union = server.epochs.at.union
    assert union is not None
    return union.message.tables[server.plan.table_id(TABLE)].astype(int)


def guessed(groups: int) -> tuple[Tally, int]:
    """Who came after a row's thing had appeared may hold it; among these the guess is by chance.
    And how many rows have one candidate only."""
    tally, sure, rng = Tally(), 0, np.random.default_rng(3)
    for seed in range(groups):
        server = LyingServer(seed)
        days = calendar(server, seed)
        union = union_of(server, days, FIRST)
        took: dict[ClientId, list[int]] = {client: [] for client in server.group.members}
        for row in union.tolist():
            could = [c for c, at in days.came.items() if at >= days.appeared[row]]
            took[could[int(rng.integers(len(could)))]].append(row)
            sure += len(could) == 1
        for client, rows in took.items():
            tally.add(rows, server.rows[client])
    return tally, sure


def frozen(groups: int) -> None:
    name = "data frozen on arrival"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberWork, "begin", on_arrival)
        found, sure = guessed(groups)
    found.shown(name, f"without a cut-off, {sure} rows of one candidate")
    assert found.above > B and sure > 0
    found, sure = guessed(groups)
    found.shown(name, f"as shipped, {sure} rows of one candidate")
    assert found.above <= B and sure == 0


def test_with_a_cut_off_everybody_may_hold_every_row() -> None:
    frozen(30)


@pytest.mark.campaign
def test_with_a_cut_off_everybody_of_1000_may_hold_every_row() -> None:
    frozen(100)


def test_a_cut_off_that_has_not_passed_is_refused_by_whoever_comes_before_it() -> None:
    server = LyingServer(1)
    days = calendar(server, 1)
    early = min(days.came.values())
    with pytest.raises(ServerFault, match="cut-off of period 1 that has not passed"):
        union_of(server, days, early + 1.0)


@pytest.mark.parametrize(
    ("period", "cutoff", "said"),
    [
        (1, 700, "two cut-offs of period 1"),
        (2, 800, "period 2 that is not later than the last one"),
        (2, 700, "period 2 that is not later than the last one"),
        (2, 0, "period 2 that is not later than the last one"),
        (2, 2_001, "period 2 that has not passed"),
    ],
)
def test_a_cut_off_that_is_not_the_next_is_refused(period: int, cutoff: int, said: str) -> None:
    server = LyingServer(2)
    server.epochs.at.cutoff = 800
    server.epoch()
    client = server.group.members[3]
    server.devices[client].role.fetch(1, now=2_000)
    if period == 2:
        server.begin_period()
    server.epochs.at.cutoff = cutoff
    with pytest.raises(ServerFault, match=said):
        server.ask(client, server.fixed())


def test_data_with_times_are_not_given_to_a_period_without_a_cut_off() -> None:
    server = LyingServer(3)
    client = server.group.members[0]
    server.devices[client].setup.local.data = GrowingData(server.rows[client], np.zeros(ROWS), 9.0)
    with pytest.raises(ServerFault, match="named no cut-off of period 1"):
        server.ask(client, server.fixed())


# --- slots that some miss -------------------------------------------------------------------------

PER_EXAMPLE, SLOWEST = 0.01, 1.5
"""Seconds of a fast device, and how much longer the slowest one takes."""
CAP = 60


def late(groups: int, *, cap: int, delay: float) -> tuple[Tally, int]:
    """Rows with most examples are taken for those of the last to send: how many were late."""
    tally, missed, rng = Tally(), 0, np.random.default_rng(4)
    for seed in range(groups):
        server = LyingServer.after(seed, 1)
        took = {}
        for client in server.group.members:
            examples = int(min(cap, rng.lognormal(4.0, 1.0) + EACH))
            server.devices[client].examples = rng.multinomial(examples, np.full(EACH, 1 / EACH))
            took[client] = PER_EXAMPLE * examples * rng.uniform(1.0, SLOWEST)
        if server.epoch() is None:
            raise AssertionError("an honest sum opens")
        victim = max(took, key=lambda client: max(delay, took[client]))  # the last to send
        missed += took[victim] > delay
        counts = server.opened[TABLE].counts
        tally.add(np.argsort(-counts, kind="stable")[:EACH], server.rows[victim])
    return tally, missed


def slots(groups: int) -> None:
    name = "slots that some miss"
    found, missed = late(groups, cap=100_000, delay=PER_EXAMPLE * 260)  # 90 % of members meet it
    found.shown(name, f"without a cap, {missed} were late")
    assert found.above > 2 * B and missed > groups / 2
    found, missed = late(groups, cap=CAP, delay=PER_EXAMPLE * CAP * SLOWEST)
    found.shown(name, f"as shipped, {missed} were late")
    assert found.above <= B and missed == 0


def test_nobody_is_late_because_of_its_data() -> None:
    slots(20)


@pytest.mark.campaign
def test_nobody_of_3000_is_late_because_of_its_data() -> None:
    slots(300)
