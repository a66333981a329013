"""Phases of a round in order, and what its messages and phases are counted as.

A round over masked sums, one in the clear and one between two servers each go through phases of
their own. Engines read here in which of them a client can be missing, and what bytes and seconds
are spent on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tessera.plan import Plan
from tessera.protocols.secagg.params import Threat

KEYS: Final = "keys"
UNION: Final = "union"
CHOICE: Final = "choice"
ROWS_DOWN: Final = "rows down"
UPDATE: Final = "update"
UNMASK: Final = "unmask"
CATEGORIES: Final = (KEYS, UNION, CHOICE, ROWS_DOWN, UPDATE, UNMASK)
"""Cost categories, in the order in which a round comes to them."""

OVER: Final = "RoundOver"
START: Final = "start"
"""In place of a message: a client's first step answers none."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a round, for the `visit`-th time from 0.

    `dropouts`: a simulated client may drop out in it. `category` is what the servers' seconds up to
    its end are spent on.
    """

    name: str
    visit: int
    category: str
    dropouts: bool


@dataclass(frozen=True, slots=True)
class CostCategories:
    """What is counted as what, by kind of message.

    `answers` are a client's seconds, which are known by the message that it answers. Both sums of a
    round with a union send the same kinds: before it is opened they are the union's.
    """

    messages: Mapping[str, str]
    answers: Mapping[str, str]

    def __add__(self, other: CostCategories) -> CostCategories:
        return CostCategories(
            MappingProxyType({**self.messages, **other.messages}),
            MappingProxyType({**self.answers, **other.answers}),
        )


# --- one server, in the clear ---------------------------------------------------------------------


def plain_phases(_: Plan) -> tuple[Phase, ...]:
    """The whole model is sent to everybody, and comes back."""
    return (Phase("collect", 0, UPDATE, dropouts=True),)


def plain_row_phases(plan: Plan) -> tuple[Phase, ...]:
    """Rows are named first, in the clear."""
    return (Phase("reveal", 0, CHOICE, dropouts=True), *plain_phases(plan))


PLAIN: Final = CostCategories(
    messages=MappingProxyType(
        {
            "PlainRows": CHOICE,
            "Download": ROWS_DOWN,
            "PlainInput": UPDATE,
            "SparsePlainInput": UPDATE,
            OVER: UPDATE,
        }
    ),
    answers=MappingProxyType({START: KEYS, "Download": UPDATE, OVER: UPDATE}),
)

# --- masked sums ----------------------------------------------------------------------------------


def masked_phases(plan: Plan) -> tuple[Phase, ...]:
    """Keys once, then for each stage its sum; rows are named between the union and the update."""
    active = plan.security.threat is Threat.ACTIVE
    found = [Phase("advertise", 0, KEYS, dropouts=True), Phase("share", 0, KEYS, dropouts=True)]
    if plan.has_union:
        found += _masked_sum(0, union=True, active=active, dropouts=True)
        found.append(Phase("reveal", 0, CHOICE, dropouts=True))
    found += _masked_sum(int(plan.has_union), union=False, active=active, dropouts=True)
    return tuple(found)


def _masked_sum(visit: int, *, union: bool, active: bool, dropouts: bool) -> list[Phase]:
    categories = {"collect": UNION if union else UPDATE, "consistency": UNMASK, "unmask": UNMASK}
    return [
        Phase(name, visit, UNION if union else category, dropouts)
        for name, category in categories.items()
        if active or name != "consistency"
    ]


MASKED: Final = CostCategories(
    messages=MappingProxyType(
        {
            "Advert": KEYS,
            "Roster": KEYS,
            "ShareBoxes": KEYS,
            "ForwardedShares": KEYS,
            "UnionOpened": UNION,
            "NextStage": UNION,
            "RevealedSet": CHOICE,
            "RowGroups": CHOICE,
            "Download": ROWS_DOWN,
            "MaskedInput": UPDATE,
            OVER: UPDATE,
            "SurvivorList": UNMASK,
            "ConsistencySignature": UNMASK,
            "ConsistencyProof": UNMASK,
            "RevealedShares": UNMASK,
            # Fixed groups that wait.
            "Deposit": KEYS,
            "Fetch": ROWS_DOWN,
            "Assignment": ROWS_DOWN,
            "ComeBack": ROWS_DOWN,
            "Delivery": UPDATE,
        }
    ),
    answers=MappingProxyType(
        {
            START: KEYS,
            "Roster": KEYS,
            "ForwardedShares": UNION,  # opens its shares, then masks its part of the union
            "UnionOpened": CHOICE,
            "NextStage": CHOICE,
            "Download": UPDATE,
            "RowGroups": UPDATE,
            OVER: UPDATE,
            "SurvivorList": UNMASK,
            "ConsistencyProof": UNMASK,
            "Assignment": UPDATE,
            "ComeBack": UPDATE,
        }
    ),
)

# --- two servers ----------------------------------------------------------------------------------


def two_server_phases(plan: Plan) -> tuple[Phase, ...]:
    """A union first where tables are narrowed, always summed in the active setting."""
    found: list[Phase] = []
    if plan.narrows:
        found += [Phase("advertise", 0, KEYS, dropouts=False), Phase("share", 0, KEYS, False)]
        found += _masked_sum(0, union=True, active=True, dropouts=False)
    found += [
        Phase("handshake", 0, KEYS, dropouts=False),
        Phase("query", 0, ROWS_DOWN, dropouts=True),
        Phase("answer", 0, ROWS_DOWN, dropouts=False),
        Phase("collect", int(plan.narrows), UPDATE, dropouts=True),
        *([Phase("check", 0, UNMASK, dropouts=False)] if plan.two_server.verify else []),
        Phase("exclude", 0, UNMASK, dropouts=False),
        Phase("open", 0, UNMASK, dropouts=False),
    ]
    return tuple(found)


TWO_SERVER: Final = MASKED + CostCategories(
    messages=MappingProxyType(
        {
            "SignedHeader": KEYS,
            "Query": CHOICE,
            "QueryAnswers": ROWS_DOWN,
            "WriteReport": UPDATE,
        }
    ),
    answers=MappingProxyType({"SignedHeader": CHOICE, "QueryAnswers": ROWS_DOWN}),
)
