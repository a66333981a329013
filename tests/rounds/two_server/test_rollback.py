"""A leader that lies to a helper which was woken from an older state, or after the sum is shown."""

from __future__ import annotations

from typing import Any

import pytest

from rounds.shops import two_server_plan
from rounds.two_server.test_waking import Round
from tessera.errors import RoundIsOver, ServerFault
from tessera.ids import HELPER, SERVER, Party
from tessera.protocols import wire
from tessera.protocols.machine import Outbound
from tessera.protocols.retrieval.messages import AnswersDue
from tessera.protocols.scatter import sums
from tessera.protocols.scatter.helper import CoinTossed, HoldingReports, ListFixed
from tessera.protocols.scatter.messages import (
    CheckCoin,
    CheckSums,
    Closing,
    Exclusions,
    IncludedList,
    SumShare,
)
from tessera.protocols.two_server.messages import HandshakeOffer
from tessera.protocols.two_server.replay_guard import MemoryReplayGuard
from tessera.rounds.two_server.helper import ServingReports, SumShown

WAY = {"domain": "whole", "write": "dpf"}


class Remembered(Round):
    """A round of which every state of the helper's is kept."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings, stir=Remembered.keep)
        self.states: list[tuple[bytes, dict[bytes, bytes]]] = []

    def keep(self, party: Party) -> None:
        if party == HELPER:
            helper = self.at[HELPER]
            self.states.append((helper.snapshot(), dict(helper.messages)))

    def older(self) -> list[Any]:
        """The helper as it was after each message that it received."""
        return [self.woken(HELPER, *state) for state in self.states]

    def share_of(self, helper: Any) -> SumShare | None:
        """What a leader gets that leads this helper on, over the reports that it holds now."""
        write, round_id = helper.state.write, helper.round_id
        out: list[Outbound] = []
        if isinstance(write.state, HoldingReports):
            reports = {c: held.digest for c, held in sorted(write.state.held.items())}
            out = self._ask(helper, Closing(round_id=round_id, reports=reports))
            assert {type(wire.decode(m.data)) for m in out} <= {CheckCoin, Exclusions}
        if isinstance(write.state, CoinTossed):
            # Its own sums, which the leader would have to compute from its half.
            rows = write._row_shares(write.state.held, write.state.coin)
            out = self._ask(helper, CheckSums(round_id=round_id, sums=rows.checks))
        if not isinstance(write.state, ListFixed):
            return None
        reports = {c: held.digest for c, held in sorted(write.state.held.items())}
        if len(reports) < write.params.min_cohort:
            return None
        statement = sums.list_statement(write.header, reports)
        signature = self.at[SERVER]._roles.key.sign(statement)
        (answer,) = self._ask(
            helper, IncludedList(round_id=round_id, reports=reports, signature=signature)
        )
        share = wire.decode(answer.data)
        assert isinstance(share, SumShare)
        return share

    def _ask(self, helper: Any, message: Any) -> list[Outbound]:
        out: list[Outbound] = helper.receive(SERVER, wire.encode(message))
        return out


def shares(ran: Remembered) -> set[bytes]:
    """All shares that a leader gets from the helper as it was, at any time."""
    found = set()
    for helper in ran.older():
        if isinstance(helper.state, ServingReports):
            try:
                share = ran.share_of(helper)
            except ServerFault as fault:
                assert fault.reason == "requested a second sum in one round"
                continue
            if share is not None:
                found.add(wire.encode(share))
    return found


def test_a_helper_that_was_set_back_releases_no_second_share(monkeypatch):
    """Two shares over lists that differ by one client would open that client's report."""
    ran = Remembered(two_server_plan(WAY)).run()
    released = {m.data for who, m in ran.said if who == HELPER and m.kind == "SumShare"}
    assert len(released) == 1 and shares(ran) == released

    monkeypatch.setattr(MemoryReplayGuard, "release", lambda *given: True)  # without the rule
    assert len(shares(ran)) > 1


@pytest.mark.parametrize("lie", ["another offer", "other answers", "another list", "no message"])
def test_after_the_sum_a_lie_leaves_the_helper_as_it_is_and_it_wakes(lie):
    ran = Round(two_server_plan(WAY)).run()
    helper = ran.at[HELPER]
    assert isinstance(helper.state, SumShown)
    round_id, before = helper.round_id, helper.snapshot()
    offer = next(
        message
        for _, data in ran.heard[HELPER]
        if isinstance(message := wire.decode(data), HandshakeOffer)
    )
    lies = {
        "another offer": HandshakeOffer(
            round_id=round_id,
            context=offer.context,
            commitment=bytes(32),
            tables=offer.tables,
            dense=offer.dense,
        ),
        "other answers": AnswersDue(round_id=round_id, queries={}),
        "another list": Closing(round_id=round_id, reports={}),
    }
    data = wire.encode(lies[lie]) if lie in lies else b"no message"
    with pytest.raises(ServerFault):
        helper.receive(SERVER, data)
    assert helper.snapshot() == before
    ran.wake(HELPER)
    assert ran.at[HELPER].result.weight == ran.at[SERVER].result.weight
    said = {m.data for who, m in ran.said if who == HELPER}
    for sender, heard in ran.heard[HELPER]:
        assert {m.data for m in ran.at[HELPER].receive(sender, heard)} <= said


def test_a_helper_that_was_set_back_is_over_when_it_is_told_so():
    ran = Remembered(two_server_plan(WAY)).run()
    (farewell,) = [m for m in ran.at[SERVER].farewell() if m.to == HELPER]
    for helper in ran.older():
        assert helper.receive(SERVER, farewell.data) == []
        assert len(helper.snapshot()) < 1000 and not helper.messages
        with pytest.raises(RoundIsOver):
            helper.receive(SERVER, ran.heard[HELPER][0][1])
