"""Next-word tasks: what a speaker says next, by a softmax over the table of words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from tessera.data.examples import ClientData
from tessera.data.words import CONTEXT, NEXT, WORD
from tessera.learning.architecture import build
from tessera.learning.declaration import Table
from tessera.learning.module_tables import Tables
from tessera.learning.ranking import RankMetric
from tessera.learning.softmax import Softmax
from tessera.tasks.task import Recommended, Task

MODEL: Final[Mapping[str, Any]] = {"width": 64, "hidden": 64, "negatives": 200, "top": 3}
"""Options of the model: see `word_task`."""


def word_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    width: int = 64,
    hidden: int = 64,
    negatives: int = 200,
    top: int = 3,
) -> Task:
    """The next word, by a log-bilinear model with vectors of `width` columns.

    A client trains among its own words and `negatives` others; it is tested among all words.
    """
    words = data.sizes[WORD]
    architecture = {
        "name": "next-word",
        "words": words,
        "length": data.train[CONTEXT].shape[1],
        "width": width,
        "hidden": hidden,
    }
    return Task(
        name=data.name,
        title=title,
        data=data,
        module=lambda: build({**architecture, "seed": torch.initial_seed()}),
        tables=Tables(
            {
                "words.weight": Table(NEXT, CONTEXT),  # one set of rows for all three
                "biases.weight": Table(NEXT),
                "before.weight": Table(CONTEXT),
            }
        ),
        loss=Softmax("words.weight", "biases.weight", target=NEXT, negatives=negatives, kind=WORD),
        metric=RankMetric(rows=words, target=NEXT, sequence=CONTEXT, top=top),
        recommended=recommended,
        architecture=architecture,
    )
