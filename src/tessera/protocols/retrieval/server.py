"""The two servers of a retrieval: each XORs, for every bin, the rows that a client's keys select.

Queries are answered together when the phase closes, so that a table is read once for many clients.
The leader's half goes to the client as it is, over their connection; the helper's is sealed to the
one-time key that came in the client's box, since the leader with both halves would have the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tessera.crypto.keys import SealingKey, SigningKey, seal_to
from tessera.errors import MisuseError, PeerError, ServerFault, WireError
from tessera.ids import HELPER, SERVER, ClientId, Party, TableId
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, message_digest
from tessera.protocols.retrieval.messages import (
    AnswersDue,
    HelperAnswer,
    Query,
    QueryAnswers,
    SealedAnswer,
)
from tessera.protocols.retrieval.row_tags import RowTagCache
from tessera.protocols.two_server.envelope import ReportContext
from tessera.protocols.two_server.inbox import HelperReport, ReportInbox
from tessera.protocols.two_server.keys import (
    HELPER_PARTY,
    LEADER_PARTY,
    Reported,
    batches,
    check_keys,
)
from tessera.protocols.two_server.layouts import layouts_of
from tessera.protocols.two_server.messages import Forwarded, Header, Purpose
from tessera.protocols.two_server.model import ServedModel
from tessera.protocols.two_server.params import Read, TwoServerParams
from tessera.protocols.two_server.replay_guard import ReplayGuard
from tessera.protocols.two_server.workers import SingleWorker, Workers

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
            self._rows[table] = layout.arrange(rows)
            if spec.read is Read.CHECKED:
                ids = spec.named(np.arange(spec.rows))
                self._tags[table] = layout.arrange(row_tags.of(table, ids, rows, header.seed))

    def answer(self, queries: Sequence[Reported]) -> list[dict[TableId, bytes]]:
        """For every query its half of every bin, by table."""
        found: list[dict[TableId, bytes]] = []
        for some in batches(queries):
            each = -(-len(some) // self._workers.count)
            parts = [some[at : at + each] for at in range(0, len(some), each)]
            halves: list[list[dict[TableId, bytes]]] = [[] for _ in parts]
            self._workers.run(
                [partial(self._answer, *both) for both in zip(parts, halves, strict=True)]
            )
            found += [half for part in halves for half in part]
        return found

    def _answer(self, queries: Sequence[Reported], found: list[dict[TableId, bytes]]) -> None:
        found += [{} for _ in queries]
        for at, (table, layout) in enumerate(self._layouts.reading.items()):
            keys = [q.expanded(layout.forest, table, at, party=self._party) for q in queries]
            halves, products = layout.answer(
                keys, self._rows[table], self._specs[table].row_bytes, self._tags.get(table)
            )
            for one, half, product in zip(found, halves, products, strict=True):
                one[table] = half.tobytes() + product.tobytes()


class RetrievalLeader:
    """The leader: takes queries, forwards them, and sends both halves back."""

    FROM_CLIENT: ClassVar = (Query,)

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
        self.params, self.header = params, header
        self.invited = frozenset(invited)
        self._model = model
        self._layouts = layouts_of(params, header)
        self._answerer = Answerer(params, header, model, LEADER_PARTY, row_tags, workers)
        self._queries: dict[ClientId, Reported] = {}
        self._digests: dict[ClientId, bytes] = {}
        self._halves: dict[ClientId, dict[TableId, bytes]] = {}
        self._waiting: set[ClientId] = set()
        self.refused: set[ClientId] = set()
        self.phase = "query"

    @property
    def expected(self) -> frozenset[ClientId]:
        """The clients whose queries have not come."""
        return self.invited - self._queries.keys() if self.phase == "query" else frozenset()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """A query, or a half of the helper. `PeerError`: refused, and this role is as it was."""
        if sender == HELPER:
            return self._from_helper(data)
        if isinstance(sender, str) or sender not in self.invited:
            raise self._refuse(sender, "is not in this cohort")
        try:
            query: Query = wire.decode(data, expect=self.FROM_CLIENT)
        except WireError as error:
            raise self._refuse(sender, f"sent an invalid message: {error}") from error
        if query.sender != sender or query.round_id != self.params.round_id:
            raise self._refuse(sender, "sent a query of another client or round")
        if sender not in self.expected:
            raise self._refuse(sender, "sent a query that is not due")
        forests = self._layouts.forests(Purpose.RETRIEVE)
        check_keys(forests, query.public, self._refuse, sender)
        if len(query.seeds) != len(forests):
            raise self._refuse(sender, f"sent {len(query.seeds)} seeds")
        context = ReportContext(
            params=self.params,
            header=self.header,
            purpose=Purpose.RETRIEVE,
            client=sender,
            report_id=query.report_id,
        )
        forwarded = Forwarded(
            purpose=Purpose.RETRIEVE,
            round_id=self.params.round_id,
            sender=sender,
            report_id=query.report_id,
            public=query.public,
            box=query.box,
        )
        self._queries[sender] = Reported(context, query.public, query.seeds)
        self._digests[sender] = context.report_digest(query.public, query.box)
        return [Outbound.of(HELPER, forwarded)]

    def close_phase(self) -> list[Outbound]:
        """No more queries, or no more waiting for the helper: when is the engine's choice."""
        if self.phase == "query" and self._queries:
            clients = sorted(self._queries)
            halves = self._answerer.answer([self._queries[c] for c in clients])
            self._halves = dict(zip(clients, halves, strict=True))
            self._waiting = set(clients)
            self.phase = "answer"
            due = AnswersDue(round_id=self.params.round_id, queries=self._digests)
            return [Outbound.of(HELPER, due)]
        if self.phase not in ("query", "answer"):
            raise MisuseError(f"there is no phase to close: {self.phase}")
        self.phase = "done"
        return []

    def _from_helper(self, data: bytes) -> list[Outbound]:
        try:
            answer: HelperAnswer = wire.decode(data, expect=[HelperAnswer])
        except WireError as error:
            raise self._refuse(HELPER, f"sent an invalid message: {error}") from error
        client = answer.client
        if answer.round_id != self.params.round_id or client not in self._waiting:
            raise self._refuse(HELPER, "sent an answer that is not due")
        self._waiting.discard(client)
        if not self._waiting:
            self.phase = "done"
        if not answer.box:
            self.refused.add(client)
            return []
        tables = tuple(
            self._model.tables[t.table].tobytes()
            if t.reads_whole
            else self._halves[client][t.table]
            for t in self.params.read
        )
        message = QueryAnswers(
            round_id=self.params.round_id,
            report_id=self._queries[client].context.report_id,
            tables=tables,
            dense=self._model.dense,
            box=answer.box,
        )
        return [Outbound.of(client, message)]

    def _refuse(self, peer: Party, reason: str) -> PeerError:
        return PeerError(reason, round_id=self.params.round_id, phase=self.phase, peer=peer)


