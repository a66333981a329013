"""Rating tasks: federated matrix factorisation, with or without private masks (Yang et al.
2021).

`model` is what is federated: "factors", or one of the models of attributes that the paper compares
with. `mask` is what every client fits for itself first; the federation then learns what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from tessera.data.examples import ClientData
from tessera.data.ratings import RatingData
from tessera.errors import ConfigError
from tessera.learning.architecture import build
from tessera.learning.averaging import ServerStep
from tessera.learning.declaration import Local, Table
from tessera.learning.local_training import LocalTraining
from tessera.learning.metrics import RatingMetric
from tessera.learning.models.factorization import Factorizer, rating_loss
from tessera.learning.models.features import ORDERS
from tessera.learning.models.masked import MaskTraining
from tessera.learning.module_tables import Tables
from tessera.learning.ratings import FACTORS, NO_MASK
from tessera.learning.setup import RatingSetup
from tessera.tasks.task import Recommended, Task

MODEL: Final[Mapping[str, Any]] = {
    "model": FACTORS,
    "mask": NO_MASK,
    "penalty": 0.0,
    "factors": 64,
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
    spread: float = 0.1,
) -> Task:
    """Ratings predicted from factors or from attributes, over each client's mask.

    `penalty` is the mask's, the same for everybody; with 0 every client finds its own on a part of
    its ratings that it holds back.
    """
    if not isinstance(data, RatingData):
        raise ConfigError(f"task {data.name!r}: the data has no ratings")
    if model not in (FACTORS, *ORDERS):
        raise ConfigError(
            f"task: model = {model!r}", hint=f"one of {', '.join((FACTORS, *ORDERS))}"
        )
    if mask not in (NO_MASK, *ORDERS):
        raise ConfigError(f"task: mask = {mask!r}", hint=f"one of {', '.join((NO_MASK, *ORDERS))}")
    training = None if mask == NO_MASK else MaskTraining(order=mask, penalty=penalty)
    name = {NO_MASK: data.name}.get(mask, f"{data.name}-{mask}")
    if model == FACTORS:
        architecture: dict[str, Any] = {
            "name": "factorization",
            "items": data.sizes["item"],
            "users": data.sizes["user"],
            "factors": factors,
            "spread": spread,
        }
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
        setup=RatingSetup(training, features=model != FACTORS),
        learner=Factorizer if model == FACTORS else None,
        recommended=recommended,
        architecture=architecture,
    )
