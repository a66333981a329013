"""Rows: how a client says which rows it fetches and writes, chosen once by the plan's scheme.

`rounds/schemes.py` says which kind a plan has, `rounds/select.py` chooses the rows themselves.
"""

from __future__ import annotations

from tessera.plan import Plan
from tessera.privacy.dp.events import THE_ROWS, THE_UNION, THE_WRITTEN_ROWS


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

    def held(self, plan: Plan, rows: int) -> int:
        """How many of so many rows of a table a client may use."""
        return rows


class ListedRows(Rows):
    """Everybody fetches and writes all rows of a public list."""


class NamedRows(Rows):
    """By id, in the clear."""

    chosen = True
    exact = (THE_ROWS,)


class RandomisedRows(Rows):
    """By randomised answers about the cohort's union."""

    chosen = randomised = capped = union = True
    exact = charged_with_answers = (THE_UNION,)

    def held(self, plan: Plan, rows: int) -> int:
        return max(1, min(round(plan.privacy.keep * rows), plan.union.max_rows))


class UnseenRows(Rows):
    """By point functions, of which a server alone learns nothing."""

    chosen = capped = True
    exact = (THE_WRITTEN_ROWS,)

    def held(self, plan: Plan, rows: int) -> int:
        return min(rows, plan.union.max_rows)


class NarrowedRows(UnseenRows):
    """Likewise, inside the union of the cohort's rows, which opens first."""

    union = True
    opened_first = (THE_UNION,)
