"""Task: data, a model and a metric; a user's own is the same record.

`recommended` holds settings that were tuned for the task; a plan takes those that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tessera.data.examples import LABEL, NONE, ClientData, Examples, placeholders
from tessera.errors import ConfigError, closest
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.bound_model import BoundModel
from tessera.learning.metrics import ClickMetric, Metric
from tessera.learning.module_tables import Tables
from tessera.learning.scores import ItemScores, SummedModel
from tessera.learning.softmax import Softmax, ranked
from tessera.learning.tables.submodel import Floats, Ids
from tessera.learning.task_setup import Setup
from tessera.learning.training.jobs import Learner, Loss, click_loss, tensor
from tessera.learning.training.noisy_steps import NoisySteps
from tessera.learning.training.pooled import Optimizer
from tessera.learning.training.settings import LocalTraining

# --- trial ----------------------------------------------------------------------------------------
#
# A trial of a module, loss and metric on a few examples, before anything is trained.
#
# What does not fit together shows in one sentence here, and not as a raw error deep inside a
# round: fields that the data does not have, ids of -1 that are looked up, outputs of another
# shape.


FEW: Final = 8


def try_out(
    module: nn.Module, bound: BoundModel, loss: Loss, metric: Metric, data: ClientData, seed: int
) -> None:
    """`ConfigError` if these cannot train on this data."""
    examples = _some(data, bound)
    ids = bound.all_row_ids_of(examples)  # names a table's field that is missing
    parameters = {
        table.parameter: torch.from_numpy(_rows(bound, table.name, ids[table.name], seed))
        for table in bound.tables
    }
    batch = {name: tensor(column) for name, column in bound.positions(examples, ids).items()}
    output = _output(module, parameters, batch, examples)
    softmax = bound.candidates
    if softmax is not None and (data.undrawn is not None or _not_clicked(data)):
        raise ConfigError(
            f"a softmax over table {softmax.root!r} takes what was clicked as the next one, and "
            "some examples are labelled 0 or were drawn",
            hint='give it clicks alone: tasks.from_frame(..., model="next") makes such data, and '
            "so does negatives = 0",
        )
    if softmax is not None:
        held = len(ids[softmax.root])
        if not isinstance(output, Tensor) or output.shape != (len(examples), held):
            raise ConfigError(
                f"the module gives {_shape(output)} for a batch of {len(examples)} examples, and "
                f"a softmax over table {softmax.root!r} takes one logit per row at hand: here "
                f"({len(examples)}, {held})",
                hint=f"multiply with the table itself: hidden @ self.{softmax.root}.weight.T",
            )
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(examples):
        raise ConfigError(
            f"the module gives {_shape(output)} for a batch of {len(examples)} examples",
            hint="one output, or one row of outputs, per example: (B,) or (B, classes)",
        )
    _check_loss(loss, output, batch, len(examples))
    if softmax is not None:
        output = ranked(output, batch[softmax.target])
    try:
        metric.measures(output.detach().numpy(), examples)
    except (ValueError, IndexError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the metric {metric.name} cannot measure outputs of the shape {tuple(output.shape)}: "
            f"{error}",
            hint="tessera.Task(metric=...) takes one that can; AUC wants one logit per example",
        ) from error


def _not_clicked(data: ClientData) -> bool:
    """Whether labels are 0 and 1, and some are 0."""
    labels = data.train.fields.get(LABEL)
    return labels is not None and set(np.unique(labels).tolist()) == {0.0, 1.0}


def _some(data: ClientData, bound: BoundModel) -> Examples:
    """A few examples, those first that have a "none" among their ids."""
    train = data.train
    none = np.zeros(len(train), dtype=np.bool_)
    for table in bound.tables:
        for name in table.fields:
            if name in train.fields:
                column = train[name]
                none |= (column == NONE).any(axis=1) if column.ndim == 2 else column == NONE
    return train.take(np.sort(np.argsort(~none, kind="stable")[:FEW]))


def _rows(bound: BoundModel, name: str, ids: Ids, seed: int) -> Floats:
    table = bound.table(name, seed=seed)
    return table.values(ids) if ids.size else np.zeros((1, table.width), np.float32)


def _output(
    module: nn.Module, parameters: dict[str, Tensor], batch: dict[str, Tensor], examples: Examples
) -> object:
    before = module.training
    module.eval()
    try:
        with torch.no_grad():
            return functional_call(module, parameters, (batch,))
    except KeyError as error:
        name = str(error.args[0]) if error.args else ""
        raise ConfigError(
            f"the module reads a field {name!r}, which the examples do not have",
            hint=closest(name, batch),
        ) from error
    except IndexError as error:
        padded = [name for name, column in batch.items() if _has_none(column)]
        raise ConfigError(
            f"the module looks up an id of {NONE}, which means none"
            + (f" (in {', '.join(map(repr, padded))})" if padded else f": {error}"),
            hint=f'look up batch["{padded[0] if padded else "ids"}"].clamp(min=0), and mask the '
            "result where the id is below 0",
        ) from error
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the module fails on a batch of {len(examples)} examples: {error}",
            hint=f"the batch has {', '.join(batch)}",
        ) from error
    finally:
        module.train(before)


def _has_none(column: Tensor) -> bool:
    return not column.is_floating_point() and bool((column == NONE).any())


def _check_loss(loss: Loss, output: Tensor, batch: dict[str, Tensor], examples: int) -> None:
    try:
        losses = loss(output, batch)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(
            f"the loss cannot take an output of the shape {tuple(output.shape)}: {error}",
            hint="the default wants one logit per example, (B,); pass your own as loss=",
        ) from error
    except KeyError as error:
        raise ConfigError(
            f"the loss reads a field {error.args[0]!r}, which the examples do not have",
            hint=closest(str(error.args[0]), batch),
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (examples,):
        raise ConfigError(
            f"the loss gives {_shape(losses)} for {examples} examples",
            hint='one loss per example: reduction="none"',
        )


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of the shape {tuple(value.shape)}"
    return type(value).__name__


# --- task -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralSettings:
    """How the accuracy reference is trained, where all data is in one place."""

    optimizer: Optimizer = "adam"
    rate: float = 0.001
    batch: int = 256
    weight_decay: float | None = None  # None: as clients have it
    negatives: int = 0  # rows beside a batch's own in a softmax; 0: all rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSettings:
    """Settings that work under noise per user: few rounds of large steps, with everybody in them.

    `cohort` 0 is everybody. `clip` bounds a client's whole update; `selection` is the share of the
    budget for the popularity of rows, and `threshold` how far it has to be over its noise.
    """

    training: LocalTraining
    server: ServerStep = field(default_factory=ServerStep)
    rounds: int = 3
    cohort: int = 0
    clip: float = 1.0
    selection: float = 0.1
    threshold: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task that suit noise, such as a model of few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """Settings that work for a task: training, the server's step, and how far values are cut.

    `clip` bounds what a client sends of a row and `dense_clip` of a dense parameter, both times
    the examples behind them; `max_rows` the rows a client names. `shrinkage` is the server's if
    everybody is in a round; a smaller cohort counts less of a row, and gets its part of it.
    `average` is what a whole model's mean is taken by. `noisy_only`: what clients send is made for
    noise per user, and says too much of them without. `private` is for noise per user,
    `per_person` the training under noise per person of a task with a learner of its own.
    """

    training: LocalTraining = field(default_factory=lambda: LocalTraining(rate=0.1, table_rate=6.0))
    server: ServerStep = field(default_factory=ServerStep)
    central: CentralSettings = field(default_factory=CentralSettings)
    clip: float = 16.0
    dense_clip: float = 16.0
    max_rows: int = 1000
    cohort: int = 100
    rounds: int = 50
    shrinkage: float = 0.0
    average: Average = Average.EXAMPLES
    noisy_only: bool = False
    private: PrivateSettings | None = None
    per_person: LocalTraining | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """A second model over the same sequences, trained on its own, whose scores are mixed in.

    `names` are of the task's own model and of this one. What each counts is chosen by `held`:
    examples of the users' own that neither model was trained on.
    """

    names: tuple[str, str]
    task: Task
    held: Examples = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what, and by which metric it is measured.

    `module` makes a fresh module; its values are the first model. `tables` says which of its
    parameters are tables and which fields index them. `loss` gives one loss per example; with a
    `Softmax` the module gives one logit per row at hand. `setup` is what is summed up over all
    clients before the first round. A task whose clients do not train by gradient descent over
    batches brings the `learner` that trains them, and a `noisy_learner` if it can with noise per
    person. Where clients send sums and train nothing, `solve` makes scores of the shared tables,
    and every client is in the sums once. `beside` is a second model that scores are mixed with.
    """

    name: str
    data: ClientData
    module: Callable[[], nn.Module]
    tables: Tables
    title: str = ""
    loss: Loss = click_loss
    metric: Metric = field(default_factory=ClickMetric)
    setup: Setup | None = None
    learner: Callable[[BoundModel, LocalTraining], Learner] | None = None
    noisy_learner: Callable[[BoundModel, LocalTraining, NoisySteps], Learner] | None = None
    solve: Callable[[SummedModel], ItemScores] | None = None
    beside: Beside | None = None
    recommended: Recommended = field(default_factory=Recommended)
    architecture: Mapping[str, Any] | None = None  # how to make the module again, without the data

    def _repr_html_(self) -> str:
        """For a notebook: what is trained, on what."""
        tables = ", ".join(self.tables.tables) or "none"
        facts = {"tables": tables, "metric": self.metric.name, **self.data.facts}
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(str(name))}</th>"
            f"<td>{escape(str(value))}</td></tr>"
            for name, value in facts.items()
        )
        return f"<div><b>{escape(self.title or self.name)}</b><table>{rows}</table></div>"

    def try_out(self, seed: int) -> None:
        """`ConfigError` if module, loss, metric and data do not fit; a look at a few examples.

        What a task's own set-up or learner makes of its data is known to them alone.
        """
        if self.setup is None and self.learner is None:
            module = self.build(seed)
            bound = self.bind(module)
            try_out(module, bound, self.loss, self.metric, placeholders(self.data), seed)

    def bind(self, module: nn.Module) -> BoundModel:
        """The module with its tables, and the candidates of a softmax where the loss is one."""
        return self.tables.bind(module, self.loss if isinstance(self.loss, Softmax) else None)

    def in_groups(self, size: int) -> Task:
        """The task as members of fixed groups train it, each of whom has its whole union."""
        if not isinstance(self.loss, Softmax):
            return self
        return replace(self, loss=self.loss.in_groups(size))

    def build(self, seed: int) -> nn.Module:
        """A fresh module whose first values follow from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module()
