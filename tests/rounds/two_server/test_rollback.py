"""A leader that lies to a helper which was woken from an older state, or after the sum is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rounds.population import trainer
from rounds.shops import two_server_plan
from rounds.two_server.test_waking import Round
from tessera import wire
from tessera.errors import MisuseError, RoundIsOver, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.learning.tables.table import LazyTable
from tessera.protocols.machine import Outbound
from tessera.protocols.two_server.collector import MemoryReplayGuard
from tessera.protocols.two_server.messages import (
    AnswersDue,
    CheckCoin,
    CheckSums,
    Closing,
    Exclusions,
    HandshakeOffer,
    IncludedList,
    Purpose,
    Query,
    SumShare,
    WriteReport,
)
from tessera.protocols.two_server.read import client as retrieval_client
from tessera.protocols.two_server.read import server as retrieval_server
from tessera.protocols.two_server.reports import layouts_of
from tessera.protocols.two_server.write import client as scatter_client
from tessera.protocols.two_server.write import sums
from tessera.protocols.two_server.write.helper import CoinTossed, HoldingReports, ListFixed
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
        signature = self.at[SERVER]._key.sign(statement)
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


# --- a client that was set back -------------------------------------------------------------------


def bins_shown(first: Any, second: Any, forests: tuple[Any, ...]) -> list[int] | None:
    """The trees in which two reports of one client differ, where both are under the same keys."""
    shown = []
    for one, two, forest in zip(first.public, second.public, forests, strict=True):
        steps = forest.public_bytes - forest.finals_bytes
        if one[:steps] != two[:steps]:
            return None
        values, count = forest.values, forest.trees.count
        words = [  # packed bit by bit: two trees may share a byte
            values.group.unpack(
                part[steps : forest.public_bytes], count * values.per_leaf * values.words
            ).reshape(count, -1)
            for part in (one, two)
        ]
        shown += np.flatnonzero((words[0] != words[1]).any(axis=1)).tolist()
    return shown


class Trained:
    """Client 0 of a round, which goes on from before its training as often as one likes."""

    ME = ClientId(0)

    def __init__(self, settings: Any) -> None:
        self.before: tuple[bytes, dict[bytes, bytes]] | None = None
        self.ran = Round(settings, stir=self._keep).run()

    def _keep(self, ran: Round, party: Party) -> None:
        if party == self.ME and ran.at[party].pending is not None:
            self.before = (ran.at[party].snapshot(), dict(ran.at[party].messages))

    def report(self, factor: float) -> WriteReport:
        """Of an update whose rows are so many times as large."""
        assert self.before is not None
        client = self.ran.woken(self.ME, *self.before)
        update = trainer(self.ME)(client.pending)
        tables = {
            name: replace(rows, values=rows.values * factor) for name, rows in update.tables.items()
        }
        (out,) = client.supply(replace(update, tables=tables))
        found = wire.decode(out.data)
        assert isinstance(found, WriteReport)
        return found

    @property
    def forests(self) -> tuple[Any, ...]:
        write = self.ran.at[HELPER].state.write
        return layouts_of(write.params, write.header).forests(Purpose.WRITE)

    @property
    def rows(self) -> int:
        assert self.before is not None
        trained = self.ran.woken(self.ME, *self.before).pending.trained
        return sum(len(rows) for rows in trained.values())


def test_a_client_that_was_set_back_and_trained_again_shows_no_difference(monkeypatch):
    """Two reports under the same keys differ by two updates, in the bins of its rows alone."""
    settings = two_server_plan({**WAY, "verify": False})
    seen = Trained(settings)
    first, again, other = (seen.report(factor) for factor in (1.0, 1.0, 0.5))
    assert (first.report_id, first.public) == (again.report_id, again.public)
    assert first.report_id != other.report_id and not set(first.seeds) & set(other.seeds)
    assert bins_shown(first, other, seen.forests) is None

    monkeypatch.setattr(scatter_client, "content_digest", lambda *parts: b"")  # without the rule
    seen = Trained(settings)
    shown = bins_shown(seen.report(1.0), seen.report(0.5), seen.forests)
    assert shown is not None and len(shown) == seen.rows > 0


def test_a_client_that_was_set_back_and_holds_another_row_asks_under_other_keys(monkeypatch):
    """Two queries under the same keys would differ in the bins of the rows that came or went."""

    def queries() -> list[Query]:
        ran = Round(two_server_plan(WAY))
        me, found = Trained.ME, []
        out = ran.at[me].start()
        assert out == []
        before = ran.at[me].snapshot(), dict(ran.at[me].messages)
        header = ran.roles.opening(ran.at[SERVER], ran.at[HELPER])
        for held in ([1, 5], [1, 5], [1, 7]):
            ran.locals[me].real = {"goods": np.array(held, dtype=np.uint64)}
            (sent,) = ran.woken(me, *before).receive(SERVER, header)
            found.append(wire.decode(sent.data))
        return found

    first, again, other = queries()
    assert (first.report_id, first.seeds) == (again.report_id, again.seeds)
    assert first.report_id != other.report_id and not set(first.seeds) & set(other.seeds)

    monkeypatch.setattr(retrieval_client, "content_digest", lambda *parts: b"")  # without the rule
    first, _, other = queries()
    assert first.seeds == other.seeds and first.public != other.public


# --- a server that wakes over another model -------------------------------------------------------


@pytest.mark.parametrize("who", [SERVER, HELPER])
def test_a_server_that_wakes_over_another_model_answers_nobody(who, monkeypatch):
    """Else every client finds rows that fail their check, and leaves."""

    def stepped(ran: Round, party: Party) -> None:
        role = ran.at[party]
        if party == who and role.phase == "query" and "moved" not in vars(ran):
            ran.moved = True
            given = ran.roles.model()
            tables = {
                name: LazyTable(replace(t.spec, seed=9)) for name, t in given["tables"].items()
            }
            ran.roles.model = lambda: {**given, "tables": tables}
            ran.wake(party)

    with pytest.raises(MisuseError, match="goes on over another model than it began with"):
        Round(two_server_plan(WAY), stir=stepped).run()

    monkeypatch.setattr(retrieval_server, "check_signed", lambda *given: None)  # without the rule
    with pytest.raises(ServerFault):
        Round(two_server_plan(WAY), stir=stepped).run()
