"""`tessera privacy dp`: what noise is worth, per unit and observer; noise for a budget; and rounds.

The command parses and prints; every number comes from the ledger. Two of noise, epsilon and rounds
are given, and the third is found.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console

from tessera.cli import privacy_choices as choices
from tessera.cli.format import AsJson, captioned, figures_table
from tessera.errors import ConfigError
from tessera.plan import NoiseFrom, Plan
from tessera.privacy.dp.guarantee import Guarantee, Trust, Unit
from tessera.privacy.dp.mechanism import GaussianNoise, NoAccount
from tessera.privacy.dp.noise_setting import (
    MOST_MOVE,
    Coins,
    Drawn,
    NoiseSetting,
    Sampling,
    Visibility,
    holders_over_noise,
    row_moves,
)
from tessera.privacy.dp.subjects import Printed, changed_epsilon
from tessera.report.numbers import count, epsilon, rounded
from tessera.rounds import as_printed, dp, schemes

TRUST: Final = {source.value: source.trust for source in NoiseFrom}
Choice = TypeVar("Choice", bound=StrEnum)


def privacy_dp(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PLAN.toml]",
            help="A plan with [dp]: unit, noise, budget, sampling and scheme are its.",
            show_default=False,
        ),
    ] = None,
    unit: Annotated[
        str, typer.Option(help="What is protected: index, item, user or subject.")
    ] = "item",
    noise: Annotated[
        float | None,
        typer.Option(help="Noise multiplier: standard deviation over the clip."),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget, per unit and at --delta.")] = None,
    delta: Annotated[float, typer.Option(help="Below one over the number of people.")] = 1e-6,
    per_row: Annotated[
        int, typer.Option(help="Unit index: examples of a client that may change with one row.")
    ] = 0,
    example_clip: Annotated[
        float, typer.Option(help="Unit index: clip of one example, over that of a client.")
    ] = 0.0,
    rounds: Annotated[int | None, typer.Option(help="Rounds that a client is in.")] = None,
    steps: Annotated[int, typer.Option(help="Noisy steps of a client in a round.")] = 1,
    rate: Annotated[float, typer.Option(help="Share of the units in a batch, or cohort.")] = 1.0,
    sampling: Annotated[
        str,
        typer.Option(
            help="How they are drawn: poisson, fixed-size or none (default: poisson below a rate "
            "of 1).",
            show_default=False,
        ),
    ] = "",
    coins: Annotated[
        str,
        typer.Option(
            help="Whose randomness draws them: client, leader, or public (default: client; leader "
            "for users).",
            show_default=False,
        ),
    ] = "",
    drawn: Annotated[
        str, typer.Option(help="Unit subject: whether subjects or records are drawn.")
    ] = Drawn.SUBJECTS.value,
    records: Annotated[
        int, typer.Option(help="Records of a person at one client, at most; 0: not stated.")
    ] = 0,
    cap: Annotated[int, typer.Option(help="Records of a person in a batch, at most.")] = 1,
    clients: Annotated[int, typer.Option(help="Clients that hold a person, at most.")] = 1,
    history: Annotated[
        int,
        typer.Option(
            help="Unit item: later examples whose history an interaction stands in; 0: none."
        ),
    ] = 0,
    trust: Annotated[
        str, typer.Option(help="Who adds the noise: server, shares, each or local.")
    ] = "local",
    honest: Annotated[
        int,
        typer.Option(help="Clients that surely add their own noise to a sum (trust local)."),
    ] = 1,
    scheme: Annotated[
        str, typer.Option(help="The scheme: who observes, and what is released exactly.")
    ] = schemes.DEFAULT.value,
    subjects: Annotated[int, typer.Option(help="People in all, to check --delta; 0: unknown.")] = 0,
    cohort: Annotated[int, typer.Option(help="Clients in a round.")] = 100,
    rows: Annotated[int, typer.Option(help="Rows that one unit's contribution moves.")] = 301,
    width: Annotated[int, typer.Option(help="Values per row.")] = 18,
    catalogue: Annotated[
        int, typer.Option(help="Unit user: rows of the whole table, to compare trusts; 0: do not.")
    ] = 0,
    dropout: Annotated[
        float, typer.Option(help="Share of a round's clients that may be missing, beside it.")
    ] = 0.0,
    corrupt: Annotated[
        int, typer.Option(help="Clients whose shares of noise do not count, beside it.")
    ] = 0,
    selection: Annotated[
        float,
        typer.Option(help="Unit user: share of the budget to select rows by popularity; 0: none."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Epsilon of Gaussian noise per item, user and subject, against each observer.

    Give two of --noise, --epsilon and --rounds; the third is found. With --catalogue it says what
    the same budget costs by who adds the noise: a server, clients in shares, each of two servers,
    or every client for itself.
    """
    printed: dict[str, Any] | None = None
    if path is not None:
        plan = planned(path)
        scheme, cohort, delta = plan.scheme.value, plan.cohort, dp.section(plan).delta
        found = of_plan(plan, rounds)
        printed = as_printed.facts(plan)
    else:
        chosen = member(Unit, "unit", unit)
        drawing = sampling or ("poisson" if rate < 1.0 else "none")
        setting = NoiseSetting(
            unit=chosen,
            noise=1.0 if noise is None else noise,
            trust=trust_of(trust),
            steps=steps,
            sampling=member(Sampling, "sampling", drawing),
            rate=rate,
            coins=member(Coins, "coins", coins or ("leader" if chosen is Unit.USER else "client")),
            drawn=member(Drawn, "drawn", drawn),
            records=records,
            cap=cap,
            clients=clients,
            sources=honest,
            row_moves=moved_by_row(chosen, per_row, example_clip, trust),
            clipped=trust_of(trust) is not Trust.LOCAL,
            selection=selected(selection, rounds),
            sight=dp.sight(schemes.named(scheme, option="--scheme")),
        )
        found = solve(setting, noise=noise, budget=epsilon, delta=delta, rounds=rounds)
    warning = dp.delta_warning(delta, people(subjects))
    report = describe(
        found,
        delta=delta,
        scheme=scheme,
        over_noise=holders_over_noise(found.setting, rows=rows, width=width, cohort=cohort),
    )
    compared: list[dict[str, Any]] = []
    if catalogue or (path is not None and found.setting.unit is Unit.USER):
        options = {"dropout": dropout, "corrupt": corrupt, "rows": rows, "width": width}
        chosen_by = of_choices(found, path, catalogue, cohort, delta, options)
        compared = report["choices"] = chosen_by.described()
    if printed is not None:
        report["printed"] = printed
    if history:
        report["interaction"] = interaction(found, history=history, delta=delta)
        if path is not None and (why := uses_click_rate(plan)):
            report["interaction"] |= {"epsilon": None, "reason": why}
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps(report | {"warnings": [warning] if warning else []}))
    else:
        show(found, report, delta=delta, rows=rows, width=width, cohort=cohort)
        if compared:
            console = Console(width=80, highlight=False)
            console.print(choices.table_of(compared, cohort))
            for line in choices.sentences(compared, cohort):
                console.print(line, markup=False)


