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
    """Keys, then the sum."""
    return (*_masked_keys(dropouts=True), *_masked_update(plan, 0))


def masked_row_phases(plan: Plan) -> tuple[Phase, ...]:
    """Keys once, then the sum of the union, the rows that are named, and the sum of updates."""
    return (
        *_masked_keys(dropouts=True),
        *_masked_union(active=plan.security.signs, dropouts=True),
        Phase("reveal", 0, CHOICE, dropouts=True),
        *_masked_update(plan, 1),
    )


def _masked_keys(*, dropouts: bool) -> list[Phase]:
    return [Phase(name, 0, KEYS, dropouts) for name in ("advertise", "share")]


def _masked_union(*, active: bool, dropouts: bool) -> list[Phase]:
    names = ("collect", "consistency", "unmask") if active else ("collect", "unmask")
    return [Phase(name, 0, UNION, dropouts) for name in names]


def _masked_update(plan: Plan, visit: int) -> list[Phase]:
    names = plan.security.after_collect
    after = [Phase(name, visit, UNMASK, dropouts=True) for name in names]
    return [Phase("collect", visit, UPDATE, dropouts=True), *after]


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
            "Leave": KEYS,
            "Fetch": ROWS_DOWN,
            "Assignment": ROWS_DOWN,
            "EpochWork": ROWS_DOWN,
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
            "EpochWork": UPDATE,
            "ComeBack": UPDATE,
        }
    ),
)

# --- two servers ----------------------------------------------------------------------------------


def two_server_phases(plan: Plan, collect: int = 0) -> tuple[Phase, ...]:
    """Rows are read, then written; `collect` is the visit of the phase that collects reports."""
    return (
        Phase("handshake", 0, KEYS, dropouts=False),
        Phase("query", 0, ROWS_DOWN, dropouts=True),
        Phase("answer", 0, ROWS_DOWN, dropouts=False),
        Phase("collect", collect, UPDATE, dropouts=True),
        *(Phase(name, 0, UNMASK, dropouts=False) for name in plan.two_server.after_collect),
    )


def narrowed_phases(plan: Plan) -> tuple[Phase, ...]:
    """A union first, always summed in the active setting."""
    union = _masked_union(active=True, dropouts=False)
    return (*_masked_keys(dropouts=False), *union, *two_server_phases(plan, collect=1))


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
