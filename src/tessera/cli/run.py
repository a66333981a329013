"""`tessera run`: train a plan's task, or run its rounds over synthetic clients if it names none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from tessera.cli import run_synthetic as synthetic
from tessera.cli.format import (
    AsCsv,
    AsJson,
    DataFolder,
    captioned,
    check_new,
    figures_written,
    warn_if_slow,
)
from tessera.errors import ConfigError
from tessera.plan import Plan
from tessera.privacy.index.bound import in_words
from tessera.report.comparison import in_all
from tessera.report.figures import RunFigures, abort_reasons, in_rounds
from tessera.report.numbers import count, epsilon, predictor, score, seconds, size
from tessera.report.progress import progress
from tessera.rounds import charged, dp, schemes
from tessera.rounds.charged import NOT_CHARGED
from tessera.rounds.events import Event, RoundAbort
from tessera.runs.folder import PLAN, RUN, RunFolder, free_folder, never_began

SYNTHETIC_ROUNDS: Final = 10
FEW: Final = 5
"""Points of a curve below which nothing is said of where it goes."""
INTERRUPTED: Final = 130
DAGGER: Final = "†"


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
            as_json=as_json,
        )
        return
    if resume:
        raise ConfigError(
            f"{path}: a run without a task cannot be resumed", hint="run its plan again"
        )
    synthetic.run(
        plan,
        rounds=rounds or SYNTHETIC_ROUNDS,
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
    plan: Plan, seeds: Sequence[int], *, top: Path, csv: Path | None, as_json: bool, **how: Any
) -> None:
    """A run per seed, each in a folder of `top`; mean and standard deviation of the metric."""
    if top.exists():
        raise ConfigError(f"{top} is there already", hint="name another with --out")
    found = []
    for seed in seeds:
        folder = top / f"seed-{seed}"
        train(
            replace(plan, seed=seed), folder=folder, resume=False, as_json=False, quiet=True, **how
        )
        found.append(summary(folder))
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
    facts = charged.marked(logs[0].plan, facts)
    exact = "" if charged.is_charged(logs[0].plan, "finals") else f" ({charged.NOT_CHARGED})"
    rows = [
        {"seed": s, f"{facts['metric']}{exact}": one["final"], "folder": one["folder"]}
        for s, one in zip(seeds, found, strict=True)
    ]
    if figures_written(rows, csv):
        return
    if as_json:
        typer.echo(json.dumps(facts))
        return
    console = Console(highlight=False)
    listed = [
        (f"{facts['metric']}, seed {s}", score(one["final"]))
        for s, one in zip(seeds, found, strict=True)
    ]
    listed.append(("mean", score(facts["mean"])))
    listed.append(("standard deviation", score(facts["deviation"])))
    console.print(captioned(listed))
    if exact:
        console.print(f"{facts['metric']}: {charged.NOT_CHARGED}")
    if together:
        console.print(together, width=min(console.width, 100))
    console.print(f"Runs: {escape(str(top))}", soft_wrap=True)


def train(
    plan: Plan,
    *,
    folder: Path,
    resume: bool,
    data: Path | None,
    trainer: str,
    record_views: bool,
    script: str | None,
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Load the task, train it, write the report and print a summary."""
    from tessera import tasks
    from tessera.api import simulate
    from tessera.runs.learners import Trainer

    if trainer not in list(Trainer):
        raise ConfigError(f"--trainer {trainer}", hint=f"one of {', '.join(Trainer)}")
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {plan.task.name}"):
        task = tasks.load(plan.task.name, data=data, **plan.task.options)
    if plan.dp is not None:
        warning = dp.delta_warning(plan.dp.delta, task.data.subjects)
        if warning:
            console.print(f"note: {warning}", soft_wrap=True)
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
    facts = summary(folder)
    if quiet:
        return
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        show(facts, page, Console(highlight=False))
    if aborted and not finished.rounds:
        raise synthetic.aborted_error(aborted[-1])


# --- the facts ------------------------------------------------------------------------------------


