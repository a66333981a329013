"""Forecast: what a round by a plan will cost and promise, reckoned before anybody runs it.

Bytes are lengths of messages that are built to the expected sizes and encoded, so that a forecast
cannot drift from the wire format. Sizes of sets are expectations (`privacy/exposure.py`): every
client holds equally many rows of each table, and nobody drops out. How many clients share a row is
an assumption the caller makes; without one, every row is as likely as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.group import Group
from tessera.crypto.shamir import SHARE_BYTES
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId, StageId, TableId
from tessera.privacy import exposure
from tessera.privacy.exposure import Cohort, Holders, LateDropout, RowCounts, counted
from tessera.protocols import wire
from tessera.protocols.plainsum import OpenInput, OpenSet
from tessera.protocols.secagg import messages as said
from tessera.protocols.secagg.holdback import KEY_BYTES
from tessera.protocols.secagg.params import SecAggParams, Threat
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.plan import Domain, Plan, Scheme, TablePlan
from tessera.rounds.two_server.traffic import TwoServerTraffic

ROUND: Final = RoundId(1)
KEY: Final = bytes(32)
PEERS_SAMPLED: Final = 40
LEAST_SHARE: Final = 1e-9
"""Shares of rows below this are left out of a distribution of holders."""

Sizes = npt.NDArray[np.float64]


def even_holders(rows: int, clients: int, held: float) -> Holders:
    """Holders per row of the union when each client holds `held` of `rows`, any as likely."""
    chances = counted(clients, 1.0 - held / rows, held / rows)[1:]
    total = float(chances.sum())
    return Holders.of(
        {k: float(c) / total for k, c in enumerate(chances, start=1) if c > LEAST_SHARE * total}
    )


@dataclass(frozen=True, slots=True)
class TableForecast:
    """Expected rows of one table, per client and round. `missed`: shares of the union's rows."""

    name: str
    derived: bool
    real: float
    union: float
    revealed: float
    trained: float
    included: float  # of the revealed, those whose group met the quorum
    shared: float  # of those, the part that a peer is a member of, too
    missed: float
    lost: float  # met the quorum, and do not after dropouts


@dataclass(frozen=True, slots=True)
class MaskWork:
    """Keystream that one stage takes, in its own group."""

    group: Group
    client_bytes: float  # of one client
    server_bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a round makes processors do, to be weighed with a machine's own figures."""

    agreements: float  # Diffie-Hellman operations of one client, a mask's stream derived from each
    boxes: float  # sealed and opened by one client
    masks: tuple[MaskWork, ...]  # by stage
    openings: float  # secrets that the server puts together from shares


