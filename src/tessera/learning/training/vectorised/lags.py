"""OneStep: clients that take one step each of a lag model, its gradient written out.

What `torch.func` would do for such a client is mostly to copy: every row of every history, several
times, forwards and back, for a sum that reads each of them once. Here that sum, the softmax over a
client's candidates and the gradients of both are loops in C (`lags.c`; without a compiler the same
by PyTorch), all clients that were sent the same dense part go through the residual layer together,
and no client is filled up to the size of another. Each draws its dropout from its own coins, so
that it trains as it does alone, whoever is beside it: `check.py` compares that, draws included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.learning.bound_model import BoundModel
from tessera.learning.models.lag_library import lag_library
from tessera.learning.models.lags import BIASES, ITEMS, LagModel, kept
from tessera.learning.softmax import CANDIDATES, SampledSoftmax, Softmax
from tessera.learning.tables.submodel import Floats
from tessera.learning.training.jobs import (
    Job,
    Learner,
    PreparedJob,
    Trainable,
    Trained,
    finish,
    finish_deltas,
    nothing_of,
    order,
    prepare,
    tensor,
)
from tessera.learning.training.local import dropout_state
from tessera.learning.training.vectorised.learner import single_threaded

TOGETHER: Final = 16
"""Clients that go through the residual layer together: more fall out of a core's cache."""


class OneStep:
    """Trains clients of a lag model who have no more examples than a batch; others by `rest`."""

    name = "vectorised"

    def __init__(self, model: Trainable, rest: Learner, *, reason: str = "") -> None:
        self.model, self.rest, self.reason = model, rest, reason

    @staticmethod
    def takes(model: Trainable) -> bool:
        """Whether this is written for such a model and such training."""
        return (
            type(model.module) is LagModel
            and type(model.loss).__call__ in (SampledSoftmax.__call__, Softmax.__call__)
            and model.training.epochs == 1
            and not model.training.clip
        )

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """The jobs' outcomes, in their order."""
        short = [at for at, job in enumerate(jobs) if self._one(job)]
        done: dict[int, Trained] = {}
        with single_threaded():
            clients = [prepare(self.model.bound, jobs[at]) for at in short]
            for at, outcome in zip(short, self.outcomes(clients, round_id), strict=True):
                done[at] = outcome
        long = [at for at in range(len(jobs)) if at not in done]
        if long:
            found = self.rest.train([jobs[at] for at in long], round_id=round_id)
            done |= dict(zip(long, found, strict=True))
        return [done[at] for at in range(len(jobs))]

    def _one(self, job: Job) -> bool:
        """Whether a client takes one step, and each of its examples has a target."""
        assert isinstance(self.model.loss, Softmax)
        few = len(job.examples) <= (self.model.training.batch or math.inf)
        return few and bool((job.examples[self.model.loss.target] >= 0).all())

    def outcomes(self, clients: Sequence[PreparedJob], round_id: int) -> Iterator[Trained]:
        """Every client's outcome, in their order."""
        bound, nothing = self.model.bound, np.empty(0, np.float32)
        for dense, alike in groupby(clients, key=lambda p: _Same(p.job.submodel.dense)):
            some = list(alike)
            for low in range(0, len(some), TOGETHER):
                part = some[low : low + TOGETHER]
                found = self._deltas([p for p in part if p.examples], round_id)
                for prepared in part:
                    if not prepared.examples:
                        yield finish(bound, prepared, dense.values, prepared.values, nothing)
                        continue
                    finite, change, rows, losses = next(found)
                    if finite:
                        yield finish_deltas(prepared, change, rows, losses)
                    else:
                        yield nothing_of(bound, prepared, loss=math.nan, finite=False)

    def descend(
        self, clients: Sequence[PreparedJob], round_id: int, kind: torch.dtype = torch.float32
    ) -> Iterator[tuple[Floats, dict[str, Floats], Floats]]:
        """The step of clients with the same dense part: as `Sequential.descend` gives it."""
        deltas = self._deltas(clients, round_id, kind)
        for prepared, (_, dense, rows, losses) in zip(clients, deltas, strict=True):
            after = {name: prepared.values[name] + delta for name, delta in rows.items()}
            yield prepared.job.submodel.dense + dense, after, losses

    def _deltas(
        self, clients: Sequence[PreparedJob], round_id: int, kind: torch.dtype = torch.float32
    ) -> Iterator[tuple[bool, Floats, dict[str, Floats], Floats]]:
        """By how much their dense part and rows change, if all that is finite, and the losses."""
        if not clients:
            return
        training = self.model.training
        rate = training.rate_in(round_id)
        dense = torch.from_numpy(np.array(clients[0].job.submodel.dense)).to(kind)
        steps = [_ClientStep(self.model, prepared, kind) for prepared in clients]
        gradients = _gradients(self.model, dense, steps)
        for step, found in zip(steps, gradients, strict=True):
            finite = step_back(dense, found, training.weight_decay, rate)
            finite &= bool(step.losses.isfinite().all())
            rows = {}
            for name, values, gradient in step.tables:
                finite &= step_back(
                    values, gradient, training.weight_decay, rate * training.table_rate
                )
                rows[name] = gradient.numpy()
            yield finite, found.numpy(), rows, step.losses.numpy()


