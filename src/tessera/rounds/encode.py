"""Update to words of the ring, and sums of such words to means: pure functions.

Where noise is integers on the sum, the update is one clipped vector (`clipped_vector.py`).
Otherwise, by rows a delta weighs as many examples as involve its row (FedSubAvg), and in a whole
model everything weighs the size of the training set, unless it carries a count for each of its
rows. The last dense word is the weight, and the last column of a table its rows' counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Words
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import TableMean
from tessera.learning.compression import Quantizer, Residual, sent_of, signed
from tessera.learning.tables.arrays import Ids, distinct
from tessera.learning.tables.submodel import ModelUpdate
from tessera.plan import Plan, TablePlan
from tessera.plan.noisy_vector import NoisyVector
from tessera.protocols.secagg.phases import StageSum
from tessera.protocols.secagg.unmask import surviving
from tessera.rounds import schemes
from tessera.rounds.clipped_vector import Asked, SumBounds, add_noise, clipped_vector
from tessera.rounds.noise import noise_of
from tessera.wire.index_set import client_set

NOTHING: Final = "training gave nothing"
"""Why a client sends zeros whose caller gave it no update."""

FIRST: Final = RoundId(0)
MOST: Final = float(np.finfo(np.float32).max)
"""A value above this is as good as infinite: times its count it may be so."""


# --- update to words ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clipped:
    """How many values of an update were clipped; known to the client only."""

    cut: int = 0
    of: int = 0

    @classmethod
    def count(cls, values: npt.NDArray[np.float64], quantizer: Quantizer) -> Clipped:
        return cls(int(np.count_nonzero(np.abs(values) > quantizer.clip)), values.size)

    def __add__(self, other: Clipped) -> Clipped:
        return Clipped(self.cut + other.cut, self.of + other.of)


@dataclass(frozen=True, slots=True, eq=False)
class RowWords:
    """The trained rows of a table, ascending: of each, delta times count, and the count."""

    ids: Ids = field(repr=False)
    words: Words = field(repr=False)

    @property
    def written(self) -> Ids:
        """The rows that are not all zeros."""
        return self.ids[self.words.any(axis=1)]

    def at(self, ids: Ids) -> Words:
        """The words of these rows, ascending; zeros for those that were not trained."""
        words = np.zeros((len(ids), *self.words.shape[1:]), dtype=self.words.dtype)
        _, to, source = np.intersect1d(ids, self.ids, assume_unique=True, return_indices=True)
        words[to] = self.words[source]
        return words


@dataclass(frozen=True, slots=True, eq=False)
class UpdateWords:
    """An update in words. Without counts by row a whole model is all in `dense`.

    `written` are the rows with a delta, and is known to the client only, like `clipped`.
    """

    dense: Words = field(repr=False)
    tables: Mapping[str, RowWords]
    written: Mapping[str, Ids] = field(repr=False)
    clipped: Clipped


def flaw(plan: Plan, update: ModelUpdate | None, trained: Mapping[str, Ids]) -> str:
    """Why this update cannot be sent, in words for this client's owner; "" if it can be."""
    if update is None:
        return NOTHING
    if not update.weight >= 0:
        return "a weight that is not a number of examples"
    found = [_flaw("the dense part", update.dense, (plan.model.dense,))]
    for t in plan.tables:
        part = update.tables.get(t.name)
        if part is None or not len(trained[t.name]):
            continue
        rows, counts = trained[t.name], np.asarray(part.counts)
        found.append(_flaw(f"table {t.name!r}", part.values, (len(rows), t.width)))
        if counts.shape != rows.shape or not bool((counts >= 0).all()):
            found.append(f"table {t.name!r}: counts that are not numbers of examples")
    return next(filter(None, found), "")


def _flaw(what: str, values: npt.NDArray[Any], shape: tuple[int, ...]) -> str:
    values = np.asarray(values)
    if values.shape != shape:
        return f"{what}: {values.shape} values, where {shape} are due"
    # NaN compares as false.
    if values.dtype.kind not in "fiu" or not (np.abs(values.astype(np.float64)) <= MOST).all():
        return f"{what}: values that are not finite"
    return ""


