"""What `tessera plan` prints for people: one page of rows, bytes, privacy and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tessera.cli import plan_two_server as two_server
from tessera.cli.format import bounds, figures_table
from tessera.privacy.dp.guarantee import OF_THE_ANSWERS
from tessera.privacy.index.exposure import LATER
from tessera.privacy.index.response import LEVELS
from tessera.protocols.secagg.params import Threat
from tessera.report.numbers import count, epsilon, percent, probability, seconds, share, size
from tessera.report.sections.safety import PRESETS
from tessera.rounds import schemes

CATEGORIES: Final = ("keys", "union", "choice", "rows down", "update")
ENCODINGS: Final = {"BloomFilter": "Bloom filter", "SumTable": "sum table"}


def show(report: Mapping[str, Any]) -> None:
    """One page on stdout; it fits 80 columns."""
    console = Console(highlight=False)
    width = min(console.width, 100)
    console.print(f"[bold]{escape(report['plan'])}[/] is a valid plan.", soft_wrap=True)
    for line in preamble(report):
        console.print(line, width=width)
    console.print(rows_table(report))
    console.print(bytes_table(report))
    for name, lines in facts(report).items():
        console.print(f"[bold]{escape(name)}[/]", width=width)
        grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
        grid.add_column()
        grid.add_column(overflow="fold")
        for caption, value in lines:
            grid.add_row(escape(caption), value)
        console.print(grid, width=width)
        console.print()
    for note in report["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}", width=width)


def preamble(report: Mapping[str, Any]) -> Iterator[str]:
    security = report["security"]
    line = f"{report['scheme']}, {report['cohort']} clients per round"
    if security is not None:
        active = security["threat"] == Threat.ACTIVE.value
        line += f", against {'an active' if active else 'a semi-honest'} server; "
        line += dropouts(security["may_vanish"])
        if "groups" in report:
            groups = report["groups"]
            line = line.rpartition("; ")[0]
            line += (
                f"; in fixed groups of {groups['size']}, each with sums of its own. The round "
                "of a group in which one is missing is discarded"
            )
    elif report["two_server"] is not None:
        line += ", two servers that do not collude; "
        line += dropouts(report["two_server"]["may_vanish"])
    yield f"{line}."
    who = "server learns" if report["two_server"] is None else "servers learn"
    yield f"The {who}: {report['server_learns']}."
    if report["privacy"] is not None and report["privacy"]["level"] in LEVELS:
        yield f"Index privacy: {report['privacy']['level']}. {PRESETS}"
    assumed = report["assumed"]
    spread = (
        "all rows equally likely" if assumed["holders"] == "even" else "holders per row as given"
    )
    yield (
        f"[dim]Assumed: {assumed['rows_per_client']:,} rows per client and table, {spread}; "
        f"{percent(assumed['dropout'])} drop out{'' if 'groups' in report else ' late'}.[/]\n"
    )


def dropouts(many: int) -> str:
    return f"up to {many} may drop out" if many else "no client may drop out"


def rows_table(report: Mapping[str, Any]) -> Table:
    table = figures_table()
    secret = schemes.named(report["scheme"]).randomises
    union = secret or (report["two_server"] or {}).get("domain") == "union"
    table.add_column("rows, expected", min_width=26)
    for name, found in report["rows"].items():
        table.add_column(f"{name}*" if found["derived"] else name, justify="right", min_width=10)

    def row(caption: str, name: str) -> None:
        table.add_row(caption, *(count(f[name]) for f in report["rows"].values()))

    row("held by a client", "real")
    row("in the union" if union else "held by any client", "union")
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
        table.caption = "* derived table; its map is assumed to be even"
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
        between = size(report["bytes"]["between"])
        table.caption = f"plus {between} per client between the two servers"
        table.caption_justify = "left"
    return table


def facts(report: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Headed lists of (what, value)."""
    found: dict[str, list[tuple[str, str]]] = {}
    if report["two_server"] is not None:
        found |= two_server.facts(report)
    privacy = report["privacy"]
    if privacy is not None and "epsilon_once" in privacy:
        rounds = privacy["rounds"]
        found[f"epsilon {OF_THE_ANSWERS} ({privacy['level']})"] = [
            ("epsilon per round", epsilon(privacy["epsilon_once"])),
            (f"after {rounds} rounds of a period", epsilon(privacy["epsilon_after_rounds"])),
            ("longitudinal epsilon", epsilon(privacy["epsilon_longitudinal"])),
        ]
    if report["dp"] is not None:
        found[f"noise: epsilon at delta {report['dp']['delta']:.3g}, {report['dp']['scope']}"] = (
            noise_facts(report["dp"])
        )
    naming = report["naming"]
    if naming is not None:
        found["given the sums: how likely a row's holder is identified"] = naming_facts(naming)
    if privacy is not None:
        late = report["late_dropout"]
        lines = []
        if "groups" in report:
            opens = share(report["groups"]["opens"])
            found["fixed groups"] = [
                ("clients in a group", count(report["groups"]["size"])),
                (f"rounds that count, if {percent(report['assumed']['dropout'])} drop out", opens),
            ]
        for name, values in (late or {}).items():
            of = f" ({name})" if len(late) > 1 else ""
            bare = share(values["confidence_without_decoys"])
            lines += [
                (f"its rows with count zero{of}", share(values["exposed"])),
                (
                    f"such a row is really its own{of}",
                    f"{share(values['confidence'])} ({bare} without decoys)",
                ),
            ]
        if lines and "epsilon_once" not in privacy:
            lines.append(("this figure is", LATER))
        if late is not None:
            found["if one client drops out between union and update"] = lines
    union = report.get("union")
    if union is not None:
        encoding = ENCODINGS.get(union["encoding"], union["encoding"])
        found["the union"] = [
            ("encoding", f"{encoding}, {union['words']:,} words of {union['bits']} bits"),
            ("sized for", f"{union['capacity']:,} rows"),
            ("false negatives, at most", f"{probability(union['false_negative_rate'])} per id"),
        ]
    spent = report["seconds"]
    if spent is not None:
        found["estimated CPU time per round, this machine (no training, no network)"] = [
            ("one client", seconds(spent["client"], digits=2)),
            ("the server", seconds(spent["server"], digits=2)),
            *([("the helper", seconds(spent["helper"], digits=2))] if "helper" in spent else []),
            ("all in one process, as `tessera run`", seconds(spent["simulated"], digits=2)),
        ]
    return found


def noise_facts(noise: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What [dp] spends on a client that is in every round."""
    lines = [
        ("noise over the clip", f"{noise['noise']:.4g}"),
        (f"a client in all {count(noise['rounds'])} rounds spends", epsilon(noise["epsilon"])),
        ("against", ", ".join(noise["against"])),
    ]
    if noise["budget"] is not None:
        lines.append(
            (f"a budget of {epsilon(noise['budget'])} lasts", f"{count(noise['lasts'])} rounds")
        )
    return lines


def naming_facts(naming: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The bound and the estimate, after the rounds of one client."""
    settings, late = naming["settings"], naming["with_dropout"]
    rounds = count(settings["rounds_per_client"])
    many = percent(settings["dropout"])
    lines = [
        *bounds(naming),
        ("the same, by another client alone", share(naming["bound"]["one_client"])),
        (
            f"best guess at all rows, estimated after {rounds} rounds",
            share(naming["estimate"]["best_guess"]),
        ),
    ]
    if late is not None:
        lines.append((f"the same, {many} drop out late", share(late["best_guess"])))
    return lines
