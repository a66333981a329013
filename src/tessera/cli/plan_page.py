"""What `tessera plan` prints for people: one page of rows, bytes, privacy and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from tessera.cli.format import bounds
from tessera.cli.utility import HEADING, utility_facts
from tessera.privacy.dp.guarantee import OF_THE_ANSWERS
from tessera.privacy.index.bound import CONDITIONS
from tessera.privacy.index.exposure import LATER
from tessera.privacy.index.groups import WEAK
from tessera.privacy.index.response import LEVELS
from tessera.protocols.secagg.params import Threat
from tessera.report.numbers import count, epsilon, percent, probability, seconds, share, size
from tessera.report.sections.safety import PRESETS
from tessera.report.terminal import Page, table
from tessera.rounds import schemes

CATEGORIES: Final = ("keys", "union", "choice", "rows down", "update")
ENCODINGS: Final = {"BloomFilter": "Bloom filter", "SumTable": "sum table"}

READS_ALL: Final = "reads everything"


def show(report: Mapping[str, Any]) -> None:
    """One page on stdout; it fits 80 columns."""
    page = Page()
    page.line(" is a valid plan.", lead=report["plan"])
    for line in preamble(report):
        page.say(line)
    page.say(f"{assumptions(report)}\n", style="dim")
    page.table(rows_table(report))
    page.table(bytes_table(report))
    for name, lines in facts(report).items():
        page.facts(name, lines)
    for note in report["notes"]:
        page.say(note, lead="note:", loud="yellow")
    if (report.get("utility") or {}).get("warning"):
        page.say(report["utility"]["warning"], lead="warning:", loud="bold red")


def preamble(report: Mapping[str, Any]) -> Iterator[str]:
    security = report["security"]
    line = f"{report['scheme']}, {report['cohort']} clients per round"
    if "groups" in report:
        line += (
            f", in fixed groups of {report['groups']['size']}. A sum opens over all members of a "
            "group, which waits until all of them have delivered"
        )
    elif security is not None:
        active = security["threat"] == Threat.ACTIVE.value
        line += f", against {'an active' if active else 'a semi-honest'} server; "
        line += dropouts(security["may_vanish"])
    elif report["two_server"] is not None:
        line += ", two servers that do not collude; "
        line += dropouts(report["two_server"]["may_vanish"])
    yield f"{line}."
    who = "server learns" if report["two_server"] is None else "servers learn"
    yield f"The {who}: {report['server_learns']}."
    if report["privacy"] is not None and report["privacy"]["level"] in LEVELS:
        yield f"Index privacy: {report['privacy']['level']}. {PRESETS}"


def assumptions(report: Mapping[str, Any]) -> str:
    assumed = report["assumed"]
    spread = (
        "all rows equally likely" if assumed["holders"] == "even" else "holders per row as given"
    )
    return (
        f"Assumed: {assumed['rows_per_client']:,} rows per client and table, {spread}; "
        f"{percent(assumed['dropout'])} {'are absent' if 'groups' in report else 'drop out late'}."
    )


def dropouts(many: int) -> str:
    return f"up to {many} may drop out" if many else "no client may drop out"


def rows_table(report: Mapping[str, Any]) -> Table:
    tables = report["rows"]
    secret = schemes.named(report["scheme"]).randomises
    union = secret or (report["two_server"] or {}).get("domain") == "union"
    lines = [
        ("held by a client", "real", count),
        ("in the union" if union else "held by any client", "union", count),
        ("fetched by a client", "revealed", count),
        ("trained by a client", "trained", count),
    ]
    if secret and "groups" not in report:
        lines += [
            (f"below quorum {report['security']['quorum']}", "missed", share),
            ("below it after dropouts", "lost", share),
        ]
    derived = any(f["derived"] for f in tables.values())
    return table(
        ["rows, expected", *(f"{n}*" if f["derived"] else n for n, f in tables.items())],
        [[caption, *(say(f[name]) for f in tables.values())] for caption, name, say in lines],
        first=26,
        least=10,
        note="* derived table; its map is assumed to be even" if derived else "",
    )


def bytes_table(report: Mapping[str, Any]) -> Table:
    sent = report["bytes"]
    ways = (sent["up"], sent["down"])
    return table(
        ["bytes per client", "up", "down"],
        [
            [category, *(size(way[category]) if category in way else "" for way in ways)]
            for category in CATEGORIES
            if any(category in way for way in ways)
        ],
        first=26,
        least=10,
        foot=["total", size(sent["total_up"]), size(sent["total_down"])],
        note=beside(report),
    )


def beside(report: Mapping[str, Any]) -> str:
    """Bytes that are not a client's in every round."""
    if between := report["bytes"]["between"]:
        return f"plus {size(between)} per client between the two servers"
    if "groups" not in report or not report["groups"]["union_up"]:
        return ""
    groups = report["groups"]
    often = f"every {groups['period']:,} updates" if groups["period"] else "once"
    return (
        f"per update of its group; plus the union, {often}: {size(groups['union_up'])} up, "
        f"{size(groups['union_down'])} down"
    )


