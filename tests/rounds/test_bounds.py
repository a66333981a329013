"""Opened sums are looked at: what honest clients could not have summed to is not merged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rounds.population import DENSE, federation, plan, trainer
from tessera.ids import ClientId
from tessera.learning.tables.submodel import Submodel
from tessera.plan import UpdatePlan
from tessera.rounds import encode
from tessera.rounds.clipped_vector import SumBounds
from tessera.rounds.events import RoundAbort, RoundFinished

SCHEMES = ["fedavg", "submodel", "secure-fedavg", "secure-submodel", "two-server"]
BY_ROWS = ["submodel", "secure-submodel", "two-server"]
CHEAT = ClientId(2)


# --- the bounds themselves ------------------------------------------------------------------------


@st.composite
def honest_inputs(draw):
    """(top, max_count, values (clients, rows, width), counts (clients, rows))."""
    clients, rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    top, most = draw(st.integers(1, 50)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = rng.integers(0, most + 1, (clients, rows))
    values = rng.integers(-top, top + 1, (clients, rows, width)) * (counts > 0)[..., None]
    if draw(st.booleans()):  # everybody at the border
        counts[:], values[:] = most, top
    return top, most, values, counts


@given(honest_inputs())
def test_no_honest_sum_is_out_of_bounds(drawn):
    top, most, values, counts = drawn
    bounds = SumBounds(clients=len(values), top=top, max_count=most)
    assert bounds.rows_within(values.sum(axis=0), counts.sum(axis=0)).all()
    weight = int(counts[:, 0].sum())
    assert bounds.dense_within(values[:, 0].sum(axis=0), weight)


@given(honest_inputs(), st.data())
def test_one_step_beyond_is_out_of_bounds(drawn, data):
    top, most, values, counts = drawn
    clients = len(values)
    bounds = SumBounds(clients=clients, top=top, max_count=most)
    total, count = values.sum(axis=0), counts.sum(axis=0)
    row = data.draw(st.integers(0, len(count) - 1))
    wrong = data.draw(st.sampled_from(["negative", "many", "beyond", "without a count"]))
    if wrong == "negative":
        count[row] = -1
    elif wrong == "many":
        count[row] = clients * most + 1
    elif wrong == "beyond":
        total[row, 0] = -(min(clients, count[row]) * top + 1)
    else:
        count[row], total[row, 0] = 0, 1
    within = bounds.rows_within(total, count)
    assert not within[row]
    assert within.sum() == len(count) - 1


# --- a client that cheats -------------------------------------------------------------------------


def settings(scheme: str):
    more = {"min_group": 1, "insecure_small_groups": True}
    return replace(plan(scheme, privacy=more), update=UpdatePlan(clip=1.0, max_count=100))


def cheating(monkeypatch, *, rows=None, dense=None) -> None:
    """One client's words are changed after they were quantised, as a program of its own would."""
    honest_rows, honest_dense = encode.row_words, encode.dense_words
    of_the_cheat = trainer(CHEAT)(Submodel(np.zeros(DENSE), {}, {})).dense[0]

    def row_words(plan, table, update, trained, coins):
        part, clipped = honest_rows(plan, table, update, trained, coins)
        if rows is not None and update.dense[0] == of_the_cheat:
            rows(plan, part.words)
        return part, clipped

    def dense_words(plan, update, values, coins):
        words, weight, clipped = honest_dense(plan, update, values, coins)
        if dense is not None and update.dense[0] == of_the_cheat:
            dense(plan, words, weight)
        return words, weight, clipped

    monkeypatch.setattr(encode, "row_words", row_words)
    monkeypatch.setattr(encode, "dense_words", dense_words)


def without_the_rule(monkeypatch) -> None:
    monkeypatch.setattr(SumBounds, "rows_within", lambda self, v, c: np.ones(len(c), dtype=bool))
    monkeypatch.setattr(SumBounds, "dense_within", lambda self, values, weight: True)


def many_clips(settings, words) -> None:
    """Seven clips where a client has one; the ring of eight clients has no room for more."""
    words[:, 0] = settings.ring.from_ints(np.full(len(words), 7 * settings.quantizer.top))


def negative_count(settings, words) -> None:
    many_clips(settings, words)
    words[:, -1] = settings.ring.from_ints(np.full(len(words), -1))


def negative_weight(settings, words, weight) -> None:
    words[:1] = settings.ring.from_ints(np.array([7 * settings.quantizer.top]))
    weight[:] = settings.ring.from_ints(np.array([-9000]))


def moved(fed) -> tuple[list, dict]:
    before = {n: t.values(np.arange(t.size, dtype=np.uint64)) for n, t in fed.tables.items()}
    events = list(fed.round())
    after = {n: t.values(np.arange(t.size, dtype=np.uint64)) for n, t in fed.tables.items()}
    return events, {n: np.abs(after[n] - before[n]).max() for n in before}


@pytest.mark.parametrize("scheme", BY_ROWS)
@pytest.mark.parametrize("change", [negative_count, many_clips])
@pytest.mark.parametrize("real", ["every", "none"])
def test_a_row_that_nobody_honest_summed_to_is_not_merged(scheme, change, real, monkeypatch):
    chosen = settings(scheme).with_simulation(crypto=real)
    cheating(monkeypatch, rows=change)
    events, by_table = moved(federation(chosen))
    finished = events[-1]
    assert isinstance(finished, RoundFinished)
    assert 0 < finished.rows_out_of_bounds < finished.rows_opened
    assert max(by_table.values()) <= 1.0 + 1e-6, "a row moves by one clip at most"
    without_the_rule(monkeypatch)
    events, by_table = moved(federation(chosen))
    assert events[-1].rows_out_of_bounds == 0
    assert max(by_table.values()) > 2.0, "the attack works where the rule is off"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_dense_part_that_nobody_honest_summed_to_is_not_merged(scheme, monkeypatch):
    cheating(monkeypatch, dense=negative_weight)
    fed = federation(settings(scheme))
    before = fed.dense.copy()
    events, by_table = moved(fed)
    abort = events[-1]
    assert isinstance(abort, RoundAbort) and abort.phase == "merge"
    assert "not one of honest clients" in abort.reason
    assert np.array_equal(fed.dense, before) and not any(by_table.values())
    assert isinstance(list(fed.round())[-1], RoundAbort)  # and again: the federation goes on
    without_the_rule(monkeypatch)
    fed = federation(settings(scheme))
    assert isinstance(list(fed.round())[-1], RoundFinished)
    assert np.abs(fed.dense - before).max() > 2.0, "the attack works where the rule is off"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_an_honest_round_nothing_is_out_of_bounds(scheme):
    finished = list(federation(settings(scheme)).round())[-1]
    assert isinstance(finished, RoundFinished) and finished.rows_out_of_bounds == 0
