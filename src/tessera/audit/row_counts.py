"""Row counts: what the counts of one round's opened sum reveal about the members of a row's group.

Three attacks: late dropouts, Events 1 and 2, and sole holders. Their claims average the formulas of
`privacy/index/exposure.py` over the rows of a union by the number of their holders, which is
counted from the truth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from tessera.audit.answers import History, PeriodAttack, RevealedSets
from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.round_view import RoundView, Truth
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.privacy.index import exposure
from tessera.privacy.index.exposure import (
    Cohort,
    Holders,
    RowCounts,
    at_least,
    counted,
    expected_rows,
    left_behind,
)
from tessera.privacy.index.posterior import Floats, log_ratio_table
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.union.decoys import decoy_count


@dataclass(slots=True)
class HolderCounts:
    """For each number of clients how many rows have how many holders among them, from 1 up.

    Rounds with equal numbers of clients are counted together; what they claim is averaged by how
    many rows they have, and supposes the share of clients that dropped out.
    """

    by_clients: dict[int, Counter[int]] = field(default_factory=dict)
    present: int = 0
    gone: int = 0

    def add(self, clients: int, holders: npt.NDArray[np.int64], *, gone: int = 0) -> None:
        found = self.by_clients.setdefault(clients, Counter())
        found.update(Counter(int(h) for h in holders if h))
        self.present += clients
        self.gone += gone

    def take(self, view: RoundView, truth: Truth) -> npt.NDArray[np.int64]:
        """Count a round's rows by their holders among those who answered; returns these."""
        asked = sorted(view.revealed)
        holders: npt.NDArray[np.int64] = view.among(truth, asked).sum(axis=0)
        self.add(len(asked), holders, gone=len(set(asked) - set(view.survivors)))
        return holders

    def claim(self, formula: Callable[[Cohort], float], *, min_group: int) -> float:
        """The mean of a formula over all the rows counted; 0 if there are none."""
        total, rows = 0.0, 0
        dropout = self.gone / self.present if self.present else 0.0
        for clients, found in self.by_clients.items():
            size = found.total()
            if clients < 2 or not size:
                continue
            cohort = Cohort(
                clients=clients,
                holders=shares(found),
                min_group=min(min_group, clients),
                dropout=dropout,
            )
            total, rows = total + size * formula(cohort), rows + size
        return total / rows if rows else 0.0


def shares(counted: Counter[int]) -> Holders:
    size = math.fsum(counted.values())
    return Holders.of({holders: rows / size for holders, rows in counted.items()})


# --- late dropouts --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Alike:
    """Rounds with equal numbers of clients in the union, of late dropouts, and of their sets."""

    rounds: int = 0
    real: int = 0  # rows of all the clients in the union, over all these rounds
    holders: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class LateDropouts(PeriodAttack):
    """Rows of a client that is in the union and whose update never comes.

    They have a count of zero, since no other client updates them. The guess "a row with count zero
    is the missing client's" is right with the probability `exposure.late_dropout`, which decoys and
    holders that answer no reduce.

    With a quorum, a row that too few revealed has no count, and the attacker ignores it. A client
    that drops out after revealing its rows has raised the sizes of their groups, so that its own
    rows are opened more often than others, and the guess is better: `exposure.left_behind`.

    Decoys are never trained. A row whose count is zero in a round in which nobody dropped out late,
    and is never positive in the period, is taken for a decoy: such rows are removed from the empty
    ones before they are counted once more.
    """

    _alike: dict[tuple[int, int, int], _Alike] = field(default_factory=dict)
    _exposed: ClusteredTrials = field(default_factory=ClusteredTrials)
    _right: ClusteredTrials = field(default_factory=ClusteredTrials)
    _swept: ClusteredTrials = field(default_factory=ClusteredTrials)
    _held: set[int] = field(default_factory=set)  # rows that had a positive count in the period
    _idle: set[int] = field(default_factory=set)  # with a count of zero, everybody being there
    _left: list[tuple[ClientId, Ids]] = field(default_factory=list)  # empty rows of late dropouts

    def _add(self, view: RoundView) -> None:
        late = sorted(set(view.in_union) - set(view.survivors))
        if not view.finished:
            return
        self._held.update(view.opened[view.counts > 0].tolist())
        if not late:
            self._idle.update(view.opened[view.counts == 0].tolist())
            return
        held = view.among(self.truth, view.in_union)
        count = view.count
        revealed = view.among(view.revealed, sorted(view.revealed)).any(axis=0)
        empty = (count == 0) | ((count < 0) & ~revealed)
        for client in late:
            own = np.isin(view.union, self.truth[client])
            hits = int((own & empty).sum())
            self._exposed.add(view.period, hits, int(own.sum()))
            self._right.add(view.period, hits, int(empty.sum()))
            self._left.append((client, view.union[empty]))
        after_revealing = len(set(late) & view.revealed.keys())
        key = (len(view.in_union), len(late), after_revealing)
        alike = self._alike.setdefault(key, _Alike())
        alike.rounds += 1
        alike.real += int(held.sum())
        alike.holders.update(int(h) for h in held.sum(axis=0) if h)

    def _found(self) -> list[Finding]:
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

    def _finish(self) -> None:
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


