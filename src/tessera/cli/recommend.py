"""`tessera recommend`: what a run's model recommends to one of its clients, with titles.

A client has the public part of the model and, of its own, its row, its ratings and its mask. The
mask is not in a run's folder: it is fitted again here, to the client's ratings, as the client did.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from tessera.cli.format import AsJson, DataFolder
from tessera.crypto.entropy import RootedEntropy
from tessera.data.examples import LABEL, Examples
from tessera.data.ratings import RatingData
from tessera.engines import central, training
from tessera.engines.central import CentralTraining
from tessera.engines.description import digest_of
from tessera.engines.export import named_task
from tessera.engines.runs import CHECKPOINT, RunFolder
from tessera.engines.training import Training, complete
from tessera.errors import ConfigError
from tessera.learning.models.features import FEATURES
from tessera.learning.models.masked import fit
from tessera.learning.ratings import BASE
from tessera.learning.scores import evaluate
from tessera.learning.setup import RatingSetup, features_of
from tessera.report.numbers import score
from tessera.rounds import schemes
from tessera.tasks import Task

WIDE = 118
"""Columns from which on the two lists stand side by side."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item with what the model says of it; `rating` is the client's own, where it has one."""

    item: int
    title: str
    predicted: float
    rating: float | None


@dataclass(frozen=True, slots=True)
class Recommendations:
    """What a client would be shown, and what it rated before."""

    run: str
    task: str
    scheme: str
    rounds: int
    client: int
    ratings: int
    mask: str | None
    scale: tuple[float, float]
    recommended: list[Item]
    past: list[Item]


