"""`tessera plan`: check a plan, and say before anything runs what its rounds cost and promise.

The command parses and prints. Rows and bytes come from `tessera.rounds.forecast`, epsilons
and exposures from `tessera.privacy.exposure`, seconds from `tessera.engines.calibration`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from tessera.cli import plan_two_server as two_server
from tessera.cli.format import AsJson, DataFolder, figures_table, parse_holders, warn_if_slow
from tessera.engines.calibration import round_seconds
from tessera.engines.description import describe_two_server
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.privacy import exposure
from tessera.privacy.guarantee import INDEX_SCOPE, json_number
from tessera.protocols.secagg.params import Threat
from tessera.report.numbers import count, epsilon, percent, probability, seconds, share, size
from tessera.rounds.forecast import Forecast
from tessera.rounds.forecast.row_cap import break_evens, smaller_cap
from tessera.rounds.plan import Plan, Scheme
from tessera.rounds.plan.example import example_plan

if TYPE_CHECKING:
    from tessera.engines.held import HeldRows

CATEGORIES: Final = ("keys", "union", "choice", "rows down", "update")

LEARNS: Final = {
    Scheme.FEDAVG: "every client's update, as it is",
    Scheme.SUBMODEL: "every client's rows and updates, as they are",
    Scheme.SECURE_FEDAVG: "the sum of all updates, hence which rows changed",
    Scheme.SECURE_SUBMODEL: "the union of all rows, randomised sets, and sums and counts per row",
    Scheme.TWO_SERVER: two_server.LEARNS,
}


def plan(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PLAN.toml", help="The plan; with --example a scheme.", show_default=False
        ),
    ] = "",
    example: Annotated[
        bool, typer.Option("--example", help="Print a commented plan and do nothing else.")
    ] = False,
    rows_per_client: Annotated[
        int | None,
        typer.Option(help="Rows a client holds of each table (default: the plan's max_rows)."),
    ] = None,
    holders: Annotated[
        str | None,
        typer.Option(help="Union rows by holders, as 1=0.867,2=0.110,3=0.023 (default: even)."),
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option(help="Share of clients that drop out (default: what the plan tolerates)."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of a period that a client joins (default: all it may)."),
    ] = None,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Check a plan; predict bytes, rows, privacy and time before running it."""
    if example:
        typer.echo(example_of(path or Scheme.SECURE_SUBMODEL), nl=False)
        return
    if not path:
        raise ConfigError("no plan given", hint="`tessera plan --example > plan.toml` writes one")
    found = Plan.read(Path(path))
    if found.scheme is Scheme.CENTRAL:
        raise ConfigError(
            f"{path}: central training sends nothing, so there is nothing to predict",
            hint=f"`tessera run {path}` trains it",
        )
    held = None
    if not found.is_complete:
        found, held = with_task(found, data)
    warn_if_slow(found)
    assumed = found.union.max_rows if held is None else held.mean
    forecast = Forecast(
        found,
        rows_per_client=assumed if rows_per_client is None else rows_per_client,
        given_holders=None if holders is None else parse_holders(holders),
        dropout=found.security.dropout if dropout is None else dropout,
    )
    report = describe(forecast, path, joined=rounds, held=held)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report, forecast)


def with_task(plan: Plan, data: Path | None) -> tuple[Plan, HeldRows]:
    """The plan with its task's model, and the rows that its clients hold."""
    from tessera import tasks
    from tessera.engines.held import HeldRows
    from tessera.engines.training import complete

    task = tasks.load(plan.task.name, data=data, **plan.task.options)
    whole = complete(plan, task)
    return whole, HeldRows.of(task, whole)


# --- the facts ------------------------------------------------------------------------------------


