"""OneStep: clients that take one step each of a lag model, its gradient written out.

What `torch.func` would do for such a client is mostly to copy: every row of every history, several
times, forwards and back, for a sum that reads each of them once. Here that sum and its gradient are
two loops in C (`lags.c`; without a compiler the same by PyTorch), all clients that were sent the
same dense part go through the residual layer together, and no client is filled up to the size of
another. Each draws its dropout from its own coins, so that it trains as it does alone, whoever is
beside it: `check.py` compares that, draws included.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.learning.bound_model import BoundModel
from tessera.learning.models.lags import BIASES, ITEMS, LagModel
from tessera.learning.softmax import CANDIDATES, SampledSoftmax, Softmax
from tessera.learning.tables.submodel import Floats
from tessera.learning.training.jobs import (
    Job,
    Learner,
    PreparedJob,
    Trainable,
    Trained,
    finish,
    order,
    prepare,
    tensor,
)
from tessera.learning.training.local import dropout_state
from tessera.learning.training.vectorised.learner import single_threaded

LIBRARY: Final = "tessera.learning.models._lags"
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
        bound = self.model.bound
        for dense, alike in groupby(clients, key=lambda p: _Same(p.job.submodel.dense)):
            some = list(alike)
            for low in range(0, len(some), TOGETHER):
                part = some[low : low + TOGETHER]
                found = self.descend([p for p in part if p.examples], round_id)
                for prepared in part:
                    none = (dense.values, prepared.values, np.empty(0, np.float32))
                    yield finish(bound, prepared, *(next(found) if prepared.examples else none))

    def descend(
        self, clients: Sequence[PreparedJob], round_id: int, kind: torch.dtype = torch.float32
    ) -> Iterator[tuple[Floats, dict[str, Floats], Floats]]:
        """The step of clients with the same dense part: as `Sequential.descend` gives it."""
        if not clients:
            return
        training = self.model.training
        rate = training.rate_in(round_id)
        dense = torch.from_numpy(np.array(clients[0].job.submodel.dense)).to(kind)
        steps = [_ClientStep(self.model, prepared, kind) for prepared in clients]
        gradients = _gradients(self.model, dense, steps)
        for step, gradient in zip(steps, gradients, strict=True):
            gradient.add_(dense, alpha=training.weight_decay)
            after = torch.sub(dense, gradient, alpha=rate).numpy()
            yield after, step.rows_after(rate), step.losses.numpy()


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
        self.prepared, self.training = prepared, model.training
        self.sampled = isinstance(model.loss, SampledSoftmax)
        names = {table.parameter: table.name for table in model.bound.tables}
        self.items, self.biases = names[ITEMS], names[BIASES]
        self.rows = torch.from_numpy(prepared.values[self.items]).to(kind)  # (K, W)
        self.bias = torch.from_numpy(prepared.values[self.biases]).to(kind)  # (K, 1)
        self.weights = torch.from_numpy(prepared.shared[CANDIDATES]).to(kind)  # (K,)
        which = order(prepared.job.coins, 0, prepared.examples)
        self.target = tensor(prepared.batch[model.loss.target][which])  # (B,)
        self.history = tensor(prepared.batch[model.module.sequence][which])  # (B, T)
        module = model.module
        self.kept: Tensor | None = None
        if module.training and module.dropout:
            generator, kept = torch.Generator(), 1.0 - module.dropout
            generator.set_state(dropout_state(prepared.job.coins))
            drawn = torch.empty(len(which), 2 * self.rows.shape[1], dtype=kind)
            self.kept = drawn.bernoulli_(kept, generator=generator).div_(kept)

    def scored(self, h: Tensor) -> Tensor:
        """Losses and gradients of a client's softmax; gives that of `h` (B, W).

        Where what is a client's own is no candidate, the target of each example is one more, and
        the last.
        """
        rows, bias, weights, target = self.rows, self.bias, self.weights, self.target
        some = torch.nonzero(weights.isfinite()).squeeze(-1) if self.sampled else None
        if some is not None:
            rows, bias, weights = (x.index_select(0, some) for x in (rows, bias, weights))
        logits = h.new_empty(len(h), len(rows) + (some is not None))  # (B, C)
        torch.addmm((bias.squeeze(-1) + weights), h, rows.T, out=logits[:, : len(rows)])
        if some is not None:
            aim = self.rows.index_select(0, target)
            torch.add((h * aim).sum(-1), self.bias[target, 0], out=logits[:, -1])
        log_p = torch.log_softmax(logits, -1)
        up = log_p.exp().div_(len(h))
        if some is None:
            self.losses = -log_p[torch.arange(len(h)), target]
            up[torch.arange(len(h)), target] -= 1.0 / len(h)
            self.of_rows, self.of_bias = up.T @ h, up.sum(0).unsqueeze(-1)
            return up @ rows
        self.losses = -log_p[:, -1]
        up, last = up[:, :-1], (up[:, -1:] - 1.0 / len(h))
        self.of_rows, self.of_bias = torch.zeros_like(self.rows), torch.zeros_like(self.bias)
        self.of_rows.index_copy_(0, some, up.T @ h).index_add_(0, target, last * h)
        self.of_bias.index_copy_(0, some, up.sum(0).unsqueeze(-1)).index_add_(0, target, last)
        return torch.addmm(last * aim, up, rows)

    def rows_after(self, rate: float) -> dict[str, Floats]:
        """The client's rows one step on."""
        decay, rate = self.training.weight_decay, rate * self.training.table_rate
        found = {}
        for name, values, gradient in (
            (self.items, self.rows, self.of_rows),
            (self.biases, self.bias, self.of_bias),
        ):
            found[name] = values.sub(gradient.add_(values, alpha=decay), alpha=rate).numpy()
        return found


