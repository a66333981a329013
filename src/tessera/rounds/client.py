"""ClientRound: union -> choose -> fetch -> train -> upload, each step once and in this order.

Sums come from `protocols/`, randomised answers from `privacy/`. Everything that is released is
charged to the ledger before the first message leaves. Training takes time, and time
is the engine's: a round that has fetched its rows shows them as `pending`, and goes on when it is
given the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, ServerFault, WireError
from tessera.ids import SERVER, ClientId, Party, RoundId, TableId
from tessera.learning.arrays import Floats, Ids
from tessera.learning.submodel import ModelUpdate, Submodel, TablePart
from tessera.privacy.events import THE_SUMS, THE_UNION, IndexAnswers
from tessera.privacy.period import FrozenPeriod, freeze, must_not_be_early
from tessera.protocols import wire
from tessera.protocols.machine import Outbound
from tessera.protocols.plainsum import PlainClient
from tessera.protocols.secagg.binding import Received
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.messages import Roster
from tessera.protocols.secagg.states import Reveal
from tessera.rounds import delivery, encode, select
from tessera.rounds.encode import NOTHING, Clipped, UpdateWords
from tessera.rounds.local_state import LocalState
from tessera.rounds.messages import FROM_SERVER, Download, UnionOpened, most_union_bytes
from tessera.rounds.plan import ONE_SERVER, UNION, Plan, Scheme, check_scheme
from tessera.rounds.select import Selection


class ClientRound:
    """One client in one round of training."""

    SCHEMES: ClassVar = ONE_SERVER

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        me: ClientId,
        *,
        local: LocalState,
        entropy: Entropy,
        identity: Identity | None = None,
    ) -> None:
        check_scheme(type(self).__name__, plan.scheme, self.SCHEMES)
        if plan.privacy.pseudonyms and local.privacy and local.privacy.fingerprints:
            raise ConfigError(
                "under pseudonyms answers that never change (p3 = 1, p4 = 0) are a fingerprint",
                hint="choose probabilities with instantaneous answers, or those of the plan",
            )
        self.plan, self.round_id, self.me = plan, round_id, me
        self._local, self._entropy = local, entropy
        self._identity = identity
        self._sum: Client | PlainClient | None = None
        self._frozen: FrozenPeriod | None = None
        self._union: dict[str, Ids] = {}
        self._context = bytes(32)
        self._chosen: Selection | None = None
        self._download: Download | None = None
        self._submodel: Submodel | None = None
        self._update: ModelUpdate | None = None
        self.clipped = Clipped()
        self.broken = ""  # why zeros were sent instead of an update; known to this client only
        self.written: dict[str, Ids] = {}  # rows with a delta in the quantised update
        self._left: ServerFault | None = None
        for name, rows in local.real.items():
            limit = plan.table(name).rows
            if len(rows) and int(rows.max()) >= limit:
                raise ConfigError(
                    f"table {name!r}: row id {int(rows.max())} is outside its {limit} rows"
                )
        missing = [t.name for t in plan.tables if t.derived_from and t.name not in local.derived]
        if missing and plan.scheme.by_rows:
            raise ConfigError(f"table {missing[0]!r} is derived, and its map is missing")

    @property
    def phase(self) -> str:
        if self._left is not None:
            return "Left"
        return "Invited" if self._sum is None else self._sum.phase

    @property
    def left_out(self) -> int:
        """Real rows over the cap that the plan sets on the rows a client may name."""
        if self._frozen is None:
            return 0
        return sum(len(t.left_out) for t in self._frozen.tables)

    def snapshot(self) -> bytes:
        """The sum's state alone: a round of training cannot be woken from it yet."""
        if not isinstance(self._sum, Client):
            raise MisuseError("only a client in a secure sum has something to store")
        return self._sum.snapshot()

    # --- 1. charged before anything is sent -----------------------------------------------------

    def prepare(self) -> None:
        """Freeze what the answers depend on and charge for them: before the first message."""
        if self.plan.scheme is Scheme.SECURE_SUBMODEL:
            self._freeze_and_charge()
        elif self.plan.scheme.secure and self.plan.tables:
            self._local.release(self.plan, self.round_id, THE_SUMS)

    def start(self) -> list[Outbound]:
        plan = self.plan
        self.prepare()
        if plan.scheme.secure:
            self._sum, out = Client.join(
                plan.secagg(self.round_id),
                self.me,
                entropy=self._entropy,
                identity=self._identity,
                last_round=self._local.last_round,
            )
        else:
            self._sum, out = PlainClient(plan.stages[0], self.round_id, self.me), []
        self._local.last_round = self.round_id
        return out + self._advance()

    def _freeze_and_charge(self) -> None:
        plan, local = self.plan, self._local
        roots = {plan.table_id(t.name): t for t in plan.roots}
        held, pool = select.held(plan, local.real), select.held(plan, local.pool)
        real = {table: held[t.name] for table, t in roots.items()}
        if plan.privacy.add and not local.pool:
            raise ConfigError(
                f"plan: add = {plan.privacy.add} perturbs the real set, and there is no pool",
                hint="give the client a public list of rows, such as an earlier union",
            )
        least = plan.privacy.least_rounds if local.own_rounds is None else local.own_rounds
        must_not_be_early(local.periods, plan.federation, plan.period(self.round_id), least)
        stored = local.periods.latest(plan.federation)
        if stored is not None and stored.period == plan.period(self.round_id):
            # Ids that came since the period began wait for the next: a join would show as a flip.
            real = {part.table: part.real for part in stored.tables}
        self._frozen = freeze(
            local.periods,
            federation=plan.federation,
            period=plan.period(self.round_id),
            privacy=local.privacy or plan.privacy.index,
            real=real,
            entropy=_ClientEntropy(self._entropy, self.me),
            sizes={table: t.rows for table, t in roots.items()},
            max_rows=dict.fromkeys(roots, plan.union.max_rows),
            perturbation=plan.privacy.perturbation,
            pool={table: pool[t.name] for table, t in roots.items()},
            agreement=local.agreement_on(plan),
        )
        local.release(plan, self.round_id, THE_UNION, THE_SUMS)
        local.ledger.spend(
            IndexAnswers(
                federation=plan.federation,
                period=plan.period(self.round_id),
                round_id=self.round_id,
                privacy=self._frozen.privacy,
            ),
            reason=f"round {self.round_id}: rows revealed",
            planned=plan.privacy.budget or None,
        )
        local.periods.count_round(plan.federation)

    # --- messages -------------------------------------------------------------------------------

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        if self._sum is None:
            raise MisuseError("a round is started before it receives")
        return self._guarded(data)

    def _guarded(self, data: bytes) -> list[Outbound]:
        if self._left is not None:
            raise self._left
        try:
            return self._received(data)
        except ServerFault as fault:
            self._left = fault  # for good: later messages are not read
            raise

    def _received(self, data: bytes) -> list[Outbound]:
        assert self._sum is not None
        if wire.kind_of(data) not in FROM_SERVER:
            out = self._sum.receive(SERVER, data)
            if self.plan.grouped and wire.kind_of(data) is Roster:
                self._check_group(wire.decode(data, expect=(Roster,)))
            return out + self._advance()
        message = self._decoded(data)
        if isinstance(message, UnionOpened):
            self._take_union(message)
        else:
            self._take_download(message)
        return self._advance()

    def _check_group(self, roster: Roster) -> None:
        """Refuse to meet others than ever before; before anything is shared with them."""
        members = tuple(int(m.client) for m in roster.members)
        known = self._local.periods.group(self.plan.federation, members)
        if known != members:
            raise self._fault("named other members of this client's group than in its first round")

    def _decoded(self, data: bytes) -> Any:
        """A message of the round's own, of this round.

        A union is bounded by the plan before anything is made of it: a bitmap that names every row
        is short on the wire and 64 times as long in memory.
        """
        plan, cap = self.plan, wire.DEFAULT_CAP
        if wire.kind_of(data) is UnionOpened:
            cap = min(cap, most_union_bytes(plan.most_union, plan.domain, len(plan.roots)))
        try:
            message = wire.decode(data, expect=FROM_SERVER, cap=cap)
        except WireError as error:
            raise self._fault(f"sent bytes that are not a valid message: {error}") from error
        if message.round_id != self.round_id:
            raise self._fault(f"sent {type(message).__name__} of round {message.round_id}")
        return message

    def _advance(self) -> list[Outbound]:
        """Submit the inputs that the sum waits for, as far as they are known."""
        out: list[Outbound] = []
        while self._sum is not None and self._sum.wants is not None:
            if self.plan.scheme is Scheme.SECURE_SUBMODEL and self._sum.stage == UNION:
                out += self._sum.submit(self._union_input())
            elif self._sum.awaits_rows:
                if self.plan.scheme is Scheme.SECURE_SUBMODEL and not self._union:
                    break
                out += self._sum.submit(self.choose())
            elif self._update is not None:
                out += self._sum.submit(self.quantised(self._update, self._sum.included))
            else:
                break
        return out

    # --- 2. the union: its rows and decoys, under the secure sum --------------------------------

    def offered(self) -> Ids:
        """What this client puts into the union: its rows in the one space of ids, and decoys."""
        plan, frozen = self.plan, self._frozen
        assert frozen is not None
        rows = {plan.tables[part.table].name: part.offered for part in frozen.tables}
        catalogue = self._local.decoys_from(plan)
        return select.offered(plan, rows, frozen.secret, frozen.period, catalogue)

    def _union_input(self) -> Input:
        coins = self._entropy.secret(
            Label.UNION_COINS, self.plan.federation, int(self.round_id), int(self.me)
        )
        return Input(dense=encode.union_words(self.plan, self.round_id, self.offered(), coins))

    def _take_union(self, message: UnionOpened) -> None:
        plan = self.plan
        if self._union and wire.digest(message) == self._context:
            return  # the same bytes again: a repetition by the transport
        summed = isinstance(self._sum, Client) and self._sum.knows_survivors(UNION)
        if not plan.has_union or not summed or self._union:
            raise self._fault("sent a union that is not due")
        if flaw := select.union_flaw(plan, message):
            raise self._fault(flaw)
        self.take_union({t.name: message.tables[plan.table_id(t.name)] for t in plan.roots})
        self._context = wire.digest(message)

    def take_union(self, roots: Mapping[str, Ids]) -> None:
        """The opened union, by table; rows of derived tables follow."""
        self._union = select.with_derived(self.plan, roots, self._local.derived)

    # --- 3. the rows this client asks for ------------------------------------------

    def choose(self) -> Reveal:
        """The rows this client asks for, cover included, by their place in the union."""
        plan, maps = self.plan, self._local.derived
        if plan.scheme is Scheme.SECURE_SUBMODEL:
            assert self._frozen is not None
            entropy = _ClientEntropy(self._entropy, self.me)
            self._chosen = select.choose_answers(
                plan, self._frozen, self._union, maps, round_id=self.round_id, entropy=entropy
            )
        else:
            self._chosen = select.choose_held(plan, self._held(), self._union, maps)
        return Reveal(
            tables={
                plan.table_id(name): select.positions(self._union, name, rows)
                for name, rows in self._chosen.requested.items()
            },
            quorum=self._local.quorum,
            context=self._context,
        )

    def _held(self) -> dict[str, Ids]:
        """This client's rows of the root tables."""
        return select.held(self.plan, self._local.real)

    # --- 4. fetch and train ---------------------------------------------------------------------

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now, once it is here; nothing before, and nothing after."""
        return None if self._left is not None else self._submodel

    def _take_download(self, message: Download) -> None:
        plan, dtype = self.plan, self.plan.model.precision.dtype
        if self._download is not None:
            if message != self._download:
                raise self._fault("sent a second download")
            return  # the same bytes again: a repetition by the transport
        if plan.scheme.by_rows and self._chosen is None:
            raise self._fault("sent rows before any were requested")
        if message.tables.keys() != {plan.table_id(t.name) for t in plan.tables}:
            raise self._fault("sent other tables than were requested")
        rows = self._rows()
        values = {
            t.name: self._floats(
                message.tables[plan.table_id(t.name)], (len(rows[t.name]), t.width), dtype
            )
            for t in plan.tables
        }
        dense = self._floats(message.dense, (plan.model.dense,), dtype)
        self._submodel = self.submodel(dense, values)
        self._download = message

    def submodel(self, dense: Floats, values: Mapping[str, Floats]) -> Submodel:
        """The values of the rows that were requested, with their ids and which are trained."""
        if flaw := self._model_flaw(dense, values):
            raise self._fault(flaw)
        rows = self._rows()
        tables = {t.name: TablePart(rows[t.name], values[t.name]) for t in self.plan.tables}
        return Submodel(dense, tables, self._trained())

    def _model_flaw(self, dense: Floats, values: Mapping[str, Floats]) -> str:
        """Why this client does not compute with the model that it was sent, and leaves; or "".

        The server knows which rows it sent, so that leaving tells it nothing.
        """
        return delivery.model_flaw(self.plan, dense, values)

    @property
    def requested(self) -> Mapping[str, Ids] | None:
        """The rows this client asked for, by table; None if it gets the whole model."""
        return None if self._chosen is None else self._chosen.requested

    def _rows(self) -> Mapping[str, Ids]:
        """The rows that are fetched: those asked for, or all."""
        if self._chosen is not None:
            return self._chosen.requested
        return {t.name: np.arange(t.rows, dtype=np.uint64) for t in self.plan.tables}

    def _trained(self) -> Mapping[str, Ids]:
        """Those of them that this client has examples of."""
        if self._chosen is not None:
            return self._chosen.trained
        return select.own(self.plan, self._local.real, self._local.derived)

    def supply(self, update: ModelUpdate | None) -> list[Outbound]:
        """Go on with what came out of the training of `pending`; None: nothing did."""
        if self.pending is None:
            raise MisuseError("an update is not due: nothing was fetched, or it was given already")
        self._update = self.sendable(update)
        self._submodel = None
        return self._advance()

    def sendable(self, update: ModelUpdate | None) -> ModelUpdate:
        """What goes out for this outcome of training: where there is none, zeros of weight 0."""
        if update is not None:
            return update
        self.broken = self.broken or NOTHING
        return encode.zeros(self.plan)

    def _floats(self, data: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Floats:
        if len(data) != int(np.prod(shape)) * dtype.itemsize:
            raise self._fault(f"sent {len(data)} bytes for {shape} parameters")
        values: Floats = np.frombuffer(data, dtype=dtype).reshape(shape)
        return values.astype(np.float32, copy=False)  # a view where nothing is to be converted

    # --- 5. upload ------------------------------------------------------------------------------

    def quantised(self, update: ModelUpdate, included: Mapping[TableId, Ids]) -> Input:
        """The update as words of the ring, with the rows whose groups met the quorum."""
        plan, encoded = self.plan, self.quantised_rows(update)
        received = self._received_for(included)
        if not plan.scheme.by_rows:
            dense = encode.with_counts(plan, encoded) if plan.counts_rows else encoded.dense
            return Input(dense=dense, context=self._context, received=received)
        tables = {}
        for t in plan.tables:
            table = plan.table_id(t.name)
            ids = select.ids_at(self._union, t.name, included[table])
            tables[table] = encoded.tables[t.name].at(ids)
            self.written[t.name] = ids[tables[table].any(axis=1)]  # and not those below quorum
        return Input(dense=encoded.dense, tables=tables, context=self._context, received=received)

    def _received_for(self, included: Mapping[TableId, Ids]) -> Received:
        """Digests of the model as it came here: masks are shared only with those who got the same.

        An ideal round has no download, and no masks.
        """
        if self._download is None or not isinstance(self._sum, Client):
            return Received()
        asked = None
        if self._chosen is not None:
            named = self._chosen.requested.items()
            asked = {n: select.positions(self._union, n, rows) for n, rows in named}
        return delivery.received(self.plan, self._download, asked, included)

    def quantised_rows(self, update: ModelUpdate) -> UpdateWords:
        """What a whole model with counts is made of, without the zeros: for ideal rounds."""
        encoded = encode.update_words(self.plan, update, self._trained(), self._coins())
        self.clipped += encoded.clipped
        self.written.update(encoded.written)
        return encoded

    def _coins(self) -> Secret:
        """What this client's rounding follows from, in this round."""
        return self._entropy.secret(
            Label.ROUNDING, self.plan.federation, int(self.round_id), int(self.me)
        )

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.round_id, phase=self.phase)


class _ClientEntropy:
    """Entropy of one client: scripted entropy is addressed by client, too."""

    def __init__(self, entropy: Entropy, me: ClientId) -> None:
        self._entropy, self._me = entropy, me

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Any:
        return self._entropy.secret(label, int(self._me), *context, size=size)