@dataclass(frozen=True)
class Forecast:
    """A plan under assumptions about its clients: what is expected of a round."""

    plan: Plan
    rows_per_client: int
    given_holders: Holders | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rows_per_client < 1:
            raise ConfigError(
                f"rows per client = {self.rows_per_client} leaves nothing to fetch",
                hint="use 1 or more",
            )

    # --- rows ----------------------------------------------------------------------------------

    def held(self, table: TablePlan) -> int:
        """Rows of a table that one client holds and may name."""
        most = min(self.rows_per_client, table.rows)
        if self.plan.scheme is Scheme.TWO_SERVER:
            return min(most, self.plan.union.max_rows)
        if self.plan.scheme is not Scheme.SECURE_SUBMODEL:
            return most
        return max(1, min(round(self.plan.privacy.keep * most), self.plan.union.max_rows))

    @property
    def left_out(self) -> int:
        """Rows of one client that `max_rows` or `keep` leave at home, over all tables."""
        return sum(min(self.rows_per_client, t.rows) - self.held(t) for t in self.plan.roots)

    def cohort(self, table: TablePlan) -> Cohort:
        plan = self.plan
        quorum = self._params.quorum if plan.scheme is Scheme.SECURE_SUBMODEL else 1
        return Cohort(
            clients=plan.cohort,
            holders=self.given_holders or even_holders(table.rows, plan.cohort, self.held(table)),
            min_group=quorum,
            colluders=plan.security.corrupt,
            dropout=self.dropout,
        )

    def counts(self, table: TablePlan) -> RowCounts:
        """The sets of one root table; decoys are spread over the tables as their rows are."""
        return exposure.expected_rows(
            self.plan.privacy.index,
            self.cohort(table),
            real=self.held(table),
            decoys=self.plan.privacy.decoys,
            catalogue=table.rows,
        )

    def late_dropout(self, table: TablePlan, *, decoys: bool = True) -> LateDropout:
        return exposure.late_dropout(
            self.plan.privacy.index,
            self.cohort(table),
            real=self.held(table),
            decoys=self.plan.privacy.decoys if decoys else 0.0,
            catalogue=table.rows,
        )

    @property
    def tables(self) -> tuple[TableForecast, ...]:
        if self.plan.scheme is not Scheme.SECURE_SUBMODEL:
            return tuple(self._open(t) for t in self.plan.tables)
        return tuple(
            self._derived(t) if t.derived_from else self._root(t) for t in self.plan.tables
        )

    def _open(self, table: TablePlan) -> TableForecast:
        """A table without a union: its rows are named, or the whole of it travels."""
        parent = self.plan.table(table.derived_from) if table.derived_from else table
        own = float(self.held(parent))
        real = spread(own, table.rows) if table.derived_from else own
        share = real / table.rows
        union = table.rows * (1.0 - (1.0 - share) ** self.plan.cohort)
        if self.plan.narrows:  # decoys are in it, too
            named = self.counts(parent)
            opened = min(named.union + named.decoys, float(parent.rows))
            union = spread(opened, table.rows) if table.derived_from else opened
        moved = real if self.plan.scheme.by_rows else float(table.rows)
        return TableForecast(
            table.name, bool(table.derived_from), real, union, moved, real, moved, 1.0, 0.0, 0.0
        )

    def _root(self, table: TablePlan) -> TableForecast:
        rows, cohort, privacy = self.counts(table), self.cohort(table), self.plan.privacy.index
        n, opened = cohort.clients, rows.union + rows.decoys
        kinds = [(share * rows.union / opened, k) for k, share in cohort.holders.by_row]
        kinds.append((rows.decoys / opened, 0))

        def sizes(stay: float) -> Sizes:
            p5, p6 = privacy.p5 * stay, privacy.p6 * stay
            mixed: Sizes = np.zeros(n + 1)
            for weight, k in kinds:
                mixed += weight * np.convolve(
                    counted(k, 1.0 - p5, p5), counted(n - k, 1.0 - p6, p6)
                )
            return mixed

        included, shared, missed, lost = self._groups(sizes(1.0), sizes(1.0 - self.dropout), opened)
        return TableForecast(
            name=table.name,
            derived=False,
            real=rows.real,
            union=opened,
            revealed=rows.revealed,
            trained=rows.succinct,
            included=included,
            shared=shared,
            missed=missed,
            lost=lost,
        )

    def _derived(self, table: TablePlan) -> TableForecast:
        """Rows follow the parent's by a map of which only the sizes are known: taken as even."""
        parent, n = self._root(self.plan.table(table.derived_from)), self.plan.cohort
        union, revealed = spread(parent.union, table.rows), spread(parent.revealed, table.rows)
        p = min(1.0, revealed / union)
        groups, after = counted(n, 1.0 - p, p), counted(n, 1.0 - p * self._stay, p * self._stay)
        included, shared, missed, lost = self._groups(groups, after, union)
        return TableForecast(
            name=table.name,
            derived=True,
            real=spread(parent.real, table.rows),
            union=union,
            revealed=revealed,
            trained=spread(parent.trained, table.rows),
            included=included,
            shared=shared,
            missed=missed,
            lost=lost,
        )

    @property
    def _stay(self) -> float:
        return 1.0 - self.dropout

    def _groups(
        self, sizes: Sizes, after: Sizes, union: float
    ) -> tuple[float, float, float, float]:
        """(included, shared, missed, lost) from how large the rows' groups are."""
        n, quorum = self.plan.cohort, self._params.quorum
        k = np.arange(n + 1)
        met = np.where(k >= quorum, sizes, 0.0)
        members = float((k * met).sum())
        pairs = float((k * (k - 1) * met).sum())
        missed, later = float(sizes[:quorum].sum()), float(after[:quorum].sum())
        return (
            union * members / n,
            pairs / members / (n - 1) if members else 0.0,
            missed,
            max(0.0, later - missed),
        )

    # --- bytes ---------------------------------------------------------------------------------

    @property
    def _params(self) -> SecAggParams:
        return self.plan.union_sum(ROUND) if self.plan.narrows else self.plan.secagg(ROUND)

    @cached_property
    def two_server(self) -> TwoServerTraffic:
        """The messages of two servers and their clients."""
        plan = self.plan
        narrow = {f.name: some(f.union, plan.table(f.name).rows) for f in self.tables}
        # Who writes a row holds it: decoys are in the union and not in the sum.
        bare = replace(
            plan, two_server=replace(plan.two_server, domain=Domain.WHOLE, row_limit=2**40)
        )
        written = {f.name: round(f.union) for f in replace(self, plan=bare).tables}
        return TwoServerTraffic(plan, narrow if plan.narrows else None, written)

    def bytes_between(self) -> float:
        """Between two servers, for each client; none where there is one."""
        if self.plan.scheme is not Scheme.TWO_SERVER:
            return 0.0
        told = self._union_told if self.plan.narrows else 0.0
        return self.two_server.between() + told / self.plan.cohort

    @property
    def _union_told(self) -> float:
        plan = self.plan
        roots = {
            plan.table_id(f.name): some(f.union, plan.table(f.name).rows)
            for f in self.tables
            if not f.derived
        }
        return length(UnionOpened(round_id=ROUND, tables=roots))

    def bytes_up(self) -> dict[str, float]:
        """Of one client, by stage of the round."""
        return added(self._up())

    def bytes_down(self) -> dict[str, float]:
        """To one client, by stage of the round."""
        return added(self._down())

    def _up(self) -> Iterator[tuple[str, float]]:
        plan, tables = self.plan, self.tables
        if plan.scheme is Scheme.TWO_SERVER:
            if plan.narrows:
                yield from self._keys_up()
                (union,) = self._params.stages
                yield "union", self._masked(packed_bytes(union.group, union.dense))
                yield from (("union", size) for size in self._unmask_up())
            yield from self.two_server.up()
            return
        stage, me = plan.stages[-1], ClientId(0)
        dense = packed_bytes(stage.group, stage.dense)
        parts = tuple(
            packed_bytes(stage.group, round(f.included) * spec.width)
            for f, spec in zip(tables, stage.tables, strict=False)
        )
        if not plan.scheme.secure:
            if plan.scheme.by_rows:
                yield (
                    "choice",
                    length(OpenSet(round_id=ROUND, sender=me, tables=self._named(tables))),
                )
            frame = OpenInput(round_id=ROUND, sender=me, dense=b"", tables=(b"",) * len(parts))
            yield "update", length(frame) + carried(dense, *parts)
            return
        yield from self._keys_up()
        if plan.scheme is Scheme.SECURE_SUBMODEL:
            union = plan.stages[0]
            yield "union", self._masked(packed_bytes(union.group, union.dense))
            yield from (("union", size) for size in self._unmask_up())
            yield (
                "choice",
                length(
                    said.RevealedSet(
                        round_id=ROUND,
                        stage=StageId(1),
                        sender=me,
                        quorum=self._params.quorum,
                        tables=self._named(tables),
                    )
                ),
            )
        yield "update", self._masked(dense, *parts)
        yield from (("update", size) for size in self._unmask_up())
        if plan.privacy.strict_quorum:
            keys = {TableId(i): bytes(KEY_BYTES * round(f.included)) for i, f in enumerate(tables)}
            yield "update", self._shares(keys) - self._shares({})

    def _down(self) -> Iterator[tuple[str, float]]:
        plan, tables = self.plan, self.tables
        itemsize = plan.model.precision.dtype.itemsize
        if plan.scheme is Scheme.TWO_SERVER:
            if plan.narrows:
                yield from self._keys_down()
                yield from (("union", size) for size in self._unmask_down())
                yield "union", self._union_told
            yield from self.two_server.down()
            return
        if plan.scheme.secure:
            yield from self._keys_down()
        if plan.scheme is Scheme.SECURE_SUBMODEL:
            yield from (("union", size) for size in self._unmask_down())
            yield "union", length(said.NextStage(round_id=ROUND, stage=StageId(1)))
            yield "union", self._union_told
            yield "choice", self._row_groups(tables)
        frame = Download(
            round_id=ROUND, dense=b"", tables={plan.table_id(t.name): b"" for t in plan.tables}
        )
        rows = [round(f.revealed) * plan.table(f.name).width * itemsize for f in tables]
        yield "rows down", length(frame) + carried(plan.model.dense * itemsize, *rows)
        if plan.scheme.secure:
            yield from (("update", size) for size in self._unmask_down())

    def _named(self, tables: tuple[TableForecast, ...]) -> tuple[said.RevealedRows, ...]:
        """The rows a client names: by place in the union where there is one, else by id."""
        within = self.plan.scheme is Scheme.SECURE_SUBMODEL
        return tuple(
            said.RevealedRows(
                table=TableId(i),
                rows=some(f.revealed, round(f.union) if within else self.plan.tables[i].rows),
            )
            for i, f in enumerate(tables)
        )

    def _keys_up(self) -> Iterator[tuple[str, float]]:
        boxes = dict.fromkeys(self._others, (bytes(said.BOX_BYTES),) * len(self._params.stages))
        yield (
            "keys",
            length(
                said.Advert(
                    round_id=ROUND,
                    sender=ClientId(0),
                    context=KEY,
                    channel_key=KEY,
                    nonce=KEY,
                    stages=self._stage_keys,
                    signature=self._signature,
                )
            ),
        )
        yield "keys", length(said.ShareBoxes(round_id=ROUND, sender=ClientId(0), boxes=boxes))

    def _keys_down(self) -> Iterator[tuple[str, float]]:
        member = said.Member(
            client=ClientId(0),
            channel_key=KEY,
            nonce=KEY,
            stages=self._stage_keys,
            signature=self._signature,
        )
        boxes = dict.fromkeys(self._others, (bytes(said.BOX_BYTES),) * len(self._params.stages))
        roster = said.Roster(round_id=ROUND, graph_seed=KEY, members=(member,) * self.plan.cohort)
        yield "keys", length(roster)
        yield (
            "keys",
            length(said.ForwardedShares(round_id=ROUND, sharers=self._everybody, boxes=boxes)),
        )

    def _masked(self, dense: int, *tables: int) -> float:
        frame = said.MaskedInput(
            round_id=ROUND,
            stage=StageId(0),
            sender=ClientId(0),
            dense=b"",
            tables=(b"",) * len(tables),
        )
        return length(frame) + carried(dense, *tables)

    def _unmask_up(self) -> Iterator[float]:
        if self._active:
            yield length(
                said.ConsistencySignature(
                    round_id=ROUND,
                    stage=StageId(0),
                    sender=ClientId(0),
                    groups=KEY,
                    signature=bytes(64),
                )
            )
        yield self._shares({})

    def _shares(self, row_keys: dict[TableId, bytes]) -> float:
        own = [ClientId(0)] if self._params.topology.complete else []
        return length(
            said.RevealedShares(
                round_id=ROUND,
                stage=StageId(0),
                sender=ClientId(0),
                self_masks=dict.fromkeys([*own, *self._others], bytes(SHARE_BYTES)),
                mask_keys={},
                row_keys=row_keys,
            )
        )

    def _unmask_down(self) -> Iterator[float]:
        yield length(said.SurvivorList(round_id=ROUND, stage=StageId(0), survivors=self._everybody))
        if self._active:
            signed = said.Endorsement(groups=KEY, signature=bytes(64))
            yield length(
                said.ConsistencyProof(
                    round_id=ROUND,
                    stage=StageId(0),
                    endorsements={ClientId(c): signed for c in range(self.plan.cohort)},
                )
            )

    def _row_groups(self, tables: tuple[TableForecast, ...]) -> float:
        """One client's groups, with some of its peers drawn at random and the rest like them."""
        rng = np.random.default_rng(0)  # which rows does not matter, only how densely they lie
        peers = self.plan.cohort - 1
        sampled = min(peers, PEERS_SAMPLED)
        size = 0.0
        for i, f in enumerate(tables):
            included = round(f.included)
            shared = {
                ClientId(c): np.flatnonzero(rng.random(included) < f.shared).astype(np.uint64)
                for c in range(sampled)
            }
            shared = {c: rows for c, rows in shared.items() if len(rows)}
            head, full = (
                length(
                    said.RowGroups(
                        round_id=ROUND,
                        stage=StageId(1),
                        tables=(
                            said.TableGroups(
                                table=TableId(i),
                                included=some(f.included, round(f.revealed)),
                                shared=groups,
                            ),
                        ),
                    )
                )
                for groups in ({}, shared)
            )
            size += head + (full - head) * peers / sampled
        frame = length(said.RowGroups(round_id=ROUND, stage=StageId(1), tables=()))
        return size - (len(tables) - 1) * frame

    @property
    def _active(self) -> bool:
        return self.plan.security.threat is Threat.ACTIVE

    @property
    def _signature(self) -> bytes:
        return bytes(64) if self._active else b""

    @property
    def _stage_keys(self) -> tuple[said.StageKeys, ...]:
        return (said.StageKeys(mask_key=KEY, commitment=KEY),) * len(self._params.stages)

    @property
    def _others(self) -> list[ClientId]:
        return [ClientId(c) for c in range(1, self._params.topology.degree + 1)]

    @property
    def _everybody(self) -> npt.NDArray[np.uint64]:
        return np.arange(self.plan.cohort, dtype=np.uint64)

    # --- work ----------------------------------------------------------------------------------

    @property
    def work(self) -> Work | None:
        """Of masked sums. None without one: a plain sum's work is too little to forecast."""
        plan = self.plan
        if not plan.scheme.secure and not plan.narrows:
            return None
        degree, stages, n = self._params.topology.degree, self._params.stages, plan.cohort
        gone = self.dropout * n
        masks = []
        for stage in stages:
            own = pairs = masked_bytes(stage.group, stage.dense)
            pairs *= degree
            for f, spec in zip(self.tables, stage.tables, strict=False):
                rows = masked_bytes(stage.group, f.included * spec.width)
                own, pairs = own + rows, pairs + rows * f.shared * (n - 1)
            masks.append(MaskWork(stage.group, own + pairs, (n - gone) * own + gone * pairs))
        return Work(
            agreements=degree * (1 + len(stages)),
            boxes=2 * degree * len(stages),
            masks=tuple(masks),
            openings=n * len(stages),
        )