def zeros(plan: Plan) -> ModelUpdate:
    """What is sent where training gave nothing: no delta, of weight 0."""
    return ModelUpdate(np.zeros(plan.model.dense), 0)


def union_words(plan: Plan, round_id: RoundId, ids: Ids, coins: Secret) -> Words:
    """What a client offers to the union, in the encoding of this round."""
    encoding = plan.union_encoding(round_id)
    words: Words = encoding.encode(ids, Stream.of(coins, Label.UNION_COINS))
    return words


def update_words(
    plan: Plan,
    update: ModelUpdate,
    trained: Mapping[str, Ids],
    coins: Secret,
    *,
    round_id: RoundId = FIRST,
    residual: Residual | None = None,
    noise: Stream | None = None,
) -> UpdateWords:
    """The update as words of the ring; `trained` are the rows of each table that it has deltas of.

    Rounding follows from `coins`, and a client's share of noise from `noise`. Where the plan
    selects, the dense part has zeros wherever nothing is sent, and the client's `residual` takes
    part in it, if it has one.
    """
    vector = noise_of(plan).vector
    if vector is not None:
        return clipped_words(plan, vector, update, trained, coins, noise)
    if schemes.of(plan).by_rows or plan.counts_rows:
        values = np.asarray(update.dense, dtype=np.float64)
    else:
        values = whole_vector(plan, update, trained)
    words, weight, clipped = dense_words(plan, update, values, coins)
    if plan.selects and update.weight:
        words = selected_words(plan, words, round_id, residual)
    dense = np.concatenate([words, weight])
    if not schemes.of(plan).by_rows and not plan.counts_rows:
        written = {
            name: trained[name][np.any(part.values, axis=1)] for name, part in update.tables.items()
        }
        return UpdateWords(dense, {}, written, clipped)
    tables = {}
    for t in plan.tables:
        rows = trained[t.name]
        tables[t.name], cut = row_words(plan, t, update, rows, coins)
        clipped += cut
    return UpdateWords(dense, tables, {n: part.written for n, part in tables.items()}, clipped)


def clipped_words(
    plan: Plan,
    vector: NoisyVector,
    update: ModelUpdate,
    trained: Mapping[str, Ids],
    coins: Secret,
    noise: Stream | None,
) -> UpdateWords:
    """One clipped vector. Where clients add noise it is on every word, and all is in `dense`."""
    ring = plan.ring
    if flaw(plan, update, trained):
        update = zeros(plan)
    widths = {t.name: t.width for t in plan.tables}
    found = clipped_vector(vector, update, trained, widths, plan.update.max_count, coins)
    tables = {name: RowWords(trained[name], ring.from_ints(found.tables[name])) for name in widths}
    written = {name: part.written for name, part in tables.items()}
    dense, cut = ring.from_ints(found.dense), Clipped(int(found.cut), 1)
    if plan.by_rows:
        return UpdateWords(dense, tables, written, cut)
    whole = whole_words(plan, dense, tables)
    if noise is not None:
        whole = add_noise(ring, vector.deviation, whole, noise)
    return UpdateWords(whole, {}, written, cut)


def dense_words(
    plan: Plan, update: ModelUpdate, values: npt.NDArray[np.float64], coins: Secret
) -> tuple[Words, Words, Clipped]:
    """The dense part, or the whole model where it has no counts; its weight; what was clipped."""
    quantizer, ring = plan.dense_quantizer, plan.ring
    examples = min(update.weight, plan.update.max_count)
    weighted = values * examples
    words = quantizer.encode(weighted, ring, Stream.of(coins, Label.ROUNDING, "dense"))
    weight = quantizer.encode_counts(np.array([examples]), ring)
    return words, weight, Clipped.count(weighted, quantizer)


def selected_words(plan: Plan, words: Words, round_id: RoundId, residual: Residual | None) -> Words:
    """A dense part, or a whole model that begins with it: zeros but for the largest changes.

    With a residual these are of all that is due, and what is not sent now stays due. A sum of what
    waited and what is new may be beyond the quantiser's range: then as much is sent as fits.
    """
    quantizer, ring, length = plan.dense_quantizer, plan.ring, plan.model.dense
    update = signed(words[:length], ring)
    due = update if residual is None else residual.due(int(round_id), update)
    sent = sent_of(np.clip(due, -quantizer.top, quantizer.top), plan.cuts)
    if residual is not None:
        residual.offered(int(round_id), due, sent)
    return np.concatenate([ring.from_ints(sent), words[length:]])


