"""best: the fastest learner that is right for a module, found by trying on a few real clients.

    compiled -> vectorised, by a step that is written out or by `torch.func` -> one by one

What goes wrong side by side is silent: a batch that is filled up to its size is seen by whatever
takes statistics of it, an id below 0 that is not masked moves another row. So three clients with
different, odd numbers of examples are trained for a few steps both ways, in double precision, where
agreement is not by chance. A step that compiles is then held against itself uncompiled. `reason`
says in words what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tessera.crypto.secret import Secret
from tessera.data.examples import NONE, Examples
from tessera.learning.bound_model import BoundModel
from tessera.learning.tables.submodel import Floats
from tessera.learning.training.jobs import Job, Learner, PreparedJob, Trainable, Trained, prepare
from tessera.learning.training.local import NoisySequential, Sequential, dropout_from, train_mode
from tessera.learning.training.noisy_steps import NoisySteps
from tessera.learning.training.vectorised.batches import Steps, lay_out
from tessera.learning.training.vectorised.lags import OneStep
from tessera.learning.training.vectorised.learner import (
    SLOTS,
    Outcome,
    Slots,
    Vectorised,
    single_threaded,
)
from tessera.learning.training.vectorised.noisy import NoisyVectorised
from tessera.learning.training.vectorised.step import REFUSALS, one_line, quietly

CLIENTS: Final = 3
STEPS: Final = 3
ROUND: Final = 0
NOBODYS: Final = Secret(bytes(32))
"""Coins of a comparison: nothing that is drawn from them leaves it."""
LITTLE: Final = 1e-2
"""Noise of a comparison of learners with noise."""
NOISY_TOLERANCE: Final = 1e-3
"""Largest difference of theirs, as a share: a value may be cut to the integer beside."""
TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Largest difference, as a share of the largest delta."""


Descent: TypeAlias = tuple[Floats, dict[str, Floats], Floats]
"""What `Sequential.descend` gives."""


class Explained(Learner, Protocol):
    """A learner that says why it was chosen."""

    reason: str


def best(
    model: Trainable,
    *,
    sample: Sequence[Job],
    compile: bool = True,
    slots: int = SLOTS,
) -> Explained:
    """The fastest learner that passes. `sample` are jobs such as those to come.

    Compiling takes about as long as a round of a hundred clients one by one, once per machine: say
    `compile=False` for a few short rounds. Errors of the module itself are raised as they are.
    """
    written_out = None if compile else _written_out(model, sample)
    if written_out is not None:
        return written_out
    if not model.training.batch:
        return Sequential(model, reason="clients take all their examples at once")
    clients = _few(model, sample)
    if not clients:
        return Sequential(model, reason="there is no example to try anything faster on")
    learner = Vectorised(model, slots=slots)
    with single_threaded(), train_mode(model.module):
        try:
            random = _agree(learner, clients)
        except _Refused as refused:
            return Sequential(model, reason=str(refused))
        learner.reason = "side by side it trains as one by one does"
        if not learner.trim:
            learner.reason += "; sequences stay at their full length, which the module relies on"
        if random:
            learner.reason += " (compared without its random draws)"
        if not compile:
            return learner
        full = [p for p in (prepare(model.bound, job) for job in sample) if p.examples]
        fast = Vectorised(model, compile=True, slots=slots, trim=learner.trim)
        try:
            _same_compiled(fast, full, random=random)
        except _Refused as refused:
            learner.reason += f"; {refused}"
            return learner
    fast.reason = learner.reason + "; compiled"
    return fast


