"""Which learner a network gets, and a part of the examples through both engines' path."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.data.examples import Examples
from tessera.engines.learners import LARGE, Trainer, choose
from tessera.learning.local import Job, class_loss
from tessera.learning.local_training import LocalTraining
from tessera.learning.module_tables import Tables
from tessera.learning.submodel import Submodel


class Wide(nn.Module):
    """One layer over two numbers: `width` classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(2, width, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.out(torch.stack([batch["x"], batch["y"]], -1))


def chosen(width: int, how: Trainer) -> str:
    module = Wide(width)
    bound = Tables({}).bind(module)
    column = torch.linspace(-1.0, 1.0, 9).numpy()
    examples = Examples({"x": column, "y": column[::-1].copy(), "label": (column > 0).astype(int)})
    job = Job(0, Submodel(bound.pack(module), {}, {}), examples)
    found = choose(
        how, module, bound, class_loss, LocalTraining(batch=2), sample=[job], examples=10
    )
    return found.learner.name


def test_a_large_dense_part_is_trained_one_by_one_unless_asked_otherwise() -> None:
    assert chosen(10, Trainer.AUTO) == "vectorised"
    assert chosen(LARGE // 2, Trainer.AUTO) == "one by one"
    assert chosen(LARGE // 2, Trainer.VECTORISED) == "vectorised"
    assert chosen(LARGE // 2 - 1, Trainer.AUTO) == "vectorised"
