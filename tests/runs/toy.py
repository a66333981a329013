"""A task small enough for tests: a synthetic shop, and a module of a few parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.taobao_like import taobao_like
from tessera.learning.bound_model import Derived, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan, PrivacyPlan, SimulationPlan
from tessera.tasks import CentralSettings, Recommended, Task

USERS, GOODS = 24, 150


class Taste(nn.Module):
    """A history's mean against the target, plus what is known of category and user."""

    def __init__(self, goods: int, categories: int, users: int, width: int = 4) -> None:
        super().__init__()
        self.items = nn.Embedding(goods, width)
        self.categories = nn.Embedding(categories, 1)
        self.users = nn.Embedding(users, 1)
        self.mix = nn.Linear(width, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history = batch["history"]
        there = history.ge(0).unsqueeze(-1).float()
        past = (self.items(history.clamp(min=0)) * there).sum(-2) / there.sum(-2).clamp(min=1.0)
        match = self.mix(past * self.items(batch["item"])).squeeze(-1)
        own = self.categories(batch["category"]) + self.users(batch["user"])
        return match + own.squeeze(-1)


class Poisoned(Taste):
    """Gives NaN to whoever is user 3."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        score = super().forward(batch)
        poison = torch.where(batch["poison"] > 0, float("nan"), 0.0)
        return score + poison


def task(*, users: int = USERS, poisoned: int | None = None) -> Task:
    data = taobao_like(users, GOODS, 8, examples=12, history=4, seed=1)
    kind: type[Taste] = Taste
    if poisoned is not None:
        kind = Poisoned
        sick = {
            "train": data.train.with_field(
                "poison", (data.train["user"] == poisoned).astype(np.float32)
            ),
            "test": data.test.with_field("poison", np.zeros(len(data.test), np.float32)),
        }
        data = type(data)(
            name=data.name,
            offsets=data.offsets,
            test_offsets=data.test_offsets,
            sizes=data.sizes,
            category_of=data.category_of,
            facts=data.facts,
            **sick,
        )
    return Task(
        name="toy",
        title="a toy",
        data=data,
        module=lambda: kind(GOODS, 8, users),
        tables=Tables(
            {
                "items.weight": Table("item", "history"),
                "categories.weight": Derived(
                    "items.weight", data.category_of, {"category": "item"}
                ),
                "users.weight": Local("user"),
            }
        ),
        recommended=Recommended(
            training=LocalTraining(batch=4, rate=0.2),
            central=CentralSettings(batch=16),
            max_rows=100,
        ),
    )


def plan(scheme: str = "secure-submodel", **more) -> Plan:
    simulation = SimulationPlan(**{"rounds": 6, "evaluate_every": 2, **more.pop("simulation", {})})
    privacy = PrivacyPlan(**{"level": "cpp4", "period_rounds": 3, **more.pop("privacy", {})})
    return Plan(scheme=scheme, cohort=6, privacy=privacy, simulation=simulation, seed=3, **more)
