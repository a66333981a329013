"""Which rows: functions of plan, rows and secret alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rounds.population import CATEGORIES, GOODS, derived, plan
from tessera.crypto.secret import Secret
from tessera.ids import RoundId
from tessera.protocols.union.decoys import WholeTable
from tessera.rounds import select

SECRET = Secret(bytes(32))


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_rows_of_a_derived_table_follow_and_are_never_chosen() -> None:
    chosen = select.choose_held(plan("submodel"), {"goods": ids(1, 13, 20)}, {}, derived())
    assert chosen.requested["categories"].tolist() == sorted({1, 13 % CATEGORIES, 20 % CATEGORIES})
    assert chosen.trained == chosen.requested


def test_rows_outside_the_union_wait() -> None:
    union = {"goods": ids(3, 5, 8)}
    chosen = select.choose_held(plan("two-server"), {"goods": ids(1, 5, 8)}, union, derived())
    assert chosen.requested["goods"].tolist() == [5, 8]
    places = select.positions(union, "goods", chosen.requested["goods"])
    assert places.tolist() == [1, 2]
    assert select.ids_at(union, "goods", places).tolist() == [5, 8]
    assert select.positions({}, "goods", ids(7)).tolist() == [7]


def test_a_client_names_no_more_rows_than_its_cap_and_keeps_the_same_ones() -> None:
    settings = plan("two-server", union={"max_rows": 4})
    rows = {"goods": np.arange(30, dtype=np.uint64)}
    kept = select.capped(settings, rows, SECRET)["goods"]
    assert len(kept) == 4 and set(kept.tolist()) <= set(range(30))
    fewer = {"goods": rows["goods"][rows["goods"] != next(i for i in range(30) if i not in kept)]}
    assert select.capped(settings, fewer, SECRET)["goods"].tolist() == kept.tolist()


def test_decoys_follow_from_the_secret_and_the_period() -> None:
    settings = plan(privacy={"decoys": 1.0})
    rows, catalogue = {"goods": ids(1, 5, 9)}, WholeTable(settings.domain)
    offered = [select.offered(settings, rows, SECRET, p, catalogue).tolist() for p in (0, 0, 1)]
    assert offered[0] == offered[1] != offered[2]
    assert {1, 5, 9} < set(offered[0]) and len(offered[0]) == 6
    bare = replace(settings, privacy=replace(settings.privacy, decoys=0.0))
    assert select.offered(bare, rows, SECRET, 0, catalogue).tolist() == [1, 5, 9]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({0: ids(1, 2)}, ""),
        ({}, "other tables"),
        ({0: ids(1), 1: ids(1)}, "other tables"),
        ({0: ids(GOODS)}, "outside table 'goods'"),
        ({0: np.arange(GOODS, dtype=np.uint64)}, "more rows than its cohort can name"),
    ],
)
def test_a_union_that_the_plan_does_not_allow_has_a_flaw(rows, reason: str) -> None:
    settings = plan(cohort=2, union={"max_rows": 3}, privacy={"min_group": 2})
    message = replace(select.opened_union(settings, RoundId(0), ids(1)), tables=rows)
    found = select.union_flaw(settings, message)
    assert reason in found and bool(found) == bool(reason)
