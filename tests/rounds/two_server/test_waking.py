"""Roles of a round between two servers: put to bytes and woken, told things twice, and over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from rounds.population import trainer
from rounds.shops import Roles, two_server_plan
from tessera.errors import (
    MisuseError,
    RoundAborted,
    RoundIsOver,
)
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.plan import Plan
from tessera.protocols.machine import Outbound, Over, RoundOutcome
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound

GONE = ClientId(5)
WAYS = [{"domain": "whole", "write": "dpf"}, {"domain": "union"}]
FINISHED = {"done", "aborted"}


class Round:
    """A leader, a helper and their clients, in memory. `stir` may replace a role by its equal."""

    def __init__(
        self, settings: Plan, *, stir: Callable[[Round, Party], None] | None = None
    ) -> None:
        self.roles = Roles(settings)
        self.clients = [ClientId(c) for c in range(settings.cohort)]
        self.held = {c: self.roles.client(c) for c in self.clients}
        self.locals = {c: client._local for c, client in self.held.items()}
        self.at: dict[Party, Any] = {
            SERVER: self.roles.leader(),
            HELPER: self.roles.helper(),
            **self.held,
        }
        self.stir = stir
        self.heard: dict[Party, list[tuple[Party, bytes]]] = {party: [] for party in self.at}
        self.said: list[tuple[Party, Outbound]] = []
        self.gone: set[Party] = set()
        self.waited_for: set[tuple[str, Party]] = set()

    def woken(self, party: Party, snapshot: bytes, messages: dict[bytes, bytes]) -> Any:
        roles, number = self.roles, self.at[party].round_id
        if party == SERVER:
            return LeaderRound.wake(snapshot, messages, roles.leader_setup(number))
        if party == HELPER:
            return HelperRound.wake(snapshot, messages, roles.helper_setup(number))
        assert not isinstance(party, str)
        setup = roles.client_setup(party, number, local=self.locals[party])
        return TwoServerClientRound.wake(snapshot, messages, setup)

    def wake(self, party: Party) -> None:
        """Only bytes are left of a role; then it goes on."""
        role = self.at[party]
        snapshot, messages = role.snapshot(), dict(role.messages)
        self.at[party] = woken = self.woken(party, snapshot, messages)
        assert woken.snapshot() == snapshot and dict(woken.messages) == messages
        assert (woken.phase, woken.expected) == (role.phase, role.expected)

    def _after(self, party: Party) -> None:
        if self.stir is not None:
            self.stir(self, party)

    def _is_lost(self, sender: Party, message: Outbound) -> bool:
        return sender in self.gone or message.to in self.gone

    def _sends(self, sender: Party, out: list[Outbound]) -> None:
        self.said += [(sender, message) for message in out]
        queue = deque((sender, message) for message in out)
        while queue:
            source, message = queue.popleft()
            if self._is_lost(source, message):
                continue
            self.heard[message.to].append((source, message.data))
            answer = self.at[message.to].receive(source, message.data)
            self._after(message.to)
            self.said += [(message.to, each) for each in answer]
            queue.extend((message.to, each) for each in answer)

    def run(self, *, gone_in: str = "") -> Round:
        for c in self.clients:
            out = self.at[c].start()
            self._after(c)
            self._sends(c, out)
        self._sends(SERVER, self.at[SERVER].start())
        self._after(SERVER)
        while self.at[SERVER].phase not in FINISHED:
            self.waited_for |= {(self.at[SERVER].phase, p) for p in self.at[SERVER].expected}
            for c in self.clients:
                if (pending := self.at[c].pending) is not None:
                    if gone_in == "collect" and c == GONE:
                        self.gone.add(c)
                    out = self.at[c].supply(trainer(c)(pending))
                    self._after(c)
                    self._sends(c, out)
            out = self.at[SERVER].close_phase()
            self._after(SERVER)
            self._sends(SERVER, out)
        return self

    def part(self) -> None:
        """Everybody is told that the round is over."""
        self._sends(SERVER, self.at[SERVER].farewell())
        self.at[SERVER].over(RoundOutcome.DONE)


def says(ran: Round) -> list[tuple[Party, Party, str, int]]:
    """Who said what to whom: kinds and lengths, since boxes are sealed with fresh randomness."""
    return [(who, m.to, m.kind, len(m.data)) for who, m in ran.said]


def means(ran: Round) -> dict[str, bytes]:
    result = ran.at[SERVER].result
    tables = {n: t.ids.tobytes() + t.mean.tobytes() for n, t in result.tables.items()}
    return {"dense": result.dense.tobytes(), **tables}


@pytest.mark.parametrize("gone_in", ["", "collect"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_round_woken_after_every_message_goes_as_one_that_is_not(way, gone_in):
    settings = two_server_plan(way)
    whole = Round(settings).run(gone_in=gone_in)
    woken = Round(settings, stir=Round.wake).run(gone_in=gone_in)
    assert says(woken) == says(whole)
    assert means(woken) == means(whole)
    assert woken.at[SERVER].result.survivors == whole.at[SERVER].result.survivors
    assert len(whole.at[SERVER].result.survivors) == 8 - bool(gone_in)
    helper = woken.at[HELPER]
    assert helper.total is not None and helper.result.weight == woken.at[SERVER].result.weight
    for c, local in woken.locals.items():
        events = [entry.event.what for entry in local.ledger.entries]
        assert len(events) == len(set(events)) == 2 + settings.narrows, c  # charged once


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_to_be_trained_is_there_again_after_waking(way):
    ran = Round(two_server_plan(way))

    def compare(self: Round, party: Party) -> None:
        role = self.at[party]
        if isinstance(party, str) or role.pending is None:
            return
        before = role.pending
        self.wake(party)
        after = self.at[party].pending
        assert after is not before and after.dense.tobytes() == before.dense.tobytes()
        for name, part in before.tables.items():
            assert after.tables[name].ids.tolist() == part.ids.tolist()
            assert after.tables[name].values.tobytes() == part.values.tobytes()
            assert after.trained[name].tolist() == before.trained[name].tolist()
        seen.append(party)

    seen: list[Party] = []
    ran.stir = compare
    ran.run()
    assert len(seen) == 8


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_comes_again_changes_nothing(way):
    ran = Again(two_server_plan(way))
    ran.run()
    assert means(ran) == means(Round(two_server_plan(way)).run())
    assert ran.repeated > 50


class Again(Round):
    """Every party hears everything again, after every message."""

    repeated = 0

    def _after(self, party: Party) -> None:
        role = self.at[party]
        before = role.snapshot()
        for sender, data in self.heard[party]:
            role.receive(sender, data)
            self.repeated += 1
        assert role.snapshot() == before


def test_the_helper_answers_the_last_message_again_with_the_same_bytes():
    told = []

    class Asking(Round):
        def _after(self, party: Party) -> None:
            if party != HELPER:
                return
            sender, data = self.heard[HELPER][-1]
            first, second = (self.at[HELPER].receive(sender, data) for _ in range(2))
            assert [m.data for m in first] == [m.data for m in second]
            self.wake(HELPER)
            third = self.at[HELPER].receive(sender, data)
            assert [m.data for m in first] == [m.data for m in third], "the stored boxes"
            told.extend(m.kind for m in first)

    ran = Asking(two_server_plan({"domain": "whole"})).run()
    assert {"HandshakeNonce", "HandshakeConsent", "HelperAnswer", "Exclusions", "SumShare"} <= set(
        told
    )
    sent = {m.data for who, m in ran.said if who == HELPER}
    for sender, data in ran.heard[HELPER]:
        assert {m.data for m in ran.at[HELPER].receive(sender, data)} <= sent


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_whose_answer_is_due_is_named_the_helper_among_them(way):
    """A phase that waits for the helper does not look complete."""
    seen: dict[str, set[Party]] = {}

    class Watching(Round):
        def _after(self, party: Party) -> None:
            leader = self.at[SERVER]
            seen.setdefault(leader.phase, set()).update(leader.expected)

    ran = Watching(two_server_plan(way)).run()
    assert seen["handshake"] == seen["answer"] == seen["exclude"] == seen["open"] == {HELPER}
    assert seen["query"] == set(ran.clients) and set(ran.clients) <= seen["collect"]
    assert seen["done"] == set() and ran.at[HELPER].expected == set()


@pytest.mark.parametrize("phase", ["handshake", "answer", "exclude", "open"])
def test_a_helper_that_says_nothing_ends_the_round_when_its_time_is_up(phase):
    class Deaf(Round):
        def _is_lost(self, sender: Party, message: Outbound) -> bool:
            return message.to == HELPER and self.at[SERVER].phase == phase

    ran = Deaf(two_server_plan({"domain": "whole"}))
    with pytest.raises(RoundAborted) as caught:
        ran.run()
    # without the helper's halves nobody fetches anything, and too few report
    assert caught.value.phase == ("collect" if phase == "answer" else phase)
    assert ran.at[SERVER].phase == "aborted" and ran.at[SERVER].sums == ()
    ran._sends(SERVER, ran.at[SERVER].farewell())
    for party in (HELPER, *ran.clients):
        state = ran.at[party].state
        assert isinstance(state, Over) and state.outcome is RoundOutcome.ABORTED and state.reason


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_after_the_round_a_tombstone_is_left(way):
    ran = Round(two_server_plan(way)).run()
    secrets = [ran.at[c].state.writer.state.sent.data for c in ran.clients]
    ran.part()
    for party, role in ran.at.items():
        assert len(role.snapshot()) < 1000 and not role.messages
        assert role.expected == frozenset()
        ran.wake(party)
        if party != SERVER:
            sender, data = ran.heard[party][0]
            with pytest.raises(RoundIsOver):
                ran.at[party].receive(sender, data)
        assert not any(secret[40:72] in role.snapshot() for secret in secrets)
    assert {m.to for who, m in ran.said if m.kind == "RoundOver"} == {HELPER, *ran.clients}


def test_a_farewell_before_the_end_is_a_mistake():
    with pytest.raises(MisuseError, match="has not ended"):
        Roles(two_server_plan()).leader().farewell()