def describe(
    forecast: Forecast, path: str, *, joined: int | None = None, held: HeldRows | None = None
) -> dict[str, Any]:
    """Everything the command knows, as plain JSON values; `held` is counted, not assumed."""
    plan = forecast.plan
    up, down = forecast.bytes_up(), forecast.bytes_down()
    report: dict[str, Any] = {
        "plan": path,
        "scheme": plan.scheme.value,
        "cohort": plan.cohort,
        "ring_bits": plan.ring.bits,
        "server_learns": two_server.LEARNS_UNION if plan.narrows else LEARNS[plan.scheme],
        "assumed": {
            "rows_per_client": forecast.rows_per_client,
            "holders": "given" if forecast.given_holders else "even",
            "dropout": forecast.dropout,
        },
        "held": None if held is None else asdict(held),
        "rows": {f.name: asdict(f) for f in forecast.rows.tables},
        "rows_left_out": forecast.rows.left_out,
        "bytes": {
            "up": up,
            "down": down,
            "total_up": sum(up.values()),
            "total_down": sum(down.values()),
            "between": forecast.bytes_between(),
        },
        "security": None,
        "privacy": None,
        "late_dropout": None,
        "seconds": None,
        "two_server": None,
    }
    if plan.scheme is Scheme.TWO_SERVER:
        report["two_server"] = describe_two_server(plan, forecast.two_server)
        report["break_even"] = break_evens(forecast)
        report["fewer_rows"] = smaller_cap(
            forecast, forecast.rows_per_client if held is None else held.fitting
        )
    if plan.scheme.secure:
        params = plan.secagg(RoundId(0))
        report["security"] = {
            "threat": params.threat.value,
            "graph": params.graph.value,
            "neighbours": params.topology.degree,
            "threshold": params.topology.threshold,
            "may_vanish": plan.cohort - params.min_survivors,
            "quorum": params.quorum,
            "corrupt": params.corrupt,
        }
    if plan.has_union:
        report["union"] = describe_union(plan)
    if plan.scheme is Scheme.SECURE_SUBMODEL:
        report["privacy"] = describe_privacy(plan, joined)
        report["late_dropout"] = {t.name: describe_late(forecast, t.name) for t in plan.roots}
    if forecast.work is not None or plan.scheme is Scheme.TWO_SERVER:
        report["seconds"] = round_seconds(forecast)
    report["notes"] = list(notes(report, forecast))
    return report


def describe_union(plan: Plan) -> dict[str, Any]:
    encoding = plan.union_encoding(RoundId(0))
    return {
        "encoding": type(encoding).__name__,
        "capacity": encoding.capacity,
        "words": encoding.length,
        "bits": encoding.group.bits,
        "false_negative_rate": encoding.false_negative_rate,
        "failure_rate": encoding.failure_rate,
        "expected_false_positives": encoding.expected_false_positives,
    }


def describe_privacy(plan: Plan, joined: int | None) -> dict[str, Any]:
    """Levels of the plan's probabilities; a client that chose others has others."""
    privacy = plan.privacy.index
    most = 1 if plan.privacy.one_participation else plan.privacy.period_rounds
    rounds = most if joined is None else joined
    if not 1 <= rounds <= most:
        raise ConfigError(
            f"--rounds {rounds}: a client joins 1 to {most} rounds of a period",
            hint="period_rounds and one_participation in [privacy] decide how many",
        )
    return {
        "scope": INDEX_SCOPE,
        "level": plan.privacy.level or "custom",
        "p5": privacy.p5,
        "p6": privacy.p6,
        "epsilon_once": json_number(exposure.epsilon_once(privacy)),
        "rounds": rounds,
        "epsilon_after_rounds": json_number(exposure.epsilon_after(privacy, rounds)),
        "epsilon_longitudinal": json_number(exposure.epsilon_longitudinal(privacy)),
    }


def describe_late(forecast: Forecast, name: str) -> dict[str, float]:
    table = forecast.plan.table(name)
    late = forecast.rows.late_dropout(table)
    return {
        "exposed": late.exposed,
        "confidence": late.confidence,
        "confidence_without_decoys": forecast.rows.late_dropout(table, decoys=False).confidence,
        "prior": late.prior,
    }


