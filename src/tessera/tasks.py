"""A task: data, a model and what is measured, by name; a user's own is the same record.

    task = tessera.tasks.load("taobao-like", users=2_000, goods=20_000)
    task = tessera.Task(name="mine", data=data, module=MyModule, tables=tessera.Tables({...}))

`recommended` holds settings that were tuned for the task; a plan takes those that it leaves out.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tessera.data import interactions
from tessera.data.alimama import alimama
from tessera.data.amazon import amazon
from tessera.data.examples import ClientData
from tessera.data.movielens import movielens_1m, movielens_100k
from tessera.data.taobao import taobao
from tessera.data.taobao_like import taobao_like
from tessera.errors import ConfigError
from tessera.learning.architecture import build
from tessera.learning.averaging import ServerStep
from tessera.learning.binding import Derived, Local, Rows, Tables
from tessera.learning.central import Optimizer
from tessera.learning.local import Loss, click_loss
from tessera.learning.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Central:
    """How the accuracy reference is trained, where all data is in one place."""

    optimizer: Optimizer = "adam"
    rate: float = 0.001
    batch: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """Settings that work for a task: training, the server's step, and how far values are cut.

    `clip` bounds what a client sends of a row and `dense_clip` of a dense parameter, both times
    the examples behind them; `max_rows` the rows a client names.
    """

    training: Recipe = field(default_factory=lambda: Recipe(rate=0.1, table_rate=6.0))
    server: ServerStep = field(default_factory=ServerStep)
    central: Central = field(default_factory=Central)
    clip: float = 16.0
    dense_clip: float = 16.0
    max_rows: int = 1000
    cohort: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what, and how it is judged.

    `module` makes a fresh module; its values are the first model. `tables` says which of its
    parameters are tables and which fields index them. `loss` gives one loss per example.
    """

    name: str
    data: ClientData
    module: Callable[[], nn.Module]
    tables: Tables
    title: str = ""
    loss: Loss = click_loss
    metric: str = "AUC"
    recommended: Recommended = field(default_factory=Recommended)
    architecture: Mapping[str, Any] | None = None  # how to make the module again, without the data

    def build(self, seed: int) -> nn.Module:
        """A fresh module whose first values follow from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module()


# --- by name --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """How a task is made: a reader whose options are the task's, and the model over it."""

    read: Callable[..., ClientData]
    summary: str
    title: str
    recommended: Recommended
    spread: float = 0.05

    @property
    def options(self) -> dict[str, Any]:
        """All options with their defaults: the data's, then the model's."""
        parameters = inspect.signature(self.read).parameters
        own = {name: p.default for name, p in parameters.items() if name != "folder"}
        return {**own, **MODEL}


MODEL: Final[Mapping[str, Any]] = {
    "width": 18,
    "size": "small",
    "model": "personal",
    "share_users": False,
}
"""Options of the model, the same for every task: see `click_task`."""