# --- Events 1 and 2 -------------------------------------------------------------------------------


@dataclass(slots=True)
class Events:
    """What an opened row reveals about the members of its group, by the server's own sums.

    Event 1: one member is left in the sum and holds the row, so that its update is known, and whose
    it is. Event 2: the count is zero, so that all remaining members revealed a row they do not
    hold. Niu et al. 2020, section 5.1 and Theorem 5.5. Both are counted over rows that a client
    which revealed a set holds; decoys, which no client holds, are not counted. Nor is a zero whose
    group has a holder, which trained on no example of the row in this round.
    """

    plan: Plan
    truth: Truth = field(repr=False)
    _holders: HolderCounts = field(default_factory=HolderCounts)
    _first: ClusteredTrials = field(default_factory=ClusteredTrials)
    _second: ClusteredTrials = field(default_factory=ClusteredTrials)

    def take(self, view: RoundView) -> None:
        if not view.finished:
            return
        held = self._holders.take(view, self.truth) > 0
        members = view.among(view.members, view.survivors)
        left, count = members.sum(axis=0), view.count
        # A member that holds the row may have trained on no example of it (drawn others, or more
        # rows than it may use): then the count says of it what is not so, and gives nothing away.
        lacking = ~(members & view.among(self.truth, view.survivors)).any(axis=0)
        first = (left == 1) & (count > 0)
        second = (left >= 1) & (count == 0) & lacking
        rows = int(held.sum())
        self._first.add(view.period, int((first & held).sum()), rows)
        self._second.add(view.period, int((second & held).sum()), rows)

    def findings(self) -> list[Finding]:
        privacy, quorum = self.plan.privacy.index, self.plan.secagg(RoundId(0)).quorum
        first, second = (
            self._holders.claim(partial(event, privacy), min_group=quorum)
            for event in (exposure.event_1, exposure.event_2)
        )
        return [
            self._first.finding(
                "Event 1: a row opens as one known client's update",
                claimed=first,
                meaning="of the union's rows, those whose sum is the update of the one client "
                "left in the group",
            ),
            self._second.finding(
                "Event 2: a row opens empty",
                claimed=second,
                meaning="of the union's rows, those whose whole group is known to lack the row",
            ),
        ]


# --- sole holders ---------------------------------------------------------------------------------


def sole_holder(privacy: IndexPrivacy, cohort: Cohort) -> float:
    """P(exactly one member of the opened sum holds the row), averaged over the union's rows.

    Event 1 without the condition that nobody else is in the sum: of the n1 holders one says yes and
    stays, the others say no or drop; the n0 others do as they like. The group met its quorum when
    it was formed.
    """
    p5, p6, drop = privacy.p5, privacy.p6, cohort.dropout
    total = 0.0
    for share, n1, n0 in cohort.honest():
        if n1:
            others = np.convolve(counted(n1 - 1, 1.0 - p5, p5 * drop), counted(n0, 1.0 - p6, p6))
            total += share * n1 * p5 * (1.0 - drop) * at_least(others, cohort.honest_quorum - 1)
    return total


