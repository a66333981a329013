"""`tessera run`: train a plan's task, or run its rounds over synthetic clients if it names none."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from tessera.cli import run_summary
from tessera.cli.format import (
    AsCsv,
    AsJson,
    DataFolder,
    Exact,
    check_new,
    figures_written,
    show_ranking,
    warn_if_slow,
)
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, RoundId
from tessera.plan import Plan
from tessera.report.comparison import in_all
from tessera.report.figures import RunFigures
from tessera.report.numbers import score
from tessera.report.progress import progress
from tessera.report.terminal import Page
from tessera.rounds.events import NOT_CHARGED, Event, RoundAbort, is_charged, told
from tessera.rounds.resolve import resolve
from tessera.runs.folder import (
    HELPER_KEY,
    PLAN,
    RANKING,
    RUN,
    TRUTH,
    VIEWS,
    RunFolder,
    free_folder,
    never_began,
)
from tessera.runs.truth import write_box_key, write_truth
from tessera.simulation import population
from tessera.simulation.epochs import federation_for
from tessera.simulation.faults import random_dropouts
from tessera.simulation.federation import Federation
from tessera.simulation.views import StreamedViews, Views

SYNTHETIC_ROUNDS: Final = 10
ROWS: Final = 50
MOST_WATCHED: Final = 200
"""Up to this many clients, their views are recorded too: each has a file open during the run."""
INTERRUPTED: Final = 130


def run(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN.toml", help="The plan to run; with --resume the run's folder."
        ),
    ],
    rounds: Annotated[
        int | None, typer.Option(help="Rounds in total (default: the plan's).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in this folder.")
    ] = False,
    data: DataFolder = None,
    trainer: Annotated[
        str, typer.Option(help="auto, compiled, vectorised or sequential.")
    ] = "auto",
    record_views: Annotated[
        bool,
        typer.Option("--record-views", help="Record what each party sees, for `tessera audit`."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder (default: a new one in runs/).")
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(metavar="0,1,2", help="Run once per seed; mean and deviation at the end."),
    ] = "",
    csv: AsCsv = None,
    exact: Exact = False,
    insecure_test_entropy: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Derive every secret from TEXT. For tests only."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Without a task: clients to draw cohorts from.")
    ] = None,
    rows_per_client: Annotated[
        int | None, typer.Option(help="Without a task: rows a client holds of each table.")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Share of clients that drop out (default: the plan's).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train by a plan, with progress, and keep everything in a folder with a report."""
    if rounds is not None and rounds < 1:
        raise ConfigError(f"--rounds {rounds} is not a number of rounds", hint="use 1 or more")
    if dropout is not None and not 0.0 <= dropout < 1.0:
        raise ConfigError(
            f"--dropout {dropout} is not a share of clients", hint="use a number from 0 to below 1"
        )
    if csv is not None and not seeds:
        raise ConfigError(
            "--csv is for the figures of several seeds",
            hint="use it with --seeds; `tessera compare RUN --csv FILE` has those of a run",
        )
    if csv is not None:
        check_new(csv)  # before the first round, not after the last
    begun = resume and not (never_began(path) and (path / PLAN).is_file())
    plan = RunFolder.load(path).plan if begun else Plan.read(path / PLAN if resume else path)
    warn_if_slow(plan)
    if plan.task.name:
        for option, value in (("--clients", clients), ("--rows-per-client", rows_per_client)):
            if value is not None:
                raise ConfigError(
                    f"{option} is for synthetic clients, and this plan trains {plan.task.name!r}",
                    hint="its [task] says how many there are",
                )
        if dropout is not None and resume:
            raise ConfigError(
                "--dropout with --resume",
                hint="a run continues as it began; only --rounds may change",
            )
        if dropout is not None:
            plan = plan.with_simulation(dropout=dropout)
        if rounds is not None:
            plan = plan.with_simulation(rounds=rounds)
        if seeds:
            if resume:
                raise ConfigError("--seeds with --resume", hint="resume each run by its folder")
            several(
                plan,
                parse_seeds(seeds),
                top=out or free_folder(path.stem),
                data=data,
                trainer=trainer,
                record_views=record_views,
                script=insecure_test_entropy,
                csv=csv,
                exact=exact,
                as_json=as_json,
            )
            return
        train(
            plan,
            folder=path if resume else out or free_folder(path.stem),
            resume=resume,
            data=data,
            trainer=trainer,
            record_views=record_views,
            script=insecure_test_entropy,
            exact=exact,
            as_json=as_json,
        )
        return
    if resume:
        raise ConfigError(
            f"{path}: a run without a task cannot be resumed", hint="run its plan again"
        )
    rounds = rounds or SYNTHETIC_ROUNDS
    run_synthetic(
        plan.with_simulation(rounds=rounds),
        rounds=rounds,
        clients=clients,
        rows_per_client=rows_per_client,
        dropout=plan.simulation.dropout if dropout is None else dropout,
        record_views=record_views,
        out=out or free_folder(path.stem),
        as_json=as_json,
    )


