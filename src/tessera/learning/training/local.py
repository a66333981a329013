"""Local training: a client's submodel and examples in, the deltas of its rows out.

    prepare -> PreparedJob the succinct training set as positions among the rows it needs
    Sequential             the reference trainer, one client after the other, for any module
    finish  -> Trained     deltas and counts, aligned with the rows the client may train

`vectorised/` trains many clients at once by the same interface and shares everything but the loop.

A step: the mean loss over the batch's examples; its gradient for the dense part and for all rows,
local ones too; scaled down together if its norm is over `clip`; then `weight_decay` times the value
is added where the batch touches (the dense part, and the rows its ids name); then the rate of the
round, for rows times `table_rate` (all of `LocalTraining`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tessera.crypto.coins import CoinStream
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.examples import LABEL, Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import Batch, BoundModel, BoundTable
from tessera.learning.softmax import CANDIDATES, log_weights
from tessera.learning.tables.arrays import Floats, Ids
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart, TableUpdate
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
class Job:
    """One client's part of a round: all its own examples, and its local rows by table name.

    `coins` are what the client draws from in this round: the order of its batches, dropout masks,
    noise. They follow from its own secrets, never from its number or a public seed: who can draw
    the same knows from a group's sums whose they are.
    """

    client: int
    submodel: Submodel
    examples: Examples
    local: Mapping[str, TablePart] = field(default_factory=dict)
    coins: Secret = field(kw_only=True, repr=False)


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
    id even where no row is needed; `counts` (k,) the examples that involve each row; `places` where
    the rows sit among the trained ones, or among the client's local rows. `shared` are what a batch
    has of all its examples together: the weights of a softmax's candidates.
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
    examples = bound.cut(job.examples, trained)
    softmax = bound.candidates
    rows = bound.all_row_ids_of(examples, None if softmax is None else trained[softmax.root])
    batch = bound.positions(examples, rows)
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
        values[table.name] = (
            part.of(ids).astype(np.float32, copy=False)
            if ids.size
            else np.zeros((1, table.width), np.float32)
        )
        counts[table.name] = bound.involved(batch, table.name, ids.size)
        places[table.name] = np.searchsorted(source, ids)
    shared = {}
    if softmax is not None:
        own = bound.row_ids_of(job.examples)[softmax.root]
        shared[CANDIDATES] = log_weights(softmax.rows, rows[softmax.root], own)
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
    updates, local = {}, {}
    for table in bound.tables:
        name, k = table.name, prepared.rows[table.name].size
        if table.local:
            part = job.local[name]
            own = part.values.copy()
            own[prepared.places[name]] = values[name][:k]
            local[name] = TablePart(part.ids, own)
            continue
        update = _zeros(job.submodel.trained[name].size, table.width)
        update.values[prepared.places[name]] = values[name][:k] - prepared.values[name][:k]
        update.counts[prepared.places[name]] = prepared.counts[name]
        updates[name] = update
    return Trained(
        ModelUpdate(dense - job.submodel.dense, n, updates),
        {**job.local, **local},
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


class Sequential:
    """One client after the other, with the module as it is: slow, and what others are held to."""

    name = "one by one"

    def __init__(
        self, module: nn.Module, bound: BoundModel, loss: Loss | None, training: LocalTraining
    ) -> None:
        self.module = module
        self.bound = bound
        self.loss = loss or click_loss
        self.training = training

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """Each job by itself: the outcome does not depend on the others, nor on their order."""
        with train_mode(self.module):
            return [self._train(job, round_id) for job in jobs]

    def _train(self, job: Job, round_id: int) -> Trained:
        training = self.training
        prepared = prepare(self.bound, job)
        batch = {name: tensor(column) for name, column in prepared.batch.items()}
        shared = {name: tensor(values) for name, values in prepared.shared.items()}
        dense = torch.from_numpy(np.array(job.submodel.dense, np.float32))
        rows = {name: torch.from_numpy(values.copy()) for name, values in prepared.values.items()}
        losses = [torch.empty(0)]
        with dropout_from(job.coins):
            for epoch in range(training.epochs):
                n = prepared.examples
                shuffled = torch.from_numpy(order(job.coins, epoch, n))
                size = training.batch or max(n, 1)
                for start in range(0, n, size):
                    which = shuffled[start : start + size]
                    step = {name: column[which] for name, column in batch.items()} | shared
                    losses.append(self.step(dense, rows, step, training.rate_in(round_id)))
        return finish(
            self.bound,
            prepared,
            dense.numpy(),
            {name: values.numpy() for name, values in rows.items()},
            torch.cat(losses).numpy(),
        )

    def step(
        self, dense: Tensor, rows: Mapping[str, Tensor], batch: dict[str, Tensor], rate: float
    ) -> Tensor:
        """One step of gradient descent, in place; the losses before it."""
        found = gradients(
            self.module, self.bound, self.loss, self.training, dense=dense, rows=rows, batch=batch
        )
        with torch.no_grad():
            for name, view in self.bound.unpack(dense).items():
                view.sub_(found.dense[name], alpha=rate)
            for name, values in rows.items():
                values.sub_(found.rows[name], alpha=rate * self.training.table_rate)
        return found.losses


@dataclass(frozen=True, slots=True)
class Gradients:
    """A batch's losses and the way up: by parameter for the dense part, by table for rows."""

    losses: Tensor = field(repr=False)
    dense: Mapping[str, Tensor] = field(repr=False)
    rows: Mapping[str, Tensor] = field(repr=False)


