"""Update to words of the ring, and sums of such words to means: pure functions.

Where noise is integers on the sum, the update is one clipped vector (`clipped_vector.py`).
Otherwise, by rows a delta weighs as many examples as involve its row (FedSubAvg), and in a whole
model everything weighs the size of the training set, unless it carries a count for each of its
rows. The last dense word is the weight, and the last column of a table its rows' counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Group, Words
from tessera.crypto.noise import add_noise
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import ClientId, RoundId, StageId, TableId
from tessera.learning.averaging import TableMean
from tessera.learning.compression import Quantizer, Residual, sent_of, signed
from tessera.learning.tables.submodel import Ids, ModelUpdate
from tessera.plan import Plan, TablePlan
from tessera.plan.noisy_vector import NoisyVector
from tessera.protocols.secagg.params import StageSpec
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.protocols.secagg.unmask import surviving
from tessera.rounds.clipped_vector import Asked, SumBounds, clipped_vector
from tessera.rounds.messages import RoundResult, RowWords, whole_words
from tessera.rounds.noise import noise_of
from tessera.wire.index_set import client_array, client_set

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
    layout = layout_of(plan)
    values = layout.dense_values(plan, update, trained)
    words, weight, clipped = dense_words(plan, update, values, coins)
    if plan.selects and update.weight:
        words = selected_words(plan, words, round_id, residual)
    dense = np.concatenate([words, weight])
    return layout.with_rows(plan, update, trained, coins, dense, clipped)


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
    if layout_of(plan).by_rows:
        return UpdateWords(dense, tables, written, cut)
    whole = whole_words(plan, dense, tables)
    if noise is not None:
        whole = add_noise(ring, vector.deviation, whole, noise)
    return UpdateWords(whole, {}, written, cut)


# --- where rows lie -------------------------------------------------------------------------------


class WholeLayout:
    """A whole model, or a list of rows, in which everything weighs the client's examples."""

    by_rows: bool = False

    def dense_values(
        self, plan: Plan, update: ModelUpdate, trained: Mapping[str, Ids]
    ) -> npt.NDArray[np.float64]:
        """What is summed as one vector."""
        return whole_vector(plan, update, trained)

    def with_rows(
        self,
        plan: Plan,
        update: ModelUpdate,
        trained: Mapping[str, Ids],
        coins: Secret,
        dense: Words,
        clipped: Clipped,
    ) -> UpdateWords:
        """The update, beside its `dense` words."""
        written = {
            name: trained[name][np.any(part.values, axis=1)] for name, part in update.tables.items()
        }
        return UpdateWords(dense, {}, written, clipped)

    def averaged(self, plan: Plan, words: int) -> int:
        """How many of the opened vector's words are averaged by the weight."""
        return words

    def opened(
        self, plan: Plan, total: StageSum, mean: npt.NDArray[np.float64], weight: int, sums: Sums
    ) -> Iterator[tuple[TablePlan, Ids, TableMean]]:
        """Of every table its opened rows, and the means of those that are within bounds."""
        start = plan.model.dense
        for t in plan.tables:
            ids = plan.sent_rows[t.name]
            stop = start + len(ids) * t.width
            values, start = mean[start:stop].reshape(len(ids), t.width), stop
            yield t, ids, TableMean(ids, values, np.full(len(ids), weight, dtype=np.int64))


class RowLayout(WholeLayout):
    """Rows apart from the dense part, each with its count, summed with those who share them."""

    by_rows = True

    def dense_values(
        self, plan: Plan, update: ModelUpdate, trained: Mapping[str, Ids]
    ) -> npt.NDArray[np.float64]:
        return np.asarray(update.dense, dtype=np.float64)

    def with_rows(
        self,
        plan: Plan,
        update: ModelUpdate,
        trained: Mapping[str, Ids],
        coins: Secret,
        dense: Words,
        clipped: Clipped,
    ) -> UpdateWords:
        tables = {}
        for t in plan.tables:
            tables[t.name], cut = row_words(plan, t, update, trained[t.name], coins)
            clipped += cut
        return UpdateWords(dense, tables, {n: part.written for n, part in tables.items()}, clipped)

    def opened(
        self, plan: Plan, total: StageSum, mean: npt.NDArray[np.float64], weight: int, sums: Sums
    ) -> Iterator[tuple[TablePlan, Ids, TableMean]]:
        for t in plan.tables:
            part = total.tables.get(plan.table_id(t.name))
            if part is None:
                continue
            ids = sums.union[t.name][part.rows] if sums.union else part.rows
            counted = client_set(total.survivors)
            asked = partial(surviving, part, counted) if part.members else None
            yield t, ids, row_means(plan, ids, part.words, sums.bounds, asked)


