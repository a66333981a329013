"""The same devices and rows under three names: every name brings other groups, and these meet.

In each federation the leader numbers clients and rows anew, forms groups of ten, and sees one round
of all devices. A row that one device holds is opened over three groups; who is in all of them holds
it. With one store for the account of each device (`services/offered_rows.py`) only the first round
opens anything, and the holder is one of ten.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tessera.audit.epochs import EpochReplay
from tessera.audit.record import decoded
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.row_names import OwnNames, RowNames
from tessera.ids import SERVER, ClientId
from tessera.plan import GroupsPlan, ModelPlan, Plan, Scheme, TablePlan, UnionPlan
from tessera.privacy.index.period import AnotherGroup, MemoryPeriods
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.party import LocalState
from tessera.services.offered_rows import OfferedRows, OneGroup
from tessera.simulation import population
from tessera.simulation.epochs import federation_for
from tessera.simulation.subcohort import Participant
from tessera.simulation.views import RoundViews

GROUP, ALONE, TOGETHER = 10, 8, 40
NAMES = ("spring", "summer", "autumn")
SURE = 3.0902  # of one side of a normal distribution 99.9 % are below
B = 1.0 / GROUP


@dataclass(frozen=True)
class Devices:
    """So many devices, each with `ALONE` items that no other has and two that many have."""

    number: int

    @property
    def items(self) -> int:
        return ALONE * self.number + TOGETHER

    def of(self, device: int) -> np.ndarray:
        shared = np.random.default_rng([7, device]).choice(TOGETHER, 2, replace=False)
        return np.concatenate([ALONE * device + np.arange(ALONE), ALONE * self.number + shared])


def transcript(devices: Devices, name: str, store: OfferedRows | None) -> dict[int, set[int]]:
    """What one round under this name shows of items: those who were in the group that opened it."""
    plan = Plan(
        scheme=Scheme.SECURE_SUBMODEL,
        cohort=devices.number,
        federation=name,
        seed=NAMES.index(name),
        tables=(TablePlan(name=f"{name} things", rows=devices.items, width=1),),
        model=ModelPlan(dense=1),
        groups=GroupsPlan(size=GROUP),
        union=UnionPlan(max_rows=16),
    )
    rng = np.random.default_rng([11, NAMES.index(name)])
    client_of, row_of = rng.permutation(devices.number), rng.permutation(devices.items)
    device_of, item_of = np.argsort(client_of), np.argsort(row_of)
    own = RowNames([f"item {item}" for item in item_of])
    keys = {ClientId(c): f"{name} {c}".encode() for c in range(devices.number)}
    groups = cohorts_of(plan).formed(sorted(keys))
    table = plan.tables[0].name
    members = {}
    for device in range(devices.number):
        client, periods = ClientId(int(client_of[device])), MemoryPeriods()
        if store is not None:
            names = OwnNames(
                person=f"device {device}",
                source="its own",
                naming="purchases",
                kinds={table: "item"},
                names={"item": own},
            )
            (group,) = [each for each in groups if client in each]
            periods = OneGroup(periods, store, plan, client, names, directory=keys, members=group)
        rows = np.sort(row_of[devices.of(device)]).astype(np.uint64)
        members[client] = Participant(LocalState(real={table: rows}, periods=periods), None)
    views = RoundViews([SERVER])
    federation = federation_for(plan)(
        plan,
        dict(sorted(members.items())),
        dense=population.dense(plan),
        tables=population.tables(plan),
        trainer=population.cohort_trainer(plan, devices.number),
        entropy=ScriptedEntropy(name.encode()),
        views=views,
    )
    with suppress(AnotherGroup):  # who refuses has sent nothing
        list(federation.round())
    opened: dict[int, set[int]] = {}
    for view in EpochReplay(plan).take(decoded(views.taken(SERVER))):
        for row in view.union.tolist():
            devices_there = {int(device_of[client]) for client in view.met}
            opened.setdefault(int(item_of[row]), set()).update(devices_there)
    return opened


@dataclass(frozen=True)
class Found:
    """Of all items that one device has: how many have one candidate, the right one; and guesses."""

    rows: int
    identified: float
    per_row: np.ndarray
    linked: np.ndarray

    def above(self, guesses: np.ndarray) -> float:
        """What the probability of a right guess is above, with 99.9 %; a device is a cluster."""
        spread = guesses.std(ddof=1) / math.sqrt(len(guesses))
        return float(guesses.mean() - SURE * spread)


def attack(devices: Devices, seen: list[dict[int, set[int]]]) -> Found:
    """Candidates are those who were in every group that opened an item; among them, by chance.

    `linked`: one guess for all items of a device, as of somebody who knows which belong together.
    """
    rng, right, identified = np.random.default_rng(5), [], 0
    linked = []
    for device in range(devices.number):
        mine = []
        for item in ALONE * device + np.arange(ALONE):
            groups = [opened[int(item)] for opened in seen if int(item) in opened]
            candidates = sorted(set.intersection(*groups))
            identified += candidates == [device]
            mine.append(rng.choice(candidates) == device)
        right.append(np.mean(mine))
        linked.append(rng.choice(candidates) == device)
    return Found(
        ALONE * devices.number,
        identified / (ALONE * devices.number),
        np.array(right, dtype=float),
        np.array(linked, dtype=float),
    )


def compared(number: int, folder: Path) -> tuple[Found, Found]:
    """Without the store and with it."""
    devices = Devices(number)
    without = [transcript(devices, name, None) for name in NAMES]
    assert all(len(seen) >= ALONE * number for seen in without)
    store = OfferedRows(folder)
    within = [transcript(devices, name, store) for name in NAMES]
    assert within[0] == without[0]  # the first federation is as it was
    assert within[1:] == [{}, {}]  # and no other opens anything
    return attack(devices, without), attack(devices, within)


@pytest.mark.slow
def test_three_federations_identify_holders_and_one_group_for_life_does_not(tmp_path: Path) -> None:
    without, within = compared(60, tmp_path)
    assert without.identified > 0.7 and without.linked.mean() > 0.8
    assert within.identified == 0.0
    # If the bound holds each of these fails for one seed of 1,000; the seed is fixed.
    assert within.above(within.per_row) <= B
    assert within.above(within.linked) <= B


@pytest.mark.campaign
def test_three_federations_of_300_devices(tmp_path: Path) -> None:
    without, within = compared(300, tmp_path)
    assert without.rows >= 2_000
    for found, store in ((without, "without the store"), (within, "with it")):
        print(
            f"{store}: {found.rows} rows of {len(found.linked)} devices, "
            f"{100 * found.identified:.1f} % identified, right {100 * found.per_row.mean():.1f} % "
            f"by row (above {100 * found.above(found.per_row):.1f} %), "
            f"{100 * found.linked.mean():.1f} % linked (above "
            f"{100 * found.above(found.linked):.1f} %)"
        )
    assert without.identified > 0.9
    assert within.identified == 0.0
    assert within.above(within.per_row) <= B
    assert within.above(within.linked) <= B
