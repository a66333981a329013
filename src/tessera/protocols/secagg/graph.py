"""Who holds whose shares, and who masks whom: the complete graph or a sparse random one.

Bell et al. 2020 (ia.cr/2020/704), section 3: a Harary graph - everybody on a ring, joined to the
`degree`/2 nearest on either side - whose ring order is random. The degree is never a constant; it
is the smallest for which all three of their events together stay below the failure bound:

- some client's holders include a threshold of corrupt ones (its secrets are recovered),
- some client keeps fewer than a threshold of holders (the sum cannot be opened),
- the graph of honest survivors is not connected (the sum of a component is opened on its own).

The first two are hypergeometric tails, the third is a run of degree/2 ring neighbours that are all
corrupt or gone. Each is summed over the clients, and taken where it is worst among all rosters that
the plan allows: degree and threshold are the plan's and do not follow the roster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import comb, prod
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

    def owners(self, holder: ClientId, among: frozenset[ClientId]) -> frozenset[ClientId]:
        """Those of them whose shares this client holds."""
        if self.links is None:
            return among
        return frozenset(c for c in among if holder in self.links[c])


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


def fewest_members(cohort: int, dropout_share: float) -> int:
    """How many of a cohort are left when as many drop out as the plan allows."""
    return cohort - int(dropout_share * cohort)


@lru_cache(maxsize=256)
def sparse_topology(cohort: int, *, corrupt: int, dropout_share: float) -> Topology | None:
    """The smallest degree (and its threshold, over half) that fails with at most 2^-40.

    One pair for every roster from `fewest_members` to the whole cohort, with all `corrupt` clients
    in it, so that nothing a server says about who answered changes either. None when only the
    complete graph will do, which for small cohorts it always is.
    """
    fewest = fewest_members(cohort, dropout_share)
    for degree in range(4, fewest - 1, 2):
        if _split(cohort, degree, removed=corrupt + cohort - fewest) > FAILURE:
            continue
        opened = _opened(degree, corrupt=corrupt, fewest=fewest)
        # A higher threshold only helps against the corrupt, so the first that holds them off is
        # the one that loses the fewest rounds.
        safe = (t for t in range(degree // 2 + 1, degree + 1) if cohort * opened[t] <= FAILURE)
        threshold = next(safe, None)
        if threshold is None:
            continue
        if failure(cohort, degree, threshold, corrupt=corrupt, fewest=fewest) <= FAILURE:
            return Topology(degree=degree, threshold=threshold, complete=False)
    return None


def failure(cohort: int, degree: int, threshold: int, *, corrupt: int, fewest: int) -> float:
    """Bounds the probability that any of the three events happens to anybody, in any roster.

    Each event has its worst roster, and there are never more than `cohort` clients to sum over. Let
    m be the roster's size, from `fewest` to `cohort`; then m - `fewest` may still drop out.

    - Opened: the corrupt stay as many while the pool they are drawn from grows with m, so that the
      smallest roster is the worst.
    - Stuck: those who stay are `fewest` whatever m is. The more there are around them, the fewer
      of them are among a client's holders, so that the full roster is the worst.
    - Split: of m on the ring `fewest` - `corrupt` are neither corrupt nor gone. The i-th factor is
      1 - (fewest - corrupt) / (m - i) and grows with m: the full roster is the worst again.
    """
    gone = cohort - fewest
    opened = _opened(degree, corrupt=corrupt, fewest=fewest)
    stuck = _tails(drawn=degree, marked=gone, total=cohort - 1)
    return cohort * (opened[threshold] + stuck[degree - threshold + 1]) + _split(
        cohort, degree, removed=corrupt + gone
    )


def _opened(degree: int, *, corrupt: int, fewest: int) -> list[float]:
    others = fewest - 1
    return _tails(drawn=degree, marked=min(corrupt, others), total=others)


def _split(cohort: int, degree: int, *, removed: int) -> float:
    run = degree // 2
    return cohort * prod((max(removed - i, 0) / (cohort - i) for i in range(run)), start=1.0)


def _tails(*, drawn: int, marked: int, total: int) -> list[float]:
    """P[X >= i] for i = 0 .. drawn, X the marked ones among `drawn` of `total`, none put back.

    Counted in integers, so that every machine finds the same degree.
    """
    fewest, most = max(0, drawn - (total - marked)), min(drawn, marked)
    ways = comb(marked, fewest) * comb(total - marked, drawn - fewest)
    counts = [0] * (drawn + 1)
    for i in range(fewest, most + 1):
        counts[i] = ways
        ways = ways * (marked - i) * (drawn - i) // ((i + 1) * (total - marked - drawn + i + 1))
    everything = comb(total, drawn)
    return [at_least / everything for at_least in reversed([*accumulate(reversed(counts))])]
