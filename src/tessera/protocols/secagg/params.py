"""The parameters of a round of secure sums: topology, groups, thresholds and headroom.

Everything is checked once, here, before anything is sent. What follows from the parameters
(threshold, degree, headroom) is a property of the same frozen object, so that client and server
cannot hold different ones.

Who holds whose shares, and who masks whom: the complete graph or a sparse random one.

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

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from math import comb, prod
from typing import Annotated, Final

import numpy as np

from tessera import wire
from tessera.crypto.group import Group
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.crypto.shamir import MAX_HOLDERS
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId, StageId, TableId

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


MAX_STAGES: Final = 16
MAX_TABLES: Final = 256
MAX_COHORT: Final = 100_000
MAX_WORDS: Final = 1 << 32
MAX_TEXT_BYTES: Final = 1_000
MAX_DENSE_BYTES: Final = wire.DEFAULT_CAP - 1_024
"""What a masked input may hold of dense words and still be a message, its frame included."""

PLAN_HASH_BYTES: Final = 32


class Threat(Enum):
    """The server against which inputs are protected."""

    SEMI_HONEST = "semi-honest"
    ACTIVE = "active"


class GraphKind(Enum):
    """Who holds whose shares, and who masks the dense part with whom."""

    COMPLETE = "complete"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSumSpec:
    """A table summed row by row: `width` words a row, the count of contributions among them."""

    table: Annotated[TableId, wire.U16]
    width: Annotated[int, wire.VARINT]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One secure sum of the round: `dense` words from everybody, and rows from whom they concern.

    `max_value` is the largest word an honest client submits; the sum of a whole cohort of those
    must stay below the group's order. None says that the sum is wanted modulo the order itself.
    """

    name: Annotated[str, wire.TEXT]
    group: Annotated[Group, wire.GROUP]
    dense: Annotated[int, wire.VARINT] = 0
    tables: Annotated[
        tuple[RowSumSpec, ...], wire.Sequence(wire.Nested(RowSumSpec), MAX_TABLES)
    ] = ()
    max_value: Annotated[int | None, wire.Maybe(wire.VARINT)] = None

    def __post_init__(self) -> None:
        _check_text("a stage's name", self.name)
        if not self.dense and not self.tables:
            raise ConfigError(f"secagg: stage {self.name} has neither dense words nor tables")
        if not 0 <= self.dense <= MAX_WORDS:
            raise ConfigError(f"secagg: stage {self.name}: {self.dense} dense words")
        packed = (self.dense * self.group.bits + 7) // 8
        if packed > MAX_DENSE_BYTES:
            raise ConfigError(
                f"secagg: stage {self.name}: {self.dense} dense words of {self.group.bits} bits "
                f"are {packed} bytes, and a message holds {MAX_DENSE_BYTES}",
                hint="split the words over several stages, or use a narrower group",
            )
        if self.max_value is not None and not 0 <= self.max_value < 1 << 64:
            raise ConfigError(f"secagg: stage {self.name}: max_value must lie in [0, 2^64)")
        if len(self.tables) > MAX_TABLES:
            raise ConfigError(f"secagg: stage {self.name}: {len(self.tables)} tables")
        names = [spec.table for spec in self.tables]
        if sorted(set(names)) != names:
            raise ConfigError(f"secagg: stage {self.name}: tables {names} must ascend")
        for spec in self.tables:
            if not 0 <= spec.table < 1 << 16:
                raise ConfigError(f"secagg: stage {self.name}: table {spec.table} is over 65,535")
            if not 1 <= spec.width <= MAX_WORDS:
                raise ConfigError(
                    f"secagg: stage {self.name}, table {spec.table}: width {spec.width}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecAggParams:
    """A round's parameters, the same at every client and at the server.

    `corrupt` is how many members of the cohort may be the server's own; `dropout` the share of the
    cohort that may drop out at any time. `threshold` and `degree` are computed when 0; a degree of
    one's own is for experiments on the graph, and its failure probability is not checked.
    `min_group` is the smallest group a row is opened for (0: the smallest that keeps two honest
    members in it, see `quorum`); a smaller one needs `insecure_small_groups`, which is the setting
    of the submodel papers. With `strict_quorum` a row whose group dropouts have shrunk
    below the quorum is lost and not opened (`protocols/secagg/masks.py`).
    """

    federation: Annotated[str, wire.TEXT]
    round_id: Annotated[RoundId, wire.U64]
    plan_hash: Annotated[bytes, wire.KEY]
    cohort: Annotated[int, wire.VARINT]
    stages: Annotated[tuple[StageSpec, ...], wire.Sequence(wire.Nested(StageSpec), MAX_STAGES)]
    threat: Annotated[Threat, wire.choice(Threat)] = Threat.SEMI_HONEST
    graph: Annotated[GraphKind, wire.choice(GraphKind)] = GraphKind.COMPLETE
    corrupt: Annotated[int, wire.VARINT] = 0
    dropout: Annotated[float, wire.F64] = 0.2
    threshold: Annotated[int, wire.VARINT] = 0
    degree: Annotated[int, wire.VARINT] = 0
    min_group: Annotated[int, wire.VARINT] = 0
    insecure_small_groups: Annotated[bool, wire.FLAG] = False
    strict_quorum: Annotated[bool, wire.FLAG] = False

    def __post_init__(self) -> None:
        _check_text("the federation's name", self.federation)
        if not 0 <= self.round_id < 1 << 64:
            raise ConfigError(f"secagg: round {self.round_id} must lie in [0, 2^64)")
        if len(self.plan_hash) != PLAN_HASH_BYTES:
            raise ConfigError(
                f"secagg: a plan hash of {len(self.plan_hash)} bytes; it has {PLAN_HASH_BYTES}"
            )
        if not 2 <= self.cohort <= MAX_COHORT:
            raise ConfigError(f"secagg: a cohort of {self.cohort}; it takes 2 to {MAX_COHORT}")
        if not 1 <= len(self.stages) <= MAX_STAGES:
            raise ConfigError(f"secagg: {len(self.stages)} stages; a round has 1 to {MAX_STAGES}")
        if not 0 <= self.corrupt < self.cohort:
            raise ConfigError(f"secagg: {self.corrupt} corrupt clients of {self.cohort}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"secagg: dropout {self.dropout} must lie in [0, 1)")
        for name in ("threshold", "degree", "min_group"):
            if not 0 <= getattr(self, name) < 1 << 64:
                raise ConfigError(f"secagg: {name} must lie in [0, 2^64)")
        self._check_graph()
        self._check_threshold()
        self._check_groups()
        for stage in self.stages:
            self._check_headroom(stage)

    def _check_graph(self) -> None:
        if self.threat is Threat.ACTIVE and self.graph is GraphKind.SPARSE:
            raise ConfigError(
                "secagg: an active server needs the complete graph: the sparse graph's argument "
                "does not survive a server that shapes it",
                hint='use graph = "complete", or threat = "semi-honest"',
            )
        if self.graph is GraphKind.COMPLETE and self.cohort > MAX_HOLDERS:
            raise ConfigError(
                f"secagg: {self.cohort} clients on the complete graph; it takes {MAX_HOLDERS}",
                hint='use graph = "sparse" or a smaller cohort',
            )
        if self.degree and (self.graph is GraphKind.COMPLETE or self.degree % 2):
            raise ConfigError(f"secagg: degree {self.degree} needs the sparse graph and to be even")
        fewest = fewest_members(self.cohort, self.dropout)
        if self.degree and self.degree >= fewest - 1:
            raise ConfigError(
                f"secagg: degree {self.degree} where {fewest} of {self.cohort} may be left: a ring "
                "with that many neighbours needs two members more",
                hint='use a smaller degree or dropout, or graph = "complete"',
            )
        if self.threshold and self.graph is GraphKind.SPARSE and not self.degree:
            raise ConfigError(
                f"secagg: threshold {self.threshold} on the sparse graph without a degree: the two "
                "are computed together",
                hint="give degree too, or leave both out",
            )

    def _check_threshold(self) -> None:
        topology = self.topology
        holders, t = topology.holders, topology.threshold
        if not holders // 2 < t <= holders:
            raise ConfigError(
                f"secagg: threshold {t} of {holders} holders must be over half, or a server could "
                "ask some for a client's self-mask and the others for its key"
            )
        if topology.complete and t <= self.corrupt:
            raise ConfigError(
                f"secagg: threshold {t} with {self.corrupt} corrupt clients: they could put "
                "everybody's secrets together on their own"
            )
        if self.threat is Threat.ACTIVE:
            if 3 * self.corrupt >= self.cohort:
                raise ConfigError(
                    f"secagg: {self.corrupt} corrupt of {self.cohort}: an active server is "
                    "withstood with less than a third"
                )
            if 2 * t <= self.cohort + self.corrupt:
                raise ConfigError(
                    f"secagg: threshold {t} of {self.cohort} with {self.corrupt} corrupt: twice "
                    "the threshold must pass their sum, or two survivor lists could both be "
                    "answered"
                )

    def _check_groups(self) -> None:
        due = self._least_group
        if self.min_group and self.min_group < due and not self.insecure_small_groups:
            raise ConfigError(
                f"secagg: min_group {self.min_group} with {self.corrupt} corrupt clients: a row "
                "could be opened with one honest member in its group",
                hint=f"use min_group = {due}, or say insecure_small_groups",
            )
        if self.strict_quorum and any(
            s.tables and not isinstance(s.group, Ring) for s in self.stages
        ):
            raise ConfigError("secagg: strict_quorum needs its rows in a ring, not in a field")
        if self._has_tables and self.quorum > self.cohort:
            raise ConfigError(
                f"secagg: no row could be opened: a group needs {self.quorum} members, and the "
                f"cohort has {self.cohort}",
                hint="use a larger cohort, a smaller min_group, or fewer corrupt clients",
            )

    def _check_headroom(self, stage: StageSpec) -> None:
        if stage.max_value is None:
            return
        if self.cohort * stage.max_value >= stage.group.order:
            need = (self.cohort * stage.max_value).bit_length()
            raise ConfigError(
                f"secagg: stage {stage.name}: {self.cohort} clients x {stage.max_value} does not "
                f"fit {stage.group.name}",
                hint=f"a ring of {need} bits has the room",
            )

    def stage(self, stage: StageId) -> StageSpec:
        return self.stages[stage]

    @property
    def quorum(self) -> int:
        """The smallest group a row of this round is opened for.

        With corrupt + 2 members two of them are honest. A server that lies may also declare
        cohort - threshold honest ones gone, whose masks then come off, so that against an active
        server as many more are needed.
        """
        return self.min_group or self._least_group

    @property
    def _least_group(self) -> int:
        least = self.corrupt + 2
        if self.threat is Threat.ACTIVE and self._has_tables and not self.strict_quorum:
            # Masks with clients listed as dropped come off; hold-back keys prevent that.
            least += self.cohort - self.topology.threshold
        return least

    @property
    def _has_tables(self) -> bool:
        return any(stage.tables for stage in self.stages)

    @property
    def context(self) -> bytes:
        """A digest that binds keys, boxes and signatures to this round and no other."""
        return _context(self)

    @property
    def topology(self) -> Topology:
        """Degree and threshold, over the holders in the plan: whoever answers changes neither.

        A roster smaller than the cohort makes a threshold harder to reach, never easier.
        """
        if self.graph is GraphKind.SPARSE:
            if self.degree:
                chosen = self.threshold or self.degree // 2 + 1
                return Topology(degree=self.degree, threshold=chosen, complete=False)
            sparse = sparse_topology(self.cohort, corrupt=self.corrupt, dropout_share=self.dropout)
            if sparse is not None:
                return sparse
        return Topology(
            degree=self.cohort - 1,
            threshold=self.threshold or self._two_thirds,
            complete=True,
        )

    @property
    def _two_thirds(self) -> int:
        """Meets both rules (over half; 2t > n + corrupt for any corrupt < n/3)."""
        return 2 * self.cohort // 3 + 1 if self.cohort > 2 else 2

    @property
    def min_survivors(self) -> int:
        """With fewer inputs than this the round is aborted before anything is opened."""
        topology = self.topology
        if topology.complete:
            return topology.threshold
        return fewest_members(self.cohort, self.dropout)


wire.record(tag=0x0100)(SecAggParams)


@lru_cache(maxsize=64)  # needed for every key that is derived
def _context(params: SecAggParams) -> bytes:
    return hashlib.sha256(Label.SECAGG_ROUND.encode() + wire.digest(params)).digest()


def _check_text(what: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"secagg: {what} is not valid UTF-8") from None
    if size > MAX_TEXT_BYTES:
        raise ConfigError(f"secagg: {what} has {size} bytes; it may have {MAX_TEXT_BYTES}")
