"""Values: whose a row is, from what the opened sums of a fixed group say about its value.

Every row that one member holds carries that member's *factor* (`factors.py`). Four attacks use it,
and a fifth the counts:

- *public first rows*, by the server or a curious member (from two downloads): the factor is nearest
  to the own row that one of the members would have begun with, if that followed from the plan's
  seed or a number of the member;
- *counts against public draws*, by the server: below;
- *moves after a wait*, by the server: the member that came last has trained otherwise than those
  who waited for it, if what it was given, or what it kept, depends on when it came;
- *one known row* and *a known number of examples*: who knows either of a member links its other
  rows. B does not hold against those who know something already; how far they come is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Final, Protocol

import numpy as np

from tessera.audit.evidence import Circle
from tessera.audit.factors import (
    Counts,
    OpenedFactors,
    bias_of,
    clusters,
    factors_of,
    squared_distances,
)
from tessera.audit.finding import ClusteredTrials, Finding, average
from tessera.audit.guesses import BEST_GUESS, BY_BOUND, CLIENT, GroupClaim, GuessTrials
from tessera.audit.record import Record
from tessera.audit.round_view import RoundView, Truth
from tessera.audit.transcript import Clients
from tessera.ids import SERVER, ClientId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan, TablePlan
from tessera.privacy.index.posterior import Floats

Drawn = Callable[[int, ClientId, int], Counts]
"""(round, client, how many examples it has) -> the places of those that are drawn."""

FIRST_ROWS: Final = "public first rows"
TWO_DOWNLOADS: Final = "public first rows, from two downloads"
DRAWS: Final = "counts against public draws"
WAITED: Final = "moves after a wait"
KNOWN_ROW: Final = "one known row"
KNOWN_EXAMPLES: Final = "a known number of examples"
LINKED: Final = "the member's other rows that are linked"
CORRECT: Final = "a linked row is the member's"

FEWEST: Final = 10
MOST: Final = 200
"""Rows of the members whose rows are linked: one is known, and some are to be found."""
KNOWN_EACH: Final = 3
"""Known rows that are tried per member."""


MOST_TIMES: Final = 4
"""A client has at most so many times as many examples as it trains on: more are not tried."""
ROUNDS_TRIED: Final = 12
"""With which the number of examples is looked for; all of them count then."""
MOST_ROUNDS: Final = 62
"""A pattern is the bits of one number."""


class AttackerKnowledge(Protocol):
    """What an attacker has beside the transcript."""

    def first_rows(self, clients: Sequence[ClientId], width: int) -> list[Floats]:
        """The clients' own rows as they would begin, by each way to guess them; maybe none."""

    def drawn(self, round_id: int, client: ClientId, count: int) -> Counts:
        """The places of the examples that a client with so many would train on in a round."""

    @property
    def examples(self) -> Mapping[ClientId, int]:
        """How many examples a client has; nothing where nobody can say."""


# --- attacks --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """The sums of one group that opened, and who came last in each."""

    opened: list[OpenedFactors] = field(default_factory=list)
    last: list[ClientId] = field(default_factory=list)


