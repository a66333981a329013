"""Learners that train one client after the other, for any module: what faster ways are held to.

A step of `Sequential`: the mean loss over the batch's examples; its gradient for the dense part and
for all rows, local ones too; scaled down together if its norm is over `clip`; then `weight_decay`
times the value is added where the batch touches (the dense part, and the rows its ids name); then
the rate of the round, for rows times `table_rate` (all of `LocalTraining`).

`NoisySequential` takes steps with noise instead: `noisy_steps.py` says what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundTable, table_groups
from tessera.learning.tables.submodel import Floats
from tessera.learning.training.jobs import (
    Job,
    Loss,
    PreparedJob,
    Trainable,
    Trained,
    finish,
    order,
    prepare,
    tensor,
)
from tessera.learning.training.noisy_steps import (
    SHORTER,
    Ints,
    NoisyClient,
    NoisySteps,
    StepBatch,
    at_hand,
    client_kind,
    fresh_rows,
)


class Sequential:
    """One client after the other, with the module as it is; `reason` says why nothing faster."""

    name = "one by one"

    def __init__(self, model: Trainable, *, reason: str = "") -> None:
        self.model = model
        self.reason = reason

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """Each job by itself: the outcome does not depend on the others, nor on their order."""
        with train_mode(self.model.module):
            return [self._train(job, round_id) for job in jobs]

    def _train(self, job: Job, round_id: int) -> Trained:
        prepared = prepare(self.model.bound, job)
        with dropout_from(job.coins):
            dense, rows, losses = self.descend(prepared, round_id)
        return finish(self.model.bound, prepared, dense, rows, losses)

    def descend(
        self, prepared: PreparedJob, round_id: int, kind: torch.dtype | None = None
    ) -> tuple[Floats, dict[str, Floats], Floats]:
        """All steps of a client: its dense part and rows afterwards, and the losses before each.

        With `kind` floats are of another precision than they come in.
        """
        training, n = self.model.training, prepared.examples

        def own(values: Tensor) -> Tensor:
            return values if kind is None or not values.is_floating_point() else values.to(kind)

        batch = {name: own(tensor(column)) for name, column in prepared.batch.items()}
        shared = {name: own(tensor(values)) for name, values in prepared.shared.items()}
        dense = own(torch.from_numpy(np.array(prepared.job.submodel.dense, np.float32)))
        rows = {name: own(torch.from_numpy(v.copy())) for name, v in prepared.values.items()}
        losses = [own(torch.empty(0))]
        for epoch in range(training.epochs):
            shuffled = torch.from_numpy(order(prepared.job.coins, epoch, n))
            size = training.batch or max(n, 1)
            for start in range(0, n, size):
                which = shuffled[start : start + size]
                step = {name: column[which] for name, column in batch.items()} | shared
                losses.append(self._step(dense, rows, step, training.rate_in(round_id)))
        after: dict[str, Floats] = {name: values.numpy() for name, values in rows.items()}
        return dense.numpy(), after, torch.cat(losses).numpy()

    def _step(
        self, dense: Tensor, rows: Mapping[str, Tensor], batch: dict[str, Tensor], rate: float
    ) -> Tensor:
        """One step of gradient descent, in place; the losses before it."""
        found = gradients(self.model, dense=dense, rows=rows, batch=batch)
        with torch.no_grad():
            for name, view in self.model.bound.unpack(dense).items():
                view.sub_(found.dense[name], alpha=rate)
            for name, values in rows.items():
                values.sub_(found.rows[name], alpha=rate * self.model.training.table_rate)
        return found.losses


class NoisySequential:
    """One client and one group after the other, by plain automatic differentiation.

    A group on which the module fails counts as zeros, as one without a finite gradient does: if it
    ended the client's training, one example could take all others with it, which no number allows
    for. With `raises` the error is raised instead: where a module is tried, not trained.
    """

    name = "one by one, with noise"

    def __init__(
        self, model: Trainable, noisy: NoisySteps, *, reason: str = "", raises: bool = False
    ) -> None:
        self.model, self.noisy = model, noisy
        self.reason, self.raises = reason, raises

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """Each job by itself."""
        with train_mode(self.model.module):
            return [self._train(job, round_id) for job in jobs]

    def _train(self, job: Job, round_id: int) -> Trained:
        client = self.begin(job, round_id)
        with dropout_from(job.coins):
            for _ in range(self.noisy.steps):
                self.step(client)
        client.end()
        return client.outcome(self.model.bound)

    def begin(self, job: Job, round_id: int) -> NoisyClient:
        prepared = at_hand(self.model.bound, job)
        return client_kind(self.noisy)(
            prepared,
            self.model.training,
            self.noisy,
            round_id=round_id,
            dense=torch.from_numpy(np.array(job.submodel.dense, np.float32)),
            rows={n: torch.from_numpy(fresh_rows(prepared, n)) for n in prepared.values},
        )

    def step(self, client: NoisyClient) -> None:
        """One step: draw, settle, add up what each group gives, and take it."""
        drawn = client.draw()
        batch = {
            name: tensor(column[drawn.which]) for name, column in client.prepared.batch.items()
        }
        touched = {
            table.name: touched_rows([batch[f].numpy() for f in group.fields])
            for group in table_groups(self.model.bound)
            for table in group.tables
        }
        for name, rows in touched.items():
            client.settle(name, rows)
        dense = torch.zeros(client.dense.shape, dtype=torch.float64)
        sums = {
            name: torch.zeros(len(rows), client.rows[name].shape[1], dtype=torch.float64)
            for name, rows in touched.items()
        }
        for group in range(drawn.many):
            self._add(client, batch, drawn, group, dense, touched, sums)
        client.take(dense, {name: (rows, sums[name]) for name, rows in touched.items()})

    def _add(
        self,
        client: NoisyClient,
        batch: Mapping[str, Tensor],
        drawn: StepBatch,
        group: int,
        dense: Tensor,
        touched: Mapping[str, Ints],
        sums: Mapping[str, Tensor],
    ) -> None:
        """Add a group's clipped gradient, in integers towards zero: no part of it grows."""
        noisy, bound = self.noisy, self.model.bound
        own = torch.from_numpy(drawn.groups == group)
        try:
            losses, _, ups = _ascent(
                self.model,
                dense=client.dense,
                rows=client.rows,
                batch={n: x[own] for n, x in batch.items()},
                summed=True,
            )
        except Exception:  # whatever it was: zeros without the client's noise would show it
            if self.raises:
                raise
            client.not_finite += 1
            return
        client.losses.append(losses)
        count = len(bound.dense)
        if noisy.only_clips:
            factors = [1.0] * count
            factors += [0.0 if t.local else noisy.row_weight for t in bound.tables]
            ups = [up * factor for up, factor in zip(ups, factors, strict=True)]
        norm = torch.sqrt(sum((up.square().sum() for up in ups), torch.zeros(())))
        if not torch.isfinite(norm):
            client.not_finite += 1
            return
        scale = float((noisy.clip / norm).clamp(max=1.0)) * SHORTER / noisy.unit
        parts = [(up * scale).trunc() for up in ups]
        dense += torch.cat([torch.empty(0), *(p.reshape(-1) for p in parts[:count])])
        for table, part in zip(bound.tables, parts[count:], strict=True):
            sums[table.name].add_(part[torch.from_numpy(touched[table.name])])


