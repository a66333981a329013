"""Transcript: what many rounds show about each row, collected for attacks over all of them.

A *meeting* is one secure sum: a round's cohort, or one of its fixed groups. Of each meeting we keep
who was in the union, who answered what, who survived to the update, which rows were in the union,
which had a positive count and which moved. Rows that nobody holds are left out: attacks that need
them (decoys) look at them round by round. If clients hold more than `MOST_ROWS` rows, a sample of
them is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.round_view import RoundView, Truth
from tessera.audit.two_server_view import TwoServerView
from tessera.ids import ClientId
from tessera.learning.compression import signed
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.rounds import schemes
from tessera.rounds.messages import whole_tables

Bits = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.int64]
Clients = tuple[ClientId, ...]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

MOST_ROWS: Final = 4000
"""Rows that are attacked; of more, as many drawn by chance."""
STEPS: Final = 2.0
"""Quantisation may move a value so many steps off its client's direction."""
WIDEST: Final = 0.02
"""Rows whose direction is known less exactly than this angle link to nothing."""
TRUST: Final = 0.95
"""How likely linked rows are taken to have one holder."""
TINY: Final = 1e-12
"""Posteriors below this are proofs of the contrary."""


@dataclass(frozen=True, slots=True)
class ByClient:
    """A bit for each of some clients and each row kept, packed."""

    clients: Clients
    packed: npt.NDArray[np.uint8] = field(repr=False)
    rows: int

    @classmethod
    def of(cls, clients: Clients, bits: Bits) -> ByClient:
        return cls(clients, np.packbits(bits, axis=1), bits.shape[1])

    @classmethod
    def everything(cls, clients: Clients, rows: int) -> ByClient:
        return cls.of(clients, np.ones((len(clients), rows), dtype=np.bool_))

    @property
    def bits(self) -> Bits:
        """(clients, rows)."""
        return np.unpackbits(self.packed, axis=1, count=self.rows).astype(np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One secure sum, as far as it came, about the rows that are kept."""

    round_id: int
    period: int
    met: Clients  # all that were told each other's names
    present: Clients  # whose rows are in the union
    in_union: Bits | None = field(repr=False)  # None where there is no union
    answers: ByClient = field(repr=False)  # who named which row
    active: ByClient = field(repr=False)  # who is in which row's sum
    counted: Bits = field(repr=False)  # rows whose count (or delta) was opened
    positive: Bits = field(repr=False)
    moved: Bits = field(repr=False)
    links: Labels = field(repr=False)  # rows with one label moved in one direction; 0: no other did
    counts: npt.NDArray[np.int64] = field(repr=False)

    @property
    def fetched(self) -> Bits:
        """Rows that a client which names everything downloads."""
        return np.ones_like(self.counted) if self.in_union is None else self.in_union


@dataclass(slots=True)
class _OpenedRows:
    """What one sum shows of the rows that are kept; nothing of those that it does not have."""

    counted: Bits
    moved: Bits
    links: Labels
    counts: Labels

    @classmethod
    def of(cls, size: int) -> _OpenedRows:
        bits, labels = (np.zeros((2, size), dtype=kind) for kind in (np.bool_, np.int64))
        return cls(*bits, *labels)

    @property
    def positive(self) -> Bits:
        return self.counts > 0

    def add(self, values: Labels, at: Indices, counts: Labels) -> None:
        """The values of one table's rows, at these places, and their counts."""
        self.moved[at] = values.any(axis=1)
        self.links[at] = linked(values, after=int(self.links.max(initial=0)))
        self.counts[at] = counts


@dataclass(slots=True)
class Transcript:
    """Takes rounds in order. The truth says which rows are held, and is for scoring otherwise.

    `only` are the rows to keep, if somebody has chosen them.
    """

    plan: Plan
    truth: Truth = field(repr=False)
    only: Ids | None = field(default=None, repr=False)
    rows: Ids = field(init=False, repr=False)
    meetings: list[Meeting] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        none = np.zeros(0, dtype=np.uint64)
        if self.only is not None:
            self.rows = np.unique(self.only)
            return
        held = np.unique(np.concatenate([none, *self.truth.values()]))
        if len(held) > MOST_ROWS:
            rng = np.random.default_rng([self.plan.seed, 13])
            held = np.sort(rng.choice(held, MOST_ROWS, replace=False))
        self.rows = held

    def take(self, view: RoundView | TwoServerView) -> None:
        if isinstance(view, TwoServerView):
            self._take_shared(view)
        elif view.sums:
            self._take_masked(view)

    def _take_masked(self, view: RoundView) -> None:
        by_rows = schemes.of(self.plan).by_rows
        sums = self._by_rows(view) if by_rows else self._whole(view)
        answered = tuple(sorted(view.revealed)) if by_rows else view.survivors
        self.meetings.append(
            Meeting(
                round_id=int(view.round_id),
                period=view.period,
                met=view.met,
                present=view.in_union,
                in_union=self._among(view.union) if view.in_union else None,
                answers=self._said(answered, view.revealed)
                if by_rows
                else ByClient.everything(answered, len(self.rows)),
                **sums,
            )
        )

    def _take_shared(self, view: TwoServerView) -> None:
        """What the servers opened to each other: the written rows and who is in their sum."""
        if view.opened is None or not view.included:
            return
        plan, size, opened = self.plan, len(self.rows), _OpenedRows.of(len(self.rows))
        parts = {p.table: p for p in view.opened.tables}
        for spec, start in view.roots:
            rows = view.plan.tables[spec.table].rows
            domain = np.arange(rows, dtype=np.uint64) if spec.ids is None else spec.ids
            opened.counted |= self._among(domain + np.uint64(start))
            if (part := parts.get(spec.table)) is None:
                continue
            written = domain[part.rows.astype(np.int64)] + np.uint64(start)
            here = np.isin(written, self.rows)
            at = np.searchsorted(self.rows, written[here])
            words = plan.ring.unpack(part.words, len(written) * spec.words)
            values = signed(words.reshape(len(written), spec.words)[here], plan.ring)
            opened.add(values[:, : plan.tables[spec.table].width], at, values[:, -1])
        clients = view.included
        self.meetings.append(
            Meeting(
                round_id=int(view.round_id),
                period=0,
                met=clients,
                present=(),
                in_union=None,
                answers=ByClient.everything(clients, size),
                active=ByClient.everything(clients, size),
                counted=opened.counted,
                positive=opened.positive,
                moved=opened.moved,
                links=np.where(opened.positive, opened.links, 0),
                counts=opened.counts,
            )
        )

    # --- sums -----------------------------------------------------------------------------------

    def _by_rows(self, view: RoundView) -> dict[str, Any]:
        plan, opened = self.plan, _OpenedRows.of(len(self.rows))
        if view.finished:
            opened.counted = self._among(view.opened)
            here, start = np.isin(view.opened, self.rows), 0
            for t in plan.roots:
                part = view.sums[-1].tables[plan.table_id(t.name)]
                these = slice(start, start + len(part.rows))
                inside, start = here[these], these.stop
                columns = np.searchsorted(self.rows, view.opened[these][inside])
                values = signed(part.words[inside, :-1], plan.ring)
                opened.add(values, columns, view.counts[these][inside])
        return {
            "active": self._said(view.survivors, view.members),
            "counted": opened.counted,
            "positive": opened.positive,
            "moved": opened.moved & opened.positive,
            "links": np.where(opened.positive, opened.links, 0),
            "counts": opened.counts,
        }

    def _whole(self, view: RoundView) -> dict[str, Any]:
        """A sum of whole models: every survivor may have written every row."""
        plan, size, opened = self.plan, len(self.rows), _OpenedRows.of(len(self.rows))
        for t, sent, words in whole_tables(plan, view.sums[-1].dense):
            if t.derived_from:
                continue
            whole = np.zeros((t.rows, words.shape[1]), dtype=np.int64)
            whole[sent] = signed(words, plan.ring)
            first = plan.offsets[t.name]
            here = np.flatnonzero((self.rows >= first) & (self.rows < first + t.rows))
            part = whole[(self.rows[here] - np.uint64(first)).astype(np.int64)]
            values = part[:, : t.width]
            counts: Labels = np.asarray(values.any(axis=1), dtype=np.int64)
            opened.add(values, here, part[:, -1] if part.shape[1] > t.width else counts)
        return {
            "active": ByClient.everything(view.survivors, size),
            "counted": np.ones(size, dtype=np.bool_),
            "positive": opened.positive,
            "moved": opened.moved,
            "links": opened.links,
            "counts": opened.counts,
        }

    def _among(self, rows: Ids) -> Bits:
        return np.isin(self.rows, rows)

    def _said(self, clients: Iterable[ClientId], rows: Mapping[ClientId, Ids]) -> ByClient:
        who, none = tuple(clients), np.zeros(0, dtype=np.uint64)
        bits = np.array([self._among(rows.get(c, none)) for c in who], dtype=np.bool_)
        return ByClient.of(who, bits.reshape(len(who), len(self.rows)))


# --- linked rows ----------------------------------------------------------------------------------
#
# The deltas of one client's rows often point in one direction (a factor model's are all multiples
# of the user's factors; an average over a history gives every row of it the same gradient), and
# those of different clients do not. A row with one holder in its sum shows that holder's delta, so
# collinear rows have one holder, and it is in the group of each of them.


def linked(values: npt.NDArray[np.int64], *, after: int = 0) -> Labels:
    """A label for each row of an opened sum (rows, width), above `after`; 0 without another row."""
    labels = np.zeros(len(values), dtype=np.int64)
    size = np.linalg.norm(values.astype(np.float64), axis=1)
    if values.ndim != 2 or values.shape[1] < 2:
        return labels  # one number has no direction
    blur = STEPS * np.sqrt(values.shape[1]) / np.maximum(size, 1e-9)
    open_rows = np.flatnonzero(blur < WIDEST)
    unit = values[open_rows] / size[open_rows, None]
    blur = blur[open_rows]
    free = np.ones(len(open_rows), dtype=np.bool_)
    for at in range(len(open_rows)):
        if not free[at]:
            continue
        sine = np.sqrt(np.clip(1.0 - np.square(unit @ unit[at]), 0.0, None))
        near = free & (sine <= blur + blur[at])
        free &= ~near
        if near.sum() > 1:
            after += 1
            labels[open_rows[near]] = after
    return labels


def common_holders(
    holds: Floats, clusters: Iterable[tuple[Indices, Indices]], *, trust: float = TRUST
) -> Floats:
    """P(client holds row) once more, where linked rows have one holder.

    `clusters` are (rows, clients in the sums of all of them). Each row's odds are evidence about
    the common holder, and multiply. A cluster that no client explains is not one. Of several
    clusters with a row the largest counts.
    """
    found, free = holds.copy(), np.ones(len(holds), dtype=np.bool_)
    clipped = np.clip(holds, TINY, 1.0 - TINY)
    odds = np.log(clipped) - np.log1p(-clipped)
    for rows, clients in sorted(clusters, key=lambda each: -len(each[0])):
        if not free[rows].any() or not clients.size:
            continue
        if not (holds[np.ix_(rows, clients)] > TINY).all(axis=0).any():
            continue
        joint = odds[np.ix_(rows, clients)].sum(axis=0)
        weight = np.exp(joint - joint.max())
        fresh = rows[free[rows]]
        found[fresh] *= 1.0 - trust
        found[np.ix_(fresh, clients)] += trust * weight / weight.sum()
        free[rows] = False
    return found