def notes(report: Mapping[str, Any], forecast: Forecast) -> Iterator[str]:
    """What somebody who is about to run this plan should know."""
    plan = forecast.plan
    if forecast.rows.left_out and plan.scheme.hides:
        yield (
            f"{forecast.rows.left_out} rows of every client stay home: max_rows = "
            f"{plan.union.max_rows} caps what it may name"
        )
    elif plan.scheme.hides and report["held"] and report["held"]["most"] > plan.union.max_rows:
        yield (
            f"some clients hold up to {report['held']['most']:,} rows of a table: those over "
            f"max_rows = {plan.union.max_rows:,} stay home"
        )
    if plan.scheme is Scheme.SECURE_SUBMODEL:
        if report["privacy"]["epsilon_once"] == "inf":
            yield "the level is infinite: a client's answers are proof of its rows"
        missed = max(f.missed for f in forecast.rows.tables)
        if missed > 0.05:
            yield (
                f"{share(missed)} of a union's rows miss the quorum of "
                f"{report['security']['quorum']} and are not updated that round"
            )
        if not plan.privacy.decoys:
            yield "without decoys a client that leaves after the union leaves its rows behind"
        if plan.privacy.insecure_small_groups:
            yield "insecure_small_groups: a row may open with one honest member in its group"
    if plan.scheme is Scheme.TWO_SERVER:
        yield from two_server.notes(report)
    elif plan.scheme.by_rows:
        whole = plan.full_length * plan.ring.bits / 8
        if report["bytes"]["total_up"] > whole:
            yield (
                f"the whole model is {size(whole)} up, less than these rows: a full-model scheme "
                "costs less"
            )
    if plan.scheme.hides and forecast.dropout > plan.security.dropout:
        yield (
            f"more may drop out ({percent(forecast.dropout)}) than the plan tolerates "
            f"({percent(plan.security.dropout)}): such rounds are given up"
        )


# --- the telling ----------------------------------------------------------------------------------


def show(report: Mapping[str, Any], forecast: Forecast) -> None:
    """One page on stdout; it fits 80 columns."""
    console = Console(highlight=False)
    width = min(console.width, 100)
    console.print(f"[bold]{report['plan']}[/] can run.", soft_wrap=True)
    for line in preamble(report, forecast.plan):
        console.print(line, width=width)
    console.print(rows_table(report))
    console.print(bytes_table(report))
    for name, lines in facts(report).items():
        console.print(f"[bold]{name}[/]", width=width)
        grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
        grid.add_column()
        grid.add_column(overflow="fold")
        for caption, value in lines:
            grid.add_row(caption, value)
        console.print(grid, width=width)
        console.print()
    for note in report["notes"]:
        console.print(f"[yellow]note:[/] {note}", width=width)


