"""NoisyVectorised: training with noise, all groups of a batch at once and small clients together.

`torch.func` gives every group a gradient of its own: for the dense part, and for the rows that this
group names and no others, so that memory goes by the rows touched and an id that occurs twice in a
group adds up in one row before the norm is taken. What a step is stands in `noisy/steps.py`; state
and noise of a client are `noisy/client.py`'s, as in the reference.

A batch of more groups than fit takes several passes, whose sums are added up. Nothing is compiled:
the number of groups is another in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from tessera.crypto.secret import Secret
from tessera.data.examples import NONE
from tessera.learning.bound_model import BoundModel
from tessera.learning.cohort.learner import single_threaded
from tessera.learning.cohort.plan import TableGroup, columns, distinct_rows, groups
from tessera.learning.cohort.step import REFUSALS, Tensors, one_line, quietly
from tessera.learning.local import (
    Job,
    Loss,
    Trained,
    click_loss,
    dropout_seed,
    tensor,
    train_mode,
)
from tessera.learning.local_training import LocalTraining
from tessera.learning.noisy.client import NoisyClient, at_hand, fresh_rows
from tessera.learning.noisy.clipped import client_kind
from tessera.learning.noisy.local import NoisySequential
from tessera.learning.noisy.steps import SHORTER, Ints, NoisySteps, StepBatch

AT_ONCE: Final = 1 << 22
"""Values of gradients at a time, over clients and groups: 16 MB, most of it in the cache."""
ROWS_AT_ONCE: Final = 1 << 25
"""Values of all rows of clients side by side: 128 MB."""
SLOTS: Final = 20
LARGEST: Final = 1 << 31
CLIENTS: Final = 3
STEPS: Final = 3
LITTLE: Final = 1e-2
"""Clients, steps and noise of the comparison with the reference."""
TOLERANCE: Final = 1e-3
"""Of the largest delta, between both ways: a value may be cut to the integer beside."""


class NoisyVectorised:
    """Trains some clients side by side, and all groups of each; `best_noisy` says when."""

    name = "vectorised, with noise"

    def __init__(
        self,
        module: nn.Module,
        bound: BoundModel,
        loss: Loss | None,
        training: LocalTraining,
        noisy: NoisySteps,
        *,
        reason: str = "",
    ) -> None:
        self.module, self.bound, self.loss = module, bound, loss or click_loss
        self.training, self.noisy, self.reason = training, noisy, reason
        self._one = self._group_gradient()
        self._sums = torch.int32

    def train(self, jobs: Sequence[Job], *, round_id: int, seed: int) -> list[Trained]:
        """The jobs' outcomes, in their order."""
        done: list[Trained] = []
        side_by_side = self.side_by_side(jobs)
        first = jobs[0].client if jobs else 0
        with train_mode(self.module), dropout_seed(seed, round_id, first), single_threaded():
            for begin in range(0, len(jobs), side_by_side):
                some = SideBySide.begin(self, jobs[begin : begin + side_by_side], round_id)
                for _ in range(self.noisy.steps):
                    self.step(some)
                for client in some.clients:
                    client.end()
                    done.append(client.outcome(self.bound))
        return done

    def side_by_side(self, jobs: Sequence[Job]) -> int:
        """As many clients as leave each a whole batch in one pass, and whose rows are not too many.

        All rows of a client are at hand, which may be whole tables.
        """
        size = 1 + self.bound.dense_size
        rows = max(
            (sum(p.values.size for p in j.submodel.tables.values()) for j in jobs), default=0
        )
        fits = min(AT_ONCE // (size * 2 * self.noisy.batch), ROWS_AT_ONCE // (1 + rows))
        return max(1, min(SLOTS, len(jobs), fits))

    def step(self, some: SideBySide) -> None:
        """One step of every client."""
        drawn = [client.draw() for client in some.clients]
        if not any(each.many for each in drawn):  # noise alone
            for client in some.clients:
                client.take(torch.zeros(self.bound.dense_size, dtype=self._sums), {})
            return
        batch = some.laid_out(drawn)
        for name, touched in batch.touched.items():
            for client, rows in zip(some.clients, touched, strict=True):
                client.settle(name, rows)
        # No sum of integers is larger than all groups' longest contributions.
        self._sums = torch.int32 if batch.many * self.noisy.longest < LARGEST else torch.int64
        dense = torch.zeros(len(drawn), self.bound.dense_size, dtype=self._sums)
        sums = {
            name: torch.zeros(1 + sum(map(len, rows)), some.values[name].shape[1], dtype=self._sums)
            for name, rows in batch.touched.items()
        }
        size = 1 + self.bound.dense_size
        size += sum(x.shape[2] * some.values[name].shape[1] for name, x in batch.listed.items())
        at_once = max(1, AT_ONCE // (len(drawn) * size))
        for begin in range(0, batch.many, at_once):
            self._add(some, batch.pass_of(begin, begin + at_once), dense, sums)
        for at, client in enumerate(some.clients):
            own = {}
            for name, touched in batch.touched.items():
                start = sum(map(len, touched[:at]))
                own[name] = touched[at], sums[name][start : start + len(touched[at])]
            client.take(dense[at], own)

    def _add(self, some: SideBySide, batch: LaidOut, dense: Tensor, sums: Tensors) -> None:
        """Add what the groups of one pass give."""
        held = {
            name: some.values[name].index_select(0, at.reshape(-1)).view(*at.shape, -1)
            for name, at in batch.listed.items()
        }
        ups, losses = self._gradients(some.views(self.bound), held, batch.fields, batch.weights)
        found = self._cut(ups, batch.weights)
        there = batch.weights > 0
        for at, client in enumerate(some.clients):
            client.losses.append(losses[at][there[at]])
            client.not_finite += int((~found.finite[at] & there[at].any(-1)).sum())
        dense += found.dense
        for name, total in sums.items():
            part = found.rows[name].flatten(0, 2).to(self._sums)
            total.index_add_(0, batch.places[name].reshape(-1), part)

    # --- gradients ------------------------------------------------------------------------------

    def _group_gradient(self) -> Any:
        """(dense, rows, batch, weights) of one group -> its gradients, and the losses."""
        module, loss = self.module, self.loss
        parameter = {table.name: table.parameter for table in self.bound.tables}

        def summed(
            dense: Tensors, rows: Tensors, batch: Tensors, weights: Tensor
        ) -> tuple[Tensor, Tensor]:
            parameters = {**dense, **{parameter[name]: held for name, held in rows.items()}}
            losses = loss(functional_call(module, parameters, (batch,)), batch)
            return torch.where(weights > 0, losses, 0.0).sum(), losses.detach()

        return grad_and_value(summed, argnums=(0, 1), has_aux=True)

    def _gradients(
        self, dense: Tensors, rows: Tensors, batch: Tensors, weights: Tensor
    ) -> tuple[tuple[Tensors, Tensors], Tensor]:
        """Gradients of all groups (clients, groups, ...), and losses."""
        of_groups = vmap(self._one, in_dims=(None, 0, 0, 0), randomness="different")
        if len(weights) > 1:
            ups, (_, losses) = vmap(of_groups, randomness="different")(dense, rows, batch, weights)
            return ups, losses
        alone = [{name: x[0] for name, x in part.items()} for part in (dense, rows, batch)]
        ups, (_, losses) = of_groups(*alone, weights[0])
        first, second = ({name: x[None] for name, x in part.items()} for part in ups)
        return (first, second), losses[None]

    def _cut(self, ups: tuple[Tensors, Tensors], weights: Tensor) -> CutGradients:
        """Scaled down to the clip, in integers towards zero; groups that are not there are zeros.

        Towards zero: so no contribution becomes longer, and the sum's sensitivity is the clip.
        """
        noisy = self.noisy
        dense, rows = ups
        if noisy.only_clips:
            for name, up in rows.items():
                up.mul_(0.0 if self.bound[name].local else noisy.row_weight)
        square = torch.zeros(weights.shape[:2])
        for up in (*dense.values(), *rows.values()):
            square += torch.linalg.vector_norm(up.flatten(2), dim=2).square()
        finite = torch.isfinite(square)
        scale = (noisy.clip / torch.sqrt(square)).clamp(max=1.0) * (SHORTER / noisy.unit)
        kept = finite & (weights > 0).any(-1)
        if not bool(kept.all()):
            scale = torch.where(kept, scale, 0.0)
            for up in (*dense.values(), *rows.values()):
                up[~finite] = 0.0
        cut = {name: up.mul_(_along(scale, up)).int() for name, up in (dense | rows).items()}
        parts = [cut[name].sum(1, dtype=self._sums).flatten(1) for name in dense]
        return CutGradients(
            torch.cat([torch.empty(len(weights), 0, dtype=self._sums), *parts], 1),
            {name: cut[name] for name in rows},
            finite,
        )


@dataclass(frozen=True, slots=True)
class CutGradients:
    """In integers: sums over groups for the dense part (clients, values), and each group's rows."""

    dense: Tensor = field(repr=False)
    rows: Tensors = field(repr=False)
    finite: Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A step's batches: fields (clients, groups, examples of a group, ...), their weights 0 or 1.

    Of each group `listed` has the rows that it names, among those of all clients, and `places`
    where they are among the rows that any group touches; one beyond for what only fills up.
    """

    fields: Tensors = field(repr=False)
    weights: Tensor = field(repr=False)
    listed: Tensors = field(repr=False)
    places: Tensors = field(repr=False)
    touched: Mapping[str, Sequence[Ints]] = field(repr=False)

    @property
    def many(self) -> int:
        return self.weights.shape[1]

    def pass_of(self, begin: int, end: int) -> LaidOut:
        """Some of the groups."""
        fields, listed, places = (
            {name: x[:, begin:end] for name, x in part.items()}
            for part in (self.fields, self.listed, self.places)
        )
        return LaidOut(fields, self.weights[:, begin:end], listed, places, self.touched)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Clients with what they share: columns one after the other, dense parts, and rows.

    `first` is where a client's examples begin in the columns, `begins` where its rows do. Each
    client has views of its own part of dense parts and rows.
    """

    clients: Sequence[NoisyClient]
    tables: Sequence[TableGroup]
    columns: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    first: Ints
    dense: Tensor = field(repr=False)
    values: Tensors = field(repr=False)
    begins: Mapping[str, Ints] = field(repr=False)

    @classmethod
    def begin(cls, learner: NoisyVectorised, jobs: Sequence[Job], round_id: int) -> SideBySide:
        bound = learner.bound
        prepared = [at_hand(bound, job) for job in jobs]
        dense = torch.empty(len(jobs), bound.dense_size)
        values, begins = {}, {}
        for table in bound.tables:
            parts = [fresh_rows(p, table.name) for p in prepared]
            begins[table.name] = np.cumsum([0, *map(len, parts)])
            values[table.name] = torch.from_numpy(
                parts[0] if len(parts) == 1 else np.concatenate(parts)
            )
        clients = []
        for at, p in enumerate(prepared):
            dense[at] = torch.from_numpy(np.array(p.job.submodel.dense, np.float32))
            rows = {n: x[begins[n][at] : begins[n][at + 1]] for n, x in values.items()}
            clients.append(
                client_kind(learner.noisy)(
                    p,
                    learner.training,
                    learner.noisy,
                    round_id=round_id,
                    dense=dense[at],
                    rows=rows,
                )
            )
        first = np.cumsum([0, *(p.examples for p in prepared)])
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

    def laid_out(self, drawn: Sequence[StepBatch]) -> LaidOut:
        """The clients' batches in one shape; a group or an example that is not there weighs 0."""
        many = max(each.many for each in drawn)
        sizes = [np.bincount(each.groups, minlength=each.many) for each in drawn]
        most = max((int(size.max()) for size in sizes if size.size), default=1)
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
        places: Tensors = {}
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
                places[table.name] = torch.from_numpy(back)
                touched[table.name] = [
                    distinct[ends[c] : ends[c + 1]] - begins[c] for c in range(len(drawn))
                ]
        tensors = {name: tensor(x) for name, x in (fields | left).items()}
        tensors |= {f: tensors[f].long() for f in fields}
        return LaidOut(tensors, torch.from_numpy(weights), listed, places, touched)


def _along(scale: Tensor, up: Tensor) -> Tensor:
    return scale.reshape(*scale.shape, *[1] * (up.dim() - 2))


def best_noisy(
    module: nn.Module,
    bound: BoundModel,
    loss: Loss | None,
    training: LocalTraining,
    noisy: NoisySteps,
    *,
    sample: Sequence[Job],
) -> NoisySequential | NoisyVectorised:
    """The vectorised way, if a few clients come out as in the reference; else the reference.

    Both draw the same batches and noise. For the comparison there is little noise, and the
    secrets are nobody's.
    """
    little = noisy if noisy.only_clips else replace(noisy, noise=LITTLE, steps=STEPS)
    slow = NoisySequential(module, bound, loss, training, little)
    fast = NoisyVectorised(module, bound, loss, training, little)
    few = [
        replace(job, client=at, secret=Secret(bytes([at] * 32)))
        for at, job in enumerate(sample[:CLIENTS])
    ]
    expected = slow.train(few, round_id=0, seed=0)
    with quietly():
        try:
            found = fast.train(few, round_id=0, seed=0)
        except REFUSALS as error:
            why = f"it cannot be vectorised over groups ({one_line(error)})"
            return NoisySequential(module, bound, loss, training, noisy, reason=why)
    largest, off = 0.0, 0.0
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(_arrays(one), _arrays(other), strict=True):
            largest = max(largest, float(np.abs(a).max(initial=0.0)))
            off = max(off, float(np.abs(a - b).max(initial=0.0)))
    if not off <= TOLERANCE * max(largest, 1e-6):
        why = (
            f"vectorised it trains differently than one by one (by {off:.1g} of {largest:.1g}): "
            "does it take statistics of the batch, or draw random numbers?"
        )
        return NoisySequential(module, bound, loss, training, noisy, reason=why)
    why = "all groups at once it trains as one by one does"
    return NoisyVectorised(module, bound, loss, training, noisy, reason=why)


def _arrays(trained: Trained) -> Iterator[npt.NDArray[Any]]:
    yield trained.update.dense
    for name in sorted(trained.update.tables):
        yield trained.update.tables[name].values
    for name in sorted(trained.local):
        yield trained.local[name].values
