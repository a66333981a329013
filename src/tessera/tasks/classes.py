"""Class tasks: networks without tables, whose dense part is all there is (Cui et al. 2022, 7.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from tessera.data.examples import ClientData
from tessera.learning.architecture import build
from tessera.learning.metrics import ClassMetric
from tessera.learning.module_tables import Tables
from tessera.learning.training.local import class_loss
from tessera.tasks.task import Recommended, Task

TEXT: Final[Mapping[str, Any]] = {"width": 100, "filters": 100}
"""Options of the network for questions."""
IMAGES: Final[Mapping[str, Any]] = {"channels": 32, "hidden": 512}
"""Options of the network for images."""


def text_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    width: int = 100,
    filters: int = 100,
) -> Task:
    """The class of a question, by a TextCNN with words of `width` columns."""
    return _task(
        data,
        {
            "name": "textcnn",
            "words": data.sizes["word"],
            "classes": data.sizes["class"],
            "width": width,
            "filters": filters,
        },
        title=title,
        recommended=recommended,
    )


def image_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    channels: int = 32,
    hidden: int = 512,
) -> Task:
    """The class of an image, by the CNN of McMahan et al. 2017."""
    return _task(
        data,
        {
            "name": "cnn",
            "classes": data.sizes["class"],
            "channels": (channels, 2 * channels),
            "hidden": hidden,
        },
        title=title,
        recommended=recommended,
    )


def _task(
    data: ClientData, architecture: Mapping[str, Any], *, title: str, recommended: Recommended
) -> Task:
    return Task(
        name=data.name,
        title=title,
        data=data,
        module=lambda: build({**architecture, "seed": torch.initial_seed()}),
        tables=Tables({}),
        loss=class_loss,
        metric=ClassMetric(data.sizes["class"]),
        recommended=recommended,
        architecture=architecture,
    )
