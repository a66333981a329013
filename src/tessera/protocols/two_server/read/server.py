"""The two servers of a retrieval: each XORs, for every bin, the rows that a client's keys select.

Queries are answered together when the phase closes, so that a table is read once for many clients.
The leader's half goes to the client as it is, over their connection; the helper's is sealed to the
one-time key that came in the client's box, since the leader with both halves would have the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.keys import SealingKey, SigningKey, seal_to
from tessera.errors import MisuseError, PeerError
from tessera.ids import HELPER, SERVER, ClientId, Party, TableId
from tessera.protocols.machine import Coordinator, Follower, Left, Moved, Outbound
from tessera.protocols.secagg.phases import Members
from tessera.protocols.two_server.collector import (
    HelperReport,
    ReplayGuard,
    ReportInbox,
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
from tessera.protocols.two_server.read.row_tags import RowTagCache
from tessera.protocols.two_server.reports import (
    HELPER_PARTY,
    LEADER_PARTY,
    ReportContext,
    Reported,
    SingleWorker,
    Workers,
    batches,
    check_keys,
    layouts_of,
)
from tessera.wire.stored import ByDigest, Kept, Owner

Bytes = npt.NDArray[np.uint8]


class Answerer:
    """One server's tables in the order of their bins, and its answers to queries."""

    def __init__(
        self,
        params: TwoServerParams,
        header: Header,
        model: ServedModel,
        party: int,
        row_tags: RowTagCache | None = None,
        workers: Workers | None = None,
    ) -> None:
        model.check(params)
        row_tags = row_tags or RowTagCache()
        self._workers: Workers = workers or SingleWorker()
        self._layouts = layouts_of(params, header)
        self._party = party
        self._specs = {t.table: t for t in params.tables}
        self._rows: dict[TableId, Bytes] = {}
        self._tags: dict[TableId, Bytes] = {}
        for table, layout in self._layouts.reading.items():
            spec, rows = self._specs[table], np.ascontiguousarray(model.tables[table])
            self._rows[table] = layout.padded(rows)
            if spec.read is Read.CHECKED:
                ids = spec.named(np.arange(spec.rows))
                self._tags[table] = row_tags.of(table, ids, rows, header.seed)

    def answer(self, queries: Sequence[Reported]) -> list[dict[TableId, bytes]]:
        """For every query its half of every bin, by table."""
        found: list[dict[TableId, bytes]] = [{} for _ in queries]
        each = max(1, -(-len(queries) // self._workers.count))
        starts = range(0, len(queries), each)
        self._workers.run(
            [partial(self._answer, queries[at : at + each], found[at : at + each]) for at in starts]
        )
        return found

    def _answer(self, queries: Sequence[Reported], found: list[dict[TableId, bytes]]) -> None:
        for at, (table, layout) in enumerate(self._layouts.reading.items()):
            unanswered = iter(found)
            for some in batches(queries, layout.forest):
                keys = [q.expanded(layout.forest, table, at, party=self._party) for q in some]
                both = layout.answer(
                    keys, self._rows[table], self._specs[table].row_bytes, self._tags.get(table)
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


class RetrievalLeader(Coordinator):
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

    def __init__(
        self,
        params: TwoServerParams,
        header: Header,
        model: ServedModel,
        invited: Iterable[ClientId],
        *,
        row_tags: RowTagCache | None = None,
        workers: Workers | None = None,
    ) -> None:
        """`row_tags` outlives a round, so that the next one computes tags of changed rows only."""
        owner = self._hold(params, header, model, invited, row_tags, workers)
        self._begin(owner, CollectingQueries())

    @classmethod
    def wake(
        cls,
        snapshot: bytes,
        messages: Mapping[bytes, bytes],
        params: TwoServerParams,
        header: Header,
        model: ServedModel,
        invited: Iterable[ClientId],
        *,
        row_tags: RowTagCache | None = None,
        workers: Workers | None = None,
    ) -> Self:
        leader = cls.__new__(cls)
        owner = leader._hold(params, header, model, invited, row_tags, workers)
        leader._resume(snapshot, messages, owner)
        leader._woken = True
        return leader

    def _hold(
        self,
        params: TwoServerParams,
        header: Header,
        model: ServedModel,
        invited: Iterable[ClientId],
        row_tags: RowTagCache | None,
        workers: Workers | None,
    ) -> Owner:
        model.check(params)
        self.params, self.header = params, header
        self.invited = frozenset(invited)
        self._model, self._row_tags, self._workers = model, row_tags, workers
        self._woken = False
        self._halves: dict[ClientId, dict[TableId, bytes]] | None = None
        return self._owned(SERVER, params.round_id, header.digest)

    @property
    def expected(self) -> frozenset[Party]:
        """The clients whose queries have not come, or the helper."""
        match self.state:
            case CollectingQueries(held=held):
                return frozenset(self.invited - held.keys())
            case AwaitingHalves():
                return frozenset({HELPER})
        return frozenset()

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
        if isinstance(message, Query) and sender in self.state.held:
            raise self._refuse(sender, "sent a query that is not due")
        if isinstance(message, HelperAnswer) and (
            message.client not in self.state.held or message.client in self.state.answered
        ):
            raise self._refuse(sender, "sent an answer that is not due")

    def _on_query(self, state: CollectingQueries, kept: Kept[Query]) -> Moved:
        query, sender = kept.message, kept.message.sender
        forests = layouts_of(self.params, self.header).forests(Purpose.RETRIEVE)
        check_keys(forests, query.public, self._refuse, sender)
        if len(query.seeds) != len(forests):
            raise self._refuse(sender, f"sent {len(query.seeds)} seeds")
        context = self._report_context(sender, query.report_id)
        forwarded = Forwarded(
            purpose=Purpose.RETRIEVE,
            round_id=self.round_id,
            sender=sender,
            report_id=query.report_id,
            public=query.public,
            box=query.box,
        )
        digest = context.report_digest(query.public, query.box)
        state.held[sender] = HeldQuery(query=kept, report_id=query.report_id, digest=digest)
        kept.forget_decoded()
        return state, [Outbound.of(HELPER, forwarded)]

    def _close_queries(self, state: CollectingQueries) -> Moved:
        if not state.held:
            return QueriesAnswered(refused=frozenset()), []
        following = AwaitingHalves(held=state.held)
        self._halves = self._answered(state.held)
        return following, [self._answers_due(state.held)]

    def _signed_model(self) -> ServedModel:
        """Its model. A role that was woken is given one again, and it may be another by then."""
        if self._woken:
            check_signed(self.params, self.header, self._model)
            self._woken = False
        return self._model

    def _answered(self, held: Mapping[ClientId, HeldQuery]) -> dict[ClientId, dict[TableId, bytes]]:
        """The leader's half of every answer; it follows from the queries and the model."""
        answerer = Answerer(
            self.params,
            self.header,
            self._signed_model(),
            LEADER_PARTY,
            self._row_tags,
            self._workers,
        )
        clients = sorted(held)
        queries = [
            Reported(self._report_context(c, query.report_id), query.public, query.seeds)
            for c in clients
            for query in [held[c].query.message]
        ]
        halves = answerer.answer(queries)
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
        tables = self._model.tables
        whole = {
            t.table: wire.HashedBytes(tables[t.table]) for t in self.params.read if t.reads_whole
        }
        return whole, wire.HashedBytes(self._model.dense)

    def _close_halves(self, state: AwaitingHalves) -> Moved:
        """No more waiting for the helper."""
        self._halves = None
        return QueriesAnswered(refused=state.refused), []

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._halves = None

    def _report_context(self, client: ClientId, report_id: bytes) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=self.header,
            purpose=Purpose.RETRIEVE,
            client=client,
            report_id=report_id,
        )


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


class RetrievalHelper(Follower):
    """The helper: checks what the leader carries, and answers to the client alone."""

    ROLE = "helper of a retrieval"
    STATES = (HoldingQueries, AnswersGiven, Left)
    PHASES: ClassVar = {HoldingQueries: "query", AnswersGiven: "done", Left: "left"}
    SETTLED = (AnswersGiven,)
    FROM_SERVER = (Forwarded, AnswersDue)

    def __init__(
        self,
        params: TwoServerParams,
        header: Header,
        model: ServedModel,
        *,
        key: SigningKey,
        box_key: SealingKey,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        row_tags: RowTagCache | None = None,
        workers: Workers | None = None,
    ) -> None:
        owner = self._hold(params, header, model, key, box_key, row_tags, workers)
        self._begin(owner, HoldingQueries())
        self._open_inbox(directory, box_key, replay_guard)

    @classmethod
    def wake(
        cls,
        snapshot: bytes,
        messages: Mapping[bytes, bytes],
        params: TwoServerParams,
        header: Header,
        model: ServedModel,
        *,
        key: SigningKey,
        box_key: SealingKey,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        row_tags: RowTagCache | None = None,
        workers: Workers | None = None,
    ) -> Self:
        helper = cls.__new__(cls)
        owner = helper._hold(params, header, model, key, box_key, row_tags, workers)
        helper._resume(snapshot, messages, owner)
        helper._woken = True
        helper._open_inbox(directory, box_key, replay_guard)
        return helper

    def _hold(
        self,
        params: TwoServerParams,
        header: Header,
        model: ServedModel,
        key: SigningKey,
        box_key: SealingKey,
        row_tags: RowTagCache | None,
        workers: Workers | None,
    ) -> Owner:
        if (key.public, box_key.public) != (params.servers.helper, params.servers.box):
            raise MisuseError("two servers: the helper's keys are not the ones that are pinned")
        model.check(params)
        self.params, self.header, self._key = params, header, key
        self._model, self._row_tags, self._workers = model, row_tags, workers
        self._woken = False
        return self._owned(HELPER, params.round_id, header.digest)

    def _open_inbox(
        self,
        directory: Mapping[ClientId, bytes],
        box_key: SealingKey,
        replay_guard: ReplayGuard,
    ) -> None:
        holding = self.state if isinstance(self.state, HoldingQueries) else HoldingQueries()
        self.inbox = ReportInbox(
            self.params,
            self.header,
            Purpose.RETRIEVE,
            directory=directory,
            box_key=box_key,
            replay_guard=replay_guard,
            held=holding.held,
            excluded=holding.excluded,
        )

    def resend(self) -> list[Outbound]:
        """The answers again, byte for byte."""
        if not isinstance(self.state, AnswersGiven):
            return []
        return [Outbound.again(SERVER, each.data) for each in self.state.answers]

    def _end(self, state: Any) -> None:
        super()._end(state)
        self.inbox.forget()

    def _check_message(self, message: Any) -> None:
        if message.round_id != self.round_id:
            raise self._fault("sent a message of another round")
        if isinstance(message, Forwarded) and message.purpose is not Purpose.RETRIEVE:
            raise self._fault("forwarded keys that are for writing")

    def _on_query(self, state: HoldingQueries, kept: Kept[Forwarded]) -> Moved:
        self.inbox.take(kept)
        return state, []

    def _on_late_query(self, state: AnswersGiven, kept: Kept[Forwarded]) -> Moved:
        raise PeerError(
            "sent a query after the answers were due",
            round_id=self.round_id,
            phase=self.phase,
            peer=kept.message.sender,
        )

    def _signed_model(self) -> ServedModel:
        """Its model. A role that was woken is given one again, and it may be another by then."""
        if self._woken:
            check_signed(self.params, self.header, self._model)
            self._woken = False
        return self._model

    def _on_due(self, state: HoldingQueries, kept: Kept[AnswersDue]) -> Moved:
        held = {
            c: state.held[c]
            for c, digest in kept.message.queries.items()
            if c in state.held and state.held[c].digest == digest
        }
        queries = [
            Reported(self.inbox.report_context(c, h.report_id), h.public, h.seeds)
            for c, h in held.items()
        ]
        answerer = Answerer(
            self.params,
            self.header,
            self._signed_model(),
            HELPER_PARTY,
            self._row_tags,
            self._workers,
        )
        boxes = {
            query.context.client: self._sealed(query.context, held[query.context.client], half)
            for query, half in zip(queries, answerer.answer(queries), strict=True)
        }
        answers = tuple(
            Kept.of(HelperAnswer(round_id=self.round_id, client=c, box=boxes.get(c, b"")))
            for c in sorted(kept.message.queries)
        )
        self.inbox.forget()
        return AnswersGiven(answers=answers), [Outbound.again(SERVER, a.data) for a in answers]

    def _sealed(
        self, context: ReportContext, held: HelperReport, half: dict[TableId, bytes]
    ) -> bytes:
        tables = tuple(map(wire.HashedBytes, half.values()))
        signature = self._key.sign(context.answer_statement(held.digest, tables))
        inside = wire.encode(SealedAnswer(tables=tables, signature=signature))
        return seal_to(self._answer_key(held), inside, context.answer_info(held.digest))

    def _answer_key(self, held: HelperReport) -> bytes:
        """The one-time key from inside the box, never one that the leader relays."""
        assert held.answer_key is not None
        return held.answer_key


RetrievalHelper.STEPS = {
    (HoldingQueries, Forwarded): RetrievalHelper._on_query,
    (HoldingQueries, AnswersDue): RetrievalHelper._on_due,
    (AnswersGiven, Forwarded): RetrievalHelper._on_late_query,
}
