"""What is sent is the largest, and with what is kept it is the update, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ConfigError, MisuseError
from tessera.learning.compression import (
    LARGEST,
    ROWS,
    Cut,
    Residual,
    TopBy,
    cuts,
    selected,
    sent_of,
    shapes_of,
    shapes_text,
)

UPDATES = st.lists(st.integers(-40, 40), min_size=12, max_size=12)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Cut, ...]:
    """One or two cuts of a vector of twelve, which need not cover it."""
    width = draw(st.sampled_from([1, 2, 3]))
    rows = draw(st.integers(1, 6 // width))
    first = Cut(start=0, rows=rows, width=width, most=draw(st.integers(1, rows)))
    start = draw(st.integers(first.stop, 10))
    second = Cut(start=start, rows=12 - start, width=1, most=draw(st.integers(1, 12 - start)))
    return (first, second) if draw(st.booleans()) else (first,)


@given(UPDATES, parts())
def test_nothing_that_is_not_sent_is_larger_than_what_is(update, cut_parts):
    values = np.array(update)
    sent = sent_of(values, cut_parts)
    assert ((sent == values) | (sent == 0)).all()
    outside = np.ones(12, dtype=bool)
    for cut in cut_parts:
        outside[cut.start : cut.stop] = False
        size = np.abs(cut.of(values)).sum(axis=1)
        chosen = selected(values, cut)
        assert len(chosen) == min(cut.most, np.count_nonzero(size))
        assert (np.diff(chosen) > 0).all() and size[chosen].all()
        left = np.setdiff1d(np.arange(cut.rows), chosen)
        if len(chosen) and len(left):
            assert size[chosen].min() >= size[left].max()
        assert np.array_equal(np.flatnonzero(cut.of(sent).any(axis=1)), chosen)
    assert np.array_equal(sent[outside], values[outside])  # what is not cut is sent whole


def test_of_equal_changes_the_first_are_sent():
    assert selected(np.array([1, -3, 3, 3, 0]), Cut(start=0, rows=5, width=1, most=2)).tolist() == [
        1,
        2,
    ]


@given(st.lists(st.tuples(UPDATES, st.sampled_from(["done", "out", "again", "silent"]))), parts())
def test_all_that_was_ever_trained_has_counted_or_waits(rounds, cut_parts):
    """Over any run of rounds that count, fail, are repeated after a restart, or say it late."""
    residual, trained, counted = Residual.nothing(12), np.zeros(12, int), np.zeros(12, int)
    lost = None  # what a round has sent that did not say whether it counted
    for number, (update, fate) in enumerate(rounds):
        values = np.array(update)
        if lost is not None:
            with pytest.raises(MisuseError, match="not settled"):
                residual.due(number, values)
            residual.settle(number - 1, counted=True)  # heard before the next round begins
            counted, lost = counted + lost, None
        for _ in range(2 if fate == "again" else 1):  # the same round once more, after a restart
            due = residual.due(number, values)
            sent = sent_of(due, cut_parts)
            residual.offered(number, due, sent)
        trained += values
        if fate == "silent":
            lost = sent
            continue
        residual.settle(number, counted=fate != "out")
        residual.settle(number, counted=True)  # said again: no matter
        if fate != "out":
            counted += sent
    if lost is not None:
        residual.settle(len(rounds) - 1, counted=True)
        counted += lost
    assert np.array_equal(counted + residual.kept, trained)
    assert not residual.dropped


def test_what_a_store_cannot_have_held_is_dropped_and_counted():
    values = np.array([5, np.nan, np.inf, -3, 0.5, LARGEST, -LARGEST + 1], dtype=np.float32)
    residual = Residual.stored(values)
    assert residual.kept.tolist() == [5, 0, 0, -3, 0, 0, -LARGEST + 1]
    assert residual.dropped == 4
    due = residual.due(3, np.full(7, -5))
    residual.offered(3, due, np.zeros(7, dtype=np.int64))
    residual.settle(3, counted=False)
    assert residual.kept[-1] == 0 and residual.dropped == 5  # it has grown beyond what is kept


def test_elements_or_rows_of_large_tensors_are_selected():
    shapes = [(ROWS, 4), (7,), (ROWS - 1, 3), (2 * ROWS, 2, 3)]
    dense = sum(int(np.prod(s)) for s in shapes)
    assert cuts(dense, shapes, 1.0, TopBy.ELEMENT) == ()
    (whole,) = cuts(dense, shapes, 0.07, TopBy.ELEMENT)
    assert (whole.rows, whole.width, whole.most) == (dense, 1, int(np.ceil(0.07 * dense)))
    first, second = cuts(dense, shapes, 0.01, TopBy.ROW)
    assert (first.start, first.rows, first.width, first.most) == (0, ROWS, 4, 10)
    assert (second.rows, second.width, second.stop) == (2 * ROWS, 6, dense)
    assert cuts(3, [], 0.01, TopBy.ELEMENT)[0].most == 1


def test_shapes_are_a_line_of_a_plan():
    shapes = ((8678, 100), (100, 100, 3), (6,))
    assert shapes_of(shapes_text(shapes)) == shapes
    assert shapes_of("") == ()
    for wrong in ("3x0", "a", "3x", "-3", "3 4.5"):
        with pytest.raises(ConfigError, match="shapes"):
            shapes_of(wrong)
