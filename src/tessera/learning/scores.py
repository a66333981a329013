"""What a model gives for examples, reading only the rows that they touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from tessera.data.examples import Examples
from tessera.errors import MisuseError
from tessera.learning.arrays import Floats, Ids
from tessera.learning.bound_model import BoundModel
from tessera.learning.local import tensor
from tessera.learning.softmax import ranked

AT_ONCE: Final = 1 << 24
"""Logits of a softmax that are held at a time: 64 MB."""


class RowSource(Protocol):
    """A table that gives rows by id: the server's own `Table`, for one."""

    def values(self, ids: Ids, /) -> Floats: ...


def evaluate(
    module: nn.Module,
    bound: BoundModel,
    parameters: Mapping[str, Floats | RowSource],
    examples: Examples,
    *,
    batch: int = 4096,
    rank: bool = True,
) -> Floats:
    """What the module gives for each example: logits (N,) for a click model.

    Over a softmax, (N, 2): the rank of the target among all rows of its table, and its
    log-probability (`softmax.ranked`); without `rank` the logits of all rows, (N, rows).

    `parameters` go by parameter name, as in a `state_dict` (`BoundModel.parameters`). A table is
    the array of all its rows, or anything with `values(ids)`, which is asked only for the rows that
    a batch touches. Derived fields are added here. Examples do not see each other, so the size of a
    batch does not matter to a module that normalises per example.
    """
    names = [name for name, _ in bound.dense] + [table.parameter for table in bound.tables]
    if missing := [name for name in names if name not in parameters]:
        raise MisuseError(f"evaluate: parameter {missing[0]!r} is missing")
    fixed = {
        name: tensor(value)
        for name, value in parameters.items()
        if isinstance(value, np.ndarray) and name not in {t.parameter for t in bound.tables}
    }
    scores = [np.empty(0, np.float32)] if len(examples) == 0 else []
    softmax, every = bound.candidates, None
    if softmax is not None:
        every = np.arange(softmax.rows, dtype=np.uint64)
        batch = max(1, min(batch, AT_ONCE // softmax.rows))
        if not len(examples):
            scores = [np.empty((0, 2 if rank else softmax.rows), np.float32)]
    before = module.training
    module.eval()
    try:
        for start in range(0, len(examples), batch):
            part = examples.take(slice(start, start + batch))
            ids = bound.all_row_ids_of(part, every)
            rows = {
                table.parameter: torch.from_numpy(
                    _rows(parameters[table.parameter], ids[table.name], table.width)
                )
                for table in bound.tables
            }
            columns = bound.positions(part, ids)
            with torch.inference_mode():
                tensors = {name: tensor(column) for name, column in columns.items()}
                output = functional_call(module, fixed | rows, (tensors,))
                if softmax is not None and rank:
                    output = ranked(output, tensors[softmax.target])
                scores.append(output.numpy())
    finally:
        module.train(before)
    return np.concatenate(scores).astype(np.float32)


def _rows(table: Floats | RowSource, ids: Ids, width: int) -> Floats:
    if ids.size == 0:  # a masked id still looks up row 0
        return np.zeros((1, width), np.float32)
    return table[ids] if isinstance(table, np.ndarray) else table.values(ids)