class _Same:
    """A dense part, equal to another of the same values."""

    def __init__(self, values: Floats) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Same)
        return self.values is other.values or np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]


class _ClientStep:
    """What one client has at hand, and the gradient of its rows."""

    def __init__(self, model: Trainable, prepared: PreparedJob, kind: torch.dtype) -> None:
        assert isinstance(model.loss, Softmax) and isinstance(model.module, LagModel)
        self.coins = prepared.job.coins
        self.sampled = isinstance(model.loss, SampledSoftmax)
        names = {table.parameter: table.name for table in model.bound.tables}
        items, biases = names[ITEMS], names[BIASES]
        self.rows = tensor(prepared.values[items]).to(kind)  # (K, W)
        self.bias = tensor(prepared.values[biases]).to(kind)  # (K, 1)
        self.weights = torch.from_numpy(prepared.shared[CANDIDATES]).to(kind)  # (K,)
        self.of_rows, self.of_bias = torch.zeros_like(self.rows), torch.zeros_like(self.bias)
        self.tables = (items, self.rows, self.of_rows), (biases, self.bias, self.of_bias)
        which = order(prepared.job.coins, 0, prepared.examples)
        self.target = torch.from_numpy(prepared.batch[model.loss.target][which])  # (B,)
        self.history = torch.from_numpy(prepared.batch[model.module.sequence][which])  # (B, T)
        self.losses = torch.empty(len(which), dtype=kind)


def _gradients(model: Trainable, dense: Tensor, steps: Sequence[_ClientStep]) -> Tensor:
    """Each client's gradient of the dense part (C, D); that of its rows stays with its step."""
    bound, module = model.bound, model.module
    w = bound.unpack(dense)
    many = [len(step.target) for step in steps]
    width = w["lags"].shape[1]
    assert isinstance(module, LagModel)

    base = torch.empty(sum(many), width, dtype=dense.dtype)  # (N, W)
    for step, own in zip(steps, _split(base, many), strict=True):
        lag_sums(step.rows, step.history, w["lags"], own)
    normed, mean, scale = torch.native_layer_norm(
        base, [width], w["norm.weight"], w["norm.bias"], module.norm.eps
    )
    inner = torch.addmm(w["inner.bias"], normed, w["inner.weight"].T)
    hidden = F.gelu(inner)
    dropped = _dropped(module, steps, hidden)
    if dropped is not None:
        hidden *= dropped
    h = torch.addmm(w["outer.bias"], hidden, w["outer.weight"].T).add_(base)

    up = torch.empty_like(h)
    for step, own, of_own in zip(steps, _split(h, many), _split(up, many), strict=True):
        softmax(step, own, of_own)
    back = up @ w["outer.weight"]
    if dropped is not None:
        back *= dropped
    back = torch.ops.aten.gelu_backward(back, inner)
    down = back @ w["inner.weight"]
    straight = base.sub_(mean).mul_(scale)
    leaf = down * w["norm.weight"]
    inwards = (leaf * straight).mean(-1, keepdim=True)
    along = leaf.sub_(leaf.mean(-1, keepdim=True)).addcmul_(straight, inwards, value=-1)
    of_base = torch.addcmul(up, along, scale)

    found = torch.zeros(len(steps), bound.dense_size, dtype=dense.dtype)
    of = _columns(bound, found)
    summed = {
        "outer.bias": up,
        "inner.bias": back,
        "norm.bias": down,
        "norm.weight": down * straight,
    }
    every, sums = torch.cat(list(summed.values()), 1), found.new_empty(len(steps), 5 * width)
    for own, to in zip(_split(every, many), sums, strict=True):
        torch.sum(own, 0, out=to)
    for name, after, before in (("outer.weight", up, hidden), ("inner.weight", back, normed)):
        for a, b, to in zip(_split(after, many), _split(before, many), of[name], strict=True):
            torch.mm(a.T, b, out=to)
    for step, own, to in zip(steps, _split(of_base, many), of["lags"], strict=True):
        add_lag_gradients(step.rows, step.history, w["lags"], own, step.of_rows, to)
    start = 0
    for name, each in summed.items():
        of[name].copy_(sums[:, start : start + each.shape[1]])
        start += each.shape[1]
    return found


def _dropped(module: LagModel, steps: Sequence[_ClientStep], like: Tensor) -> Tensor | None:
    """What dropout multiplies each client's part by, as it would by itself; None: nothing."""
    if not (module.training and module.dropout):
        return None
    found, generator = torch.empty_like(like), torch.Generator()
    for step, own in zip(steps, _split(found, [len(s.target) for s in steps]), strict=True):
        generator.set_state(dropout_state(step.coins))
        own.uniform_(generator=generator)
    return kept(found, module.dropout)


