"""What a round between two servers sends, by lengths of messages that are built to size.

Everybody's messages are of one length, whatever is in them: the plan decides how many bins there
are, and the sizes of tables how deep the trees are. Only how full single bins are differs from
round to round, with the seed that both servers make; here one seed stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto import verifiable
from tessera.crypto.dpf import SEED_BYTES
from tessera.crypto.keys import SealingKey, SigningKey, seal_to
from tessera.crypto.secret import Secret
from tessera.ids import ClientId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
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
from tessera.rounds.forecast.secagg import ROUND, length
from tessera.rounds.two_server.domain import WriteCost, costs, two_server_params

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
