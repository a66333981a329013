"""SideBySide: clients that take noisy steps together, and LaidOut, a step's batches in one shape.

Groups differ in number from step to step and in size from one to the next. They are filled up to
one shape, with groups and examples that weigh nothing: as small a shape as holds them, or for a
compiled step one of a few fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.data.examples import NONE
from tessera.learning.bound_model import BoundModel
from tessera.learning.cohort.plan import TableGroup, columns, distinct_rows, groups
from tessera.learning.cohort.step import Tensors
from tessera.learning.local import Job, tensor
from tessera.learning.local_training import LocalTraining
from tessera.learning.noisy.client import NoisyClient, at_hand, fresh_rows
from tessera.learning.noisy.clipped import client_kind
from tessera.learning.noisy.steps import Ints, NoisySteps, StepBatch


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A step's batches: fields (clients, groups, examples of a group, ...), their weights 0 or 1.

    Of each group `listed` has the rows that it names, by their places with all clients' rows, and
    `among` their places with the rows that any group touches; one beyond for what only fills up.
    """

    fields: Tensors = field(repr=False)
    weights: Tensor = field(repr=False)
    listed: Tensors = field(repr=False)
    among: Tensors = field(repr=False)
    touched: Mapping[str, Sequence[Ints]] = field(repr=False)

    @property
    def many(self) -> int:
        return self.weights.shape[1]

    def pass_of(self, begin: int, end: int) -> LaidOut:
        """Some of the groups; copies, whose strides do not say how many passes there are."""
        fields, listed, among = (
            {name: _whole(x[:, begin:end]) for name, x in part.items()}
            for part in (self.fields, self.listed, self.among)
        )
        return LaidOut(fields, _whole(self.weights[:, begin:end]), listed, among, self.touched)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Clients with what they share: columns one after the other, dense parts, and rows.

    `first` is where a client's examples begin in the columns, `begins` where its rows do. Each
    client has views of its own part of dense parts and rows. There may be more dense parts than
    clients: places that nobody has taken, for a shape that stays the same.
    """

    clients: Sequence[NoisyClient]
    tables: Sequence[TableGroup]
    columns: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    first: Ints
    dense: Tensor = field(repr=False)
    values: Tensors = field(repr=False)
    begins: Mapping[str, Ints] = field(repr=False)

    @classmethod
    def begin(
        cls,
        bound: BoundModel,
        training: LocalTraining,
        noisy: NoisySteps,
        jobs: Sequence[Job],
        *,
        round_id: int,
        width: int,
    ) -> SideBySide:
        """These jobs' clients, in `width` places."""
        prepared = [at_hand(bound, job) for job in jobs]
        nobody = [0] * (width - len(jobs))
        dense = torch.zeros(width, bound.dense_size)
        values, begins = {}, {}
        for table in bound.tables:
            parts = [fresh_rows(p, table.name) for p in prepared]
            begins[table.name] = np.cumsum([0, *map(len, parts), *nobody])
            values[table.name] = torch.from_numpy(
                parts[0] if len(parts) == 1 else np.concatenate(parts)
            )
        clients = []
        for at, p in enumerate(prepared):
            dense[at] = torch.from_numpy(np.array(p.job.submodel.dense, np.float32))
            rows = {n: x[begins[n][at] : begins[n][at + 1]] for n, x in values.items()}
            clients.append(
                client_kind(noisy)(
                    p, training, noisy, round_id=round_id, dense=dense[at], rows=rows
                )
            )
        first = np.cumsum([0, *(p.examples for p in prepared), *nobody])
        stacked = columns(bound, prepared, trim=False)
        return cls(clients, groups(bound), stacked, first, dense, values, begins)

    def views(self, bound: BoundModel) -> Tensors:
        """Every dense parameter of all clients, by its name."""
        found, start = {}, 0
        for name, shape in bound.dense:
            size = int(np.prod(shape, dtype=np.int64))
            part = self.dense[:, start : start + size]
            found[name] = part.reshape(len(part), *shape)
            start += size
        return found

    def laid_out(self, drawn: Sequence[StepBatch], places: int = 0) -> LaidOut:
        """The clients' batches in one shape; a group or an example that is not there weighs 0.

        With `places` it is a whole number of passes over so many examples of a client, in groups
        of 1, 2, 4, ... examples.
        """
        nobody = np.empty(0, np.int64)
        drawn = [*drawn, *[StepBatch(nobody, nobody)] * (len(self.dense) - len(drawn))]
        many = max(each.many for each in drawn)
        sizes = [np.bincount(each.groups, minlength=each.many) for each in drawn]
        most = max((int(size.max()) for size in sizes if size.size), default=1)
        if places:
            most = 1 << (most - 1).bit_length()
            at_once = max(1, places // most)
            many = -(-many // at_once) * at_once
        which = np.zeros((len(drawn), many, most), np.int64)
        weights = np.zeros(which.shape, np.float32)
        for at, (each, size) in enumerate(zip(drawn, sizes, strict=True)):
            start = np.cumsum(size) - size
            inside = np.arange(each.which.size) - start[each.groups]
            if each.many:  # what fills a group up repeats its first example
                which[at, : each.many] = each.which[start][:, None]
                which[at, each.many :] = each.which[0]
            which[at, each.groups, inside] = each.which
            which[at] += self.first[at] if each.many else 0
            weights[at, each.groups, inside] = 1.0
        left = {name: column[which] for name, column in self.columns.items()}
        absent = np.array([each.many == 0 for each in drawn])
        fields: dict[str, npt.NDArray[Any]] = {}
        listed: Tensors = {}
        among: Tensors = {}
        touched: dict[str, list[Ints]] = {}
        for group in self.tables:
            ids = {f: left.pop(f) for f in group.fields}
            for column in ids.values():  # of nobody: another client's examples stand there
                column[absent] = np.minimum(column[absent], 0)
            flat = {f: x.reshape(len(drawn) * many, *x.shape[2:]) for f, x in ids.items()}
            where, rows = distinct_rows(flat, 1 << 62)
            fields |= {f: x.reshape(ids[f].shape) for f, x in where.items()}
            rows = rows.reshape(len(drawn), many, -1)
            rows[absent] = NONE
            for table in group.tables:
                begins = self.begins[table.name]
                held = np.where(rows < 0, NONE, rows + begins[:-1, None, None])
                distinct, back = np.unique(held, return_inverse=True)
                filled = int(distinct.size > 0 and distinct[0] == NONE)
                back = back.reshape(held.shape) - filled
                distinct = distinct[filled:]
                back[back < 0] = distinct.size
                ends = np.searchsorted(distinct, begins)
                listed[table.name] = torch.from_numpy(np.maximum(held, 0))
                among[table.name] = torch.from_numpy(back)
                touched[table.name] = [
                    distinct[ends[c] : ends[c + 1]] - begins[c] for c in range(len(self.clients))
                ]
        tensors = {name: tensor(x) for name, x in (fields | left).items()}
        tensors |= {f: tensors[f].long() for f in fields}
        return LaidOut(tensors, torch.from_numpy(weights), listed, among, touched)


def _whole(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
