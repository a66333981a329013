"""`tessera privacy dp`: what noise is worth, per unit and observer; noise for a budget; and rounds.

The command parses and prints; every number comes from the ledger. Two of noise, epsilon and rounds
are given, and the third is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from tessera.cli.format import AsJson
from tessera.cli.privacy_choices import Choices, choices_in_words, choices_table
from tessera.cli.utility import HEADING, PopularityFile, Skew, utility_facts, utility_of
from tessera.crypto.correlated import BandedInverse
from tessera.errors import ConfigError
from tessera.plan import (
    DPPlan,
    NoisyRows,
    Plan,
)
from tessera.privacy.dp.accounting import check_people
from tessera.privacy.dp.correlation import Correlation, optimised
from tessera.privacy.dp.guarantee import Guarantee, Trust, Unit
from tessera.privacy.dp.mechanism import GaussianNoise, NoAccount, check_noise
from tessera.privacy.dp.noise_setting import (
    MOST_MOVE,
    Coins,
    Drawn,
    NoiseSetting,
    Sampling,
    SummedVector,
    Visibility,
    holders_over_noise,
    row_moves,
)
from tessera.privacy.dp.participation import Participation
from tessera.privacy.dp.subjects import changed_epsilon
from tessera.report.numbers import count, epsilon, rounded
from tessera.report.terminal import Page, table
from tessera.rounds import schemes
from tessera.rounds.noise import ONE_SERVER, noise_of, paper_notes, training_notes
from tessera.rounds.noise_account import sight

Choice = TypeVar("Choice", bound=StrEnum)


def privacy_dp(
    context: typer.Context,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PLAN.toml]",
            help="A plan with [dp], in place of the options for its keys and its scheme.",
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
    delta: Annotated[
        float,
        typer.Option(
            help="Probability that epsilon does not cover; below one over the number of people."
        ),
    ] = 1e-6,
    per_row: Annotated[
        int, typer.Option(help="Unit index: examples of a client that may change with one row.")
    ] = 0,
    example_clip: Annotated[
        float, typer.Option(help="Unit index: clip of one example, over that of a client.")
    ] = 0.0,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds; a client is in all, or in --rounds-per-client.")
    ] = None,
    rounds_per_client: Annotated[
        int, typer.Option(help="Rounds that a client is in, at most; 0: all that it can be in.")
    ] = 0,
    separation: Annotated[
        int, typer.Option(help="Rounds from one of a client's to its next, at least.")
    ] = 1,
    correlated: Annotated[
        bool,
        typer.Option(
            "--correlated", help="Trust server or each: noise that is correlated over rounds."
        ),
    ] = False,
    terms: Annotated[
        int, typer.Option(help="With --correlated: rounds whose draws one round's noise has.")
    ] = 3,
    steps: Annotated[int, typer.Option(help="Noisy steps of a client in a round.")] = 1,
    rate: Annotated[
        float, typer.Option(help="Sampling rate of units in a batch, or of clients in a cohort.")
    ] = 1.0,
    sampling: Annotated[
        str,
        typer.Option(
            help="How they are sampled: poisson, fixed-size or none (default: poisson below a rate "
            "of 1).",
            show_default=False,
        ),
    ] = "",
    coins: Annotated[
        str,
        typer.Option(
            help="Who draws them, and so to whom the sample is secret: client, leader, or public "
            "(default: client; leader for users).",
            show_default=False,
        ),
    ] = "",
    drawn: Annotated[
        str, typer.Option(help="Unit subject: whether subjects or records are sampled.")
    ] = Drawn.SUBJECTS.value,
    records: Annotated[
        int, typer.Option(help="Records of a person at one client, at most; 0: not stated.")
    ] = 0,
    cap: Annotated[int, typer.Option(help="Records of a person in a batch, at most.")] = 1,
    clients: Annotated[int, typer.Option(help="Clients that hold a person, at most.")] = 1,
    history: Annotated[
        int,
        typer.Option(
            help="Unit item: later examples whose history contains an interaction; 0: none."
        ),
    ] = 0,
    trust: Annotated[
        str,
        typer.Option(
            help="Who adds the noise: server, shares (of clients), each (of two servers) or local "
            "(every client)."
        ),
    ] = "local",
    honest: Annotated[
        int,
        typer.Option(
            help="Trust local: honest clients in a sum, each of which adds its own noise."
        ),
    ] = 1,
    scheme: Annotated[
        str,
        typer.Option(
            help="The scheme: it decides who observes what, and what is released exactly."
        ),
    ] = schemes.DEFAULT.value,
    subjects: Annotated[
        int, typer.Option(help="Number of people, to check --delta; 0: unknown.")
    ] = 0,
    cohort: Annotated[int, typer.Option(help="Clients in a round.")] = 100,
    rows: Annotated[int, typer.Option(help="Rows that one unit's contribution moves.")] = 301,
    width: Annotated[int, typer.Option(help="Values per row.")] = 18,
    catalogue: Annotated[
        int,
        typer.Option(
            help="Unit user: rows of the table, to compare who may add the noise; 0: do not."
        ),
    ] = 0,
    dropout: Annotated[
        float, typer.Option(help="With --catalogue: share of a round's clients that may drop out.")
    ] = 0.0,
    corrupt: Annotated[
        int, typer.Option(help="With --catalogue: clients whose shares of noise do not count.")
    ] = 0,
    selection: Annotated[
        float,
        typer.Option(help="Unit user: share of the budget to select rows by popularity; 0: none."),
    ] = 0.0,
    popularity: PopularityFile = None,
    skew: Skew = 1.0,
    as_json: AsJson = False,
) -> None:
    """Epsilon of Gaussian noise per item, user and subject, against each observer.

    Give two of --noise, --epsilon and --rounds; the third is computed. With --catalogue it shows
    what the same budget costs by who adds the noise: a server, clients in shares, each of two
    servers, or every client.
    """
    if path is not None:
        plan = planned(path)
        found = NoiseAccount.of_plan(plan, rounds)
        used = (plan.security.dropout, noise_of(plan).dp.corrupt)
    else:
        plan, used = None, (dropout, corrupt)
        check_given(noise, epsilon, rounds)
        section = section_of(context.params)
        setting = setting_of(
            section,
            rounds=rounds,
            sampling=sampling or ("poisson" if rate < 1.0 else "none"),
            rate=rate,
            coins=coins or ("leader" if unit == Unit.USER else "client"),
            honest=honest,
            records=records,
            clients=clients,
            scheme=scheme,
            limits=limits_of(rounds, rounds_per_client, separation, correlated),
        )
        found = solve(setting, budget=epsilon, delta=delta, rounds=rounds)
        found = replace(found, scheme=scheme, cohort=cohort)
    check_people(found.delta, people(subjects))
    over = holders_over_noise(found.setting, rows=rows, width=width, cohort=found.cohort)
    report = describe(found, over_noise=over)
    if plan is not None:
        report |= {"printed": facts} if (facts := noise_of(plan).paper_facts()) else {}
    compared = found.setting.unit is Unit.USER and not found.setting.correlated
    if catalogue or (plan is not None and compared):
        beside = choices_of(found, plan, catalogue, rows=rows, width=width, missing=used)
        report["choices"] = beside.described()
    if plan is not None:
        utility = utility_of(
            plan,
            users=people(subjects) or plan.cohort,
            rows=catalogue or max((table.rows for table in plan.roots), default=0),
            held=rows,
            path=popularity,
            skew=skew,
        )
        report["utility"] = None if utility is None else utility.as_json()
    if history:
        report["interaction"] = interaction(found, history=history)
        if plan is not None and (why := uses_click_rate(plan)):
            report["interaction"] |= {"epsilon": None, "reason": why}
    warning = (report.get("utility") or {}).get("warning", "")
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps(report | {"warnings": [warning] if warning else []}))
    else:
        show(found, report, rows=rows, width=width)


# --- options --------------------------------------------------------------------------------------

IN_SECTION: Final = {
    "unit": "unit",
    "noise": "noise",
    "epsilon": "epsilon",
    "delta": "delta",
    "per_row": "per_row",
    "example_clip": "example_clip",
    "steps": "steps",
    "drawn": "drawn",
    "records": "records_per_subject",
    "cap": "cap",
    "clients": "clients_per_subject",
    "trust": "trust",
    "selection": "selection",
    "correlated": "correlated",
    "terms": "terms",
}
"""Options that are keys of [dp], which checks them."""
CHOICES: Final = {"unit": Unit, "trust": Trust, "drawn": Drawn}


def section_of(options: Mapping[str, Any]) -> DPPlan:
    """The section [dp] that these options amount to."""
    for name, kind in CHOICES.items():
        member(kind, name, options[name])
    if options["selection"] and not 0.0 < options["selection"] < 1.0:
        raise ConfigError(f"--selection {options['selection']:g}", hint="a share, between 0 and 1")
    if options["cap"] < 1:
        raise ConfigError(f"--cap {options['cap']} is not a number of records", hint="1 or more")
    asked = {key: options[name] for name, key in IN_SECTION.items()}
    keys = {key: value for key, value in asked.items() if value is not None}
    if not options["selection"]:
        del keys["selection"]
    if options["unit"] != Unit.SUBJECT:
        for key in ("cap", "records_per_subject", "clients_per_subject"):
            keys.pop(key, None)  # not the noise's: they lead from other units to persons
    elif options["drawn"] == Drawn.SUBJECTS:
        del keys["cap"]  # a person's gradients are added and clipped once
    rows = NoisyRows.SELECTED if "selection" in keys else NoisyRows.OWN
    if rows is NoisyRows.OWN and options["unit"] == Unit.INDEX:
        rows = NoisyRows.ALL
    return DPPlan(**keys, rows=rows)


def setting_of(
    section: DPPlan,
    *,
    rounds: int | None,
    sampling: str,
    rate: float,
    coins: str,
    honest: int,
    records: int,
    clients: int,
    scheme: str,
    limits: Participation | None,
) -> NoiseSetting:
    """The account of a section before there is a model: noise that is not rounded to integers.

    `records` and `clients` of a person lead from other units to a number per subject.
    """
    correlation, vector = None, None
    if limits is not None:
        inverse = optimised(limits, section.terms) if section.correlated else BandedInverse()
        correlation = Correlation(inverse, limits)
    if section.correlated:
        vector = FINE_EACH if section.trust is Trust.EACH else FINE
    moved = row_moves(section.per_row, section.example_clip) if section.per_row else 0.0
    local = section.trust is Trust.LOCAL
    return NoiseSetting(
        unit=section.unit,
        noise=section.noise or 1.0,
        trust=section.trust,
        steps=section.steps,
        sampling=member(Sampling, "sampling", sampling),
        rate=rate,
        coins=member(Coins, "coins", coins),
        drawn=section.drawn,
        records=records,
        cap=max(1, section.cap),
        clients=clients,
        sources=honest,
        row_moves=moved if local else min(MOST_MOVE, moved),
        clipped=not local,
        selection=selected(section, None if correlation is None else correlation.releases),
        vector=vector,
        correlation=correlation,
        sight=sight(schemes.named(scheme, option="--scheme")),
    )


FINE: Final = SummedVector(words=1, bound=1e6, honest="")
FINE_EACH: Final = replace(FINE, honest=ONE_SERVER)
"""Integers so fine that only noise over clip counts."""


def limits_of(
    rounds: int | None, most: int, separation: int, correlated: bool
) -> Participation | None:
    """In which rounds a client may be; None where the number of rounds is to be found."""
    if rounds is None:
        if correlated or most or separation != 1:
            raise ConfigError(
                "--correlated, --rounds-per-client or --separation without --rounds",
                hint="they are of a training with so many rounds: add --rounds",
            )
        return None
    if most < 0 or separation < 1 or most > -(-rounds // separation):
        raise ConfigError(
            f"--rounds-per-client {most} at a separation of {separation}: {rounds} rounds have "
            f"room for {-(-rounds // max(1, separation))}",
            hint="fewer rounds of a client, a smaller separation, or more --rounds",
        )
    return Participation(
        rounds=rounds, most=most or -(-rounds // separation), separation=separation
    )


def selected(section: DPPlan, releases: float | None) -> float:
    """Noise on the popularity of rows over that of a round, for its share of the budget."""
    if section.rows is not NoisyRows.SELECTED:
        return 0.0
    if releases is None:
        raise ConfigError("--selection without --rounds", hint="its noise follows from both")
    return math.sqrt((1.0 - section.selection) / (section.selection * releases))


def member(kind: type[Choice], option: str, text: str) -> Choice:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--{option} {text}: unknown", hint=f"one of {', '.join(kind)}") from None


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
class NoiseAccount:
    """Noise over some rounds, and which of noise, rounds and epsilon was found."""

    setting: NoiseSetting
    rounds: int
    found: str
    budget: float | None
    delta: float
    scheme: str = ""
    cohort: int = 0

    @classmethod
    def of_plan(cls, plan: Plan, rounds: int | None) -> NoiseAccount:
        """A plan's own: its noise, or the least for its budget; `rounds` instead of its rounds."""
        section = noise_of(plan).dp
        found = noise_of(plan if rounds is None else plan.with_simulation(rounds=rounds))
        noise = noise_of(found.calibrated())
        lasts = noise.lasts if section.noise and rounds is None else None
        return cls(
            noise.setting,
            lasts or noise.plan.simulation.rounds,
            "noise" if not section.noise else "rounds" if lasts else "epsilon",
            None if noise.setting.printed else section.epsilon or None,
            section.delta,
            plan.scheme.value,
            plan.cohort,
        )


