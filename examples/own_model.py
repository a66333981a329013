"""A model of your own: any module, and the names of its tables. Runs in under a minute.

python examples/own_model.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tessera
from tessera.data.taobao_like import taobao_like


class Taste(nn.Module):
    """What somebody liked before, against what is shown now. An id below 0 means none."""

    def __init__(self, goods: int, people: int) -> None:
        super().__init__()
        self.goods = nn.Embedding(goods, 16)
        self.people = nn.Embedding(people, 1)
        self.score = nn.Linear(16, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        there = (batch["history"] >= 0).unsqueeze(-1)
        liked = (self.goods(batch["history"].clamp(min=0)) * there).sum(-2)
        match = self.score(liked * self.goods(batch["item"]))
        return (match + self.people(batch["user"])).squeeze(-1) + torch.logit(batch["rate"])


def main(rounds: int = 10) -> tessera.Run:
    data = taobao_like(users=300, goods=2_000, examples=30, history=10)
    task = tessera.Task(
        name="own-model",
        data=data,
        module=lambda: Taste(2_000, 300),
        tables=tessera.Tables(
            {
                "goods.weight": tessera.Rows("item", "history"),  # fetched and updated, row by row
                "people.weight": tessera.Local("user"),  # never leaves its client
            }
        ),
    )
    plan = tessera.Plan(scheme="secure-submodel", cohort=20, index_privacy="cpp2")
    return tessera.simulate(task, plan, rounds=rounds)


if __name__ == "__main__":
    run = main()
    print(f"AUC by round: {run.curve}")
    print(f"without a model: {run.facts['trivial']}")
    print(f"page: {run.report()}")
