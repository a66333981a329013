"""A trial of a module, loss and metric on a few examples, before anything is trained.

What does not fit together shows in one sentence here, and not as a raw error deep inside a round:
fields that the data does not have, ids of -1 that are looked up, outputs of another shape.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tessera.data.examples import NONE, ClientData, Examples
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel
from tessera.learning.metrics import Metric
from tessera.learning.softmax import ranked
from tessera.learning.spelling import closest
from tessera.learning.tables.arrays import Floats, Ids
from tessera.learning.training.local import Loss, tensor

FEW: Final = 8


def try_out(
    module: nn.Module, bound: BoundModel, loss: Loss, metric: Metric, data: ClientData, seed: int
) -> None:
    """`ConfigError` if these cannot train on this data."""
    examples = _some(data, bound)
    ids = bound.all_row_ids_of(examples)  # names a table's field that is missing
    parameters = {
        table.parameter: torch.from_numpy(_rows(bound, table.name, ids[table.name], seed))
        for table in bound.tables
    }
    batch = {name: tensor(column) for name, column in bound.positions(examples, ids).items()}
    output = _output(module, parameters, batch, examples)
    softmax = bound.candidates
    if softmax is not None:
        held = len(ids[softmax.root])
        if not isinstance(output, Tensor) or output.shape != (len(examples), held):
            raise ConfigError(
                f"the module gives {_shape(output)} for a batch of {len(examples)} examples, and "
                f"a softmax over table {softmax.root!r} takes one logit per row at hand: here "
                f"({len(examples)}, {held})",
                hint=f"multiply with the table itself: hidden @ self.{softmax.root}.weight.T",
            )
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(examples):
        raise ConfigError(
            f"the module gives {_shape(output)} for a batch of {len(examples)} examples",
            hint="one output, or one row of outputs, per example: (B,) or (B, classes)",
        )
    _check_loss(loss, output, batch, len(examples))
    if softmax is not None:
        output = ranked(output, batch[softmax.target])
    try:
        metric.measures(output.detach().numpy(), examples)
    except (ValueError, IndexError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the metric {metric.name} cannot measure outputs of the shape {tuple(output.shape)}: "
            f"{error}",
            hint="tessera.Task(metric=...) takes one that can; AUC wants one logit per example",
        ) from error


def _some(data: ClientData, bound: BoundModel) -> Examples:
    """A few examples, those first that have a "none" among their ids."""
    train = data.train
    none = np.zeros(len(train), dtype=np.bool_)
    for table in bound.tables:
        for name in table.fields:
            if name in train.fields:
                column = train[name]
                none |= (column == NONE).any(axis=1) if column.ndim == 2 else column == NONE
    return train.take(np.sort(np.argsort(~none, kind="stable")[:FEW]))


def _rows(bound: BoundModel, name: str, ids: Ids, seed: int) -> Floats:
    table = bound.table(name, seed=seed)
    return table.values(ids) if ids.size else np.zeros((1, table.width), np.float32)


def _output(
    module: nn.Module, parameters: dict[str, Tensor], batch: dict[str, Tensor], examples: Examples
) -> object:
    before = module.training
    module.eval()
    try:
        with torch.no_grad():
            return functional_call(module, parameters, (batch,))
    except KeyError as error:
        name = str(error.args[0]) if error.args else ""
        raise ConfigError(
            f"the module reads a field {name!r}, which the examples do not have",
            hint=closest(name, batch),
        ) from error
    except IndexError as error:
        padded = [name for name, column in batch.items() if _has_none(column)]
        raise ConfigError(
            f"the module looks up an id of {NONE}, which means none"
            + (f" (in {', '.join(map(repr, padded))})" if padded else f": {error}"),
            hint=f'look up batch["{padded[0] if padded else "ids"}"].clamp(min=0), and mask the '
            "result where the id is below 0",
        ) from error
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the module fails on a batch of {len(examples)} examples: {error}",
            hint=f"the batch has {', '.join(batch)}",
        ) from error
    finally:
        module.train(before)


def _has_none(column: Tensor) -> bool:
    return not column.is_floating_point() and bool((column == NONE).any())


def _check_loss(loss: Loss, output: Tensor, batch: dict[str, Tensor], examples: int) -> None:
    try:
        losses = loss(output, batch)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(
            f"the loss cannot take an output of the shape {tuple(output.shape)}: {error}",
            hint="the default wants one logit per example, (B,); pass your own as loss=",
        ) from error
    except KeyError as error:
        raise ConfigError(
            f"the loss reads a field {error.args[0]!r}, which the examples do not have",
            hint=closest(str(error.args[0]), batch),
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (examples,):
        raise ConfigError(
            f"the loss gives {_shape(losses)} for {examples} examples",
            hint='one loss per example: reduction="none"',
        )


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of the shape {tuple(value.shape)}"
    return type(value).__name__