def check_given(noise: float | None, budget: float | None, rounds: int | None) -> None:
    """Two of the three, each in its range."""
    given = [value is not None for value in (noise, budget, rounds)]
    if sum(given) != 2:
        raise ConfigError(
            f"{sum(given)} of --noise, --epsilon and --rounds are given",
            hint="give two of them, such as --epsilon 3 --rounds 100; the third is computed",
        )
    if rounds is not None and rounds < 1:
        raise ConfigError(f"--rounds {rounds} is not a number of rounds", hint="use 1 or more")
    if budget is not None and not (budget > 0.0 and math.isfinite(budget)):
        raise ConfigError(f"--epsilon {budget} is not a budget", hint="use a number above 0")
    if noise is not None:
        check_noise(noise)


def solve(
    setting: NoiseSetting,
    *,
    budget: float | None,
    delta: float,
    rounds: int | None,
) -> NoiseAccount:
    if rounds is None and budget is not None:
        lasts = setting.rounds(epsilon=budget, delta=delta)
        if not lasts:
            raise ConfigError(
                f"--noise {setting.noise:g} passes epsilon {budget:g} in the first round",
                hint=f"--epsilon {budget:g} --rounds 1 finds the smallest noise that does not",
            )
        return NoiseAccount(setting, lasts, "rounds", budget, delta)
    assert rounds is not None
    if budget is None:
        return NoiseAccount(setting, rounds, "epsilon", None, delta)
    least = setting.least_noise(epsilon=budget, delta=delta, rounds=rounds)
    return NoiseAccount(replace(setting, noise=least), rounds, "noise", budget, delta)


