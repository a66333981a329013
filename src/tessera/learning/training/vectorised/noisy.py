"""SideBySide: clients that take noisy steps together, and LaidOut, a step's batches in one shape.

Groups differ in number from step to step and in size from one to the next. They are filled up to
one shape, with groups and examples that weigh nothing: as small a shape as holds them, or for a
compiled step one of a few fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from tessera.data.examples import NONE
from tessera.learning.bound_model import BoundModel, TableGroup, table_groups
from tessera.learning.training.jobs import Job, Trainable, Trained, tensor
from tessera.learning.training.local import NoisySequential, dropout_from, train_mode
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
from tessera.learning.training.vectorised.batches import columns, distinct_rows
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.learning.training.vectorised.step import Compiled, Tensors, along


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
        model: Trainable,
        noisy: NoisySteps,
        jobs: Sequence[Job],
        *,
        round_id: int,
        width: int,
    ) -> SideBySide:
        """These jobs' clients, in `width` places."""
        bound, training = model.bound, model.training
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
        return cls(clients, table_groups(bound), stacked, first, dense, values, begins)

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

        With `places` it is a whole number of passes over this many examples of a client, in groups
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


# --- group step -----------------------------------------------------------------------------------
#
# Gradients of all groups of a batch at once, each cut to the clip: the inner part of a noisy step.
#
# `torch.func` gives every group a gradient of its own: for the dense part, and for the rows that
# this group names and no others, so that memory goes by the rows touched and an id that occurs
# twice in a group adds up in one row before the norm is taken. Every group's gradient is cut to
# integers before anything is added up. Norms from the layers' inputs alone ("ghost clipping")
# would save the gradients themselves, but their sum would be rounded once for all groups: then one
# group could move more than itself, and the sensitivity would not be the clip.
#
# The function made here has no state and does not look at values to choose its way when it is
# compiled, so that `step.Compiled` takes it as it takes a step without noise.


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


def group_step(model: Trainable, noisy: NoisySteps, sums: torch.dtype) -> GroupStep:
    """The function for this module; `sums` is the integer type that holds a sum over groups.

    Of what the plan says only the clip and the weight of rows are built in.
    """
    module, bound, loss = model.module, model.bound, model.loss
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
            ups = {name: torch.where(along(finite, up), up, 0.0) for name, up in ups.items()}
        # Towards zero: so no contribution becomes longer, and the sum's sensitivity is the clip.
        cut = {name: up.mul_(along(scale, up)).int() for name, up in ups.items()}
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


# --- noisy ----------------------------------------------------------------------------------------
#
# NoisyVectorised: training with noise, all groups of a batch at once and small clients together.
#
# What a step is stands in `noisy_steps.py`, as do state and noise of a client,
# as in the reference; the gradients are `group_step`'s. A batch of more groups than fit takes
# several passes, whose sums are added up.
#
# The number of groups is another in every step, and a step compiled for each would never pay. So a
# compiled pass has a fixed number of examples, a little over the expected batch: few batches need
# a second, and what only fills up weighs nothing.


AT_ONCE: Final = 1 << 22
"""Values of gradients at a time, over clients and groups: 16 MB, most of it in the cache."""
ROWS_AT_ONCE: Final = 1 << 25
"""Values of all rows of clients side by side: 128 MB."""
SLOTS: Final = 20
LARGEST: Final = 1 << 31


