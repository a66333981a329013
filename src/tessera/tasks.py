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

from tessera.data.alimama import alimama
from tessera.data.amazon import amazon
from tessera.data.examples import ClickData
from tessera.data.interactions import read as read_interactions
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
    data: ClickData
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


_SHOP: Final = Recommended(central=Central(rate=0.002))
_FILMS: Final = Recommended(
    training=Recipe(batch=8, rate=0.05, table_rate=8.0),
    server=ServerStep(optimizer="adaptive", rate=0.02, epsilon=1e-3),
    central=Central(rate=0.002),
    clip=4.0,
)

RECOMMENDED: Final[Mapping[str, Recommended]] = {
    "taobao-like": _SHOP,
    "movielens": replace(_FILMS, max_rows=2_500),
    "movielens-100k": _FILMS,
    "amazon": Recommended(
        training=Recipe(batch=4, rate=0.1),
        server=ServerStep(optimizer="adaptive", rate=0.05, epsilon=0.03),
        clip=1.0,
    ),
    "taobao": _SHOP,
    "alimama": _SHOP,
    "interactions": replace(_SHOP, cohort=20),
}
"""Those of Amazon, MovieLens 1M and the made-up shop were tuned (docs/results.md); the others are
first guesses."""


# --- by name --------------------------------------------------------------------------------------


def load(name: str, *, data: Path | str | None = None, **options: Any) -> Task:
    """The task of this name. `data` is the folder of data sets (else TESSERA_DATA says)."""
    known_name(name)
    make = TASKS[name]
    known = [p for p in inspect.signature(make).parameters if p != "data"]
    for option, value in options.items():
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            raise ConfigError(
                f"task {name!r} has no option {option!r}",
                hint=f"did you mean {close[0]}?" if close else f"its options: {', '.join(known)}",
            )
        _check_type(name, option, value, inspect.signature(make).parameters[option].default)
    if "data" in inspect.signature(make).parameters:
        return make(data=data, **options)
    return make(**options)


def options_of(name: str) -> dict[str, Any]:
    """A task's options with their defaults."""
    known_name(name)
    parameters = inspect.signature(TASKS[name]).parameters
    return {key: p.default for key, p in parameters.items() if key != "data"}


def known_name(name: str) -> None:
    """Refuse a name that nothing has."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        raise ConfigError(
            f"task: nothing is called {name!r}",
            hint=f"did you mean {close[0]}?" if close else f"there are {', '.join(TASKS)}",
        )


def _check_type(name: str, option: str, value: Any, default: Any) -> None:
    if default is None or default is inspect.Parameter.empty:
        return
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
    data: ClickData,
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


Folder = Path | str | None


def _taobao_like(
    users: int = 2_000,
    goods: int = 20_000,
    categories: int = 0,
    examples: int = 100,
    history: int = 50,
    seed: int = 0,
    width: int = 18,
    size: str = "small",
    model: str = "personal",
    share_users: bool = False,
) -> Task:
    """A made-up shop like the papers': power-law goods, interests, learnable clicks."""
    made = taobao_like(
        users, goods, categories or None, examples=examples, history=history, seed=seed
    )
    return click_task(
        made,
        title=f"made-up shop, {users:,} people, {goods:,} goods",
        recommended=RECOMMENDED["taobao-like"],
        width=width,
        size=size,
        model=model,
        share_users=share_users,
        spread=0.1,
    )


def _movielens(
    data: Folder = None,
    history: int = 20,
    genres: bool = False,
    width: int = 18,
    size: str = "small",
    model: str = "personal",
    share_users: bool = False,
) -> Task:
    """MovieLens 1M; a rating of 4 or 5 is a click."""
    return click_task(
        movielens_1m(data, history=history, genres=genres),
        title="MovieLens 1M, a rating of 4 or 5 is a click",
        recommended=RECOMMENDED["movielens"],
        width=width,
        size=size,
        model=model,
        share_users=share_users,
    )


def _movielens_100k(
    data: Folder = None,
    history: int = 20,
    genres: bool = False,
    width: int = 18,
    size: str = "small",
    model: str = "personal",
) -> Task:
    """MovieLens 100K, likewise."""
    return click_task(
        movielens_100k(data, history=history, genres=genres),
        title="MovieLens 100K, a rating of 4 or 5 is a click",
        recommended=RECOMMENDED["movielens-100k"],
        width=width,
        size=size,
        model=model,
    )


def _amazon(
    data: Folder = None,
    history: int = 20,
    width: int = 18,
    size: str = "small",
    model: str = "personal",
    share_users: bool = False,
) -> Task:
    """Amazon electronics as the FedSubAvg authors prepared it; a rating of 5 is a click."""
    return click_task(
        amazon(data, history=history),
        title="Amazon electronics, a rating of 5 is a click",
        recommended=RECOMMENDED["amazon"],
        width=width,
        size=size,
        model=model,
        share_users=share_users,
    )


def _taobao(
    data: Folder = None,
    label: str = "opened",
    negatives: int = 1,
    users: int = 0,
    history: int = 50,
    seed: int = 0,
    width: int = 18,
    size: str = "small",
    model: str = "personal",
) -> Task:
    """Taobao's UserBehavior.csv; items opened against items drawn."""
    return click_task(
        taobao(
            data, label=label, negatives=negatives, users=users or None, history=history, seed=seed
        ),
        title="Taobao user behaviour",
        recommended=RECOMMENDED["taobao"],
        width=width,
        size=size,
        model=model,
    )


def _alimama(
    data: Folder = None,
    users: int = 0,
    history: int = 20,
    seed: int = 0,
    width: int = 18,
    size: str = "small",
    model: str = "personal",
) -> Task:
    """Alimama display advertising; impressions and clicks."""
    return click_task(
        alimama(data, users=users or None, history=history, seed=seed),
        title="Alimama display advertising",
        recommended=RECOMMENDED["alimama"],
        width=width,
        size=size,
        model=model,
    )


def interactions(
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
    width: int = 18,
    size: str = "small",
    model: str = "personal",
) -> Task:
    """A user's own CSV or Parquet; an option that is empty or 0 is left out."""
    if not path:
        raise ConfigError("task 'interactions' has no path", hint='such as path = "clicks.csv"')
    read = read_interactions(
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
    return click_task(
        read,
        title=f"own interactions, {Path(path).name}",
        recommended=RECOMMENDED["interactions"],
        width=width,
        size=size,
        model=model,
    )


TASKS: Final[Mapping[str, Callable[..., Task]]] = {
    "taobao-like": _taobao_like,
    "movielens": _movielens,
    "movielens-100k": _movielens_100k,
    "amazon": _amazon,
    "taobao": _taobao,
    "alimama": _alimama,
    "interactions": interactions,
}
"""What `load` knows."""
