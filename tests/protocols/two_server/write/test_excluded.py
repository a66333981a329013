"""How many clients one server that lies can have left out after their list is closed.

The leader does it with wrong sums of tags, the helper with its word. Both lie as roles do: in
messages that are encoded, to a server that is as it ships.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import two_servers
from protocols.two_server.write.test_verified import assert_exact, begun, second_row, written
from tessera import wire
from tessera.errors import RoundAborted, ServerFault
from tessera.ids import HELPER, SERVER, ClientId
from tessera.protocols.machine import Left, Outbound
from tessera.protocols.two_server.messages import CheckCoin, CheckSums
from tessera.protocols.two_server.write.helper import (
    CHECK_FAILED,
    CoinTossed,
    ListFixed,
    WriteHelper,
)
from tessera.protocols.two_server.write.leader import AwaitingCoin, AwaitingExclusions, WriteLeader
from tessera.wire.stored import Kept

CLIENTS = 7


def lying_leader(victims: list[ClientId]) -> type[WriteLeader]:
    """It says wrong sums of tags of these clients, and asks for the sum of what is left."""

    class Lying(WriteLeader):
        def _on_coin(self, phase, kept):
            following, _ = super()._on_coin(phase, kept)
            said = following.sums.message
            wrong = {c: bytes(b ^ 1 for b in said.sums[c]) for c in victims}
            lie = Kept.of(replace(said, sums=said.sums | wrong))
            following = AwaitingExclusions(held=phase.held, sums=lie, noise=phase.noise)
            return following, self._to_helper(following)

        def _check_list(self, held, excluded=0):
            pass

    Lying.STEPS = WriteLeader.STEPS | {(AwaitingCoin, CheckCoin): Lying._on_coin}
    return Lying


def lying_helper(victims: list[ClientId]) -> type[WriteHelper]:
    """It says that these clients have failed."""

    class Lying(WriteHelper):
        def _on_check_sums(self, phase, kept):
            following, _ = super()._on_check_sums(phase, kept)
            failed = {c: phase.held[c] for c in victims}
            self._rows = self._rows.without(self.params, self._row_shares(failed))
            following = ListFixed(
                held={c: h for c, h in following.held.items() if c not in victims},
                excluded=following.excluded | dict.fromkeys(victims, CHECK_FAILED),
                noise=phase.noise,
            )
            return following, self._to_leader(following)

        def _check_list(self, phase, message):
            pass

    Lying.STEPS = WriteHelper.STEPS | {(CoinTossed, CheckSums): Lying._on_check_sums}
    return Lying


def attacked(number: int, bound: int, *, by: str, clients: int = CLIENTS, least: int = 2):
    """(network, updates) of a round in which a server leaves out so many honest clients."""
    chosen = two_servers.params(clients=clients, min_cohort=least, most_excluded=bound, dense=2)
    network = two_servers.Network.of(chosen)
    victims = network.clients[len(network.clients) - number :]
    roles = {"leader": lying_leader(victims)} if by == SERVER else {"helper": lying_helper(victims)}
    network.writing(network.handshake(), **roles)
    return network, written(network, {})


def test_wrong_sums_of_tags_leave_out_five_of_seven_where_nothing_bounds_it():
    """The attack: the exact sum over two clients that the leader has chosen."""
    network, given = attacked(5, CLIENTS - 1, by=SERVER)
    assert not network.left
    assert_exact(network, given, network.clients[:2])


def test_the_helper_refuses_a_sum_without_five_of_seven_and_names_the_number():
    network, _ = attacked(5, 1, by=SERVER)
    assert not network.sent("SumShare") and network.total is None
    fault = network.left[HELPER]
    assert isinstance(fault, ServerFault)
    assert "5 of 7 reports were excluded" in fault.reason and "allows 1" in fault.reason
    helper = network.roles[HELPER]
    assert isinstance(helper.state, Left) and helper.state.reason == fault.reason


def test_a_helper_that_is_woken_in_between_refuses_it_too():
    network = two_servers.Network.of(two_servers.params(clients=CLIENTS, most_excluded=1))
    network.meddle = lambda s, m: [] if m.kind == "IncludedList" else [m.data]
    network.writing(network.handshake(), leader=lying_leader(network.clients[2:]))
    written(network, {})
    with pytest.raises(ServerFault, match="5 of 7 reports were excluded"):
        network.woken(HELPER).receive(SERVER, network.sent("IncludedList")[0])


def test_reports_that_a_leader_lists_and_has_not_forwarded_count_as_well():
    chosen = two_servers.params(clients=CLIENTS, most_excluded=1)
    network = two_servers.Network.of(chosen)
    kept_back = set(network.clients[2:])

    def withheld(source, message: Outbound):
        if message.kind == "Forwarded" and wire.decode(message.data).sender in kept_back:
            return []
        return [message.data]

    network.meddle = withheld
    network.writing(network.handshake(), leader=lying_leader([]))
    written(network, {})
    assert "5 of 7 reports were excluded" in network.left[HELPER].reason
    assert not network.sent("SumShare")


def test_a_helper_that_leaves_out_five_of_seven_is_refused_by_the_leader():
    network, given = attacked(5, CLIENTS - 1, by=HELPER)
    assert_exact(network, given, network.clients[:2])  # where nothing bounds it
    network, _ = attacked(5, 1, by=HELPER)
    assert isinstance(network.aborted, RoundAborted)
    assert network.aborted.reason == (
        "5 of 7 reports were excluded after their list was closed; the plan allows 1"
    )
    assert (network.aborted.answered, network.aborted.needed) == (2, 6)
    assert not network.sent("IncludedList") and network.total is None


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([SERVER, HELPER]))
def test_a_sum_opens_exactly_if_the_excluded_are_within_the_bound_and_enough_are_left(data, by):
    clients = data.draw(st.integers(3, 9), "clients")
    number = data.draw(st.integers(0, clients - 1), "excluded")
    bound = data.draw(st.integers(0, clients - 1), "bound")
    least = data.draw(st.integers(2, clients), "least")
    network, given = attacked(number, bound, by=by, clients=clients, least=least)
    if number <= bound and clients - number >= least:
        assert_exact(network, given, network.clients[: clients - number])
        for server in (SERVER, HELPER):
            assert len(network.roles[server].excluded) == number
    else:
        assert network.total is None
        assert not network.sent("SumShare")


def test_clients_that_cheat_are_left_out_within_the_bound_and_both_servers_name_them():
    network = begun(clients=10, most_excluded=2)
    bad = network.clients[:2]
    given = written(network, dict.fromkeys(bad, second_row))
    assert_exact(network, given, network.clients[2:])
    for server in (SERVER, HELPER):
        assert network.roles[server].excluded == dict.fromkeys(bad, CHECK_FAILED)
    assert network.woken(HELPER).excluded == dict.fromkeys(bad, CHECK_FAILED)


def test_clients_that_cheat_beyond_the_bound_end_the_round_at_two_honest_servers():
    network = begun(clients=10, most_excluded=2)
    written(network, dict.fromkeys(network.clients[:3], second_row))
    assert network.aborted is not None and "3 of 10 reports were excluded" in network.aborted.reason
    assert not network.left and not network.sent("SumShare")
