"""TwoServerClientRound: [union ->] fetch -> train -> write, unseen by either of two servers.

Neither server alone learns which rows it asks for or what it writes (`protocols/two_server/read/`,
`protocols/two_server/write/`). So nothing is randomised, and a row is fetched and written as it is.

Nor may a server learn that something went wrong with its rows: it might have caused it. Training
that failed, and an update that cannot be sent, go out as zeros of the usual length; only the owner
of this client learns why (`broken`).

`client_states.py` has what the round has come to, and what its roles are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Self

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.keys import Identity
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, ServerFault
from tessera.ids import SERVER, ClientId, Party, RoundId, TableId
from tessera.learning.tables.arrays import Floats, Ids
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.plan import UNION, Plan
from tessera.privacy.dp.events import THE_SUMS, THE_UNION
from tessera.privacy.index.period import Agreement
from tessera.protocols.machine import (
    Follower,
    Left,
    Moved,
    Outbound,
    RoundOutcome,
    RoundOver,
    Steps,
    shortened,
)
from tessera.protocols.secagg import messages as secagg
from tessera.protocols.secagg.client import Client
from tessera.protocols.two_server.messages import QueryAnswers, SignedHeader
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.write.client import RowUpdate
from tessera.protocols.two_server.write.client import Update as Written
from tessera.rounds import encode, schemes, select
from tessera.rounds.encode import Clipped, UpdateWords
from tessera.rounds.ideal import IdealClient
from tessera.rounds.local_state import LocalState, check_rows
from tessera.rounds.messages import UnionOpened, most_union_bytes
from tessera.rounds.resolve import resolve
from tessera.rounds.root import coins_of, draw_root, lasting_secret
from tessera.rounds.select import Selection
from tessera.rounds.two_server.client_states import (
    AT_WORK,
    AwaitingHeader,
    ClientRoles,
    FetchingRows,
    GivenUpdate,
    NotJoined,
    OfferingIds,
    RowsWritten,
    TrainingRows,
    WokenClientRoles,
)
from tessera.rounds.two_server.domain import whole_part, written_cuts
from tessera.rounds.two_server.ideal import TrustedServers
from tessera.wire.stored import Kept, Owner

FROM_SERVER: Final = (UnionOpened, SignedHeader, QueryAnswers)
"""Messages that are the round's and not the union's sum's."""