def known(name: str) -> Known:
    """The task of this name, not loaded yet."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        raise ConfigError(
            f"task: nothing is called {name!r}",
            hint=f"did you mean {close[0]}?" if close else f"there are {', '.join(TASKS)}",
        )
    return TASKS[name]


def load(name: str, *, data: Path | str | None = None, **options: Any) -> Task:
    """The task of this name. `data` is the folder of data sets (else TESSERA_DATA says)."""
    task = known(name)
    allowed = task.options
    for option, value in options.items():
        if option not in allowed:
            close = difflib.get_close_matches(option, allowed, n=1)
            raise ConfigError(
                f"task {name!r} has no option {option!r}",
                hint=f"did you mean {close[0]}?" if close else f"options: {', '.join(allowed)}",
            )
        _check_type(name, option, value, allowed[option])
    model = {key: options.pop(key) for key in MODEL if key in options}
    if "folder" in inspect.signature(task.read).parameters:
        options["folder"] = data
    found = task.read(**options)
    return click_task(
        found,
        title=task.title.format(data=found),
        recommended=task.recommended,
        spread=task.spread,
        **model,
    )


def _check_type(name: str, option: str, value: Any, default: Any) -> None:
    kinds: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(
            f"task {name!r}: {option} = {value!r} is not of type {type(default).__name__}",
            hint=f"such as {option} = {default!r}",
        )


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
    """A DIN over click data; goods are fetched, categories follow, the user's row stays home.

    With `share_users` it does not: the user table is one of the full model's, as in the papers.

    `model` is "din", or what adds to it: "biased" a bias per item and per user, "personal" also
    the client's own click rate so far and the match of user and item. A plain DIN hardly beats an
    average.
    """
    if size not in SHAPES:
        raise ConfigError(f"task: size = {size!r}", hint=f"one of {', '.join(SHAPES)}")
    if model not in MODELS:
        raise ConfigError(f"task: model = {model!r}", hint=f"one of {', '.join(MODELS)}")
    switches = dict.fromkeys(MODELS[model], True)
    if "rate" not in data.train.fields:
        switches.pop("rate", None)
    categories = data.sizes.get("category", 0) if data.category_of is not None else 0
    tables: dict[str, Rows | Derived | Local] = {"items.weight": Rows("item", "history")}
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
    tables["users.weight"] = Rows("user") if share_users else Local("user")
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


# --- the tasks ------------------------------------------------------------------------------------

# Readers take None where these take 0 or "": a plan's options have one type each.


def _shop(
    users: int = 2_000,
    goods: int = 20_000,
    categories: int = 0,
    examples: int = 100,
    history: int = 50,
    seed: int = 0,
) -> ClientData:
    return taobao_like(
        users, goods, categories or None, examples=examples, history=history, seed=seed
    )


def _taobao(
    folder: Path | str | None = None,
    label: str = "opened",
    negatives: int = 1,
    users: int = 0,
    history: int = 50,
    seed: int = 0,
) -> ClientData:
    return taobao(
        folder, label=label, negatives=negatives, users=users or None, history=history, seed=seed
    )


def _alimama(
    folder: Path | str | None = None, users: int = 0, history: int = 20, seed: int = 0
) -> ClientData:
    return alimama(folder, users=users or None, history=history, seed=seed)


def _own(
    path: str = "",
    user: str = "user",
    item: str = "item",
    time: str = "",
    label: str = "",
    threshold: float = 0.0,
    category: str = "",
    ids: str = "dictionary",
    dictionary: str = "",
    unknown: str = "drop",
    buckets: int = 2**20,
    negatives: int = 1,
    history: int = 20,
    seed: int = 0,
) -> ClientData:
    if not path:
        raise ConfigError("task 'interactions' has no path", hint='such as path = "clicks.csv"')
    return interactions.read(
        path,
        user=user,
        item=item,
        time=time or None,
        label=label or None,
        threshold=threshold or None,
        category=category or None,
        ids=ids,
        dictionary=dictionary or None,
        unknown=unknown,
        buckets=buckets,
        negatives=negatives,
        history=history,
        seed=seed,
    )


_SHOP: Final = Recommended(central=Central(rate=0.002))
_FILMS: Final = Recommended(
    training=Recipe(batch=8, rate=0.05, table_rate=8.0),
    server=ServerStep(optimizer="adaptive", rate=0.02, epsilon=1e-3),
    central=Central(rate=0.002),
    clip=4.0,
)

# The recommendations of Amazon, MovieLens 1M and the made-up shop were tuned (docs/results.md); the
# others are first guesses.
TASKS: Final[Mapping[str, Known]] = {
    "taobao-like": Known(
        read=_shop,
        summary="A made-up shop like the papers': power-law goods, interests, learnable clicks.",
        title="made-up shop, {data.clients:,} people, {data.sizes[item]:,} goods",
        recommended=_SHOP,
        spread=0.1,
    ),
    "movielens": Known(
        read=movielens_1m,
        summary="MovieLens 1M; a rating of 4 or 5 is a click.",
        title="MovieLens 1M, a rating of 4 or 5 is a click",
        recommended=replace(_FILMS, max_rows=2_500),
    ),
    "movielens-100k": Known(
        read=movielens_100k,
        summary="MovieLens 100K, likewise.",
        title="MovieLens 100K, a rating of 4 or 5 is a click",
        recommended=_FILMS,
    ),
    "amazon": Known(
        read=amazon,
        summary="Amazon electronics, prepared by the FedSubAvg authors; a rating of 5 is a click.",
        title="Amazon electronics, a rating of 5 is a click",
        recommended=Recommended(
            training=Recipe(batch=4, rate=0.1),
            server=ServerStep(optimizer="adaptive", rate=0.05, epsilon=0.03),
            clip=1.0,
        ),
    ),
    "taobao": Known(
        read=_taobao,
        summary="Taobao's UserBehavior.csv; items opened against items drawn.",
        title="Taobao user behaviour",
        recommended=_SHOP,
    ),
    "alimama": Known(
        read=_alimama,
        summary="Alimama display advertising; impressions and clicks.",
        title="Alimama display advertising",
        recommended=_SHOP,
    ),
    "interactions": Known(
        read=_own,
        summary="A user's own CSV or Parquet; an option that is empty or 0 is left out.",
        title="own interactions, {data.name}",
        recommended=replace(_SHOP, cohort=20),
    ),
}
"""What `load` knows."""
