"""`tessera privacy`: epsilon and costs of four probabilities; or those for a wanted epsilon.

The command parses and prints; every number comes from `tessera.privacy`. Without a choice of
probabilities it shows the papers' five choices side by side. Epsilons are of the answers, and so
they are printed beside how likely a holder is identified once the sums are known, too. Where nobody
randomises an answer (cpp5, fixed groups) there is no noise, and no epsilon is printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final

import typer

from tessera.cli.format import (
    PAPERS_HOLDERS,
    AsJson,
    bounds,
    named,
    parse_holders,
    parse_number,
)
from tessera.errors import ConfigError
from tessera.privacy.dp.guarantee import INDEX_SCOPE, OF_THE_ANSWERS, json_number
from tessera.privacy.index import exposure, known_rows
from tessera.privacy.index.bound import Promise
from tessera.privacy.index.exposure import LATER, TAOBAO, Cohort
from tessera.privacy.index.groups import CORRUPT_SHARES, DrawnGroups
from tessera.privacy.index.identification_forecast import (
    MOST_ROWS,
    IdentificationForecast,
    Setting,
    within,
)
from tessera.privacy.index.response import LEVELS, IndexPrivacy
from tessera.report.numbers import count, epsilon, percent, probability, share, size
from tessera.report.sections.safety import PRESETS, not_covered
from tessera.report.terminal import Page, table
from tessera.rounds import schemes

PAPERS_CLIENTS: Final = 100
"""Clients of the cohort that the papers' holders are counted in."""