class CountedLayout(RowLayout):
    """A whole model, or a list of rows, that has a count for each of its rows."""

    by_rows = False

    def averaged(self, plan: Plan, words: int) -> int:
        return plan.model.dense

    def opened(
        self, plan: Plan, total: StageSum, mean: npt.NDArray[np.float64], weight: int, sums: Sums
    ) -> Iterator[tuple[TablePlan, Ids, TableMean]]:
        start = plan.model.dense
        for t in plan.tables:
            ids = plan.sent_rows[t.name]
            stop = start + len(ids) * (t.width + 1)
            words, start = total.dense[start:stop].reshape(len(ids), t.width + 1), stop
            yield t, ids, row_means(plan, ids, words, sums.bounds)


def layout_of(plan: Plan) -> WholeLayout:
    """How a plan's updates lie in words."""
    if plan.by_rows:
        return RowLayout()
    return CountedLayout() if plan.counts_rows else WholeLayout()


@dataclass(frozen=True, slots=True)
class Sums:
    """What sums are read with: the union whose places rows are, and what honest clients can
    have summed to."""

    union: Mapping[str, Ids] = field(repr=False)
    bounds: SumBounds


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


# --- sums to means --------------------------------------------------------------------------------


def means(
    plan: Plan, total: StageSum, *, union: Mapping[str, Ids], residual: int = 0
) -> RoundResult:
    """The means that follow from a round's last sum.

    Its rows are places in the `union`, where there is one. A table of which nobody has a row in
    this round may be missing from it.
    """
    ring = plan.ring
    noise = noise_of(plan)
    bounds = noise.sum_bounds(len(total.survivors))
    given = int(signed(total.dense[-1:], ring)[0])
    weight = int(bounds.examples(np.array([given]))[0])
    layout = layout_of(plan)
    summed = noise.decoded(plan.dense_quantizer, total.dense[:-1])
    # Whatever is averaged by the weight; a model that counts its rows has them in between.
    length = layout.averaged(plan, len(summed))
    mean = summed[:length] / max(weight, 1)
    tables: dict[str, TableMean] = {}
    opened = outside = 0
    for t, ids, found in layout.opened(plan, total, mean, weight, Sums(union, bounds)):
        tables[t.name] = found
        outside += len(ids) - len(found.ids)
        opened += len(ids)
    return RoundResult(
        survivors=tuple(ClientId(int(c)) for c in total.survivors),
        weight=weight,
        dense=mean[: plan.model.dense],
        tables=tables,
        union_rows=sum(len(ids) for ids in union.values()),
        union_residual=residual,
        rows_opened=opened,
        below_quorum=sum(part.below_quorum for part in total.tables.values()),
        shrunk=sum(part.shrunk for part in total.tables.values()),
        lost=sum(part.lost for part in total.tables.values()),
        rows_out_of_bounds=outside,
        out_of_bounds=not bounds.dense_within(signed(total.dense[:length], ring), given),
    )


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


# --- vectors of an epoch --------------------------------------------------------------------------
#
# A member's update laid out over the group's union, and back again. All members of a group train
# from the same rows, the whole union, so that an update is one vector of the same length from
# everybody: the dense part and its weight, then every table row by row, each with its count. A
# whole model, where there is no union, is laid out as in any other sum.


@dataclass(frozen=True, slots=True)
class UpdateLayout:
    """Where the words of an update lie. `union` has the rows by table, derived tables included."""

    plan: Plan
    union: Mapping[str, Ids] = field(repr=False)

    @property
    def ring(self) -> Group:
        return self.plan.ring

    @property
    def stage(self) -> StageSpec:
        """The sum of updates, as the plan has it."""
        return self.plan.stages[-1]

    @property
    def _tables(self) -> list[tuple[TableId, str, int]]:
        """Of which rows are laid out, each with the words of a row; none of a whole model."""
        return [(t.table, self.plan.tables[t.table].name, t.width) for t in self.stage.tables]

    @property
    def length(self) -> int:
        """Words of a vector."""
        rows = sum(len(self.union[name]) * width for _, name, width in self._tables)
        return self.stage.dense + rows

    def flat(self, update: UpdateWords) -> Words:
        """One vector."""
        parts = [update.tables[name].at(self.union[name]) for _, name, _ in self._tables]
        if not parts:
            return self._whole(update)
        return np.concatenate([update.dense, *(part.reshape(-1) for part in parts)])

    def _whole(self, update: UpdateWords) -> Words:
        rows: Mapping[str, RowWords] = update.tables
        return whole_words(self.plan, update.dense, rows) if rows else update.dense

    def summed(self, total: Words, members: Sequence[ClientId]) -> StageSum:
        """The sum of all members' vectors, by tables; rows are places in the union."""
        plan, survivors = self.plan, client_array(members)
        stage = StageId(len(plan.stages) - 1)
        start, tables = self.stage.dense, {}
        for table, name, width in self._tables:
            count = len(self.union[name])
            stop = start + count * width
            tables[table] = TableSum(
                rows=np.arange(count, dtype=np.uint64),
                words=total[start:stop].reshape(count, width),
                members={},
                below_quorum=0,
            )
            start = stop
        dense = total[: self.stage.dense]
        return StageSum(stage=stage, survivors=survivors, dense=dense, tables=tables)
