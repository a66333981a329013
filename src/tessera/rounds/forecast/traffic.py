"""What a round sends, by lengths of messages that are built to size.

TwoServerTraffic: a round between two servers.

Everybody's messages are of one length, whatever is in them: the plan decides how many bins there
are, and the sizes of tables how deep the trees are. Only how full single bins are differs from
round to round, with the seed that both servers make; here one seed stands for all.

SecAggTraffic: the messages of one client in a secure sum, by length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto import verifiable
from tessera.crypto.dpf import SEED_BYTES
from tessera.crypto.group import Group
from tessera.crypto.keys import SealingKey, SigningKey, seal_to
from tessera.crypto.secret import Secret
from tessera.crypto.shamir import SHARE_BYTES
from tessera.ids import ClientId, RoundId, StageId, TableId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.secagg import messages
from tessera.protocols.secagg.params import SecAggParams, Threat
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.messages import (
    AnswersDue,
    CheckCoin,
    CheckSums,
    Closing,
    Exclusions,
    Forwarded,
    HandshakeConsent,
    HandshakeNonce,
    HandshakeOffer,
    HandshakeReveal,
    Header,
    HelperAnswer,
    IncludedList,
    OpenedRows,
    OpenedSum,
    Purpose,
    Query,
    QueryAnswers,
    SealedAnswer,
    SignedHeader,
    SumShare,
    WriteReport,
)
from tessera.protocols.two_server.params import Servers, TwoServerParams, TwoServerTable
from tessera.protocols.two_server.reports import Layouts, ReportContext, layouts_of
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds.forecast.rows import TableForecast
from tessera.rounds.two_server.domain import WriteCost, costs, two_server_params

# --- sizes ----------------------------------------------------------------------------------------
#
# Lengths of messages that are built to the expected sizes and encoded.
#
# So a forecast cannot drift from the wire format.


ROUND: Final = RoundId(1)


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


# --- secagg ---------------------------------------------------------------------------------------

KEY: Final = bytes(32)
PEERS_SAMPLED: Final = 40


@dataclass(frozen=True)
class SecAggTraffic:
    """What a client and the server send each other, in bytes."""

    params: SecAggParams

    def keys_up(self) -> Iterator[tuple[str, float]]:
        boxes = dict.fromkeys(self._others, (bytes(messages.BOX_BYTES),) * len(self.params.stages))
        yield (
            "keys",
            length(
                messages.Advert(
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
        yield "keys", length(messages.ShareBoxes(round_id=ROUND, sender=ClientId(0), boxes=boxes))

    def keys_down(self) -> Iterator[tuple[str, float]]:
        member = messages.Member(
            client=ClientId(0),
            channel_key=KEY,
            nonce=KEY,
            stages=self._stage_keys,
            signature=self._signature,
        )
        boxes = dict.fromkeys(self._others, (bytes(messages.BOX_BYTES),) * len(self.params.stages))
        roster = messages.Roster(
            round_id=ROUND, graph_seed=KEY, members=(member,) * self.params.cohort
        )
        yield "keys", length(roster)
        yield (
            "keys",
            length(messages.ForwardedShares(round_id=ROUND, sharers=self._everybody, boxes=boxes)),
        )

    def masked(self, dense: int, *tables: int) -> float:
        frame = messages.MaskedInput(
            round_id=ROUND,
            stage=StageId(0),
            sender=ClientId(0),
            dense=b"",
            tables=(b"",) * len(tables),
        )
        return length(frame) + carried(dense, *tables)

    def unmask_up(self) -> Iterator[float]:
        if self._active:
            yield length(
                messages.ConsistencySignature(
                    round_id=ROUND,
                    stage=StageId(0),
                    sender=ClientId(0),
                    groups=KEY,
                    signature=bytes(64),
                )
            )
        yield self.shares({})

    def shares(self, row_keys: dict[TableId, bytes]) -> float:
        own = [ClientId(0)] if self.params.topology.complete else []
        return length(
            messages.RevealedShares(
                round_id=ROUND,
                stage=StageId(0),
                sender=ClientId(0),
                self_masks=dict.fromkeys([*own, *self._others], bytes(SHARE_BYTES)),
                mask_keys={},
                row_keys=row_keys,
            )
        )

    def unmask_down(self) -> Iterator[float]:
        yield length(
            messages.SurvivorList(round_id=ROUND, stage=StageId(0), survivors=self._everybody)
        )
        if self._active:
            signed = messages.Endorsement(groups=KEY, signature=bytes(64))
            yield length(
                messages.ConsistencyProof(
                    round_id=ROUND,
                    stage=StageId(0),
                    endorsements={ClientId(c): signed for c in range(self.params.cohort)},
                )
            )

    def row_groups(self, tables: tuple[TableForecast, ...]) -> float:
        """One client's groups, with some of its peers drawn at random and the rest like them."""
        rng = np.random.default_rng(0)  # which rows does not matter, only how densely they lie
        peers = self.params.cohort - 1
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
                    messages.RowGroups(
                        round_id=ROUND,
                        stage=StageId(1),
                        tables=(
                            messages.TableGroups(
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
        frame = length(messages.RowGroups(round_id=ROUND, stage=StageId(1), tables=()))
        return size - (len(tables) - 1) * frame

    @property
    def _active(self) -> bool:
        return self.params.threat is Threat.ACTIVE

    @property
    def _signature(self) -> bytes:
        return bytes(64) if self._active else b""

    @property
    def _stage_keys(self) -> tuple[messages.StageKeys, ...]:
        return (messages.StageKeys(mask_key=KEY, commitment=KEY),) * len(self.params.stages)

    @property
    def _others(self) -> list[ClientId]:
        return [ClientId(c) for c in range(1, self.params.topology.degree + 1)]

    @property
    def _everybody(self) -> npt.NDArray[np.uint64]:
        return np.arange(self.params.cohort, dtype=np.uint64)


# --- work -----------------------------------------------------------------------------------------
#
# Work: what the masked sums of a round make processors do.


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
    boxes: float  # sealed and unsealed by one client
    masks: tuple[MaskWork, ...]  # by stage
    openings: float  # secrets that the server puts together from shares


def masked_sums(params: SecAggParams, tables: Sequence[TableForecast], dropout: float) -> Work:
    """The work of a round's secure sums, if this share of the cohort drops out."""
    degree, stages, n = params.topology.degree, params.stages, params.cohort
    gone = dropout * n
    masks = []
    for stage in stages:
        own = pairs = masked_bytes(stage.group, stage.dense)
        pairs *= degree
        for f, spec in zip(tables, stage.tables, strict=False):
            rows = masked_bytes(stage.group, f.included * spec.width)
            own, pairs = own + rows, pairs + rows * f.shared * (n - 1)
        masks.append(MaskWork(stage.group, own + pairs, (n - gone) * own + gone * pairs))
    return Work(
        agreements=degree * (1 + len(stages)),
        boxes=2 * degree * len(stages),
        masks=tuple(masks),
        openings=n * len(stages),
    )


def masked_bytes(group: Group, words: float) -> float:
    """Keystream behind so many words of a mask."""
    return words * group.word_bytes


DIGEST: Final = bytes(32)
SIGNATURE: Final = bytes(64)
ME: Final = ClientId(0)


@dataclass(frozen=True)
class TwoServerTraffic:
    """The messages of one round over these domains; `written` has the rows that anybody writes."""

    plan: Plan
    domain: Mapping[str, Ids] | None
    written: Mapping[str, int]

    @cached_property
    def params(self) -> TwoServerParams:
        return two_server_params(self.plan, ROUND, self._servers, self.domain)

    @cached_property
    def layouts(self) -> Layouts:
        return layouts_of(self.params, self._header)

    @property
    def writing(self) -> list[WriteCost]:
        """How every table is written, and what the other way would cost."""
        return costs(self.plan, self.params)

    def up(self) -> Iterator[tuple[str, float]]:
        yield "choice", length(self._query)
        yield "update", self._over_a_period(length(self._report), length(self._hint))

    def down(self) -> Iterator[tuple[str, float]]:
        signed = SignedHeader(header=self._header, leader=SIGNATURE, helper=SIGNATURE)
        yield "keys", length(signed)
        tables = tuple(
            bytes(t.rows * t.row_bytes) if t.reads_whole else bytes(t.half_bytes)
            for t in self.params.read
        )
        answers = QueryAnswers(
            round_id=ROUND,
            report_id=DIGEST,
            tables=tables,
            dense=bytes(self.params.dense_bytes),
            box=self._answer_box,
        )
        yield "rows down", length(answers)

    def between(self) -> float:
        """Bytes between the two servers, both ways, for each client of a full cohort."""
        full, hint = (
            sum(map(length, self._forwarded(report))) for report in (self._report, self._hint)
        )
        each = self._over_a_period(full, hint) + length(self._answer)
        return each + sum(map(length, self._once)) / self.plan.cohort

    @property
    def report_bytes(self) -> tuple[float, float]:
        """A client's report with full keys, and in a later round of their period."""
        return length(self._report), length(self._hint)

    def _over_a_period(self, first: float, later: float) -> float:
        """The mean over the rounds in which keys last."""
        rounds = self.params.key_rounds
        return (first + (rounds - 1) * later) / rounds

    # --- a client's ---------------------------------------------------------------------------

    @cached_property
    def _query(self) -> Query:
        public, seeds = self._keys(Purpose.RETRIEVE)
        return Query(
            round_id=ROUND,
            sender=ME,
            report_id=DIGEST,
            public=public,
            seeds=seeds,
            box=self._box(Purpose.RETRIEVE, public),
        )

    @cached_property
    def _report(self) -> WriteReport:
        public, seeds = self._keys(Purpose.WRITE)
        return WriteReport(
            round_id=ROUND,
            sender=ME,
            report_id=DIGEST,
            public=public,
            seeds=seeds,
            dense=bytes(packed_bytes(self.params.group, self.params.dense_words)),
            box=self._box(Purpose.WRITE, public),
        )

    @cached_property
    def _hint(self) -> WriteReport:
        """A report of a later round: last corrections alone, and no seeds."""
        public = tuple(bytes(f.finals_bytes) for f in self.layouts.forests(Purpose.WRITE))
        box = self._box(Purpose.WRITE, public, seeds=0)
        return replace(self._report, public=public, seeds=(), box=box)

    def _keys(self, purpose: Purpose) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        forests = self.layouts.forests(purpose)
        checked = purpose is Purpose.WRITE and self.params.verified
        public = tuple(
            bytes(f.public_bytes + (verifiable.correction_bytes(f) if checked else 0))
            for f in forests
        )
        return public, (bytes(SEED_BYTES),) * len(forests)

    def _box(self, purpose: Purpose, public: tuple[bytes, ...], seeds: int | None = None) -> bytes:
        reading = purpose is Purpose.RETRIEVE
        return reports.seal_box(
            self._report_context(purpose),
            public,
            seeds=[Secret(bytes(SEED_BYTES))] * (len(public) if seeds is None else seeds),
            dense_seed=None if reading else Secret(DIGEST),
            answer_key=DIGEST if reading else None,
            key=SigningKey.from_secret(Secret(DIGEST)),
        )

    # --- between the servers --------------------------------------------------------------------

    def _forwarded(self, report: WriteReport) -> Iterator[Forwarded]:
        for purpose, message in ((Purpose.RETRIEVE, self._query), (Purpose.WRITE, report)):
            yield Forwarded(
                purpose=purpose,
                round_id=ROUND,
                sender=ME,
                report_id=DIGEST,
                public=message.public,
                box=message.box,
            )

    @cached_property
    def _answer_box(self) -> bytes:
        halves = tuple(bytes(t.half_bytes) for t in self.params.read if t.reads_points)
        inside = wire.encode(SealedAnswer(tables=halves, signature=SIGNATURE))
        return seal_to(self._servers.box, inside, b"")

    @property
    def _answer(self) -> HelperAnswer:
        return HelperAnswer(round_id=ROUND, client=ME, box=self._answer_box)

    @property
    def _once(self) -> Iterator[Any]:
        """Messages that are sent once in a round."""
        header, group = self._header, self.params.group
        everybody = {ClientId(c): DIGEST for c in range(self.plan.cohort)}
        yield HandshakeOffer(
            round_id=ROUND,
            context=DIGEST,
            commitment=DIGEST,
            tables=header.tables,
            dense=DIGEST,
        )
        yield HandshakeNonce(round_id=ROUND, nonce=DIGEST, period=ROUND)
        yield HandshakeReveal(round_id=ROUND, nonce=DIGEST, signature=SIGNATURE)
        yield HandshakeConsent(round_id=ROUND, signature=SIGNATURE)
        yield AnswersDue(round_id=ROUND, queries=everybody)
        yield Closing(round_id=ROUND, reports=everybody)
        if self.params.verified:
            yield CheckCoin(round_id=ROUND, coin=DIGEST)
            yield CheckSums(round_id=ROUND, sums=everybody)
        yield Exclusions(round_id=ROUND, reasons={})
        yield IncludedList(round_id=ROUND, reports=everybody, signature=SIGNATURE)
        dense = bytes(packed_bytes(group, self.params.dense))
        yield SumShare(
            round_id=ROUND,
            dense=dense,
            tables=tuple(bytes(packed_bytes(group, t.rows * t.words)) for t in self.params.written),
            signature=SIGNATURE,
        )
        opened = []
        for t in self.params.written:
            rows = self._written(t)
            words = bytes(packed_bytes(group, rows * t.words))
            opened.append(OpenedRows(table=t.table, rows=_spaced(rows, t.rows), words=words))
        yield OpenedSum(round_id=ROUND, dense=dense, tables=tuple(opened), signature=SIGNATURE)

    def _written(self, t: TwoServerTable) -> int:
        """Rows of a table that anybody writes; of a cut no two clients write the same, at worst."""
        known = self.plan.table_ids.get(t.table)
        if known is not None:
            return min(t.rows, self.written[known.name])
        return min(t.rows, self.plan.cohort * t.max_rows)

    # --- what everything is bound to ------------------------------------------------------------

    @cached_property
    def _servers(self) -> Servers:
        return Servers(
            leader=DIGEST,
            helper=b"\x01" * 32,
            box=SealingKey.from_secret(Secret(DIGEST)).public,
        )

    @cached_property
    def _header(self) -> Header:
        return Header(
            round_id=ROUND,
            context=self.params.context,
            leader_nonce=DIGEST,
            helper_nonce=DIGEST,
            tables={t.table: DIGEST for t in self.params.read},
            dense=DIGEST,
            period=ROUND,
        )

    def _report_context(self, purpose: Purpose) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=self._header,
            purpose=purpose,
            client=ME,
            report_id=DIGEST,
        )


def _spaced(count: int, of: int) -> npt.NDArray[np.uint64]:
    """So many rows of a table, spread over it."""
    return (np.arange(count, dtype=np.uint64) * np.uint64(of)) // np.uint64(max(1, count))