def gradients(
    module: nn.Module,
    bound: BoundModel,
    loss: Loss,
    training: LocalTraining,
    *,
    dense: Tensor,
    rows: Mapping[str, Tensor],
    batch: dict[str, Tensor],
) -> Gradients:
    """The gradient of the batch's mean loss, clipped as a whole, then with weight decay."""
    weights = {name: view.detach() for name, view in bound.unpack(dense).items()}
    tables = {table.parameter: rows[table.name].detach() for table in bound.tables}
    leaves = [leaf.requires_grad_() for leaf in (*weights.values(), *tables.values())]
    losses = example_losses(module, loss, weights | tables, batch)
    found = torch.autograd.grad(losses.mean(), leaves, allow_unused=True)
    ups = [
        torch.zeros_like(leaf) if up is None else (up.to_dense() if up.is_sparse else up)
        for leaf, up in zip(leaves, found, strict=True)
    ]
    with torch.no_grad():
        if training.clip:
            norm = torch.sqrt(sum((up.square().sum() for up in ups), torch.zeros(())))
            ups = [up * (training.clip / norm).clamp(max=1.0) for up in ups]
        if training.weight_decay:
            touched = [torch.ones(())] * len(weights)
            touched += [_touched(batch, table, rows[table.name]) for table in bound.tables]
            ups = [
                up + training.weight_decay * leaf * where
                for leaf, up, where in zip(leaves, ups, touched, strict=True)
            ]
    names = (*weights, *(table.name for table in bound.tables))
    return Gradients(
        losses.detach(),
        dict(zip(names[: len(weights)], ups[: len(weights)], strict=True)),
        dict(zip(names[len(weights) :], ups[len(weights) :], strict=True)),
    )


def example_losses(
    module: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: dict[str, Tensor]
) -> Tensor:
    """The loss of every example of a batch, checked for what a user's loss may get wrong."""
    losses = loss(functional_call(module, parameters, (batch,)), batch)
    size = len(next(iter(batch.values())))
    if losses.shape != (size,):
        raise ConfigError(
            f"the loss has shape {tuple(losses.shape)} for {size} examples",
            hint='return one loss per example, as with reduction="none", and no mean',
        )
    if not losses.requires_grad:
        raise ConfigError(
            "the loss does not depend on any parameter that is trained",
            hint="is there a detach() or no_grad() in the module or the loss?",
        )
    return losses


def tensor(column: npt.NDArray[Any]) -> Tensor:
    """A column as a tensor, without a copy unless it is read-only, which torch does not know."""
    return torch.from_numpy(column if column.flags.writeable else column.copy())


@contextmanager
def train_mode(module: nn.Module) -> Iterator[None]:
    """The module in training mode, and back in its own afterwards."""
    before = module.training
    module.train()
    try:
        yield
    finally:
        module.train(before)


_WORDS: Final = 624
_FIRST: Final = 24
"""torch's generator is a Mersenne Twister of so many words, which begin at this byte of its state,
after the seed (8 bytes), words left (4), whether it is seeded (4) and the next word (8)."""


@contextmanager
def dropout_from(coins: Secret) -> Iterator[None]:
    """Dropout draws from torch's one generator: here from a state of these coins, then put back.

    The whole state is drawn: of a seed torch takes 32 bits, which can be tried out.
    """
    words = CoinStream(Stream.of(coins, Label.DROPOUT_MASKS)).words(_WORDS)
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state().numpy().copy()
        state[8:12].view(np.int32)[0] = 1  # one word left: all are made anew before the next draw
        state[16:24].view(np.uint64)[0] = 0
        state[_FIRST : _FIRST + 8 * _WORDS].view(np.uint64)[:] = words & np.uint64(0xFFFFFFFF)
        torch.set_rng_state(torch.from_numpy(state))
        yield


def _touched(batch: Mapping[str, Tensor], table: BoundTable, rows: Tensor) -> Tensor:
    """1 for each row that ids of the batch name, or all candidates, else 0; shape (k, 1)."""
    if table.candidates:
        return torch.ones(len(rows), 1)
    mark = torch.zeros(len(rows), 1)
    for name in table.fields:
        at = batch[name].reshape(-1)
        mark[at[at >= 0]] = 1.0
    return mark


def _holds(ids: Ids, wanted: Ids) -> bool:
    """Whether all of `wanted` are among `ids`, both ascending."""
    if wanted.size == 0:
        return True
    at = np.searchsorted(ids, wanted)
    return bool(at[-1] < ids.size and (ids[at] == wanted).all())


def _zeros(rows: int, width: int) -> TableUpdate:
    return TableUpdate(np.zeros((rows, width), np.float32), np.zeros(rows, np.int64))


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
