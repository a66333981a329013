"""An ideal round: the real rounds over ideal roles, in memory and without a clock.

A client that drops out is missing in the phase where it would be, and from then on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Final

from tessera.errors import ServerFault
from tessera.ids import HELPER, SERVER, ClientId
from tessera.protocols.machine import Outbound
from tessera.rounds.client import ClientRound
from tessera.rounds.ideal import Dropout, IdealSum, InMemory, RoundTrainer, TrustedParty
from tessera.rounds.server import ServerRound
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound
from tessera.rounds.words import RoundResult

FINISHED: Final = frozenset({"done", "aborted"})


def run_ideal(
    server: ServerRound | LeaderRound,
    clients: Mapping[ClientId, ClientRound | TwoServerClientRound],
    train: RoundTrainer,
    dropouts: Mapping[ClientId, Dropout] | None = None,
    helper: HelperRound | None = None,
) -> RoundResult:
    """Run the round in memory; all roles are fresh, and some clients drop out on the way."""
    places, gone = dropouts or {}, set[ClientId]()
    visits: Counter[str] = Counter()

    def from_client(client: ClientId, out: Iterable[Outbound]) -> None:
        for message in out:
            place = places.get(client)
            if place is not None and place == Dropout(server.phase, visits[server.phase]):
                gone.add(client)
            if client in gone:
                return
            server.receive(client, message.data)

    def from_server(out: Iterable[Outbound]) -> None:
        waiting = deque(out)
        while waiting:
            message = waiting.popleft()
            if isinstance(message.to, str):
                assert helper is not None
                for answer in helper.receive(SERVER, message.data):
                    waiting.extend(server.receive(HELPER, answer.data))
            elif message.to not in gone:
                from_client(message.to, delivered(clients[message.to], message))

    _share(server, clients, helper)
    begun = {c: client.start() for c, client in clients.items()}
    from_server(server.start())
    for c, out in begun.items():
        from_client(c, out)
    while server.phase not in FINISHED:
        found = {c: clients[c].pending for c in sorted(clients.keys() - gone)}
        pending = {c: submodel for c, submodel in found.items() if submodel is not None}
        for c, update in (train(pending) if pending else {}).items():
            from_client(c, clients[c].supply(update))
        phase = server.phase
        out = server.close_phase()
        visits[phase] += 1
        from_server(out)
    return server.result


def _share(
    server: ServerRound | LeaderRound,
    clients: Mapping[ClientId, ClientRound | TwoServerClientRound],
    helper: HelperRound | None,
) -> None:
    """Give all roles what they share in memory."""
    if isinstance(server, ServerRound):
        total = IdealSum(TrustedParty(server.plan, server.round_id, clients))
        server.carry(total)
        for role in clients.values():
            assert isinstance(role, ClientRound)
            role.take_part_in(total)
        return
    assert helper is not None
    servers = server.trusted()
    server.in_memory(servers)
    helper.in_memory(servers)
    for role in clients.values():
        assert isinstance(role, TwoServerClientRound)
        role.in_memory(servers)


def delivered(client: ClientRound | TwoServerClientRound, message: Outbound) -> list[Outbound]:
    """A client's answer; none if it cannot go on with what it was sent, and has left."""
    try:
        if isinstance(message, InMemory):
            return client.take(message.message)
        return client.receive(SERVER, message.data)
    except ServerFault:
        return []
