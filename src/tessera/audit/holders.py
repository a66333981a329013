"""Sole holders: rows whose sum is one client's exact update, and who that client is.

A row's sum hides which member of its group holds the row. With one true holder in the sum it does
not hide *what* the holder sent (docs/threat-model.md). The attack counts such rows, and then names
the member with the largest likelihood ratio over the whole period. Every member answered yes in
this round, so after one round all are equally likely, and after k rounds the likelihoods differ at
most as much as those of "k times yes" and "once yes".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.history import History, RevealedSets, log_ratio
from tessera.audit.population import HolderCounts
from tessera.audit.record import RoundView, Truth
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.privacy.index.exposure import Cohort, at_least, counted
from tessera.privacy.index.response import IndexPrivacy


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
class SoleHolders:
    """How many rows have one true holder in their sum, and how often the holder can be named."""

    plan: Plan
    truth: Truth = field(repr=False)
    _period: int = -1
    _rounds: list[RevealedSets] = field(default_factory=list)
    _soles: list[_Sole] = field(default_factory=list)
    _holders: HolderCounts = field(default_factory=HolderCounts)
    _present: int = 0
    _gone: int = 0
    _opened: ClusteredTrials = field(default_factory=ClusteredTrials)
    _named: ClusteredTrials = field(default_factory=ClusteredTrials)
    _bound: float = 0.0
    _ratios: dict[tuple[int, int], float] = field(default_factory=dict)

    def take(self, view: RoundView) -> None:
        if view.period != self._period:
            self._finish()
            self._period = view.period
        if view.revealed:
            self._rounds.append(RevealedSets(view.union, dict(view.revealed)))
        if not view.finished:
            return
        named = sorted(view.revealed)
        holders = view.among(self.truth, named).sum(axis=0)
        members = view.among(view.members, view.survivors)
        true = members & view.among(self.truth, view.survivors)
        alone = (true.sum(axis=0) == 1) & (view.count >= 0)
        self._holders.add(len(named), holders)
        self._present += len(named)
        self._gone += len(set(named) - set(view.survivors))
        self._opened.add(view.period, int(alone.sum()), int((holders > 0).sum()))
        for at in np.flatnonzero(alone):
            group = tuple(c for c, m in zip(view.survivors, members[:, at], strict=True) if m)
            holder = view.survivors[int(np.argmax(true[:, at]))]
            self._soles.append(_Sole(view.union[at], group, holder, view.round_id))

    def findings(self) -> list[Finding]:
        self._finish()
        privacy = self.plan.privacy.index
        dropout = self._gone / self._present if self._present else 0.0
        claimed = self._holders.claim(
            lambda cohort: sole_holder(privacy, cohort),
            min_group=self.plan.secagg(RoundId(0)).quorum,
            dropout=dropout,
        )
        trials = self._named.trials
        return [
            self._opened.finding(
                "sole holder: a row opens as one client's update",
                claimed=claimed,
                meaning="of the union's rows, those whose sum is one holder's exact update; which "
                "member that is, its group hides (as far as B)",
            ),
            self._named.finding(
                "sole holder: the client is identified",
                claimed=self._bound / trials if trials else 1.0,
                meaning="of those rows, how often the member with the highest likelihood, given "
                "the answers, is the holder; one over the group's size after a single round",
            ),
        ]

    def _finish(self) -> None:
        """Name the holders of a period's singleton rows, given all its answers."""
        if self._soles:
            history = History.of(self._rounds)
            for sole in self._soles:
                self._name(sole, history)
        self._rounds, self._soles = [], []

    def _name(self, sole: _Sole, history: History) -> None:
        column = int(np.searchsorted(history.rows, sole.row))
        at = [history.clients[c] for c in sole.members]
        answers, yes = history.answers[at, column].tolist(), history.yes[at, column].tolist()
        score = np.array([self._ratio(k, y) for k, y in zip(answers, yes, strict=True)])
        # Ties are broken at random, the same at every audit.
        rng = np.random.default_rng([int(sole.round_id), int(sole.row)])
        best = rng.permutation(np.flatnonzero(score == score.max()))[0]
        self._named.add(self._period, int(sole.members[int(best)] == sole.holder), 1)
        possible = [self._ratio(k, y) for k in set(answers) for y in range(1, k + 1)]
        # The holder's likelihood is at most the highest, everybody else's at least the lowest.
        spread = float(np.exp(min(possible) - max(possible))) if len(possible) > 1 else 1.0
        self._bound += 1.0 / (1.0 + (len(at) - 1) * spread)

    def _ratio(self, answers: int, yes: int) -> float:
        if (answers, yes) not in self._ratios:
            self._ratios[answers, yes] = log_ratio(self.plan.privacy.index, answers, yes)
        return self._ratios[answers, yes]