def facts(report: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Headed lists of (what, value)."""
    found: dict[str, list[tuple[str, str]]] = {}
    if report["two_server"] is not None:
        found |= two_server_facts(report)
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
    if report.get("utility") is not None:
        found[HEADING] = utility_facts(report["utility"])
    if "groups" in report:
        found["fixed groups that wait"] = group_facts(report)
    naming = report["naming"]
    if naming is not None:
        found["given the sums: how likely a row's holder is identified"] = naming_facts(naming)
    if privacy is not None:
        late = report["late_dropout"]
        lines = []
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
    if report["filled_in"]:
        found["left open by the plan, and filled in by its task"] = [
            (one["key"], f"{one['value']} ({one['because']})") for one in report["filled_in"]
        ]
    return found


def group_facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What comes of invitations, of groups over a year, and of corrupt clients among all."""
    groups, absent = report["groups"], percent(report["assumed"]["dropout"])
    waits, alive = groups["waiting"], groups["alive_after_a_year"]
    leaving = ", ".join(percent(float(each)) for each in alive)
    lines = [
        ("clients in a group", count(groups["size"])),
        (f"invitations that count, if {absent} are absent", share(waits["counted"])),
        ("rounds that a sum waits: mean", f"{waits['mean']:.1f}"),
        ("rounds that a sum waits: 95th percentile", f"{waits['p95']:g}"),
        (
            f"groups alive after a year, if {leaving} of clients leave in a month",
            ", ".join(f"{each:.0%}" for each in alive.values()),
        ),
    ]
    for corrupt, found in groups["corrupt"].items():
        who = f"{percent(float(corrupt))} of all clients corrupt"
        lines += [
            (f"{who}: B on average", share(found["mean"])),
            (f"{who}: clients with B of {percent(WEAK)} or more", share(found["weak"])),
        ]
    return lines


def noise_facts(noise: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What [dp] spends on a client that is in all rounds that it may be in."""
    rounds, own = noise["rounds"], noise["rounds_of_a_client"]
    often = f"all {count(rounds)}" if own == rounds else f"{count(own)} of {count(rounds)}"
    lines = [
        ("noise over the clip", f"{noise['noise']:.4g}"),
        (f"a client in {often} rounds spends", epsilon(noise["epsilon"])),
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
            f"best guess, rows of several holders too, estimate for {rounds} rounds",
            share(naming["estimate"]["best_guess"]),
        ),
    ]
    if late is not None:
        lines.append((f"the same, {many} drop out late", share(late["best_guess"])))
    return lines


def two_server_facts(report: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """How tables are written between two servers, and what each of them looks at."""
    found, writing = report["two_server"], []
    for cost in found["tables"]:
        writing.append((cost["name"], cost["reason"]))
        if cost["keys"] is not None:
            up_to = report["break_even"][cost["name"]]
            limit = f"up to max_rows = {up_to:,}" if up_to else "for no max_rows"
            writing.append(("", f"keys take fewer bytes {limit}, of {cost['rows']:,} rows"))
    looked = f"{found['rows_looked_at']:,} rows, {found['aes_blocks']:,} AES blocks"
    domain = "whole tables" if found["domain"] == "whole" else "the cohort's union"
    return {
        "how a client writes a table": writing,
        "two servers": [
            ("evaluated over", f"{domain} (row_limit = {found['row_limit']:,})"),
            ("by each server for one client", looked),
            ("a sum is opened over at least", f"{found['min_cohort']} clients"),
            ("excluded once their list is closed", f"at most {found['most_excluded']} clients"),
        ],
    }


# --- all schemes side by side -------------------------------------------------------------------


def show_schemes(records: Sequence[Mapping[str, Any]], title: str) -> None:
    page = Page()
    page.line(", per client and round", lead=title)
    page.table(schemes_table(records))
    for one in records:
        if one["refused"] is not None:
            page.say(f"not with this plan: {one['refused']}", lead=f"{one['scheme']}:")
        else:
            page.say(f"learnt by the server: {one['server_learns']}", lead=f"{one['scheme']},")
    if any(one["holder_named"] < 1.0 for one in records):
        page.say(f"Holder identified, at most: {CONDITIONS}.")
    page.line(
        "docs/choosing.md says which scheme is for whom; `tessera init TASK --scheme NAME` writes "
        "its plan.",
        style="dim",
    )


def schemes_table(records: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for one in records:
        entry = schemes.named(one["scheme"])
        if one["refused"] is not None:
            rows.append([one["scheme"], "refused", *[""] * 4])
            continue
        rows.append(
            [
                one["scheme"],
                size(one["bytes_up"]) if entry.federated else "all data",
                size(one["bytes_down"]) if entry.federated else "",
                "" if one["bytes_between"] is None else size(one["bytes_between"]),
                "" if one["server_seconds"] is None else seconds(one["server_seconds"]),
                share(one["holder_named"]) if entry.hides else READS_ALL,
            ]
        )
    head = ("up", "down", "between\nservers", "server\ntime", "holder identi-\nfied, at most")
    return table(("scheme", *head), rows)
