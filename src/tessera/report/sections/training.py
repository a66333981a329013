"""How the runs were trained, on what, and by which plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.report.figures import RunFigures, in_rounds, mapping, number
from tessera.report.markup import Content, Markup, listing, table, tag
from tessera.report.numbers import NOT_APPLICABLE, count, fact, seconds, share
from tessera.report.sections.costs import figures_from


def training(runs: Sequence[RunFigures]) -> list[Content]:
    head = ["scheme", "rounds", "learner", "clients that sent zeros", "values clipped"]
    head += ["cryptography", "wall time, per round", "entropy", "version"]
    body: list[list[Content]] = [
        [
            run.label,
            finished(run),
            tag("span", learner(run), class_="free"),
            count(run.total("not_finite")),
            NOT_APPLICABLE if run.central else share(run.mean("clipped")),
            cryptography(run),
            seconds(run.mean("seconds")),
            tag("b", "insecure test entropy", class_="bad") if run.test_entropy else "system",
            str(run.facts.get("version", "not known")),
        ]
        for run in runs
    ]
    notes = [
        "A client whose training raised an error, or whose loss or parameters became NaN or "
        "infinite, sends zeros with weight 0, and is counted here.",
        "Clipped values lay outside the range of the quantiser. Under a secure scheme only the "
        "simulator can count either: no server sees them.",
        *figures_from(runs),
    ]
    return [
        table("Learner, faults and cryptography", head, body, class_="cards", numeric=False),
        listing(notes, "note"),
        *(line for run in runs for line in gone_wrong(run)),
        tag("h3", "The model"),
        model(runs[0]),
    ]


def gone_wrong(run: RunFigures) -> list[Content]:
    """Clients that are not in a sum or sent zeros, and rounds that were aborted, by reason."""
    reported = in_rounds(run.rounds)
    found: list[list[Content]] = [
        [f"{what}: {why}", count(many)]
        for what, reasons in (
            ("client not in a sum", reported["excluded"]),
            ("client that sent zeros", reported["broken"]),
            ("round aborted", run.abort_reasons),
        )
        for why, many in reasons.items()
    ]
    left = run.mean("rows_over_cap")
    if run.secure and left:
        over = "more than max_rows"
        if run.two_servers:
            over += ", outside the union or without a bin"
        found.append([f"rows over the cap, per round: {over}", count(left)])
    if exposed := run.total("rows_exposed"):
        why = "rows of clients that were missing in a round of their keys, which two sums show"
        found.append([why, count(exposed)])
    if not found:
        return []
    return [
        tag("h3", f"What went wrong, {run.label}"),
        table("In all rounds", ["what and why", "how many"], found, class_="facts"),
    ]


def finished(run: RunFigures) -> str:
    of = f" of {run.planned:,}" if run.planned is not None else ""
    failed = f", and {run.aborted:,} aborted" if run.aborted else ""
    return f"{run.finished:,}{of}{failed}"


def learner(run: RunFigures) -> str:
    chosen = mapping(run.facts.get("learner"))
    name, reason = chosen.get("name"), chosen.get("reason")
    if not name:
        return "not known"
    return f"{name}: {reason}" if reason else str(name)


def cryptography(run: RunFigures) -> str:
    if not run.secure:
        return "none in this scheme"
    if not run.finished:
        return "no round yet"
    if not run.sampled:
        return "in every round"
    return f"sampled: {len(run.secure_rounds):,} of {run.finished:,} rounds"


def model(run: RunFigures) -> Markup:
    described = mapping(run.facts.get("model"))
    body: list[list[Content]] = []
    dense = number(described.get("dense"))
    body.append(["dense part", "", "", count(dense), "fetched whole"])
    listed = described.get("tables")
    for item in listed if isinstance(listed, list) else []:
        spec = mapping(item)
        height, width = number(spec.get("rows")), number(spec.get("width"))
        values = height * width if height is not None and width is not None else None
        derived = spec.get("derived_from")
        kind = f"derived from {derived}" if derived else "fetched by rows"
        if spec.get("local"):
            kind = "never leaves the client"
        name = str(spec.get("name", "a table"))
        body.append([name, count(height), count(width), count(values), kind])
    head = ["part", "rows", "width", "values", "transfer"]
    return table("Parameters", head, body, class_="cards")


def data(runs: Sequence[RunFigures]) -> list[Content]:
    task = runs[0].task
    facts = mapping(task.get("facts"))
    known: dict[str, Any] = {
        "task": task.get("name"),
        "clients": task.get("clients"),
        "training examples": task.get("examples"),
        "test examples": task.get("test_examples"),
        **facts,
    }
    body: list[list[Content]] = [[str(k).replace("_", " "), fact(v)] for k, v in known.items()]
    content: list[Content] = [
        table(
            "Facts about the data and its split",
            ["fact", "value"],
            body,
            class_="facts",
            numeric=False,
        )
    ]
    for run in runs:
        if run.setup:
            whose = f", {run.label}" if len(runs) > 1 else ""
            content += [tag("h3", f"Before the first round{whose}"), *setup(run)]
    return content


def setup(run: RunFigures) -> list[Content]:
    """What was summed over all clients, and what clients then fitted for themselves."""
    added = mapping(run.setup.get("sum"))
    if not added:
        note = "Nothing is summed before the first round: predictions begin at the middle of the "
        note += "scale, and every client fits its own part to its ratings in each round."
        return [tag("p", note, class_="note")]
    groups, masked = number(added.get("groups")), number(added.get("masked"))
    body: list[list[Content]] = [
        ["mean of all ratings", fact(run.setup.get("mean"))],
        ["ratings", fact(run.setup.get("ratings"))],
        ["clients in the sum", fact(added.get("clients"))],
    ]
    if groups is not None and masked is not None:
        word = "none: in the clear" if not masked else f"{masked:.0f} of {groups:.0f} groups"
        body.append(["sum really masked", word])
    mask = dict(mapping(run.setup.get("mask")))
    if mask:
        body.append(["private mask", fact(mask.pop("order", None))])
        own = number(mask.get("penalty"))
        penalty = "each client's own choice" if own == 0 else fact(own)
        body.append(["its penalty", penalty])
        mask.pop("penalty", None)
    body += [[str(name), fact(value)] for name, value in mask.items()]
    note = (
        "Every client and the server know the number and the mean of all ratings exactly. Masks "
        "stay with their clients; the simulation counts those that could not be fitted."
    )
    return [
        table("Set-up", ["fact", "value"], body, class_="facts", numeric=False),
        tag("p", note, class_="note"),
    ]


def settings(runs: Sequence[RunFigures]) -> list[Content]:
    content: list[Content] = []
    for run in runs:
        name = f"plan.toml of {run.label}" if len(runs) > 1 else "plan.toml"
        content.append(tag("details", tag("summary", name), tag("pre", run.run.plan_text)))
    return content
