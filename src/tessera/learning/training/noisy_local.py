"""The reference of training with noise: one client and one group after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tessera.learning.bound_model import BoundModel
from tessera.learning.training.local import (
    Job,
    Loss,
    Trained,
    click_loss,
    dropout_from,
    example_losses,
    tensor,
    train_mode,
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
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.batches import groups


class NoisySequential:
    """Any module, by plain automatic differentiation: what faster ways are held to.

    A group on which the module fails counts as zeros, as one without a finite gradient does: if it
    ended the client's training, one example could take all others with it, which no number allows
    for. With `raises` the error is raised instead: where a module is tried, not trained.
    """

    name = "one by one, with noise"

    def __init__(
        self,
        module: nn.Module,
        bound: BoundModel,
        loss: Loss | None,
        training: LocalTraining,
        noisy: NoisySteps,
        *,
        reason: str = "",
        raises: bool = False,
    ) -> None:
        self.module, self.bound, self.loss = module, bound, loss or click_loss
        self.training, self.noisy, self.reason = training, noisy, reason
        self.raises = raises

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """Each job by itself."""
        with train_mode(self.module):
            return [self._train(job, round_id) for job in jobs]

    def _train(self, job: Job, round_id: int) -> Trained:
        client = self.begin(job, round_id)
        with dropout_from(job.coins):
            for _ in range(self.noisy.steps):
                self.step(client)
        client.end()
        return client.outcome(self.bound)

    def begin(self, job: Job, round_id: int) -> NoisyClient:
        prepared = at_hand(self.bound, job)
        return client_kind(self.noisy)(
            prepared,
            self.training,
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
            for group in groups(self.bound)
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
        bound, noisy = self.bound, self.noisy
        own = torch.from_numpy(drawn.groups == group)
        weights = {name: view.detach() for name, view in bound.unpack(client.dense).items()}
        tables = {t.parameter: client.rows[t.name].detach() for t in bound.tables}
        leaves = [leaf.requires_grad_() for leaf in (*weights.values(), *tables.values())]
        try:
            losses = example_losses(
                self.module, self.loss, weights | tables, {n: x[own] for n, x in batch.items()}
            )
            found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        except Exception:  # whatever it was: zeros without the client's noise would show it
            if self.raises:
                raise
            client.not_finite += 1
            return
        ups = [
            torch.zeros_like(leaf) if up is None else (up.to_dense() if up.is_sparse else up)
            for leaf, up in zip(leaves, found, strict=True)
        ]
        client.losses.append(losses.detach())
        if noisy.only_clips:
            factors = [1.0] * len(weights)
            factors += [0.0 if t.local else noisy.row_weight for t in bound.tables]
            ups = [up * factor for up, factor in zip(ups, factors, strict=True)]
        norm = torch.sqrt(sum((up.square().sum() for up in ups), torch.zeros(())))
        if not torch.isfinite(norm):
            client.not_finite += 1
            return
        scale = float((noisy.clip / norm).clamp(max=1.0)) * SHORTER / noisy.unit
        parts = [(up * scale).trunc() for up in ups]
        dense += torch.cat([torch.empty(0), *(p.reshape(-1) for p in parts[: len(weights)])])
        for table, part in zip(bound.tables, parts[len(weights) :], strict=True):
            sums[table.name].add_(part[torch.from_numpy(touched[table.name])])


def touched_rows(columns: Sequence[Ints]) -> Ints:
    """The rows that ids of a batch name, ascending and once each."""
    every = np.concatenate([np.empty(0, np.int64), *(column.reshape(-1) for column in columns)])
    return np.unique(every[every >= 0])