def selected(share: float, rounds: int | None) -> float:
    """Noise on the popularity of rows over that of a round, for its share of the budget."""
    if not share:
        return 0.0
    if not 0.0 < share < 1.0:
        raise ConfigError(f"--selection {share:g}", hint="a share, between 0 and 1")
    if rounds is None:
        raise ConfigError("--selection without --rounds", hint="its noise follows from both")
    return math.sqrt((1.0 - share) / (share * rounds))


def of_choices(
    found: Solution,
    path: Path | None,
    catalogue: int,
    cohort: int,
    delta: float,
    options: dict[str, Any],
) -> choices.Choices:
    """A plan's own tables and clients, or those of the options."""
    if found.setting.unit is not Unit.USER or catalogue < 0:
        raise ConfigError(
            f"--catalogue {catalogue} with unit {found.setting.unit.value}",
            hint="trusts are compared per user: --unit user --catalogue 20000",
        )
    if path is not None:
        plan = Plan.read(path)
        own = max(plan.tables, key=lambda t: t.rows, default=None)
        if own is not None:
            catalogue, options = catalogue or own.rows, {**options, "width": own.width}
        options |= {"dropout": plan.security.dropout, "corrupt": dp.section(plan).corrupt}
    noise, drawn_noise = by_knowledge(found, delta)
    return choices.Choices(
        noise=noise,
        drawn_noise=drawn_noise,
        delta=delta,
        cohort=cohort,
        catalogue=max(catalogue, 1),
        **options,
    )