def spread(parents: float, rows: int) -> float:
    """Distinct rows that `parents` rows of the parent map to, if the map is even."""
    return rows * -math.expm1(parents * math.log1p(-1.0 / rows)) if rows > 1 else 1.0


def some(count: float, of: int) -> npt.NDArray[np.uint64]:
    """`count` places out of `of`, as a random set would lie: its encoding has a typical length."""
    wanted = min(round(count), of)
    rng = np.random.default_rng(0)
    if wanted * 2 < of:
        found = np.unique(rng.integers(of, size=wanted, dtype=np.uint64))
        while len(found) < wanted:
            more = rng.integers(of, size=wanted - len(found), dtype=np.uint64)
            found = np.union1d(found, more)
        return found
    return np.sort(rng.permutation(of)[:wanted]).astype(np.uint64)


def length(message: Any) -> float:
    return float(len(wire.encode(message)))


def carried(*sizes: int) -> float:
    """Bytes that fields of these lengths add to a message in which they were empty."""
    return float(sum(size + max(0, (size.bit_length() + 6) // 7 - 1) for size in sizes))


def masked_bytes(group: Group, words: float) -> float:
    """Keystream behind so many words of a mask."""
    return words * group.word_bytes


def added(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for stage, size in parts:
        total[stage] = total.get(stage, 0.0) + size
    return total
