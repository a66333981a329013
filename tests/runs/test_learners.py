"""Which learner a network gets, and a part of the examples through both engines' path."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.data.speech import speakers_like
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable, class_loss
from tessera.learning.training.settings import LocalTraining
from tessera.runs.client_training import LARGE, WORTH_COMPILING, ChosenLearner, Trainer, choose
from tessera.tasks import Recommended, word_task


class Wide(nn.Module):
    """One layer over two numbers: `width` classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(2, width, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.out(torch.stack([batch["x"], batch["y"]], -1))


def chosen(width: int, how: Trainer, examples_to_come: int = 10) -> ChosenLearner:
    module = Wide(width)
    bound = Tables({}).bind(module)
    column = torch.linspace(-1.0, 1.0, 9).numpy()
    examples = Examples({"x": column, "y": column[::-1].copy(), "label": (column > 0).astype(int)})
    job = Job(0, Submodel(bound.pack(module), {}, {}), examples, coins=Secret(bytes(32)))
    return choose(
        how,
        Trainable(module, bound, class_loss, LocalTraining(batch=2)),
        sample=[job],
        examples=examples_to_come,
    )


def test_a_large_dense_part_is_trained_one_by_one_unless_asked_otherwise() -> None:
    assert chosen(10, Trainer.AUTO).learner.name == "vectorised"
    assert chosen(LARGE // 2, Trainer.AUTO).learner.name == "one by one"
    assert chosen(LARGE // 2, Trainer.VECTORISED).learner.name == "vectorised"
    assert chosen(LARGE // 2 - 1, Trainer.AUTO).learner.name == "vectorised"


def test_auto_says_why_it_does_not_compile() -> None:
    few = chosen(10, Trainer.AUTO, WORTH_COMPILING - 1)
    assert few.reason.endswith("compiling does not pay for the 999,999 examples to come")
    asked = chosen(10, Trainer.VECTORISED, 10**9)
    assert asked.reason.endswith("compiling was not asked for")


def test_a_softmax_is_not_compiled_unless_asked_for() -> None:
    """Every number of candidates would be compiled by itself."""
    data = speakers_like(speakers=3, length=2)
    task = word_task(data, title="words", recommended=Recommended(), width=2, hidden=2)
    module = task.build(0)
    bound = task.bind(module)
    examples = data.of(0).take(np.arange(6))
    rows = {name: np.unique(ids) for name, ids in bound.row_ids_of(examples).items()}
    parts = {
        table.name: TablePart(rows["words"], bound.initial(table.name)[rows["words"]])
        for table in bound.tables
    }
    job = Job(
        0,
        Submodel(bound.pack(module), parts, dict.fromkeys(parts, rows["words"])),
        examples,
        coins=Secret(bytes(32)),
    )
    found = choose(
        Trainer.AUTO,
        Trainable(module, bound, task.loss, LocalTraining(batch=2)),
        sample=[job],
        examples=10**9,
    )
    assert found.learner.name == "vectorised"
    assert "its own number of candidates" in found.reason
