"""The two servers of a retrieval: each XORs, for every bin, the rows that a client's keys select.

Queries are answered together when the phase closes, so that a table is read once for many clients.
The leader's half goes to the client as it is, over their connection; the helper's is sealed to the
one-time key that came in the client's box, since the leader with both halves would have the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.keys import seal_to
from tessera.errors import MisuseError
from tessera.ids import HELPER, SERVER, ClientId, Party, TableId
from tessera.protocols.machine import Left, Moved, Outbound
from tessera.protocols.secagg.phases import Members
from tessera.protocols.two_server.collector import (
    CollectingHelper,
    CollectingLeader,
    HelperReport,
    HelperSetup,
    LeaderSetup,
    ReportsByClient,
)
from tessera.protocols.two_server.handshake import ServedModel
from tessera.protocols.two_server.messages import (
    AnswersDue,
    Digest,
    Forwarded,
    Header,
    HelperAnswer,
    Purpose,
    Query,
    QueryAnswers,
    Reasons,
    SealedAnswer,
)
from tessera.protocols.two_server.params import MAX_COHORT, Read, TwoServerParams
from tessera.protocols.two_server.read.client import RowTagCache
from tessera.protocols.two_server.reports import (
    HELPER_PARTY,
    LEADER_PARTY,
    Layouts,
    ReportContext,
    Reported,
    batches,
    layouts_of,
)
from tessera.wire.stored import ByDigest, Kept

Bytes = npt.NDArray[np.uint8]


class Answerer:
    """One server's tables in the order of their bins, and its answers to queries.

    A role that was woken is given its model again, and it may be another by then: `given_again`.
    """

    def __init__(self, setup: RetrievalLeaderSetup | RetrievalHelperSetup, party: int) -> None:
        self._setup, self._party = setup, party
        self._specs = {t.table: t for t in setup.params.tables}
        self.given_again = False

    def answer(self, queries: Sequence[Reported]) -> list[dict[TableId, bytes]]:
        """For every query its half of every bin, by table."""
        if self.given_again:
            check_signed(self._setup.params, self._setup.header, self._setup.model)
            self.given_again = False
        rows, tags = self._arranged()
        found: list[dict[TableId, bytes]] = [{} for _ in queries]
        workers = self._setup.workers
        each = max(1, -(-len(queries) // workers.count))
        starts = range(0, len(queries), each)
        workers.run(
            [
                partial(self._answer, rows, tags, queries[at : at + each], found[at : at + each])
                for at in starts
            ]
        )
        return found

    @property
    def _layouts(self) -> Layouts:
        return layouts_of(self._setup.params, self._setup.header)

    def _arranged(self) -> tuple[dict[TableId, Bytes], dict[TableId, Bytes]]:
        """Rows in the order of their bins, and the tags of those that are checked."""
        row_tags = self._setup.row_tags or RowTagCache()
        padded: dict[TableId, Bytes] = {}
        tags: dict[TableId, Bytes] = {}
        for table, layout in self._layouts.reading.items():
            spec = self._specs[table]
            rows = np.ascontiguousarray(self._setup.model.tables[table])
            padded[table] = layout.padded(rows)
            if spec.read is Read.CHECKED:
                ids = spec.named(np.arange(spec.rows))
                tags[table] = row_tags.of(table, ids, rows, self._setup.header.seed)
        return padded, tags

    def _answer(
        self,
        rows: Mapping[TableId, Bytes],
        tags: Mapping[TableId, Bytes],
        queries: Sequence[Reported],
        found: list[dict[TableId, bytes]],
    ) -> None:
        for at, (table, layout) in enumerate(self._layouts.reading.items()):
            unanswered = iter(found)
            for some in batches(queries, layout.forest):
                keys = [q.expanded(layout.forest, table, at, party=self._party) for q in some]
                both = layout.answer(
                    keys, rows[table], self._specs[table].row_bytes, tags.get(table)
                )
                for half in zip(*both, strict=True):
                    next(unanswered)[table] = b"".join(half)


def check_signed(params: TwoServerParams, header: Header, model: ServedModel) -> None:
    """MisuseError unless this is the model that both servers have signed."""
    if model.digests(params) != (header.tables, header.dense):
        raise MisuseError(
            f"two servers: round {params.round_id} goes on over another model than it began with"
        )


# --- the leader -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldQuery:
    """A query at the leader, and the digest by which the helper knows it."""

    query: Annotated[Kept[Query], ByDigest(Query)]
    report_id: Digest = field(repr=False)
    digest: Digest = field(repr=False)


HeldQueries = Annotated[
    dict[ClientId, HeldQuery], wire.ByKey(wire.U32, wire.Nested(HeldQuery), MAX_COHORT)
]


@wire.record(tag=0x0590)
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingQueries:
    """Queries come in and are forwarded to the helper."""

    held: HeldQueries = field(default_factory=dict)


@wire.record(tag=0x0591)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingHalves:
    """No more queries; waits for the helper's halves.

    `answered` has the clients whose answer has come: True if it went on to them, False if the
    helper refused their query.
    """

    held: HeldQueries
    answered: Annotated[dict[ClientId, bool], wire.ByKey(wire.U32, wire.FLAG, MAX_COHORT)] = field(
        default_factory=dict
    )

    @property
    def refused(self) -> frozenset[ClientId]:
        return frozenset(c for c, sent in self.answered.items() if not sent)


@wire.record(tag=0x0592)
@dataclass(frozen=True, slots=True, kw_only=True)
class QueriesAnswered:
    """Nothing more is due; some the helper has refused."""

    refused: Members


@dataclass(frozen=True, kw_only=True)
class RetrievalLeaderSetup(LeaderSetup):
    """`row_tags` outlives a round, so that the next one computes tags of changed rows only."""

    model: ServedModel
    row_tags: RowTagCache | None = None

    def __post_init__(self) -> None:
        self.model.check(self.params)


class RetrievalLeader(CollectingLeader[RetrievalLeaderSetup]):
    """The leader: takes queries, forwards them, and sends both halves back."""

    ROLE = "leader of a retrieval"
    STATES = (CollectingQueries, AwaitingHalves, QueriesAnswered)
    PHASES: ClassVar = {
        CollectingQueries: "query",
        AwaitingHalves: "answer",
        QueriesAnswered: "done",
    }
    FROM_CLIENT = (Query,)
    FROM_HELPER = (HelperAnswer,)

    PURPOSE = Purpose.RETRIEVE
    NOUN = "query"

    def __init__(self, setup: RetrievalLeaderSetup) -> None:
        super().__init__(setup, CollectingQueries())

    def _set_up(self, setup: RetrievalLeaderSetup) -> None:
        super()._set_up(setup)
        self._answerer = Answerer(setup, LEADER_PARTY)
        self._halves: dict[ClientId, dict[TableId, bytes]] | None = None

    def _resume(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> None:
        super()._resume(snapshot, messages)
        self._answerer.given_again = True

    @property
    def refused(self) -> frozenset[ClientId]:
        """Those whose queries the helper has refused."""
        state = self.state
        if not isinstance(state, AwaitingHalves | QueriesAnswered):
            return frozenset()
        return state.refused

    def resend(self) -> list[Outbound]:
        """Its last message to the helper again."""
        state = self.state
        return [self._answers_due(state.held)] if isinstance(state, AwaitingHalves) else []

    def _answers_due(self, held: Mapping[ClientId, HeldQuery]) -> Outbound:
        queries = {c: held[c].digest for c in sorted(held)}
        return Outbound.of(HELPER, AnswersDue(round_id=self.round_id, queries=queries))

    def _check_due(self, sender: Party, message: Any) -> None:
        super()._check_due(sender, message)
        if isinstance(message, HelperAnswer) and (
            message.client not in self.state.held or message.client in self.state.answered
        ):
            raise self._refuse(sender, "sent an answer that is not due")

    def _on_query(self, state: CollectingQueries, kept: Kept[Query]) -> Moved:
        query = kept.message
        self._check_report(query)
        digest = self._digest(query)
        state.held[query.sender] = HeldQuery(query=kept, report_id=query.report_id, digest=digest)
        kept.forget_decoded()
        return state, [self._forwarded(query)]

    def _close_queries(self, state: CollectingQueries) -> Moved:
        if not state.held:
            return QueriesAnswered(refused=frozenset()), []
        following = AwaitingHalves(held=state.held)
        self._halves = self._answered(state.held)
        return following, [self._answers_due(state.held)]

    def _answered(self, held: Mapping[ClientId, HeldQuery]) -> dict[ClientId, dict[TableId, bytes]]:
        """The leader's half of every answer; it follows from the queries and the model."""
        clients = sorted(held)
        queries = [self._reported(c, held[c].query.message) for c in clients]
        halves = self._answerer.answer(queries)
        for c in clients:
            held[c].query.forget_decoded()
        return dict(zip(clients, halves, strict=True))

    def _on_half(self, state: AwaitingHalves, kept: Kept[HelperAnswer]) -> Moved:
        answer, client = kept.message, kept.message.client
        out = [self._both_halves(state, answer)] if answer.box else []
        state.answered[client] = bool(answer.box)
        if state.answered.keys() != state.held.keys():
            return state, out
        return self._close_halves(state)[0], out

    def _both_halves(self, state: AwaitingHalves, answer: HelperAnswer) -> Outbound:
        if self._halves is None:  # woken since they were made
            self._halves = self._answered(state.held)
        ours = self._halves[answer.client]
        whole, dense = self._whole
        message = QueryAnswers(
            round_id=self.round_id,
            report_id=state.held[answer.client].report_id,
            tables=tuple(
                whole[t.table] if t.reads_whole else ours[t.table] for t in self.params.read
            ),
            dense=dense,
            box=answer.box,
        )
        return Outbound.of(answer.client, message)

    @cached_property
    def _whole(self) -> tuple[dict[TableId, wire.HashedBytes], wire.HashedBytes]:
        """What goes to every client alike: the tables that are read whole, and the dense part."""
        tables = self.setup.model.tables
        whole = {
            t.table: wire.HashedBytes(tables[t.table]) for t in self.params.read if t.reads_whole
        }
        return whole, wire.HashedBytes(self.setup.model.dense)

    def _close_halves(self, state: AwaitingHalves) -> Moved:
        """No more waiting for the helper."""
        self._halves = None
        return QueriesAnswered(refused=state.refused), []

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._halves = None


