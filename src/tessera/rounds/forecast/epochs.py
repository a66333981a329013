"""Fixed groups that wait: a member's bytes in an epoch, and how long sums wait for the absent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np

from tessera import wire
from tessera.crypto.group import Group
from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.protocols.epochs.messages import (
    Assignment,
    Delivered,
    Delivery,
    DeliveryCertificate,
    EpochHeader,
    EpochKind,
    Fetch,
)
from tessera.protocols.secagg.params import StageSpec
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds.epochs.group import EpochWork, PeriodRecord
from tessera.rounds.forecast.rows import ExpectedRows
from tessera.rounds.forecast.traffic import (
    KEY,
    ROUND,
    MaskWork,
    Work,
    carried,
    length,
    masked_bytes,
    some,
)
from tessera.rounds.messages import Download, UnionOpened

# --- bytes ----------------------------------------------------------------------------------------

SIGNED: Final = Delivered(sender=ClientId(0), epoch=1, link=KEY, vector=KEY, mask_key=KEY)
RECORD: Final = PeriodRecord(period=1, cutoff=0)


@dataclass(frozen=True)
class EpochTraffic:
    """What one member and the server send each other in an epoch: one fetch and one delivery.

    `rows` are those of one group. A union is an epoch of its own, once a period; its rows come with
    the first update.
    """

    rows: ExpectedRows

    @property
    def plan(self) -> Plan:
        return self.rows.plan

    @property
    def _union(self) -> tuple[StageSpec, ...]:
        """The stages before that of the update: of a union, where there is one."""
        return self.plan.stages[:-1]

    def up(self) -> Iterator[tuple[str, float]]:
        yield "update", self._delivery(self.plan.ring, self.words)

    def down(self) -> Iterator[tuple[str, float]]:
        inputs = ("record", "base", *(("union", "maps") if self._union else ()))
        assigned = self._assigned(EpochKind.UPDATE, self.plan.ring, self.words, *inputs)
        yield "rows down", assigned + self._base

    def union(self) -> tuple[float, float]:
        """Bytes up and down of a period's union; none where there is no union."""
        if not self._union:
            return 0.0, 0.0
        encoding = self.plan.union_encoding(ROUND)
        assigned = self._assigned(EpochKind.UNION, encoding.group, encoding.length, "record")
        found = {
            self.plan.table_id(f.name): some(f.union, self.plan.table(f.name).rows)
            for f in self.rows.tables
            if not f.derived
        }
        listed = length(UnionOpened(round_id=ROUND, tables=found))
        return self._delivery(encoding.group, encoding.length), assigned + listed

    def between(self) -> float:
        return 0.0

    @cached_property
    def words(self) -> int:
        """Of a member's vector."""
        stage = self.plan.stages[-1]
        parts = zip(self.rows.tables, stage.tables, strict=False)
        return stage.dense + sum(round(f.union) * spec.width for f, spec in parts)

    @property
    def work(self) -> Work:
        """Of one update.

        A member verifies a signature of each other one, which is about the work of an agreement;
        the server adds vectors, which is at most that of as many bytes of a mask.
        """
        plan, others = self.plan, self.plan.cohort - 1
        vector = masked_bytes(plan.ring, self.words)
        masks = MaskWork(plan.ring, others * vector, plan.cohort * vector)
        return Work(agreements=2 * others, boxes=0, masks=(masks,), openings=0)

    @property
    def _base(self) -> float:
        plan, itemsize = self.plan, self.plan.model.precision.dtype.itemsize
        chosen = zip(self.rows.tables, plan.stages[-1].tables, strict=False)
        sizes = {f.name: round(f.union) for f, _ in chosen}
        rows = [sizes.get(t.name, t.rows) * t.width * itemsize for t in plan.tables]
        frame = Download(
            round_id=ROUND, dense=b"", tables={plan.table_id(t.name): b"" for t in plan.tables}
        )
        return length(frame) + carried(plan.model.dense * itemsize, *rows)

    def _delivery(self, ring: Group, words: int) -> float:
        asked = length(Fetch(sender=ClientId(0), delivered=1, visit=1))
        frame = length(Delivery(statement=SIGNED, vector=b""))
        return asked + frame + carried(packed_bytes(ring, words))

    def _assigned(self, kind: EpochKind, ring: Group, words: int, *inputs: str) -> float:
        header = EpochHeader(
            period=1, kind=kind, epoch=2, ring=ring, length=words, inputs=dict.fromkeys(inputs, KEY)
        )
        certificate = DeliveryCertificate(entries=(SIGNED,) * self.plan.cohort)
        assignment = Assignment(visit=1, header=header, certificate=certificate, own=None)
        return length(EpochWork(assignment=wire.encode(assignment), record=RECORD))


# --- waiting --------------------------------------------------------------------------------------

ROUNDS: Final = 400
"""Rounds that are simulated; a figure is then within about one percent."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What comes of invitations where a share of clients is absent, each by itself in each round.

    `counted` is the share of invitations, of absent clients too, whose training was merged; rounds
    waited are from the one in which a base is fixed to the one in which its sum opens.
    """

    counted: float
    mean: float
    p95: float
    opened: float
    """Sums that open in a round."""


@cache
def waiting(*, cohort: int, size: int, absent: float, groups: int) -> Waiting:
    """Simulate the invitations of `EpochCourse.invited`, with numbers of members only.

    Groups that somebody has delivered to come first, the oldest base before all; others fill up the
    cohort. Who of a group is missing makes no difference, and groups that are never reached make
    none either.
    """
    groups = min(groups, 4 * -(-cohort // size) + 4)
    rng = np.random.default_rng([cohort, size, groups])
    begun: list[tuple[int, int]] = []  # (round of the base, members due), the oldest first
    invited = merged = 0
    ages: list[int] = []
    for now in range(ROUNDS):
        fresh, room, later = groups - len(begun), cohort, list[tuple[int, int]]()
        for base, due in [*begun, *[(now, size)] * fresh]:
            asked = min(due, room)
            room, invited = room - asked, invited + asked
            left = due - int(rng.binomial(asked, 1.0 - absent))
            if not left:
                ages.append(now - base)
                merged += size
            elif left < size:
                later.append((base, left))
        begun = sorted(later)
    return Waiting(
        counted=merged / invited if invited else 0.0,
        mean=float(np.mean(ages)) if ages else float("inf"),
        p95=float(np.quantile(ages, 0.95)) if ages else float("inf"),
        opened=len(ages) / ROUNDS,
    )
