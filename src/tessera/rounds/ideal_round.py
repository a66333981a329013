"""An ideal round: the real roles over the ideal sum, in memory and without a clock.

A client that drops out is missing in the phase where it would be, and from then on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Final

from tessera.errors import ServerFault
from tessera.ids import SERVER, ClientId
from tessera.protocols.machine import Outbound
from tessera.rounds.client import ClientRound
from tessera.rounds.encode import RoundResult
from tessera.rounds.ideal import Dropout, InMemory, RoundTrainer, TrustedParty
from tessera.rounds.server import ServerRound

FINISHED: Final = frozenset({"done", "aborted"})


def run_ideal(
    server: ServerRound,
    clients: Mapping[ClientId, ClientRound],
    train: RoundTrainer,
    dropouts: Mapping[ClientId, Dropout] | None = None,
) -> RoundResult:
    """Run the round in memory; `clients` are fresh, and some drop out on the way."""
    places, gone = dropouts or {}, set[ClientId]()
    visits: Counter[str] = Counter()

    def from_client(client: ClientId, out: Iterable[Outbound]) -> None:
        for message in out:
            if places.get(client) == Dropout(server.phase, visits[server.phase]):
                gone.add(client)
            if client in gone:
                return
            server.receive(client, message.data)

    def to_clients(out: Iterable[Outbound]) -> None:
        waiting = deque(out)
        while waiting:
            message = waiting.popleft()
            assert not isinstance(message.to, str)
            if message.to not in gone:
                from_client(message.to, delivered(clients[message.to], message))

    party = TrustedParty(server.plan, server.round_id, clients)
    server.in_memory(party)
    for role in clients.values():
        role.in_memory(party)
    begun = {c: client.start() for c, client in clients.items()}
    to_clients(server.start())
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
        to_clients(out)
    return server.result


def delivered(client: ClientRound, message: Outbound) -> list[Outbound]:
    """A client's answer; none if the model is unfit, and it has left."""
    try:
        if isinstance(message, InMemory):
            return client.take(message.message)
        return client.receive(SERVER, message.data)
    except ServerFault:
        return []