# --- the report -----------------------------------------------------------------------------------


def describe(found: NoiseAccount, *, over_noise: float) -> dict[str, Any]:
    """Plain JSON values: the setting, and one cell per unit and observer."""
    setting, ledger = found.setting, found.setting.ledger(found.rounds)
    cells: list[dict[str, Any]] = []
    for unit in setting.units:
        for observer in setting.sight.observers:
            (cell,) = ledger.guarantees(delta=found.delta, units=[unit], observers=[observer])
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
        "delta": found.delta,
        "steps": setting.steps,
        "sampling": setting.sampling.value,
        "rate": setting.rate,
        "coins": setting.coins.value,
        "trust": setting.trust.value,
        "scheme": found.scheme,
        "contributions_over_noise": over_noise,
        "training": setting.over_training(),
        "guarantees": cells,
    }
    if setting.unit is Unit.INDEX:
        report["row_moves"] = setting.row_moves
    if setting.unit is Unit.SUBJECT:
        report |= {
            "drawn": setting.drawn.value,
            "cap": setting.cap,
            "clients": setting.clients,
            "by_one_client_alone": one_client(found).epsilon,
        }
    return report


def one_client(found: NoiseAccount) -> Guarantee:
    """What a client would claim that looks at its own steps only."""
    alone = replace(found.setting, clients=1, sources=1)
    ledger = alone.ledger(found.rounds)
    return max(
        (
            ledger.guarantee(unit=Unit.SUBJECT, against=observer, delta=found.delta)
            for observer in alone.protected()
        ),
        key=lambda g: g.epsilon,
    )


