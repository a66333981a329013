"""Workers of a server: many threads give what one gives."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from rounds.population import federation
from rounds.shops import finished, model_of, two_server_plan
from tessera.errors import ConfigError
from tessera.protocols.two_server.reports import SingleWorker
from tessera.simulation.federation import Federation
from tessera.simulation.two_server import Threads


def test_calls_are_made_at_once():
    met = threading.Barrier(3, timeout=60.0)  # nobody gets past it alone
    names = []

    def call() -> None:
        met.wait()
        names.append(threading.get_ident())

    Threads(3).run([call] * 3)
    assert len(set(names)) == 3


def test_more_calls_than_threads_are_all_made():
    done = []
    Threads(2).run([lambda i=i: done.append(i) for i in range(9)])
    assert sorted(done) == list(range(9))
    Threads(2).run([])


def test_what_a_call_raises_is_raised_when_all_are_done():
    done = []

    def fail() -> None:
        raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        Threads(2).run([fail, lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]


def test_a_server_has_as_many_hands_as_processors_unless_told_otherwise():
    assert Threads().count == os.cpu_count() and Threads(5).count == 5
    with pytest.raises(ConfigError, match="0 threads"):
        Threads(0)


class Watched(Threads):
    """How many calls came at once."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.calls: list[int] = []

    def run(self, calls) -> None:
        self.calls.append(len(calls))
        super().run(calls)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_two_servers_with_many_hands_train_the_same_model(count):
    settings = two_server_plan({"write": "dpf", "stash": 1})
    one = federation(settings)
    workers = Watched(count)
    many = Federation(
        settings,
        one.participants,
        trainer=one._trainer,
        dense=np.zeros_like(one.dense),
        tables=federation(settings).tables,
        derived=one.model.derived,
        entropy=one._entropy,
        workers=workers,
    )
    finished(one, 1)
    for member in one.participants.values():
        member.local = replace(member.local, last_round=None)
    finished(many, 1)
    assert model_of(one) == model_of(many)
    reading, writing = workers.calls[:2], workers.calls[2:]
    assert all(1 < calls <= count for calls in reading)  # two servers, by clients
    assert writing == [count] * 4  # two servers and two tables, by trees


def test_simulated_servers_have_one_hand():
    fed = federation(two_server_plan({"write": "dpf"}))
    finished(fed, 1)
    assert isinstance(fed.last.state.write.setup.workers, SingleWorker)
