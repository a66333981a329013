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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.attack import Attack, scored
from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.record import Shown, Truth
from tessera.audit.two_server_view import (
    EITHER,
    LEADER,
    PARTIES,
    TwoServerView,
    cuts_of,
    looked_at,
)
from tessera.crypto import dpf
from tessera.crypto.cuckoo import Layout
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, RoundId, TableId
from tessera.plan import Plan
from tessera.protocols.two_server.messages import Purpose
from tessera.protocols.two_server.params import TwoServerTable
from tessera.protocols.two_server.reports import ReportContext

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
            if what == WRITTEN and spec.table >= len(view.plan.tables):
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
        table = TableId(spec.table)
        ways: tuple[tuple[Purpose, str, Mapping[TableId, Layout]], ...] = (
            (Purpose.RETRIEVE, READ, view.layouts.reading),
            (Purpose.WRITE, WRITTEN, view.layouts.writing),
        )
        for purpose, what, layouts in ways:
            keys, layout = view.received[purpose].get(client), layouts.get(table)
            if layout is None or keys is None:
                continue
            named = (i for i, b in enumerate(keys.public) if b.startswith(layout.forest.digest))
            at = next(named, None)
            if at is None:
                continue  # no keys for this table: refused then, too
            public = dpf.PublicKeys.from_bytes(
                layout.forest, keys.public[at][: layout.forest.public_bytes]
            )
            context = view.report_context(client, purpose)
            share = _share(layout, public, keys.seeds[at], context, table, view.whose, rows)
            yield what, share
            if view.whose == LEADER:  # the helper has the same
                yield PUBLIC, _public(layout, public, rows)
        if spec.writes_dense and client in view.received[Purpose.WRITE]:
            words = view.plain(client, spec)
            if words is None:
                self._unknown = True
            else:
                each = words.reshape(spec.rows, -1)[rows].astype(np.float64)
                yield WRITTEN, np.asarray(each.mean(axis=1))

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
        found = trials.finding(
            f"{what}: {TOLD_APART}, by {_name(whose)}", claimed=0.5, meaning=meaning
        )
        return replace(found, attacker=whose, kind=TOLD_APART)

    def _opened(self) -> Finding:
        found = self._alone.finding(
            ALONE,
            claimed=1.0,
            meaning="of the opened rows, those that one client of the sum has; its update of such "
            "a row is seen exactly. Nothing is promised against that but that it names no client",
        )
        return replace(found, attacker=EITHER)

    def _by_name(self, whose: str, trials: ClusteredTrials) -> Finding:
        found = trials.finding(
            f"{IDENTIFIED}, by {_name(whose)}",
            claimed=self._by_chance[whose] / trials.trials if trials.trials else 1.0,
            meaning="of those rows, how often the client whose share is largest there is the "
            "writer; one over the cohort by chance",
        )
        return replace(found, attacker=whose, kind=IDENTIFIED)


def _name(whose: str) -> str:
    return whose if whose == EITHER else f"the {whose}"


def _share(
    layout: Layout,
    public: dpf.PublicKeys,
    seed: bytes,
    context: ReportContext,
    table: TableId,
    whose: str,
    rows: npt.NDArray[np.int64],
) -> Scores:
    """One server's share at the three places of every row: bits counted, or words as a size."""
    keys = dpf.ServerKeys.of(
        public, Secret(seed), party=PARTIES[whose], report_id=context.table_id(table)
    )
    bins, places = layout.table.chosen[rows], layout.table.positions[rows]
    values = dpf.evaluate_points(keys, bins.reshape(-1), places.reshape(-1))
    each = values.reshape(len(rows), -1).astype(np.float64)
    return np.asarray(each.mean(axis=1))


def _public(layout: Layout, public: dpf.PublicKeys, rows: npt.NDArray[np.int64]) -> Scores:
    """The last corrections of the three bins of every row."""
    finals = public.finals[layout.forest.tree[layout.table.chosen[rows]]]
    return np.asarray(finals.reshape(len(rows), -1).astype(np.float64).mean(axis=1))


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
        absent = self._absent.finding(
            ABSENT,
            claimed=0.0 if refuses else 1.0,
            meaning="of the rows of clients with keys in later rounds, those of clients that are "
            "missing in the sum: they are in one of two exact sums and not in the other",
        )
        rekeyed = self._rekeyed.finding(
            REKEYED,
            claimed=1.0,
            meaning="of the rows of clients on two lists one after the other, those of clients on "
            "one of them alone. Nothing is promised against that",
        )
        return [replace(each, attacker=EITHER) for each in (absent, rekeyed)]


KEYS_AND_SHARES: Final = Attack(
    name="keys and shares of one server",
    needs=Shown.SHARES,
    claim="a coin; one over the cohort",
    reads=lambda seen: seen.servers,
    by=scored(TwoServerAttacks),
)


KEY_PERIODS: Final = Attack(
    name="lists of a key period",
    needs=Shown.KEY_PERIODS,
    claim='0 with absent = "refuse", else nothing',
    reads=lambda seen: seen.leader,
    by=scored(KeyPeriodLists),
)