def touched_rows(columns: Sequence[Ints]) -> Ints:
    """The rows that ids of a batch name, ascending and once each."""
    every = np.concatenate([np.empty(0, np.int64), *(column.reshape(-1) for column in columns)])
    return np.unique(every[every >= 0])


# --- gradients ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gradients:
    """A batch's losses and the way up: by parameter for the dense part, by table for rows."""

    losses: Tensor = field(repr=False)
    dense: Mapping[str, Tensor] = field(repr=False)
    rows: Mapping[str, Tensor] = field(repr=False)


def gradients(
    model: Trainable, *, dense: Tensor, rows: Mapping[str, Tensor], batch: dict[str, Tensor]
) -> Gradients:
    """The gradient of the batch's mean loss, clipped as a whole, then with weight decay."""
    training, tables = model.training, model.bound.tables
    losses, leaves, ups = _ascent(model, dense=dense, rows=rows, batch=batch)
    names = [name for name, _ in model.bound.dense]
    with torch.no_grad():
        if training.clip:
            norm = torch.sqrt(sum((up.square().sum() for up in ups), torch.zeros(())))
            ups = [up * (training.clip / norm).clamp(max=1.0) for up in ups]
        if training.weight_decay:
            touched = [torch.ones(())] * len(names)
            touched += [_touched(batch, table, rows[table.name]) for table in tables]
            ups = [
                up + training.weight_decay * leaf * where
                for leaf, up, where in zip(leaves, ups, touched, strict=True)
            ]
    return Gradients(
        losses,
        dict(zip(names, ups[: len(names)], strict=True)),
        dict(zip((table.name for table in tables), ups[len(names) :], strict=True)),
    )


