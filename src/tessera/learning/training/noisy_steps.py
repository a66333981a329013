"""NoisySteps: how a client trains with noise; and batches of groups that are clipped together.

A step, in words. Some of the client's examples are drawn by its own coins. They fall into groups:
at item level every example is one, at subject level those of one person are. The gradients of a
group's losses are added up, over the dense part, all rows and local rows together, and scaled down
to `clip` if they are longer: a group without a finite gradient counts as zeros. What the groups
give is added up, noise of deviation `noise` times `clip` is added to every value of the dense part
and of **every row at hand**, and the step is the rate times that, over the plan's batch: not over
the number of examples that were drawn, which must stay secret.

To draw otherwise, write another `Drawing`. It is handed the client's prepared examples (with their
subjects, where they have some) and the coins of the round, and gives the batch of one step. It may
not use any other randomness, nor give a group that holds two units of the privacy claimed.

    def whole_shops(prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        shop = prepared.batch["shop"]
        ...
        return StepBatch(which, groups)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.crypto.noise import DEVIATION, Gaussian, Narrow, dense_noise, row_noise
from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import BoundModel
from tessera.learning.tables.submodel import Floats, ModelUpdate, TablePart, TableUpdate
from tessera.learning.training.jobs import Job, PreparedJob, Trained, nothing_of
from tessera.learning.training.settings import LocalTraining

Ints = npt.NDArray[np.int64]

LEAST_NOISE: Final = 1e-3
"""With less, contributions would not fit the integers that noise comes in."""
FINEST: Final = 2**20
"""Integers per clip where there is no noise."""
SHORTER: Final = 1.0 - 1e-5
"""Contributions are cut to this much of the clip: their length is found in single precision."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's batch: which examples, and the group of each, numbered from 0 in ascending order.

    Examples of one group stand side by side. `draws` says how many times the plan's noise this step
    adds to every value: 1, but where noise goes by the batch, as printed in a paper. `most` is then
    the most examples of one person in it.
    """

    which: Ints = field(repr=False)
    groups: Ints = field(repr=False)
    draws: int = 1
    most: int = 0

    def __post_init__(self) -> None:
        if self.which.shape != self.groups.shape or self.which.ndim != 1:
            raise MisuseError("a batch has one group for each of its examples")
        steps = np.diff(self.groups, prepend=-1)
        if self.groups.size and not (((steps == 0) | (steps == 1)).all() and self.groups[0] == 0):
            raise MisuseError("groups of a batch are numbered from 0, one after the other")

    @property
    def many(self) -> int:
        """How many groups there are."""
        return int(self.groups[-1]) + 1 if self.groups.size else 0

    @classmethod
    def grouped(cls, which: Ints, of: Ints) -> StepBatch:
        """These examples, those with the same number in `of` in one group."""
        order = np.argsort(of, kind="stable")
        _, groups = np.unique(of[order], return_inverse=True)
        return cls(which[order].astype(np.int64), groups.astype(np.int64))


Drawing: TypeAlias = Callable[[PreparedJob, CoinStream], StepBatch]
"""Draws one step's batch; called once for every step, in order."""