def uses_click_rate(plan: Plan) -> str:
    """Why no number per interaction holds for the plan's model; "" if one does."""
    from tessera.tasks import kinds
    from tessera.tasks.known import model_of

    model = model_of(plan.task.name, plan.task.options)
    if "rate" not in kinds.MODELS.get(model, ()):
        return ""
    return (
        f"model {model!r} of the task uses the click rate of a client so far, which changes with "
        "an interaction in every later example"
    )


def interaction(found: NoiseAccount, *, history: int) -> dict[str, Any]:
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
            mechanism, size=1 + history, times=times, delta=found.delta
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


def show(found: NoiseAccount, report: Mapping[str, Any], *, rows: int, width: int) -> None:
    page, setting = Page(most=80), found.setting
    budget = [("budget, epsilon", epsilon(found.budget))] if found.budget is not None else []
    page.figures(
        [
            ("noise multiplier", f"{setting.noise:.4g}"),
            ("rounds", count(found.rounds)),
            *budget,
            ("delta", f"{found.delta:.3g}"),
            (
                f"{NAMES[setting.unit]}s that a row needs*",
                rounded(report["contributions_over_noise"]),
            ),
        ]
    )
    observers, cells = setting.sight.observers, iter(report["guarantees"])
    page.table(
        table(
            ["unit", *(observer.value for observer in observers)],
            [[unit.value, *(cell_text(next(cells)) for _ in observers)] for unit in setting.units],
            title=f"Epsilon at delta {found.delta:.3g}",
        )
    )
    page.say(
        f"* to be as long as its noise in one release, if {rows:,} rows of {width} values share "
        f"the clip evenly and all agree; {found.cohort:,} clients a round"
    )
    for line in notes(report):
        page.say(line)
    if report.get("utility") is not None:
        page.facts(HEADING, utility_facts(report["utility"]))
    if "choices" in report:
        page.table(choices_table(report["choices"], found.cohort))
        for line in choices_in_words(report["choices"], found.cohort):
            page.say(line)


