"""A client's part of a round: its submodel and examples in, the deltas of its rows out.

prepare -> PreparedJob  the succinct training set as positions among the rows it needs
Learner                 trains it: one client after the other (`local.py`), or many at once
                        (`vectorised/`), with or without noise in every step
finish  -> Trained      deltas and counts, aligned with the rows the client may train
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.examples import LABEL, Examples
from tessera.errors import MisuseError
from tessera.learning.bound_model import Batch, BoundModel
from tessera.learning.softmax import CANDIDATES
from tessera.learning.tables.submodel import (
    Floats,
    Ids,
    ModelUpdate,
    Submodel,
    TablePart,
    TableUpdate,
)
from tessera.learning.training.settings import LocalTraining

Loss: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(what the module gave, the batch) -> one loss per example."""


def click_loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The default: binary cross-entropy of logits (B,) against the 0/1 labels."""
    return F.binary_cross_entropy_with_logits(output, batch[LABEL], reduction="none")


def class_loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """For classes: cross-entropy of logits (B, classes) against the number of the right one."""
    return F.cross_entropy(output, batch[LABEL].long(), reduction="none")


@dataclass(frozen=True, slots=True)
class Trainable:
    """What clients train, and how: a module with its tables, a loss, and steps of descent."""

    module: nn.Module
    bound: BoundModel
    loss: Loss
    training: LocalTraining


@dataclass(frozen=True, slots=True)
class Job:
    """One client's part of a round: all its own examples, and its local rows by table name.

    `coins` are what the client draws from in this round: the order of its batches, dropout masks,
    noise. They follow from its own secrets, never from its number or a public seed: who can draw
    the same knows from a group's sums whose they are. `own` are the rows of a softmax's table that
    all its examples touch, where `examples` are those of one round: these are no wrong answers.
    """

    client: int
    submodel: Submodel
    examples: Examples
    local: Mapping[str, TablePart] = field(default_factory=dict)
    coins: Secret = field(kw_only=True, repr=False)
    own: Ids | None = field(default=None, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a client's training gave.

    `loss` is the mean over all examples (each before its own step, in every epoch), `examples` how
    many were left after the cut. Not `finite`: a loss or a parameter was NaN or infinite; the
    update is then zeros with weight 0, and the local rows are as they were. With noise,
    `not_finite` counts groups of examples that were left out alone, for a gradient that was not,
    and `most` is the most examples of one person in a batch, where noise goes by it. `failed` says
    why there is nothing but zeros, if training raised an error.
    """

    update: ModelUpdate
    local: Mapping[str, TablePart]
    loss: float
    examples: int
    finite: bool = True
    not_finite: int = 0
    most: int = 0
    failed: str = ""


class Learner(Protocol):
    """Trains jobs of one round; the same coins give the same order of examples."""

    name: str

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]: ...


@runtime_checkable
class HomeFitting(Protocol):
    """A learner whose clients' own rows follow from the model they were sent and their examples."""

    def fitted(self, jobs: Sequence[Job]) -> list[Mapping[str, TablePart]]:
        """Every client's local rows, fitted to the model of its job; nothing is sent."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job as arrays. Per table (fetched, derived and local): the rows its examples need.

    `rows` ids ascending; `values` (max(k, 1), d), so that a module may look up row 0 for a masked
    id even where no row is needed, and to be read only; `counts` (k,) the examples that involve
    each row; `places` where the rows sit among the trained ones, or among the client's local rows.
    `shared` are what a batch has of all its examples together: the weights of a softmax's
    candidates.
    """

    job: Job
    batch: Batch = field(repr=False)
    examples: int
    rows: Mapping[str, Ids] = field(repr=False)
    values: Mapping[str, Floats] = field(repr=False)
    counts: Mapping[str, npt.NDArray[np.int64]] = field(repr=False)
    places: Mapping[str, npt.NDArray[np.int64]] = field(repr=False)
    shared: Mapping[str, Floats] = field(default_factory=dict, repr=False)


