"""What a client does not take on trust: the members of its group, and the groups of its rows.

Masks follow from the values of the rows that two clients share, and who shares which is the
server's word. Where everybody names the whole union a client knows what is right, and refuses to be
summed over less.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.ids import TableId
from tessera.plan import Plan
from tessera.privacy.index.period import AnotherGroup, PeriodStore
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.secagg.messages import Roster


def names_everything(plan: Plan, own: IndexPrivacy) -> bool:
    """Whether everybody names the whole union, this client among them."""
    return plan.privacy.index.names_all and own.names_all


def row_groups_flaw(plan: Plan, smallest_group: Callable[[TableId], int]) -> str:
    """What is wrong with the groups that were sent where everybody names the union; "" if nothing.

    A row that is left out could be another one for every client; members that are left out of a
    group could be summed apart. `smallest_group` is 0 for a table of which a row was left out.
    """
    least = plan.privacy.group_size if plan.grouped else 1
    if any(smallest_group(plan.table_id(t.name)) < least for t in plan.tables):
        return "left rows of the union, or members of the group, out of the sum"
    return ""


def members_flaw(plan: Plan, roster: Roster, periods: PeriodStore) -> str:
    """What is wrong with the members of a fixed group; "" if they are those of every round before.

    Asked before anything is shared with them; the first ones are recorded.
    """
    members = tuple(int(m.client) for m in roster.members)
    try:
        if periods.group(plan.federation, members) != members:
            return "named other members of this client's group than in its first round"
    except AnotherGroup as error:
        return f"named other members than this client's rows have met: {error}"
    return ""
