"""`tessera demo`: one recommender under every scheme, side by side, and a page about it.

A synthetic shop, so that nothing has to be fetched: the same users, first model and cohorts under
each scheme. Messages and cryptography are real in every round.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from tessera.cli.format import AsJson, warn_if_slow
from tessera.engines.runs import free_folder
from tessera.errors import ConfigError
from tessera.report.numbers import percent, seconds
from tessera.report.progress import progress
from tessera.rounds.plan import Plan, PrivacyPlan, Scheme, SimulationPlan, TaskPlan, UnionPlan
from tessera.rounds.plan.sections import GROUPS

SHOP: Final = {
    "users": 500,
    "items": 3_000,
    "examples": 60,
    "history": 20,
    "width": 8,
    "size": "tiny",
}
COHORT: Final = 25
GROUP: Final = 5
"""Small groups: with few of them in a shop of 500, and some users always missing."""
MAX_ROWS: Final = 160
"""More than any user holds in this shop; messages between two servers are sized for it."""
PAGE: Final = "demo.html"


def demo(
    rounds: Annotated[int, typer.Option(help="Rounds under each scheme.")] = 40,
    dropout: Annotated[float, typer.Option(help="Share of a cohort that drops out.")] = 0.05,
    level: Annotated[
        str,
        typer.Option(
            help="Index privacy: groups, or the papers' cpp1 (no cover) to cpp5 (the whole union)."
        ),
    ] = GROUPS,
    seed: Annotated[int, typer.Option(help="For the shop, the cohorts and the initial model.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs and page (default: a new one in runs/).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one recommender under every scheme, and put them side by side."""
    from tessera import tasks
    from tessera.api import simulate
    from tessera.report import comparison
    from tessera.report import page as report
    from tessera.report.lineup import load_all

    started = time.monotonic()
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds} is not a number of rounds", hint="use 1 or more")
    folder = out or free_folder("demo")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", hint="name another with --out")
    console = Console(stderr=True, highlight=False)
    options: dict[str, Any] = {**SHOP, "seed": seed}
    plans = [
        Plan(
            scheme=scheme,
            cohort=COHORT,
            federation="demo",
            seed=seed,
            privacy=PrivacyPlan(level=level, group=GROUP if level == GROUPS else 0),
            union=UnionPlan(max_rows=MAX_ROWS),
            task=TaskPlan(name="taobao-like", options=options),
            simulation=SimulationPlan(rounds=rounds, dropout=dropout, evaluate_every=5),
        )
        for scheme in Scheme
    ]
    task = tasks.load("taobao-like", **options)
    data = task.data
    console.print(
        f"A synthetic shop: {data.clients:,} users, {data.sizes['item']:,} items, "
        f"{len(data.train):,} examples that stay with their users. {rounds} rounds of {COHORT} "
        f"users under each of {len(plans)} schemes; {percent(dropout)} drop out.",
        width=min(console.width, 100),
    )
    for plan in plans:
        warn_if_slow(plan)
    wide = max(len(scheme) for scheme in Scheme)
    folders = []
    for plan in plans:
        with progress(console, rounds, title=f"{plan.scheme.value:<{wide}}") as shown:
            run = simulate(task, plan, out=folder / plan.scheme.value, on_event=shown.on_event)
        run.report()
        folders.append(run.folder)
    found = load_all(folders)
    page = report.save(report.page(found), folder / PAGE)
    if as_json:
        typer.echo(json.dumps(comparison.summary(found, page)))
        return
    comparison.show(found, page, Console(highlight=False))
    console.print(f"Total time: {seconds(time.monotonic() - started)}.")