def by_knowledge(found: Solution, delta: float) -> tuple[float, float]:
    """The noise for a budget in full, and against those alone to whom the cohorts are secret."""
    setting = found.setting
    if not setting.kept_secret:
        return setting.noise, setting.noise
    budget = found.budget
    if budget is None:
        levels = setting.ledger(found.rounds).guarantees(
            delta=delta, units=[setting.unit], observers=setting.protected()
        )
        budget = max(level.epsilon for level in levels if isinstance(level, Guarantee))
    unseen = Visibility(roster=False)
    drawn = replace(setting, trust=Trust.CENTRAL, vector=None, sources=1, sight=unseen)
    full = replace(drawn, sampling=Sampling.NONE, rate=1.0)

    def least(each: NoiseSetting) -> float:
        return each.least_noise(epsilon=budget, delta=delta, rounds=found.rounds)

    return least(full), least(drawn)


# --- options --------------------------------------------------------------------------------------


def member(kind: type[Choice], option: str, text: str) -> Choice:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--{option} {text}: unknown", hint=f"one of {', '.join(kind)}") from None


def trust_of(text: str) -> Trust:
    if text not in TRUST:
        raise ConfigError(f"--trust {text}: unknown", hint=f"one of {', '.join(TRUST)}")
    return TRUST[text]


def moved_by_row(unit: Unit, per_row: int, example_clip: float, trust: str) -> float:
    """In clips of a client; where every client adds its own noise it clips its examples alone."""
    if unit is not Unit.INDEX:
        if per_row or example_clip:
            raise ConfigError(
                f"--per-row and --example-clip with unit {unit.value}", hint="use --unit index"
            )
        return 0.0
    moved = row_moves(per_row, example_clip)
    return moved if trust_of(trust) is Trust.LOCAL else min(MOST_MOVE, moved)


def people(subjects: int) -> int:
    if subjects < 0:
        raise ConfigError(f"--subjects {subjects} is not a count", hint="use 0 if it is unknown")
    return subjects


def planned(path: Path) -> Plan:
    plan = Plan.read(path)
    if plan.dp is None:
        raise ConfigError(
            f"{path}: no [dp], so no noise",
            hint='such as [dp] with unit = "item" and epsilon = 3; docs/plan.md has all keys',
        )
    return plan


# --- two of three ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Solution:
    """A setting with its noise and rounds, and which of them was found."""

    setting: NoiseSetting
    rounds: int
    found: str
    budget: float | None


def solve(
    setting: NoiseSetting,
    *,
    noise: float | None,
    budget: float | None,
    delta: float,
    rounds: int | None,
) -> Solution:
    given = [value is not None for value in (noise, budget, rounds)]
    if sum(given) != 2:
        raise ConfigError(
            f"{sum(given)} of --noise, --epsilon and --rounds are given",
            hint="give two of them, and the third is found: --epsilon 3 --rounds 100",
        )
    if rounds is not None and rounds < 1:
        raise ConfigError(f"--rounds {rounds} is not a number of rounds", hint="use 1 or more")
    if budget is not None and not (budget > 0.0 and math.isfinite(budget)):
        raise ConfigError(f"--epsilon {budget} is no budget", hint="use a number above 0")
    if rounds is None and budget is not None:
        lasts = setting.rounds(epsilon=budget, delta=delta)
        if not lasts:
            raise ConfigError(
                f"--noise {setting.noise:g} passes epsilon {budget:g} in the first round",
                hint=f"--epsilon {budget:g} --rounds 1 finds the smallest noise that does not",
            )
        return Solution(setting, lasts, "rounds", budget)
    assert rounds is not None
    if budget is None:
        return Solution(setting, rounds, "epsilon", None)
    least = setting.least_noise(epsilon=budget, delta=delta, rounds=rounds)
    return Solution(replace(setting, noise=least), rounds, "noise", budget)


