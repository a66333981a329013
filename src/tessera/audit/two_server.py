"""Two servers: what one server learns from a client's keys, and what the opened sum reveals.

A server has the public part of every client's point functions and one of two seeds, and can
evaluate its own share at any row. The attack does that at rows which a client holds and at rows
which it does not, and tries to distinguish them. If the servers do not collude, it should do no
better than a coin. The direction (whether high or low scores indicate a row) is fitted on the keys
of every second client and tested on the others. Rows of one client share bins and are not
independent, so that the trials of one client's keys are one cluster.

The sum is opened to both servers, with a count for every row. A row that exactly one client wrote
is that client's exact update. The attack counts such rows, and guesses by its share whose each is.

Each server's part is made from its own view (`two_server_view.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.round_view import Truth
from tessera.audit.two_server_view import (
    EITHER,
    LEADER,
    PARTIES,
    TwoServerView,
    cuts_of,
    evaluated,
    looked_at,
)
from tessera.ids import ClientId, RoundId, TableId
from tessera.plan import Plan
from tessera.protocols.two_server.messages import Purpose
from tessera.protocols.two_server.params import TwoServerTable

Scores = npt.NDArray[np.float64]

READ, WRITTEN, PUBLIC = "rows fetched", "rows written", "the keys' public part"
SELECTED: Final = "places selected"
TOLD_APART: Final = "a real row told from another"
ALONE: Final = "sole writer: a row opens as one client's update"
IDENTIFIED: Final = "sole writer: the client is identified"


@dataclass(slots=True)
class TwoServerAttacks:
    """Takes rounds in order, each as the leader has it and as the helper has it, if that is known.

    Attacks by both servers together are out of scope: the claims assume non-collusion.
    """

    plan: Plan
    truth: Truth = field(repr=False)
    # For all keys of a client in a round, the signs of its pairs.
    _ahead: dict[tuple[str, str], list[Scores]] = field(default_factory=lambda: defaultdict(list))
    _alone: ClusteredTrials = field(default_factory=ClusteredTrials)
    _identified: dict[str, ClusteredTrials] = field(
        default_factory=lambda: defaultdict(ClusteredTrials)
    )
    _by_chance: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _unknown: bool = False  # whether some plain share could not be found

    def take(self, view: TwoServerView) -> None:
        rng = np.random.default_rng([int(view.round_id), 11 + PARTIES[view.whose]])
        for spec, start in view.roots:
            every = np.arange(spec.rows)
            for client in view.received[Purpose.RETRIEVE]:
                held = self._held(view, spec, start, client)
                self._compare(view, spec, client, held, np.setdiff1d(every, held), rng)
            self._sole(view, spec, start)
        for spec in cuts_of(view):
            for client in view.received[Purpose.WRITE]:
                if (written := view.selected.get((client, TableId(spec.table)))) is not None:
                    others = np.setdiff1d(looked_at(spec), written)
                    self._compare(view, spec, client, written, others, rng)

    # --- one row against another ----------------------------------------------------------------

    def _compare(
        self,
        view: TwoServerView,
        spec: TwoServerTable,
        client: ClientId,
        held: npt.NDArray[np.int64],
        others: npt.NDArray[np.int64],
        rng: np.random.Generator,
    ) -> None:
        """As many other rows as the client has, and what this server makes of both."""
        count = min(len(held), len(others))
        if not count:
            return
        held = np.sort(rng.permutation(held)[:count])
        others = np.sort(rng.permutation(others)[:count])
        rows = np.concatenate([held, others])
        for what, scores in self._scores(view, spec, client, rows):
            ahead = scores[:count] - rng.permutation(scores[count:])
            coins = rng.choice([-1.0, 1.0], count)
            signs = np.where(ahead == 0.0, coins, np.sign(ahead))
            whose = EITHER if what == PUBLIC else view.whose
            if what == WRITTEN and spec in cuts_of(view):
                what = SELECTED
            self._ahead[whose, what].append(signs)

    def _held(
        self, view: TwoServerView, spec: TwoServerTable, start: int, client: ClientId
    ) -> npt.NDArray[np.int64]:
        """A client's real rows of a table, as places in the round's domain."""
        own = self.truth[client]
        size = view.plan.tables[spec.table].rows
        ids = own[(own >= start) & (own < start + size)] - np.uint64(start)
        if spec.ids is not None:
            ids = ids[np.isin(ids, spec.ids, assume_unique=True)]
        return spec.index(ids)

    def _scores(
        self,
        view: TwoServerView,
        spec: TwoServerTable,
        client: ClientId,
        rows: npt.NDArray[np.int64],
    ) -> Iterator[tuple[str, Scores]]:
        """(what, a number for each row) wherever this server has something to evaluate."""
        for purpose, what in ((Purpose.RETRIEVE, READ), (Purpose.WRITE, WRITTEN)):
            known = view.keys(client, purpose, TableId(spec.table))
            if known is None:
                continue
            layout, public, own = known
            yield what, _scored(evaluated(layout, own, rows))  # bits counted, or words as a size
            if view.whose == LEADER:  # the last corrections of a row's bins; the helper has them
                yield PUBLIC, _scored(public.finals[layout.forest.tree[layout.table.chosen[rows]]])
        if spec.writes_dense and client in view.received[Purpose.WRITE]:
            words = view.plain(client, spec)
            if words is None:
                self._unknown = True
            else:
                yield WRITTEN, _scored(words.reshape(spec.rows, -1)[rows])

    # --- the opened sum -------------------------------------------------------------------------

    def _sole(self, view: TwoServerView, spec: TwoServerTable, start: int) -> None:
        """Rows that one client alone wrote, and whose this server takes them to be."""
        part = None
        if view.opened is not None:
            part = next((p for p in view.opened.tables if p.table == spec.table), None)
        if part is None or not view.included:
            return
        rows = part.rows.astype(np.int64)
        clients = list(view.included)
        holds = np.array([np.isin(rows, self._held(view, spec, start, c)) for c in clients])
        alone = np.flatnonzero(holds.sum(axis=0) == 1)
        if view.whose == LEADER:  # both see the same sum
            self._alone.add(int(view.round_id), len(alone), len(rows))
        if not len(alone):
            return
        found = [dict(self._scores(view, spec, c, rows[alone])).get(WRITTEN) for c in clients]
        scores = [score for score in found if score is not None]
        if len(scores) < len(clients):
            return
        holder = holds[:, alone].argmax(axis=0)
        hits = int(np.count_nonzero(np.array(scores).argmax(axis=0) == holder))
        self._identified[view.whose].add(int(view.round_id), hits, len(alone))
        self._by_chance[view.whose] += len(alone) / len(clients)

    # --- what came out --------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        return [
            *(self._told_apart(whose, what) for whose in PARTIES for what in self._tried),
            self._told_apart(EITHER, PUBLIC),
            self._opened(),
            *(self._by_name(whose, trials) for whose, trials in self._identified.items()),
        ]

    @property
    def _tried(self) -> tuple[str, ...]:
        """Rows of tables, and places of the dense part, where there are any to tell apart."""
        rows = (READ, WRITTEN) if self.plan.tables else ()
        return (*rows, SELECTED) if self.plan.selects else rows

    def _told_apart(self, whose: str, what: str) -> Finding:
        keys = self._ahead.get((whose, what), [])
        learnt, tried = keys[::2], keys[1::2]
        direction = 1.0 if sum(float(signs.sum()) for signs in learnt) >= 0 else -1.0
        trials = ClusteredTrials()
        for at, signs in enumerate(tried):
            trials.add(at, int((signs == direction).sum()), len(signs))
        meaning = (
            "of pairs of a row that the client has and one that it has not, how often the real one "
            "is picked; half of them by a coin"
        )
        if self._unknown:
            meaning += (
                ". Shares behind a derived table's are not looked at: how long that one's are "
                "follows from a map that is not recorded"
            )
        return trials.finding(
            f"{what}: {TOLD_APART}, by {_name(whose)}",
            claimed=0.5,
            meaning=meaning,
            attacker=whose,
            kind=TOLD_APART,
        )

    def _opened(self) -> Finding:
        return self._alone.finding(
            ALONE,
            attacker=EITHER,
            claimed=1.0,
            meaning="of the opened rows, those that one client of the sum has; its update of such "
            "a row is seen exactly. Nothing is promised against that but that it names no client",
        )

    def _by_name(self, whose: str, trials: ClusteredTrials) -> Finding:
        return trials.finding(
            f"{IDENTIFIED}, by {_name(whose)}",
            attacker=whose,
            kind=IDENTIFIED,
            claimed=self._by_chance[whose] / trials.trials if trials.trials else 1.0,
            meaning="of those rows, how often the client whose share is largest there is the "
            "writer; one over the cohort by chance",
        )


def _name(whose: str) -> str:
    return whose if whose == EITHER else f"the {whose}"


def _scored(words: npt.NDArray[Any]) -> Scores:
    """One number for each row: the mean of all that stands there."""
    return np.asarray(words.reshape(len(words), -1).astype(np.float64).mean(axis=1))


# --- key periods ----------------------------------------------------------------------------------


ABSENT: Final = "key period: rows of whoever is missing in a later round show"
REKEYED: Final = "key period: rows of whoever came or went at a re-keying show"


@dataclass(slots=True)
class KeyPeriodLists:
    """Lists that differ where keys last: whoever is on one of two and not on the other is exposed.

    In a key period a client writes the same rows in every round, and sums are exact. Between two
    rounds whose lists differ, the rows of the difference move: in a period with `absent = "allow"`,
    and where new keys are made over another list than the last. Takes rounds in order, as the
    leader has them.
    """

    plan: Plan
    truth: Truth = field(repr=False)
    _period: RoundId | None = None
    _first: frozenset[ClientId] = frozenset()
    _absent: ClusteredTrials = field(default_factory=ClusteredTrials)
    _rekeyed: ClusteredTrials = field(default_factory=ClusteredTrials)

    def take(self, view: TwoServerView) -> None:
        listed = frozenset(view.included)
        if not listed:
            return
        if view.header.epoch:
            self._count(self._absent, view, self._first, self._first - listed)
            return
        if self._period is not None:
            self._count(self._rekeyed, view, self._first | listed, self._first ^ listed)
        self._period, self._first = view.header.period, listed

    def _count(
        self,
        trials: ClusteredTrials,
        view: TwoServerView,
        everybody: frozenset[ClientId],
        shown: frozenset[ClientId],
    ) -> None:
        """A row counts for each client that has it."""
        rows = {c: len(self.truth[c]) for c in everybody}
        trials.add(int(view.round_id), sum(rows[c] for c in shown), sum(rows.values()))

    def findings(self) -> list[Finding]:
        refuses = self.plan.two_server.absent.value == "refuse"
        return [
            self._absent.finding(
                ABSENT,
                attacker=EITHER,
                claimed=0.0 if refuses else 1.0,
                meaning="of the rows of clients with keys in later rounds, those of clients that "
                "are missing in the sum: they are in one of two exact sums and not in the other",
            ),
            self._rekeyed.finding(
                REKEYED,
                attacker=EITHER,
                claimed=1.0,
                meaning="of the rows of clients on two lists one after the other, those of clients "
                "on one of them alone. Nothing is promised against that",
            ),
        ]
