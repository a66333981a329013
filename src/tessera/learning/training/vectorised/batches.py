"""Every step of some clients' training, laid out as arrays before the first of them is run.

A step needs few of a client's rows: those its batch names. They are found here, for all steps at
once: `rows` says where they are among the rows of all clients, and ids become places in that list,
so that a step gathers, trains and puts back only what it touches, and an id that occurs twice adds
up in one gradient. Every array has one row per step and the same shape for every client, which is
what lets clients be trained side by side. What fills the shape up is harmless: an example that is
not there repeats one of its batch with weight 0, a row that is not there is a row of zeros at the
end of the client's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.data.examples import NONE
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel, table_groups
from tessera.learning.softmax import CANDIDATES
from tessera.learning.tables.submodel import Floats
from tessera.learning.training.jobs import PreparedJob, order, tensor
from tessera.learning.training.settings import LocalTraining

Ints = npt.NDArray[np.int64]

FEW_SHAPES: Final = 64
"""Candidates of a softmax are filled up to a multiple of this, and many of them to one of a quarter
of the power of two below."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Clients' steps: those of client c are `first[c] : first[c + 1]`.

    `fields` are batches (steps, B, ...), ids in them places in the step's rows; `weights`
    (steps, B) is 1 for examples and 0 for what repeats them. `rows` (steps, R), by table, point
    into `values`, the rows of all clients with a row of zeros after each client's (`begins` says
    where they start). `touched` (steps, R, 1) says which rows a batch names, where that is not all
    that are listed. A last step, of nobody and on a row of its own, is for slots without a client.

    Where there is a softmax, every step of a client takes all its candidates: the rows of these
    tables stay in the client's slot as dense parameters do, filled up to as many as `whole` says.
    `shared` is what a batch has of all its examples together, by the step's `owner`.
    """

    clients: Sequence[PreparedJob]
    first: Ints
    fields: Mapping[str, Tensor] = field(repr=False)
    weights: Tensor = field(repr=False)
    rows: Mapping[str, Tensor] = field(repr=False)
    touched: Mapping[str, Tensor] = field(repr=False)
    values: Mapping[str, Tensor] = field(repr=False)
    begins: Mapping[str, Ints] = field(repr=False)
    owner: Tensor = field(repr=False)
    whole: Mapping[str, int] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def values_of(self, client: int) -> dict[str, Floats]:
        """A client's rows as they are now, a copy in the layout of `PreparedJob.values`."""
        held = self.clients[client].values
        return {
            name: self.values[name][begin : begin + len(held[name])].numpy().copy()
            for name, begin in ((name, int(begins[client])) for name, begins in self.begins.items())
        }

    def losses_of(self, client: int, losses: Tensor) -> Floats:
        """The losses of a client's examples, out of those of all steps."""
        own = slice(int(self.first[client]), int(self.first[client + 1]))
        kept: Floats = losses[own][self.weights[own] > 0].numpy()
        return kept