class TwoServerClientRound(Follower[Any]):
    """One client in one round of training between two servers.

    Known to this client only, in the process that trained, and not stored: how much was `clipped`,
    why it sent zeros instead of an update (`broken`), the rows with a delta (`written`), and how
    many of its rows are `left_out`: over the plan's cap, outside the union, or without a bin.
    """

    ROLE = "client of a round between two servers"
    STATES = (NotJoined, *AT_WORK, Left)
    FROM_SERVER = FROM_SERVER

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
        owner = self._hold(plan, round_id, me, local, entropy, identity, servers)
        self._begin(owner, NotJoined())

    def in_memory(self, party: TrustedServers) -> None:
        """Take part in ideal roles instead of the real ones; before the start."""
        if not isinstance(self.state, NotJoined):
            raise MisuseError("a round is ideal from its beginning, or not at all")
        self._roles.party = party

    @classmethod
    def wake(  # type: ignore[override]
        cls,
        snapshot: bytes,
        messages: Mapping[bytes, bytes],
        plan: Plan,
        round_id: RoundId,
        me: ClientId,
        *,
        local: LocalState,
        entropy: Entropy,
        identity: Identity | None,
        servers: Servers,
    ) -> Self:
        """Go on from a snapshot. What was charged is charged, and what was drawn is drawn."""
        client = cls.__new__(cls)
        owner = client._hold(plan, round_id, me, local, entropy, identity, servers)
        given = WokenClientRoles(client._roles, entropy).given
        client._resume(snapshot, messages, owner, given)
        return client

    def _hold(
        self,
        plan: Plan,
        round_id: RoundId,
        me: ClientId,
        local: LocalState,
        entropy: Entropy,
        identity: Identity | None,
        servers: Servers,
    ) -> Owner:
        schemes.check(type(self).__name__, plan, two_servers=True)
        check_rows(plan, local)
        if identity is None:
            raise ConfigError(
                "two servers take reports that are signed, and this client has no key",
                hint="give every client an identity that the helper knows",
            )
        self.plan, self.me = plan, me
        self._local, self._entropy = local, entropy
        self._roles = ClientRoles(
            plan=plan, round_id=round_id, me=me, local=local, identity=identity, servers=servers
        )
        self.clipped, self.broken, self.left_out = Clipped(), "", 0
        self.written: dict[str, Ids] = {}
        # What follows from the state, worked out once.
        self._asked: tuple[Mapping[TableId, Ids], Mapping[str, Ids]] | None = None
        self._submodel: tuple[TrainingRows, Submodel] | None = None
        return self._owned(me, round_id, plan.digest)

    @property
    def phase(self) -> str:
        return self.state.sum.phase if isinstance(self.state, OfferingIds) else super().phase

    @property
    def expected(self) -> frozenset[Party]:
        waits = isinstance(self.state, OfferingIds | AwaitingHeader | FetchingRows)
        return frozenset({SERVER}) if waits else frozenset()

    def resend(self) -> list[Outbound]:
        """Its query or its report again, the sealed box that is stored and no other."""
        match self.state:
            case FetchingRows(reader=reader):
                return reader.resend()
            case RowsWritten(writer=writer):
                return writer.resend()
        return []

    # --- 1. charged before anything is sent -----------------------------------------------------

    def prepare(self) -> None:
        """Settle for ever which rows are kept, and charge for the round: before the first message.

        Rows kept and decoys stay the same under every pseudonym.
        """
        plan, local = self.plan, self._local
        if local.secret is None:
            local.secret = lasting_secret(self._entropy, plan.federation, self.me)
        if local.agreement is None:
            local.agreement = self._agreement
        else:
            local.agreement.must_match(
                self._agreement,
                f"federation {plan.federation!r}",
                "keep the decoys, or join a federation of another name",
            )
        union = (THE_UNION,) if plan.narrows else ()
        noise = resolve(plan).noise
        bare = noise.bare(*union, "the rows written", THE_SUMS)
        local.release(plan, self.round_id, *bare)
        noise.charge(local.ledger, self.round_id)
        self._count_left_out(self._held())

    @property
    def _agreement(self) -> Agreement:
        """Of the decoys alone: other plans of the same federation may follow."""
        return replace(self._local.agreement_on(self.plan), plan=b"")

    def start(self) -> list[Outbound]:
        if not isinstance(self.state, NotJoined):
            raise MisuseError("a round is started once")
        self._local.must_be_settled()
        self.prepare()
        last, self._local.last_round = self._local.last_round, self.round_id
        root = draw_root(self._entropy, self.plan, self.round_id, self.me)
        if not self.plan.narrows:
            domain = self._roles.domain(None)
            reader = self._roles.reader(root, domain, last)
            self._move(AwaitingHeader(root=root, sum=None, domain=domain, reader=reader), b"")
            return []
        total, out = self._roles.sum(root, last)
        self._move(OfferingIds(root=root, sum=total), b"")
        return [*out, *self._offer(root, total)]

    # --- messages -------------------------------------------------------------------------------

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        kind = wire.kind_of(data)
        if isinstance(self.state, NotJoined) and kind is not RoundOver:
            raise MisuseError("a round is started before it receives")
        of_the_sum = kind not in (*FROM_SERVER, RoundOver)
        if sender != SERVER or getattr(self.state, "sum", None) is None or not of_the_sum:
            self._check_length(kind, data)
            return super().receive(sender, data)
        try:
            _, out = self._on_sum(self.state, data)
        except ServerFault as fault:
            raise self._leave(fault) from None
        return out

    def take(self, message: Kept[Any]) -> list[Outbound]:
        """A message of the round's own that was never bytes, in an ideal round."""
        try:
            following, out = STEPS[type(self.state), type(message.message)](
                self, self.state, message
            )
        except ServerFault as fault:
            raise self._leave(fault) from None
        self._move(following, b"")
        return list(out)

    def _check_length(self, kind: type[Any] | None, data: bytes) -> None:
        """A union is bounded by the plan before anything is made of it: a bitmap that names every
        row is short on the wire and 64 times as long in memory."""
        plan = self.plan
        if kind is UnionOpened and isinstance(self.state, OfferingIds):
            most = most_union_bytes(plan.most_union, plan.domain, len(plan.roots))
            if len(data) > most:
                raise self._leave(self._fault(f"sent a union message of {len(data)} bytes"))

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._submodel = self._asked = None

    def _leave(self, fault: ServerFault) -> ServerFault:
        """For good: later messages are not read."""
        self._end(Left(reason=shortened(fault.reason)))
        return fault

    # --- 2. the union: its rows and decoys, under the secure sum --------------------------------

    def _on_sum(self, state: Any, data: bytes) -> Moved:
        """A message of the union's sum, which judges itself whether it is due."""
        out = state.sum.receive(SERVER, data)
        if isinstance(state, OfferingIds):
            out = [*out, *self._offer(state.root, state.sum)]
        return state, out

    def _offer(self, root: RootedEntropy, total: Client | IdealClient) -> list[Outbound]:
        """Its input, as soon as the secure sum asks for it."""
        if total.wants is None:
            return []
        coins = root.secret(Label.UNION_COINS)
        union = self._roles.union
        return total.submit(union.union_input(self.plan, self.round_id, self._offered(), coins))

    def _offered(self) -> Ids:
        """What this client puts into the union: its rows in the one space of ids, and decoys."""
        plan, secret = self.plan, self._secret.derive(Label.DECOYS)
        return select.offered(plan, self._held(), secret, 0, self._local.decoys_from(plan))

    def _held(self) -> dict[str, Ids]:
        """Its rows of the root tables, as many as the plan lets a client name."""
        held = select.held(self.plan, self._local.real)
        return select.capped(self.plan, held, self._secret)

    @property
    def _secret(self) -> Secret:
        if self._local.secret is None:
            raise MisuseError("a client has lost the secret that its rows follow from")
        return self._local.secret

    def _on_union(self, state: OfferingIds, union: Kept[UnionOpened]) -> Moved:
        if union.message.round_id != self.round_id:
            raise self._fault(f"sent the union of round {union.message.round_id}")
        if not state.sum.knows_survivors(UNION):
            raise self._fault("sent a union that is not due")
        if flaw := select.union_flaw(self.plan, union.message):
            raise self._fault(flaw)
        try:
            domain = self._roles.domain(union)
        except ConfigError as error:
            raise self._fault(f"sent a union that the plan cannot work with: {error}") from error
        reader = self._roles.reader(state.root, domain)
        return AwaitingHeader(root=state.root, sum=state.sum, domain=domain, reader=reader), []

    # --- 3. fetch -------------------------------------------------------------------------------

    def _on_header(self, state: AwaitingHeader, header: Kept[SignedHeader]) -> Moved:
        """From here on both servers have agreed on a model: ask for rows of it."""
        plan = self.plan
        state.reader.receive(SERVER, header.data)
        self._roles.check_keys(state.domain.params, header.message.header)
        chosen = self._choose(state.domain.rows)
        out = state.reader.submit(
            {
                TableId(spec.table): chosen.requested[plan.tables[spec.table].name]
                for spec in state.domain.params.read
                if spec.reads_points
            }
        )
        rows = {plan.table_id(t.name): chosen.requested[t.name] for t in plan.roots}
        self._asked = (rows, chosen.requested)
        following = FetchingRows(
            root=state.root,
            sum=state.sum,
            domain=state.domain,
            header=header,
            rows=rows,
            reader=state.reader,
        )
        return following, out

    def _choose(self, union: Mapping[str, Ids]) -> Selection:
        """The rows it asks for: its own, capped, and inside the union where there is one."""
        chosen = select.choose_held(self.plan, self._held(), union, self._local.derived)
        self._count_left_out(chosen.trained)
        return chosen

    def _count_left_out(self, kept: Mapping[str, Ids]) -> None:
        held = sum(len(rows) for rows in self._local.real.values())
        self.left_out = held - sum(len(kept[t.name]) for t in self.plan.roots)

    def _on_answers(self, state: FetchingRows, answers: Kept[QueryAnswers]) -> Moved:
        state.reader.receive(SERVER, answers.data)
        following = TrainingRows(
            root=state.root,
            sum=state.sum,
            domain=state.domain,
            header=state.header,
            rows=state.rows,
            reader=state.reader,
        )
        self._submodel = (following, self._submodel_of(following))
        return following, []

    def _told(self, outcome: RoundOutcome) -> None:
        self._local.told(self.round_id, outcome)

    @property
    def coins(self) -> Secret:
        """What the training of `pending` draws from."""
        assert isinstance(self.state, TrainingRows)
        return coins_of(self.state.root)

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now, once it is here; nothing before, and nothing after."""
        state = self.state
        if not isinstance(state, TrainingRows):
            return None
        if self._submodel is None or self._submodel[0] is not state:
            self._submodel = (state, self._submodel_of(state))
        return self._submodel[1]

    def _submodel_of(self, state: TrainingRows) -> Submodel:
        plan, dtype, fetched = self.plan, self.plan.model.precision.dtype, state.reader.fetched
        assert fetched is not None
        if self._asked is None or self._asked[0] is not state.rows:  # woken since it asked
            roots = {plan.tables[table].name: ids for table, ids in state.rows.items()}
            self._asked = (state.rows, select.with_derived(plan, roots, self._local.derived))
        asked = self._asked[1]
        tables, trained = {}, {}
        for t in plan.tables:
            part = fetched.tables.get(plan.table_id(t.name))
            if part is None:  # no row of it is in the round
                ids, values = np.zeros(0, np.uint64), np.zeros((0, t.width), np.float32)
            else:
                ids = part.ids
                values = part.rows.view(dtype).reshape(len(ids), t.width).astype(np.float32)
            tables[t.name] = TablePart(ids, values)
            own = asked[t.name]
            if own is not ids and not np.array_equal(own, ids):  # some had no bin
                own = own[np.isin(own, ids, assume_unique=True)]
            trained[t.name] = own
        self._count_left_out(trained)
        return Submodel(self._dense(fetched.dense), tables, trained)

    def _dense(self, data: bytes) -> Floats:
        due, dtype = self.plan.model.dense, self.plan.model.precision.dtype
        if len(data) != due * dtype.itemsize:
            raise self._fault(f"sent {len(data)} bytes for {due} dense parameters")
        return np.frombuffer(data, dtype=dtype).astype(np.float32, copy=False)

    # --- 4. write -------------------------------------------------------------------------------

    def supply(self, update: ModelUpdate | None) -> list[Outbound]:
        """Write what came out of training; what cannot be sent goes out as zeros, like nothing."""
        state = self.state
        if not isinstance(state, TrainingRows):
            raise MisuseError("an update is not due: nothing was fetched, or it was given already")
        following, out = self._on_update(state, GivenUpdate(update))
        self._move(following, b"")
        return out

    def _on_update(self, state: TrainingRows, given: GivenUpdate) -> Moved:
        assert self.pending is not None
        trained = self.pending.trained
        encoded = self._encoded(given.update, trained, state.root)
        params = state.domain.params
        writer = self._roles.writer(state.root, state.domain)
        writer.prepare(state.header)  # which the reader has checked
        following = RowsWritten(sum=state.sum, domain=state.domain, writer=writer)
        self._submodel = None
        plan, known = self.plan, len(self.plan.tables)
        cuts = [TableId(spec.table) for spec in params.written if spec.table >= known]
        names = {
            TableId(spec.table): plan.tables[spec.table].name
            for spec in params.written
            if spec.table < known
        }
        # A client whose training failed has keys for its rows, too: they may last.
        own = {table: trained[name] for table, name in names.items()}
        if encoded is None:
            none = np.zeros(0, dtype=np.uint64)
            return following, writer.submit(None, {**dict.fromkeys(cuts, none), **own})
        rows = {table: encoded.tables[name] for table, name in names.items()}
        tables = {table: RowUpdate(part.ids, part.words) for table, part in rows.items()}
        selected = written_cuts(plan, encoded.dense)
        own |= {table: part.ids for table, part in selected.items()}
        dense = encoded.dense[whole_part(plan)]
        return following, writer.submit(Written(dense=dense, tables={**tables, **selected}), own)

    def _encoded(
        self, update: ModelUpdate | None, trained: Mapping[str, Ids], root: RootedEntropy
    ) -> UpdateWords | None:
        """The update in words; None, and `broken` says why, if zeros are to be sent instead."""
        self.broken = encode.flaw(self.plan, update, trained)
        if update is None or self.broken:
            return None
        coins = root.secret(Label.ROUNDING)
        words = encode.update_words(
            self.plan,
            update,
            trained,
            coins,
            round_id=self.round_id,
            residual=self._local.residual_in(self.plan),
        )
        self.clipped, self.written = words.clipped, dict(words.written)
        return words


STEPS: Final[Steps] = {
    **{
        (state, kind): TwoServerClientRound._on_sum
        for state in AT_WORK
        for kind in secagg.FROM_SERVER
    },
    (OfferingIds, UnionOpened): TwoServerClientRound._on_union,
    (AwaitingHeader, SignedHeader): TwoServerClientRound._on_header,
    (FetchingRows, QueryAnswers): TwoServerClientRound._on_answers,
    (TrainingRows, GivenUpdate): TwoServerClientRound._on_update,
}
TwoServerClientRound.STEPS = STEPS
