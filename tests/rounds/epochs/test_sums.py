"""Sums of a group in training are exact, whoever comes when and whoever is killed where.

The oracle adds up the words that members computed, in the clear. Members come in any order; both
ends are killed before they have stored, and between storing and sending; messages come twice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from group_training import Training, grouped
from tessera.ids import SERVER, ClientId
from tessera.plan import GroupsPlan
from tessera.protocols.epochs.member import GroupMember

EPOCHS = 5  # two periods: union, two updates, union, update


class Oracle:
    """The words of every member and epoch, and their sums."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.words: dict[int, dict[ClientId, np.ndarray]] = defaultdict(dict)
        deliver = GroupMember.deliver

        def noted(member: GroupMember, words: np.ndarray, **more: Any) -> Any:
            header = member.due
            assert header is not None
            known = self.words[header.epoch].setdefault(member.setup.party, words)
            assert np.array_equal(known, words), "other words of one epoch"
            return deliver(member, words, **more)

        patch.setattr(GroupMember, "deliver", noted)

    def check(self, run: Training) -> None:
        """The sum that waits at the server is that of all members' words."""
        header, total = run.server.epochs.at.open.header, run.server.epochs.vectors.total
        words = self.words[header.epoch]
        assert words.keys() == set(run.group.members)
        expected = header.ring.zeros(header.length)
        for each in words.values():
            header.ring.iadd(expected, each)
        assert np.array_equal(total, expected)


def group(size: int) -> Training:
    return Training(size, replace(grouped(size), groups=GroupsPlan(size=size, period=2)))


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.campaign)])
def test_a_sum_is_exact_for_every_order_of_arrival(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for order in permutations(range(size)):
        with monkeypatch.context() as patched:
            oracle, run = Oracle(patched), group(size)
            run.join()
            for number in range(EPOCHS):
                turn = [ClientId(c) for c in np.roll(order, number).tolist()]
                for client in turn:
                    assert not run.server.full
                    run.visit(client)
                oracle.check(run)
                run.take()


def script(seed: int, patch: pytest.MonkeyPatch) -> int:
    """A random life of a group; how many kills there were."""
    rng, kills = np.random.default_rng(seed), 0
    oracle, run = Oracle(patch), group(int(rng.integers(2, 5)))
    members = list(run.group.members)
    sent: dict[tuple[ClientId, int], set[bytes]] = defaultdict(set)

    def killed(party: Any, probability: float, back: Any = None) -> bool:
        """Whether somebody is killed now; with `back`, before it has stored what came since."""
        nonlocal kills
        if rng.random() >= probability:
            return False
        if back is not None:
            run.stored[party], local = back
            if local is not None:
                run.setups[party] = replace(run.setups[party], local=local)
        run.kill(party)
        kills += 1
        return True

    def disk(party: Any) -> tuple[Any, Any]:
        return run.stored[party], None if party == SERVER else run.held(party)

    def says(client: ClientId, out: list[Any]) -> None:
        """It is sent, and the server killed before it has stored it, or afterwards."""
        for message in out:
            sent[client, run.clients[client].delivered].add(message.data)
        before = disk(SERVER)
        run.say(client, out)
        killed(SERVER, 0.1, before) or killed(SERVER, 0.1)

    run.join()
    for _ in range(EPOCHS):
        for _ in range(400):
            if run.server.full:
                break
            client = members[int(rng.integers(len(members)))]
            answers, before = run.ask(client), disk(client)
            if killed(client, 0.1):
                continue
            out = run.hear(client, answers)
            if killed(client, 0.1, before) or killed(client, 0.1):
                continue
            says(client, out)
            if run.clients[client].pending is not None:
                before = disk(client)
                out = run.train(client)
                if killed(client, 0.15, before) or killed(client, 0.15):
                    continue
                says(client, out)
            if rng.random() < 0.3:
                says(client, run.clients[client].resend())
        assert run.server.full, "the group never came to an end"
        oracle.check(run)
        killed(SERVER, 0.5)
        oracle.check(run)
        run.take()
    assert all(len(each) == 1 for each in sent.values()), "a second vector of one epoch"
    return kills


def scripts(seeds: range, patch: pytest.MonkeyPatch) -> int:
    kills = 0
    for seed in seeds:
        with patch.context() as patched:
            kills += script(seed, patched)
    return kills


def test_sums_are_exact_with_kills_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scripts(range(12), monkeypatch) > 100


@pytest.mark.campaign
def test_sums_are_exact_in_200_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = scripts(range(12, 212), monkeypatch)
    print(f"200 scripts of {EPOCHS} epochs, {kills} kills: every sum exact")
