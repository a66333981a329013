"""What a run's model recommends to one of its users, in the user's own ids.

A client has the public part of the model and, of its own, its row, its examples and its mask. The
mask is not in a run's folder: it is fitted again here, to the client's ratings, as the client did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.data.examples import LABEL, NONE, ClientData, Examples, SecretOf
from tessera.data.ratings import RatingData
from tessera.data.sequences import SEEN, SequenceData
from tessera.errors import ConfigError
from tessera.learning.models.masked import fit
from tessera.learning.rating_models import BASE
from tessera.learning.task_setup import RatingSetup
from tessera.rounds.root import lasting_secret
from tessera.runs.export import named_task
from tessera.runs.folder import RunFolder, entropy_of
from tessera.runs.standing import RunModel, check_run, standing
from tessera.tasks import Task

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Item:
    """One item with what the model says of it; `rating` is the client's own, where it has one."""

    item: int  # its row
    title: str
    predicted: float
    rating: float | None
    id: str = ""


@dataclass(frozen=True, slots=True)
class Recommendations:
    """What a client would be shown, and what it rated or clicked before.

    `scale` is that of ratings; without one `predicted` is the probability of a click, or, where
    what was not clicked was drawn and never shown, a `score` that only orders items. `came_next`
    is what is held out of a sequence, and `place` where it stands among what the client does not
    have, from 1 on.
    """

    run: str
    task: str
    scheme: str
    rounds: int
    client: int
    ratings: int
    mask: str | None
    scale: tuple[float, float] | None
    recommended: list[Item]
    past: list[Item]
    user: str = ""
    score: bool = False
    came_next: Item | None = None
    place: int = 0


def recommendations(
    folder: Path,
    client: int | None = None,
    *,
    user: object = None,
    top: int = 10,
    past: int = 10,
    data: Path | None = None,
    task: Task | None = None,
) -> Recommendations:
    """Predictions of the run's last checkpoint for every item, the best `top` of those not known.

    A user is named by its id in the data, or by its number as a client. An item is known if it is
    in the client's training part: one of the test part may come up, and then its true rating stands
    beside it.
    """
    log = RunFolder.load(folder)
    task = task or named_task(log, data)
    given = task.data
    if isinstance(given, SequenceData):
        number = _client(log, given, client, user)
        check_run(log, task)
        with standing(log, task) as model:
            return following(log, task, given, model, number, top, past)
    if "item" not in given.sizes or "item" not in given.train.fields:
        raise ConfigError(
            f"{folder}: the examples of task {task.name!r} have no field 'item' to recommend",
            hint="call the field of what is recommended 'item', and give its number in `sizes`",
        )
    client = _client(log, given, client, user)
    check_run(log, task)
    rows = given.names_of("item").filled
    mean = None
    if isinstance(given, RatingData) and isinstance(task.setup, RatingSetup):
        mean = float(log.fact("setup", "mean"))
        secret = partial(lasting_secret, entropy_of(log), log.plan.federation)
        whole = _rated(given, task.setup, client, mean, rows, secret)
    else:
        whole = _shown(given, client, rows)
    scores, rounds = _scores(log, task, whole)
    chances = task.metric.name == "AUC" and given.undrawn is None
    scale = (given.low, given.high) if isinstance(given, RatingData) else None
    if scale is not None:
        scores = np.clip(scores, *scale)
    elif chances:
        scores = np.exp(-np.logaddexp(0.0, -scores))
    own, tested = _known(given.of(client), scale), _known(given.test_of(client), scale)
    names = given.names_of("item")

    def entry(at: int, rating: float | None) -> Item:
        row = int(rows[at])
        score = round(float(scores[at]), 4)
        return Item(row, given.title_of(row), score, rating, names.name(row))

    place = {int(row): at for at, row in enumerate(rows)}
    order = [int(at) for at in np.argsort(-scores, kind="stable") if int(rows[at]) not in own]
    # The highest first, and of equals the latest: examples stand oldest first.
    latest = list(own)[::-1]
    liked = sorted(latest, key=lambda item: -own[item])
    mask = log.facts.get("setup", {}).get("mask") if scale is not None else None
    return Recommendations(
        run=str(folder),
        task=task.title or task.name,
        scheme=log.plan.scheme.value,
        rounds=rounds,
        client=client,
        ratings=len(own),
        mask=None if mask is None else str(mask["order"]),
        scale=scale,
        recommended=[entry(at, tested.get(int(rows[at]))) for at in order[:top]],
        past=[entry(place[item], own[item]) for item in liked[:past] if item in place],
        user=given.names_of("user").name(client) if "user" in given.sizes else str(client),
        score=scale is None and not chances,
    )


