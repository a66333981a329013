"""`tessera recommend`: what a run's model recommends to one of its users, in the user's own ids; or
at a client of a deployment what the exported model does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from tessera.cli.format import AsJson, DataFolder
from tessera.report.numbers import plural, score
from tessera.report.terminal import Page
from tessera.rounds.events import NOT_CHARGED, is_charged, marked
from tessera.runs.folder import RunFolder
from tessera.runs.recommend import Item, Recommendations, recommendations
from tessera.services.account_store import default_home
from tessera.services.bundle import Bundle
from tessera.services.packing import sources, task_function

WIDE = 118
"""Columns from which on the two lists stand side by side."""


def recommend(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a deployment's bundle.")],
    user: Annotated[
        str | None, typer.Option(metavar="ID", help="The user, as the data calls it.")
    ] = None,
    client: Annotated[int | None, typer.Option(help="Or its number as a client, from 0.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of items.")] = 10,
    past: Annotated[int, typer.Option(min=0, help="Number of past items.")] = 10,
    data: DataFolder = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Of a bundle: a leader's address, or a file or folder of models.",
        ),
    ] = "models",
    interactions: Annotated[
        str | None,
        typer.Option(metavar="WHERE", help="Of a bundle: this client's own, as with `join`."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Of a bundle: the client's state, for rows that never leave it."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Of a bundle: the code you agree to run."),
    ] = None,
    as_of: Annotated[
        str | None, typer.Option(metavar="DATE", help="Of a bundle: as with `join`.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="The authority of the leader's certificate (ca.pem).")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where a downloaded model is kept.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Items that a user does not have yet, best first, beside those it has."""
    if run.is_file():
        at_a_client(run, model, interactions, top, state, task, as_of, ca, home, as_json)
        return
    found = recommendations(run, client, user=user, top=top, past=past, data=data)
    plan = RunFolder.load(run).plan
    if as_json:
        typer.echo(json.dumps(marked(plan, asdict(found))))
        return
    page = Page()
    show(found, page)
    if not is_charged(plan, "figures"):
        page.say(
            f"{NOT_CHARGED}: these lists follow from this user's own data, without noise. In a "
            "real run only its own client can make them.",
            style="dim",
        )


def at_a_client(
    path: Path,
    where: str,
    interactions: str | None,
    top: int,
    state: Path | None,
    task: str | None,
    as_of: str | None,
    ca: Path | None,
    home: Path | None,
    as_json: bool,
) -> None:
    """From the exported model, by its own interactions: nobody is told which."""
    bundle = Bundle.read(path)
    make = task_function(bundle, task)  # before any code of others is imported, or data are read
    from tessera.services.recommending import fetched, recommended

    source = None
    if interactions is not None:
        source = sources(interactions, as_of, several=False, said=lambda _: None)(0)
    found = fetched(where, bundle, (home or default_home()) / "models", ca)
    items = recommended(
        bundle,
        found,
        make,
        None if source is None else source.source,
        top=top,
        state=state,
        as_of=None if source is None else source.as_of,
    )
    if as_json:
        best = [asdict(item) for item in items]
        typer.echo(json.dumps({"round": found.round_id, "recommended": best}))
        return
    page = Page()
    page.say(f"{bundle.plan.federation}, the model after round {found.round_id}")
    shown = [Item(0, item.title, item.score, None, item.id) for item in items]
    page.console.print(listed("recommended", shown, rated=False))


# --- for people -----------------------------------------------------------------------------------


def show(found: Recommendations, page: Page) -> None:
    """Two lists, side by side where there is room; ratings first, titles as long as they are."""
    mask = f", over its own {found.mask} mask" if found.mask else ""
    rated = found.scale is not None
    named = found.user and found.user != str(found.client)
    who = f"user {found.user}" if named else f"client {found.client}"
    page.say(
        f"{found.task}: {who} with {found.ratings:,} {'ratings' if rated else 'items'}{mask}; "
        f"{found.scheme}, {plural(found.rounds, 'round')}"
    )
    if not found.ratings and rated:
        page.say("It has no ratings: predictions rest on the items' means alone.")
    held = rated and any(item.rating is not None for item in found.recommended)
    lists: list[RenderableType] = [listed("recommended", found.recommended, rated=held)]
    if found.past:
        before = "before" if found.came_next is not None else "clicked before"
        heading = "rated before" if rated else f"{before}, the latest first"
        lists.append(listed(heading, found.past, rated=rated, first=True))
    if page.console.width >= WIDE:
        grid = Table.grid(padding=(0, 3), expand=True)
        for _ in lists:
            grid.add_column(ratio=1)
        grid.add_row(*lists)
        lists = [grid]
    for each in lists:
        page.console.print(each)
    legend = "predicted: the probability of a click."
    if found.score:
        legend = "predicted: a score by which items are ordered; it is not a probability."
    if found.scale is not None:
        low, high = found.scale
        legend = f"predicted: the model's rating, from {low:g} to {high:g}."
    if found.came_next is not None:
        name = found.came_next.title
        page.say(f"What came next, held out of training: {escape(name)}, in place {found.place:,}.")
    if not rated and not found.score:
        legend += (
            " It was trained on what was shown, clicked or not; of what nobody was shown it knows "
            "nothing. Tasks of sequences rank the whole catalogue."
        )
    if held:
        legend += " Rated, where given here, is of the test part: the model has not seen it."
    page.say(legend, style="dim")


def listed(title: str, items: list[Item], *, rated: bool, first: bool = False) -> Table:
    """`first` puts the client's own rating in front."""
    made = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        min_width=len(title),  # short names leave it on one line
    )
    names = ["predicted", *(["rated"] if rated else [])]
    for name in reversed(names) if first else names:
        made.add_column(name, justify="right", no_wrap=True)
    titled = any(item.title != item.id for item in items)
    if titled:
        made.add_column("id", justify="right", no_wrap=True)
    made.add_column("title" if titled else "item", overflow="fold")
    for item in items:
        own = "" if item.rating is None else f"{item.rating:g}"
        cells = [score(item.predicted, digits=2), *([own] if rated else [])]
        called = [item.id, item.title] if titled else [item.title]
        made.add_row(*(reversed(cells) if first else cells), *map(escape, called))
    return made