def cell_text(cell: dict[str, Any]) -> str:
    return "-" if cell["epsilon"] is None else epsilon(cell["epsilon"])


def notes(report: Mapping[str, Any]) -> list[str]:
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
    printed = paper_notes(report.get("printed"))
    infinite = any(c["epsilon"] == "inf" for c in cells)
    bare = ["infinite: sees it without noise"] if infinite and not printed else printed
    alone = (
        [f"by one client's steps alone it would be {epsilon(report['by_one_client_alone'])}"]
        if report.get("clients", 1) > 1
        else []
    )
    changed = []
    if "interaction" in report:
        changed = [of_interaction(report["interaction"])]
    training = training_notes(report["training"])
    return [*training, *given, *beside, *changed, *assumed, *alone, *bare, *refused]


# --- the same budget, by who adds the noise ---------------------------------------------------


def choices_of(
    found: NoiseAccount,
    plan: Plan | None,
    catalogue: int,
    *,
    rows: int,
    width: int,
    missing: tuple[float, int],
) -> Choices:
    """A plan's own tables and clients, or those of the options; `missing`: dropout and corrupt."""
    if found.setting.correlated:
        raise ConfigError(
            f"--catalogue {catalogue} with correlated noise",
            hint="ways to add noise are compared for independent noise: leave out one of them",
        )
    if found.setting.unit is not Unit.USER or catalogue < 0:
        raise ConfigError(
            f"--catalogue {catalogue} with unit {found.setting.unit.value}",
            hint="ways to add noise are compared per user: --unit user --catalogue 20000",
        )
    own = max(plan.tables, key=lambda t: t.rows, default=None) if plan is not None else None
    if own is not None:
        catalogue, width = catalogue or own.rows, own.width
    noise, drawn_noise = by_knowledge(found)
    return Choices(
        noise=noise,
        drawn_noise=drawn_noise,
        delta=found.delta,
        cohort=found.cohort,
        catalogue=max(catalogue, 1),
        dropout=missing[0],
        corrupt=missing[1],
        rows=rows,
        width=width,
    )


def by_knowledge(found: NoiseAccount) -> tuple[float, float]:
    """The noise for a budget in full, and against those alone to whom the cohorts are secret."""
    setting = found.setting
    if not setting.kept_secret:
        return setting.noise, setting.noise
    budget = found.budget
    if budget is None:
        levels = setting.ledger(found.rounds).guarantees(
            delta=found.delta, units=[setting.unit], observers=setting.protected()
        )
        budget = max(level.epsilon for level in levels if isinstance(level, Guarantee))
    unseen = Visibility(roster=False)
    drawn = replace(setting, trust=Trust.SERVER, vector=None, sources=1, sight=unseen)
    full = replace(drawn, sampling=Sampling.NONE, rate=1.0)

    def least(each: NoiseSetting) -> float:
        return each.least_noise(epsilon=budget, delta=found.delta, rounds=found.rounds)

    return least(full), least(drawn)
