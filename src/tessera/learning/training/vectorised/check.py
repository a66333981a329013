"""best: the fastest learner that is right for a module, found by trying on a few real clients.

    compiled -> vectorised -> one by one

What goes wrong side by side is silent: a batch that is filled up to its size is seen by whatever
takes statistics of it, an id below 0 that is not masked moves another row. So three clients with
different, odd numbers of examples are trained for a few steps both ways, in double precision, where
agreement is not by chance. A step that compiles is then held against itself uncompiled. `reason`
says in words what was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tessera.crypto.secret import Secret
from tessera.data.examples import NONE, Examples
from tessera.learning.bound_model import BoundModel
from tessera.learning.training.local import (
    Job,
    Learner,
    Loss,
    PreparedJob,
    Sequential,
    dropout_from,
    order,
    prepare,
    tensor,
    train_mode,
)
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.batches import Steps, lay_out
from tessera.learning.training.vectorised.learner import (
    SLOTS,
    Outcome,
    Slots,
    Vectorised,
    single_threaded,
)
from tessera.learning.training.vectorised.step import REFUSALS, one_line, quietly

CLIENTS: Final = 3
STEPS: Final = 3
ROUND: Final = 0
NOBODYS: Final = Secret(bytes(32))
"""Coins of a comparison: nothing that is drawn from them leaves it."""
TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Largest difference, as a share of the largest delta."""


class Explained(Learner, Protocol):
    """A learner that says why it was chosen."""

    reason: str


class OneByOne(Sequential):
    """`Sequential`, and why nothing faster was found."""

    def __init__(
        self,
        module: nn.Module,
        bound: BoundModel,
        loss: Loss | None,
        training: LocalTraining,
        *,
        reason: str,
    ) -> None:
        super().__init__(module, bound, loss, training)
        self.reason = reason


def best(
    module: nn.Module,
    bound: BoundModel,
    loss: Loss | None,
    training: LocalTraining,
    *,
    sample: Sequence[Job],
    compile: bool = True,
    slots: int = SLOTS,
) -> Explained:
    """The fastest learner that passes. `sample` are jobs such as those to come.

    Compiling takes about as long as a round of a hundred clients one by one, once per machine: say
    `compile=False` for a few short rounds. Errors of the module itself are raised as they are.
    """
    if not training.batch:
        return OneByOne(
            module, bound, loss, training, reason="clients take all their examples at once"
        )
    clients = _few(bound, training, sample)
    if not clients:
        return OneByOne(
            module, bound, loss, training, reason="there is no example to try anything faster on"
        )
    learner = Vectorised(module, bound, loss, training, slots=slots)
    with single_threaded(), train_mode(module):
        try:
            random = _agree(learner, _reference(module, bound, loss, training), clients)
        except _Refused as refused:
            return OneByOne(module, bound, loss, training, reason=str(refused))
        learner.reason = "side by side it trains as one by one does"
        if not learner.trim:
            learner.reason += "; sequences stay at their full length, which the module relies on"
        if random:
            learner.reason += " (compared without its random draws)"
        if not compile:
            return learner
        full = [p for p in (prepare(bound, job) for job in sample) if p.examples]
        fast = Vectorised(
            module, bound, loss, training, compile=True, slots=slots, trim=learner.trim
        )
        try:
            _same_compiled(fast, full, random=random)
        except _Refused as refused:
            learner.reason += f"; {refused}"
            return learner
    fast.reason = learner.reason + "; compiled"
    return fast


class _Refused(Exception):
    """A path that is not right for this module, with the reason in words."""