@dataclass(slots=True)
class ValueAttacks:
    """Takes every opened sum of fixed groups, and attacks once all are there.

    They go in by `take` where there is a record, or one by one by `add`.
    """

    plan: Plan
    truth: Truth = field(repr=False)
    knowledge: AttackerKnowledge | None = field(default=None, repr=False)
    groups: dict[Clients, _Group] = field(default_factory=dict, repr=False)
    _downloads: dict[Clients, tuple[int, Ids, Floats, Floats | None]] = field(default_factory=dict)
    _curious: dict[Clients, OpenedFactors] = field(default_factory=dict, repr=False)

    @property
    def root(self) -> TablePlan | None:
        """The table whose rows have factors: the first with more than one column."""
        return next((t for t in self.plan.roots if t.width > 1), None)

    def take(self, view: RoundView) -> None:
        root = self.root
        if root is None:
            return
        members = tuple(sorted(view.met))
        one = OpenedFactors.of_view(view, root)
        if one is None:
            return
        self.add(replace(one, members=members), last=list(view.downloads)[-1])
        self._two_downloads(view, root, members)

    def add(self, one: OpenedFactors, *, last: ClientId) -> None:
        """A sum of a group that opened, and the last to be given what the group was given."""
        group = self.groups.setdefault(one.members, _Group())
        group.opened.append(one)
        group.last.append(last)

    def findings(self) -> list[Finding]:
        return [
            *self.first_rows().findings(
                FIRST_ROWS,
                SERVER,
                meaning="a row's change over its bias's is nearest to the own row that a member "
                "would begin with, if it followed from the plan's seed or the member's number",
                claim=BY_BOUND,
            ),
            *self.first_rows(curious=True).findings(
                TWO_DOWNLOADS,
                CLIENT,
                meaning="the same by one member of the group, from the rows that it was sent in "
                "two of its rounds",
                claim=BY_BOUND,
            ),
            *self.draws().findings(
                DRAWS,
                SERVER,
                meaning="the rounds in which a row was trained are those in which one example of a "
                "member would be drawn, if draws followed from the plan's seed, the round and the "
                "member's number",
                claim=BY_BOUND,
            ),
            self.waited(),
            *self.known_row(),
            self.known_examples(),
        ]

    # --- whose row it is ---

    def first_rows(self, *, curious: bool = False) -> GuessTrials:
        """Each group's first opened sum against the own rows that its members may begin with."""
        found = GuessTrials()
        for number, (members, group) in enumerate(sorted(self.groups.items())):
            seen = self._curious.get(members) if curious else next(iter(group.opened), None)
            if seen is None or self.knowledge is None:
                continue
            truth = self._circle(seen, members).truth
            # A row that the curious member holds is none to guess for it.
            wanted = truth.any(axis=1) & ~(truth[:, 0] & curious)
            seen = seen.only((seen.surety > 0.0) & wanted)
            circle = self._circle(seen, members[int(curious) :])
            guesses = self.knowledge.first_rows(circle.clients, seen.factors.shape[1])
            if not guesses or not len(seen.rows):
                continue
            holds = max(
                (_nearest(seen, first) for first in guesses),
                key=lambda each: float(each.max(axis=1).mean()),
            )
            claim = GroupClaim(self.plan.promise)
            claims = claim.in_groups(circle, [circle.clients], curious_clients=int(curious))
            found.add(circle, holds, claims, np.random.default_rng([number, 29]))
        return found

    def draws(self) -> GuessTrials:
        """Where clients train on some of their examples: which rows are trained in which round."""
        found = GuessTrials()
        most = self.plan.local_training.examples
        if not most or self.knowledge is None:
            return found
        for number, (members, group) in enumerate(sorted(self.groups.items())):
            if not group.opened:
                continue
            rows = np.unique(np.concatenate([one.rows for one in group.opened]))
            counts = np.zeros((len(group.opened), len(rows)), dtype=np.int64)
            for at, one in enumerate(group.opened):
                counts[at, np.searchsorted(rows, one.rows)] = one.targets
            rounds = [one.round_id for one in group.opened]
            holds = explained(rounds, members, counts, most, self.knowledge.drawn)
            truth = np.array([np.isin(rows, self.truth[c]) for c in members]).T
            kept = np.flatnonzero(truth.any(axis=1))
            circle = Circle(members, truth[kept], kept)
            claims = GroupClaim(self.plan.promise).in_groups(circle, [members])
            found.add(circle, holds[kept], claims, np.random.default_rng([number, 41]))
        return found

    def waited(self) -> Finding:
        """The rows that moved least between two sums, for the member that the second waited for."""
        trials, claimed = ClusteredTrials(), []
        for members, group in sorted(self.groups.items()):
            for before, after, last in zip(
                group.opened, group.opened[1:], group.last[1:], strict=False
            ):
                rows, moved = _moved(before, after)
                circle = self._circle(after.only(np.isin(after.rows, rows)), members)
                for at in np.argsort(moved, kind="stable")[: round(len(rows) / len(members))]:
                    trials.add(int(last), int(circle.truth[at, members.index(last)]), 1)
                    held = max(1, int(circle.truth[at].sum()))
                    claimed.append(self.plan.promise.bound(holders=held))
        return trials.finding(
            f"{WAITED}: {BEST_GUESS}",
            kind=WAITED,
            claimed=float(np.mean(claimed)) if claimed else 1.0,
            chance=float(np.mean(claimed)) if claimed else float("nan"),
            meaning="the rows whose factors moved least between two opened sums belong to the "
            f"member that came last, and that the others waited for. {BY_BOUND}",
        )

    # --- what prior knowledge adds ---

    def known_row(self) -> Iterator[Finding]:
        """Of members with 10 to 200 rows: who knows one of them links others by their factors."""
        linked, right = [], []
        for members, rows, labels, held in self._linked():
            rng = np.random.default_rng([int(members[0]), 37])
            for client in members:
                mine = np.isin(rows, held[client])
                if not FEWEST <= len(held[client]) <= MOST or not mine.any():
                    continue
                for known in rng.choice(np.flatnonzero(mine), KNOWN_EACH):
                    others = labels == labels[known]
                    others[known] = False
                    hits = int((others & mine).sum())
                    linked.append(hits / (len(held[client]) - 1))
                    right.append(hits / int(others.sum()) if others.any() else float("nan"))
        meaning = (
            f"who knows one row of a member that has {FEWEST} to {MOST} takes those with the same "
            f"factor for its, too. B is for observers who know no row: "
            f"{self.plan.promise.in_words()}. Against this one nothing is claimed"
        )
        for what, values in ((LINKED, linked), (CORRECT, right)):
            name = f"{KNOWN_ROW}: {what}"
            yield average(name, values, claimed=1.0, meaning=meaning, kind=KNOWN_ROW)

    def known_examples(self) -> Finding:
        """Who knows how many examples a member has takes the cluster with as many for its rows."""
        linked = []
        known = {} if self.knowledge is None else self.knowledge.examples
        most = self.plan.local_training.examples
        for members, rows, labels, held in self._linked():
            counts = np.zeros(len(rows))
            first = self.groups[members].opened[0]
            _, to, source = np.intersect1d(rows, first.rows, return_indices=True)
            counts[to] = first.targets[source]
            totals = np.bincount(labels, weights=counts, minlength=len(members))
            for client in members:
                if client not in known or not FEWEST <= len(held[client]) <= MOST:
                    continue
                due = min(known[client], most) if most else known[client]
                taken = labels == int(np.argmin(np.abs(totals - due)))
                linked.append(
                    float((taken & np.isin(rows, held[client])).sum() / len(held[client]))
                )
        return average(
            f"{KNOWN_EXAMPLES}: the member's rows that are found",
            linked,
            claimed=1.0,
            kind=KNOWN_EXAMPLES,
            meaning="who knows how many examples a member has takes the linked rows that stand for "
            "as many for the member's. Nothing is claimed against it",
        )

    def _linked(self) -> Iterator[tuple[Clients, Ids, Counts, Truth]]:
        """Every group's rows by their factors, with the truth about its members."""
        root = self.root
        if root is None:
            return
        start = np.uint64(self.plan.offsets[root.name])
        stop = start + np.uint64(root.rows)
        for members, group in sorted(self.groups.items()):
            if group.opened:
                rows, labels = clusters(group.opened, len(members))
                held = {c: self.truth[c] for c in members}
                yield (
                    members,
                    rows,
                    labels,
                    {c: own[(own >= start) & (own < stop)] for c, own in held.items()},
                )

    # --- helpers ---

    def _circle(self, one: OpenedFactors, members: Clients) -> Circle:
        truth = np.array([np.isin(one.rows, self.truth[c]) for c in members]).T
        return Circle(members, truth.reshape(-1, len(members)), np.arange(len(one.rows)))

    def _two_downloads(self, view: RoundView, root: TablePlan, members: Clients) -> None:
        """What the group's first member sees of it: its rows now, and in its round before."""
        me = members[0]
        if members in self._curious or me not in view.downloads:
            return
        bias, dtype = bias_of(self.plan, root), self.plan.model.precision.dtype
        start = np.uint64(self.plan.offsets[root.name])
        inside = (view.union >= start) & (view.union < start + np.uint64(root.rows))
        rows, tables = view.union[inside], view.downloads[me].tables

        def values(t: TablePlan) -> Floats:
            sent = np.frombuffer(tables[self.plan.table_id(t.name)], dtype=dtype)
            return sent.astype(np.float64).reshape(-1, t.width)

        now, now_biases = values(root), None if bias is None else values(bias)
        if len(now) != len(rows) or (now_biases is not None and len(now_biases) != len(rows)):
            return  # it was not sent the whole union
        before = self._downloads.get(members)
        self._downloads[members] = (int(view.round_id), rows, now, now_biases)
        if before is None:
            return
        _, then_rows, then, then_biases = before
        common, at, was = np.intersect1d(rows, then_rows, return_indices=True)
        moves = now[at] - then[was]
        by = None
        if now_biases is not None and then_biases is not None:
            by = (now_biases[at] - then_biases[was])[:, 0]
        factors, size = factors_of(moves, by)
        self._curious[members] = OpenedFactors(
            int(view.round_id),
            members,
            common,
            factors,
            size,
            np.zeros(len(common), np.int64),
            by is None,
        )


