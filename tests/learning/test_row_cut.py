"""RowCut: both worlds of an index differ in so many examples, whatever the data are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessera.crypto.secret import Secret
from tessera.data.examples import NONE, Examples
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel, Table
from tessera.learning.module_tables import Tables
from tessera.learning.training import row_cut
from tessera.learning.training.row_cut import RowCut, first_of

ROWS = 12
MARK = "mark"
"""A field of the tests: the coins of an example are those of its place in the first world."""


class Shop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, 2)


def bound(*fields: str) -> BoundModel:
    return Tables({"items.weight": Table(*fields)}).bind(Shop())


BOUND = bound("item", "history")


def without(examples: Examples, row: int) -> Examples:
    """The other world: row taken out of every example."""
    left = examples.take(examples["item"] != row)
    return left.with_field("history", np.where(left["history"] == row, NONE, left["history"]))


class SameCoins:
    """Coins by an example's mark: what they are in one world they are in the other.

    Real coins are independent and alike for all examples, so that this is one way to draw them.
    """

    def __init__(self, marks: np.ndarray) -> None:
        self._marks, self._at = marks, 0

    def uniform(self, count: int) -> np.ndarray:
        self._at += 1
        each = count // max(1, len(self._marks))
        return np.concatenate(
            [
                np.empty(0),
                *(np.random.default_rng([self._at, int(m)]).random(each) for m in self._marks),
            ]
        )


@pytest.fixture
def same_coins(monkeypatch: pytest.MonkeyPatch):
    """Cut under coins that go with the examples."""

    def apply(rule: RowCut, examples: Examples) -> dict[int, tuple[int, ...]]:
        monkeypatch.setattr(row_cut, "CoinStream", lambda _: SameCoins(examples[MARK]))
        found = rule.apply(BOUND, examples, Secret(bytes(32)))
        monkeypatch.undo()
        return {
            int(mark): (int(item), *map(int, history))
            for mark, item, history in zip(
                found[MARK], found["item"], found["history"], strict=True
            )
        }

    return apply


def data_of(rng: np.random.Generator, examples: int, places: int, rows: int) -> Examples:
    """Popular rows are in nearly every example: the cut has something to do."""
    weights = 1.0 / np.arange(1, rows + 1)
    draw = rng.choice(rows, size=(examples, 1 + places), p=weights / weights.sum())
    history = np.where(rng.random((examples, places)) < 0.2, NONE, draw[:, 1:])
    return Examples({"item": draw[:, 0], "history": history, MARK: np.arange(examples)})


def changed(one: dict[int, tuple[int, ...]], other: dict[int, tuple[int, ...]]) -> int:
    return sum(one.get(mark) != other.get(mark) for mark in one.keys() | other.keys())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    examples=st.integers(0, 40),
    places=st.integers(0, 6),
    rows=st.integers(1, ROWS),
    per_row=st.integers(1, 20),
)
def test_no_row_changes_more_examples_than_the_plan_says(
    seed: int, examples: int, places: int, rows: int, per_row: int
) -> None:
    rule = RowCut.of(per_row, places)
    assert rule.changed <= per_row
    data = data_of(np.random.default_rng(seed), examples, places, rows)
    with pytest.MonkeyPatch.context() as patch:

        def apply(some: Examples) -> dict[int, tuple[int, ...]]:
            patch.setattr(row_cut, "CoinStream", lambda _: SameCoins(some[MARK]))
            found = rule.apply(BOUND, some, Secret(bytes(32)))
            return {
                int(m): (int(i), *map(int, h))
                for m, i, h in zip(found[MARK], found["item"], found["history"], strict=True)
            }

        here = apply(data)
        for row in range(rows):
            assert changed(here, apply(without(data, row))) <= per_row


def as_printed(same_coins, rule: RowCut, data: Examples, row: int) -> int:
    return changed(same_coins(rule, data), same_coins(rule, without(data, row)))


def let_in() -> Examples:
    """An example aimed at row 0 has three rows in its history, each contested by one other."""
    return Examples(
        {
            "item": np.array([0, 4, 5, 6]),
            "history": np.array([[1, 2, 3], [1, -1, -1], [2, -1, -1], [3, -1, -1]]),
            MARK: np.arange(4),
        }
    )


def test_what_comes_in_where_a_row_is_gone_is_counted(same_coins) -> None:
    """One example is aimed at the row, and three others get an entry back: four change, not one."""
    rule = RowCut(targets=1, histories=1, places=3)
    found = [as_printed(same_coins, rule, with_marks(let_in(), at), 0) for at in range(200)]
    assert max(found) == 4 <= rule.changed == 5
    assert min(found) < 4  # where others have the places, nothing comes in


def with_marks(examples: Examples, at: int) -> Examples:
    return examples.with_field(MARK, examples[MARK] + 1000 * at)


def test_a_row_is_taken_out_of_further_examples_which_stay(same_coins) -> None:
    data = Examples(
        {
            "item": np.arange(1, 9),
            "history": np.full((8, 1), 0),
            MARK: np.arange(8),
        }
    )
    here = same_coins(RowCut.of(4, 1), data)
    assert len(here) == 8
    assert sum(0 in example[1:] for example in here.values()) == RowCut.of(4, 1).histories == 2
    assert changed(here, same_coins(RowCut.of(4, 1), without(data, 0))) == 2


def test_leaving_out_whole_examples_would_let_all_of_them_back_in(same_coins, monkeypatch) -> None:
    """The test has teeth: a cut that drops examples passes the bound at once."""
    data = Examples({"item": np.arange(1, 12), "history": np.full((11, 1), 0), MARK: np.arange(11)})
    rule = RowCut.of(4, 1)

    def dropping(examples: Examples) -> dict[int, tuple[int, ...]]:
        kept = same_coins(rule, examples)
        had = {int(m) for m, h in zip(examples[MARK], examples["history"], strict=True) if 0 in h}
        return {m: e for m, e in kept.items() if 0 in e[1:] or m not in had}

    assert changed(dropping(data), dropping(without(data, 0))) == 11 > rule.changed


def test_another_entry_does_not_move_up(same_coins) -> None:
    """Places are drawn whether they are empty or not, or a row's going would bring in others."""
    data = Examples(
        {
            "item": np.arange(2, 10),
            "history": np.tile(np.array([[0, 1, 11]]), (8, 1)),
            MARK: np.arange(8),
        }
    )
    rule = replace(RowCut.of(40, 3), places=1)
    here, there = same_coins(rule, data), same_coins(rule, without(data, 0))
    for mark, example in here.items():
        if 0 not in example[1:]:
            assert there[mark] == example
        else:
            assert there[mark][1:] == (NONE, NONE, NONE)