def _split(rows: Tensor, many: list[int]) -> tuple[Tensor, ...]:
    """So many rows for each client, as views."""
    return rows.split_with_sizes(many)


def _columns(bound: BoundModel, each: Tensor) -> Mapping[str, Tensor]:
    """Dense parameters of several clients as views of one matrix (C, D)."""
    views, start = {}, 0
    for name, shape in bound.dense:
        end = start + math.prod(shape)
        views[name] = each[:, start:end].view(len(each), *shape)
        start = end
    return views


# --- in C, or by PyTorch --------------------------------------------------------------------------


def softmax(step: _ClientStep, h: Tensor, up: Tensor) -> None:
    """A client's losses, and the gradient of their mean: of h (B, W) into `up`; of rows and biases.

    Where what is a client's own is no candidate, the target of each example is one more.
    """
    library = _library()
    if library is None or h.dtype is not torch.float32:
        _softmax_by_torch(step, h, up)
        return
    rows, target = step.rows, step.target
    (k, width), n = rows.shape, len(target)
    which = torch.empty(k, dtype=torch.int32)
    room = torch.empty((k + width) * library.tessera_lag_examples())
    before = (x.data_ptr() for x in (rows, step.bias, step.weights))
    after = (step.losses, up, step.of_rows, step.of_bias, which, room)
    library.tessera_lag_softmax(
        *before,
        *(k, width, h.data_ptr(), target.data_ptr(), n, step.sampled),
        *(x.data_ptr() for x in after),
    )


def _softmax_by_torch(step: _ClientStep, h: Tensor, up: Tensor) -> None:
    rows, bias, weights, target = step.rows, step.bias[:, 0], step.weights, step.target
    some = torch.nonzero(weights.isfinite()).squeeze(-1)
    logits = torch.addmm((bias + weights)[some], h, rows[some].T)  # (B, C)
    right = (h * rows[target]).sum(-1) + bias[target]
    if step.sampled:
        logits = torch.cat([logits, right.unsqueeze(-1)], -1)
    else:
        right = right + weights[target]
    step.losses = torch.logsumexp(logits, -1) - right
    p = torch.softmax(logits, -1).div_(len(h))
    last = p[:, len(some) :].sum(-1) - 1.0 / len(h)  # of the target, beside what it is among others
    p, last = p[:, : len(some)], last.unsqueeze(-1)
    step.of_rows.index_add_(0, some, p.T @ h).index_add_(0, target, last * h)
    step.of_bias.index_add_(0, some, p.sum(0).unsqueeze(-1)).index_add_(0, target, last)
    torch.addmm(last * rows[target], p, rows[some], out=up)


def lag_sums(rows: Tensor, history: Tensor, lags: Tensor, out: Tensor) -> None:
    """Into (B, W): the rows (K, W) of each history (B, T), each times its lag's weights (T, W)."""
    library = _library()
    lags = lags[: history.shape[1]]
    if library is None or rows.dtype is not torch.float32:
        held = rows[history.clamp(min=0)] * (history >= 0).unsqueeze(-1)
        torch.sum(held * lags, 1, out=out)
        return
    library.tessera_lag_sums(*_addressed(rows, history, lags), out.data_ptr())


def add_lag_gradients(
    rows: Tensor, history: Tensor, lags: Tensor, up: Tensor, of_rows: Tensor, of_lags: Tensor
) -> None:
    """Add the gradient of these sums, by that of the sums (B, W), to those of rows and lags."""
    library = _library()
    length = history.shape[1]
    if library is None or rows.dtype is not torch.float32:
        there = (history >= 0).unsqueeze(-1)
        at = history.clamp(min=0)
        of_lags[:length] += (rows[at] * there * up.unsqueeze(1)).sum(0)
        of_rows.index_add_(0, at.flatten(), (lags[:length] * there * up.unsqueeze(1)).flatten(0, 1))
        return
    out = (x.data_ptr() for x in (up, of_rows, of_lags))
    library.tessera_lag_gradients(*_addressed(rows, history, lags), *out)


def step_back(values: Tensor, gradient: Tensor, decay: float, rate: float) -> bool:
    """Make a gradient what a step changes the values by; whether all of that is finite."""
    library = _library()
    if library is None or values.dtype is not torch.float32:
        gradient.add_(values, alpha=decay).mul_(-rate)
        return bool(gradient.isfinite().all())
    addresses = values.data_ptr(), gradient.data_ptr()
    return bool(library.tessera_lag_step(*addresses, values.numel(), decay, rate))


def _addressed(rows: Tensor, history: Tensor, lags: Tensor) -> tuple[int, ...]:
    arrays = (rows, history, lags)
    assert all(x.is_contiguous() for x in arrays) and history.dtype is torch.int64
    return (*(x.data_ptr() for x in arrays), *history.shape, rows.shape[1])


def _library() -> Any:
    """The loops in C, if they were built."""
    return lag_library().loops