def recommend(
    run: Annotated[Path, typer.Argument(help="A run's folder, of a task with ratings.")],
    client: Annotated[int, typer.Option(help="The client: a number from 0.")],
    top: Annotated[int, typer.Option(min=1, help="Number of items.")] = 10,
    past: Annotated[int, typer.Option(min=0, help="Number of past ratings.")] = 10,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Titles that CLIENT has not rated, with predicted ratings, beside those it has rated."""
    found = recommendations(run, client, top=top, past=past, data=data)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        show(found, Console(highlight=False))


def recommendations(
    folder: Path, client: int, *, top: int = 10, past: int = 10, data: Path | None = None
) -> Recommendations:
    """Predictions of the run's last checkpoint for every item, the best `top` of those not rated.

    An item is not rated if it is not in the client's training part: one of the test part may come
    up, and then its true rating stands beside it.
    """
    log = RunFolder.load(folder)
    task = named_task(log, data)
    given = task.data
    if not isinstance(given, RatingData) or not isinstance(task.setup, RatingSetup):
        raise ConfigError(
            f"{folder}: task {task.name!r} has no ratings and titles to recommend from",
            hint="use the run of a rating task, such as ratings-100k",
        )
    _check(log, task, client)
    mean = float(log.facts["setup"]["mean"])
    scores, rounds = _scores(log, task, given, _whole(given, task.setup, client, mean))
    ratings, tested = _known(given.of(client)), _known(given.test_of(client))

    def entry(item: int, rating: float | None) -> Item:
        return Item(item, given.titles[item], round(float(scores[item]), 4), rating)

    order = [int(item) for item in np.argsort(-scores, kind="stable") if int(item) not in ratings]
    # The highest first, and of equals the latest: examples stand oldest first.
    latest = list(ratings)[::-1]
    liked = sorted(latest, key=lambda item: -ratings[item])
    facts = log.facts.get("setup", {}).get("mask")
    return Recommendations(
        run=str(folder),
        task=task.title or task.name,
        scheme=log.plan.scheme.value,
        rounds=rounds,
        client=client,
        ratings=len(ratings),
        mask=None if facts is None else str(facts["order"]),
        scale=(given.low, given.high),
        recommended=[entry(item, tested.get(item)) for item in order[:top]],
        past=[entry(item, ratings[item]) for item in liked[:past]],
    )


def _known(examples: Examples) -> dict[int, float]:
    """Ratings by item, in the order of the examples."""
    pairs = zip(examples["item"].tolist(), examples[LABEL].tolist(), strict=True)
    return {int(item): float(rating) for item, rating in pairs}


def _check(log: RunFolder, task: Task, client: int) -> None:
    if not 0 <= client < task.data.clients:
        raise ConfigError(
            f"{log.folder}: no client {client}: there are {task.data.clients:,}",
            hint=f"use 0 to {task.data.clients - 1}",
        )
    if log.facts.get("data") != digest_of(task):
        raise ConfigError(
            f"{log.folder} was trained on other data than is here now",
            hint="name the folder it was trained on with --data",
        )
    name = training.STORE if schemes.of(log.plan).federated else central.STATE
    if not (log.folder / CHECKPOINT / name).is_file() or "setup" not in log.facts:
        raise ConfigError(
            f"{log.folder}: no round of this run is checkpointed, so there is no model",
            hint="let it finish a round: tessera run --resume",
        )


def _whole(data: RatingData, setup: RatingSetup, client: int, mean: float) -> Examples:
    """Every item as an example of this client, over its own mask."""
    items = np.arange(data.sizes["item"], dtype=np.int64)
    base = np.full(len(items), mean, np.float32)
    if setup.mask is not None:
        base = fit(data, setup.mask, mean=mean, clients=[client]).of(client, items)
    fields: dict[str, npt.NDArray[Any]] = {
        "user": np.full(len(items), client, np.int64),
        "item": items,
        LABEL: np.zeros(len(items), np.float32),
        BASE: base,
    }
    examples = Examples(fields)
    if setup.features:
        examples = examples.with_field(FEATURES, features_of(data, examples))
    return examples


def _scores(
    log: RunFolder, task: Task, data: RatingData, examples: Examples
) -> tuple[npt.NDArray[np.float64], int]:
    """What the model of the last checkpoint says of these, cut to the scale; rounds behind it."""
    plan, checkpoint = complete(log.plan, task), log.folder / CHECKPOINT
    # Without a set-up: what came of it is in the run's folder, or was made anew for this client.
    bare = data.train.with_field(BASE, np.zeros(len(data.train), np.float32))
    if FEATURES in examples.fields:
        bare = bare.with_field(FEATURES, features_of(data, data.train))
    still = replace(task, setup=None, data=replace(data, train=bare))
    stood: Training | CentralTraining
    if not schemes.of(plan).federated:
        stood = CentralTraining(still, plan, folder=checkpoint)
        raw = evaluate(stood.module, stood.bound, stood.central.parameters(), examples)
        rounds = stood.rounds_done
    else:
        # No secret is needed to read a model. With entropy of its own no root is read, or made.
        with Training(still, plan, folder=checkpoint, entropy=RootedEntropy.fresh()) as stood:
            raw = stood.evaluation.scores(stood.dense, stood.tables | stood.local, examples)
            rounds = stood.rounds_done
    return np.clip(raw.astype(np.float64), data.low, data.high), rounds


# --- for people -----------------------------------------------------------------------------------


def show(found: Recommendations, console: Console) -> None:
    """Two lists, side by side where there is room; ratings first, titles as long as they are."""
    mask = f", over its own {found.mask} mask" if found.mask else ""
    console.print(
        f"{escape(found.task)}: client {found.client} with {found.ratings:,} ratings{mask}; "
        f"{found.scheme}, {found.rounds} round{'s' if found.rounds != 1 else ''}"
    )
    if not found.ratings:
        console.print("It has no ratings: predictions rest on the items' means alone.")
    held = any(item.rating is not None for item in found.recommended)
    lists: list[RenderableType] = [listed("recommended", found.recommended, rated=held)]
    if found.past:
        lists.append(listed("rated before", found.past, rated=True, first=True))
    if console.width >= WIDE:
        grid = Table.grid(padding=(0, 3), expand=True)
        for _ in lists:
            grid.add_column(ratio=1)
        grid.add_row(*lists)
        console.print(grid)
    else:
        for each in lists:
            console.print(each)
    low, high = found.scale
    legend = f"predicted: the model's rating, from {low:g} to {high:g}."
    if held:
        legend += " Rated, where given here, is of the test part: the model has not seen it."
    console.print(legend, style="dim")


def listed(title: str, items: list[Item], *, rated: bool, first: bool = False) -> Table:
    """`first` puts the client's own rating in front."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = ["predicted", *(["rated"] if rated else [])]
    for name in reversed(names) if first else names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("title", overflow="fold")
    for item in items:
        own = "" if item.rating is None else f"{item.rating:g}"
        cells = [score(item.predicted, digits=2), *([own] if rated else [])]
        table.add_row(*(reversed(cells) if first else cells), escape(item.title))
    return table