def _written_out(model: Trainable, sample: Sequence[Job]) -> OneStep | None:
    """The step of a lag model, if this is one and a few clients train by it as one by one.

    With their random draws: each draws by itself either way.
    """
    size = model.training.batch
    clients = _few(model, sample, (size or 7, max(1, size - 1) if size else 5, -(-size // 2) or 3))
    clients = [p for p in clients if OneStep.takes(model)]
    if not clients:
        return None
    rest = Vectorised(model, trim=False) if size else Sequential(model)
    fast = OneStep(model, rest, reason="one step each, written out; it trains as one by one does")
    clients = [_with_dense(p, clients[0]) for p in clients]
    reference = Sequential(model)
    with single_threaded(), train_mode(model.module):
        for kind in (torch.float64, torch.float32):
            expected = []
            for prepared in clients:
                with dropout_from(prepared.job.coins):
                    expected.append(reference.descend(prepared, ROUND, kind))
            try:
                off, largest = _difference(clients, expected, fast.descend(clients, ROUND, kind))
            except REFUSALS:
                return None
            if not off <= TOLERANCE[kind] * max(largest, 1e-6):
                return None
    return fast


def _with_dense(prepared: PreparedJob, other: PreparedJob) -> PreparedJob:
    submodel = replace(prepared.job.submodel, dense=other.job.submodel.dense)
    return replace(prepared, job=replace(prepared.job, submodel=submodel))


class _Refused(Exception):
    """A path that is not right for this module, with the reason in words."""


def _few(model: Trainable, sample: Sequence[Job], sizes: Sequence[int] = ()) -> list[PreparedJob]:
    """Three clients with a few examples each, so that no last batch is full or like another's.

    Or with these numbers of examples.
    """
    bound = model.bound
    usable = [p for p in (prepare(bound, job) for job in sample[: 4 * CLIENTS]) if p.examples]
    few = []
    for at in range(CLIENTS if usable else 0):
        job = usable[at % len(usable)].job
        # Last batches that lack one, all but one and half of their examples. One is not enough: a
        # single example repeated has the mean that it has alone.
        size = model.training.batch
        odd = (STEPS * size - 1, size + 1, (STEPS - 1) * size + -(-size // 2))
        wanted = (sizes or odd)[at]
        examples = bound.cut(job.examples, job.submodel.trained)
        examples = examples.take(np.arange(wanted) % len(examples))
        coins = Secret(bytes([at] * 32))
        few.append(prepare(bound, replace(job, client=at, examples=examples, coins=coins)))
    return few


def _agree(learner: Vectorised, clients: list[PreparedJob]) -> bool:
    """Compare with the reference, or raise `_Refused`; whether the module draws random numbers."""
    module = learner.model.module
    reference = Sequential(_once(learner.model))
    random = _draws(reference, clients[0])
    with _evaluating(module) if random else train_mode(module):
        kind = _precision(reference, clients[0])
        expected = [reference.descend(p, ROUND, kind) for p in clients]
        if not all(np.isfinite(x).all() for dense, _, losses in expected for x in (dense, losses)):
            raise _Refused("its losses are not finite on the first examples, which shows nothing")
        _compare(learner, clients, expected, kind, trim=False)
    short = [_shortened(learner.model.bound, p) for p in clients]
    with _evaluating(module) if random else train_mode(module):
        expected = [reference.descend(p, ROUND, kind) for p in short]
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
        reference.descend(prepared, ROUND, torch.float32)
        return not torch.equal(before, torch.get_rng_state())


def _precision(reference: Sequential, prepared: PreparedJob) -> torch.dtype:
    """Double, unless the module holds single-precision values that do not go with it."""
    try:
        reference.descend(prepared, ROUND, torch.float64)
    except RuntimeError:
        return torch.float32
    return torch.float64


def _once(model: Trainable) -> Trainable:
    return replace(model, training=replace(model.training, epochs=1))


def _try(
    learner: Vectorised, clients: list[PreparedJob], kind: torch.dtype, *, trim: bool
) -> dict[int, Outcome]:
    """The same clients side by side, in two slots, so that one of them is used twice."""
    few = Vectorised(_once(learner.model), slots=CLIENTS - 1)
    with quietly(), dropout_from(NOBODYS):
        try:
            steps = lay_out(few.model.bound, few.model.training, clients, dtype=kind, trim=trim)
            return {outcome[0]: outcome for outcome in few.outcomes(steps, ROUND)}
        except REFUSALS as error:
            raise _Refused(f"it cannot be vectorised over clients ({one_line(error)})") from error


def _compare(
    learner: Vectorised,
    clients: list[PreparedJob],
    expected: list[Descent],
    kind: torch.dtype,
    *,
    trim: bool,
) -> None:
    tried = _try(learner, clients, kind, trim=trim)
    found = (tried[at][1:] for at in range(len(clients)))
    off, largest = _difference(clients, expected, found)
    if not off <= TOLERANCE[kind] * max(largest, 1e-6):
        raise _Refused(
            "side by side it trains differently than one by one "
            f"(by {off:.1g}, its largest delta is {largest:.1g}): does it take statistics of the "
            "batch, or use ids below 0 without masking what they give?"
        )


def _difference(
    clients: Sequence[PreparedJob], expected: Iterable[Descent], found: Iterable[Descent]
) -> tuple[float, float]:
    """The largest difference between two ways to train, and the largest delta of the first."""
    largest, off = 0.0, 0.0
    for prepared, one, other in zip(clients, expected, found, strict=True):
        (dense, rows, losses), (other_dense, other_rows, other_losses) = one, other
        largest = max(largest, _largest(dense - prepared.job.submodel.dense))
        off = max(off, _largest(dense - other_dense), _largest(losses - other_losses))
        for name, values in rows.items():
            largest = max(largest, _largest(values - prepared.values[name]))
            off = max(off, _largest(values - other_rows[name]))
    return off, largest


def _largest(difference: npt.NDArray[np.floating[Any]]) -> float:
    return float(np.abs(difference).max(initial=0.0))


def _same_compiled(fast: Vectorised, clients: list[PreparedJob], *, random: bool) -> None:
    """Compile for the shapes of these clients, and compare a few steps with the uncompiled one."""
    steps = lay_out(fast.model.bound, fast.model.training, clients, trim=fast.trim)
    before, plain, quick = (_filled(fast, steps) for _ in range(3))
    step = fast.step_for(quick, int(quick.ahead.max()))
    rate = torch.tensor(fast.model.training.rate_in(ROUND))
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
    slots = Slots(fast.model.bound, replace(steps, values=rows), fast.width(len(steps.clients)))
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


# --- with noise -----------------------------------------------------------------------------------


def best_noisy(
    model: Trainable,
    noisy: NoisySteps,
    *,
    sample: Sequence[Job],
    compile: bool = False,
) -> NoisySequential | NoisyVectorised:
    """The fastest way in which a few clients come out as in the reference.

    All draw the same batches and noise. For the comparison there is little noise, and the coins are
    nobody's. `compile`: compiling, a minute or two, may be tried.
    """
    few, little, expected = tried(model, noisy, sample=sample)
    fast = NoisyVectorised(model, little, raises=True)
    why = _noisy_difference(fast, few, expected)
    if why:
        return NoisySequential(model, noisy, reason=why)
    said = "all groups at once it trains as one by one does"
    if compile:
        compiled = NoisyVectorised(model, little, compile=True, raises=True)
        why = _noisy_difference(compiled, few, expected) or compiled.reason.removeprefix("; ")
        if not why:
            compiled.noisy, compiled.reason, compiled.raises = noisy, f"{said}; compiled", False
            return compiled
        said += f"; not compiled: {why}"
    return NoisyVectorised(model, noisy, reason=said)


def tried(
    model: Trainable,
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
    slow = NoisySequential(model, little, raises=True)
    return few, little, slow.train(few, round_id=0)


def _noisy_difference(
    fast: NoisyVectorised, few: Sequence[Job], expected: Sequence[Trained]
) -> str:
    """Why a way is not right for this module; nothing if it trains as expected."""
    with quietly():
        try:
            found = fast.train(few, round_id=0)
        except REFUSALS as error:
            return f"it cannot be vectorised over groups ({one_line(error)})"
    largest, off = 0.0, 0.0
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(_arrays(one), _arrays(other), strict=True):
            largest, off = max(largest, _largest(a)), max(off, _largest(a - b))
    if off <= NOISY_TOLERANCE * max(largest, 1e-6):
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