def privacy(
    context: typer.Context,
    scheme: Annotated[
        str,
        typer.Option(
            help="The scheme; one without index privacy has no epsilon, only what it reveals."
        ),
    ] = schemes.DEFAULT.value,
    cpp: Annotated[
        int | None,
        typer.Option(
            "--cpp",
            help="Choice of probability parameters of Niu et al. 2020: 1 (no cover) to 5 (the "
            "whole union).",
            show_default=False,
        ),
    ] = None,
    p1: Annotated[
        str | None, typer.Option(help="P(permanent yes) for a real row; 0.9375 or 15/16.")
    ] = None,
    p2: Annotated[str | None, typer.Option(help="P(permanent yes) for any other row.")] = None,
    p3: Annotated[
        str | None, typer.Option(help="P(instantaneous yes) after a permanent yes.")
    ] = None,
    p4: Annotated[
        str | None, typer.Option(help="P(instantaneous yes) after a permanent no.")
    ] = None,
    want_epsilon: Annotated[
        float | None,
        typer.Option(help="Find probabilities with this longitudinal epsilon."),
    ] = None,
    want_epsilon_once: Annotated[
        float | None, typer.Option(help="With --want-epsilon: the epsilon per round.")
    ] = None,
    max_rows_factor: Annotated[
        float | None,
        typer.Option(help="With --want-epsilon: at most this many rows revealed per real row."),
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients in a round's cohort.")] = 100,
    holders: Annotated[
        str,
        typer.Option(
            help="Share of the union's rows by how many clients hold them (default: the papers')."
        ),
    ] = PAPERS_HOLDERS,
    rounds: Annotated[
        int, typer.Option(help="Rounds that a client takes part in during one period.")
    ] = 10,
    min_group: Annotated[
        int | None, typer.Option(help="Row quorum; default 2 + colluders.", show_default=False)
    ] = None,
    colluders: Annotated[int, typer.Option(help="Clients that collude with the server.")] = 0,
    dropout: Annotated[
        float, typer.Option(help="Share of clients that drop out after masking.")
    ] = 0.2,
    rows: Annotated[int, typer.Option(help="Real rows per client (the papers': 301).")] = 301,
    decoys: Annotated[
        float, typer.Option(help="Decoy ids in the union input, as a share of a client's rows.")
    ] = 0.1,
    catalogue: Annotated[
        int | None,
        typer.Option(help="Number of ids that decoys are drawn from (default: unlimited)."),
    ] = None,
    width: Annotated[int, typer.Option(help="Values per row.")] = 18,
    down_bits: Annotated[int, typer.Option(help="Bits per value, download.")] = 32,
    up_bits: Annotated[int, typer.Option(help="Bits per masked value, upload.")] = 32,
    population: Annotated[
        int | None,
        typer.Option(
            help="Clients that cohorts are drawn from (default: the cohort itself).",
            show_default=False,
        ),
    ] = None,
    period_rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds of a period; --rounds are then those of all periods (default: one "
            "period).",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        int,
        typer.Option(
            help="Clients of a fixed group, whose sums open over all of its members; 0: none."
        ),
    ] = 0,
    void: Annotated[
        int,
        typer.Option(
            min=0, help="With --group: void snapshots before it was drawn, as a client counts them."
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Epsilon, rows and bytes of randomised index sets; or probabilities for an epsilon."""
    if not schemes.named(scheme, option="--scheme").randomises:
        refuse_probabilities(scheme, context)
        without_epsilon(scheme, as_json)
        return
    cohort = Cohort(
        clients=clients,
        holders=parse_holders(holders),
        colluders=colluders,
        dropout=dropout,
        min_group=2 + colluders if min_group is None else min_group,
    )
    if want_epsilon is None and (want_epsilon_once is not None or max_rows_factor is not None):
        raise ConfigError(
            "--want-epsilon-once and --max-rows-factor need --want-epsilon",
            hint="give the longitudinal epsilon, such as --want-epsilon 2.7",
        )
    chosen = from_command_line(cpp, {"p1": p1, "p2": p2, "p3": p3, "p4": p4})
    if want_epsilon is not None:
        if chosen:
            raise ConfigError(
                f"--want-epsilon {want_epsilon} finds probabilities, and some are given",
                hint="use either --want-epsilon, or --cpp, or --p1 to --p4",
            )
        found = exposure.choose(
            epsilon=want_epsilon,
            epsilon_one_round=want_epsilon_once,
            max_rows_factor=max_rows_factor,
            cohort=cohort,
            decoys=decoys,
        )
        chosen = {"found": found}
    costs = Costs(rows, decoys, catalogue, width, down_bits, up_bits)
    if group and not chosen:
        chosen = {"group": LEVELS["cpp5"]}
    if void and not group:
        raise ConfigError(
            f"--void {void} without --group: snapshots are drawn for fixed groups",
            hint="--group 10",
        )
    observed = Observed(population or clients, period_rounds or 0, group)
    observed.check(cohort, chosen)
    summed = observed.summed(cohort)
    reports = {
        name: describe(level, summed, rounds=rounds, costs=costs)
        | {"naming": describe_naming(level, cohort, rounds, observed, several=not chosen)}
        for name, level in (chosen or LEVELS).items()
    }
    if group:
        for report in reports.values():
            report["drawn"] = DrawnGroups(size=group, void=void).as_json()
    if as_json:
        typer.echo(json.dumps(next(iter(reports.values())) if chosen else {"levels": reports}))
    else:
        show(reports, summed, rounds=rounds)


def refuse_probabilities(scheme: str, context: typer.Context) -> None:
    """Options about randomised sets do not apply to a scheme that has none."""
    for name in context.params:
        source = context.get_parameter_source(name)
        typed = source is not None and source.name == "COMMANDLINE"
        if typed and name not in ("scheme", "as_json"):
            raise ConfigError(
                f"--{name.replace('_', '-')} is about randomised sets, and {scheme} has none",
                hint=f"leave it out, or leave out --scheme {scheme}",
            )


def without_epsilon(scheme: str, as_json: bool) -> None:
    """What a scheme reveals that randomises no index sets, and so has no epsilon."""
    entry = schemes.named(scheme)
    known = entry.knowledge
    uncovered = not_covered([scheme])[:-1]  # the last is about one run
    facts: dict[str, Any] = {
        "scheme": scheme,
        "epsilon": None,
        "why": entry.no_epsilon,
        "released": known.server,
        "clients_learn": known.clients,
        "honest": known.honest,
        "not_covered": uncovered,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    page = Page(most=80)
    page.say(f"{facts['why']}\n", lead=f"{scheme}:")
    for caption, text in (
        ("Servers learn" if entry.two_servers else "The server learns", known.server),
        ("Other clients learn", known.clients),
        ("Who must be honest", known.honest),
    ):
        page.say(f"{text}\n", lead=f"{caption}.")
    page.say(lead="Not covered.")
    for point in uncovered:
        page.point(point)


@dataclass(frozen=True, slots=True)
class Costs:
    """What rows and bytes are counted with."""

    rows: int
    decoys: float
    catalogue: int | None
    width: int
    down_bits: int
    up_bits: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What an observer of many rounds knows of the clients."""

    population: int
    period_rounds: int  # 0: one period
    group: int

    def summed(self, cohort: Cohort) -> Cohort:
        """Those who are summed together: the cohort, or one of its fixed groups."""
        if not self.group:
            return cohort
        holders = cohort.holders
        if holders == TAOBAO:
            holders = within(holders, self.group, PAPERS_CLIENTS)
        return replace(cohort, clients=self.group, holders=holders)

    def check(self, cohort: Cohort, chosen: Mapping[str, IndexPrivacy]) -> None:
        if self.population < cohort.clients:
            raise ConfigError(
                f"--population {self.population} is less than a cohort of {cohort.clients}",
                hint="cohorts are drawn from the population; leave it out if they are all of it",
            )
        if self.period_rounds < 0:
            raise ConfigError(
                f"--period-rounds {self.period_rounds} is not a number of rounds",
                hint="use 1 or more, or leave it out",
            )
        if not self.group:
            return
        if not 2 <= self.group <= cohort.clients:
            raise ConfigError(
                f"--group {self.group} does not fit a cohort of {cohort.clients}",
                hint="a cohort is one fixed group or several",
            )
        if any(level != LEVELS["cpp5"] for level in chosen.values()):
            raise ConfigError(
                "--group with other answers than cpp5: in a fixed group everybody names the whole "
                "union, or counts would copy the answers",
                hint="use --cpp 5, or leave out the probabilities or --group",
            )


def describe_naming(
    privacy: IndexPrivacy, cohort: Cohort, rounds: int, observed: Observed, *, several: bool
) -> dict[str, Any]:
    """How likely a holder is identified after this many rounds of each client.

    The papers' holders are those of 100 clients: among fewer, a row has fewer.
    """
    holders = cohort.holders
    if holders == TAOBAO:
        holders = within(holders, observed.population, PAPERS_CLIENTS)
    setting = Setting(
        privacy=privacy,
        cohort=cohort.clients,
        population=observed.population,
        rounds=max(1, round(rounds * observed.population / cohort.clients)),
        holders=holders,
        period_rounds=observed.period_rounds,
        min_group=1 if observed.group else cohort.min_group,
        group=observed.group,
    )
    found = IdentificationForecast.of(
        setting,
        Promise(group=observed.group, corrupt=cohort.colluders),
        dropout=cohort.dropout,
        rows=MOST_ROWS // 2 if several else MOST_ROWS,
    )
    return found.as_json()


def from_command_line(cpp: int | None, given: Mapping[str, str | None]) -> dict[str, IndexPrivacy]:
    """The chosen probabilities, by the name they are shown under."""
    values = {name: text for name, text in given.items() if text is not None}
    if cpp is not None and values:
        raise ConfigError(
            f"--cpp {cpp} and --{next(iter(values))} both set the probabilities",
            hint="use either --cpp, or --p1 to --p4",
        )
    if cpp is not None:
        return {f"cpp{cpp}": IndexPrivacy.named(f"cpp{cpp}")}
    if not values:
        return {}
    missing = [f"--{name}" for name in given if name not in values]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} missing: all four probabilities are needed",
            hint="for a single permanent answer per row, use --p3 1 --p4 0",
        )
    return {
        "custom": IndexPrivacy(**{name: parse_number(name, text) for name, text in values.items()})
    }


def describe(privacy: IndexPrivacy, cohort: Cohort, *, rounds: int, costs: Costs) -> dict[str, Any]:
    """Everything the calculator knows about these probabilities, as plain JSON values.

    p7 and p8 are the papers' (no quorum, no dropout, no colluders); `quorum` has the cohort's own.
    """
    if rounds < 1:
        raise ConfigError(f"rounds = {rounds} is not a number of rounds", hint="use 1 or more")
    papers = replace(cohort, min_group=1, colluders=0, dropout=0.0)
    counts = exposure.expected_rows(
        privacy, cohort, real=costs.rows, decoys=costs.decoys, catalogue=costs.catalogue
    )
    late = exposure.late_dropout(
        privacy, cohort, real=costs.rows, decoys=costs.decoys, catalogue=costs.catalogue
    )
    bare = exposure.late_dropout(privacy, cohort, real=costs.rows)
    size = exposure.expected_bytes(
        counts, width=costs.width, down_bits=costs.down_bits, up_bits=costs.up_bits
    )
    return {
        "p1": privacy.p1,
        "p2": privacy.p2,
        "p3": privacy.p3,
        "p4": privacy.p4,
        "p5": privacy.p5,
        "p6": privacy.p6,
        "epsilon_once": json_number(exposure.epsilon_per_round(privacy)),
        "epsilon_longitudinal": json_number(exposure.epsilon_longitudinal(privacy)),
        "p7": exposure.event_1(privacy, papers),
        "p8": exposure.event_2(privacy, papers),
        "scope": INDEX_SCOPE,
        "clients": cohort.clients,
        "holders": {str(count): share for count, share in cohort.holders.by_row},
        "rounds": rounds,
        "epsilon_after_rounds": json_number(exposure.epsilon_after(privacy, rounds)),
        # A server that cannot link two rounds has one round's answers of each client, and no more.
        "epsilon_under_pseudonyms": json_number(exposure.epsilon_per_round(privacy)),
        "quorum": {
            "min_group": cohort.min_group,
            "colluders": cohort.colluders,
            "dropout": cohort.dropout,
            "missed": exposure.quorum_missed(privacy, cohort),
            "lost_to_dropout": exposure.quorum_lost(privacy, cohort),
            "event_1": exposure.event_1(privacy, cohort),
            "event_2": exposure.event_2(privacy, cohort),
        },
        "late_dropout": {
            "decoys": costs.decoys,
            "exposed": late.exposed,
            "confidence": late.confidence,
            "confidence_without_decoys": bare.confidence,
            "prior": late.prior,
        },
        "rows": asdict(counts),
        "bytes": asdict(size) | {"total": size.total},
    }


def show(reports: Mapping[str, dict[str, Any]], cohort: Cohort, *, rounds: int) -> None:
    """One column per choice of probabilities, at most 80 characters wide, on stdout."""
    page = Page(most=80)
    noisy = [has_noise(report) for report in reports.values()]
    grouped = any(map(in_group, reports.values()))
    if any(name in LEVELS for name in reports):
        page.say(f"{PRESETS}\n")
    shown = lines(list(reports.values()), cohort, rounds)
    page.table(
        table(
            ["", *reports],
            [caption if cells is None else [caption, *cells] for caption, cells in shown],
            title=f"Epsilon: {OF_THE_ANSWERS}" if any(noisy) else None,
            first=32 if len(reports) > 1 else 52,
            least=7,
        )
    )
    if any(noisy):
        page.say("* a new pseudonym every round, by one-time tokens and a relay: simulation only")
    page.say("** of all rows of all clients, those whose holder is identified with over 90%")
    if not grouped and not all(noisy):
        page.say(f"*** {LATER} (cpp5)")
    if not grouped:
        page.say("B: at most, for any number of rounds; 100%: the holder is not hidden")
    if any(noisy) and not all(noisy):
        page.say("none: everybody names the whole union, without noise, so without epsilon")
    if len(reports) == 1:
        (report,) = reports.values()
        page.say(f"\n{named(report['naming'], rounds)}")
        if grouped:
            size = report["naming"]["settings"]["group"]
            drawn = DrawnGroups(size=size, void=report["drawn"]["void"])
            for corrupt in CORRUPT_SHARES:
                words = drawn.in_words(corrupt)
                page.say(f"\n{words[0].upper()}{words[1:]}.")
            page.say(f"\nBut {known_rows.all_in_words()}.")


def in_group(report: Mapping[str, Any]) -> bool:
    """Whether it is about a fixed group, which opens whole or not at all."""
    return bool(report["naming"]["settings"]["group"])


def has_noise(report: Mapping[str, Any]) -> bool:
    """Whether any answer is randomised or differs between rows held and not held."""
    return not report["p5"] == report["p6"] == 1.0


def lines(
    reports: Sequence[dict[str, Any]], cohort: Cohort, rounds: int
) -> Iterator[tuple[str, list[str] | None]]:
    """(caption, one cell per report); a caption without cells begins a section."""

    def row(caption: str, read: Callable[[dict[str, Any]], str]) -> tuple[str, list[str]]:
        return caption, [read(report) for report in reports]

    for name, meaning in (
        ("p1", "permanent yes, real row"),
        ("p2", "permanent yes, other row"),
        ("p3", "revealed after a yes"),
        ("p4", "revealed after a no"),
    ):
        yield row(f"{name} {meaning}", lambda r, name=name: probability(r[name]))  # type: ignore[misc]
    yield row("p5 real row revealed", lambda r: share(r["p5"]))
    yield row("p6 other row revealed", lambda r: share(r["p6"]))
    if any(map(has_noise, reports)):
        yield "epsilon of the answers, not of the sums", None
        for caption, name in (
            ("epsilon per round", "epsilon_once"),
            (f"after {rounds} rounds of a period", "epsilon_after_rounds"),
            ("longitudinal epsilon", "epsilon_longitudinal"),
            ("if rounds cannot be linked*", "epsilon_under_pseudonyms"),
        ):
            cells = [epsilon(r[name]) if has_noise(r) else "none" for r in reports]
            yield f"  {caption}", cells
    yield f"given the sums: how likely a holder is identified after {rounds} rounds", None
    of_each = [bounds(report["naming"]) for report in reports]
    for found in zip(*of_each, strict=True):
        yield f"  {found[0][0]}", [value for _, value in found]
    yield row("  the same, by another client", lambda r: share(r["naming"]["bound"]["one_client"]))
    yield row(
        "  estimated: best guess is right", lambda r: share(r["naming"]["estimate"]["best_guess"])
    )
    yield row("  estimated: for certain**", lambda r: share(r["naming"]["estimate"]["named"]))
    if cohort.dropout:
        caption = f"  best guess, {percent(cohort.dropout)} drop out late"
        yield row(caption, lambda r: share(r["naming"]["with_dropout"]["best_guess"]))
    yield f"per union row, {cohort.clients} clients, as in the papers", None
    yield row("  p7 Event 1: one update exposed", lambda r: share(r["p7"]))
    yield row("  p8 Event 2: group without row", lambda r: share(r["p8"]))
    if not any(map(in_group, reports)):
        yield from dropout_lines(reports, cohort)
    yield "expected per client and round", None
    yield row("  rows revealed", lambda r: count(r["rows"]["revealed"]))
    yield row("  rows trained", lambda r: count(r["rows"]["succinct"]))
    yield row("  rows, download", lambda r: size(r["bytes"]["download"]))
    yield row("  rows, upload", lambda r: size(r["bytes"]["upload"]))
    yield row("  indices, upload", lambda r: size(r["bytes"]["indices"]))


def dropout_lines(
    reports: Sequence[dict[str, Any]], cohort: Cohort
) -> Iterator[tuple[str, list[str] | None]]:
    """What dropouts do to rows and their groups; a fixed group waits for who is missing."""

    def row(caption: str, read: Callable[[dict[str, Any]], str]) -> tuple[str, list[str]]:
        return caption, [read(report) for report in reports]

    quorum = (
        f"quorum {cohort.min_group}, {cohort.colluders} colluders, {percent(cohort.dropout)} drop"
    )
    yield f"the same with {quorum}", None
    yield row("  Event 1", lambda r: share(r["quorum"]["event_1"]))
    yield row("  Event 2", lambda r: share(r["quorum"]["event_2"]))
    yield row("  below quorum, not updated", lambda r: share(r["quorum"]["missed"]))
    yield row("  below quorum after dropouts", lambda r: share(r["quorum"]["lost_to_dropout"]))
    yield "if one client drops out between union and update", None
    yield row("  its rows with count zero", lambda r: share(r["late_dropout"]["exposed"]))
    own = "such a row is its own" + ("" if all(map(has_noise, reports)) else "***")
    yield row(f"  {own}", lambda r: share(r["late_dropout"]["confidence"]))
    bare = "confidence_without_decoys"
    yield row("  the same without decoys", lambda r: share(r["late_dropout"][bare]))
