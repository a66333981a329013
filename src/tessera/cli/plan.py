"""`tessera plan`: check a plan, and predict what its rounds cost and which privacy they give.

The command parses and prints. Rows and bytes come from `tessera.rounds.forecast`, epsilons
and exposures from `tessera.privacy.index.exposure`, seconds from `tessera.simulation.calibration`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tessera.cli.format import (
    AsCsv,
    AsJson,
    DataFolder,
    figures_written,
    model_of,
    parse_holders,
    warn_if_slow,
)
from tessera.cli.plan_page import show, show_schemes
from tessera.cli.utility import PopularityFile, Skew, effects_of, utility_of
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.plan import Plan, Scheme, Trust
from tessera.plan.reference import example_plan
from tessera.privacy.dp.guarantee import INDEX_SCOPE, json_number
from tessera.privacy.index import exposure, known_rows
from tessera.privacy.index.bound import COMING_AND_GOING, NAMED, SMALL
from tessera.privacy.index.groups import DrawnGroups
from tessera.report.numbers import percent, plural, share, size
from tessera.rounds import schemes
from tessera.rounds.forecast import Forecast
from tessera.rounds.forecast.forecast import break_evens, identification_forecast, smaller_cap
from tessera.rounds.noise import noise_of, paper_notes, training_notes
from tessera.rounds.schedule import Schedule
from tessera.runs.folder import describe_two_server
from tessera.simulation.calibration import round_seconds

if TYPE_CHECKING:
    from tessera.plan.defaults import Filled
    from tessera.runs.held import HeldRows
    from tessera.tasks import Task

NO_FORECAST: Final = (
    "what noise leaves of this model is not forecast: its rows are not effects on a rating or a "
    "click (docs/results.md has what was trained)"
)
OUTSIDE: Final = (
    "outside epsilon: how many rows clients hold is counted in the task's data. A deployment has "
    "no such count; whoever chooses a plan by it has looked at the data"
)


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
        typer.Option(help="Rows a client holds of each table (default: the task's, or max_rows)."),
    ] = None,
    holders: Annotated[
        str | None,
        typer.Option(
            help="Share of the union's rows by number of holders, as 1=0.867,2=0.110,3=0.023 "
            "(default: all rows equally likely)."
        ),
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option(help="Share of clients that drop out (default: what the plan tolerates)."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of a period that a client takes part in (default: all)."),
    ] = None,
    population: Annotated[
        int | None,
        typer.Option(
            help="Clients that cohorts are drawn from (default: the cohort itself).",
            show_default=False,
        ),
    ] = None,
    popularity: PopularityFile = None,
    skew: Skew = 1.0,
    all_schemes: Annotated[
        bool,
        typer.Option("--all-schemes", help="Put all schemes side by side for the plan's task."),
    ] = False,
    data: DataFolder = None,
    csv: AsCsv = None,
    as_json: AsJson = False,
) -> None:
    """Check a plan; predict bytes, rows, privacy and time before running it."""
    if example:
        typer.echo(example_of(path or schemes.DEFAULT), nl=False)
        return
    if not path:
        raise ConfigError("no plan given", hint="`tessera plan --example > plan.toml` writes one")
    found = Plan.read(Path(path))
    if csv is not None and not all_schemes:
        raise ConfigError("--csv is for a table of schemes", hint="use it with --all-schemes")
    if all_schemes:
        side_by_side(found, data, rows_per_client, csv, as_json)
        return
    if not schemes.of(found).federated:
        raise ConfigError(
            f"{path}: central training sends no messages, so there is nothing to predict",
            hint=f"`tessera run {path}` trains it",
        )
    held: HeldRows | None = None
    given: Sequence[Filled] = ()
    beside: dict[str, Any] = {}
    solve = ""
    if not found.is_complete:
        found, held, given, beside, solve = with_task(found, data)
    warn_if_slow(found)
    assumed = found.union.max_rows if held is None else held.mean
    absent = found.security.dropout if dropout is None else dropout
    if found.grouped and dropout is None:
        absent = found.simulation.dropout or absent
    forecast = Forecast(
        found,
        rows_per_client=assumed if rows_per_client is None else rows_per_client,
        given_holders=None if holders is None else parse_holders(holders),
        dropout=0.0 if found.grouped else absent,
    )
    if population is not None and population < found.cohort:
        raise ConfigError(
            f"--population {population} is less than a cohort of {found.cohort}",
            hint="cohorts are drawn from the population; leave it out if they are all of it",
        )
    report = describe(forecast, path, joined=rounds, held=held, population=population or 0)
    there = population or (found.cohort if held is None else held.clients)
    utility = utility_of(
        found,
        users=there,
        rows=max((table.rows for table in found.roots), default=0),
        held=forecast.rows_per_client,
        path=popularity,
        skew=skew,
    )
    report["utility"] = None if utility is None else utility.as_json()
    report["filled_in"] = [
        {"key": one.key, "value": one.text, "because": one.because} for one in given
    ]
    if solve:
        report["notes"] = [*report["notes"], f"after the last round {solve}"]
    if beside:
        report["beside"] = beside
        report["notes"] = [*report["notes"], beside_in_words(beside)]
    if found.grouped:
        everybody = population or (0 if held is None else max(held.clients, found.cohort))
        groups = describe_groups(forecast, found, absent, everybody)
        report |= {**groups, "assumed": report["assumed"] | groups["assumed"]}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report)


def side_by_side(
    plan: Plan, data: Path | None, rows: int | None, csv: Path | None, as_json: bool
) -> None:
    """Every scheme for the plan's task, or for its tables."""
    held = None
    if not plan.is_complete:
        plan, held, *_ = with_task(plan, data)
    if rows is None:
        rows = plan.union.max_rows if held is None else held.mean
    found = [under(plan, entry, rows) for entry in schemes.SCHEMES.values()]
    if figures_written(found, csv):
        return
    if as_json:
        typer.echo(json.dumps({"rows_per_client": rows, "schemes": found}))
        return
    every = sum(table.rows for table in plan.tables)
    title = f"{plan.task.name or plan.federation}: {every:,} rows, {rows:,} of them a client's"
    show_schemes(found, title)