@pytest.mark.parametrize("per_row", range(1, 60))
@pytest.mark.parametrize("places", [0, 1, 3, 10, 50])
def test_every_cut_keeps_to_its_number(per_row: int, places: int) -> None:
    rule = RowCut.of(per_row, places)
    assert rule.changed <= per_row and rule.targets >= 1 and rule.places <= places
    assert bool(rule.histories) is (places > 0 and per_row >= 3)


def test_the_client_draws_anew_with_every_secret_and_alike_with_one() -> None:
    data = data_of(np.random.default_rng(0), 40, 4, 6)
    rule = RowCut.of(6, 4)
    found = [rule.apply(BOUND, data, Secret(bytes([at] * 32))) for at in (1, 1, 2)]
    assert all(np.array_equal(found[0][f], found[1][f]) for f in data.fields)
    assert not all(np.array_equal(found[0][f], found[2][f]) for f in data.fields)
    counts = [np.unique(one["item"], return_counts=True)[1].max() for one in found]
    assert max(counts) <= rule.targets


def test_examples_aimed_at_two_rows_are_refused() -> None:
    data = Examples({"item": np.arange(3), "other": np.arange(3)})
    with pytest.raises(ConfigError, match="aimed at 2 rows"):
        RowCut.of(3, 0).apply(bound("item", "other"), data, Secret(bytes(32)))


def test_examples_that_are_aimed_at_nothing_all_stay() -> None:
    data = Examples({"history": np.tile(np.arange(3), (9, 1))})
    found = RowCut.of(8, 3).apply(bound("history"), data, Secret(bytes(32)))
    assert len(found) == 9
    assert (found["history"] == 1).sum() == RowCut.of(8, 3).histories


def test_the_lowest_lots_of_a_group_are_first() -> None:
    groups = np.array([3, 1, 3, 3, 1])
    lots = np.array([0.5, 0.2, 0.1, 0.3, 0.1])
    assert first_of(groups, lots, 1).tolist() == [False, False, True, False, True]
    assert first_of(groups, lots, 2).tolist() == [False, True, True, True, True]
    assert not first_of(groups, lots, 0).any()
