"""Which lists may be added up, by the same rules at both servers; and the lists of a key period.

Each server alone can have clients excluded after the list is closed: the leader by sums of tags
that are wrong, the helper by its word. So both count them against the plan's bound.

The first round of a key period decides who is on its lists, and both servers store the keys.
A client's rows are the same all period, so whoever is missing once shows its rows in the difference
of two exact sums. Rounds of a period open over the list of the first or not at all, unless the
plan allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tessera.errors import MisuseError
from tessera.ids import ClientId
from tessera.protocols.two_server.key_period import ClientKeys, KeyPeriod, KeyStore
from tessera.protocols.two_server.messages import Header
from tessera.protocols.two_server.params import Absent, TwoServerParams


def missing_members(
    params: TwoServerParams, keys: KeyPeriod | None, here: Iterable[ClientId]
) -> frozenset[ClientId]:
    """Those of the first list who are missing, where that forbids a sum."""
    if keys is None or params.absent is Absent.ALLOW:
        return frozenset()
    return frozenset(keys.clients.keys() - set(here))


def too_many_excluded(params: TwoServerParams, excluded: int, listed: int) -> str:
    """Why a list that has lost so many of its reports is not added up; "" if it is."""
    if excluded <= params.most_excluded:
        return ""
    return (
        f"{excluded} of {listed} reports were excluded after their list was closed; "
        f"the plan allows {params.most_excluded}"
    )


def shortage(
    params: TwoServerParams, keys: KeyPeriod | None, here: Collection[ClientId], excluded: int = 0
) -> tuple[int, int, str] | None:
    """(How many reports are here, how many are needed, why) if these may not be added up."""
    listed = len(here) + excluded
    if reason := too_many_excluded(params, excluded, listed):
        return len(here), max(params.min_cohort, listed - params.most_excluded), reason
    if len(here) < params.min_cohort:
        return len(here), params.min_cohort, ""
    if keys is not None and (missing := missing_members(params, keys, here)):
        return len(here), len(keys.clients), f"{len(missing)} clients whose keys last are missing"
    return None


def keep_keys(
    params: TwoServerParams,
    header: Header,
    store: KeyStore | None,
    reports: Mapping[ClientId, tuple[bytes, tuple[bytes, ...], tuple[bytes, ...]]],
) -> None:
    """Store (id, public part, seeds) of every report on the first list of a period."""
    if store is None:
        raise MisuseError("two servers: keys that last longer than a round need a store")
    store.keep(
        KeyPeriod(
            plan_hash=params.plan_hash,
            period=header.period,
            seed=header.write_seed,
            clients={
                c: ClientKeys(report_id=report_id, public=tuple(map(bytes, public)), seeds=seeds)
                for c, (report_id, public, seeds) in sorted(reports.items())
            },
        )
    )
