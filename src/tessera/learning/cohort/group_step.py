"""Gradients of all groups of a batch at once, each cut to the clip: the inner part of a noisy step.

`torch.func` gives every group a gradient of its own: for the dense part, and for the rows that this
group names and no others, so that memory goes by the rows touched and an id that occurs twice in a
group adds up in one row before the norm is taken. Every group's gradient is cut to integers before
anything is added up. Norms from the layers' inputs alone ("ghost clipping") would save the
gradients themselves, but their sum would be rounded once for all groups: then one group could move
more than itself, and the sensitivity would not be the clip.

The function made here has no state and does not look at values to choose its way when it is
compiled, so that `step.Compiled` takes it as it takes a step without noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from tessera.learning.bound_model import BoundModel
from tessera.learning.cohort.step import Tensors
from tessera.learning.local import Loss
from tessera.learning.noisy.steps import SHORTER, NoisySteps

GroupStep: TypeAlias = Callable[
    [Tensors, Tensors, Tensors, Tensor, Tensor], tuple[Tensor, Tensors, Tensor, Tensor]
]
"""(dense parameters, rows, batch, weights, unit) -> dense sums, rows, finite, losses.

Dense parameters are by client, rows, batch and weights by client and group; weights are 1 for
examples that are there and 0 for what fills up. The unit is the value of one integer: a tensor, so
that what is compiled and tried with little noise is what then trains with the plan's.

Found are integers: of the dense part the sum over each client's groups (clients, values), and each
group's rows; whether a group's gradient was finite; and the losses, by example.
"""


def group_step(
    module: nn.Module, bound: BoundModel, loss: Loss, noisy: NoisySteps, sums: torch.dtype
) -> GroupStep:
    """The function for this module; `sums` is the integer type that holds a sum over groups.

    Of what the plan says only the clip and the weight of rows are built in.
    """
    clip, only_clips = noisy.clip, noisy.only_clips
    parameter = {table.name: table.parameter for table in bound.tables}
    weigh = {t.name: 0.0 if t.local else noisy.row_weight for t in bound.tables}

    def summed(
        dense: Tensors, rows: Tensors, batch: Tensors, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        parameters = {**dense, **{parameter[name]: held for name, held in rows.items()}}
        losses = loss(functional_call(module, parameters, (batch,)), batch)
        return torch.where(weights > 0, losses, 0.0).sum(), losses.detach()

    of_one: Any = grad_and_value(summed, argnums=(0, 1), has_aux=True)
    of_groups: Any = vmap(of_one, in_dims=(None, 0, 0, 0), randomness="different")
    of_clients: Any = vmap(of_groups, randomness="different")

    def gradients(
        dense: Tensors, rows: Tensors, batch: Tensors, weights: Tensor
    ) -> tuple[Tensors, Tensors, Tensor]:
        if len(weights) > 1:
            (of_dense, of_rows), (_, losses) = of_clients(dense, rows, batch, weights)
            return of_dense, of_rows, losses
        # The weights of one client are those of all groups: products of matrices, and of no stack.
        own, held, fields = (
            {name: x[0] for name, x in part.items()} for part in (dense, rows, batch)
        )
        ups, (_, losses) = of_groups(own, held, fields, weights[0])
        of_dense, of_rows = ({name: x[None] for name, x in part.items()} for part in ups)
        return of_dense, of_rows, losses[None]

    def step(
        dense: Tensors, rows: Tensors, batch: Tensors, weights: Tensor, unit: Tensor
    ) -> tuple[Tensor, Tensors, Tensor, Tensor]:
        of_dense, of_rows, losses = gradients(dense, rows, batch, weights)
        if only_clips:
            of_rows = {name: up * weigh[name] for name, up in of_rows.items()}
        ups = of_dense | of_rows
        square = torch.zeros(weights.shape[:2])
        for up in ups.values():
            square = square + _square(up)
        finite = torch.isfinite(square)
        scale = (clip / torch.sqrt(square)).clamp(max=1.0) * (SHORTER / unit)
        kept = finite & (weights > 0).any(-1)
        if torch.compiler.is_compiling() or not bool(kept.all()):
            scale = torch.where(kept, scale, 0.0)
            ups = {name: torch.where(_along(finite, up), up, 0.0) for name, up in ups.items()}
        # Towards zero: so no contribution becomes longer, and the sum's sensitivity is the clip.
        cut = {name: up.mul_(_along(scale, up)).int() for name, up in ups.items()}
        parts = [cut[name].sum(1, dtype=sums).flatten(1) for name in of_dense]
        total = torch.cat([torch.empty(len(weights), 0, dtype=sums), *parts], 1)
        return total, {name: cut[name] for name in of_rows}, finite, losses

    return step


def _square(up: Tensor) -> Tensor:
    """The squared length of each group's part, (clients, groups).

    In single precision, by short sums and sums of these: adding up tens of thousands of numbers
    one after the other could be off by more than `SHORTER` leaves.
    """
    if up.dim() > 3:
        up = torch.linalg.vector_norm(up, dim=-1)
    length: Tensor = torch.linalg.vector_norm(up.flatten(2), dim=2)
    return length.square()


def _along(scale: Tensor, up: Tensor) -> Tensor:
    return scale.reshape(*scale.shape, *[1] * (up.dim() - 2))
