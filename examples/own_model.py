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

    def __init__(self, items: int, kinds: int, users: int) -> None:
        super().__init__()
        self.items, self.kinds = nn.Embedding(items, 8), nn.Embedding(kinds, 8)
        self.users = nn.Embedding(users, 1)
        for table in (self.items, self.kinds, self.users):
            nn.init.normal_(table.weight, std=0.1)  # small: what is learnt should decide

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        there = (batch["history"] >= 0).unsqueeze(-1)
        past = self.items(batch["history"].clamp(min=0)) + self.kinds(batch["liked"].clamp(min=0))
        liked = (past * there).sum(-2) / there.sum(-2).clamp(min=1)
        shown = self.items(batch["item"]) + self.kinds(batch["kind"])
        match = (liked * shown).sum(-1) + self.users(batch["user"]).squeeze(-1)
        return match + torch.logit(batch["rate"])


def main(rounds: int = 30) -> tessera.Run:
    data = taobao_like(users=300, items=1_000, categories=30, examples=60, history=20)
    task = tessera.Task(
        name="own-model",
        data=data,
        module=lambda: Taste(1_000, 30, 300),
        tables=tessera.Tables(
            {
                "items.weight": tessera.Table("item", "history"),  # fetched and updated by rows
                "kinds.weight": tessera.Derived(  # follow from the items, by a public map
                    "items.weight", data.category_of, {"kind": "item", "liked": "history"}
                ),
                "users.weight": tessera.Local("user"),  # never leaves its client
            }
        ),
    )
    plan = tessera.Plan(scheme="secure-submodel", cohort=20)
    return tessera.simulate(task, plan, rounds=rounds)


if __name__ == "__main__":
    run = main()
    print("AUC by round:", {done: round(auc, 3) for done, auc in run.curve})
    print("without a model:", {name: round(auc, 3) for name, auc in run.facts["trivial"].items()})
    print("page:", run.report())