def summary(folder: Path) -> dict[str, Any]:
    """The run as one object for machines; means are over the rounds that measured them."""
    log = RunFolder.load(folder)
    log.check_described()
    facts, rounds = log.facts, list(log.rounds())
    measured = [r for r in rounds if r["measured"]]
    curve = [[r["round_id"] + 1, r["metric"]] for r in rounds if r["metric"] is not None]

    best = min if log.fact("lower_is_better") else max

    def average(name: str) -> float:
        found = [float(r[name]) for r in rounds if r[name] is not None]
        return sum(found) / len(found) if found else 0.0

    def means(name: str, over: list[dict[str, Any]]) -> dict[str, float]:
        return synthetic.mean_of([r[name] for r in over]) if over else {}

    found = {
        "folder": str(folder),
        "scheme": facts["scheme"],
        "task": facts["task"],
        "metric": facts["metric"],
        "final": curve[-1][1] if curve else None,
        "best": best((value for _, value in curve), default=None),
        "curve": curve,
        "trivial": facts["trivial"],
        "learner": facts["learner"],
        "entropy": facts["entropy"],
        "crypto": facts["crypto"],
        "cohort": log.plan.cohort,
        "rounds": len(rounds),
        "measured_rounds": len(measured),
        "survivors": average("survivors"),
        "union_rows": average("union_rows"),
        "rows_opened": average("rows_opened"),
        "rows_below_quorum": average("rows_below_quorum"),
        "rows_shrunk": average("rows_shrunk"),
        "rows_lost": average("rows_lost"),
        "rows_out_of_bounds": average("rows_out_of_bounds"),
        "not_finite": sum(r["not_finite"] for r in rounds),
        **in_rounds(rounds),
        "why_given_up": abort_reasons(log.events()),
        "clipped": average("clipped"),
        "rows_left_home": average("rows_over_cap"),
        "rows_exposed": sum(r.get("rows_exposed", 0) for r in rounds),
        "bytes_up": means("bytes_up", measured),
        "bytes_down": means("bytes_down", measured),
        "client_seconds": means("client_seconds", measured),
        "server_seconds": means("server_seconds", measured or rounds),
        "helper_seconds": means("helper_seconds", measured),
        "bytes_between": mean_of_measured(measured, "bytes_between"),
        "writing": next((dict(r["writing"]) for r in reversed(measured)), {}),
        "naming_bound": log.plan.promise.bound(),
        "epsilon": highest_epsilon(rounds) if RunFigures.load(folder).answers_differ else None,
        "condition": rounds[-1]["condition"] if rounds else "",
        "noise_epsilon": rounds[-1]["noise_epsilon"] if rounds else None,
        "noise_scope": rounds[-1]["noise_scope"] if rounds else "",
        "groups_not_finite": sum(r["groups_not_finite"] for r in rounds),
        "ended": next((e["reason"] for e in log.events() if e["event"] == "TrainingEnded"), ""),
        "seconds": sum(r["seconds"] or 0.0 for r in rounds),
        "still_improving": not dp.follows_from_rounds(log.plan)  # more rounds are another run
        and still_improving(curve, lower=bool(facts["lower_is_better"])),
    }
    return charged.marked(log.plan, found)


