"""Answers: what a client's revealed sets say about its rows, within a period.

Two attacks: *inference*, which rows a client has, from all the sets it revealed; and *flips*, a
permanent answer that changes. `History` counts answers for these and for sole holders, and
`PeriodAttack` is what all attacks do that look at each period by itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import LEVEL, ClusteredTrials, Finding, FindingUnit, wilson
from tessera.audit.round_view import RoundView, Truth
from tessera.ids import ClientId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.privacy.index import exposure
from tessera.privacy.index.posterior import log_ratio_table

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RevealedSets:
    """One round: the union, and the rows that each client revealed."""

    union: Ids = field(repr=False)
    revealed: Mapping[ClientId, Ids] = field(repr=False)


@dataclass(frozen=True, slots=True)
class History:
    """How often each client answered about each row, and how often it answered yes.

    Of k answers about a row only the number of yeses matters: the likelihood ratio between a client
    that holds the row and one that does not follows from it.
    """

    clients: Mapping[ClientId, int]
    rows: Ids = field(repr=False)
    answers: Counts = field(repr=False)  # (clients, rows)
    yes: Counts = field(repr=False)

    @classmethod
    def before(cls, rounds: Sequence[RevealedSets]) -> History:
        """An empty history with a place for every client and row of these rounds."""
        clients = sorted({c for one in rounds for c in one.revealed})
        unions = [np.zeros(0, dtype=np.uint64), *(one.union for one in rounds)]
        rows = np.unique(np.concatenate(unions))
        answers, yes = (np.zeros((len(clients), len(rows)), dtype=np.int64) for _ in range(2))
        return cls({c: i for i, c in enumerate(clients)}, rows, answers, yes)

    @classmethod
    def of(cls, rounds: Sequence[RevealedSets]) -> History:
        """The end of these rounds."""
        history = cls.before(rounds)
        for one in rounds:
            for client in one.revealed:
                history.add(one, client)
        return history

    def add(self, one: RevealedSets, client: ClientId) -> tuple[int, npt.NDArray[np.intp]]:
        """Add one client's answers of one round; returns its line and the columns."""
        at, columns = self.clients[client], np.searchsorted(self.rows, one.union)
        self.answers[at, columns] += 1
        self.yes[at, np.searchsorted(self.rows, one.revealed[client])] += 1
        return at, columns


@dataclass(slots=True)
class PeriodAttack(ABC):
    """Looks at each period by itself: rounds are kept by `_add` until `_finish` scores them."""

    plan: Plan
    truth: Truth = field(repr=False)
    _period: int = field(default=-1, init=False)

    def take(self, view: RoundView) -> None:
        period = self._period_of(view)
        if period != self._period:
            self._finish()
            self._period = period
        self._add(view)

    def findings(self) -> list[Finding]:
        self._finish()
        return self._found()

    def _period_of(self, view: RoundView) -> int:
        return view.period

    @abstractmethod
    def _add(self, view: RoundView) -> None:
        """Keep what is needed of one more round of the period."""

    @abstractmethod
    def _finish(self) -> None:
        """Score the period, and forget its rounds."""

    @abstractmethod
    def _found(self) -> list[Finding]:
        """What came out of all periods."""


# --- inference ------------------------------------------------------------------------------------

ROUNDS: Final = (1, 2, 3, 5, 10, 20, 50, 100)
ENOUGH: Final = 200
"""Rows of either kind below which a number of rounds is not reported."""


@dataclass(slots=True)
class _Counted:
    """Rows of one kind (real or not) with k answers each."""

    rows: int = 0
    all_yes: int = 0
    all_no: int = 0


