"""Two servers: what each of them alone makes of a client's keys, and what the opened sum tells.

A server has the public part of every client's point functions and one of two seeds. With those it
evaluates its own share at any row it likes. We let it do that at rows which a client has and at
rows which it has not, and ask it to tell one from the other: between servers that do not work
together it should do no better than a coin. It may learn, on half of the pairs, whether high or low
scores speak for a row; the other half is counted.

The sum is opened to both, with a count for every row. A row that one client alone wrote is that
client's exact update. We count such rows, and let a server guess, by its share, whose each is.

The leader's view has its seeds in the open. The helper's are sealed to it, so that its part takes
the helper's own key, which is stored with a recorded simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import Finding, Tally
from tessera.audit.record import Rows, Truth
from tessera.crypto import dpf
from tessera.crypto.cuckoo import Layout
from tessera.crypto.keys import SealingKey
from tessera.crypto.secret import Secret
from tessera.engines.views import Seen
from tessera.ids import HELPER, SERVER, ClientId, RoundId, TableId
from tessera.protocols.pair import envelope
from tessera.protocols.pair.envelope import Subject
from tessera.protocols.pair.layouts import Layouts, layouts_of
from tessera.protocols.pair.messages import Header, Opening, Purpose
from tessera.protocols.pair.params import PairParams, PairTable, Servers
from tessera.protocols.retrieval.messages import Query
from tessera.protocols.scatter.messages import IncludedList, OpenedSum, Report
from tessera.rounds.messages import UnionOpened
from tessera.rounds.pair import pair_params
from tessera.rounds.plan import Plan

Scores = npt.NDArray[np.float64]

PARTIES: Final = {SERVER: 0, HELPER: 1}
READ, WRITTEN, PUBLIC = "rows fetched", "rows written", "the keys' public part"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRound:
    """What was said in a round, as the leader has it; the boxes are closed to it."""

    plan: Plan
    round_id: RoundId
    header: Header = field(repr=False)
    params: PairParams = field(repr=False)
    queries: Mapping[ClientId, Query] = field(repr=False)
    reports: Mapping[ClientId, Report] = field(repr=False)
    included: tuple[ClientId, ...]
    opened: OpenedSum | None = field(repr=False)

    @property
    def layouts(self) -> Layouts:
        return layouts_of(self.params, self.header)

    def subject(self, client: ClientId, purpose: Purpose) -> Subject:
        said = (self.queries if purpose is Purpose.RETRIEVE else self.reports)[client]
        return Subject(
            params=self.params,
            header=self.header,
            purpose=purpose,
            client=client,
            report_id=said.report_id,
        )

    @property
    def roots(self) -> Iterator[tuple[PairTable, int]]:
        """The tables whose rows clients choose, each with where it begins in the one id space."""
        for t in self.plan.roots:
            for spec in self.params.tables:
                if spec.table == self.plan.table_id(t.name):
                    yield spec, self.plan.offsets[t.name]


def pair_round(plan: Plan, round_id: RoundId, seen: Sequence[tuple[Seen, Any]]) -> PairRound | None:
    """A round out of the leader's view; None if it was not opened."""
    messages = [message for entry, message in seen if entry.direction == "received"]
    told = [message for entry, message in seen if entry.direction == "sent"]
    opening = next((m for m in told if isinstance(m, Opening)), None)
    if opening is None:
        return None
    domain: dict[str, Rows] | None = None
    if plan.narrows:
        union = next(m for m in told if isinstance(m, UnionOpened))
        # Rows of derived tables follow from a map that is not recorded: they are left out.
        domain = {t.name: np.zeros(0, dtype=np.uint64) for t in plan.tables}
        domain |= {t.name: union.tables[plan.table_id(t.name)] for t in plan.roots}
    included = next((m for m in told if isinstance(m, IncludedList)), None)
    return PairRound(
        plan=plan,
        round_id=round_id,
        header=opening.header,
        params=pair_params(plan, round_id, _nobody(), domain),
        queries={m.sender: m for m in messages if isinstance(m, Query)},
        reports={m.sender: m for m in messages if isinstance(m, Report)},
        included=() if included is None else tuple(sorted(included.reports)),
        opened=next((m for m in told if isinstance(m, OpenedSum)), None),
    )


