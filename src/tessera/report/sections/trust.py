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
            server="Every client's whole update, by name: the rows that changed are the rows of "
            "its data, and examples can often be reconstructed from updates. Its number of "
            "examples.",
            clients="The whole model of every round they take part in, and nothing else.",
            honest="The server.",
        ),
        "submodel": Knowledge(
            server="Every client's exact set of rows, by name; its update of each, and the number "
            "of examples behind it.",
            clients="The current values of the rows they name, and the dense part.",
            honest="The server.",
        ),
        "secure-fedavg": Knowledge(
            server="The sum over the survivors, hence which rows changed in the cohort, "
            "but not whose. Who took part, who dropped out and when.",
            clients="The whole model of every round; ids and public keys of everybody in the "
            "cohort.",
            honest="Clients: fewer than the threshold may collude with the server. Against a "
            "server that lies they also need each other's signing keys (the active setting).",
        ),
        "secure-submodel": Knowledge(
            server="The union of the rows of each fixed group (at cpp1 to cpp5: of the cohort), "
            "with decoys, exactly. For each row its sum and count; that of a row with one holder "
            "is its exact update. A fixed group hides whose, in all rounds. At cpp1 to cpp5 also "
            "a randomised set of rows of each client, and rows below the quorum with who named "
            "them; over several rounds, sums and answers together name most holders. Who took "
            "part and who dropped out.",
            clients="The union; who else named the rows they named themselves, and the values of "
            "those rows; ids and public keys of everybody in the fixed group or cohort.",
            honest="Clients: fewer than the threshold may collude with the server, and every row's "
            "group needs two honest members. Against a server that lies, groups must be about a "
            "third of the cohort (the active setting).",
        ),
        "two-server": Knowledge(
            server="Each server alone: who took part and who dropped out, and keys and shares that "
            "look random to it. Both, once the sum is opened: which rows anybody wrote, with sum "
            "and count of each; a singleton row, written by one client, is that client's exact "
            "update, without its name. Where tables are narrowed to a union: that "
            "union, exactly.",
            clients="The current values of the rows they fetch, and the dense part. With a "
            "union: all of it, and ids and public keys of everybody in the cohort.",
            honest="One of the two servers: together they would know every row and update. Both, "
            "for correct results: either can corrupt a sum, and without the helper the round is "
            "aborted. With a union, clients too: fewer than the threshold may collude with the "
            "leader.",
        ),
    }
)

PRESETS: Final = (
    "cpp1 to cpp5 are presets of the probabilities of randomised response (Niu et al. 2020): from "
    "cpp1, by which a client names exactly the rows it has, to cpp5, by which it names the whole "
    "union. With groups, clients meet in fixed groups in which everybody names the whole union; "
    "nothing is opened unless all of a group are there."
)

IN_THE_CLEAR: Final = frozenset({"central", "fedavg", "submodel"})

UNKNOWN: Final = Knowledge(
    server="This page does not know the scheme; see docs/threat-model.md.",
    clients="See docs/threat-model.md.",
    honest="See docs/threat-model.md.",
)

NOT_COVERED_BY_EPSILON: Final[Sequence[str]] = (
    "The union itself is released exactly. ε is about one row of one client, given that union: "
    "whether a row that only one person touches is in the union is not hidden.",
    "A person has no finite ε. A client holds many rows, and what the answers about them reveal "
    "adds up.",
    "Periods add up: each period has new permanent responses, and spends its own ε.",
    "A row of a derived table (a category) has less protection than a row of its parent (an item): "
    "the answers about all items of the category depend on it.",
)

NOT_COVERED_BY_SUMS: Final[Sequence[str]] = (
    "What a sum reveals. A sum over few clients, or two sums that differ by one client, can say "
    "something about a person; no noise is added, so updates are not differentially private.",
    "Presence, timing and sizes: who took part and when; in secure-submodel, with how many rows.",
    "Correct results. A client can send anything: an input that nobody sees is not validated.",
    "The number of corrupt clients is an assumption: the server picks the cohort.",
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


def not_covered(schemes: Sequence[str]) -> list[str]:
    """What the schemes on a page do not cover, each point once."""
    found: list[str] = []
    if "secure-submodel" in schemes:
        found += NOT_COVERED_BY_EPSILON
    if "two-server" in schemes:
        found += NOT_COVERED_BY_TWO_SERVERS
    if any(scheme.startswith("secure-") or scheme == "two-server" for scheme in schemes):
        found += NOT_COVERED_BY_SUMS
    clear = [scheme for scheme in schemes if scheme in IN_THE_CLEAR]
    if clear:
        names = ", ".join(dict.fromkeys(clear))
        found += [f"{names}: {point[0].lower()}{point[1:]}" for point in NOT_COVERED_IN_THE_CLEAR]
    return [*found, *NOT_COVERED_BY_ANY]