def with_task(
    plan: Plan, data: Path | None
) -> tuple[Plan, HeldRows, list[Filled], dict[str, Any], str]:
    """The plan with its task's model, the rows that its clients hold, what was filled in, what a
    second model costs, where the task has one, and what sums take to be solved, if they are."""
    from tessera import tasks
    from tessera.plan.defaults import filled_in, plan_beside, with_defaults
    from tessera.runs.held import HeldRows
    from tessera.tasks.sequences import SOLVE

    def completed(plan: Plan, task: Task) -> tuple[Plan, list[Filled]]:
        given = filled_in(plan, task)
        return noise_of(with_defaults(plan, given)).calibrated(), given

    task = tasks.load(plan.task.name, data=data, **plan.task.options)
    whole, given = completed(plan, task)
    beside: dict[str, Any] = {}
    if task.beside is not None:
        second, _ = completed(plan_beside(plan, task.beside.task), task.beside.task)
        costs = Forecast(second, rows_per_client=HeldRows.of(task.beside.task, second).mean)
        beside = {
            "model": task.beside.names[1],
            "rounds": second.simulation.rounds,
            "cohort": second.cohort,
            "bytes_up": sum(costs.bytes_up().values()),
            "bytes_down": sum(costs.bytes_down().values()),
        }
    summed = task if task.beside is None else task.beside.task
    solve = str(summed.data.facts.get(SOLVE, ""))
    return whole, HeldRows.of(task, whole), given, beside, solve


def beside_in_words(beside: Mapping[str, Any]) -> str:
    return (
        f"and for {beside['model']}, beside it: {plural(beside['rounds'], 'round')} of "
        f"{beside['cohort']:,} clients, in which each sends {size(beside['bytes_up'])} and fetches "
        f"{size(beside['bytes_down'])}"
    )


