"""TwoServerClientRound: [union ->] fetch -> train -> write, unseen by either of two servers.

Neither server alone learns which rows it asks for or what it writes (`protocols/retrieval/`,
`protocols/scatter/`). So nothing is randomised, and a row is fetched and written as it is.

Nor may a server learn that something went wrong with its rows: it might have caused it. Training
that failed, and an update that cannot be sent, go out as zeros of the usual length; only the owner
of this client learns why (`broken`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, ServerFault, WireError
from tessera.ids import SERVER, ClientId, Party, RoundId, TableId
from tessera.learning.arrays import Floats, Ids
from tessera.learning.submodel import ModelUpdate, Submodel, TablePart
from tessera.privacy.events import THE_SUMS, THE_UNION
from tessera.privacy.period import Agreement
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, RoundOver
from tessera.protocols.retrieval.client import Fetched, RetrievalClient
from tessera.protocols.retrieval.messages import QueryAnswers
from tessera.protocols.scatter.client import RowUpdate, WriteClient
from tessera.protocols.scatter.client import Update as Written
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.masking import Input
from tessera.protocols.two_server.messages import SignedHeader
from tessera.protocols.two_server.params import Servers
from tessera.rounds import encode, schemes, select
from tessera.rounds.encode import Clipped, UpdateWords
from tessera.rounds.local_state import LocalState, check_rows
from tessera.rounds.messages import UnionOpened, most_union_bytes
from tessera.rounds.plan import UNION, Plan
from tessera.rounds.select import Selection
from tessera.rounds.two_server.params import two_server_params


class TwoServerClientRound:
    """One client in one round of training between two servers."""

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        me: ClientId,
        *,
        local: LocalState,
        entropy: Entropy,
        identity: Identity | None,
        servers: Servers,
    ) -> None:
        schemes.check(type(self).__name__, plan, schemes.TWO_SERVERS)
        check_rows(plan, local)
        if identity is None:
            raise ConfigError(
                "two servers take reports that are signed, and this client has no key",
                hint="give every client an identity that the helper knows",
            )
        self.plan, self.round_id, self.me = plan, round_id, me
        self._local, self._entropy = local, entropy
        self._servers, self._signer = servers, identity
        self._sum: Client | None = None
        self._union: dict[str, Ids] = {}
        self._context = b""
        self._chosen: Selection | None = None
        self._submodel: Submodel | None = None
        self._update: ModelUpdate | None = None
        self.clipped, self.broken = Clipped(), ""
        self.written: dict[str, Ids] = {}
        self._left: ServerFault | None = None
        self._reader: RetrievalClient | None = None
        self._writer: WriteClient | None = None
        self._last = local.last_round

    @property
    def phase(self) -> str:
        if self._left is not None:
            return "Left"
        if self._writer is None or self._reader is None:
            return "Invited" if self._sum is None else self._sum.phase
        return self._writer.phase if self._reader.fetched is not None else self._reader.phase

    @property
    def left_out(self) -> int:
        """Real rows that are left out: over the plan's cap, outside the union, or without a bin."""
        if self._local.secret is None:
            return 0
        held = sum(len(rows) for rows in self._local.real.values())
        kept = self._held() if self._chosen is None else self._chosen.trained
        return held - sum(len(kept[t.name]) for t in self.plan.roots)

    # --- charged before anything is sent --------------------------------------------------------

    def prepare(self) -> None:
        plan = self.plan
        if self._local.secret is None:
            # Rows kept and decoys stay the same for ever, under every pseudonym.
            self._local.secret = self._entropy.secret(
                Label.CLIENT_SECRET, plan.federation, int(self.me)
            )
            self._local.agreement = self._agreement
        elif self._local.agreement is not None:
            self._local.agreement.must_match(
                self._agreement,
                f"federation {plan.federation!r}",
                "keep the decoys, or join a federation of another name",
            )
        union = (THE_UNION,) if plan.narrows else ()
        self._local.release(plan, self.round_id, *union, "the rows written", THE_SUMS)

    @property
    def _agreement(self) -> Agreement:
        """Of the decoys alone: other plans of the same federation may follow."""
        return replace(self._local.agreement_on(self.plan), plan=b"")

    def start(self) -> list[Outbound]:
        self.prepare()
        self._local.last_round = self.round_id
        if not self.plan.narrows:
            self._meet(None)
            return []
        self._sum, out = Client.join(
            self.plan.union_sum(self.round_id),
            self.me,
            entropy=self._entropy,
            identity=self._signer,
            last_round=self._last,
        )
        return out + self._advance()

    # --- messages -------------------------------------------------------------------------------

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        if self._reader is None and self._sum is None:
            raise MisuseError("a round is started before it receives")
        if self._left is not None:
            raise self._left
        try:
            return self._received(data)
        except ServerFault as fault:
            self._left = fault  # for good: later messages are not read
            raise

    def _decoded(self, data: bytes) -> UnionOpened:
        """A union of this round, bounded by the plan before anything is made of it."""
        plan = self.plan
        cap = most_union_bytes(plan.most_union, plan.domain, len(plan.roots))
        try:
            message: UnionOpened = wire.decode(data, expect=(UnionOpened,), cap=cap)
        except WireError as error:
            raise self._fault(f"sent bytes that are not a valid message: {error}") from error
        if message.round_id != self.round_id:
            raise self._fault(f"sent {type(message).__name__} of round {message.round_id}")
        return message

    def _received(self, data: bytes) -> list[Outbound]:
        kind = wire.kind_of(data)
        if kind is RoundOver:
            self._reader = self._writer = self._sum = None
            return []
        if kind is UnionOpened:
            self._narrow(self._decoded(data))
            return []
        if kind not in (SignedHeader, QueryAnswers):
            if self._sum is None:
                raise self._fault("sent a message that is not due")
            return self._sum.receive(SERVER, data) + self._advance()
        if self._reader is None or self._writer is None:
            raise self._fault("begins a round before its union")
        out = self._reader.receive(SERVER, data)
        if self._reader.is_ready:
            self._writer.prepare(self._reader.signed_header)
            out += self._reader.submit(self._wanted())
        elif self._reader.fetched is not None and self._update is None:
            self._submodel = self._fetched_submodel(self._reader.fetched)
        return out

    def _narrow(self, message: UnionOpened) -> None:
        """Only rows of the union are fetched and written. The same union again changes nothing."""
        if self._union and wire.digest(message) == self._context:
            return  # the same bytes again: a repetition by the transport
        summed = self._sum is not None and self._sum.knows_survivors(UNION)
        if not self.plan.has_union or not summed or self._union:
            raise self._fault("sent a union that is not due")
        if flaw := select.union_flaw(self.plan, message):
            raise self._fault(flaw)
        self._union = select.union_rows(self.plan, message, self._local.derived)
        self._context = wire.digest(message)
        self._meet(self._union)

    def take_union(self, roots: Mapping[str, Ids]) -> None:
        """The union of an ideal round; rows of derived tables follow."""
        self._union = select.with_derived(self.plan, roots, self._local.derived)

    def _meet(self, domain: Mapping[str, Ids] | None) -> None:
        """From here on the parameters are known, and both servers may send messages."""
        try:
            params = two_server_params(self.plan, self.round_id, self._servers, domain)
        except ConfigError as error:
            if domain is None:
                raise
            raise self._fault(f"sent a union that the plan cannot work with: {error}") from error
        shared: dict[str, Any] = {
            "entropy": self._entropy,
            "identity": self._signer,
            "last_round": self._last,
        }
        self._reader = RetrievalClient(params, self.me, **shared)
        self._writer = WriteClient(params, self.me, **shared)

    def _advance(self) -> list[Outbound]:
        """The union's input, as soon as the secure sum asks for it."""
        out: list[Outbound] = []
        while self._sum is not None and self._sum.wants is not None:
            coins = self._entropy.secret(
                Label.UNION_COINS, self.plan.federation, int(self.round_id), int(self.me)
            )
            words = encode.union_words(self.plan, self.round_id, self.offered(), coins)
            out += self._sum.submit(Input(dense=words))
        return out

    def offered(self) -> Ids:
        """What this client puts into the union: its rows in the one space of ids, and decoys."""
        plan, secret = self.plan, self._secret.derive(Label.DECOYS)
        return select.offered(plan, self._held(), secret, 0, self._local.decoys_from(plan))

    def _held(self) -> dict[str, Ids]:
        """Its rows of the root tables, as many as the plan lets a client name."""
        held = select.held(self.plan, self._local.real)
        return select.capped(self.plan, held, self._secret)

    @property
    def _secret(self) -> Secret:
        assert self._local.secret is not None
        return self._local.secret

    # --- fetch ----------------------------------------------------------------------------------

    def _wanted(self) -> dict[TableId, Ids]:
        """The rows to ask for, by table: capped, and inside the union where there is one."""
        assert self._reader is not None
        chosen = self.choose()
        return {
            TableId(spec.table): chosen.requested[self.plan.tables[spec.table].name]
            for spec in self._reader.params.read
            if spec.reads_points
        }

    def choose(self) -> Selection:
        """The rows it asks for: its own, inside the union where there is one."""
        plan, maps = self.plan, self._local.derived
        self._chosen = select.choose_held(plan, self._held(), self._union, maps)
        return self._chosen

    def submodel(self, dense: Floats, values: Mapping[str, Floats]) -> Submodel:
        """The values of the rows that were requested, in an ideal round."""
        assert self._chosen is not None
        rows = self._chosen.requested
        tables = {t.name: TablePart(rows[t.name], values[t.name]) for t in self.plan.tables}
        return Submodel(dense, tables, self._chosen.trained)

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now, once it is here; nothing before, and nothing after."""
        return None if self._left is not None else self._submodel

    def _floats(self, data: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Floats:
        if len(data) != int(np.prod(shape)) * dtype.itemsize:
            raise self._fault(f"sent {len(data)} bytes for {shape} parameters")
        values: Floats = np.frombuffer(data, dtype=dtype).reshape(shape)
        return values.astype(np.float32, copy=False)

    def _fetched_submodel(self, fetched: Fetched) -> Submodel:
        plan, dtype = self.plan, self.plan.model.precision.dtype
        assert self._chosen is not None
        requested = self._chosen.requested
        tables, trained = {}, {}
        for t in plan.tables:
            part = fetched.tables.get(plan.table_id(t.name))
            if part is None:  # no row of it is in the round
                ids, values = np.zeros(0, np.uint64), np.zeros((0, t.width), np.float32)
            else:
                ids = part.ids
                values = part.rows.view(dtype).reshape(len(ids), t.width).astype(np.float32)
            tables[t.name] = TablePart(ids, values)
            own = requested[t.name]
            trained[t.name] = own[np.isin(own, ids, assume_unique=True)]
        self._chosen = Selection(requested, trained)  # without those that had no bin
        dense = self._floats(fetched.dense, (plan.model.dense,), dtype)
        return Submodel(dense, tables, trained)

    # --- write ----------------------------------------------------------------------------------

    def supply(self, update: ModelUpdate | None) -> list[Outbound]:
        """Write what came out of training; what cannot be sent goes out as zeros, like nothing."""
        if self.pending is None or self._writer is None:
            raise MisuseError("an update is not due: nothing was fetched, or it was given already")
        self._update = self.sendable(update)
        self._submodel = None
        if self.broken:
            return self._writer.submit(None)
        encoded = self.quantised_rows(self._update)
        rows = {
            TableId(spec.table): encoded.tables[self.plan.tables[spec.table].name]
            for spec in self._writer.params.written
        }
        tables = {table: RowUpdate(part.ids, part.words) for table, part in rows.items()}
        return self._writer.submit(Written(dense=encoded.dense, tables=tables))

    def sendable(self, update: ModelUpdate | None) -> ModelUpdate:
        """What goes out for this outcome of training: where there is none, zeros of weight 0."""
        assert self._chosen is not None
        self.broken = encode.flaw(self.plan, update, self._chosen.trained)
        if update is None or self.broken:
            return encode.zeros(self.plan)
        return update

    def quantised_rows(self, update: ModelUpdate) -> UpdateWords:
        """The update as words of the ring."""
        assert self._chosen is not None
        coins = self._entropy.secret(
            Label.ROUNDING, self.plan.federation, int(self.round_id), int(self.me)
        )
        encoded = encode.update_words(self.plan, update, self._chosen.trained, coins)
        self.clipped, self.written = encoded.clipped, dict(encoded.written)
        return encoded

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.round_id, phase=self.phase)