def _nobody() -> Servers:
    """Keys are pinned, and not in a view; bins do not depend on them once the header is there."""
    box = SealingKey.from_secret(Secret(bytes(range(32)))).public
    return Servers(leader=bytes(32), helper=b"\x01" * 32, box=box)


@dataclass(slots=True)
class PairAttacks:
    """Takes rounds in order. `box_key` opens the helper's boxes; without it, its part rests."""

    plan: Plan
    truth: Truth = field(repr=False)
    box_key: SealingKey | None = field(default=None, repr=False)
    _ahead: dict[tuple[str, str], list[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _alone: Tally = field(default_factory=Tally)
    _named: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    _by_lot: float = 0.0

    def take(self, view: PairRound) -> None:
        lot = np.random.default_rng([int(view.round_id), 11])
        for spec, start in view.roots:
            for client in view.queries:
                self._compare(view, spec, start, client, lot)
            self._sole(view, spec, start)

    # --- one row against another ----------------------------------------------------------------

    def _compare(
        self,
        view: PairRound,
        spec: PairTable,
        start: int,
        client: ClientId,
        lot: np.random.Generator,
    ) -> None:
        """As many other rows as the client has, and what each server makes of both."""
        mine = self._held(view, spec, start, client)
        others = np.setdiff1d(np.arange(spec.rows), mine)
        count = min(len(mine), len(others))
        if not count:
            return
        mine = np.sort(lot.permutation(mine)[:count])
        others = np.sort(lot.permutation(others)[:count])
        rows = np.concatenate([mine, others])
        for whose, what, scores in self._scores(view, spec, client, rows):
            ahead = scores[:count] - lot.permutation(scores[count:])
            coins = lot.choice([-1.0, 1.0], count)
            signs = np.where(ahead == 0.0, coins, np.sign(ahead))
            self._ahead[whose, what] += [(int(view.round_id), sign) for sign in signs.tolist()]

    def _held(
        self, view: PairRound, spec: PairTable, start: int, client: ClientId
    ) -> npt.NDArray[np.int64]:
        """A client's real rows of a table, as places in the round's domain."""
        own = self.truth[client]
        size = view.plan.tables[spec.table].rows
        ids = own[(own >= start) & (own < start + size)] - np.uint64(start)
        if spec.ids is not None:
            ids = ids[np.isin(ids, spec.ids, assume_unique=True)]
        return spec.index(ids)

    def _scores(
        self, view: PairRound, spec: PairTable, client: ClientId, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[str, str, Scores]]:
        """(who, what, a number for each row) wherever a server has something to evaluate."""
        said: tuple[tuple[Purpose, str, Mapping[TableId, Layout], Any], ...] = (
            (Purpose.RETRIEVE, READ, view.layouts.reading, view.queries.get(client)),
            (Purpose.WRITE, WRITTEN, view.layouts.writing, view.reports.get(client)),
        )
        for purpose, what, layouts, message in said:
            layout = layouts.get(TableId(spec.table))
            if layout is None or message is None:
                continue
            at = next(i for i, b in enumerate(message.public) if b.startswith(layout.forest.digest))
            public = dpf.PublicKeys.from_bytes(layout.forest, message.public[at])
            subject = view.subject(client, purpose)
            for whose, seed in self._seeds(subject, message, at):
                share = _share(layout, public, seed, subject, TableId(spec.table), whose, rows)
                yield whose, what, share
            yield SERVER, PUBLIC, _public(layout, public, rows)
        report = view.reports.get(client)
        if report is not None and spec.writes_dense:
            yield SERVER, WRITTEN, _plain(view.params, spec, report, rows)

    def _seeds(
        self, subject: Subject, message: Query | Report, at: int
    ) -> Iterator[tuple[str, bytes]]:
        yield SERVER, message.seeds[at]
        if self.box_key is not None:
            yield HELPER, envelope.opened(subject, message.box, self.box_key).seeds[at]

    # --- the opened sum -------------------------------------------------------------------------

    def _sole(self, view: PairRound, spec: PairTable, start: int) -> None:
        """Rows that one client alone wrote, and whose a server takes them to be."""
        part = None
        if view.opened is not None:
            part = next((p for p in view.opened.tables if p.table == spec.table), None)
        if part is None or not view.included:
            return
        rows = part.rows.astype(np.int64)
        clients = list(view.included)
        holds = np.array([np.isin(rows, self._held(view, spec, start, c)) for c in clients])
        alone = np.flatnonzero(holds.sum(axis=0) == 1)
        self._alone.add(int(view.round_id), len(alone), len(rows))
        if not len(alone):
            return
        holder = holds[:, alone].argmax(axis=0)
        for whose in PARTIES:
            scores = np.array(
                [
                    next(
                        (
                            s
                            for w, k, s in self._scores(view, spec, c, rows[alone])
                            if (w, k) == (whose, WRITTEN)
                        ),
                        np.full(len(alone), np.nan),
                    )
                    for c in clients
                ]
            )
            if np.isnan(scores).any():
                continue
            guess = scores.argmax(axis=0)
            hits = int(np.count_nonzero(guess == holder))
            self._named[whose].add(int(view.round_id), hits, len(alone))
        self._by_lot += len(alone) / len(clients)

    # --- what came out --------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        found = []
        for whose, what in (
            (SERVER, READ),
            (SERVER, WRITTEN),
            (HELPER, READ),
            (HELPER, WRITTEN),
            (SERVER, PUBLIC),
        ):
            found.append(self._told_apart(whose, what))
        found.append(
            self._alone.finding(
                "sole writer: a row opens as one client's update",
                claimed=1.0,
                meaning="of the opened rows, those that one client of the sum has; its update of "
                "such a row is seen exactly. Nothing is promised against that but that it has no "
                "name to it",
            )
        )
        for whose, tally in self._named.items():
            found.append(
                _by(
                    whose,
                    tally.finding(
                        f"sole writer: the client is named, by the {_name(whose)}",
                        claimed=self._by_lot / tally.trials if tally.trials else 1.0,
                        meaning="of those rows, how often the client whose share is largest there "
                        "is the writer; one over the cohort by lot",
                    ),
                )
            )
        return found

    def _told_apart(self, whose: str, what: str) -> Finding:
        pairs = self._ahead.get((whose, what), [])
        learnt, tried = pairs[::2], pairs[1::2]
        direction = 1.0 if sum(sign for _, sign in learnt) >= 0 else -1.0
        tally = Tally()
        for round_id, sign in tried:
            tally.add(round_id, int(sign == direction), 1)
        by = "either server" if what == PUBLIC else f"the {_name(whose)}"
        return _by(
            whose,
            tally.finding(
                f"{what}: a real row told from another, by {by}",
                claimed=0.5,
                meaning="of pairs of a row that the client has and one that it has not, how often "
                "the real one is picked; half of them by a coin",
            ),
        )


def _name(whose: str) -> str:
    return "leader" if whose == SERVER else "helper"


def _by(whose: str, finding: Finding) -> Finding:
    return replace(finding, attacker=whose)


def _share(
    layout: Layout,
    public: dpf.PublicKeys,
    seed: bytes,
    subject: Subject,
    table: TableId,
    whose: str,
    rows: npt.NDArray[np.int64],
) -> Scores:
    """One server's share at the three places of every row: bits counted, or words as a size."""
    keys = dpf.ServerKeys.of(
        public, Secret(seed), party=PARTIES[whose], report_id=subject.table_id(table)
    )
    bins, places = layout.table.chosen[rows], layout.table.positions[rows]
    values = dpf.evaluate_points(keys, bins.reshape(-1), places.reshape(-1))
    each = values.reshape(len(rows), -1).astype(np.float64)
    return np.asarray(each.mean(axis=1))


def _public(layout: Layout, public: dpf.PublicKeys, rows: npt.NDArray[np.int64]) -> Scores:
    """The last corrections of the three bins of every row."""
    finals = public.finals[layout.forest.tree[layout.table.chosen[rows]]]
    return np.asarray(finals.reshape(len(rows), -1).astype(np.float64).mean(axis=1))


def _plain(
    params: PairParams, spec: PairTable, report: Report, rows: npt.NDArray[np.int64]
) -> Scores:
    """The leader's plain share of every row, where a table is written whole."""
    words = params.group.unpack(report.dense, params.dense_words)
    start = params.dense
    for other in params.written:
        if other.table == spec.table:
            break
        start += other.rows * other.words if other.writes_dense else 0
    part = words[start : start + spec.rows * spec.words]
    each = part.reshape(spec.rows, -1)[rows].astype(np.float64)
    return np.asarray(each.mean(axis=1))