RetrievalLeader.STEPS = {
    (CollectingQueries, Query): RetrievalLeader._on_query,
    (AwaitingHalves, HelperAnswer): RetrievalLeader._on_half,
}
RetrievalLeader.CLOSES = {
    CollectingQueries: RetrievalLeader._close_queries,
    AwaitingHalves: RetrievalLeader._close_halves,
}


# --- the helper -----------------------------------------------------------------------------------


@wire.record(tag=0x0598)
@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingQueries:
    """Queries come in."""

    held: ReportsByClient = field(default_factory=dict)
    excluded: Reasons = field(default_factory=dict)


@wire.record(tag=0x0599)
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersGiven:
    """Every answer is sealed and sent; the queries are deleted. A box is not sealed again."""

    answers: Annotated[
        tuple[Kept[HelperAnswer], ...], wire.Sequence(ByDigest(HelperAnswer), MAX_COHORT)
    ]


@dataclass(frozen=True, kw_only=True)
class RetrievalHelperSetup(HelperSetup):
    """`model` is the helper's own copy; `row_tags` are its from earlier rounds."""

    model: ServedModel
    row_tags: RowTagCache | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check(self.params)


class RetrievalHelper(CollectingHelper[RetrievalHelperSetup]):
    """The helper: checks what the leader carries, and answers to the client alone."""

    ROLE = "helper of a retrieval"
    STATES = (HoldingQueries, AnswersGiven, Left)
    PHASES: ClassVar = {HoldingQueries: "query", AnswersGiven: "done", Left: "left"}
    SETTLED = (AnswersGiven,)
    FROM_SERVER = (Forwarded, AnswersDue)

    PURPOSE = Purpose.RETRIEVE
    HOLDING = (HoldingQueries,)
    LATE = "sent a query after the answers were due"

    def __init__(self, setup: RetrievalHelperSetup) -> None:
        super().__init__(setup, HoldingQueries())

    def _set_up(self, setup: RetrievalHelperSetup) -> None:
        super()._set_up(setup)
        self._answerer = Answerer(setup, HELPER_PARTY)

    def _resume(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> None:
        super()._resume(snapshot, messages)
        self._answerer.given_again = True

    def resend(self) -> list[Outbound]:
        """The answers again, byte for byte."""
        if not isinstance(self.state, AnswersGiven):
            return []
        return [Outbound.again(SERVER, each.data) for each in self.state.answers]

    def _on_due(self, state: HoldingQueries, kept: Kept[AnswersDue]) -> Moved:
        held = {
            c: state.held[c]
            for c, digest in kept.message.queries.items()
            if c in state.held and state.held[c].digest == digest
        }
        queries = [self._reported(c, h) for c, h in held.items()]
        boxes = {
            query.context.client: self._sealed(query.context, held[query.context.client], half)
            for query, half in zip(queries, self._answerer.answer(queries), strict=True)
        }
        answers = tuple(
            Kept.of(HelperAnswer(round_id=self.round_id, client=c, box=boxes.get(c, b"")))
            for c in sorted(kept.message.queries)
        )
        self._forget()
        return AnswersGiven(answers=answers), [Outbound.again(SERVER, a.data) for a in answers]

    def _sealed(
        self, context: ReportContext, held: HelperReport, half: dict[TableId, bytes]
    ) -> bytes:
        tables = tuple(map(wire.HashedBytes, half.values()))
        signature = self.setup.key.sign(context.answer_statement(held.digest, tables))
        inside = wire.encode(SealedAnswer(tables=tables, signature=signature))
        return seal_to(self._answer_key(held), inside, context.answer_info(held.digest))

    def _answer_key(self, held: HelperReport) -> bytes:
        """The one-time key from inside the box, never one that the leader relays."""
        assert held.answer_key is not None
        return held.answer_key


RetrievalHelper.STEPS = {
    (HoldingQueries, Forwarded): RetrievalHelper._on_report,
    (HoldingQueries, AnswersDue): RetrievalHelper._on_due,
    (AnswersGiven, Forwarded): RetrievalHelper._on_late_report,
}