def parse_seeds(text: str) -> list[int]:
    """Seeds with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 19 for part in parts) or len({*parts}) < len(parts):
        raise ConfigError(f"--seeds {text}", hint="write --seeds 0,1,2: whole numbers, each once")
    return [int(part) for part in parts]


def several(
    plan: Plan,
    seeds: Sequence[int],
    *,
    top: Path,
    csv: Path | None,
    exact: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """A run per seed, each in a folder of `top`; mean and standard deviation of the metric."""
    if top.exists():
        raise ConfigError(f"{top} is there already", hint="name another with --out")
    found = []
    for seed in seeds:
        folder = top / f"seed-{seed}"
        train(replace(plan, seed=seed), folder=folder, resume=False, quiet=True, **how)
        found.append(run_summary.summary(folder))
    finals = [one["final"] for one in found if one["final"] is not None]
    logs = [RunFolder.load(Path(one["folder"])) for one in found]
    together = in_all([RunFigures.load(log.folder) for log in logs])
    facts = {
        "metric": found[0]["metric"],
        "seeds": list(seeds),
        "finals": [one["final"] for one in found],
        "mean": mean(finals) if finals else None,
        "deviation": stdev(finals) if len(finals) > 1 else None,
        "folders": [one["folder"] for one in found],
        "together": together,
    }
    first = logs[0].plan
    mark = "" if is_charged(first, "finals") else f" ({NOT_CHARGED})"
    named = f"{facts['metric']}{mark}" if exact else str(facts["metric"])
    passed = [told(first, {"final": one["final"]}, exact=exact)["final"] for one in found]
    rows = [
        {"seed": s, named: final, "folder": one["folder"]}
        for s, final, one in zip(seeds, passed, found, strict=True)
    ]
    if figures_written(rows, csv):
        return
    if as_json:
        typer.echo(json.dumps(told(first, facts, exact=exact)))
        return
    listed = [
        (f"{facts['metric']}, seed {s}", score(one["final"]))
        for s, one in zip(seeds, found, strict=True)
    ]
    listed.append(("mean", score(facts["mean"])))
    listed.append(("standard deviation", score(facts["deviation"])))
    page = Page()
    page.figures(listed)
    if mark:
        page.say(f"{facts['metric']}: {NOT_CHARGED}")
    if together:
        page.say(together)
    page.line(f"Runs: {top}")


def train(
    plan: Plan,
    *,
    folder: Path,
    resume: bool,
    data: Path | None,
    trainer: str,
    record_views: bool,
    script: str | None,
    exact: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Load the task, train it, write the report and print a summary."""
    from tessera import tasks
    from tessera.api import simulate
    from tessera.learning.metrics import NextMetric
    from tessera.runs.client_training import Trainer
    from tessera.runs.ranking import FullRanking

    if trainer not in list(Trainer):
        raise ConfigError(f"--trainer {trainer}", hint=f"one of {', '.join(Trainer)}")
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {plan.task.name}"):
        task = tasks.load(plan.task.name, data=data, **plan.task.options)
    aborted: list[RoundAbort] = []
    try:
        with progress(console, plan.simulation.rounds, metric=task.metric.name) as shown:

            def on_event(event: Event) -> None:
                shown.on_event(event)
                if isinstance(event, RoundAbort):
                    aborted.append(event)

            finished = simulate(
                task,
                plan,
                out=folder,
                resume=resume,
                trainer=trainer,
                insecure_test_entropy=script,
                record_views=record_views,
                on_event=on_event,
                on_setup=shown.on_setup,
            )
    except KeyboardInterrupt:
        if (folder / RUN).exists():
            again = f"tessera run {shlex.quote(str(folder))} --resume"
            console.print(f"stopped; `{escape(again)}` continues it", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    page = finished.report()
    facts = run_summary.summary(folder)
    if quiet:
        return
    if as_json:
        typer.echo(json.dumps(told(plan, facts, exact=exact)))
    else:
        run_summary.show(facts, page, Page())
        if isinstance(task.metric, NextMetric) and is_charged(plan, "figures"):
            if (kept := RunFolder.load(folder).kept(RANKING)) is not None:
                show_ranking(FullRanking(**kept["ranking"]), Page())
    if aborted and not finished.rounds:
        raise run_summary.aborted_error(aborted[-1])


def run_synthetic(
    plan: Plan,
    *,
    rounds: int,
    clients: int | None,
    rows_per_client: int | None,
    dropout: float,
    record_views: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Run a plan's rounds over synthetic clients and record them.

    Rows and updates are synthetic (`simulation/population.py`), and the output says so. All else
    follows the plan: messages, bytes, unions, answers, dropouts and sums.
    """
    agreed = resolve(plan)
    agreed.noise.check_clients()
    agreed.sum.check_clients()
    held = min(plan.union.max_rows, ROWS) if rows_per_client is None else rows_per_client
    members = population.participants(plan, 2 * plan.cohort if clients is None else clients, held)

    def federation(views: Views | None = None) -> Federation:
        return federation_for(plan)(
            plan,
            members,
            dense=population.dense(plan),
            tables=population.tables(plan),
            trainer=population.cohort_trainer(plan, len(members)),
            derived=population.derived_maps(plan),
            faults=random_dropouts(dropout, plan.seed, plan) if dropout else None,
            views=views,
        )

    trial = federation()  # a cohort that cannot be drawn leaves no folder behind
    for number in range(rounds):
        trial.possible(RoundId(number))
    log = RunFolder.create(out, plan)
    console = Console(stderr=True, highlight=False)
    console.print(f"[yellow]{run_summary.SYNTHETIC}[/]", soft_wrap=True)
    servers = agreed.sum.servers
    many = len(members) > MOST_WATCHED or plan.privacy.pseudonyms
    seen_by = (servers if many else "each party") if record_views else ""
    started, aborted = time.monotonic(), None
    with ExitStack() as stack:
        views = None
        if record_views:
            write_truth(log.folder / TRUTH, members)
            watched = frozenset({SERVER, HELPER}) if many else None
            views = stack.enter_context(StreamedViews(log.folder / VIEWS, watched))
        shown = stack.enter_context(progress(console, rounds))
        real = federation(views)
        if record_views and real.two_server is not None:
            write_box_key(log.folder / HELPER_KEY, real.two_server)
        for event in real.run(rounds):
            log.append(event)
            shown.on_event(event)
            if isinstance(event, RoundAbort):
                aborted = event
    facts = run_summary.synthetic_summary(
        log,
        clients=len(members),
        rows=held,
        views=seen_by,
        seconds=time.monotonic() - started,
    )
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        run_summary.show_synthetic(plan, facts, seen_by, Page())
    if aborted is not None and not facts["finished"]:
        raise run_summary.aborted_error(aborted)
