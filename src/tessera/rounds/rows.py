"""Rows: how a client says which rows it fetches and writes, chosen once by the plan's scheme.

`rounds/schemes.py` says which kind a plan has, `rounds/select.py` chooses the rows themselves.
"""

from __future__ import annotations

from enum import Enum

from tessera.plan import Plan, TablePlan
from tessera.privacy.dp.events import THE_ROWS, THE_UNION, THE_WRITTEN_ROWS
from tessera.privacy.index.response import IndexPrivacy


class Shown(Enum):
    """What a round shows to its servers, for an attack to start from."""

    CLEAR_ROWS = "rows in the clear"
    CLEAR_PLACES = "places of the largest changes in the clear"
    UPLOADS = "single clients' gradients of ratings"
    RATING_SUMS = "sums of gradients of ratings"
    SUMS = "masked sums over whole cohorts"
    UNIONS = "unions of clients' rows"
    ANSWERS = "randomised answers, in sums with shares for those who drop out"
    GROUPS = "fixed groups"
    SHARES = "keys and shares at each of two servers"
    SHARED_ROWS = "rows of a sum that two servers open"
    KEY_PERIODS = "keys that last for several rounds"


class Rows:
    """How a client says which rows it fetches and writes. Here it does not: all of them travel."""

    chosen: bool = False
    """Whether a client fetches and writes rows of its own choice, and not the whole model."""
    randomised: bool = False
    """Whether clients answer at random about a union's rows: a quorum and an epsilon apply."""
    capped: bool = False
    """Whether `max_rows` bounds what a client names, so that sizes tell nothing."""
    union: bool = False
    """Whether a round begins with a private set union of the cohort's rows."""
    exact: tuple[str, ...] = ()
    """What a round releases without noise of who holds which row."""
    opened_first: tuple[str, ...] = ()
    """Likewise before it sums anything else, and so whatever has noise."""
    charged_with_answers: tuple[str, ...] = ()
    """What of it a client is charged for when it freezes its answers."""
    shown: frozenset[Shown] = frozenset()
    """What clients say of their rows beside a masked sum."""

    work: tuple[str, ...] = ()
    """Steps of a round about the union and the groups of rows (`simulation/calibration.py`)."""
    union_rows: str = "rows in the union"
    """What a round's union is called where its size is printed."""
    opened_rows: str = "opened"
    """Likewise the rows that were opened."""
    domain: str = "whole"
    """The rows of a table that two servers look at, as it is printed."""
    summed_over: str = "the whole cohort"
    """Among whom the holder of a row is, in a sum."""

    def held(self, plan: Plan, rows: int) -> int:
        """How many of so many rows of a table a client may use."""
        return rows

    def followed(self, plan: Plan) -> tuple[TablePlan, ...]:
        """The tables whose rows follow from a client's choice."""
        return ()

    def left_out(self, over: int) -> int:
        """Of so many rows beyond the plan's cap, those that are left out."""
        return 0

    def must_name_all(self, own: IndexPrivacy | None) -> bool:
        """Whether these probabilities of a client's own keep it from checking who shares a row."""
        return self.union and own is not None and not own.names_all


class ChosenRows(Rows):
    """A client fetches and writes rows of its own choice."""

    chosen = True
    summed_over = "its group"

    def followed(self, plan: Plan) -> tuple[TablePlan, ...]:
        return tuple(t for t in plan.tables if t.derived_from)


class CappedRows(ChosenRows):
    """Not more than `max_rows` of a table."""

    capped = True

    def left_out(self, over: int) -> int:
        return over


class ListedRows(Rows):
    """Everybody fetches and writes all rows of a public list."""


class NamedRows(ChosenRows):
    """By id, in the clear."""

    exact = (THE_ROWS,)


class RandomisedRows(CappedRows):
    """By randomised answers about the cohort's union."""

    randomised = union = True
    work: tuple[str, ...] = ("union", "groups")
    exact = charged_with_answers = (THE_UNION,)
    shown = frozenset({Shown.UNIONS, Shown.ANSWERS})

    def held(self, plan: Plan, rows: int) -> int:
        return max(1, min(round(plan.privacy.keep * rows), plan.union.max_rows))


class GroupRows(RandomisedRows):
    """All of the union of a fixed group, which opens once a period."""

    work = ()
    union_rows = "rows in the largest union of a group"
    opened_rows = "opened, in all groups"
    shown = frozenset({Shown.UNIONS, Shown.GROUPS})


class UnseenRows(CappedRows):
    """By point functions, of which a server alone learns nothing."""

    exact = (THE_WRITTEN_ROWS,)

    def held(self, plan: Plan, rows: int) -> int:
        return min(rows, plan.union.max_rows)


class NarrowedRows(UnseenRows):
    """Likewise, inside the union of the cohort's rows, which opens first."""

    union = True
    work = ("union",)
    domain = "union"
    opened_first = (THE_UNION,)
