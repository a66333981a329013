"""Task: data, a model and a metric; a user's own is the same record.

`recommended` holds settings that were tuned for the task; a plan takes those that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import nn

from tessera.data.examples import ClientData
from tessera.data.negatives import placeholders
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.bound_model import BoundModel
from tessera.learning.metrics import ClickMetric, Metric
from tessera.learning.module_tables import Tables
from tessera.learning.setup import Setup
from tessera.learning.softmax import Softmax
from tessera.learning.training.central import Optimizer
from tessera.learning.training.local import Learner, Loss, click_loss
from tessera.learning.training.noisy.steps import NoisySteps
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.trial import try_out


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
    `average` is what a whole model's mean is taken by. `private` is for noise per user,
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
    private: PrivateSettings | None = None
    per_person: LocalTraining | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what, and by which metric it is measured.

    `module` makes a fresh module; its values are the first model. `tables` says which of its
    parameters are tables and which fields index them. `loss` gives one loss per example; with a
    `Softmax` the module gives one logit per row at hand. `setup` is what is summed up over all
    clients before the first round. A task whose clients do not train by gradient descent over
    batches brings the `learner` that trains them, and a `noisy_learner` if it can with noise per
    person.
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

    def build(self, seed: int) -> nn.Module:
        """A fresh module whose first values follow from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module()
