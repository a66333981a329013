"""Fixed groups: who always meets whom.

Clients that have no group yet are put in an order that follows from each one's id and a public salt
and cut into groups of the plan's size; who is left over waits. A group that is formed stays: it
takes nobody in and nobody leaves it, since two groups with few members in common would tell them
apart. So one more client moves nobody. That is kept, not computed: with groups of one size,
who meets whom depends on who was there when a group was formed. A server stores its groups with its
clients, and a client its own when it first meets them (`privacy/index/period.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import TypeAlias

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.plan import Plan

FixedGroup: TypeAlias = tuple[ClientId, ...]


def with_newcomers(
    plan: Plan, groups: Sequence[FixedGroup], clients: Collection[ClientId]
) -> list[FixedGroup]:
    """The groups there are, as they are, and those that form among clients without one."""
    check(plan, groups)
    placed = {client for group in groups for client in group}
    return [*groups, *formed(plan, [client for client in clients if client not in placed])]


def formed(plan: Plan, waiting: Collection[ClientId]) -> list[FixedGroup]:
    """Groups among these clients, each of the plan's size; clients that fill none have none.

    The salt is public, and so is who meets whom: what hides a holder is that the members of its
    group leave one trace, not that they are unknown.
    """
    size = plan.privacy.group_size
    order = sorted(waiting, key=lambda client: _place(plan, client))
    return [
        tuple(sorted(order[start : start + size]))
        for start in range(0, len(order) - size + 1, size)
    ]


def _place(plan: Plan, client: ClientId) -> bytes:
    salt = encode_context(Label.FIXED_GROUPS, plan.federation, plan.seed)
    return hashlib.sha256(salt + encode_context(int(client))).digest()


def check(plan: Plan, groups: Sequence[FixedGroup]) -> None:
    """A `ConfigError` if these are not groups of this plan."""
    size = plan.privacy.group_size
    members = [client for group in groups for client in group]
    if any(len(group) != size for group in groups) or len(set(members)) != len(members):
        raise ConfigError(
            f"stored groups are not of {size} clients each, every client in one",
            hint="a fixed group keeps its members: restore the groups as they were stored",
        )
