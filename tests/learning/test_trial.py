"""What does not fit together is one sentence when a run begins, and leaves no folder behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera
from tessera.data.taobao_like import taobao_like
from tessera.errors import ConfigError
from tessera.plan import Plan

DATA = taobao_like(users=20, items=60, examples=6, history=4)


class Model(nn.Module):
    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.items, self.wrong = nn.Embedding(60, 4), wrong

    def forward(self, batch):
        history = batch["histroy" if self.wrong == "field" else "history"]
        there = (history >= 0).unsqueeze(-1)
        rows = self.items(history if self.wrong == "none" else history.clamp(min=0))
        match = ((rows * there).sum(-2) * self.items(batch["item"])).sum(-1)
        if self.wrong == "classes":
            return torch.stack([match, -match], dim=-1)
        return match.mean() if self.wrong == "mean" else match


def mean_loss(output, batch):
    return F.binary_cross_entropy_with_logits(output, batch["label"])


@pytest.mark.parametrize(
    ("wrong", "more", "match", "hint"),
    [
        ("field", {}, "reads a field 'histroy', which the examples do not have", "'history'"),
        ("none", {}, r"looks up an id of -1, which means none \(in 'history'\)", "clamp"),
        ("classes", {}, r"loss cannot take an output of the shape \(8, 2\)", "(B,)"),
        ("mean", {}, r"gives a tensor of the shape \(\) for a batch of 8", "per example"),
        (
            "",
            {"loss": tessera.Softmax("items.weight", target="item", negatives=5)},
            "some examples are labelled 0 or were drawn",
            'model="next"',
        ),
        ("", {"loss": mean_loss}, r"loss gives a tensor of the shape \(\)", 'reduction="none"'),
    ],
)
def test_a_model_that_does_not_fit_is_told_in_one_sentence(tmp_path, wrong, more, match, hint):
    task = tessera.Task(
        name="mine",
        data=DATA,
        module=lambda: Model(wrong),
        tables=tessera.Tables({"items.weight": tessera.Table("item", "history")}),
        **more,
    )
    with pytest.raises(ConfigError, match=match) as caught:
        tessera.simulate(task, Plan(scheme="submodel", cohort=5), 1, out=tmp_path / "run")
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "run").exists()


def test_a_model_that_fits_trains(tmp_path):
    task = tessera.Task(
        name="mine",
        data=DATA,
        module=Model,
        tables=tessera.Tables({"items.weight": tessera.Table("item", "history")}),
    )
    plan = Plan(scheme="submodel", cohort=5)
    run = tessera.simulate(task, plan, 1, out=tmp_path / "run", trainer="sequential")
    assert run.metric is not None
