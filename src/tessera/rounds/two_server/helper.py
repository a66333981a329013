"""HelperRound: the second server in one round, which exchanges messages with the leader only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import SealingKey, SigningKey
from tessera.errors import ConfigError, PeerError, ServerFault, WireError
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.learning.arrays import Floats, Ids
from tessera.learning.derived_map import DerivedMap
from tessera.learning.tables import StoredTable
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, RoundOver, message_digest
from tessera.protocols.retrieval.messages import AnswersDue
from tessera.protocols.retrieval.row_tags import RowTagCache
from tessera.protocols.retrieval.server import RetrievalHelper
from tessera.protocols.scatter.helper import WriteHelper
from tessera.protocols.scatter.sums import TwoServerSum
from tessera.protocols.two_server.handshake import HelperHandshake
from tessera.protocols.two_server.messages import (
    Forwarded,
    HandshakeOffer,
    HandshakeReveal,
    Purpose,
)
from tessera.protocols.two_server.model import ServedModel
from tessera.protocols.two_server.params import Servers, TwoServerParams
from tessera.protocols.two_server.replay_guard import ReplayGuard
from tessera.protocols.two_server.workers import Workers
from tessera.rounds import select
from tessera.rounds.encode import RoundResult
from tessera.rounds.messages import UnionOpened
from tessera.rounds.plan import TWO_SERVERS, Plan, check_scheme
from tessera.rounds.two_server.opened import opened_means
from tessera.rounds.two_server.params import served, two_server_params


@dataclass(frozen=True, slots=True)
class HelperKeys:
    """What the helper has of its own: it signs, and it unseals what clients seal to it."""

    signing: SigningKey = field(repr=False)
    box: SealingKey = field(repr=False)


class HelperRound:
    """Handshake with the leader, answers to queries, the sum of reports, one share released."""

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        *,
        dense: Floats,
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap],
        servers: Servers,
        keys: HelperKeys,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        entropy: Entropy,
        workers: Workers | None = None,
        row_tags: RowTagCache | None = None,
    ) -> None:
        """`row_tags` are this server's from earlier rounds."""
        check_scheme(type(self).__name__, plan.scheme, TWO_SERVERS)
        self.plan, self.round_id = plan, round_id
        self._dense, self._tables, self._derived = dense, tables, derived
        self._servers, self._keys, self._directory = servers, keys, directory
        self._replay_guard, self._entropy, self._workers = replay_guard, entropy, workers
        self._row_tags = row_tags
        self._domain: Mapping[str, Ids] | None = None
        self._params: TwoServerParams | None = None
        self._model: ServedModel | None = None
        self._handshake: HelperHandshake | None = None
        self._answering: RetrievalHelper | None = None
        self._adding: WriteHelper | None = None
        self._answers: dict[bytes, list[Outbound] | PeerError] = {}
        self._left: ServerFault | None = None
        self._total: TwoServerSum | None = None
        if not plan.narrows:
            self._prepare(None)

    @property
    def adding(self) -> WriteHelper | None:
        """Its part of the sum, once reports may come."""
        return self._adding

    @property
    def total(self) -> TwoServerSum | None:
        """The sum, once the leader has sent it. What comes afterwards takes nothing back."""
        return self._total if self._adding is None else self._adding.total

    @property
    def result(self) -> RoundResult | None:
        """The means that follow from the sum it was shown; None if it was shown none."""
        total = self.total
        return None if total is None else opened_means(self.plan, total, self._domain or {})

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """One message of the leader's. `PeerError`: that client is left out. `ServerFault`: it has
        left the round, and releases nothing.

        The very bytes again are a carrier's repetition, and get the very answer again, however late
        they come. A helper that has left answers with the fault that made it leave.
        """
        if self._left is not None:
            raise self._left
        mark = message_digest(data)
        if mark not in self._answers:
            try:
                self._answers[mark] = self._received(data)
            except PeerError as refusal:
                self._answers[mark] = refusal
            except ServerFault as fault:
                self._leave(fault)
                raise
        answer = self._answers[mark]
        if isinstance(answer, PeerError):
            raise answer
        return list(answer)

    def _leave(self, fault: ServerFault) -> None:
        """For good, and without state: what clients have sent counts nowhere."""
        self._left, self._total = fault, self.total
        self._answers = {}
        self._params = self._model = None
        self._handshake = self._answering = self._adding = None

    def _received(self, data: bytes) -> list[Outbound]:
        kind = wire.kind_of(data)
        if kind is RoundOver:
            self._total = self.total
            self._handshake = self._answering = self._adding = None
            return []
        if kind is UnionOpened:
            return self._take_union(data)
        if self._handshake is None:
            raise self._fault("sends before the union is opened")
        if kind in (HandshakeOffer, HandshakeReveal):
            out = self._handshake.receive(SERVER, data)
            if self._handshake.header is not None and self._adding is None:
                self._begin()
            return out
        if self._answering is None or self._adding is None:
            raise self._fault("sends before the handshake is over")
        # The purpose of a forwarded box is in the clear; the sum refuses an invalid message.
        query = kind is Forwarded and wire.first_field(data) is Purpose.RETRIEVE
        if kind is AnswersDue or query:
            return self._answering.receive(SERVER, data)
        return self._adding.receive(SERVER, data)

    def _take_union(self, data: bytes) -> list[Outbound]:
        if not self.plan.narrows or self._params is not None:
            raise self._fault("sent a union that is not due")
        try:
            message = wire.decode(data, expect=(UnionOpened,))
        except WireError as error:
            raise self._fault(f"sent bytes that are not a valid message: {error}") from error
        if message.round_id != self.round_id:
            raise self._fault(f"sent the union of round {message.round_id}")
        if flaw := select.union_flaw(self.plan, message):
            raise self._fault(flaw)
        try:
            self._prepare(select.union_rows(self.plan, message, self._derived))
        except ConfigError as error:
            raise self._fault(f"sent a union that the plan cannot work with: {error}") from error
        return []

    def _prepare(self, domain: Mapping[str, Ids] | None) -> None:
        self._domain = domain
        self._params = two_server_params(self.plan, self.round_id, self._servers, domain)
        self._model = served(self.plan, self._params, self._dense, self._tables)
        self._handshake = HelperHandshake(
            self._params,
            self._model,
            key=self._keys.signing,
            entropy=self._entropy,
            replay_guard=self._replay_guard,
        )

    def _begin(self) -> None:
        assert self._params is not None and self._model is not None and self._handshake is not None
        header = self._handshake.header
        assert header is not None
        self._answering = RetrievalHelper(
            self._params,
            header,
            self._model,
            key=self._keys.signing,
            box_key=self._keys.box,
            directory=self._directory,
            replay_guard=self._replay_guard,
            row_tags=self._row_tags,
            workers=self._workers,
        )
        self._adding = WriteHelper(
            self._params,
            header,
            key=self._keys.signing,
            box_key=self._keys.box,
            directory=self._directory,
            replay_guard=self._replay_guard,
            workers=self._workers,
        )

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.round_id, phase="helper")