def _nearest(seen: OpenedFactors, first: Floats) -> Floats:
    """P(a member holds a row), by how near the row's factor is to the member's first row."""
    if seen.directions:
        along = seen.factors @ (first / np.linalg.norm(first, axis=1, keepdims=True)).T
        apart = 2.0 - 2.0 * np.abs(along)
    else:
        apart = squared_distances(seen.factors, first - first.mean(axis=0))
    scale = max(float(np.median(apart.min(axis=1))) / seen.factors.shape[1], 1e-12)
    likely = np.exp(-(apart - apart.min(axis=1, keepdims=True)) / (2.0 * scale))
    found: Floats = likely / likely.sum(axis=1, keepdims=True)
    return found


def _moved(before: OpenedFactors, after: OpenedFactors) -> tuple[Ids, Floats]:
    """Rows of both sums, and how far each one's factor moved."""
    known = before.rows[before.surety > 0.0]
    rows = np.intersect1d(known, after.rows[after.surety > 0.0])
    then, now = before.at(rows)[0], after.at(rows)[0]
    return rows, np.square(now - then).sum(axis=1)


# --- public draws ---------------------------------------------------------------------------------
#
# With `[training] examples` a client trains on some of its examples, drawn anew in each round. A
# row that is the target of one example then has a count of 1 or 0, round by round, as that example
# is drawn or not. If draws follow from something public, that pattern says whose example it is,
# and at which place among the client's: over 20 rounds hardly two places have one pattern. How
# many examples a client has is not public; the number that explains most rows is taken.