@dataclass(slots=True)
class Inference(PeriodAttack):
    """Which rows a client has: the likelihood ratios that its revealed sets really have.

    After k rounds the server has k answers about each row of the union. The worst that randomised
    response allows is that all of them are yes, or all no, and then the likelihood of "the client
    has this row" is at most exp(epsilon_k) times that of "it has not" (`exposure.epsilon_after`).
    We count how often both happen and take the logarithm of the ratio: a measured epsilon that has
    to stay below the level, and comes close to it since the level is exact (Niu et al. 2020, 5.1;
    the long version leaves k rounds to future work). A row of a client is one trial in a period,
    whatever k.
    """

    _rounds: list[RevealedSets] = field(default_factory=list)
    _counted: dict[tuple[int, bool], _Counted] = field(default_factory=dict)

    def _add(self, view: RoundView) -> None:
        if view.revealed:
            self._rounds.append(RevealedSets(view.union, dict(view.revealed)))

    def _found(self) -> list[Finding]:
        usable = [k for k in ROUNDS if all(self._rows(k, real) >= ENOUGH for real in (True, False))]
        chosen = [usable[0], usable[-1]] if len(usable) > 1 else usable or [1]
        return [self._finding(k) for k in chosen]

    def _finding(self, k: int) -> Finding:
        real, other = (self._counted.get((k, kind), _Counted()) for kind in (True, False))
        privacy = self.plan.privacy.index
        claimed = exposure.epsilon_after(privacy, k)
        of_yes = (real.all_yes, real.rows, other.all_yes, other.rows)
        of_no = (other.all_no, other.rows, real.all_no, real.rows)
        # Which of the two is worse follows from the probabilities; the other counts if it breaks.
        ratio = np.abs(log_ratio_table(privacy, k)[k])
        worse = ratio[k] >= ratio[0]
        chosen, hidden = (of_yes, of_no) if worse else (of_no, of_yes)
        if Ratio.of(*hidden).low > claimed >= Ratio.of(*chosen).low:
            chosen = hidden

        def interval(level: float) -> tuple[float, float]:
            ratio = Ratio.of(*chosen, level=level)
            return ratio.low, ratio.high

        return Finding.of(
            f"inference from {k} revealed set{'s' if k > 1 else ''}",
            Ratio.of(*chosen).value,
            interval,
            claimed=claimed,
            trials=min(real.rows, other.rows),
            unit=FindingUnit.EPSILON,
            meaning="log-likelihood ratio of the most telling answers, from a client that has the "
            "row and from one that does not; per index, given the union",
        )

    def _rows(self, k: int, real: bool) -> int:
        return self._counted[k, real].rows if (k, real) in self._counted else 0

    def _finish(self) -> None:
        """Count a period's rows as they reach each number of rounds."""
        history = History.before(self._rounds)
        real = {c: np.isin(history.rows, self.truth.get(c, ())) for c in history.clients}
        for one in self._rounds:
            for client in one.revealed:
                at, columns = history.add(one, client)
                self._count(
                    history.answers[at, columns], history.yes[at, columns], real[client][columns]
                )
        self._rounds = []

    def _count(
        self,
        answers: npt.NDArray[np.int64],
        yes: npt.NDArray[np.int64],
        real: npt.NDArray[np.bool_],
    ) -> None:
        for k in ROUNDS:
            now = answers == k
            if not now.any():
                continue
            for kind in (True, False):
                selected = now & (real == kind)
                counted = self._counted.setdefault((k, kind), _Counted())
                counted.rows += int(selected.sum())
                counted.all_yes += int((yes[selected] == k).sum())
                counted.all_no += int((yes[selected] == 0).sum())


@dataclass(frozen=True, slots=True)
class Ratio:
    """The logarithm of a ratio of two rates, with an interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(
        cls, above: int, of_above: int, below: int, of_below: int, *, level: float = LEVEL
    ) -> Ratio:
        """Each rate's interval has half of the error that the ratio's may have."""
        if not of_above or not of_below or not (above or below):
            return cls(0.0, 0.0, 0.0 if of_above and of_below else math.inf)
        level = (1.0 + level) / 2.0
        top, bottom = above / of_above, below / of_below
        top_low, top_high = wilson(top, of_above, level)
        bottom_low, bottom_high = wilson(bottom, of_below, level)
        return cls(
            _log(top) - _log(bottom),
            _log(top_low) - _log(bottom_high),
            _log(top_high) - _log(bottom_low),
        )


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


# --- flips ----------------------------------------------------------------------------------------


def answers_stay(plan: Plan) -> bool:
    """Whether no answer may change within a period."""
    privacy = plan.privacy.index
    return privacy.p3 == 1.0 and (privacy.p4 == 0.0 or min(privacy.p1, privacy.p2) == 1.0)


@dataclass(slots=True)
class Flips(PeriodAttack):
    """Permanent answers that were both yes and no in a period, of all that could have been.

    Where answers have no instantaneous part (p3 = 1, p4 = 0, or everybody reveals every row) a
    client's answer about a row is the same for the whole period. One that changes proves that the
    row was added to the client's set or left it, or that the client does not follow the plan.
    """

    _rounds: dict[ClientId, list[tuple[Ids, Ids]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _flipped: ClusteredTrials = field(default_factory=ClusteredTrials)

    def _add(self, view: RoundView) -> None:
        for client, rows in view.revealed.items():
            self._rounds[client].append((view.union, rows))

    def _found(self) -> list[Finding]:
        if not answers_stay(self.plan):
            return []
        return [
            self._flipped.finding(
                "flips: a permanent answer changes",
                claimed=0.0,
                meaning="within a period a client answers the same about a row, whatever happens "
                "to its data; a change proves that the row is, or was, its own",
            )
        ]

    def _finish(self) -> None:
        always = self.plan.privacy.index.p2 == 1.0  # everybody names everything
        for rounds in self._rounds.values():
            asked, times = np.unique(np.concatenate([u for u, _ in rounds]), return_counts=True)
            named, often = np.unique(np.concatenate([r for _, r in rounds]), return_counts=True)
            yes = np.zeros(len(asked), dtype=np.int64)
            yes[np.searchsorted(asked, named)] = often
            tried = times >= (1 if always else 2)
            changed = (yes < times) & (always | (yes > 0)) & tried
            self._flipped.add(self._period, int(changed.sum()), int(tried.sum()))
        self._rounds.clear()
