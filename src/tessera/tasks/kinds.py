"""Kinds of tasks: a model over any data of its kind, its options, and what they mean.

Clicks (a DIN), classes (networks without tables), next words (a softmax over the table of words)
and ratings (matrix factorisation, with or without private masks).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from tessera.data.examples import ClientData
from tessera.data.ratings import RatingData
from tessera.data.speech import CONTEXT, NEXT, WORD
from tessera.errors import ConfigError
from tessera.learning.architecture import build
from tessera.learning.averaging import ServerStep
from tessera.learning.bound_model import BoundModel, Derived, Local, Table
from tessera.learning.machine import physical_memory
from tessera.learning.metrics import ClassMetric, RankMetric, RatingMetric
from tessera.learning.models.factorization import Factorizer, NoisyFactorizer, rating_loss
from tessera.learning.models.features import ORDERS
from tessera.learning.models.lags import BIASES, ITEMS
from tessera.learning.models.masked import MaskTraining
from tessera.learning.models.refitted import Refitter
from tessera.learning.module_tables import Tables
from tessera.learning.rating_models import FACTORS, NO_MASK, refit_penalty
from tessera.learning.softmax import Softmax
from tessera.learning.task_setup import RatingSetup
from tessera.learning.training.jobs import Learner, class_loss
from tessera.learning.training.noisy_steps import NoisySteps
from tessera.learning.training.settings import LocalTraining
from tessera.tasks.task import Recommended, Task

MOST_COLUMNS: Final = 65_536

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


# --- classes --------------------------------------------------------------------------------------
#
# Class tasks: networks without tables, whose dense part is all there is (Cui et al. 2022, 7.3).


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


# --- words ----------------------------------------------------------------------------------------
#
# Next-word tasks: what a speaker says next, by a softmax over the table of words.


WORD_MODELS: Final = ("log-bilinear", "next")


def word_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    model: str = "log-bilinear",
    width: int = 64,
    hidden: int = 64,
    negatives: int = 200,
    top: int = 3,
    by_model: Mapping[str, Recommended] | None = None,
) -> Task:
    """The next word, by a log-bilinear model with vectors of `width` columns, or by lags ("next").

    A client trains among its own words and `negatives` others; it is tested among all words.
    `by_model` are settings for models that the `recommended` ones are not for.
    """
    if model not in WORD_MODELS:
        raise ConfigError(f"task: model = {model!r}", hint=f"one of {', '.join(WORD_MODELS)}")
    recommended, words = (by_model or {}).get(model, recommended), data.sizes[WORD]
    metric = RankMetric(rows=words, target=NEXT, sequence=CONTEXT, top=top)
    if model == "next":
        lags = {
            "name": "lags",
            "items": words,
            "length": data.train[CONTEXT].shape[1],
            "width": width,
            "sequence": CONTEXT,
        }
        return Task(
            name=data.name,
            title=title,
            data=data,
            module=lambda: build({**lags, "seed": torch.initial_seed()}),
            tables=Tables({ITEMS: Table(NEXT, CONTEXT), BIASES: Table(NEXT)}),
            loss=Softmax(ITEMS, BIASES, target=NEXT, negatives=negatives, kind=WORD),
            metric=metric,
            recommended=recommended,
            architecture=lags,
        )
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
        metric=metric,
        recommended=recommended,
        architecture=architecture,
    )


# --- ratings --------------------------------------------------------------------------------------
#
# Rating tasks: federated matrix factorisation, with or without private masks (Yang et al.
# 2021).
#
# `model` is what is federated: "factors", or one of the models of attributes that the paper
# compares with. `mask` is what every client fits for itself first; the federation then learns what
# is left.


BY_ATTRIBUTES: Final = Recommended(
    training=LocalTraining(batch=32, rate=0.1),
    server=ServerStep(optimizer="momentum"),
    dense_clip=64.0,
)


def rating_task(
    data: ClientData,
    *,
    title: str,
    recommended: Recommended,
    model: str = FACTORS,
    mask: str = NO_MASK,
    penalty: float = 0.0,
    factors: int = 64,
    refit: bool = False,
    spread: float = 0.1,
) -> Task:
    """Ratings predicted from factors or from attributes, over each client's mask.

    `penalty` is the mask's, the same for everybody; with 0 every client finds its own on a part of
    its ratings that it holds back. With `refit` linear masks are fitted again in each round, with
    one penalty for all. Without `factors` one bias per item is federated.
    """
    if not isinstance(data, RatingData):
        raise ConfigError(f"task {data.name!r}: the data has no ratings")
    if model not in (FACTORS, *ORDERS):
        raise ConfigError(
            f"task: model = {model!r}", hint=f"one of {', '.join((FACTORS, *ORDERS))}"
        )
    if mask not in (NO_MASK, *ORDERS):
        raise ConfigError(f"task: mask = {mask!r}", hint=f"one of {', '.join((NO_MASK, *ORDERS))}")
    if refit and (model != FACTORS or mask != "linear"):
        raise ConfigError(
            f"task: refit = true with model = {model!r} and mask = {mask!r}",
            hint='masks that are fitted again are linear, over factors: mask = "linear"',
        )
    if refit and data.train.subjects is not None:
        raise ConfigError(
            "task: refit = true where a client holds several people, who have no mask of their own",
            hint="leave refit out",
        )
    training = None if refit or mask == NO_MASK else MaskTraining(order=mask, penalty=penalty)
    name = {NO_MASK: data.name}.get(mask, f"{data.name}-{mask}")
    learner: Callable[[BoundModel, LocalTraining], Learner] | None = None
    noisy_learner: Callable[[BoundModel, LocalTraining, NoisySteps], Learner] | None = None
    if model == FACTORS:
        architecture: dict[str, Any] = {
            "name": "factorization",
            "items": data.sizes["item"],
            "users": data.sizes["user"],
            "factors": factors,
            "spread": spread,
        }
        learner, noisy_learner = Factorizer, NoisyFactorizer
        if refit:
            noisy_learner = None
            architecture |= {"name": "refitted", "columns": len(data.items.names)}
            learner = partial(Refitter, penalty=refit_penalty(penalty, data.items.values))
            recommended = replace(
                recommended, training=replace(recommended.training, epochs=1, rate=1.0)
            )
            name = f"{name}-refit"
        tables = Tables({"items.weight": Table("item"), "users.weight": Local("user")})
    else:
        columns = len(data.profiles.names) + len(data.items.names)
        architecture = {"name": "features", "columns": columns, "order": model}
        tables, recommended = Tables({}), replace(BY_ATTRIBUTES, cohort=recommended.cohort)
        if model == "network":
            slower = replace(BY_ATTRIBUTES.training, rate=0.05)
            recommended = replace(recommended, training=slower)
        name = f"{name}-by-{model}"
    return Task(
        name=name,
        title=title,
        data=data,
        module=lambda: build({**architecture, "seed": torch.initial_seed()}),
        tables=tables,
        loss=rating_loss,
        metric=RatingMetric(data.low, data.high),
        setup=RatingSetup(training, features=model != FACTORS, attributes=refit),
        learner=learner,
        noisy_learner=noisy_learner,
        recommended=recommended,
        architecture=architecture,
    )


# --- options --------------------------------------------------------------------------------------
#
# Options of tasks, those of the data and of the model, and what they mean: the one explanation of
# the keys of [task] in a plan.


_CLICKS: Final[Mapping[str, str]] = {
    "users": "Users of the data; 0: all of them.",
    "items": "Items of the synthetic shop.",
    "categories": "Categories of items; 0: in proportion to the items.",
    "examples": "Training examples of a client, on average.",
    "history": "Most items in the history of an example.",
    "shops": "Shops, which are the clients.",
    "shops_each": "Shops that one person goes to.",
    "seed": "Seed of the synthetic data, or of which users are taken.",
    "genres": "Whether a movie's set of genres is its category.",
    "label": 'A click is an item "opened", or one "wanted": bought, in the cart, a favourite.',
    "negatives": "Items per click that a client draws from its own secret as not clicked.",
    "width": "Columns of the embedding tables.",
    "size": 'Size of the dense part: "tiny", "small" or "papers".',
    "model": '"din", "biased" (adds biases) or "personal" (adds rates and matches too).',
    "share_users": "Whether the user table is part of the shared model, as in the papers; refused "
    "in fixed groups, where a row of that table says whose it is.",
}

_INTERACTIONS: Final[Mapping[str, str]] = {
    **_CLICKS,
    "path": "The file: CSV or Parquet.",
    "user": "Its column of users.",
    "client": "Its column of clients; empty: every user is one.",
    "subject": "Its column of people; empty: every user is one.",
    "item": "Its column of items.",
    "time": "Its column of times; empty: the lines are in order.",
    "time_format": "How times are written, as in strptime; empty: found by looking.",
    "label": "Its column of labels; empty: every line is a click.",
    "threshold": "Smallest label that is a click; 0: labels are 0 and 1.",
    "category": "Its column of categories; empty: none.",
    "ids": 'How an item becomes a row: by "dictionary" or by "hash".',
    "dictionary": "A public file with one item per line; empty: made of this file.",
    "unknown": 'Items outside the dictionary: "drop" them, or share one "row".',
    "buckets": "Rows of the table, with hashes.",
    "features": "Further columns for a model of one's own, with commas between; empty: none.",
    "separator": "Between the fields of a CSV; empty: found by looking.",
    "encoding": 'Of a CSV, such as "utf-8"; empty: found by looking.',
    "item_features": "A second file, about items: each once, in a column of the same name; empty: "
    "none, and title and attributes are columns of the first.",
    "title": "The column of what people call an item; empty: none.",
    "attributes": "Columns of public attributes of items, for pairs with [dp], with commas "
    "between; empty: none, or without a title all of item_features. A cell may have several "
    "classes, with | between.",
    "on_bad": 'Lines that cannot be read: "stop" there, or "skip" and count them.',
}

_RATINGS: Final[Mapping[str, str]] = {
    "shops": "Shops, which are the clients.",
    "shops_each": "Shops that one person goes to.",
    "columns": "Numbers per item that its tags are reduced to.",
    "split": 'The test part: "random", or as "published".',
    "test_share": "Share of the ratings in a random test part.",
    "seed": "Seed of the random split.",
    "part": 'What the model is tested on: "test", or "validation" to tune settings.',
    "model": 'Matrix "factors", or from attributes: "linear", "fm" or "network".',
    "mask": 'The private mask of a client: "none", "linear", "fm" or "network".',
    "penalty": "The mask's L2 penalty; 0: every client finds its own.",
    "factors": "Columns of the factors; 0: biases alone.",
    "refit": "Whether clients fit their linear masks again in each round.",
}

_CLASSES: Final[Mapping[str, str]] = {
    "clients": "Clients that the training examples are dealt out to.",
    "words": "Most words of a question.",
    "seed": "Seed of who gets which example.",
    "part": 'What the model is tested on: "test", or "validation" to tune settings.',
    "width": "Columns of a word's vector.",
    "filters": "Filters of each span.",
    "channels": "Channels of the first convolution; the second has twice as many.",
    "hidden": "Units of the hidden layer.",
}

_WORDS: Final[Mapping[str, str]] = {
    "length": "Words before a word that the model looks at.",
    "least": "Times that a word occurs in the training part to be in the dictionary.",
    "speakers": "Speakers, which are the clients; 0: all of them.",
    "words": "Words of the synthetic language.",
    "spoken_each": "Words that a synthetic speaker says.",
    "seed": "Seed of the synthetic speech.",
    "part": 'What the model is tested on: "test", or "validation" to tune settings.',
    "model": '"log-bilinear" (a matrix per place), or "next" (lags, as of other sequences).',
    "width": "Columns of a word's vectors.",
    "hidden": "Units of the hidden layer.",
    "negatives": "Words that a client takes beside its own, drawn from its own secret.",
    "top": "A word counts as found if it is among this many first ones.",
}


@dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of task: what makes one of data, which `options` of that a user may set, and what
    these and those of the data mean."""

    make: Callable[..., Task]
    options: tuple[str, ...]
    explained: Mapping[str, str]
    tables: bool = True  # whether its model has any

    @property
    def defaults(self) -> dict[str, Any]:
        """The options with the values that they have if they are left out."""
        known = inspect.signature(self.make).parameters
        return {name: known[name].default for name in self.options}


CLICKS: Final = TaskKind(click_task, ("width", "size", "model", "share_users"), _CLICKS)
OWN_CLICKS: Final = replace(CLICKS, explained=_INTERACTIONS)
RATINGS: Final = TaskKind(rating_task, ("model", "mask", "penalty", "factors", "refit"), _RATINGS)
WORDS: Final = TaskKind(word_task, ("model", "width", "hidden", "negatives", "top"), _WORDS)
QUESTIONS: Final = TaskKind(text_task, ("width", "filters"), _CLASSES, tables=False)
IMAGES: Final = TaskKind(image_task, ("channels", "hidden"), _CLASSES, tables=False)