def under(plan: Plan, entry: schemes.SchemeEntry, rows: int) -> dict[str, Any]:
    """What the plan would cost and give away under a scheme; or why it is refused."""
    record: dict[str, Any] = {
        "scheme": entry.name,
        "server_learns": entry.knowledge.server,
        "honest": entry.knowledge.honest,
        "bytes_up": None,
        "bytes_down": None,
        "bytes_between": None,
        "server_seconds": None,
        "holder_named": 1.0,
        "refused": None,
    }
    if not entry.federated:
        return record
    try:
        changed = plan.under(entry.scheme)
        forecast = Forecast(changed, rows_per_client=rows)
        record |= {
            "bytes_up": sum(forecast.bytes_up().values()),
            "bytes_down": sum(forecast.bytes_down().values()),
            "bytes_between": forecast.bytes_between() if entry.two_servers else None,
            "holder_named": changed.promise.bound(),
        }
        if forecast.work is not None or entry.two_servers:
            record["server_seconds"] = round_seconds(forecast).get("server")
    except ConfigError as error:
        record["refused"] = str(error)
    return record


# --- the facts ------------------------------------------------------------------------------------


def describe(
    forecast: Forecast,
    path: str,
    *,
    joined: int | None = None,
    held: HeldRows | None = None,
    population: int = 0,
) -> dict[str, Any]:
    """Everything the command knows, as plain JSON values; `held` was counted in the task's data."""
    plan, entry = forecast.plan, schemes.of(forecast.plan)
    up, down = forecast.bytes_up(), forecast.bytes_down()
    report: dict[str, Any] = {
        "plan": path,
        "scheme": plan.scheme.value,
        "cohort": plan.cohort,
        "ring_bits": plan.ring.bits,
        "server_learns": entry.knowledge.plan,
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
    if entry.two_servers:
        report["two_server"] = describe_two_server(plan, forecast.two_server)
        report["break_even"] = break_evens(forecast)
        report["fewer_rows"] = smaller_cap(
            forecast, forecast.rows_per_client if held is None else held.fitting
        )
    if entry.masks:
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
    if entry.randomises:
        report["privacy"] = describe_privacy(plan, joined)
        if not plan.grouped:  # a group waits for whoever is missing
            report["late_dropout"] = {t.name: describe_late(forecast, t.name) for t in plan.roots}
    if forecast.work is not None or entry.two_servers:
        report["seconds"] = round_seconds(forecast)
    report["naming"] = None
    if entry.hides and plan.roots and not noise_of(plan).covers_rows:
        rounds = plan.privacy.period_rounds if joined is None else joined
        report["naming"] = identification_forecast(
            forecast, rounds=rounds, population=population
        ).as_json()
    report["dp"] = None if plan.dp is None else describe_noise(plan)
    known = population or (0 if held is None else held.clients)
    report["cohorts"] = describe_cohorts(plan, known) if plan.bounds_rounds else None
    report["notes"] = list(notes(report, forecast))
    return report


def describe_cohorts(plan: Plan, population: int) -> dict[str, Any]:
    """In how many rounds a client can be; with a schedule for so many clients, refused if they
    cannot keep it, its passes. `population` is 0 where it is not known."""
    bound, schedule = plan.participation, None
    found: dict[str, Any] = {
        "drawn": plan.cohorts.drawn.value,
        "rounds": bound.rounds,
        "rounds_per_client": bound.most,
        "separation": bound.separation,
        "population": population or None,
        "pass": None,
    }
    if plan.cohorts.scheduled and population:
        order = Secret(bytes(32))  # who comes first changes nothing here
        schedule = Schedule.drawn(range(population), plan.cohort, order)
        schedule.check(plan)
        found["pass"] = {
            "rounds": schedule.rounds,
            "fewest": schedule.fewest,
            "most": -(-population // schedule.rounds),
            "free_places": len(schedule.places) - population,
        }
    return found


def cohorts_in_words(cohorts: Mapping[str, Any]) -> str:
    """A note: how often clients are in a round, and how rounds are filled."""
    most, separation = cohorts["rounds_per_client"], cohorts["separation"]
    apart = f", {separation} apart at least" if most > 1 and separation > 1 else ""
    of_all = plural(cohorts["rounds"], "round")
    kept = f"a client is in at most {most} of {of_all}{apart}, and refuses any other"
    if cohorts["drawn"] != "schedule":
        return f"cohorts by the {cohorts['drawn']}: {kept}"
    if cohorts["pass"] is None:
        return f"cohorts by a schedule: {kept}; --population says how passes are filled"
    shape = cohorts["pass"]
    sizes = f"{shape['fewest']:,} or {shape['most']:,} of them in each"
    if shape["fewest"] == shape["most"]:
        sizes = f"{shape['most']:,} of them in each"
    return (
        f"cohorts by a schedule: {cohorts['population']:,} clients in passes of "
        f"{plural(shape['rounds'], 'round')}, {sizes}; {kept}; {shape['free_places']:,} places are "
        "free for newcomers"
    )


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
    """Epsilon of the plan's probabilities; a client that chooses others has another."""
    privacy = plan.privacy.index
    most = 1 if plan.once_a_period else plan.privacy.period_rounds
    rounds = most if joined is None else joined
    if not 1 <= rounds <= most:
        raise ConfigError(
            f"--rounds {rounds}: a client takes part in 1 to {most} rounds of a period",
            hint="period_rounds in [privacy] and separation in [cohorts] decide how many",
        )
    found = {
        "scope": INDEX_SCOPE,
        "level": plan.privacy.level or "custom",
        "p5": privacy.p5,
        "p6": privacy.p6,
        "rounds": rounds,
    }
    if privacy.names_all:  # no answer is randomised, and what has no noise has no epsilon
        return found
    return found | {
        "epsilon_once": json_number(exposure.epsilon_per_round(privacy)),
        "epsilon_after_rounds": json_number(exposure.epsilon_after(privacy, rounds)),
        "epsilon_longitudinal": json_number(exposure.epsilon_longitudinal(privacy)),
    }


def describe_noise(plan: Plan) -> dict[str, Any]:
    """[dp]: its noise, what a client spends in all rounds that it may be in, and how many the
    budget lasts.

    Without dp-accounting samples have no number, and the refusal says what to install.
    """
    noise = noise_of(noise_of(plan).calibrated())
    section, setting, plan = noise.dp, noise.setting, noise.plan
    rounds = plan.simulation.rounds
    ledger = setting.ledger(rounds)
    spent = [
        ledger.guarantee(unit=section.unit, against=observer, delta=section.delta)
        for observer in setting.protected()
    ]
    worst = max(spent, key=lambda g: g.epsilon)
    return {
        "unit": section.unit,
        "noise": setting.noise,
        "clip": section.clip,
        "steps": section.steps,
        "sampling": section.sampling,
        "trust": section.trust.value,
        "budget": None if setting.printed else section.epsilon or None,
        "delta": section.delta,
        "rounds": rounds,
        "rounds_of_a_client": min(rounds, plan.participation.most),
        "epsilon": json_number(worst.epsilon),
        "scope": worst.scope,
        "against": [observer.value for observer in setting.protected()],
        "lasts": noise.lasts,
        "training": setting.over_training(),
        "printed": noise.paper_facts(),
    }


def describe_groups(
    forecast: Forecast, plan: Plan, absent: float, population: int
) -> dict[str, Any]:
    """Fixed groups that wait, if this share of invited clients is absent; `plan` is the whole."""
    up, down = forecast.union_bytes
    return {
        "cohort": plan.cohort,
        "groups": {
            "size": plan.group_size,
            "small": plan.groups.small,
            "period": plan.groups.period,
            "waiting": asdict(forecast.waiting(absent=absent, population=population)),
            "union_up": up,
            "union_down": down,
            **DrawnGroups(size=plan.group_size).as_json(),
        },
        "assumed": {"dropout": absent},
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
    plan, entry = forecast.plan, schemes.of(forecast.plan)
    if report["cohorts"] is not None:
        yield cohorts_in_words(report["cohorts"])
    if report["dp"] is not None:
        yield from paper_notes(report["dp"]["printed"])
        yield from training_notes(report["dp"]["training"])
        if report["held"] is not None:
            yield OUTSIDE
        if effects_of(plan.task.name) is None:
            yield NO_FORECAST
    if forecast.rows.left_out and entry.hides:
        yield (
            f"{forecast.rows.left_out} rows of every client are over the cap, max_rows = "
            f"{plan.union.max_rows}, and are not trained"
        )
    elif entry.hides and report["held"] and report["held"]["over_cap"]:
        yield (
            "{over_cap:,} of {looked_at:,} clients hold more rows of a table, up to {most:,}, than "
            "the cap".format(**report["held"])
            + f", max_rows = {plan.union.max_rows:,}: those over it are not trained"
        )
    if entry.randomises:
        if report["privacy"].get("epsilon_once") == "inf":
            yield "epsilon is infinite: a client's answers prove which rows it holds"
        missed = max(f.missed for f in forecast.rows.tables)
        if missed > 0.05:
            yield (
                f"{share(missed)} of a union's rows are below the quorum of "
                f"{report['security']['quorum']} and are not updated in that round"
            )
        if not plan.privacy.decoys:
            yield "without decoys, a client that drops out after the union exposes its rows"
        if plan.privacy.insecure_small_groups:
            yield "insecure_small_groups: a row may be opened with one honest member in its group"
    if entry.two_servers:
        yield from two_server_notes(report)
    elif entry.by_rows:
        whole = plan.full_length * plan.ring.bits / 8
        if report["bytes"]["total_up"] > whole:
            yield (
                f"the full model is {size(whole)} up, less than these rows: a full-model scheme "
                "costs less"
            )
    if entry.hides and plan.roots and not noise_of(plan).covers_rows:
        if plan.grouped:
            yield plan.promise.in_words()
            if plan.groups.small:
                yield SMALL
            yield known_rows.in_words(plan.task.name, model_of(plan))
        yield COMING_AND_GOING if plan.grouped else NAMED
    if plan.listed and plan.privacy.grouped:
        rows = noise_of(plan).dp.rows.value
        yield (
            f'level = "groups" has no part in this plan: [dp] rows = "{rows}" '
            "has everybody fetch and write the same rows, in one sum with noise"
        )
    if entry.hides and forecast.dropout > plan.security.dropout:
        yield (
            f"more may drop out ({percent(forecast.dropout)}) than the plan tolerates "
            f"({percent(plan.security.dropout)}): such rounds are aborted"
        )


def two_server_notes(report: Mapping[str, Any]) -> list[str]:
    found, fewer = report["two_server"], report["fewer_rows"]
    lines = []
    if not opens_with_noise(report):
        lines.append(
            "a row that only one client writes is opened as that client's exact update, without "
            "its identity"
        )
    if fewer is not None and not (report["dp"] and report["held"]):  # it would follow from data
        held = f"{report['assumed']['rows_per_client']:,} are assumed"
        if report["held"] is not None:
            held = "clients hold {mean:,} on average and {most:,} at most".format(**report["held"])
        lines.append(
            f"all messages are sized for max_rows = {found['max_rows']:,}, and "
            f"{held}: max_rows = {fewer['max_rows']:,} would take {size(fewer['total_up'])} up and "
            f"{size(fewer['total_down'])} down"
        )
    if not found["check"]:
        lines.append(
            "check = false: a server that alters the rows of one client goes unnoticed, and can "
            "read that client's rows in the next sum"
        )
    if not found["verify"]:
        lines.append(
            "verify = false: one client can write any number of rows, all of a table at once"
        )
    if found["key_rounds"] > 1:
        first, later = found["report_bytes"]
        lines.append(
            f"keys last {found['key_rounds']} rounds: a client's report takes {size(first)} in the "
            f"first of them and {size(later)} later, and the cohort stays the same; where the next "
            "keys are made over another list of clients, the rows of whoever came or went show"
        )
        if found["absent"] == "allow":
            lines.append(
                'absent = "allow": the rows of a client that is missing in a round of its keys '
                "show in the difference of two sums"
            )
    if found["domain"] == "union":
        lines.append(
            "the union is opened exactly, in a secure sum with signed keys and the active "
            "setting's threshold of clients"
        )
    return lines


def opens_with_noise(report: Mapping[str, Any]) -> bool:
    """Whether both servers add noise to every row before the sum opens."""
    noise = report["dp"]
    return noise is not None and noise["trust"] == Trust.EACH.value


def example_of(scheme: str) -> str:
    """A commented plan for the scheme of this name."""
    try:
        return example_plan(Scheme(scheme))
    except ValueError:
        names = ", ".join(e.name for e in schemes.SCHEMES.values() if e.federated)
        raise ConfigError(
            f"--example: unknown scheme {scheme!r}", hint=f"the schemes are {names}"
        ) from None
