"""Who learns what under each scheme, and what no scheme covers: the threat model on one screen.

The full text, with the test behind each promise, is docs/threat-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What each party is left with after a round."""

    server: str
    clients: str
    honest: str


SCHEMES: Final[Mapping[str, Knowledge]] = MappingProxyType(
    {
        "central": Knowledge(
            server="Everything: every example of every client.",
            clients="Nothing of each other, until somebody publishes the model.",
            honest="Whoever runs the server, and everybody who can get at it.",
        ),
        "fedavg": Knowledge(
            server="Every client's whole update, by name: the rows that moved in it are the rows "
            "of its data, and examples can often be worked out from such updates. How many "
            "examples it has.",
            clients="The whole model of every round they take part in, and nothing else.",
            honest="The server.",
        ),
        "submodel": Knowledge(
            server="Every client's exact set of rows, by name; its update of each, and how many of "
            "its examples stand behind it.",
            clients="The current values of the rows they ask for, and the dense part.",
            honest="The server.",
        ),
        "secure-fedavg": Knowledge(
            server="The sum over the clients that stayed, hence which rows changed in the cohort, "
            "but not whose. Who took part, who dropped out and when.",
            clients="The whole model of every round; ids and public keys of everybody in the "
            "cohort.",
            honest="Clients: fewer than the threshold may collude with the server. Against a "
            "server that lies they also need each other's signing keys (the active setting).",
        ),
        "secure-submodel": Knowledge(
            server="The union of the cohort's rows (with decoys), exactly. Of each client, a "
            "randomised set of rows. For each row its group's members, sum and count; if only one "
            "of them truly holds the row, the sum is that client's exact update, and the group "
            "hides whose. Rows below the quorum, and who named them. Who took part and who "
            "dropped out.",
            clients="The union; the members of the groups of rows they named themselves, and the "
            "values of those rows; ids and public keys of everybody in the cohort.",
            honest="Clients: fewer than the threshold may collude with the server, and every row's "
            "group needs two honest members. Against a server that lies, groups must be about a "
            "third of the cohort (the active setting).",
        ),
        "two-server": Knowledge(
            server="Each server alone: who took part and who dropped out, and keys and shares that "
            "look random whatever is in them. Both, once the sum is opened: which rows anybody "
            "wrote, with sum and count of each; a row that one client alone wrote is that "
            "client's exact update, without its name. Where tables are narrowed to a union: that "
            "union, exactly.",
            clients="The current values of the rows they ask for, and the dense part. With a "
            "union: all of it, and ids and public keys of everybody in the cohort.",
            honest="One of the two servers: together they would know every row and update. Both, "
            "for right results: either can spoil a sum, and a helper that does not answer ends "
            "the round. With a union, clients too: fewer than the threshold may collude with the "
            "leader.",
        ),
    }
)

IN_THE_CLEAR: Final = frozenset({"central", "fedavg", "submodel"})

UNKNOWN: Final = Knowledge(
    server="This page does not know the scheme; see docs/threat-model.md.",
    clients="See docs/threat-model.md.",
    honest="See docs/threat-model.md.",
)

NOT_COVERED_BY_LEVELS: Final[Sequence[str]] = (
    "The union itself is released exactly. A level is about one row of one client, given that "
    "union: a row that only one person touches is in it or is not.",
    "A person has no finite level. A client holds many rows, and what their answers give away "
    "adds up.",
    "Periods add up: when a period ends, answers are drawn anew and the next one is spent on top.",
    "A row of a derived table (a category) stands behind the answers about all its parent's rows "
    "(goods), and is less protected than one of them.",
)

NOT_COVERED_BY_SUMS: Final[Sequence[str]] = (
    "What a sum says. A total over few clients, or two totals that differ by one client, can tell "
    "about a person; no noise is added here (no differential privacy).",
    "Presence, timing and sizes: who took part and when; in secure-submodel, with how many rows.",
    "Right results. A client can send anything, nobody can check an input that nobody sees.",
    "The number of corrupt clients is an assumption: the server picks the cohort.",
)

NOT_COVERED_BY_TWO_SERVERS: Final[Sequence[str]] = (
    "Two servers that work together. Nothing technical keeps them apart; they are to be run by "
    "two parties that would not.",
    "A client that cheats. Between two servers it can write any values to any number of rows, and "
    "nobody can tell from its keys.",
)

NOT_COVERED_IN_THE_CLEAR: Final[Sequence[str]] = (
    "The server sees each client's contribution as it is. Nothing here protects a client from it.",
)

NOT_COVERED_BY_ANY: Final[Sequence[str]] = (
    "The trained model. Whoever gets it may learn from it about those who trained it.",
    "This was a simulation: one machine played all parties. The code has had no external review.",
)


def not_covered(schemes: Sequence[str]) -> list[str]:
    """What the schemes on a page leave open, each point once."""
    found: list[str] = []
    if "secure-submodel" in schemes:
        found += NOT_COVERED_BY_LEVELS
    if "two-server" in schemes:
        found += NOT_COVERED_BY_TWO_SERVERS
    if any(scheme.startswith("secure-") or scheme == "two-server" for scheme in schemes):
        found += NOT_COVERED_BY_SUMS
    clear = [scheme for scheme in schemes if scheme in IN_THE_CLEAR]
    if clear:
        names = ", ".join(dict.fromkeys(clear))
        found += [f"{names}: {point[0].lower()}{point[1:]}" for point in NOT_COVERED_IN_THE_CLEAR]
    return [*found, *NOT_COVERED_BY_ANY]