def row_words(
    plan: Plan, t: TablePlan, update: ModelUpdate, trained: Ids, coins: Secret
) -> tuple[RowWords, Clipped]:
    """The trained rows of a table; zeros where the update has none of them."""
    quantizer, ring = plan.quantizer, plan.ring
    words = ring.zeros((len(trained), t.width + 1))
    part = update.tables.get(t.name)
    if part is None or not len(trained):
        return RowWords(trained, words), Clipped()
    if part.values.shape != (len(trained), t.width) or len(part.counts) != len(trained):
        raise MisuseError(f"table {t.name!r}: the trainer changed the rows it was given")
    counts = np.minimum(part.counts, plan.update.max_count)
    weighted = np.asarray(part.values, dtype=np.float64) * counts[:, None]
    stream = Stream.of(coins, Label.ROUNDING, "table", t.name)
    words[:, :-1] = quantizer.encode(weighted, ring, stream)
    words[:, -1] = quantizer.encode_counts(counts, ring)
    return RowWords(trained, words), Clipped.count(weighted, quantizer)


def whole_vector(
    plan: Plan, update: ModelUpdate, trained: Mapping[str, Ids]
) -> npt.NDArray[np.float64]:
    """The whole model's delta, zeros where this client has none: dense, then each table."""
    parts = [np.asarray(update.dense, dtype=np.float64)]
    for t in plan.tables:
        rows = plan.sent_rows[t.name]
        whole = np.zeros((len(rows), t.width))
        if t.name in update.tables:
            whole[np.searchsorted(rows, trained[t.name])] = update.tables[t.name].values
        parts.append(whole.reshape(-1))
    return np.concatenate(parts)


def whole_words(plan: Plan, dense: Words, tables: Mapping[str, RowWords]) -> Words:
    """A whole model: dense, each table row by row, with counts where it has them, the weight."""
    parts = [dense[:-1]]
    for t in plan.tables:
        rows, width = plan.sent_rows[t.name], t.width + plan.counts_rows
        words = plan.ring.zeros((len(rows), width))
        at = np.searchsorted(rows, tables[t.name].ids)
        words[at] = tables[t.name].words[:, :width]
        parts.append(words.reshape(-1))
    return np.concatenate([*parts, dense[-1:]])


# --- sums to means --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round gives: per-row means, the dense mean, and counts of rows."""

    survivors: tuple[ClientId, ...]
    weight: int
    dense: npt.NDArray[np.float64] = field(repr=False)
    tables: Mapping[str, TableMean]
    union_rows: int
    union_residual: int
    rows_opened: int
    below_quorum: int
    shrunk: int
    lost: int
    rows_out_of_bounds: int = 0  # not merged, since honest clients could not have summed to them
    out_of_bounds: bool = False  # likewise the dense part, and with it the whole round


