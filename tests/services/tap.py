"""A tap on links: what must hold of all that parties say to each other, whoever is killed."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from tessera import wire
from tessera.protocols.secagg.messages import RevealedShares
from tessera.protocols.two_server.messages import SumShare
from tessera.services.link import Numbered

Place = tuple[int, str, str, int]
"""Round, sender, receiver, number."""


@dataclass
class Tap:
    """What was on all links: the contents under each number, and what they reveal."""

    contents: dict[Place, set[bytes]] = field(default_factory=dict)
    bodies: dict[Place, bytes] = field(default_factory=dict)
    kinds: Counter[tuple[int, str]] = field(default_factory=Counter)
    given: dict[tuple[int, str, object, int], set[str]] = field(default_factory=dict)
    """By round, holder, stage and peer: which of its two shares of the peer a holder gave."""

    def saw(self, round_id: int, sender: str, receiver: str, message: Numbered) -> None:
        place = (round_id, sender, receiver, message.number)
        digest, found = (
            hashlib.sha256(message.data).digest(),
            self.contents.setdefault(place, set()),
        )
        if digest in found:
            return
        kind = wire.kind_of(message.data)
        self.kinds[round_id, kind.__name__ if kind else ""] += 1
        self.bodies.setdefault(place, message.data)
        found.add(digest)
        if kind is RevealedShares:
            self._saw_shares(round_id, sender, wire.decode(message.data))

    def _saw_shares(self, round_id: int, holder: str, shares: RevealedShares) -> None:
        for which, peers in (("self", shares.self_masks), ("pair", shares.mask_keys)):
            for peer in peers:
                place = (round_id, holder, shares.stage, int(peer))
                self.given.setdefault(place, set()).add(which)

    def check(self) -> None:
        assert all(len(found) == 1 for found in self.contents.values()), "one content per number"
        for (_, kind), count in self.kinds.items():
            assert kind != SumShare.__name__ or count == 1, "at most one sum share a round"
        both = [place for place, kinds in self.given.items() if len(kinds) == 2]
        assert not both, f"both shares of a peer were given: {both[:3]}"