def lay_out(
    bound: BoundModel,
    training: LocalTraining,
    clients: Sequence[PreparedJob],
    *,
    dtype: torch.dtype = torch.float32,
    trim: bool = True,
) -> Steps:
    """The steps of these clients, none of which is without examples."""
    which, weights, first = _batches(training, clients)
    owner = np.repeat(np.arange(len(clients)), np.diff(first))
    sizes = np.cumsum([0, *(p.examples for p in clients)])
    which += sizes[owner][:, None]
    which = np.concatenate([which, which[:1]])  # the idle step
    weights = np.concatenate([weights, np.ones_like(weights[:1])])
    owner = np.append(owner, 0)
    left = columns(bound, clients, trim=trim)
    fields: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    touched: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    begins: dict[str, Ints] = {}
    whole: dict[str, int] = {}
    shared: dict[str, Tensor] = {}
    for group in table_groups(bound):
        name = group.tables[0].name
        held = np.array([len(p.values[name]) for p in clients])
        begin = np.cumsum([0, *(held + 1)])
        batches = {f: left.pop(f)[which] for f in group.fields}
        if any(table.candidates for table in group.tables):
            most = _rounded_up(int(held.max()))
            places = {f: batch.astype(np.int32) for f, batch in batches.items()}
            at: Ints | None = None
            whole.update({table.name: most for table in group.tables})
            shared[CANDIDATES] = _weights([p.shared[CANDIDATES] for p in clients], most)
        else:
            least = 1 << int(held.max() - 1).bit_length()
            places, listed = distinct_rows(batches, least)
            # What is listed is a position among the client's rows; the row after them is of zeros.
            at = np.where(listed < 0, held[owner][:, None], listed) + begin[owner][:, None]
            at[-1] = begin[-1]
        for own, place in places.items():
            fields[own] = torch.from_numpy(place)
        for table in group.tables:
            if at is not None:
                rows[table.name] = torch.from_numpy(at)
            begins[table.name] = begin
            values[table.name] = _stacked([p.values[table.name] for p in clients]).to(dtype)
            named = set(table.fields) == set(group.fields) and table.name not in whole
            if training.weight_decay and not (named or table.candidates):
                size = whole[table.name] if at is None else at.shape[1]
                touched[table.name] = _named([places[f] for f in table.fields], size)
    for own, column in left.items():
        gathered = tensor(column[which])
        fields[own] = gathered.to(dtype) if gathered.is_floating_point() else gathered
    return Steps(
        clients,
        first,
        fields,
        torch.from_numpy(weights).to(dtype),
        rows,
        {name: mark.to(dtype) for name, mark in touched.items()},
        values,
        begins,
        torch.from_numpy(np.append(owner[:-1], len(clients))),
        whole,
        {name: weights.to(dtype) for name, weights in shared.items()},
    )


