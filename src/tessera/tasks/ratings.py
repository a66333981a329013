"""Rating tasks: federated matrix factorisation, with or without private masks (Yang et al.
2021).

`model` is what is federated: "factors", or one of the models of attributes that the paper compares
with. `mask` is what every client fits for itself first; the federation then learns what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from tessera.data.examples import ClientData
from tessera.data.ratings import RatingData
from tessera.errors import ConfigError
from tessera.learning.architecture import build
from tessera.learning.averaging import ServerStep
from tessera.learning.bound_model import BoundModel
from tessera.learning.declaration import Local, Table
from tessera.learning.metrics import RatingMetric
from tessera.learning.models.factorization import Factorizer, rating_loss
from tessera.learning.models.features import ORDERS
from tessera.learning.models.masked import MaskTraining
from tessera.learning.models.refitted import Refitter
from tessera.learning.module_tables import Tables
from tessera.learning.ratings import FACTORS, NO_MASK, refit_penalty
from tessera.learning.setup import RatingSetup
from tessera.learning.training.local import Learner
from tessera.learning.training.noisy.factors import NoisyFactorizer
from tessera.learning.training.noisy.steps import NoisySteps
from tessera.learning.training.settings import LocalTraining
from tessera.tasks.task import Recommended, Task

MODEL: Final[Mapping[str, Any]] = {
    "model": FACTORS,
    "mask": NO_MASK,
    "penalty": 0.0,
    "factors": 64,
    "refit": False,
}
"""Options of the model: see `rating_task`."""

BY_ATTRIBUTES: Final = Recommended(
    training=LocalTraining(batch=32, rate=0.1),
    server=ServerStep(optimizer="momentum"),
    dense_clip=64.0,
)


def rating_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    model: str = FACTORS,
    mask: str = NO_MASK,
    penalty: float = 0.0,
    factors: int = 64,
    refit: bool = False,
    spread: float = 0.1,
) -> Task:
    """Ratings predicted from factors or from attributes, over each client's mask.

    `penalty` is the mask's, the same for everybody; with 0 every client finds its own on a part of
    its ratings that it holds back. With `refit` linear masks are fitted again in each round, with
    one penalty for all. Without `factors` one bias per item is federated.
    """
    if not isinstance(data, RatingData):
        raise ConfigError(f"task {data.name!r}: the data has no ratings")
    if model not in (FACTORS, *ORDERS):
        raise ConfigError(
            f"task: model = {model!r}", hint=f"one of {', '.join((FACTORS, *ORDERS))}"
        )
    if mask not in (NO_MASK, *ORDERS):
        raise ConfigError(f"task: mask = {mask!r}", hint=f"one of {', '.join((NO_MASK, *ORDERS))}")
    if refit and (model != FACTORS or mask != "linear"):
        raise ConfigError(
            f"task: refit = true with model = {model!r} and mask = {mask!r}",
            hint='masks that are fitted again are linear, over factors: mask = "linear"',
        )
    if refit and data.train.subjects is not None:
        raise ConfigError(
            "task: refit = true where a client holds several people, who have no mask of their own",
            hint="leave refit out",
        )
    training = None if refit or mask == NO_MASK else MaskTraining(order=mask, penalty=penalty)
    name = {NO_MASK: data.name}.get(mask, f"{data.name}-{mask}")
    learner: Callable[[BoundModel, LocalTraining], Learner] | None = None
    noisy_learner: Callable[[BoundModel, LocalTraining, NoisySteps], Learner] | None = None
    if model == FACTORS:
        architecture: dict[str, Any] = {
            "name": "factorization",
            "items": data.sizes["item"],
            "users": data.sizes["user"],
            "factors": factors,
            "spread": spread,
        }
        learner, noisy_learner = Factorizer, NoisyFactorizer
        if refit:
            noisy_learner = None
            architecture |= {"name": "refitted", "columns": len(data.items.names)}
            learner = partial(Refitter, penalty=refit_penalty(penalty, data.items.values))
            recommended = replace(
                recommended, training=replace(recommended.training, epochs=1, rate=1.0)
            )
            name = f"{name}-refit"
        tables = Tables({"items.weight": Table("item"), "users.weight": Local("user")})
    else:
        columns = len(data.profiles.names) + len(data.items.names)
        architecture = {"name": "features", "columns": columns, "order": model}
        tables, recommended = Tables({}), replace(BY_ATTRIBUTES, cohort=recommended.cohort)
        if model == "network":
            slower = replace(BY_ATTRIBUTES.training, rate=0.05)
            recommended = replace(recommended, training=slower)
        name = f"{name}-by-{model}"
    return Task(
        name=name,
        title=title,
        data=data,
        module=lambda: build({**architecture, "seed": torch.initial_seed()}),
        tables=tables,
        loss=rating_loss,
        metric=RatingMetric(data.low, data.high),
        setup=RatingSetup(training, features=model != FACTORS, attributes=refit),
        learner=learner,
        noisy_learner=noisy_learner,
        recommended=recommended,
        architecture=architecture,
    )
