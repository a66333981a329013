"""What a server knows of time: when a member came, and how long it took.

*Data frozen on arrival.* A thing that appeared on Wednesday is not held by a member that came on
Monday. With a cut-off that has passed before anybody comes, everything had appeared by then.

*Slots that some miss.* What a member sends leaves at a fixed delay after its download. If some need
longer for their examples they are late because of their data, and the rows with most examples are
theirs. With capped work and a delay that everybody meets nobody is late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lying_server import EACH, ROWS, TABLE, B, LyingServer, Tally
from tessera.ids import ClientId

# --- data frozen on arrival -----------------------------------------------------------------------

FIRST, LAST = 7.0, 14.0  # days in which members come
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


def union_of(server: LyingServer, days: Calendar, *, cutoff: float | None) -> np.ndarray:
    """The group's rows: those up to the cut-off, or up to each member's arrival."""
    for client in server.group.members:
        until = days.came[client] if cutoff is None else cutoff
        rows = server.rows[client]
        local = server.devices[client].setup.local
        local.real = {TABLE: rows[days.held[rows.astype(int)] <= until]}
    server.epoch()
    union = server.epochs.at.union
    assert union is not None
    return union.message.tables[server.plan.table_id(TABLE)].astype(int)


def guessed(groups: int, *, cutoff: float | None) -> tuple[Tally, int]:
    """Who came after a row's thing had appeared may hold it; among these the guess is by chance.
    And how many rows have one candidate only."""
    tally, sure, rng = Tally(), 0, np.random.default_rng(3)
    for seed in range(groups):
        server = LyingServer(seed)
        days = calendar(server, seed)
        union = union_of(server, days, cutoff=cutoff)
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
    found, sure = guessed(groups, cutoff=None)
    found.shown(name, f"without a cut-off, {sure} rows of one candidate")
    assert found.above > B and sure > 0
    found, sure = guessed(groups, cutoff=FIRST)
    found.shown(name, f"as shipped, {sure} rows of one candidate")
    assert found.above <= B and sure == 0


def test_with_a_cut_off_everybody_may_hold_every_row() -> None:
    frozen(30)


@pytest.mark.campaign
def test_with_a_cut_off_everybody_of_1000_may_hold_every_row() -> None:
    frozen(100)


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