class RetrievalHelper:
    """The helper: checks what the leader carries, and answers to the client alone."""

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
        if (key.public, box_key.public) != (params.servers.helper, params.servers.box):
            raise MisuseError("two servers: the helper's keys are not the ones that are pinned")
        self.params, self._key = params, key
        self._answerer = Answerer(params, header, model, HELPER_PARTY, row_tags, workers)
        self.inbox = ReportInbox(
            params,
            header,
            Purpose.RETRIEVE,
            directory=directory,
            box_key=box_key,
            replay_guard=replay_guard,
        )
        self._answered: tuple[bytes, list[Outbound]] | None = None
        self.phase = "query"

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """Take the leader's message. `PeerError`: a client is refused, the round goes on.
        `ServerFault`: the helper has left the round."""
        if self._answered is not None and self._answered[0] == message_digest(data):
            return self._answered[1]  # a repeated delivery; a box is not sealed again
        try:
            if self.phase == "left":
                raise self._fault("sent a message after a fault")
            try:
                message = wire.decode(data, expect=(Forwarded, AnswersDue))
            except WireError as error:
                raise self._fault(f"sent an invalid message: {error}") from error
            if message.round_id != self.params.round_id:
                raise self._fault("sent a message of another round")
            if self.phase == "done":
                raise self._late(message)
            if isinstance(message, Forwarded):
                if message.purpose is not Purpose.RETRIEVE:
                    raise self._fault("forwarded keys that are for writing")
                self.inbox.take(message)
                return []
            out = self._answer(message)
        except ServerFault:
            self.phase, self._answered = "left", None
            self.inbox.forget()
            raise
        self.phase, self._answered = "done", (message_digest(data), out)
        self.inbox.forget()
        return out

    def _late(self, message: Forwarded | AnswersDue) -> PeerError | ServerFault:
        """A late query is refused for its client; a second closing is a fault."""
        if isinstance(message, AnswersDue) or message.purpose is not Purpose.RETRIEVE:
            return self._fault("sent a message after the answers")
        return PeerError(
            "sent a query after the answers were due",
            round_id=self.params.round_id,
            phase=self.phase,
            peer=message.sender,
        )

    def _answer(self, due: AnswersDue) -> list[Outbound]:
        held = {
            c: self.inbox.held[c]
            for c, digest in due.queries.items()
            if c in self.inbox.held and self.inbox.held[c].digest == digest
        }
        queries = [
            Reported(self.inbox.report_context(c, h.report_id), h.public, h.seeds)
            for c, h in held.items()
        ]
        halves = self._answerer.answer(queries)
        boxes = {
            query.context.client: self._sealed(query.context, held[query.context.client], half)
            for query, half in zip(queries, halves, strict=True)
        }
        return [
            Outbound.of(
                SERVER,
                HelperAnswer(round_id=self.params.round_id, client=c, box=boxes.get(c, b"")),
            )
            for c in sorted(due.queries)
        ]

    def _sealed(
        self, context: ReportContext, held: HelperReport, half: dict[TableId, bytes]
    ) -> bytes:
        tables = tuple(half.values())
        signature = self._key.sign(context.answer_statement(held.digest, tables))
        inside = wire.encode(SealedAnswer(tables=tables, signature=signature))
        return seal_to(self._answer_key(held), inside, context.answer_info(held.digest))

    def _answer_key(self, held: HelperReport) -> bytes:
        """The one-time key from inside the box, never one that the leader relays."""
        assert held.answer_key is not None
        return held.answer_key

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.params.round_id, phase=self.phase)
