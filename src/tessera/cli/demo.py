"""`tessera demo`: what submodels and secure sums gain and cost, in one shop, and what they hide.

A synthetic shop, so that nothing has to be fetched: the same users and first model under each
scheme. Messages and cryptography are real in every round. The full model (`fedavg`) is stopped once
a client has moved more than under every other scheme in all rounds. Meanwhile the audit's attacks
follow what the server sees of a few users, and of one of them the demo tells.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from tessera.cli.format import AsJson, warn_if_slow
from tessera.errors import ConfigError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.plan import GroupsPlan, Plan, PrivacyPlan, Scheme, SimulationPlan, TaskPlan, UnionPlan
from tessera.plan.sections import GROUPS
from tessera.report.numbers import percent, seconds
from tessera.report.progress import RunProgress, progress
from tessera.rounds import schemes
from tessera.rounds.events import Event, RoundAbort, RoundFinished
from tessera.runs.folder import free_folder

if TYPE_CHECKING:
    from tessera.audit.person import PersonWatch
    from tessera.audit.round_view import Truth
    from tessera.report.demo import Demonstration
    from tessera.tasks import Task

SHOP: Final = {
    "users": 400,
    "items": 50_000,
    "categories": 100,
    "examples": 60,
    "history": 20,
    "width": 8,
    "size": "tiny",
}
COHORT: Final = 40
GROUP: Final = 10
MAX_ROWS: Final = 160
"""More than any user holds in this shop; messages between two servers are sized for it."""
WATCHED: Final = 24
"""Users with a usual number of items; the one who took part most is told of."""
PAGE: Final = "demo.html"


def demo(
    rounds: Annotated[int, typer.Option(help="Rounds under each scheme.")] = 30,
    dropout: Annotated[float, typer.Option(help="Share of a cohort that drops out.")] = 0.02,
    level: Annotated[
        str,
        typer.Option(
            help="Index privacy: groups, or the papers' cpp1 (no cover) to cpp5 (the whole union)."
        ),
    ] = GROUPS,
    seed: Annotated[int, typer.Option(help="For the shop, the cohorts and the initial model.")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="All schemes, secure-fedavg too, to the last round.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs and page (default: a new one in runs/).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one recommender under several schemes; show what each costs and hides."""
    from tessera import tasks
    from tessera.report import comparison
    from tessera.report import demo as story
    from tessera.report import page as report
    from tessera.report.terminal import Page
    from tessera.runs.held import rows_of_clients
    from tessera.runs.training import complete

    started = time.monotonic()
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds} is not a number of rounds", hint="use 1 or more")
    folder = out or free_folder("demo")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", hint="name another with --out")
    console = Console(stderr=True, highlight=False)
    options: dict[str, Any] = {**SHOP, "seed": seed}
    base = Plan(
        scheme=schemes.DEFAULT,
        cohort=COHORT,
        federation="demo",
        seed=seed,
        privacy=PrivacyPlan(level=level),
        groups=GroupsPlan(size=GROUP if level == GROUPS else 0),
        union=UnionPlan(max_rows=MAX_ROWS),
        task=TaskPlan(name="taobao-like", options=options),
        simulation=SimulationPlan(rounds=rounds, dropout=dropout, evaluate_every=5),
    )
    task = tasks.load("taobao-like", **options)
    chosen = [e for e in schemes.SCHEMES.values() if everything or e.by_rows or not e.hides]
    # The full model comes after those whose traffic it is measured by.
    chosen.sort(key=lambda entry: entry.federated and not entry.by_rows)
    console.print(
        f"A synthetic shop: {task.data.clients:,} users, {task.data.sizes['item']:,} items, "
        f"{len(task.data.train):,} examples that stay with their users. {rounds} rounds of "
        f"{COHORT} users under {len(chosen)} schemes; {percent(dropout)} drop out.",
        width=min(console.width, 100),
    )
    plans = {e.scheme: complete(base.under(e.scheme), task) for e in chosen}
    truth = rows_of_clients(task, plans[base.scheme])
    mean = sum(map(len, truth.values())) / len(truth)
    usual = sorted(truth, key=lambda c: (abs(len(truth[c]) - mean), c))[:WATCHED]
    for plan in plans.values():
        warn_if_slow(plan)
    wide = max(len(scheme) for scheme in Scheme)
    folders: dict[Scheme, Path] = {}
    watches: dict[Scheme, PersonWatch] = {}
    stopped = None
    for scheme, plan in plans.items():
        count = rounds
        if story.is_full(schemes.of(plan)) and not everything:
            count = enough_rounds(plan, list(folders.values()), rounds)
            stopped = count if count < rounds else None
        with progress(console, count, title=f"{scheme.value:<{wide}}") as shown:
            folders[scheme], watch = followed(
                task, plan, count, folder / scheme.value, truth, usual, shown
            )
        if watch is not None:
            watches[scheme] = watch
    found = demonstration(task, plans, folders, watches, usual, rounds, stopped)
    page = report.save(story.page(found, folder), folder / PAGE)
    if as_json:
        typer.echo(json.dumps({**comparison.summary(found.runs, page), **found.summary()}))
        return
    story.show(found, page, Page())
    console.print(f"Total time: {seconds(time.monotonic() - started)}.")