def means(
    plan: Plan, total: StageSum, *, union: Mapping[str, Ids], residual: int = 0
) -> RoundResult:
    """The means that follow from a round's last sum.

    Its rows are places in the `union`, where there is one. A table of which nobody has a row in
    this round may be missing from it.
    """
    ring = plan.ring
    noise, counted = noise_of(plan), client_set(total.survivors)
    bounds = noise.sum_bounds(len(total.survivors))
    given = int(signed(total.dense[-1:], ring)[0])
    weight = int(bounds.examples(np.array([given]))[0])
    summed = noise.decoded(plan.dense_quantizer, total.dense[:-1])
    # Whatever is averaged by the weight; a model that counts its rows has them in between.
    length = plan.model.dense if plan.counts_rows else len(summed)
    mean = summed[:length] / max(weight, 1)
    tables: dict[str, TableMean] = {}
    below = shrunk = lost = opened = outside = 0
    start = plan.model.dense
    for t in plan.tables:
        if schemes.of(plan).by_rows:
            part = total.tables.get(plan.table_id(t.name))
            if part is None:
                continue
            ids = union[t.name][part.rows] if union else part.rows
            asked = partial(surviving, part, counted) if part.members else None
            tables[t.name] = row_means(plan, ids, part.words, bounds, asked)
            below += part.below_quorum
            shrunk += part.shrunk
            lost += part.lost
        elif plan.counts_rows:
            ids = plan.sent_rows[t.name]
            stop = start + len(ids) * (t.width + 1)
            words, start = total.dense[start:stop].reshape(len(ids), t.width + 1), stop
            tables[t.name] = row_means(plan, ids, words, bounds)
        else:
            ids = plan.sent_rows[t.name]
            stop = start + len(ids) * t.width
            values, start = mean[start:stop].reshape(len(ids), t.width), stop
            tables[t.name] = TableMean(ids, values, np.full(len(ids), weight, dtype=np.int64))
        outside += len(ids) - len(tables[t.name].ids)
        opened += len(ids)
    return RoundResult(
        survivors=tuple(ClientId(int(c)) for c in total.survivors),
        weight=weight,
        dense=mean[: plan.model.dense],
        tables=tables,
        union_rows=sum(len(ids) for ids in union.values()),
        union_residual=residual,
        rows_opened=opened,
        below_quorum=below,
        shrunk=shrunk,
        lost=lost,
        rows_out_of_bounds=outside,
        out_of_bounds=not bounds.dense_within(signed(total.dense[:length], ring), given),
    )


def by_expected(plan: Plan, result: RoundResult) -> RoundResult:
    """The same sums divided by the number of clients that is expected, where theirs is a secret.

    Where counts are summed under noise, they are what sums are divided by.
    """
    weight = noise_of(plan).expected_clients
    if weight is None:
        return result
    tables = {
        name: TableMean(
            part.ids,
            part.mean * (np.maximum(part.counts, 1) / weight)[:, None],
            np.full(len(part.ids), weight, dtype=np.int64),
        )
        for name, part in result.tables.items()
    }
    dense = result.dense * (max(result.weight, 1) / weight)
    return replace(result, weight=weight, dense=dense, tables=tables)


def row_means(
    plan: Plan,
    ids: Ids,
    words: Words,
    bounds: SumBounds,
    asked: Asked | None = None,
) -> TableMean:
    """Sums of deltas by the sums of their counts. Rows that are out of bounds are left out.

    `asked` says how many clients of the sum asked for each row, where they did.
    """
    ring = plan.ring
    counts = signed(words[:, -1], ring)
    within = bounds.rows_within(signed(words[:, :-1], ring), counts)
    examples = bounds.examples(counts, asked)[within]
    values = noise_of(plan).decoded(plan.quantizer, words[within, :-1])
    return TableMean(ids[within], values / np.maximum(examples, 1)[:, None], examples)


def merged(results: Sequence[RoundResult]) -> RoundResult:
    """One outcome of parts of a cohort that were summed apart, everything by its weight."""
    if len(results) == 1:
        return results[0]
    weight = sum(r.weight for r in results)
    tables: dict[str, TableMean] = {}
    for name in results[0].tables:
        parts = [r.tables[name] for r in results]
        ids = distinct(np.concatenate([part.ids for part in parts]))
        counts = np.zeros(len(ids), dtype=np.int64)
        total = np.zeros((len(ids), parts[0].mean.shape[1]))
        for part in parts:
            at = np.searchsorted(ids, part.ids)
            counts[at] += part.counts
            total[at] += part.mean * part.counts[:, None]
        tables[name] = TableMean(ids, total / np.maximum(counts, 1)[:, None], counts)
    return RoundResult(
        survivors=tuple(sorted(c for r in results for c in r.survivors)),
        weight=weight,
        dense=np.sum([r.dense * r.weight for r in results], axis=0) / max(weight, 1),
        tables=tables,
        union_rows=max(r.union_rows for r in results),
        union_residual=sum(r.union_residual for r in results),
        rows_opened=sum(r.rows_opened for r in results),
        below_quorum=sum(r.below_quorum for r in results),
        shrunk=sum(r.shrunk for r in results),
        lost=sum(r.lost for r in results),
        rows_out_of_bounds=sum(r.rows_out_of_bounds for r in results),
        out_of_bounds=any(r.out_of_bounds for r in results),
    )