@dataclass(frozen=True, slots=True)
class _Sole:
    """A row with one true holder in its sum, and the members among whom it hides."""

    row: np.uint64
    members: tuple[ClientId, ...]
    holder: ClientId
    round_id: RoundId


@dataclass(slots=True)
class SoleHolders(PeriodAttack):
    """How many rows have one true holder in their sum, and how often that holder is identified.

    A row's sum hides which member of its group holds the row. With one true holder in the sum it
    does not hide *what* the holder sent (docs/threat-model.md). The attack counts such rows, and
    then guesses the member with the largest likelihood ratio over the whole period. Every member
    answered yes in this round, so after one round all are equally likely, and after k rounds the
    likelihoods differ at most as much as those of "k times yes" and "once yes".
    """

    _rounds: list[RevealedSets] = field(default_factory=list)
    _soles: list[_Sole] = field(default_factory=list)
    _holders: HolderCounts = field(default_factory=HolderCounts)
    _opened: ClusteredTrials = field(default_factory=ClusteredTrials)
    _identified: ClusteredTrials = field(default_factory=ClusteredTrials)
    _bound: float = 0.0

    def _add(self, view: RoundView) -> None:
        if view.revealed:
            self._rounds.append(RevealedSets(view.union, dict(view.revealed)))
        if not view.finished:
            return
        holders = self._holders.take(view, self.truth)
        members = view.among(view.members, view.survivors)
        true = members & view.among(self.truth, view.survivors)
        alone = (true.sum(axis=0) == 1) & (view.count >= 0)
        self._opened.add(view.period, int(alone.sum()), int((holders > 0).sum()))
        for at in np.flatnonzero(alone):
            group = tuple(c for c, m in zip(view.survivors, members[:, at], strict=True) if m)
            holder = view.survivors[int(np.argmax(true[:, at]))]
            self._soles.append(_Sole(view.union[at], group, holder, view.round_id))

    def _found(self) -> list[Finding]:
        claimed = self._holders.claim(
            partial(sole_holder, self.plan.privacy.index),
            min_group=self.plan.secagg(RoundId(0)).quorum,
        )
        trials = self._identified.trials
        return [
            self._opened.finding(
                "sole holder: a row opens as one client's update",
                claimed=claimed,
                meaning="of the union's rows, those whose sum is one holder's exact update; which "
                "member that is, its group hides (as far as B)",
            ),
            self._identified.finding(
                "sole holder: the client is identified",
                claimed=self._bound / trials if trials else 1.0,
                meaning="of those rows, how often the member with the highest likelihood, given "
                "the answers, is the holder; one over the group's size after a single round",
            ),
        ]

    def _finish(self) -> None:
        """Identify the holders of a period's singleton rows, given all its answers."""
        if self._soles:
            history = History.of(self._rounds)
            ratios = log_ratio_table(self.plan.privacy.index, int(history.answers.max(initial=0)))
            for sole in self._soles:
                self._identify(sole, history, ratios)
        self._rounds, self._soles = [], []

    def _identify(self, sole: _Sole, history: History, ratios: Floats) -> None:
        column = int(np.searchsorted(history.rows, sole.row))
        at = [history.clients[c] for c in sole.members]
        answers = history.answers[at, column]
        score = ratios[answers, history.yes[at, column]]
        # Ties are broken at random, the same at every audit.
        rng = np.random.default_rng([int(sole.round_id), int(sole.row)])
        best = rng.permutation(np.flatnonzero(score == score.max()))[0]
        self._identified.add(self._period, int(sole.members[int(best)] == sole.holder), 1)
        possible = np.concatenate([ratios[k, 1 : k + 1] for k in np.unique(answers)])
        # The holder's likelihood is at most the highest, everybody else's at least the lowest.
        spread = float(np.exp(possible.min() - possible.max())) if len(possible) > 1 else 1.0
        self._bound += 1.0 / (1.0 + (len(at) - 1) * spread)