def of_plan(plan: Plan, rounds: int | None) -> Solution:
    """A plan's own: its noise, or the least for its budget; `rounds` instead of its rounds."""
    section = dp.section(plan)
    found = dp.calibrated(plan if rounds is None else plan.with_simulation(rounds=rounds))
    lasts = dp.lasts(found) if section.noise and rounds is None else None
    return Solution(
        dp.noise_setting(found),
        lasts or found.simulation.rounds,
        "noise" if not section.noise else "rounds" if lasts else "epsilon",
        None if section.printed is not Printed.NONE else section.epsilon or None,
    )


# --- the report -----------------------------------------------------------------------------------


def describe(found: Solution, *, delta: float, scheme: str, over_noise: float) -> dict[str, Any]:
    """Plain JSON values: the setting, and one cell per unit and observer."""
    setting, ledger = found.setting, found.setting.ledger(found.rounds)
    cells: list[dict[str, Any]] = []
    for unit in setting.units:
        for observer in setting.sight.observers:
            (cell,) = ledger.guarantees(delta=delta, units=[unit], observers=[observer])
            if isinstance(cell, NoAccount):
                where = {"unit": unit.value, "against": observer.value}
                cells.append(where | {"epsilon": None, "why": str(cell)})
            else:
                cells.append(cell.to_json() | {"text": str(cell)})
    report = {
        "found": found.found,
        "unit": setting.unit.value,
        "noise": setting.noise,
        "rounds": found.rounds,
        "budget": found.budget,
        "delta": delta,
        "steps": setting.steps,
        "sampling": setting.sampling.value,
        "rate": setting.rate,
        "coins": setting.coins.value,
        "trust": next(name for name, trust in TRUST.items() if trust is setting.trust),
        "scheme": scheme,
        "contributions_over_noise": over_noise,
        "guarantees": cells,
    }
    if setting.unit is Unit.INDEX:
        report["row_moves"] = setting.row_moves
    if setting.unit is Unit.SUBJECT:
        report |= {
            "drawn": setting.drawn.value,
            "cap": setting.cap,
            "clients": setting.clients,
            "by_one_client_alone": one_client(found, delta).epsilon,
        }
    return report


def one_client(found: Solution, delta: float) -> Guarantee:
    """What a client would claim that looks at its own steps only."""
    alone = replace(found.setting, clients=1, sources=1)
    return max(
        (
            alone.ledger(found.rounds).guarantee(unit=Unit.SUBJECT, against=observer, delta=delta)
            for observer in alone.protected()
        ),
        key=lambda g: g.epsilon,
    )


def uses_click_rate(plan: Plan) -> str:
    """Why no number per interaction holds for the plan's model; "" if one does."""
    from tessera import tasks
    from tessera.tasks import kinds

    if not plan.task.name:
        return ""
    model = (tasks.known(plan.task.name).options | dict(plan.task.options)).get("model", "")
    if "rate" not in kinds.MODELS.get(model, ()):
        return ""
    return (
        f"model {model!r} of the task uses the click rate of a client so far, which changes with "
        "an interaction in every later example"
    )