def _few(bound: BoundModel, training: LocalTraining, sample: Sequence[Job]) -> list[PreparedJob]:
    """Three clients with a few examples each, so that no last batch is full or like another's."""
    usable = [p for p in (prepare(bound, job) for job in sample[: 4 * CLIENTS]) if p.examples]
    few = []
    for at in range(CLIENTS if usable else 0):
        job = usable[at % len(usable)].job
        # Last batches that lack one, all but one and half of their examples. One is not enough: a
        # single example repeated has the mean that it has alone.
        size = training.batch
        wanted = (STEPS * size - 1, size + 1, (STEPS - 1) * size + -(-size // 2))[at]
        examples = bound.cut(job.examples, job.submodel.trained)
        examples = examples.take(np.arange(wanted) % len(examples))
        coins = Secret(bytes([at] * 32))
        few.append(prepare(bound, replace(job, client=at, examples=examples, coins=coins)))
    return few


def _reference(
    module: nn.Module, bound: BoundModel, loss: Loss | None, training: LocalTraining
) -> Sequential:
    return Sequential(module, bound, loss, replace(training, epochs=1))


def _agree(learner: Vectorised, reference: Sequential, clients: list[PreparedJob]) -> bool:
    """Compare with the reference, or raise `_Refused`; whether the module draws random numbers."""
    module = learner.module
    random = _draws(reference, clients[0])
    with _evaluating(module) if random else train_mode(module):
        kind = _precision(reference, clients[0])
        expected = [_one_by_one(reference, p, kind) for p in clients]
        if not all(
            np.isfinite(x).all() for _, dense, _, losses in expected for x in (dense, losses)
        ):
            raise _Refused("its losses are not finite on the first examples, which shows nothing")
        _compare(learner, clients, expected, kind, trim=False)
    short = [_shortened(learner.bound, p) for p in clients]
    with _evaluating(module) if random else train_mode(module):
        expected = [_one_by_one(reference, p, kind) for p in short]
        try:
            _compare(learner, short, expected, kind, trim=True)
        except _Refused:
            learner.trim = False
    if random:
        _try(learner, clients, kind, trim=learner.trim)
    return random


def _draws(reference: Sequential, prepared: PreparedJob) -> bool:
    """Whether a step takes from torch's random numbers, as dropout does."""
    with dropout_from(NOBODYS):
        before = torch.get_rng_state()
        _one_by_one(reference, prepared, torch.float32)
        return not torch.equal(before, torch.get_rng_state())


def _precision(reference: Sequential, prepared: PreparedJob) -> torch.dtype:
    """Double, unless the module holds single-precision values that do not go with it."""
    try:
        _one_by_one(reference, prepared, torch.float64)
    except RuntimeError:
        return torch.float32
    return torch.float64


def _one_by_one(reference: Sequential, prepared: PreparedJob, kind: torch.dtype) -> Outcome:
    """What `Sequential` does to a client, in the precision asked for."""
    training = reference.training
    dense = torch.from_numpy(np.array(prepared.job.submodel.dense)).to(kind)
    rows = {name: torch.from_numpy(np.array(v)).to(kind) for name, v in prepared.values.items()}
    batch = {name: tensor(column) for name, column in prepared.batch.items()}
    batch = {name: x.to(kind) if x.is_floating_point() else x for name, x in batch.items()}
    shared = {name: tensor(values).to(kind) for name, values in prepared.shared.items()}
    client, n = prepared.job.client, prepared.examples
    shuffled = torch.from_numpy(order(prepared.job.coins, 0, n))
    losses = [
        reference.step(
            dense,
            rows,
            {name: x[which] for name, x in batch.items()} | shared,
            training.rate_in(ROUND),
        )
        for which in torch.split(shuffled, training.batch)
    ]
    after = {name: values.numpy() for name, values in rows.items()}
    return client, dense.numpy(), after, torch.cat(losses).numpy()


def _try(
    learner: Vectorised, clients: list[PreparedJob], kind: torch.dtype, *, trim: bool
) -> dict[int, Outcome]:
    """The same clients side by side, in two slots, so that one of them is used twice."""
    few = Vectorised(
        learner.module,
        learner.bound,
        learner.loss,
        replace(learner.training, epochs=1),
        slots=CLIENTS - 1,
    )
    with quietly(), dropout_from(NOBODYS):
        try:
            steps = lay_out(few.bound, few.training, clients, dtype=kind, trim=trim)
            return {outcome[0]: outcome for outcome in few.outcomes(steps, ROUND)}
        except REFUSALS as error:
            raise _Refused(f"it cannot be vectorised over clients ({one_line(error)})") from error


def _compare(
    learner: Vectorised,
    clients: list[PreparedJob],
    expected: list[Outcome],
    kind: torch.dtype,
    *,
    trim: bool,
) -> None:
    found = _try(learner, clients, kind, trim=trim)
    largest, off = 0.0, 0.0
    for at, (prepared, (_, dense, rows, losses)) in enumerate(zip(clients, expected, strict=True)):
        _, other_dense, other_rows, other_losses = found[at]
        largest = max(largest, _largest(dense - prepared.job.submodel.dense))
        off = max(off, _largest(dense - other_dense), _largest(losses - other_losses))
        for name, values in rows.items():
            largest = max(largest, _largest(values - prepared.values[name]))
            off = max(off, _largest(values - other_rows[name]))
    if not off <= TOLERANCE[kind] * max(largest, 1e-6):
        raise _Refused(
            "side by side it trains differently than one by one "
            f"(by {off:.1g}, its largest delta is {largest:.1g}): does it take statistics of the "
            "batch, or use ids below 0 without masking what they give?"
        )


def _largest(difference: npt.NDArray[np.floating[Any]]) -> float:
    return float(np.abs(difference).max(initial=0.0))


def _same_compiled(fast: Vectorised, clients: list[PreparedJob], *, random: bool) -> None:
    """Compile for the shapes of these clients, and compare a few steps with the uncompiled one."""
    steps = lay_out(fast.bound, fast.training, clients, trim=fast.trim)
    before, plain, quick = (_filled(fast, steps) for _ in range(3))
    step = fast.step_for(quick, int(quick.ahead.max()))
    rate = torch.tensor(fast.training.rate_in(ROUND))
    with dropout_from(NOBODYS), quietly():
        for slots, run in ((plain, fast.eager), (quick, step)):
            for _ in range(min(STEPS, int(slots.ahead.min()))):
                slots.run(run, rate)
    if fast.reason:
        raise _Refused(fast.reason.removeprefix("; "))
    if random:
        return
    largest, off = 0.0, 0.0
    for start, expected, found in zip(*map(_state, (before, plain, quick)), strict=True):
        largest = max(largest, _largest(expected - start))
        off = max(off, _largest(expected - found))
    if not off <= TOLERANCE[torch.float32] * max(largest, 1e-6):
        raise _Refused(f"not compiled: it then trains differently (by {off:.1g} of {largest:.1g})")


def _filled(fast: Vectorised, steps: Steps) -> Slots:
    """Slots of their own rows, with as many of the clients as there is room for."""
    rows = {name: values.clone() for name, values in steps.values.items()}
    slots = Slots(fast.bound, replace(steps, values=rows), fast.width(len(steps.clients)))
    for client in range(min(len(steps.clients), slots.width)):
        slots.fill(client)
    return slots


def _state(slots: Slots) -> list[npt.NDArray[np.floating[Any]]]:
    busy = slots.busy
    rows = (values[:-1] for values in slots.steps.values.values())  # without the idle slots' row
    dense = (weights[busy] for weights in (*slots.dense.values(), *slots.rows.values()))
    return [x.numpy() for x in (*rows, *dense)]


def _shortened(bound: BoundModel, prepared: PreparedJob) -> PreparedJob:
    """The same client with only the first quarter of its sequences."""
    job = prepared.job
    ids = {f for table in bound.tables for f in table.fields}
    fields = dict(job.examples.fields)
    for name, column in fields.items():
        if name in ids and column.ndim == 2:
            fields[name] = column.copy()
            fields[name][:, -(-column.shape[1] // 4) :] = NONE
    return prepare(bound, replace(job, examples=Examples(fields)))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Out of training mode for a while: without dropout."""
    with train_mode(module):
        module.eval()
        yield
