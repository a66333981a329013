"""Training ends when the validation part has had enough, and the test part has no say in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from engines import toy
from tessera.api import simulate
from tessera.data.examples import ClientData, Examples
from tessera.data.validation import with_validation
from tessera.engines.early_stopping import EarlyStopping
from tessera.engines.runs import RunFolder
from tessera.errors import ConfigError
from tessera.rounds.events import RoundFinished


def test_the_last_tenth_of_every_client_is_held_out():
    data = ClientData(
        name="x",
        train=Examples({"at": np.arange(34)}),
        offsets=np.array([0, 20, 29, 34]),
        test=Examples({"at": np.arange(3)}),
        test_offsets=np.array([0, 1, 2, 3]),
        sizes={},
    )
    fewer, held = with_validation(data)
    assert_array_equal(held.test["at"], [18, 19])
    assert [len(held.test_of(client)) for client in range(3)] == [2, 0, 0]
    assert fewer.offsets.tolist() == [0, 18, 27, 32]
    assert_array_equal(fewer.train["at"], np.delete(np.arange(34), [18, 19]))
    assert fewer.test is data.test


@pytest.mark.parametrize("lower", [False, True])
def test_patience_by_hand(lower):
    sign = -1.0 if lower else 1.0
    stopping = EarlyStopping(2, lower, toy.task().data)
    for value, ends in ((0.5, False), (0.4, False), (0.6, False), (0.6, False), (0.1, True)):
        stopping.seen(sign * value)
        assert bool(stopping.reason) == ends
    again = EarlyStopping(2, lower, toy.task().data)
    again.go_on_from([None, sign * 0.5, None, sign * 0.4, sign * 0.6, sign * 0.6])
    assert not again.reason
    again.seen(sign * 0.1)
    assert again.reason == stopping.reason


def lines(folder):
    return [(r["round_id"], r["metric"], r["validation"]) for r in RunFolder.load(folder).rounds()]


@pytest.mark.parametrize("scheme", ["submodel", "central"])
def test_a_run_ends_early_and_a_resumed_one_at_the_same_round(tmp_path, scheme, monkeypatch):
    """The figure falls after the second test, whatever is trained."""
    falling = iter(np.linspace(0.9, 0.1, 40))
    monkeypatch.setattr(
        EarlyStopping, "after", lambda self, event, measure: _scripted(self, event, falling)
    )
    plan = toy.plan(scheme, simulation={"patience": 2, "evaluate_every": 1})
    run = simulate(toy.task(), plan, 10, out=tmp_path / "a", progress=False)
    assert len(lines(run.folder)) == 3
    (ended,) = [e for e in RunFolder.load(run.folder).events() if e["event"] == "TrainingEnded"]
    assert "validation part" in ended["reason"]
    # Stopped after two rounds and gone on: the tests before count.
    falling = iter(np.linspace(0.9, 0.1, 40))
    half = simulate(toy.task(), plan, 2, out=tmp_path / "b", progress=False)
    assert len(lines(half.folder)) == 2
    simulate(toy.task(), plan, 10, out=tmp_path / "b", resume=True, progress=False)
    assert len(lines(half.folder)) == 3


def _scripted(stopping, event, values):
    if not isinstance(event, RoundFinished) or event.metric is None:
        return event
    value = float(next(values))
    stopping.seen(value)

    return replace(event, validation=value)


def test_the_validation_figure_is_that_of_the_held_out_part(tmp_path):
    plan = toy.plan("submodel", simulation={"patience": 50, "evaluate_every": 2, "rounds": 4})
    run = simulate(toy.task(), plan, 4, out=tmp_path / "a", progress=False)
    found = lines(run.folder)
    assert [round_id for round_id, metric, _ in found if metric is not None] == [1, 3]
    for _, metric, validation in found:
        assert (metric is None) == (validation is None)
        assert metric is None or metric != validation


def test_without_ten_examples_there_is_nothing_to_hold_out():
    data = toy.task().data
    few = ClientData(
        name="few",
        train=data.train.take(slice(0, 8)),
        offsets=np.array([0, 4, 8]),
        test=data.test.take(slice(0, 2)),
        test_offsets=np.array([0, 1, 2]),
        sizes=data.sizes,
        category_of=data.category_of,
    )

    with pytest.raises(ConfigError, match="patience = 3"):
        EarlyStopping.of(
            replace(toy.task(), data=few), toy.plan("submodel", simulation={"patience": 3})
        )
