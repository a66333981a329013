"""Late dropouts: rows of a client that is in the union and whose update never comes.

A client that answered the union and drops out of the update leaves rows with a count of zero, since
no other client updates them. The guess "a row with count zero is the missing client's" is right
with the probability `exposure.late_dropout`, which decoys and holders that answer no make smaller.

With a quorum, a row that was named by too few has no count, and the attacker ignores it. A client
that drops out after naming its rows has raised the sizes of their groups, so that its own rows are
opened more often than others, and the guess is better. `exposure.left_behind` accounts for that.

Decoys are never trained. A row whose count is zero in a round in which nobody dropped out late, and
is never positive in the period, is taken for a decoy: such rows are removed from the empty ones
before they are counted once more.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.population import shares
from tessera.audit.record import RoundView, Truth
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.arrays import Ids
from tessera.plan import Plan
from tessera.privacy.index.exposure import Cohort, RowCounts, expected_rows, left_behind
from tessera.protocols.union.decoys import decoy_count


@dataclass(slots=True)
class _Alike:
    """Rounds with equal numbers of clients in the union, late dropouts, and rows named by them."""

    rounds: int = 0
    real: int = 0  # rows of all the clients in the union, over all these rounds
    holders: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class LateDropouts:
    """The difference between union and update, put down to whoever left in between."""

    plan: Plan
    truth: Truth = field(repr=False)
    _alike: dict[tuple[int, int, int], _Alike] = field(default_factory=dict)
    _exposed: ClusteredTrials = field(default_factory=ClusteredTrials)
    _right: ClusteredTrials = field(default_factory=ClusteredTrials)
    _swept: ClusteredTrials = field(default_factory=ClusteredTrials)
    _period: int = -1
    _held: set[int] = field(default_factory=set)  # rows that had a positive count in the period
    _idle: set[int] = field(default_factory=set)  # with a count of zero, everybody being there
    _left: list[tuple[ClientId, Ids]] = field(default_factory=list)  # empty rows of late dropouts

    def take(self, view: RoundView) -> None:
        late = sorted(set(view.in_union) - set(view.survivors))
        if not view.finished:
            return
        if view.period != self._period:
            self._sweep()
            self._period = view.period
        self._held.update(view.opened[view.counts > 0].tolist())
        if not late:
            self._idle.update(view.opened[view.counts == 0].tolist())
            return
        held = view.among(self.truth, view.in_union)
        count = view.count
        named = view.among(view.revealed, sorted(view.revealed)).any(axis=0)
        empty = (count == 0) | ((count < 0) & ~named)
        for client in late:
            own = np.isin(view.union, self.truth[client])
            hits = int((own & empty).sum())
            self._exposed.add(view.period, hits, int(own.sum()))
            self._right.add(view.period, hits, int(empty.sum()))
            self._left.append((client, view.union[empty]))
        after_naming = len(set(late) & view.revealed.keys())
        key = (len(view.in_union), len(late), after_naming)
        alike = self._alike.setdefault(key, _Alike())
        alike.rounds += 1
        alike.real += int(held.sum())
        alike.holders.update(int(h) for h in held.sum(axis=0) if h)

    def findings(self) -> list[Finding]:
        self._sweep()
        exposed, confidence = self._claims()
        return [
            self._exposed.finding(
                "late dropout: its rows that come back empty",
                claimed=exposed,
                meaning="of a late dropout's rows, those with a count of zero",
            ),
            self._right.finding(
                "late dropout: an empty row is its own",
                claimed=confidence,
                meaning="of the empty rows, those that really are the missing client's; others "
                "are decoys, or rows whose holders answered no",
            ),
            self._swept.finding(
                "late dropout, decoys learnt: an empty row is its own",
                claimed=confidence,
                meaning="the same without the rows that were empty although nobody was missing: "
                "decoys are never trained, which shows over several rounds",
            ),
        ]

    def _sweep(self) -> None:
        """Score a period's late dropouts without its decoys."""
        decoys = np.array(sorted(self._idle - self._held), dtype=np.uint64)
        if self._idle:
            for client, empty in self._left:
                rest = np.setdiff1d(empty, decoys)
                hits = int(np.isin(rest, self.truth[client]).sum())
                self._swept.add(self._period, hits, len(rest))
        self._held, self._idle, self._left = set(), set(), []

    def _claims(self) -> tuple[float, float]:
        """(exposed, confidence), over rounds that differ in size by what each has to show."""
        rows = hits = guesses = 0.0
        for (clients, gone, named), alike in self._alike.items():
            if clients < 2 or gone >= clients or not alike.real:
                continue
            real = alike.real / alike.rounds / clients
            cohort = Cohort(
                clients=clients,
                holders=shares(alike.holders),
                min_group=min(clients, self.plan.secagg(RoundId(0)).quorum),
            )
            found = left_behind(
                self.plan.privacy.index,
                cohort,
                gone=gone,
                named=named,
                rows=self._expected(cohort, real),
            )
            cases = alike.rounds * gone
            rows += cases * real
            hits += cases * real * found.exposed
            guesses += cases * found.empty
        return hits / rows if rows else 0.0, hits / guesses if guesses else 0.0

    def _expected(self, cohort: Cohort, real: float) -> RowCounts:
        catalogue = self.plan.domain
        # A client's decoys are a whole number, drawn among the ids it does not hold.
        decoys = decoy_count(math.ceil(real), self.plan.privacy.decoy_share) / real
        spread = catalogue / max(1.0, catalogue - real)
        return expected_rows(
            self.plan.privacy.index,
            cohort,
            real=real,
            decoys=decoys * spread,
            catalogue=catalogue,
        )