def _rounded_up(size: int) -> int:
    """The number of candidates rounded up, so that few different sizes occur."""
    step = max(FEW_SHAPES, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def _weights(clients: Sequence[Floats], size: int) -> Tensor:
    """The candidates' weights of each client, and of the idle slots; what fills up has none."""
    found = torch.full((len(clients) + 1, size), -float("inf"))
    for at, weights in enumerate(clients):
        found[at, : len(weights)] = torch.from_numpy(weights)
    found[-1] = 0.0
    return found


def _batches(training: LocalTraining, clients: Sequence[PreparedJob]) -> tuple[Ints, Floats, Ints]:
    """Each step's examples (of its own client), their weights, and each client's first step."""
    which, weights, first = [], [], [0]
    for prepared in clients:
        n, size = prepared.examples, training.batch
        steps = -(-n // size)
        weight = np.zeros((steps, size), np.float32)
        weight.reshape(-1)[:n] = 1.0
        for epoch in range(training.epochs):
            shuffled = order(prepared.job.coins, epoch, n)
            batches = np.empty((steps, size), np.int64)
            batches.reshape(-1)[:n] = shuffled
            batches[-1] = np.where(weight[-1] > 0, batches[-1], shuffled[(steps - 1) * size])
            which.append(batches)
            weights.append(weight)
        first.append(first[-1] + steps * training.epochs)
    return np.concatenate(which), np.concatenate(weights), np.array(first)


def columns(
    bound: BoundModel, clients: Sequence[PreparedJob], *, trim: bool
) -> dict[str, npt.NDArray[Any]]:
    """The clients' columns, one after the other; sequences of ids only as long as any of them is.

    Lengths are rounded up to a quarter of the full one, so that few shapes occur. A length is left
    as it is where a column that holds no ids has it too: the module may want both to agree.
    """
    ids = {f for table in bound.tables for f in table.fields}
    found: dict[str, npt.NDArray[Any]] = {}
    for name in clients[0].batch:
        parts = [p.batch[name] for p in clients]
        if name in ids and parts[0].ndim == 2:
            longest = max(part.shape[1] for part in parts)
            parts = [
                part
                if part.shape[1] == longest
                else np.pad(part, ((0, 0), (0, longest - part.shape[1])), constant_values=NONE)
                for part in parts
            ]
        if len({part.shape[1:] for part in parts}) > 1:
            raise ConfigError(
                f"field {name!r} has another shape at another client",
                hint="a feature needs one shape; only sequences of ids may differ in length",
            )
        found[name] = np.concatenate(parts)
    if not trim:
        return found
    fixed = {c.shape[1] for f, c in found.items() if f not in ids and c.ndim > 1}
    for full in {found[f].shape[1] for f in ids if found[f].ndim == 2} - fixed:
        same = [f for f in ids if found[f].ndim == 2 and found[f].shape[1] == full]
        used = max(_length(found[f]) for f in same)
        quarter = -(-full // 4)
        length = min(full, max(1, -(-used // quarter)) * quarter)
        found.update({f: found[f][:, :length] for f in same})
    return found


def _length(ids: npt.NDArray[Any]) -> int:
    """How many columns there are up to the last that holds an id."""
    held = np.flatnonzero((ids >= 0).any(axis=0))
    return int(held[-1]) + 1 if held.size else 0


def distinct_rows(
    batches: Mapping[str, npt.NDArray[Any]], least: int
) -> tuple[dict[str, npt.NDArray[np.int32]], Ints]:
    """Each step's rows, ascending and once each (-1 fills up), and its ids as places among them.

    No step has more than `least` rows to list, nor more than it has ids. One sort per step: the
    column rides along in the low digits of the key.
    """
    parts = {name: batch.reshape(len(batch), -1) for name, batch in batches.items()}
    at = np.concatenate(list(parts.values()), axis=1)
    steps, width = at.shape
    absent = int(at.max(initial=0)) + 1
    kind = np.int32 if (absent + 1) * width < 2**31 else np.int64
    keys: npt.NDArray[Any] = np.where(at < 0, absent, at).astype(kind)
    keys *= width
    keys += np.arange(width, dtype=kind)
    keys.sort(axis=1)
    column = keys % width
    keys //= width
    rank = np.zeros(keys.shape, np.int32)
    np.cumsum(keys[:, 1:] != keys[:, :-1], axis=1, dtype=np.int32, out=rank[:, 1:])
    # Equal keys have equal ranks and write the same; "none" comes last, and is not a row.
    most = min(width, least)
    listed = np.full((steps, most + 1), NONE, np.int64)
    there = keys < absent
    np.put_along_axis(listed, rank, np.where(there, keys, NONE), axis=1)
    place = np.empty(at.shape, np.int32)
    np.put_along_axis(place, column, np.where(there, rank, NONE), axis=1)
    ends = np.cumsum([part.shape[1] for part in parts.values()])[:-1]
    split = dict(zip(parts, np.split(place, ends, axis=1), strict=True))
    return {
        name: np.ascontiguousarray(p).reshape(batches[name].shape) for name, p in split.items()
    }, listed[:, :most]


def _stacked(parts: Sequence[Floats]) -> Tensor:
    """Clients' rows one after the other, each followed by a row of zeros; and the idle step's."""
    zero = np.zeros((1, parts[0].shape[1]), np.float32)
    return torch.from_numpy(np.concatenate([*(r for part in parts for r in (part, zero)), zero]))


def _named(places: Sequence[npt.NDArray[np.int32]], size: int) -> Tensor:
    """1 for each listed row that these ids name, else 0; shape (steps, R, 1)."""
    mark = np.zeros((len(places[0]), size + 1, 1), np.float32)
    for place in places:
        np.put_along_axis(
            mark[..., 0], place.reshape(len(place), -1).astype(np.int64) % (size + 1), 1.0, axis=1
        )
    return torch.from_numpy(mark[:, :size])
