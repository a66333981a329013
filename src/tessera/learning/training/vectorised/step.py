"""One step of gradient descent for several clients side by side, each with weights of its own.

`torch.func` turns the user's module, written for one batch, into one for a batch per client: no
line here knows the model. The arithmetic is that of `local.Sequential`, whose module docstring
says what a step is.
"""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Final, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from tessera.learning.bound_model import BoundModel, table_groups
from tessera.learning.training.jobs import Trainable

Tensors: TypeAlias = dict[str, Tensor]

Step: TypeAlias = Callable[
    [Tensors, Tensors, Tensors, Tensors, Tensor, Tensor], tuple[Tensor, Tensors]
]
"""(dense parameters, rows, batch, touched rows, weights, rate) -> losses (S, B), new rows.

Every tensor but the rate has a client per entry of its first dimension. Dense parameters are
changed in place, and so are the rows of a softmax's tables, which are not among the new ones. Rows
are by table name, dense parameters by their own.
"""


def side_by_side(model: Trainable) -> Step:
    """The step for this module. Nothing is checked: `check.py` does, before it is relied on."""
    module, bound, loss, training = model.module, model.bound, model.loss, model.training
    parameter = {table.name: table.parameter for table in bound.tables}
    ids = frozenset(f for table in bound.tables for f in table.fields)
    clip, decay, table_rate = training.clip, training.weight_decay, training.table_rate
    stays = resident(bound)

    def mean_loss(parameters: Tensors, batch: Tensors, weights: Tensor) -> tuple[Tensor, Tensor]:
        losses = loss(functional_call(module, parameters, (batch,)), batch)
        mean = torch.where(weights > 0, losses, 0.0).sum() / weights.sum()
        return mean, losses.detach()

    def step(
        dense: Tensors,
        rows: Tensors,
        batch: Tensors,
        touched: Tensors,
        weights: Tensor,
        rate: Tensor,
    ) -> tuple[Tensor, Tensors]:
        parameters = {**dense, **{parameter[name]: held for name, held in rows.items()}}
        batch = {name: x.long() if name in ids else x for name, x in batch.items()}
        one = grad_and_value(mean_loss, has_aux=True)
        gradients, (_, losses) = vmap(one, randomness="different")(parameters, batch, weights)
        if clip:
            square = sum(g.square().flatten(1).sum(1) for g in gradients.values())
            scale = (clip / torch.sqrt(square)).clamp(max=1.0)
            gradients = {name: g * along(scale, g) for name, g in gradients.items()}
        for name, held in dense.items():
            g = gradients[name]
            if decay:
                g = g + decay * held
            held.sub_(g * rate)
        new = {}
        for name, held in rows.items():
            g = gradients[parameter[name]]
            if decay:  # rows that only fill up are zeros
                g = g + decay * (held * touched[name] if name in touched else held)
            if name in stays:
                held.addcmul_(g, rate * table_rate, value=-1)
            else:
                new[name] = held - g * (rate * table_rate)
        return losses, new

    return step


def resident(bound: BoundModel) -> frozenset[str]:
    """Tables that share fields with the candidates of a softmax: a step takes all their rows."""
    found = (g for g in table_groups(bound) if any(table.candidates for table in g.tables))
    return frozenset(table.name for group in found for table in group.tables)


def along(scale: Tensor, g: Tensor) -> Tensor:
    """A number per client, or per client and group, over all values of its gradient."""
    return scale.reshape(*scale.shape, *[1] * (g.dim() - scale.dim()))


Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


class Compiled(Generic[Arguments, Found]):
    """The same step by `torch.compile`, for one set of shapes; compiled when it is first called.

    What cannot be compiled, now or when the module has changed, is run as it is, and `refused` is
    called with the reason once: torch compiles before it computes, so nothing is done twice.
    """

    def __init__(self, step: Callable[Arguments, Found], refused: Callable[[str], None]) -> None:
        assert isinstance(step, types.FunctionType)
        # torch keeps what it compiles by code object, and counts how often each is compiled again:
        # hence a code object of its own.
        own = types.FunctionType(
            step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__
        )
        self._plain: Callable[Arguments, Found] = step
        self._fast: Callable[Arguments, Found] | None = torch.compile(
            own, fullgraph=True, dynamic=False
        )
        self._refused = refused
        self._called = False

    def __call__(self, *tensors: Arguments.args, **named: Arguments.kwargs) -> Found:
        if self._fast is not None:
            try:
                with nullcontext() if self._called else quietly():
                    self._called = True
                    return self._fast(*tensors, **named)
            except REFUSALS as error:
                self._fast = None
                self._refused(one_line(error))
        return self._plain(*tensors, **named)


REFUSALS: Final = (
    RuntimeError,  # torch's own, those of its compiler among them
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    OSError,
)
"""What a module raises that cannot be vectorised, or a machine that cannot compile."""


def one_line(error: BaseException) -> str:
    """What an error of torch says, in one line that fits a report."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


@contextmanager
def quietly() -> Iterator[None]:
    """For what may fail or warn without harm, since there is another way: say nothing on stderr."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def take(arrays: Mapping[str, Tensor], which: Tensor) -> Tensors:
    """The entries at these places of every array."""
    return {name: array.index_select(0, which) for name, array in arrays.items()}
