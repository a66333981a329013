"""What the server sees of a round of federated factors: plain uploads, and opened sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.audit.ratings.gradient import Floats, Upload
from tessera.audit.record import unmasked_clients
from tessera.audit.round_view import RoundView
from tessera.ids import ClientId, RoundId
from tessera.learning.compression import signed
from tessera.learning.rating_models import ITEMS
from tessera.learning.tables.submodel import Ids
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan
from tessera.protocols.machine import RoundOutcome, RoundOver
from tessera.protocols.plain import PlainInput, PlainRows
from tessera.rounds import schemes
from tessera.rounds.messages import Download, whole_tables
from tessera.simulation.views import ViewEntry

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SumRows:
    """Rows of one opened sum: the values sent, the mean delta, and the number of ratings.

    `quantum` is the distance of two neighbouring levels of what clients send.
    """

    round_id: int
    items: Ids = field(repr=False)
    rows: Floats = field(repr=False)  # (n, k + 1)
    means: Floats = field(repr=False)
    counts: npt.NDArray[np.int64] = field(repr=False)
    quantum: float

    def noise(self, training: LocalTraining) -> float:
        """How far rounding may put one coordinate of one rating's e p, as a standard deviation."""
        return 0.5 * self.quantum / (training.rate_in(self.round_id) * training.table_rate)


@dataclass(frozen=True, slots=True)
class RatingRound:
    """One round: the uploads in the clear, and the sum of the other clients.

    A client whose update did not count has put its own rows back, and the server knows whose did:
    `uploads` are of those, and `silent` are the others that counted, of which there is no upload.
    `groups` has for each survivor of the secure sum the row ids that it may have written; None if
    the sum is over whole models, where every client may have written every row.
    """

    round_id: RoundId
    uploads: Mapping[ClientId, Upload] = field(repr=False)
    silent: frozenset[ClientId]
    total: SumRows | None = field(repr=False)
    survivors: tuple[ClientId, ...]
    groups: Mapping[ClientId, Ids] | None = field(repr=False)


def rating_round(
    plan: Plan, round_id: RoundId, seen: list[tuple[ViewEntry, Any]], view: RoundView | None
) -> RatingRound:
    """The round from what the server saw, and from its secure sum if there was one."""
    bare = unmasked_clients(plan, seen)
    apart = schemes.of(plan).sum.clear_part(plan, len(bare)) if bare else plan
    sent = {ClientId(int(e.other)): m for e, m in seen if isinstance(m, Download)}
    if view is not None:
        sent |= view.downloads
    named = {m.sender: m for _, m in seen if isinstance(m, PlainRows)}
    counted = {
        ClientId(int(e.other))
        for e, m in seen
        if isinstance(m, RoundOver) and m.outcome is RoundOutcome.DONE
    }
    uploads = {}
    for _, m in seen:
        if isinstance(m, PlainInput) and m.sender in bare and m.sender in sent:
            found = _upload(apart, round_id, named.get(m.sender), sent[m.sender], m)
            if found is not None and m.sender in counted:
                uploads[m.sender] = found
    return RatingRound(
        round_id=round_id,
        uploads=uploads,
        silent=frozenset((sent.keys() & counted) - uploads.keys()),
        total=_total(view, sent) if view is not None and view.finished else None,
        survivors=view.survivors if view is not None else (),
        groups=view.members if view is not None and schemes.of(plan).by_rows else None,
    )


def _upload(
    plan: Plan, round_id: RoundId, named: PlainRows | None, sent: Download, given: PlainInput
) -> Upload | None:
    """One client's plain words, as deltas of the rows that it was sent."""
    table, width = plan.table_id(ITEMS), plan.table(ITEMS).width
    if given.tables:
        if named is None:
            return None
        ids = next(t.rows for t in named.tables if t.table == table)
        words = plan.ring.unpack(given.tables[table], len(ids) * (width + 1))
        deltas, counts = _counted(plan, words)
    else:
        ids = plan.sent_rows[ITEMS]
        words = plan.ring.unpack(given.dense, plan.stages[0].dense)
        if plan.counts_rows:
            deltas, counts = _counted(plan, _of_items(plan, words))
        else:
            # Weighed by the training set's size. Who moved a row has rated its item.
            weight = max(1, int(signed(words[-1:], plan.ring)[0]))
            deltas = plan.dense_quantizer.decode(_of_items(plan, words), plan.ring) / weight
            counts = np.asarray(deltas.any(axis=1), np.int64)
    kept = counts > 0
    if not kept.any():
        return None
    weights = counts[kept].astype(np.float64)
    rows = _floats(plan, sent, len(ids), width)[kept]
    return Upload(int(round_id), ids[kept], rows, deltas[kept] / weights[:, None], weights)


def _counted(plan: Plan, words: Words) -> tuple[Floats, npt.NDArray[np.int64]]:
    """(deltas, counts) of the items' rows, whose counts stand in the last column."""
    rows = words.reshape(-1, plan.table(ITEMS).width + 1)
    return plan.quantizer.decode(rows[:, :-1], plan.ring), signed(rows[:, -1], plan.ring)


def _total(view: RoundView, sent: Mapping[ClientId, Download]) -> SumRows | None:
    """The items' rows of an opened sum, with a rating at least in each; None without counts."""
    plan, final = view.plan, view.sums[-1]
    if final.tables:
        words = final.tables[plan.table_id(ITEMS)].words
        ids, values = _sent_rows(view, sent)
        items, rows = view.opened, values[np.searchsorted(ids, view.opened)]
    elif plan.counts_rows and sent:
        items = plan.sent_rows[ITEMS]
        words = _of_items(plan, final.dense)
        rows = _floats(plan, next(iter(sent.values())), len(items), plan.table(ITEMS).width)
    else:
        return None
    deltas, counts = _counted(plan, words)
    kept = counts > 0
    return SumRows(
        round_id=int(view.round_id),
        items=items[kept],
        rows=rows[kept],
        means=deltas[kept] / counts[kept, None],
        counts=counts[kept],
        quantum=plan.quantizer.clip / plan.quantizer.top,
    )


def _sent_rows(view: RoundView, sent: Mapping[ClientId, Download]) -> tuple[Ids, Floats]:
    """Every item's row that went out in this round, ids ascending, by what each client asked for.

    The items are the only table whose rows are chosen: the ids of the union are theirs.
    """
    plan, width = view.plan, view.plan.table(ITEMS).width
    ids, rows = [np.zeros(0, np.uint64)], [np.zeros((0, width))]
    for client, message in sent.items():
        if client in view.revealed:
            ids.append(view.revealed[client])
            rows.append(_floats(plan, message, len(view.revealed[client]), width))
    every, first = np.unique(np.concatenate(ids), return_index=True)
    return every, np.concatenate(rows)[first]


def _floats(plan: Plan, sent: Download, rows: int, width: int) -> Floats:
    data = sent.tables[plan.table_id(ITEMS)]
    values = np.frombuffer(data, dtype=plan.model.precision.dtype)
    return values.reshape(rows, width).astype(np.float64)


def _of_items(plan: Plan, words: Words) -> Words:
    """The items' rows in a whole model's words."""
    return next(part for t, _, part in whole_tables(plan, words) if t.name == ITEMS)