def still_improving(curve: Sequence[Sequence[float]], *, lower: bool) -> bool:
    """Whether the last fifth of a curve gained a tenth of all that was gained, and more than noise.

    What counts is the best value before and in the last fifth: a curve that shakes does not rise.
    """
    if len(curve) < FEW:
        return False
    values = [-value if lower else value for _, value in curve]
    late = max(1, len(values) // 5)
    before, whole = max(values[:-late]), max(values) - values[0]
    steps = sorted(abs(b - a) for a, b in pairwise(values[len(values) // 2 :]))
    return max(values[-late:]) - before > max(whole / 10, steps[len(steps) // 2] / 4)


def mean_of_measured(rounds: list[dict[str, Any]], name: str) -> float:
    return sum(float(r[name] or 0.0) for r in rounds) / len(rounds) if rounds else 0.0


def highest_epsilon(rounds: list[dict[str, Any]]) -> float | str | None:
    """The highest epsilon that any client has spent on its answers."""
    spent = [r["epsilon"] for r in rounds if r["epsilon"] is not None]
    return "inf" if "inf" in spent else max(spent, default=None)


# --- for people -----------------------------------------------------------------------------------


def show(facts: Mapping[str, Any], page: Path, console: Console) -> None:
    """The outcome of the run, in at most 80 columns."""
    width, entry = min(console.width, 100), schemes.named(facts["scheme"])
    each = f", {facts['cohort']} of {facts['task']['clients']:,} clients in each"
    if not entry.federated:
        each = " over all data in one place"
    console.print(
        f"[bold]{facts['scheme']}[/] on {escape(facts['task']['title'])}: "
        f"{facts['rounds']} rounds{each}.",
        width=width,
    )
    console.print(captioned(lines(facts)))
    if NOT_CHARGED in facts:
        console.print(f"{DAGGER} {NOT_CHARGED}")
    if facts["naming_bound"] < 1.0:
        text = in_words(facts["naming_bound"])
        console.print(f"Over all rounds {text}.", width=width)
    for name, reason in facts["writing"].items():
        console.print(f"[dim]{escape(name)}: written by {escape(reason)}[/]", width=width)
    if facts["entropy"] != "system":
        console.print("[red]Insecure test entropy: every secret of this run is known.[/]")
    if facts["still_improving"]:
        total = 2 * facts["rounds"]
        again = f"tessera run {shlex.quote(facts['folder'])} --resume --rounds {total}"
        console.print(
            f"The {facts['metric']} is still improving; `{escape(again)}` goes on.", soft_wrap=True
        )
    console.print(f"Report: {escape(str(page))}", soft_wrap=True)


def lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is shown of them; exact figures that a budget should have paid for with a dagger."""
    exact = facts.get(NOT_CHARGED, "").split(", ")
    for names, caption, value in figures(facts):
        yield f"{caption}{f' {DAGGER}' if any(name in exact for name in names) else ''}", value


def figures(facts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    entry = schemes.named(facts["scheme"])
    if facts["final"] is not None:
        at = facts["curve"][-1][0]  # a later test had no figure: the model was not finite any more
        when = "" if at >= facts["rounds"] else f", after round {at}: none later"
        yield ("final",), f"{facts['metric']}{when}", score(facts["final"])
    for name, value in facts["trivial"].items():
        yield ("trivial",), f"  baseline: {predictor(name)}", score(value)
    if entry.randomises:
        yield ("union_rows",), "rows in the union", count(facts["union_rows"])
        yield (
            ("rows_below_quorum",),
            "  below the quorum, not updated",
            count(facts["rows_below_quorum"]),
        )
    if entry.two_servers:
        yield ("rows_opened",), "rows written by any client, opened", count(facts["rows_opened"])
    if facts["rows_out_of_bounds"]:
        yield (
            ("rows_out_of_bounds",),
            "  opened, not merged: out of bounds",
            count(facts["rows_out_of_bounds"]),
        )
    if facts["rows_exposed"]:
        why = "of clients missing in a round of their keys"
        yield ("rows_exposed",), f"  rows exposed ({why})", count(facts["rows_exposed"])
    if facts["rows_left_home"]:
        why = "max_rows, union, bins" if entry.two_servers else "max_rows"
        yield ("rows_left_home",), f"  rows over the cap ({why})", count(facts["rows_left_home"])
    if facts["measured_rounds"]:
        for way in ("up", "down"):
            sent = size(sum(facts[f"bytes_{way}"].values()))
            yield (f"bytes_{way}",), f"bytes {way}, per client and round", sent
        spent = dict(facts["client_seconds"])
        training = spent.pop("train", 0.0)
        yield ("client_seconds",), "CPU per round, one client", seconds(sum(spent.values()))
        yield ("client_seconds",), "  and its training", seconds(training)
        server = seconds(sum(facts["server_seconds"].values()))
        yield ("server_seconds",), "CPU per round, the server", server
        if entry.two_servers:
            helper = seconds(sum(facts["helper_seconds"].values()))
            yield ("helper_seconds",), "CPU per round, the helper", helper
            between = size(facts["bytes_between"])
            yield ("bytes_between",), "bytes between servers, per client", between
    if facts["epsilon"] is not None:
        about = f"epsilon spent, per index, {facts['condition']}"
        yield ("epsilon",), about, epsilon(facts["epsilon"])
    if facts["noise_epsilon"] is not None:
        about = f"epsilon spent, {facts['noise_scope']}"
        yield ("noise_epsilon",), about, epsilon(facts["noise_epsilon"])
    if facts["groups_not_finite"]:
        left = count(facts["groups_not_finite"])
        yield ("groups_not_finite",), "  left out, a gradient not finite", left
    if facts["ended"]:
        yield ("ended",), "ended early", facts["ended"]
    if facts["crypto"]["mode"] != "every" and entry.federated:
        real = f"{facts['measured_rounds']} of {facts['rounds']}"
        yield ("measured_rounds",), "rounds with real messages", real
    for caption, value in synthetic.fault_lines(facts):
        yield ("excluded",), caption, value
    yield ("seconds",), "time", seconds(facts["seconds"])