class NoisyVectorised:
    """Trains some clients side by side, and all groups of each; `best_noisy` says when."""

    def __init__(
        self,
        model: Trainable,
        noisy: NoisySteps,
        *,
        compile: bool = False,
        reason: str = "",
        raises: bool = False,
    ) -> None:
        """`raises`: an error of the module is raised, and no group's; see `NoisySequential`."""
        self.name = "compiled, with noise" if compile else "vectorised, with noise"
        self.model, self.noisy = model, noisy
        self.reason, self.raises = reason, raises
        self._compile = compile
        self._eager: dict[torch.dtype, GroupStep] = {}
        self._made: dict[tuple[object, ...], GroupStep] = {}

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """The jobs' outcomes, in their order."""
        done: list[Trained] = []
        side_by_side = self.side_by_side(jobs)
        if not jobs:
            return done
        with train_mode(self.model.module), dropout_from(jobs[0].coins), single_threaded():
            for begin in range(0, len(jobs), side_by_side):
                own = jobs[begin : begin + side_by_side]
                try:
                    done += self._train(own, round_id, side_by_side)
                except Exception:
                    if self.raises:
                        raise
                    # Nothing has left yet. The reference draws the same, group after group.
                    alone = NoisySequential(self.model, self.noisy)
                    done += alone.train(own, round_id=round_id)
        return done

    def _train(self, jobs: Sequence[Job], round_id: int, width: int) -> list[Trained]:
        """Some jobs side by side; in `width` places if the shape is to stay the same."""
        some = SideBySide.begin(
            self.model,
            self.noisy,
            jobs,
            round_id=round_id,
            width=width if self._compile else len(jobs),
        )
        for _ in range(self.noisy.steps):
            self.step(some)
        for client in some.clients:
            client.end()
        return [client.outcome(self.model.bound) for client in some.clients]

    def side_by_side(self, jobs: Sequence[Job]) -> int:
        """As many clients as leave each a whole batch in one pass, and whose rows are not too many.

        All rows of a client are at hand, which may be whole tables. Compiled: 1, 2, 4, ... clients,
        for few different shapes.
        """
        size = 1 + self.model.bound.dense_size
        rows = max(
            (sum(p.values.size for p in j.submodel.tables.values()) for j in jobs), default=0
        )
        fits = min(AT_ONCE // (size * 2 * self.noisy.batch), ROWS_AT_ONCE // (1 + rows))
        most = max(1, min(SLOTS, len(jobs), fits))
        return 1 << (most.bit_length() - 1) if self._compile else most

    def step(self, some: SideBySide) -> None:
        """One step of every client."""
        drawn = [client.draw() for client in some.clients]
        if not any(each.many for each in drawn):  # noise alone
            for client in some.clients:
                client.take(torch.zeros(self.model.bound.dense_size, dtype=torch.int32), {})
            return
        width = len(some.dense)
        places = self.places(width) if self._compile else 0
        batch = some.laid_out(drawn, places)
        for name, touched in batch.touched.items():
            for client, rows in zip(some.clients, touched, strict=True):
                client.settle(name, rows)
        # No sum of integers is larger than all groups' longest contributions.
        kind = torch.int32 if batch.many * self.noisy.longest < LARGEST else torch.int64
        dense = torch.zeros(width, self.model.bound.dense_size, dtype=kind)
        sums = {
            name: torch.zeros(1 + sum(map(len, rows)), some.values[name].shape[1], dtype=kind)
            for name, rows in batch.touched.items()
        }
        size = 1 + self.model.bound.dense_size
        size += sum(x.shape[2] * some.values[name].shape[1] for name, x in batch.listed.items())
        fits = places // batch.weights.shape[2] if places else AT_ONCE // (width * size)
        at_once = max(1, fits)
        for begin in range(0, batch.many, at_once):
            self._add(some, batch.pass_of(begin, begin + at_once), dense, sums)
        for at, client in enumerate(some.clients):
            own = {}
            for name, touched in batch.touched.items():
                start = sum(map(len, touched[:at]))
                own[name] = touched[at], sums[name][start : start + len(touched[at])]
            client.take(dense[at], own)

    def places(self, clients: int) -> int:
        """Examples of a client in a compiled pass: the plan's batch and 1.4 deviations more."""
        size = (1 + self.model.bound.dense_size) * clients
        return max(1, min(self.noisy.batch + isqrt(2 * self.noisy.batch), AT_ONCE // size))

    def _add(self, some: SideBySide, batch: LaidOut, dense: Tensor, sums: Tensors) -> None:
        """Add what the groups of one pass give."""
        held = {
            name: some.values[name].index_select(0, at.reshape(-1)).view(*at.shape, -1)
            for name, at in batch.listed.items()
        }
        step = self.step_for(batch, held, dense.dtype)
        total, cut, finite, losses = step(
            some.views(self.model.bound),
            held,
            batch.fields,
            batch.weights,
            torch.tensor(self.noisy.unit),
        )
        there = batch.weights > 0
        for at, client in enumerate(some.clients):
            client.losses.append(losses[at][there[at]])
            client.not_finite += int((~finite[at] & there[at].any(-1)).sum())
        dense += total
        for name, sum_of in sums.items():
            part = cut[name].flatten(0, 2).to(dense.dtype)
            sum_of.index_add_(0, batch.among[name].reshape(-1), part)

    def step_for(self, batch: LaidOut, held: Tensors, kind: torch.dtype) -> GroupStep:
        """The function for a pass of this shape; compiled when it is first run, if it can be."""
        if kind not in self._eager:
            self._eager[kind] = group_step(self.model, self.noisy, kind)
        if not self._compile:
            return self._eager[kind]
        arrays = [*batch.fields.items(), *held.items()]
        each = tuple((name, tuple(x.shape), x.dtype) for name, x in arrays)
        shape = (kind, tuple(batch.weights.shape), each)
        if shape not in self._made:
            what = f"; not compiled for {tuple(batch.weights.shape)} examples"
            self._made[shape] = Compiled(self._eager[kind], lambda why: self._note(what, why))
        return self._made[shape]

    def _note(self, what: str, why: str) -> None:
        self.reason += f"{what} ({why})"
