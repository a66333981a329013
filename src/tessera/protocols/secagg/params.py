"""The parameters of a round of secure sums: topology, groups, thresholds and headroom.

Everything is checked once, here, before anything is sent. What follows from the parameters
(threshold, degree, headroom) is a property of the same frozen object, so that client and server
cannot hold different ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Annotated, Final

from tessera import wire
from tessera.crypto.group import Group
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.crypto.shamir import MAX_HOLDERS
from tessera.errors import ConfigError
from tessera.ids import RoundId, StageId, TableId
from tessera.protocols.secagg.graph import Topology, fewest_members, sparse_topology

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
