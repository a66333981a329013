"""The server's steps against whole NumPy arrays, and rows that must rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tessera.errors import ConfigError, MisuseError
from tessera.learning.averaging import Averaging, ServerStep, TableMean
from tessera.learning.tables.table import DenseTable, LazyTable, Normal, StoredTable, TableSpec

ROWS, WIDTH, DENSE = 12, 3, 5

steps = st.builds(
    ServerStep,
    optimizer=st.sampled_from(["plain", "momentum", "adaptive", "adam", "sum"]),
    rate=st.sampled_from([1.0, 0.3]),
    dense_rate=st.sampled_from([0.0, 0.2]),
    momentum=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.5, 0.99]),
    epsilon=st.sampled_from([1e-3, 0.1]),
)


def table(name: str = "items", rows: int = ROWS) -> LazyTable:
    return LazyTable(TableSpec(name=name, size=rows, width=WIDTH, initial=Normal(0.1), seed=1))


def whole(values: StoredTable, rows: int = ROWS) -> np.ndarray:
    return values.values(np.arange(rows, dtype=np.uint64))


def a_mean(rng: np.random.Generator) -> TableMean:
    ids = np.sort(rng.permutation(ROWS)[: rng.integers(1, ROWS)]).astype(np.uint64)
    return TableMean(ids, rng.normal(size=(ids.size, WIDTH)), rng.integers(0, 3, ids.size))


class Oracle:
    """The rules of the docstring on float64 arrays of everything, one row at a time."""

    def __init__(self, step: ServerStep, x: np.ndarray) -> None:
        self.step, self.x = step, x.astype(np.float64)
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.steps = np.zeros_like(self.x)

    def go(self, at: Any, mean: np.ndarray, rate: float, count: int = 1) -> None:
        s = self.step
        if s.optimizer in ("plain", "sum"):
            self.x[at] += rate * mean * (count if s.optimizer == "sum" else 1)
        elif s.optimizer == "momentum":
            self.m[at] = s.momentum * self.m[at] + mean
            self.x[at] += rate * self.m[at]
        else:
            self.m[at] = s.momentum * self.m[at] + (1 - s.momentum) * mean
            self.v[at] = s.beta2 * self.v[at] + (1 - s.beta2) * mean**2
            m, v = self.m[at], self.v[at]
            if s.optimizer == "adam":
                self.steps[at] += 1
                m = m / (1 - s.momentum ** self.steps[at])
                v = v / (1 - s.beta2 ** self.steps[at])
            self.x[at] += rate * m / (np.sqrt(v) + s.epsilon)


@given(step=steps, seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_steps_follow_the_formulas_and_other_rows_rest(step: ServerStep, seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = table()
    averaging = Averaging(step, DENSE, {"items": items})
    dense = rng.normal(size=DENSE).astype(np.float32)
    rows_oracle, dense_oracle = Oracle(step, whole(items)), Oracle(step, dense)
    for _ in range(4):
        mean, dense_mean = a_mean(rng), rng.normal(size=DENSE)
        before = whole(items)
        states = [whole(state) for state in averaging.state]
        dense = averaging.apply(dense, dense_mean, {"items": mean})
        dense_oracle.go(slice(None), dense_mean, step.dense_rate or step.rate)
        for at, row, count in zip(mean.ids.tolist(), mean.mean, mean.counts, strict=True):
            if count > 0:
                rows_oracle.go(at, row, step.rate, count)
        rest = np.setdiff1d(np.arange(ROWS), mean.ids[mean.counts > 0])
        assert_array_equal(whole(items)[rest], before[rest])
        for state, old in zip(averaging.state, states, strict=True):
            assert_array_equal(whole(state)[rest], old[rest])
    assert_allclose(whole(items), rows_oracle.x, rtol=1e-4, atol=1e-5)
    assert_allclose(dense, dense_oracle.x, rtol=1e-4, atol=1e-5)
    assert dense.dtype == np.float32


def test_shrinkage_is_a_penalty_by_the_row_that_weighs_less_where_many_have_trained() -> None:
    items = DenseTable.from_array("items", np.full((ROWS, WIDTH), 2.0, np.float32))
    averaging = Averaging(ServerStep(rate=0.5, shrinkage=0.3), DENSE, {"items": items})
    ids, counts = np.array([1, 4], np.uint64), np.array([1, 10])
    mean = TableMean(ids, np.full((2, WIDTH), 0.1), counts)
    averaging.apply(np.zeros(DENSE, np.float32), None, {"items": mean})
    found = whole(items)
    assert_allclose(found[1], 2.0 + 0.5 * (0.1 - 0.3 * 2.0), rtol=1e-6)
    assert_allclose(found[4], 2.0 + 0.5 * (0.1 - 0.3 * 2.0 / 10), rtol=1e-6)
    assert (found[[0, 2, 3]] == 2.0).all()


def test_the_rate_falls_by_the_round_and_not_by_the_call() -> None:
    items = DenseTable.from_array("items", np.zeros((ROWS, WIDTH), np.float32))
    averaging = Averaging(ServerStep(rate=2.0, decay=0.5), DENSE, {"items": items})
    mean = TableMean(np.array([3], np.uint64), np.ones((1, WIDTH)), np.array([1]))
    dense = averaging.apply(np.zeros(DENSE, np.float32), np.ones(DENSE), {"items": mean}, 3)
    assert_allclose(dense, 0.25)
    assert_allclose(whole(items)[3], 0.25)


def test_a_linear_schedule_falls_over_its_rounds_and_never_to_nothing() -> None:
    step = ServerStep(rate=1.0, dense_rate=0.5, schedule="linear", schedule_rounds=4)
    assert [step.rate_in(k) for k in (0, 1, 3, 4, 9)] == [1.0, 0.75, 0.25, 0.25, 0.25]
    assert step.rate_in(1, dense=True) == 0.375
    assert ServerStep(rate=1.0, schedule="linear").rate_in(9) == 1.0


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_a_plain_step_is_the_tables_own_update(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs, mean = table(), table(), a_mean(rng)
    Averaging(ServerStep(), DENSE, {"items": ours}).apply(
        np.zeros(DENSE, np.float32), np.zeros(DENSE), {"items": mean}
    )
    theirs.update(mean.ids, mean.mean.astype(np.float32), mean.counts)
    assert_array_equal(whole(ours), whole(theirs))
    assert_array_equal(ours.pending()[0], theirs.pending()[0])
    assert ours.touched == theirs.touched == np.count_nonzero(mean.counts)


def test_without_a_mean_the_dense_part_and_other_tables_rest() -> None:
    tables = {name: table(name) for name in ("items", "kinds")}
    averaging = Averaging(ServerStep(optimizer="momentum"), DENSE, tables)
    dense = averaging.apply(np.zeros(DENSE, np.float32), np.ones(DENSE), {})
    rested = averaging.apply(dense, None, {"kinds": a_mean(np.random.default_rng(0))})
    assert_array_equal(rested, dense)
    assert_array_equal(averaging.dense_state["momentum"], np.ones(DENSE))
    assert tables["items"].touched == 0 and tables["kinds"].touched > 0


@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        ("plain", []),
        ("momentum", ["momentum"]),
        ("adaptive", ["momentum", "square"]),
        ("adam", ["momentum", "square", "steps"]),
    ],
)
def test_a_step_goes_on_from_its_stored_state(optimizer: Any, kinds: list[str]) -> None:
    rng = np.random.default_rng(3)
    rounds = [(rng.normal(size=DENSE), a_mean(rng)) for _ in range(4)]
    step = ServerStep(optimizer=optimizer, rate=0.5)
    start = np.zeros((ROWS, WIDTH), np.float32)

    def run(averaging: Averaging, dense: np.ndarray, part: slice) -> np.ndarray:
        for dense_mean, mean in rounds[part]:
            dense = averaging.apply(dense, dense_mean, {"items": mean})
        return dense

    straight = DenseTable.from_array("items", start)
    dense = run(Averaging(step, DENSE, {"items": straight}), np.zeros(DENSE, np.float32), slice(4))
    items = DenseTable.from_array("items", start)
    first = Averaging(step, DENSE, {"items": items})
    assert [state.name for state in first.state] == [f"items.{kind}" for kind in kinds]
    half = run(first, np.zeros(DENSE, np.float32), slice(2))
    second = Averaging(step, DENSE, {"items": items})
    second.dense_state = first.dense_state
    for old, new in zip(first.state, second.state, strict=True):
        new.restore(*old.pending())
    assert_array_equal(run(second, half, slice(2, 4)), dense)
    assert_array_equal(whole(items), whole(straight))


def test_a_state_of_another_optimiser_is_refused() -> None:
    averaging = Averaging(ServerStep(optimizer="momentum"), DENSE, {})
    for state in ({}, {"momentum": np.zeros(DENSE + 1, np.float32)}):
        with pytest.raises(ConfigError, match="stored state"):
            averaging.dense_state = state
    with pytest.raises(MisuseError, match="no table 'items'"):
        averaging.apply(
            np.zeros(DENSE, np.float32), None, {"items": a_mean(np.random.default_rng(0))}
        )


@pytest.mark.parametrize("where", ["rows", "dense"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3.4e38])
def test_a_step_that_leaves_the_floats_changes_nothing(bad: float, where: str) -> None:
    items = DenseTable.from_array("items", np.full((ROWS, WIDTH), 3e38, np.float32))
    averaging = Averaging(ServerStep(optimizer="momentum"), DENSE, {"items": items})
    mean = TableMean(
        np.array([2], np.uint64),
        np.full((1, WIDTH), bad if where == "rows" else -1e30),
        np.array([1]),
    )
    dense_mean = np.full(DENSE, bad if where == "dense" else 1.0)
    with pytest.raises(MisuseError, match="not finite"):
        averaging.apply(np.full(DENSE, 3e38, np.float32), dense_mean, {"items": mean})
    assert (whole(items) == np.float32(3e38)).all()
    assert not averaging.dense_state["momentum"].any() and averaging.state[0].touched == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": "adamw"},
        {"schedule": "cosine"},
        {"schedule_rounds": -1},
        {"dense_rate": -0.1},
        {"rate": 0.0},
        {"rate": float("inf")},
        {"epsilon": 0.0},
        {"decay": 0.0},
        {"shrinkage": -0.1},
        {"momentum": 1.0},
        {"beta2": -0.1},
        {"beta2": float("nan")},
    ],
)
def test_impossible_steps_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerStep(**wrong)
    assert caught.value.hint


def test_the_work_follows_the_rows_of_the_round_and_not_the_table() -> None:
    items = table(rows=2_000_000_000)
    averaging = Averaging(ServerStep(optimizer="adaptive"), 0, {"items": items})
    ids = np.array([5, 1_999_999_999], np.uint64)
    mean = TableMean(ids, np.ones((2, WIDTH)), np.array([1, 1]))
    averaging.apply(np.empty(0, np.float32), None, {"items": mean})
    assert items.touched == 2 and [state.touched for state in averaging.state] == [2, 2]
