"""Epochs from a server's view alone: what the replay opens is what the server opened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from group_training import Training, grouped
from tessera.audit.epochs import EpochReplay
from tessera.audit.factors import OpenedFactors
from tessera.audit.record import decoded
from tessera.audit.round_view import RoundView
from tessera.audit.values import ValueAttacks
from tessera.ids import ClientId
from tessera.protocols.machine import Outbound
from tessera.simulation.views import ViewEntry

SIZE = 4


class Recorded(Training):
    """A group whose server's view is recorded, and what the server opened."""

    def __init__(self) -> None:
        self.seen: list[ViewEntry] = []
        self.totals: list[Any] = []
        super().__init__(SIZE)

    def say(self, client: ClientId, out: list[Outbound]) -> list[Outbound]:
        self.seen += [ViewEntry(0.0, "received", client, m.kind, m.data) for m in out]
        answers = super().say(client, out)
        self.seen += [ViewEntry(0.0, "sent", client, m.kind, m.data) for m in answers]
        return answers

    def take(self) -> Any:
        self.totals.append(self.server.epochs.vectors.total.copy())
        return super().take()


def views_of(run: Recorded) -> list[RoundView]:
    return list(EpochReplay(run.plan).take(decoded(run.seen)))


@pytest.fixture
def run() -> Recorded:
    run = Recorded()
    run.join()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        run.epoch([ClientId(c) for c in order])
    return run


def test_a_replay_opens_what_the_server_opened(run: Recorded) -> None:
    views = views_of(run)
    assert [int(view.round_id) for view in views] == [0, 1]  # of a union there is no view
    for view, total in zip(views, run.totals[1:], strict=True):
        parts = [view.sums[-1].dense, *(t.words.ravel() for t in view.sums[-1].tables.values())]
        assert np.array_equal(np.concatenate(parts), total)
        assert view.finished and view.met == view.survivors == view.in_union
        held = [rows for each in run.setups.values() for rows in each.local.real["goods"]]
        assert np.array_equal(view.union, np.unique(held))
        assert np.array_equal(view.counts > 0, np.ones(len(view.union), bool))


def test_who_came_when_is_in_the_view(run: Recorded) -> None:
    first, second = views_of(run)
    assert list(first.downloads) == [3, 1, 0, 2] and list(second.downloads) == [2, 3, 1, 0]


def test_an_epoch_that_somebody_has_not_delivered_opens_nothing(run: Recorded) -> None:
    for client in (0, 1, 2):
        run.visit(ClientId(client))
    assert len(views_of(run)) == 2


def test_a_vector_counts_once(run: Recorded) -> None:
    for client in (0, 1, 1, 2):
        run.visit(ClientId(client))
        run.say(ClientId(client), run.clients[ClientId(client)].resend())
    run.visit(ClientId(3))
    run.totals.append(run.server.epochs.vectors.total)
    last = views_of(run)[-1].sums[-1]
    assert np.array_equal(last.dense, run.totals[-1][: len(last.dense)])


# --- who came last --------------------------------------------------------------------------------


def waited_for(last: ClientId, *, behind: bool) -> float:
    """Two sums of a group of ten, each row with one holder; of one that is behind factors stay."""
    rng, members, size = np.random.default_rng(1), tuple(map(ClientId, range(10))), 300
    rows, holder = np.arange(size, dtype=np.uint64), rng.permutation(size) % len(members)
    truth = {c: rows[holder == int(c)] for c in members}
    attacks = ValueAttacks(grouped(len(members)).group_plan, truth)
    factors = rng.normal(size=(len(members), 4))
    sure, once = np.ones(size), np.ones(size, dtype=np.int64)
    for number in range(2):
        seen = factors[holder] + rng.normal(scale=0.01, size=(size, 4))
        attacks.add(OpenedFactors(number, members, rows, seen, sure, once), last=last)
        moved = factors + rng.normal(scale=0.2, size=factors.shape)
        factors = np.where((np.arange(len(members)) == last)[:, None] & behind, factors, moved)
    return attacks.waited().measured


def test_rows_of_who_came_last_are_found_if_it_is_behind() -> None:
    everybody = list(map(ClientId, range(10)))
    assert np.mean([waited_for(c, behind=True) for c in everybody]) > 0.95
    assert np.mean([waited_for(c, behind=False) for c in everybody]) == pytest.approx(0.1)