def patterns(counts: Counts) -> Counts:
    """(rounds, rows) counts -> one number per row, -1 for rows that are in two examples at once."""
    counts = counts[:MOST_ROUNDS]
    bits = (1 << np.arange(len(counts), dtype=np.int64))[:, None]
    once = (counts <= 1).all(axis=0) & counts.any(axis=0)
    found: Counts = np.where(once, (counts * bits).sum(axis=0), -1)
    return found


def explained(
    rounds: Sequence[int], members: Clients, seen: Counts, most: int, drawn: Drawn
) -> Floats:
    """P(member holds row) at [row, member]: the members among whose examples one has its pattern.

    `seen` is (rounds, rows) counts of a group, `most` how many examples a client trains on.
    """
    whole, few = patterns(seen), patterns(seen[:ROUNDS_TRIED])
    some = Counter(few[few > 0].tolist())
    places = [_places(rounds, client, some, most, drawn) for client in members]
    holds = np.array([np.isin(whole, own) for own in places], dtype=np.float64).T
    total = holds.sum(axis=1, keepdims=True)
    found: Floats = np.where(total > 0.0, holds / np.maximum(total, 1.0), 1.0 / len(members))
    return found


def _places(
    rounds: Sequence[int], client: ClientId, some: Mapping[int, int], most: int, drawn: Drawn
) -> Counts:
    """The patterns of a client's examples, for the number of them that explains most rows.

    By chance a larger number explains more, so that the rows which chance explains are taken off.
    """
    known = np.array(sorted(some), dtype=np.int64)
    best, count = -np.inf, most + 1
    for examples in range(most + 1, MOST_TIMES * most + 1):
        found = _patterns(rounds[:ROUNDS_TRIED], client, examples, drawn)
        right = np.isin(known, found).sum() - len(known) * len(np.unique(found)) / 2**ROUNDS_TRIED
        if right > best:
            best, count = float(right), examples
    return _patterns(rounds[:MOST_ROUNDS], client, count, drawn)


def _patterns(rounds: Sequence[int], client: ClientId, examples: int, drawn: Drawn) -> Counts:
    counts = np.zeros((len(rounds), examples), dtype=np.int64)
    for at, round_id in enumerate(rounds):
        counts[at, drawn(round_id, client, examples)] = 1
    return patterns(counts)


def with_knowledge(record: Record) -> ValueAttacks:
    """Knowledge is of the run's task, and needs PyTorch: it is loaded where there is a task."""
    known: AttackerKnowledge | None = None
    if record.plan.task.name:
        known = import_module("tessera.audit.knowledge").of_run(record.plan)
    return ValueAttacks(record.plan.group_plan, record.truth, known)