def following(
    log: RunFolder,
    task: Task,
    data: SequenceData,
    model: RunModel,
    client: int,
    top: int,
    past: int,
) -> Recommendations:
    """What comes next after a client's items, beside what did."""
    own, names, held = data.events.of(client), data.names_of("item"), data.test_of(client)
    if len(held):  # with what is held out of training to mix models
        own = held[SEEN][0][held[SEEN][0] >= 0].astype(np.int64)
    last = np.full((1, max(1, len(own))), NONE, np.int64)
    last[0, : len(own)] = own[::-1]
    length = data.test["history"].shape[1]
    one = Examples(
        {"user": np.array([client]), "item": own[:1], "history": last[:, :length], SEEN: last}
    )
    scores = model.of_all_items(one)[0].astype(np.float64)
    rows = names.filled[~np.isin(names.filled, own)]
    order = rows[np.argsort(-scores[rows], kind="stable")]

    def entry(row: int) -> Item:
        score = round(float(scores[row]), 4)
        return Item(int(row), data.title_of(int(row)), score, None, names.name(int(row)))

    came = int(held["item"][0]) if len(held) else None
    return Recommendations(
        run=str(log.folder),
        task=task.title or task.name,
        scheme=log.plan.scheme.value,
        rounds=model.rounds,
        client=client,
        ratings=len(own),
        mask=None,
        scale=None,
        recommended=[entry(row) for row in order[:top]],
        past=[entry(row) for row in own[::-1][:past]],
        user=data.names_of("user").name(client),
        score=True,
        came_next=None if came is None else entry(came),
        place=0 if came is None else 1 + int((scores[rows] >= scores[came]).sum()) - 1,
    )


def _known(examples: Examples, scale: tuple[float, float] | None) -> dict[int, float]:
    """Ratings by item in the order of the examples; of clicks those that were."""
    pairs = zip(examples["item"].tolist(), examples[LABEL].tolist(), strict=True)
    return {int(item): float(label) for item, label in pairs if scale is not None or label > 0}


def _client(log: RunFolder, data: ClientData, client: int | None, user: object) -> int:
    if data.train.subjects is not None:
        raise ConfigError(
            f"{log.folder}: its clients hold the examples of several people each",
            hint="export the model, and call its `recommend` with a person's history",
        )
    if user is not None:
        if "user" not in data.sizes:
            raise ConfigError(f"{log.folder}: its users have no ids", hint="use --client, a number")
        return data.names_of("user").row(user, what="user")
    if client is None:
        raise ConfigError("recommend: for whom?", hint="--user ID, or --client and a number")
    if not 0 <= client < data.clients:
        raise ConfigError(
            f"{log.folder}: no client {client}: there are {data.clients:,}",
            hint=f"use 0 to {data.clients - 1}",
        )
    return client


# --- every item as an example of one client -------------------------------------------------------


def _rated(
    data: RatingData,
    setup: RatingSetup,
    client: int,
    mean: float,
    rows: Ints,
    secret: SecretOf,
) -> Examples:
    """Over the client's own mask, fitted again as in the run."""
    base = np.full(len(rows), mean, np.float32)
    if setup.mask is not None:
        masks = fit(data, setup.mask, mean=mean, secret_of=secret, clients=[client])
        base = masks.of(client, rows)
    fields: dict[str, npt.NDArray[Any]] = {
        "user": np.full(len(rows), client, np.int64),
        "item": rows,
        LABEL: np.zeros(len(rows), np.float32),
        BASE: base,
    }
    return setup.described(data, Examples(fields))


def _shown(data: ClientData, client: int, rows: Ints) -> Examples:
    """The client's latest example with every item in its place, after all that it clicked."""
    parts = [data.of(client), data.test_of(client)]
    last = next((part.take(slice(-1, None)) for part in parts[::-1] if len(part)), None)
    if last is None:
        raise ConfigError(
            f"client {client} has no examples", hint="a model knows a client by what it did before"
        )
    fields: dict[str, npt.NDArray[Any]] = {}
    for name, column in last.fields.items():
        value = column[0]
        if name == "history" and column.ndim == 2:
            liked = np.concatenate([part["item"][part[LABEL] > 0] for part in parts])
            value = np.full(column.shape[1], NONE, np.int64)
            latest = liked[-column.shape[1] :]
            value[: len(latest)] = latest
        fields[name] = np.broadcast_to(value, (len(rows), *np.shape(value)))
    return Examples({**fields, "item": rows})


def _scores(log: RunFolder, task: Task, whole: Examples) -> tuple[npt.NDArray[np.float64], int]:
    """What the model of the last checkpoint gives for these, and the rounds behind it."""
    still, data = task, task.data
    if isinstance(data, RatingData) and isinstance(task.setup, RatingSetup):
        # Without a set-up: what came of it is in the run's folder, or was made for this client.
        bare = data.train.with_field(BASE, np.zeros(len(data.train), np.float32))
        bare = task.setup.described(data, bare)
        still = replace(task, setup=None, data=replace(data, train=bare))
    with standing(log, still) as stood:
        raw = stood.scores(whole)
    if raw.ndim != 1:
        raise ConfigError(
            f"{log.folder}: the model of task {task.name!r} gives {raw.shape[1]} values for an "
            "example, and items are ranked by one",
            hint="use tessera.load on the exported model, and rank its scores as you need",
        )
    return raw.astype(np.float64), stood.rounds