def _gradients(model: Trainable, dense: Tensor, steps: Sequence[_ClientStep]) -> Tensor:
    """Each client's gradient of the dense part (C, D); that of its rows stays with its step."""
    bound, module = model.bound, model.module
    w = bound.unpack(dense)
    ends = np.cumsum([len(step.target) for step in steps])
    parts = [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    owner = torch.from_numpy(np.repeat(np.arange(len(steps)), np.diff(ends, prepend=0)))
    assert isinstance(module, LagModel)

    base = torch.cat([lag_sums(s.rows, s.history, w["lags"]) for s in steps])  # (N, W)
    width = base.shape[1]
    normed, mean, scale = torch.native_layer_norm(
        base, [width], w["norm.weight"], w["norm.bias"], module.norm.eps
    )
    inner = torch.addmm(w["inner.bias"], normed, w["inner.weight"].T)
    kept = [s.kept for s in steps if s.kept is not None]
    dropped = torch.cat(kept) if kept else None
    hidden = F.gelu(inner) if dropped is None else F.gelu(inner).mul_(dropped)
    h = base + torch.addmm(w["outer.bias"], hidden, w["outer.weight"].T)

    up = torch.cat([step.scored(h[own]) for step, own in zip(steps, parts, strict=True)])
    back = up @ w["outer.weight"]
    if dropped is not None:
        back *= dropped
    back = torch.ops.aten.gelu_backward(back, inner)
    down = back @ w["inner.weight"]
    straight = (base - mean) * scale
    leaf = down * w["norm.weight"]
    along = leaf - leaf.mean(-1, keepdim=True) - straight * (leaf * straight).mean(-1, keepdim=True)
    of_base = up + along * scale

    found = torch.zeros(len(steps), bound.dense_size, dtype=dense.dtype)
    of = _columns(bound, found)
    for name, each in (
        ("outer.bias", up),
        ("inner.bias", back),
        ("norm.bias", down),
        ("norm.weight", down * straight),
    ):
        of[name].index_add_(0, owner, each)
    for at, (step, own) in enumerate(zip(steps, parts, strict=True)):
        torch.mm(up[own].T, hidden[own], out=of["outer.weight"][at])
        torch.mm(back[own].T, normed[own], out=of["inner.weight"][at])
        add_lag_gradients(
            step.rows, step.history, w["lags"], of_base[own], step.of_rows, of["lags"][at]
        )
    return found


def _columns(bound: BoundModel, each: Tensor) -> Mapping[str, Tensor]:
    """Dense parameters of several clients as views of one matrix (C, D)."""
    views, start = {}, 0
    for name, shape in bound.dense:
        end = start + math.prod(shape)
        views[name] = each[:, start:end].view(len(each), *shape)
        start = end
    return views


# --- sums over a history --------------------------------------------------------------------------


def lag_sums(rows: Tensor, history: Tensor, lags: Tensor) -> Tensor:
    """(B, W): the rows (K, W) of each history (B, T), each times the weights of its lag (T, W)."""
    library = _library()
    lags = lags[: history.shape[1]]
    if library is None or rows.dtype is not torch.float32:
        held = rows[history.clamp(min=0)] * (history >= 0).unsqueeze(-1)
        return (held * lags).sum(1)
    out = torch.empty(len(history), rows.shape[1])
    library.tessera_lag_sums(*_addressed(rows, history, lags), out.data_ptr())
    return out


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
    out = (x.data_ptr() for x in (up.contiguous(), of_rows, of_lags))
    library.tessera_lag_gradients(*_addressed(rows, history, lags), *out)


def _addressed(rows: Tensor, history: Tensor, lags: Tensor) -> tuple[int, ...]:
    arrays = (rows, history, lags)
    assert all(x.is_contiguous() for x in arrays) and history.dtype is torch.int64
    return (*(x.data_ptr() for x in arrays), *history.shape, rows.shape[1])


@cache
def _library() -> Any:
    """The two loops in C, if they were built."""
    found = importlib.util.find_spec(LIBRARY)
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.tessera_lag_sums.argtypes = (*[pointer] * 3, *[size] * 3, pointer)
    library.tessera_lag_gradients.argtypes = (*[pointer] * 3, *[size] * 3, *[pointer] * 3)
    for each in (library.tessera_lag_sums, library.tessera_lag_gradients):
        each.restype = None
    return library
