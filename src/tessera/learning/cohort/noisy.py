"""NoisyVectorised: training with noise, all groups of a batch at once and small clients together.

What a step is stands in `noisy/steps.py`; state and noise of a client are `noisy/client.py`'s, as
in the reference; the gradients are `group_step.py`'s. A batch of more groups than fit takes several
passes, whose sums are added up.

The number of groups is another in every step, and a step compiled for each would never pay. So a
compiled pass has a fixed number of examples, a little over the expected batch: few batches need a
second, and what only fills up weighs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tessera.crypto.secret import Secret
from tessera.learning.bound_model import BoundModel
from tessera.learning.cohort.group_batches import LaidOut, SideBySide
from tessera.learning.cohort.group_step import GroupStep, group_step
from tessera.learning.cohort.learner import single_threaded
from tessera.learning.cohort.step import REFUSALS, Compiled, Tensors, one_line, quietly
from tessera.learning.local import Job, Loss, Trained, click_loss, dropout_from, train_mode
from tessera.learning.local_training import LocalTraining
from tessera.learning.noisy.local import NoisySequential
from tessera.learning.noisy.steps import NoisySteps

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

    def __init__(
        self,
        module: nn.Module,
        bound: BoundModel,
        loss: Loss | None,
        training: LocalTraining,
        noisy: NoisySteps,
        *,
        compile: bool = False,
        reason: str = "",
        raises: bool = False,
    ) -> None:
        """`raises`: an error of the module is raised, and no group's; see `NoisySequential`."""
        self.name = "compiled, with noise" if compile else "vectorised, with noise"
        self.module, self.bound, self.loss = module, bound, loss or click_loss
        self.training, self.noisy, self.reason = training, noisy, reason
        self.raises = raises
        self._compile = compile
        self._eager: dict[torch.dtype, GroupStep] = {}
        self._made: dict[tuple[object, ...], GroupStep] = {}

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """The jobs' outcomes, in their order."""
        done: list[Trained] = []
        side_by_side = self.side_by_side(jobs)
        if not jobs:
            return done
        with train_mode(self.module), dropout_from(jobs[0].coins), single_threaded():
            for begin in range(0, len(jobs), side_by_side):
                own = jobs[begin : begin + side_by_side]
                try:
                    done += self._train(own, round_id, side_by_side)
                except Exception:
                    if self.raises:
                        raise
                    # Nothing has left yet. The reference draws the same, group after group.
                    alone = NoisySequential(
                        self.module, self.bound, self.loss, self.training, self.noisy
                    )
                    done += alone.train(own, round_id=round_id)
        return done

    def _train(self, jobs: Sequence[Job], round_id: int, width: int) -> list[Trained]:
        """Some jobs side by side, in so many places if the shape is to stay the same."""
        some = SideBySide.begin(
            self.bound,
            self.training,
            self.noisy,
            jobs,
            round_id=round_id,
            width=width if self._compile else len(jobs),
        )
        for _ in range(self.noisy.steps):
            self.step(some)
        for client in some.clients:
            client.end()
        return [client.outcome(self.bound) for client in some.clients]

    def side_by_side(self, jobs: Sequence[Job]) -> int:
        """As many clients as leave each a whole batch in one pass, and whose rows are not too many.

        All rows of a client are at hand, which may be whole tables. Compiled: 1, 2, 4, ... clients,
        for few different shapes.
        """
        size = 1 + self.bound.dense_size
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
                client.take(torch.zeros(self.bound.dense_size, dtype=torch.int32), {})
            return
        width = len(some.dense)
        places = self.places(width) if self._compile else 0
        batch = some.laid_out(drawn, places)
        for name, touched in batch.touched.items():
            for client, rows in zip(some.clients, touched, strict=True):
                client.settle(name, rows)
        # No sum of integers is larger than all groups' longest contributions.
        kind = torch.int32 if batch.many * self.noisy.longest < LARGEST else torch.int64
        dense = torch.zeros(width, self.bound.dense_size, dtype=kind)
        sums = {
            name: torch.zeros(1 + sum(map(len, rows)), some.values[name].shape[1], dtype=kind)
            for name, rows in batch.touched.items()
        }
        size = 1 + self.bound.dense_size
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
        size = (1 + self.bound.dense_size) * clients
        return max(1, min(self.noisy.batch + isqrt(2 * self.noisy.batch), AT_ONCE // size))

    def _add(self, some: SideBySide, batch: LaidOut, dense: Tensor, sums: Tensors) -> None:
        """Add what the groups of one pass give."""
        held = {
            name: some.values[name].index_select(0, at.reshape(-1)).view(*at.shape, -1)
            for name, at in batch.listed.items()
        }
        step = self.step_for(batch, held, dense.dtype)
        total, cut, finite, losses = step(
            some.views(self.bound), held, batch.fields, batch.weights, torch.tensor(self.noisy.unit)
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
            self._eager[kind] = group_step(self.module, self.bound, self.loss, self.noisy, kind)
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


def best_noisy(
    module: nn.Module,
    bound: BoundModel,
    loss: Loss | None,
    training: LocalTraining,
    noisy: NoisySteps,
    *,
    sample: Sequence[Job],
    compile: bool = False,
) -> NoisySequential | NoisyVectorised:
    """The fastest way in which a few clients come out as in the reference.

    All draw the same batches and noise. For the comparison there is little noise, and the coins are
    nobody's. `compile`: compiling, a minute or two, may be tried.
    """
    few, little, expected = tried(module, bound, loss, training, noisy, sample=sample)
    fast = NoisyVectorised(module, bound, loss, training, little, raises=True)
    why = _differs(fast, few, expected)
    if why:
        return NoisySequential(module, bound, loss, training, noisy, reason=why)
    said = "all groups at once it trains as one by one does"
    if compile:
        compiled = NoisyVectorised(module, bound, loss, training, little, compile=True, raises=True)
        why = _differs(compiled, few, expected) or compiled.reason.removeprefix("; ")
        if not why:
            compiled.noisy, compiled.reason, compiled.raises = noisy, f"{said}; compiled", False
            return compiled
        said += f"; not compiled: {why}"
    return NoisyVectorised(module, bound, loss, training, noisy, reason=said)


def tried(
    module: nn.Module,
    bound: BoundModel,
    loss: Loss | None,
    training: LocalTraining,
    noisy: NoisySteps,
    *,
    sample: Sequence[Job],
) -> tuple[list[Job], NoisySteps, list[Trained]]:
    """A few clients, steps with little noise, and what comes of them in the reference. An error of
    the module is raised here; in training it would only cost groups their part."""
    few = [
        replace(job, client=at, coins=Secret(bytes([at] * 32)))
        for at, job in enumerate(sample[:CLIENTS])
    ]
    little = noisy if noisy.only_clips else replace(noisy, noise=LITTLE, steps=STEPS)
    slow = NoisySequential(module, bound, loss, training, little, raises=True)
    return few, little, slow.train(few, round_id=0)


def _differs(fast: NoisyVectorised, few: Sequence[Job], expected: Sequence[Trained]) -> str:
    """Why a way is not right for this module; nothing if it trains as expected."""
    with quietly():
        try:
            found = fast.train(few, round_id=0)
        except REFUSALS as error:
            return f"it cannot be vectorised over groups ({one_line(error)})"
    largest, off = 0.0, 0.0
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(_arrays(one), _arrays(other), strict=True):
            largest = max(largest, float(np.abs(a).max(initial=0.0)))
            off = max(off, float(np.abs(a - b).max(initial=0.0)))
    if off <= TOLERANCE * max(largest, 1e-6):
        return ""
    return (
        f"{fast.name}, it trains differently than one by one (by {off:.1g} of {largest:.1g}): "
        "does it take statistics of the batch, or draw random numbers?"
    )


def _arrays(trained: Trained) -> Iterator[npt.NDArray[Any]]:
    yield trained.update.dense
    for name in sorted(trained.update.tables):
        yield trained.update.tables[name].values
    for name in sorted(trained.local):
        yield trained.local[name].values
