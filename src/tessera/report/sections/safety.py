"""Privacy in figures and in words: levels, rows and their quorum, who learns what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera.privacy.exposure import epsilon_longitudinal, epsilon_once
from tessera.report import charts
from tessera.report.figures import RunFigures
from tessera.report.markup import Content, Markup, join, listing, table, tag
from tessera.report.numbers import count, epsilon, probability, share
from tessera.report.sections import trust
from tessera.report.words import NOT_APPLICABLE, enumeration, fact
from tessera.rounds.plan import Sharing

KINDS: Final = {
    "union_rows": "in the union",
    "rows_opened": "opened",
    "rows_below_quorum": "below quorum",
    "rows_shrunk": "shrunk",
    "rows_lost": "lost",
    "rows_out_of_bounds": "not merged",
}


def privacy(runs: Sequence[RunFigures]) -> list[Content]:
    rows: list[list[Content]] = []
    for run in runs:
        found = run.index_privacy
        if found is None:
            continue
        name = str(run.facts.get("level") or "own probabilities")
        chances = ", ".join(map(probability, (found.p1, found.p2, found.p3, found.p4)))
        revealed = f"{share(found.p5)}, {share(found.p6)}"
        levels = (epsilon_once(found), epsilon_longitudinal(found), run.epsilon_spent)
        values = map(epsilon, levels)
        rows.append([run.label, name, chances, revealed, *values, condition(run)])
    content: list[Content] = []
    if rows:
        content.append(
            tag(
                "p",
                "The server asks each client about every row of the union, and the client answers "
                "at random, with a bias towards the truth. The level (epsilon) bounds how far its "
                "answer about a row can shift anybody's belief: odds change by at most a factor "
                "of e to that power. Lower is better; 0 gives nothing away, infinite is no cover.",
            )
        )
        head = ["scheme", "name", "p1, p2, p3, p4", "fetched if held, if not"]
        head += ["level, once", "level, ever", "spent so far", "holds"]
        content.append(table("Index privacy, per row of a client", head, rows, class_="cards"))
        content.append(
            tag(
                "p",
                "p1 and p2 are the chances of a permanent yes for a row the client has and has "
                "not; p3 and p4 those of a yes in one round after a permanent yes and no. “Ever” "
                "is for any number of rounds of one period; “spent so far” is the highest of any "
                "client, as the ledger counted it, over all periods.",
                class_="note",
            )
        )
    else:
        names = enumeration(list(dict.fromkeys(run.scheme for run in runs)))
        content.append(
            tag("p", f"No sets are randomised under {names}: there is no level to state.")
        )
    if rows and any(run.test_entropy for run in runs):
        said = "Under insecure test entropy none of these levels holds: answers can be recomputed."
        content.append(tag("p", said, class_="bad"))
    for run in runs:
        content += [*unmasked(run), *unchecked(run)]
    content += [tag("h3", "What is not covered")]
    content.append(listing(trust.not_covered([run.scheme for run in runs])))
    if any(run.sampled for run in runs):
        content.append(
            tag(
                "p",
                "Levels are those of the plan with its cryptography on. Rounds of this run that "
                "were added in the clear are a saving of the simulator and were seen by nobody "
                "else.",
                class_="note",
            )
        )
    return content


def unmasked(run: RunFigures) -> list[Content]:
    """Who of a secure scheme goes unmasked, and what that tells."""
    if not run.secure or run.plan.security.sharing is Sharing.SECURE:
        return []
    bare = run.unmasked
    said = f"{count(bare)} of {count(run.cohort)} clients in a round, in the mean, went in the open"
    why = "as the plan has it for all"
    if run.plan.security.sharing is Sharing.AUTO:
        limit = fact(run.plan.security.indicator)
        why = (
            "each because its own estimate of the privacy indicator (how far its mask is from its "
            f"ratings) is at most {limit}. Which way a client goes is seen, and tells this bit of "
            "it, in every round the same"
        )
    return [
        tag("h3", f"In the open, {run.label}"),
        tag("p", f"{said}: {why}."),
        tag(
            "p",
            "An update in the open can be solved for the client's masked ratings, and those order "
            "its ratings almost as the true ones do. A small indicator means a mask that predicts "
            "well, not one that hides: `tessera audit` and `tessera reproduce fedmmf` have the "
            "figures.",
        ),
    ]


def unchecked(run: RunFigures) -> list[Content]:
    """What two servers can do where clients do not check the rows they get."""
    if not run.two_servers or run.plan.two_server.check:
        return []
    said = (
        "Rows are not checked (check = false). A server that changes what one client fetches is "
        "not noticed, and can read that client's rows in the next sum: both have to follow the "
        "protocol, and not only one."
    )
    return [tag("h3", f"Unchecked rows, {run.label}"), tag("p", said, class_="bad")]


def condition(run: RunFigures) -> str:
    return str(run.rounds[-1]["condition"]) if run.rounds else "given the union"


def rows(runs: Sequence[RunFigures]) -> list[Content]:
    shown = [run for run in runs if run.row_rounds]
    if not shown:
        said = tag("p", "No union of rows was taken under these schemes.")
        return [said, *singleton_rows(runs)]
    content: list[Content] = [
        tag(
            "p",
            "Only rows of the cohort's union can be updated in a round. A row named by fewer "
            "clients than the quorum is not summed, so that nobody's update stands alone (below "
            "quorum). A group that dropouts pushed under the quorum after masking is opened over "
            "those who are left (shrunk), or, with a strict quorum, not at all (lost). Rows of the "
            "union that nobody asked for are in none of these.",
        )
    ]
    for at, run in enumerate(shown):
        content.append(row_figure(run, at))
    means: list[list[Content]] = [
        [
            run.label,
            *(count(mean_rows(run, kind)) for kind in KINDS),
            share(run.below_quorum) if run.scheme == "secure-submodel" else NOT_APPLICABLE,
            count(run.total("union_residual")),
        ]
        for run in shown
    ]
    head = ["scheme", *KINDS.values(), "share below quorum", "union ids not decoded, in all"]
    content.append(table("Rows, means per round", head, means, class_="cards"))
    return content + singleton_rows(runs)


def singleton_rows(runs: Sequence[RunFigures]) -> list[Content]:
    return [
        tag(
            "p",
            f"{run.label}: {share(run.singleton_rows)} of the opened rows were written by exactly "
            "one client. Such a sum is that client's own update; whose, its group or cohort hides.",
        )
        for run in runs
        if run.secure and run.singleton_rows is not None
    ]


def mean_rows(run: RunFigures, kind: str) -> float | None:
    values = [value for _, value in run.rows(kind)]
    return sum(values) / len(values) if values else None


def row_figure(run: RunFigures, at: int) -> Markup:
    series = {name: run.rows(kind) for kind, name in KINDS.items()}
    alive = {name: points for name, points in series.items() if any(y for _, y in points)}
    never = [name for name, points in series.items() if points and name not in alive]

    def chart(narrow: bool) -> Markup:
        return charts.lines(
            [
                charts.Series(name, points, slot)
                for slot, (name, points) in enumerate(alive.items())
            ],
            name=f"rows{at}-narrow" if narrow else f"rows{at}",
            title=f"Rows by round, {run.label}",
            description="; ".join(
                f"{name}: {count(points[0][1])} in the first round, {count(points[-1][1])} in "
                "the last"
                for name, points in alive.items()
            )
            + ".",
            x_label="rounds",
            y_label="rows",
            from_zero=True,
            width=328.0 if narrow else 736.0,
            height=240.0 if narrow else 280.0,
            class_="narrow" if narrow else "wide",
        )

    said = f"There were none of these in any round: {enumeration(never)}." if never else None
    return join(
        [
            tag("h3", f"Rows by round, {run.label}"),
            tag("figure", chart(False), chart(True), tag("figcaption", said) if said else None),
        ]
    )


def knowledge(runs: Sequence[RunFigures]) -> list[Content]:
    found = list(dict.fromkeys(run.scheme for run in runs))
    body: list[list[Content]] = []
    for scheme in found:
        known = trust.SCHEMES.get(scheme, trust.UNKNOWN)
        body.append([scheme, known.server, known.clients, known.honest])
    head = ["scheme", "the server learns", "other clients learn", "who must be honest"]
    return [
        table("After a round, by scheme", head, body, class_="cards prose", numeric=False),
        tag(
            "p",
            "“Learns” is what the protocol hands over, to a party that follows it and keeps "
            "everything. The full account is docs/threat-model.md.",
            class_="note",
        ),
    ]