def prepare(bound: BoundModel, job: Job) -> PreparedJob:
    """Cut the examples to what may be trained, and gather the rows that are then needed."""
    trained = job.submodel.trained
    examples, at = bound.cut_with_places(job.examples, trained)
    softmax = bound.candidates
    rows = bound.all_row_ids_of(examples, None if softmax is None else trained[softmax.root])
    # All rows at hand are candidates: positions among those that are trained stay what they are.
    at = {} if softmax is None else {f: at[f] for f in bound.fields_of(softmax.root)}
    batch = bound.positions(examples, rows, at)
    values, counts, places = {}, {}, {}
    for table in bound.tables:
        ids = rows[table.name]
        at_hand = job.local if table.local else job.submodel.tables
        if table.name not in at_hand or (not table.local and table.name not in trained):
            raise MisuseError(f"client {job.client}: table {table.name!r} is missing in its job")
        part = at_hand[table.name]
        source = part.ids if table.local else trained[table.name]
        if not (_holds(source, ids) and _holds(part.ids, ids)):
            raise MisuseError(
                f"client {job.client}, table {table.name!r}: an example needs a row that was not "
                "fetched, or that does not follow from the trained rows"
            )
        held = part.values if part.ids is ids else part.of(ids)  # all of them: no copy
        values[table.name] = (
            held.astype(np.float32, copy=False)
            if ids.size
            else np.zeros((1, table.width), np.float32)
        )
        counts[table.name] = bound.involved(batch, table.name, ids.size)
        same = source is ids or np.array_equal(source, ids)
        places[table.name] = np.arange(ids.size) if same else np.searchsorted(source, ids)
    shared = {}
    if softmax is not None:
        own = bound.row_ids_of(job.examples)[softmax.root] if job.own is None else job.own
        shared[CANDIDATES] = softmax.log_weights(softmax.rows, rows[softmax.root], own)
    return PreparedJob(job, batch, len(examples), rows, values, counts, places, shared)


def finish(
    bound: BoundModel,
    prepared: PreparedJob,
    dense: Floats,
    values: Mapping[str, Floats],
    losses: Floats,
) -> Trained:
    """The outcome of a client, from its dense part and rows after training and all its losses."""
    job, n = prepared.job, prepared.examples
    if n == 0:
        return nothing_of(bound, prepared, loss=float("nan"), finite=True)
    every = (dense, losses, *values.values())
    if not all(np.isfinite(array).all() for array in every):
        return nothing_of(bound, prepared, loss=float("nan"), finite=False)
    deltas, local = {}, {}
    for table in bound.tables:
        name, k = table.name, prepared.rows[table.name].size
        if table.local:
            part = job.local[name]
            own = part.values.copy()
            own[prepared.places[name]] = values[name][:k]
            local[name] = TablePart(part.ids, own)
            continue
        deltas[name] = values[name][:k] - prepared.values[name][:k]
    found = finish_deltas(prepared, dense - job.submodel.dense, deltas, losses)
    return replace(found, local={**job.local, **local})


def finish_deltas(
    prepared: PreparedJob, dense: Floats, deltas: Mapping[str, Floats], losses: Floats
) -> Trained:
    """The same by how much the dense part and the fetched rows changed, all of it finite."""
    job, n = prepared.job, prepared.examples
    updates = {}
    for name, delta in deltas.items():
        if len(delta) == job.submodel.trained[name].size:  # all of them, in order
            updates[name] = TableUpdate(delta, prepared.counts[name])
            continue
        update = _zeros(job.submodel.trained[name].size, delta.shape[1])
        update.values[prepared.places[name]] = delta
        update.counts[prepared.places[name]] = prepared.counts[name]
        updates[name] = update
    return Trained(
        ModelUpdate(dense, n, updates),
        job.local,
        loss=float(losses.mean(dtype=np.float64)),
        examples=n,
    )


def order(coins: Secret, epoch: int, n: int) -> npt.NDArray[np.int64]:
    """The order in which a client goes through its examples; every learner uses this one."""
    return CoinStream(Stream.of(coins, Label.EXAMPLE_ORDER, epoch)).permutation(n)


def drawn(examples: Examples, most: int, coins: Secret) -> Examples:
    """A client's examples of one round: `most` of all it has, drawn anew in each; 0: all."""
    if not 0 < most < len(examples):
        return examples
    shuffled = CoinStream(Stream.of(coins, Label.EXAMPLES_DRAWN)).permutation(len(examples))
    return examples.take(np.sort(shuffled[:most]))


def tensor(column: npt.NDArray[Any]) -> Tensor:
    """A column as a tensor, without a copy unless it is read-only, which torch does not know."""
    return torch.from_numpy(column if column.flags.writeable else column.copy())


def nothing_of(bound: BoundModel, prepared: PreparedJob, *, loss: float, finite: bool) -> Trained:
    """Zeros of weight 0: the sums stay as they are, and the server need not know why."""
    trained = prepared.job.submodel.trained
    return Trained(
        ModelUpdate(
            np.zeros_like(prepared.job.submodel.dense),
            0,
            {
                table.name: _zeros(trained[table.name].size, table.width)
                for table in bound.tables
                if not table.local
            },
        ),
        prepared.job.local,
        loss=loss,
        examples=prepared.examples,
        finite=finite,
    )


def _holds(ids: Ids, wanted: Ids) -> bool:
    """Whether all of `wanted` are among `ids`, both ascending."""
    if ids is wanted or wanted.size == 0 or np.array_equal(ids, wanted):
        return True
    at = np.searchsorted(ids, wanted)
    return bool(at[-1] < ids.size and (ids[at] == wanted).all())


def _zeros(rows: int, width: int) -> TableUpdate:
    return TableUpdate(np.zeros((rows, width), np.float32), np.zeros(rows, np.int64))
