"""Privacy in figures and in words: epsilons, rows and their quorum, who learns what."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from tessera.plan import Sharing
from tessera.privacy.index.bound import KNOWN_ROW
from tessera.privacy.index.exposure import epsilon_longitudinal, epsilon_per_round
from tessera.report import charts
from tessera.report.figures import RunFigures
from tessera.report.lineup import with_preset
from tessera.report.markup import Content, Markup, join, listing, table, tag
from tessera.report.numbers import (
    LONGITUDINAL,
    NOT_APPLICABLE,
    count,
    enumeration,
    epsilon,
    fact,
    probability,
    share,
)
from tessera.report.sections.costs import naming
from tessera.rounds import schemes

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
        if found is None or not run.answers_differ:
            continue
        name = str(run.facts.get("level") or "custom")
        chances = ", ".join(map(probability, (found.p1, found.p2, found.p3, found.p4)))
        named = f"{share(found.p5)}, {share(found.p6)}"
        values = (epsilon_per_round(found), epsilon_longitudinal(found), run.epsilon_spent)
        bound = naming(run)
        rows.append([run.label, name, bound, chances, named, *map(epsilon, values), condition(run)])
    content: list[Content] = []
    if rows:
        content.append(
            tag(
                "p",
                "Each client answers for every row of the union whether it needs the row, by "
                "randomised response: at random, with a bias towards the truth. ε (epsilon) is "
                "the local differential privacy of its answers about one row: they change "
                "anybody's odds that the client has it by at most a factor of e to the ε. Lower "
                "is better; at 0 an answer says nothing, at infinity everything.",
            )
        )
        head = [
            "scheme",
            "preset",
            "holder identified",
            "p1, p2, p3, p4",
            "row named if held, if not",
        ]
        head += ["ε per round", LONGITUDINAL, "ε spent", "condition"]
        content.append(table("Index privacy, for one row of a client", head, rows, class_="cards"))
        content.append(
            tag(
                "p",
                "" if presets_named(runs) else f"{PRESETS} ",
                "Holder identified is about all rounds together, for whoever sees every answer, "
                "union and sum: whether it can tell whose a row with one holder is. It can: sums "
                "copy the answers, or who was there and who was not. "
                "p1 and p2 are the probabilities of a permanent yes for a row that the client has "
                "and one that it does not have; p3 and p4 those of an instantaneous yes, drawn in "
                "every round, after a permanent yes and a permanent no. "
                "Longitudinal ε is for any number of rounds of one period; ε spent is the highest "
                "of any client so far, over all periods, by the privacy ledger.",
                class_="note",
            )
        )
    plain = [run for run in runs if not run.answers_differ]
    grouped = [run for run in plain if run.naming_bound < 1.0]
    for run in grouped:
        whose = f"{run.label}: clients" if len(runs) > 1 else "Clients"
        text = (
            f"{whose} are in fixed groups. Everybody in a group fetches all rows of its union, "
            "and union and sums open over the whole group or not at all. Over all rounds "
        )
        corrupt = run.plan.promise.corrupt_in_words()
        known = KNOWN_ROW.replace("`", "")
        bound = tag("b", run.bound_in_words)
        content.append(tag("p", text, bound, f". {corrupt} {known[0].upper()}{known[1:]}."))
    silent = dict.fromkeys(r.label for r in plain if not r.noisy)
    if silent:
        names = enumeration(list(silent))
        content.append(tag("p", f"Nothing has noise under {names}: there is no ε to state."))
    for run in runs:
        if (spent := run.noise_spent) is not None:
            content.append(
                tag(
                    "p",
                    f"{run.label}: with its noise each unit has an ε of {epsilon(spent[0])} at "
                    f"most, at {spent[1]}, by the ledger of the client that was in most rounds.",
                )
            )
    if rows and any(run.test_entropy for run in runs):
        text = "Under insecure test entropy none of these holds: answers can be recomputed."
        content.append(tag("p", text, class_="bad"))
    for run in runs:
        content += [*unmasked(run), *unchecked(run)]
    content += [tag("h3", "What is not covered")]
    content.append(listing(not_covered([run.scheme for run in runs])))
    if any(run.sampled for run in runs):
        content.append(
            tag(
                "p",
                "ε is that of the plan with its cryptography on. Ideal rounds add in the clear to "
                "save time; nobody but the simulator saw them.",
                class_="note",
            )
        )
    return content


def unmasked(run: RunFigures) -> list[Content]:
    """Who sends unmasked updates under a secure scheme, and what that reveals."""
    sharing = run.plan.security.sharing
    if not run.secure or sharing is Sharing.SECURE:
        return []
    bare = run.unmasked
    text = (
        f"On average {count(bare)} of {count(run.cohort)} clients in a round sent unmasked updates"
    )
    why = "the plan sets this for all"
    if sharing is Sharing.AUTO:
        limit = fact(run.plan.security.indicator)
        why = (
            "each because its own estimate of the privacy indicator (how far its mask is from its "
            f"ratings) is at most {limit}. The server sees which clients do so: it learns this bit "
            "about each, the same in every round"
        )
    return [
        tag("h3", f"Unmasked updates, {run.label}"),
        tag("p", f"{text}: {why}."),
        tag(
            "p",
            "The server can solve an unmasked update for the client's masked ratings, and these "
            "rank its items almost as the true ratings do. A small indicator means that the mask "
            "predicts well, not that it hides: `tessera audit` and `tessera reproduce fedmmf` have "
            "the figures.",
        ),
    ]


WITHOUT_CHECKS: Final = (
    (
        "check",
        "Rows without authentication",
        "Fetched rows are not authenticated (check = false). A server can change what one client "
        "fetches without being noticed, and read that client's rows off the next sum: both servers "
        "must follow the protocol, not only one.",
    ),
    (
        "verify",
        "Keys without a check",
        "The keys that clients write with are not checked (verify = false). One client can write "
        "every row of a table at once, and neither server notices.",
    ),
)
"""Checks of [two_server] that a plan may switch off: key, heading, and what is possible then."""


def unchecked(run: RunFigures) -> list[Content]:
    """What is possible between two servers where a check is switched off."""
    found: list[Content] = []
    for key, heading, text in WITHOUT_CHECKS:
        if run.two_servers and not getattr(run.plan.two_server, key):
            found += [tag("h3", f"{heading}, {run.label}"), tag("p", text, class_="bad")]
    return found


def condition(run: RunFigures) -> str:
    return str(run.rounds[-1]["condition"]) if run.rounds else "given the union"


def rows(runs: Sequence[RunFigures]) -> list[Content]:
    shown = [run for run in runs if run.row_rounds]
    if not shown:
        text = tag("p", "No union of rows was taken under these schemes.")
        return [text, *singleton_rows(runs)]
    content: list[Content] = [
        tag(
            "p",
            "Only rows of the cohort's union can be updated in a round. A row named by fewer "
            "clients than the quorum is not summed, so that no client's update is revealed alone "
            "(below quorum). Where dropouts after masking leave fewer clients than the quorum, a "
            "row is opened over the survivors (shrunk) or, with a strict quorum, not at all "
            "(lost). A sum that honest clients could not have reached is not merged into the "
            "model. Rows of the union that nobody named are not counted.",
        )
    ]
    for at, run in enumerate(shown):
        content.append(row_figure(run, at))
    means: list[list[Content]] = [
        [
            run.label,
            *(count(mean_rows(run, kind)) for kind in KINDS),
            share(run.below_quorum) if run.entry.randomises else NOT_APPLICABLE,
            count(run.total("union_residual")),
        ]
        for run in shown
    ]
    head = ["scheme", *KINDS.values(), "share below quorum", "union ids not decoded, total"]
    content.append(table("Rows, means per round", head, means, class_="cards"))
    return content + singleton_rows(runs)


def singleton_rows(runs: Sequence[RunFigures]) -> list[Content]:
    return [
        tag(
            "p",
            f"{run.label}: {share(run.singleton_rows)} of the opened rows are singleton rows, "
            "written by exactly one client. Such a sum is that client's exact update; its group or "
            "cohort hides whose it is in one round; over many only a fixed group does, up to B.",
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

    told = (
        f"{name}: {count(points[0][1])} in the first round, {count(points[-1][1])} in the last"
        for name, points in alive.items()
    )
    title = f"Rows by round, {run.label}"
    chart = partial(
        charts.lines,
        [charts.Series(name, points, slot) for slot, (name, points) in enumerate(alive.items())],
        title=title,
        description=f"{'; '.join(told)}.",
        x_label="rounds",
        y_label="rows",
        from_zero=True,
    )
    text = f"None in any round: {enumeration(never)}." if never else None
    drawn = charts.figure(f"rows{at}", chart, text, heights=(280.0, 240.0))
    return join([tag("h3", title), drawn])


def knowledge(runs: Sequence[RunFigures]) -> list[Content]:
    found = list(dict.fromkeys(run.scheme for run in runs))
    body: list[list[Content]] = []
    for scheme in found:
        known = schemes.named(scheme).knowledge
        body.append([scheme, known.server, known.clients, known.honest])
    head = ["scheme", "the server learns", "other clients learn", "who must be honest"]
    return [
        table("After a round, by scheme", head, body, class_="cards prose", numeric=False),
        tag(
            "p",
            "“Learns” means what the protocol reveals to a party that follows it and keeps "
            "everything it receives. The full account is docs/threat-model.md.",
            class_="note",
        ),
    ]


# --- what is not covered ------------------------------------------------------------------------
#
# The threat model on one screen; who learns what is in the table of schemes (`rounds/schemes.py`).
# The full text, with the test behind each promise, is docs/threat-model.md.

PRESETS: Final = (
    "cpp1 to cpp5 are presets of the probabilities of randomised response (Niu et al. 2020): from "
    "cpp1, by which a client names exactly the rows it has, to cpp5, by which it names the whole "
    "union. With groups, clients are in fixed groups in which everybody names the whole union; "
    "nothing is opened but the sum over all of a group."
)

NOT_COVERED_BY_GROUPS_OR_ANSWERS: Final[Sequence[str]] = (
    "The union itself is released exactly: whether a row that only one person touches is in it is "
    "not hidden.",
    "Whoever knows one row of a member of a fixed group, or how many examples it has, can tell it "
    "from the others: rows of one client are linked by their values.",
    "Where answers are randomised (cpp2 to cpp4) their ε is about one row of one client, given the "
    "union. A person has no finite ε: what the answers about many rows reveal adds up, and so do "
    "periods, each of which has new permanent responses.",
    "A row of a derived table (a category) has less protection than a row of its parent (an item): "
    "the answers about all items of the category depend on it.",
)

NOT_COVERED_BY_SUMS: Final[Sequence[str]] = (
    "What a sum reveals. A sum over few clients, or two sums that differ by one client, can say "
    "something about a person; without [dp] no noise is added, and updates are not differentially "
    "private.",
    "Presence, timing and sizes: who took part and when; at cpp1 to cpp5, with how many rows.",
    "Correct results. A client can send anything: an input that nobody sees is not validated.",
    "The number of corrupt clients is an assumption: the server picks the cohort, and says "
    "who is in a fixed group.",
)

NOT_COVERED_BY_TWO_SERVERS: Final[Sequence[str]] = (
    "Two servers that collude. Nothing technical prevents it: two parties that do not trust each "
    "other should run them.",
    "Malicious clients. With two servers a client can write any values to any rows: its keys are "
    "not validated.",
)

NOT_COVERED_IN_THE_CLEAR: Final[Sequence[str]] = (
    "The server sees each client's contribution in the clear. Nothing protects a client from it.",
)

NOT_COVERED_BY_ANY: Final[Sequence[str]] = (
    "The trained model. Whoever gets it may learn from it about the training data.",
    "This was a simulation: one machine ran all parties. The code has had no external review.",
)


def not_covered(names: Sequence[str]) -> list[str]:
    """What the schemes of these names do not cover, each point once."""
    found: list[str] = []
    entries = [schemes.named(name) for name in dict.fromkeys(names)]
    if any(entry.randomises for entry in entries):
        found += NOT_COVERED_BY_GROUPS_OR_ANSWERS
    if any(entry.two_servers for entry in entries):
        found += NOT_COVERED_BY_TWO_SERVERS
    if any(entry.hides for entry in entries):
        found += NOT_COVERED_BY_SUMS
    clear = ", ".join(entry.name for entry in entries if not entry.hides)
    if clear:
        found += [f"{clear}: {point[0].lower()}{point[1:]}" for point in NOT_COVERED_IN_THE_CLEAR]
    return [*found, *NOT_COVERED_BY_ANY]


def presets_named(runs: Sequence[RunFigures]) -> bool:
    """Whether labels name presets of index privacy, such as cpp2."""
    return any(run.label == with_preset(run) != run.scheme for run in runs)