def interaction(found: Solution, *, history: int, delta: float) -> dict[str, Any]:
    """What one interaction has, which stands in several examples; these change and stay."""
    setting = found.setting
    if setting.unit is not Unit.ITEM or setting.sampling is Sampling.FIXED_SIZE or history < 0:
        raise ConfigError(
            f"--history {history} is about examples of unit item, drawn by coins or all used",
            hint="leave it out, or use --unit item and --sampling poisson or none",
        )
    levels = {}
    for observer in setting.protected():
        ((mechanism, times),) = setting.parts(observer, found.rounds)
        assert isinstance(mechanism, GaussianNoise)
        levels[observer.value] = changed_epsilon(
            mechanism, size=1 + history, times=times, delta=delta
        )
    return {"examples": 1 + history, "epsilon": levels}


def of_interaction(found: dict[str, Any]) -> str:
    if found["epsilon"] is None:
        return f"per interaction: none, since {found['reason']}"
    worst = max(found["epsilon"].values())
    return (
        f"an interaction is in up to {found['examples']} examples, which change with it: epsilon "
        f"{epsilon(worst)} at most, if nothing else in an example follows from it (a click rate)"
    )


NAMES: Final = {
    Unit.INDEX: "client",
    Unit.ITEM: "example",
    Unit.USER: "client",
    Unit.SUBJECT: "person",
}


def show(
    found: Solution, report: dict[str, Any], *, delta: float, rows: int, width: int, cohort: int
) -> None:
    console = Console(width=80, highlight=False)
    setting = found.setting
    budget = [("budget, epsilon", epsilon(found.budget))] if found.budget is not None else []
    console.print(
        captioned(
            [
                ("noise multiplier", f"{setting.noise:.4g}"),
                ("rounds", count(found.rounds)),
                *budget,
                ("delta", f"{delta:.3g}"),
                (
                    f"{NAMES[setting.unit]}s that a row needs*",
                    rounded(report["contributions_over_noise"]),
                ),
            ]
        )
    )
    observers = setting.sight.observers
    table = figures_table(title=f"Epsilon at delta {delta:.3g}")
    table.add_column("unit")
    for observer in observers:
        table.add_column(observer.value, justify="right")
    cells = iter(report["guarantees"])
    for unit in setting.units:
        table.add_row(unit.value, *(cell_text(next(cells)) for _ in observers))
    console.print(table)
    console.print(
        f"* to be as long as its noise in one release, if {rows:,} rows of {width} values share "
        f"the clip evenly and all agree; {cohort:,} clients a round"
    )
    for line in notes(report):
        console.print(line)


def cell_text(cell: dict[str, Any]) -> str:
    return "-" if cell["epsilon"] is None else epsilon(cell["epsilon"])


def notes(report: dict[str, Any]) -> list[str]:
    """What stands behind the cells, each sentence once."""
    cells = report["guarantees"]
    given = dict.fromkeys(c["condition"] for c in cells if c.get("condition"))
    assumed = dict.fromkeys(
        f"per {c['unit']}: {c['assumption']}" for c in cells if c.get("assumption")
    )
    refused = dict.fromkeys(f"- {c['why']}" for c in cells if c["epsilon"] is None)
    beside = dict.fromkeys(
        f"epsilon {epsilon(c['epsilon'])} per index, "
        + (
            "and no number per user: the examples of a client are not bounded"
            if c["per_user"] == "inf"
            else f"{epsilon(c['per_user'])} per user"
            + (
                ": the same noise protects a row better than the whole client"
                if c["per_user"] > c["epsilon"]
                else ": a row is not protected better than the whole client, whose other world "
                "is zeros; fewer examples per row, or a smaller clip of each"
            )
        )
        for c in cells
        if c.get("per_user") is not None and c["epsilon"] != "inf"
    )
    printed = as_printed.notes(report.get("printed"))
    infinite = any(c["epsilon"] == "inf" for c in cells)
    bare = ["infinite: sees it without noise"] if infinite and not printed else printed
    alone = (
        [f"one client's own account would claim {epsilon(report['by_one_client_alone'])}"]
        if report.get("clients", 1) > 1
        else []
    )
    changed = []
    if "interaction" in report:
        changed = [of_interaction(report["interaction"])]
    return [*given, *beside, *changed, *assumed, *alone, *bare, *refused]
