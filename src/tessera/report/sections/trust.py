"""What no scheme covers: the threat model on one screen, with who learns what.

The latter is in the table of schemes (`rounds/schemes.py`). The full text, with the test behind
each promise, is docs/threat-model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera.rounds import schemes

PRESETS: Final = (
    "cpp1 to cpp5 are presets of the probabilities of randomised response (Niu et al. 2020): from "
    "cpp1, by which a client names exactly the rows it has, to cpp5, by which it names the whole "
    "union. With groups, clients meet in fixed groups in which everybody names the whole union; "
    "nothing is opened unless all of a group are there."
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