def preamble(report: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    security = report["security"]
    line = f"{report['scheme']}, {report['cohort']} clients a round"
    if security is not None:
        active = security["threat"] == Threat.ACTIVE.value
        line += f", against {'an active' if active else 'a curious'} server; "
        line += vanishing(security["may_vanish"])
    elif report["two_server"] is not None:
        line += ", between two servers that do not work together; "
        line += vanishing(report["two_server"]["may_vanish"])
    yield line.rstrip(".") + "."
    who = "server learns" if report["two_server"] is None else "servers learn"
    yield f"The {who}: {report['server_learns']}."
    assumed = report["assumed"]
    spread = "any row as likely" if assumed["holders"] == "even" else "holders per row as given"
    yield (
        f"[dim]Assumed: {assumed['rows_per_client']:,} rows per client and table, {spread}; "
        f"{percent(assumed['dropout'])} drop out late.[/]\n"
    )


def vanishing(many: int) -> str:
    return f"any {many} may vanish." if many else "nobody may vanish."


def rows_table(report: Mapping[str, Any]) -> Table:
    table = figures_table()
    secret = report["scheme"] == Scheme.SECURE_SUBMODEL
    union = secret or (report["two_server"] or {}).get("domain") == "union"
    table.add_column("rows, expected", min_width=26)
    for name, found in report["rows"].items():
        table.add_column(f"{name}*" if found["derived"] else name, justify="right", min_width=10)

    def row(caption: str, name: str) -> None:
        table.add_row(caption, *(count(f[name]) for f in report["rows"].values()))

    row("held by a client", "real")
    row("in the union" if union else "held by anybody", "union")
    row("fetched by a client", "revealed")
    row("trained by a client", "trained")
    if secret:
        quorum = report["security"]["quorum"]
        for caption, name in (
            (f"below quorum {quorum}", "missed"),
            ("below it after dropouts", "lost"),
        ):
            table.add_row(caption, *(share(f[name]) for f in report["rows"].values()))
    if any(f["derived"] for f in report["rows"].values()):
        table.caption = "* derived; its map is taken as even"
        table.caption_justify = "left"
    return table


def bytes_table(report: Mapping[str, Any]) -> Table:
    table = figures_table(show_footer=True)
    up, down = report["bytes"]["up"], report["bytes"]["down"]
    table.add_column("bytes per client", "total", min_width=26)
    table.add_column("up", size(report["bytes"]["total_up"]), justify="right", min_width=10)
    table.add_column("down", size(report["bytes"]["total_down"]), justify="right", min_width=10)
    for category in CATEGORIES:
        if category in up or category in down:
            table.add_row(
                category, *(size(part[category]) if category in part else "" for part in (up, down))
            )
    if report["bytes"]["between"]:
        told = size(report["bytes"]["between"])
        table.caption = f"and {told} between the two servers, for each client"
        table.caption_justify = "left"
    return table


def facts(report: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Headed lists of (what, value)."""
    found: dict[str, list[tuple[str, str]]] = {}
    if report["two_server"] is not None:
        found |= two_server.facts(report)
    privacy = report["privacy"]
    if privacy is not None:
        rounds = privacy["rounds"]
        found[f"epsilon, {privacy['scope']} ({privacy['level']})"] = [
            ("of one round", epsilon(privacy["epsilon_once"])),
            (f"of {rounds} rounds of a period", epsilon(privacy["epsilon_after_rounds"])),
            ("of a period, without end", epsilon(privacy["epsilon_longitudinal"])),
        ]
        late = report["late_dropout"]
        lines = []
        for name, values in late.items():
            of = f" ({name})" if len(late) > 1 else ""
            bare = share(values["confidence_without_decoys"])
            lines += [
                (f"its rows that come back empty{of}", share(values["exposed"])),
                (
                    f"an empty row is its own{of}",
                    f"{share(values['confidence'])} ({bare} without decoys)",
                ),
            ]
        found["one client leaves between union and update"] = lines
    union = report.get("union")
    if union is not None:
        found["the union"] = [
            ("encoding", f"{union['encoding']}, {union['words']:,} words of {union['bits']} bits"),
            ("sized for", f"{union['capacity']:,} rows"),
            ("missed ids, at most", f"{probability(union['false_negative_rate'])} each"),
        ]
    spent = report["seconds"]
    if spent is not None:
        found["time per round on this machine (rough, often twice; no training, no network)"] = [
            ("one client", seconds(spent["client"], digits=2)),
            ("the server", seconds(spent["server"], digits=2)),
            *([("the helper", seconds(spent["helper"], digits=2))] if "helper" in spent else []),
            ("all in one process, as `tessera run`", seconds(spent["simulated"], digits=2)),
        ]
    return found


# --- an example -----------------------------------------------------------------------------------


def example_of(scheme: str) -> str:
    """A commented plan for the scheme of this name."""
    try:
        return example_plan(Scheme(scheme))
    except ValueError:
        names = ", ".join(s.value for s in Scheme if s is not Scheme.CENTRAL)
        raise ConfigError(
            f"--example: there is no scheme {scheme!r}", hint=f"the schemes are {names}"
        ) from None