def _ascent(
    model: Trainable,
    *,
    dense: Tensor,
    rows: Mapping[str, Tensor],
    batch: dict[str, Tensor],
    summed: bool = False,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A batch's losses; then all parameters, dense ones and then tables, and the gradient of each.

    The gradient is that of the mean loss, or of the sum.
    """
    weights = {name: view.detach() for name, view in model.bound.unpack(dense).items()}
    tables = {table.parameter: rows[table.name].detach() for table in model.bound.tables}
    leaves = [leaf.requires_grad_() for leaf in (*weights.values(), *tables.values())]
    losses = example_losses(model.module, model.loss, weights | tables, batch)
    whole = losses.sum() if summed else losses.mean()
    found = torch.autograd.grad(whole, leaves, allow_unused=True)
    ups = [
        torch.zeros_like(leaf) if up is None else (up.to_dense() if up.is_sparse else up)
        for leaf, up in zip(leaves, found, strict=True)
    ]
    return losses.detach(), leaves, ups


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


def _touched(batch: Mapping[str, Tensor], table: BoundTable, rows: Tensor) -> Tensor:
    """1 for each row that ids of the batch name, or all candidates, else 0; shape (k, 1)."""
    if table.candidates:
        return torch.ones(len(rows), 1)
    mark = torch.zeros(len(rows), 1)
    for name in table.fields:
        at = batch[name].reshape(-1)
        mark[at[at >= 0]] = 1.0
    return mark


# --- the module, and what it draws ----------------------------------------------------------------


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
"""torch's generator is a Mersenne Twister of `_WORDS` words, which begin at this byte of its state,
after the seed (8 bytes), words left (4), whether it is seeded (4) and the next word (8)."""


@contextmanager
def dropout_from(coins: Secret) -> Iterator[None]:
    """Dropout draws from torch's one generator: here from a state of these coins, then put back."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(dropout_state(coins))
        yield


def dropout_state(coins: Secret) -> Tensor:
    """The whole state of a generator, from these coins: of a seed torch takes 32 bits, which can
    be tried out."""
    words = CoinStream(Stream.of(coins, Label.DROPOUT_MASKS)).words(_WORDS)
    state = _fresh_state().copy()
    state[8:12].view(np.int32)[0] = 1  # one word left: all are made anew before the next draw
    state[16:24].view(np.uint64)[0] = 0
    state[_FIRST : _FIRST + 8 * _WORDS].view(np.uint64)[:] = words & np.uint64(0xFFFFFFFF)
    return torch.from_numpy(state)


@cache
def _fresh_state() -> npt.NDArray[np.uint8]:
    return torch.Generator().manual_seed(0).get_state().numpy()
