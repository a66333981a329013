"""Click tasks: a DIN over who clicked what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from tessera.data.examples import ClientData
from tessera.errors import ConfigError
from tessera.learning.architecture import build
from tessera.learning.declaration import Derived, Local, Table
from tessera.learning.machine import physical_memory
from tessera.learning.module_tables import Tables
from tessera.tasks.task import Recommended, Task

MOST_COLUMNS: Final = 65_536

MODEL: Final[Mapping[str, Any]] = {
    "width": 18,
    "size": "small",
    "model": "personal",
    "share_users": False,
}
"""Options of the model, the same for every task: see `click_task`."""

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {"attention": (16, 8), "layers": (32, 16)},
    "small": {"attention": (16, 8), "layers": (64, 32)},
    "papers": {"attention": (80, 40), "layers": (200, 80)},
}
"""Sizes of the dense part; "papers" has 64,327 parameters with categories and 18 columns."""


MODELS: Final[Mapping[str, tuple[str, ...]]] = {
    "din": (),
    "biased": ("bias",),
    "personal": ("bias", "product", "rate"),
}


def click_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    width: int = 18,
    size: str = "small",
    model: str = "personal",
    share_users: bool = False,
    spread: float = 0.05,
) -> Task:
    """A DIN over click data; items are fetched, categories follow, a user's row is local.

    With `share_users` the user table is one of the full model's, as in the papers.

    `model` is "din", or what adds to it: "biased" a bias per item and per user, "personal" also
    the client's own click rate so far and the match of user and item. A plain DIN hardly beats an
    average.
    """
    if size not in SHAPES:
        raise ConfigError(f"task: size = {size!r}", hint=f"one of {', '.join(SHAPES)}")
    if model not in MODELS:
        raise ConfigError(f"task: model = {model!r}", hint=f"one of {', '.join(MODELS)}")
    _check_width(data, width)
    switches = dict.fromkeys(MODELS[model], True)
    if "rate" not in data.train.fields:
        switches.pop("rate", None)
    categories = data.sizes.get("category", 0) if data.category_of is not None else 0
    tables: dict[str, Table | Derived | Local] = {"items.weight": Table("item", "history")}
    if categories:
        assert data.category_of is not None
        tables["categories.weight"] = Derived(
            "items.weight", data.category_of, {"category": "item", "history_category": "history"}
        )
    if "bias" in switches:
        # Its own table, counted by targets alone: in the items' counts whoever liked a thing has it
        # in every history after, and would outweigh everybody who did not.
        itself = np.arange(data.sizes["item"])
        tables["biases.weight"] = Derived("items.weight", itself, {"target": "item"})
    tables["users.weight"] = Table("user") if share_users else Local("user")
    architecture = {
        "name": "din",
        "items": data.sizes["item"],
        "categories": categories,
        "users": data.sizes["user"],
        "width": width,
        "spread": spread,
        **switches,
        **SHAPES[size],
    }
    return Task(
        name=data.name,
        title=title,
        data=data,
        module=lambda: build({**architecture, "seed": torch.initial_seed()}),
        tables=Tables(tables),
        recommended=recommended,
        architecture=architecture,
    )


def _check_width(data: ClientData, width: int) -> None:
    """Whether the tables fit into memory, before anything is made."""
    memory, rows = physical_memory(), data.sizes["item"] + data.sizes["user"]
    if not 1 <= width <= MOST_COLUMNS:
        raise ConfigError(f"task: width = {width}", hint=f"1 to {MOST_COLUMNS:,} columns")
    if memory is not None and 4 * rows * width > memory // 2:
        raise ConfigError(
            f"task: tables of {rows:,} rows and {width} columns take {4 * rows * width:,} bytes, "
            f"this machine has {memory:,}",
            hint="use fewer rows (buckets, items) or columns (width)",
        )
