"""Who holds whose shares, and who masks whom: the complete graph or a sparse random one.

Bell et al. 2020 (ia.cr/2020/704), section 3: a Harary graph - everybody on a ring, joined to the
`degree`/2 nearest on either side - whose ring order is random. The degree is never a constant; it
is the smallest for which all three of their events together stay below the failure bound:

- some client's holders include a threshold of corrupt ones (its secrets open),
- some client keeps fewer than a threshold of holders (the sum cannot be opened),
- the clients that are neither corrupt nor gone fall apart (a part's sum opens on its own).

The first two are hypergeometric tails, the third is a run of degree/2 ring neighbours that are all
corrupt or gone. Each is summed over the n clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, comb, prod
from typing import Final

import numpy as np

from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.ids import ClientId

FAILURE: Final = 2.0**-40


@dataclass(frozen=True, slots=True)
class Topology:
    """How many neighbours a client has, and how many of its holders must answer."""

    degree: int
    threshold: int
    complete: bool

    @property
    def holders(self) -> int:
        """The complete graph counts the client itself: it keeps one share of its own secrets."""
        return self.degree + 1 if self.complete else self.degree


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """The graph over a roster; `links` is None where everybody is linked to everybody."""

    members: tuple[ClientId, ...]
    threshold: int
    links: dict[ClientId, frozenset[ClientId]] | None

    def neighbours(self, client: ClientId) -> list[ClientId]:
        """Those with whom a client masks the dense part, ascending."""
        if self.links is None:
            return [c for c in self.members if c != client]
        return sorted(self.links[client])

    def holders(self, owner: ClientId) -> list[ClientId]:
        """Those who hold a share of this client's secrets, ascending; the i-th has point i + 1."""
        return list(self.members) if self.links is None else sorted(self.links[owner])

    def holds(self, holder: ClientId, owner: ClientId) -> bool:
        return self.links is None or holder in self.links[owner]


@lru_cache(maxsize=16)  # every transition of a round asks again, with the same roster
def arrange(members: tuple[ClientId, ...], topology: Topology, seed: bytes) -> Neighbourhood:
    """Lay the graph over a roster in ascending order; the public seed makes it everybody's."""
    if topology.complete:
        return Neighbourhood(members, topology.threshold, None)
    n = len(members)
    keys = uniform(Ring(64), Stream.of(Secret(seed), Label.GRAPH), n)
    ring = [members[i] for i in np.argsort(keys, kind="stable")]
    near = [*range(1, topology.degree // 2 + 1), *range(n - topology.degree // 2, n)]
    links = {ring[i]: frozenset(ring[(i + step) % n] for step in near) for i in range(n)}
    return Neighbourhood(members, topology.threshold, links)


@lru_cache(maxsize=256)
def sparse_topology(n: int, *, corrupt_share: float, dropout_share: float) -> Topology | None:
    """The smallest degree (and its threshold, over half) that fails with at most 2^-40.

    None when only the complete graph will do, which for small cohorts it always is.
    """
    corrupt = min(ceil(corrupt_share * n), n - 1)
    gone = min(ceil(dropout_share * n), n - 1)
    for degree in range(4, n - 1, 2):
        if _split(n, degree, removed=corrupt + gone) > FAILURE:
            continue
        for threshold in range(degree // 2 + 1, degree + 1):
            # A higher threshold only helps against the corrupt, so the first that holds them off
            # is the one that loses the fewest rounds.
            if _opened(n, degree, threshold, corrupt=corrupt) <= FAILURE:
                if failure(n, degree, threshold, corrupt=corrupt, gone=gone) <= FAILURE:
                    return Topology(degree=degree, threshold=threshold, complete=False)
                break
    return None


def failure(n: int, degree: int, threshold: int, *, corrupt: int, gone: int) -> float:
    """The probability that any of the three events happens to anybody (a union bound)."""
    stuck = n * _at_least(degree - threshold + 1, drawn=degree, marked=gone, total=n - 1)
    return (
        _opened(n, degree, threshold, corrupt=corrupt)
        + stuck
        + _split(n, degree, removed=corrupt + gone)
    )


def _opened(n: int, degree: int, threshold: int, *, corrupt: int) -> float:
    return n * _at_least(threshold, drawn=degree, marked=corrupt, total=n - 1)


def _split(n: int, degree: int, *, removed: int) -> float:
    run = degree // 2
    return n * prod((max(removed - i, 0) / (n - i) for i in range(run)), start=1.0)


def _at_least(wanted: int, *, drawn: int, marked: int, total: int) -> float:
    """P[X >= wanted] for X marked ones among `drawn` of `total` without replacement."""
    ways = sum(
        comb(marked, i) * comb(total - marked, drawn - i)
        for i in range(wanted, min(drawn, marked) + 1)
    )
    return ways / comb(total, drawn)