def followed(
    task: Task,
    plan: Plan,
    rounds: int,
    folder: Path,
    truth: Truth,
    clients: Sequence[ClientId],
    shown: RunProgress,
) -> tuple[Path, PersonWatch | None]:
    """One run, with its report; attacks follow what its server sees, where there are messages."""
    from tessera.api import simulate
    from tessera.audit.person import PersonWatch
    from tessera.simulation.views import RoundViews

    views = watch = None
    if schemes.of(plan).federated:
        views, watch = RoundViews({SERVER}), PersonWatch(plan, truth, clients)

    def on_event(event: Event) -> None:
        shown.on_event(event)
        if (
            views is not None
            and watch is not None
            and isinstance(event, RoundFinished | RoundAbort)
        ):
            watch.take(RoundId(event.round_id), views.taken(SERVER))

    run = simulate(task, plan, rounds, out=folder, views=views, on_event=on_event)
    run.report()
    return run.folder, watch


def enough_rounds(plan: Plan, others: Sequence[Path], rounds: int) -> int:
    """Rounds after which the full model has moved more than each of the others in all of theirs."""
    from tessera.report.demo import traffic
    from tessera.report.figures import RunFigures
    from tessera.rounds.forecast import Forecast

    forecast = Forecast(plan, rows_per_client=plan.union.max_rows)
    whole = sum(forecast.bytes_up().values()) + sum(forecast.bytes_down().values())
    moved = [rounds * (traffic(RunFigures.load(folder)) or 0.0) for folder in others]
    return min(rounds, math.floor(max(moved, default=0.0) / whole) + 1)


def demonstration(
    task: Task,
    plans: dict[Scheme, Plan],
    folders: dict[Scheme, Path],
    watches: dict[Scheme, PersonWatch],
    usual: Sequence[ClientId],
    rounds: int,
    stopped: int | None,
) -> Demonstration:
    """Everything that the page and the terminal show."""
    from tessera.report.demo import Demonstration
    from tessera.report.lineup import load_all
    from tessera.rounds.forecast.forecast import by_size

    person = max(usual, key=lambda c: min(w.rounds_of(c) for w in watches.values()))
    order = [scheme for scheme in Scheme if scheme in folders]
    known = [watches[scheme].known(person) for scheme in order if scheme in watches]
    names = task.data.names_of("item")
    rows = [int(row) for row in known[0].rows]
    return Demonstration(
        runs=load_all([folders[scheme] for scheme in order]),
        rounds=rounds,
        group=GROUP,
        user=task.data.names_of("user").name(int(person)),
        items=[names.name(row) for row in rows],
        known=known,
        names={row: names.name(row) for row in rows},
        sizes={
            scheme.value: list(by_size(plans[scheme], rows_per_client=len(rows)))
            for scheme in order
            if scheme in watches
        },
        stopped=stopped,
    )