@dataclass(frozen=True, slots=True)
class EachExample:
    """Item level: every example by a coin of its own, and by itself."""

    probability: float

    def __call__(self, prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        which = np.flatnonzero(coins.heads(prepared.examples, self.probability))
        return StepBatch(which, np.arange(which.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisySteps:
    """What a plan says about training with noise; none of it follows from the data.

    `batch` divides every step: it is the number of examples that a batch is to have. A `noise` of 0
    is that of a client who only clips, for noise that others add to the sum: it takes one step, in
    which local rows stay as they are, and of which it clips what it will send. There rows weigh
    `row_weight` times their gradient beside the dense part.
    """

    clip: float
    noise: float
    steps: int
    batch: int
    drawing: Drawing
    row_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.only_clips and self.steps != 1:
            raise MisuseError(f"a sum of {self.steps} steps without noise protects no example")
        if not self.only_clips and not self.noise >= LEAST_NOISE:
            raise ConfigError(
                f"noise = {self.noise:g} times the clip is as good as none",
                hint=f"use {LEAST_NOISE:g} or more; privacy begins far above it",
            )

    @property
    def only_clips(self) -> bool:
        return self.noise == 0.0

    @property
    def unit(self) -> float:
        """The value that one integer of noise stands for (`crypto/noise.py`), or of a sum."""
        return self.clip / FINEST if self.only_clips else self.clip * self.noise / DEVIATION

    @property
    def longest(self) -> float:
        """A group's contribution in integers is at most this long."""
        return self.clip / self.unit


# --- client ---------------------------------------------------------------------------------------
#
# NoisyClient: one client in training with noise, which is applied to rows lazily.
#
# Noise goes to every row at hand in every step, but nobody looks at a row between the steps that
# read it. So for a row that no example touches only the steps are counted: its noise is drawn in
# one, with the variance of all of them, before it is next read or when the client ends (arXiv
# 2404.08847). The noise that a step itself adds to the rows it touches is drawn with the step.
#
# All randomness follows from one secret of the client and round: the coins, the dense part's noise
# and that of each table, a stream each.


ROWS_AT_ONCE: Final = 1 << 16
"""Rows that are looked at together: what is made of all would be as large as the table."""


def at_hand(bound: BoundModel, job: Job) -> PreparedJob:
    """A job with all its rows, whether an example needs them or not: every one gets noise.

    Rows are as in `prepare`, and the values are those of the job, not copied. Every row counts
    once, whatever examples there are.
    """
    trained = job.submodel.trained
    examples = bound.cut(job.examples, trained)
    parts = {t.name: (job.local if t.local else job.submodel.tables)[t.name] for t in bound.tables}
    rows = {t.name: parts[t.name].ids if t.local else trained[t.name] for t in bound.tables}
    return PreparedJob(
        job,
        bound.positions(examples, rows),
        len(examples),
        rows,
        {
            name: part.values if len(part.ids) == len(rows[name]) else part.of(rows[name])
            for name, part in parts.items()
        },
        {name: np.ones(len(ids), np.int64) for name, ids in rows.items()},
        {name: np.arange(len(ids)) for name, ids in rows.items()},
    )


def fresh_rows(prepared: PreparedJob, name: str) -> Floats:
    """A table's rows to begin with, a copy; one at least, which a module may look up for no id."""
    values = prepared.values[name]
    if not len(values):
        return np.zeros((1, values.shape[1]), np.float32)
    return np.array(values, np.float32)


class NoisyClient:
    """Dense part and rows of one client, changed in place, with the noise still due to its rows.

    `dense` is one vector and `rows` a tensor for each table, both float32. A local table that is
    not among them gets no noise.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        training: LocalTraining,
        noisy: NoisySteps,
        *,
        round_id: int,
        dense: Tensor,
        rows: Mapping[str, Tensor],
    ) -> None:
        secret = prepared.job.coins
        self.prepared, self.noisy = prepared, noisy
        self.dense, self.rows = dense, rows
        self.step = 0
        self.most = 0  # of the batches so far, where someone asks
        self._draws, self._drawn = 1, 0  # times the noise: of this step, and of all before
        self.not_finite = 0  # groups whose gradient was not, in all steps
        self.losses: list[Tensor] = []
        rate = training.rate_in(round_id) / noisy.batch * noisy.unit
        self._scale, self._row_scale = rate, rate * training.table_rate
        self._coins = CoinStream(Stream.of(secret, Label.BATCH_COINS))
        self._dense_noise = dense_noise(secret)
        self._row_noise = {name: row_noise(secret, name) for name in rows}
        self._until = {name: np.zeros(len(r), np.int32) for name, r in rows.items()}

    def draw(self) -> StepBatch:
        """The batch of this step."""
        batch = self.noisy.drawing(self.prepared, self._coins)
        self._draws, self.most = batch.draws, max(self.most, batch.most)
        return batch

    def settle(self, name: str, rows: Ints) -> None:
        """Add the noise of earlier steps to these rows, each named once, before they are read."""
        until, values = self._until[name], self.rows[name]
        owed = self._drawn - until[rows]
        due = rows[owed > 0]
        if not due.size:
            return
        noise = self._row_noise[name].owed(owed[owed > 0].astype(np.int64), values.shape[1])
        values[torch.from_numpy(due)] -= torch.from_numpy(noise) * self._row_scale
        until[due] = self._drawn

    def take(self, dense: Tensor, rows: Mapping[str, tuple[Ints, Tensor]]) -> None:
        """A step from the groups' sums in integers: of the dense part, and of the rows touched.

        The rows have settled and stand once each; the noise of all others waits for one step more.
        """
        noise = torch.from_numpy(self._noise(self._dense_noise, dense.numel(), 1).reshape(-1))
        self.dense.sub_((dense + noise).to(torch.float32), alpha=self._scale)
        for name, (touched, sums) in rows.items():
            if not touched.size:
                continue
            drawn = torch.from_numpy(self._noise(self._row_noise[name], *sums.shape))
            at = torch.from_numpy(touched)
            self.rows[name][at] -= (sums + drawn).to(torch.float32) * self._row_scale
            self._until[name][touched] = self._drawn + self._draws
        self._drawn += self._draws
        self.step += 1

    def _noise(self, source: Gaussian, count: int, width: int) -> Narrow:
        """What a step adds itself to `count` rows."""
        if self._draws == 1:
            return source.draw(count * width).reshape(count, width)
        return source.owed(np.full(count, self._draws, np.int64), width)

    def end(self) -> None:
        """After the last step: all rows settle."""
        if self.step != self.noisy.steps:
            raise MisuseError(f"{self.step} steps were taken, and the plan has {self.noisy.steps}")
        for name, values in self.rows.items():
            for begin in range(0, len(values), ROWS_AT_ONCE):
                self.settle(name, np.arange(begin, min(begin + ROWS_AT_ONCE, len(values))))

    def outcome(self, bound: BoundModel) -> Trained:
        """What leaves: deltas of every row at hand, each with a count of 1, at a weight of 1.

        The rows' tensors become the deltas, without a copy of them.
        """
        prepared, job = self.prepared, self.prepared.job
        every = (self.dense, *self.rows.values())
        parts = (part for values in every for part in torch.split(values, ROWS_AT_ONCE))
        if not all(torch.isfinite(part).all() for part in parts):
            return nothing_of(bound, prepared, loss=float("nan"), finite=False)
        tables, local = {}, {}
        for table in bound.tables:
            if table.name not in self.rows:  # rows at home that are free: as they were
                continue
            values: Floats = self.rows[table.name][: len(prepared.rows[table.name])].numpy()
            if table.local:
                local[table.name] = TablePart(prepared.rows[table.name], values)
                continue
            values -= prepared.values[table.name]
            tables[table.name] = TableUpdate(values, prepared.counts[table.name])
        return Trained(
            ModelUpdate(self.dense.numpy() - job.submodel.dense, 1, tables),
            {**job.local, **local},
            loss=self.mean_loss(),
            examples=prepared.examples,
            not_finite=self.not_finite,
            most=self.most,
        )

    def mean_loss(self) -> float:
        """Over all examples of all steps, each before its own."""
        losses = torch.cat([torch.empty(0), *self.losses])
        return float(losses.double().mean()) if losses.numel() else float("nan")


# --- clipped --------------------------------------------------------------------------------------
#
# ClippedClient: one step whose examples are clipped one by one, for noise that others add.
#
# What it sends is a sum over examples of which each is at most the clip long, dense part and rows
# together, as they are sent: a row's gradient by the factor on its rate. Local rows stay as they
# began: trained without noise they would carry one row into the gradients of all later rounds.


def client_kind(noisy: NoisySteps) -> type[NoisyClient]:
    """Who takes the steps: with noise of its own, or none."""
    return ClippedClient if noisy.only_clips else NoisyClient


class ClippedClient(NoisyClient):
    """The sums of its one step, as they are."""

    _sums: tuple[Tensor, Mapping[str, tuple[Ints, Tensor]]] | None = None

    def settle(self, name: str, rows: Ints) -> None:
        """No row waits for any noise."""

    def take(self, dense: Tensor, rows: Mapping[str, tuple[Ints, Tensor]]) -> None:
        self._sums = dense, rows
        self.step += 1

    def end(self) -> None:
        if self.step != 1:
            raise MisuseError(f"{self.step} steps were taken without noise, and one is due")

    def outcome(self, bound: BoundModel) -> Trained:
        """Deltas of every row at hand, as numbers of 64 bits: nothing is lost to a row's value."""
        assert self._sums is not None
        dense, rows = self._sums
        prepared, tables = self.prepared, {}
        for table in bound.tables:
            if table.local:
                continue
            values = np.zeros((len(prepared.rows[table.name]), table.width))
            touched, sums = rows.get(table.name, (np.zeros(0, np.int64), None))
            if sums is not None:
                values[touched] = -self._scale * sums.numpy().astype(np.float64)
            tables[table.name] = TableUpdate(values, prepared.counts[table.name])
        return Trained(
            ModelUpdate(-self._scale * dense.numpy().astype(np.float64), 1, tables),
            prepared.job.local,
            loss=self.mean_loss(),
            examples=prepared.examples,
            not_finite=self.not_finite,
        )
