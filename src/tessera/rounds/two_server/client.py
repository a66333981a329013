"""TwoServerClientRound: [union ->] fetch -> train -> write, unseen by either of two servers.

Neither server alone learns which rows it asks for or what it writes (`protocols/two_server/read/`,
`protocols/two_server/write/`). So nothing is randomised, and a row is fetched and written as it is.

Nor may a server learn that something went wrong with its rows: it might have caused it. Training
that failed, and an update that cannot be sent, go out as zeros of the usual length; only the owner
of this client learns why (`broken`).

A state holds what the round has come to, and in it the roles in the protocols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, Party, TableId
from tessera.learning.tables.submodel import Floats, Ids, Submodel, TablePart
from tessera.privacy.dp.events import THE_SUMS
from tessera.privacy.index.period import Agreement
from tessera.protocols.machine import (
    Left,
    Moved,
    Outbound,
    Steps,
)
from tessera.protocols.secagg import messages as secagg
from tessera.protocols.two_server.handshake import TwoServerClientSetup
from tessera.protocols.two_server.key_period import own_keys_of
from tessera.protocols.two_server.messages import QueryAnswers, SignedHeader
from tessera.protocols.two_server.read.client import RetrievalClient
from tessera.protocols.two_server.write.client import RowUpdate, WriteClient
from tessera.protocols.two_server.write.client import Update as Written
from tessera.rounds import select, sums
from tessera.rounds.messages import RowsByTable, UnionOpened
from tessera.rounds.party import ClientRoundSetup
from tessera.rounds.root import ROOT, StoredRoot, draw_root, lasting_secret
from tessera.rounds.select import Selection
from tessera.rounds.sums import SumClient
from tessera.rounds.training_client import TrainingClient, TrainingOutput
from tessera.rounds.two_server import shared_sum
from tessera.rounds.two_server.domain import NAME as DOMAIN
from tessera.rounds.two_server.domain import (
    RoundDomain,
    StoredDomain,
    WokenParts,
    check_stored,
    whole_part,
    written_cuts,
)
from tessera.rounds.two_server.shared_sum import shared
from tessera.wire.stored import ByDigest, Inner, Kept

UnionSum = Annotated[sums.SumClient | None, wire.Maybe(Inner("sum"))]
"""None where tables are not narrowed to a union."""
Reader = Annotated[shared_sum.RowReader, Inner("reader")]
Writer = Annotated[shared_sum.RowWriter, Inner("writer")]
KeptHeader = Annotated[Kept[SignedHeader], ByDigest(SignedHeader)]


@wire.record(tag=0x02B0)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotJoined:
    """Nothing is charged and nothing sent."""


@wire.record(tag=0x02B1)
@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingIds:
    """Takes part in the union's sum; waits for the union."""

    root: StoredRoot
    sum: Annotated[sums.SumClient, Inner("sum")]


@wire.record(tag=0x02B2)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingHeader:
    """Knows the rows that the round is about; waits for the header that both servers signed."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    reader: Reader


@wire.record(tag=0x02B3)
@dataclass(frozen=True, slots=True, kw_only=True)
class FetchingRows:
    """Has asked for its `rows` of root tables; waits for both servers' answers."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    header: KeptHeader
    rows: RowsByTable = field(repr=False)
    reader: Reader


@wire.record(tag=0x02B4)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Has something to train (`pending`); waits for its caller's update."""

    root: StoredRoot
    sum: UnionSum
    domain: StoredDomain
    header: KeptHeader
    rows: RowsByTable = field(repr=False)
    reader: Reader


@wire.record(tag=0x02B5)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWritten:
    """Its report is out; nothing more is due."""

    sum: UnionSum
    domain: StoredDomain
    writer: Writer


AT_WORK: Final = (OfferingIds, AwaitingHeader, FetchingRows, TrainingRows, RowsWritten)


class TwoServerClientRound(TrainingClient):
    """One client in one round of training between two servers.

    Known to this client only, too: how many of its rows are `left_out`, because they are over the
    plan's cap, outside the union, or without a bin.
    """

    ROLE = "client of a round between two servers"
    STATES = (NotJoined, *AT_WORK, Left)
    FROM_SERVER = (UnionOpened, SignedHeader, QueryAnswers)
    TWO_SERVERS = True
    INVITED, OFFERING, TRAINING = NotJoined, OfferingIds, TrainingRows

    def _set_up(self, setup: ClientRoundSetup) -> None:
        super()._set_up(setup)
        if setup.identity is None:
            raise ConfigError(
                "two servers take reports that are signed, and this client has no key",
                hint="give every client an identity that the helper knows",
            )
        if setup.servers is None:
            raise MisuseError("a client of two servers has their keys")
        self._identity, self._servers = setup.identity, setup.servers
        self._sum = shared(setup.sum)
        self.left_out = 0
        self._asked: tuple[Mapping[TableId, Ids], Mapping[str, Ids]] | None = None

    def _supplied(self) -> Mapping[str, Any]:
        """The reader and the writer are given the domain and the root, which are read before."""
        found = WokenParts()

        def own() -> TwoServerClientSetup:
            return self._own_setup(found.get(ROOT, self._entropy), found[DOMAIN])

        return {
            "sum": partial(self._sum.union.wake_client, self.setup),
            DOMAIN: found.keeping(DOMAIN, self._stored_domain),
            ROOT: found.keeping(ROOT, lambda root: root),
            "reader": lambda snapshot, messages: RetrievalClient.wake(snapshot, messages, own()),
            "writer": lambda snapshot, messages: WriteClient.wake(snapshot, messages, own()),
        }

    def _domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        def made() -> RoundDomain:
            servers, maps = self._servers, self._local.derived
            return RoundDomain.of(self.plan, self.round_id, servers, union, maps)

        return self._sum.once(union, made)

    def _stored_domain(self, union: Kept[UnionOpened] | None) -> RoundDomain:
        check_stored(self._rows, union)
        return self._domain(union)

    def _own_setup(self, root: Entropy, domain: RoundDomain) -> TwoServerClientSetup:
        """Of the reader and of the writer."""
        return TwoServerClientSetup(
            domain.params,
            self.me,
            entropy=root,
            identity=self._identity,
            own_keys=self._local.own_keys,
        )

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
        local.attend(plan, self.round_id, self._servers)
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
        bare = self._noise.bare(*self._rows.opened_first, "the rows written", THE_SUMS)
        local.release(plan, self.round_id, *bare)
        self._noise.charge(local.ledger, self.round_id, local.training(plan))
        self._count_left_out(self._held())

    @property
    def _agreement(self) -> Agreement:
        """Of the decoys alone: other plans of the same federation may follow."""
        return replace(self._local.agreement_on(self.plan), plan=b"")

    def start(self) -> list[Outbound]:
        self._must_begin()
        self.prepare()
        last, self._local.last_round = self._local.last_round, self.round_id
        root = draw_root(self._entropy, self.plan, self.round_id, self.me)
        if not self._rows.union:
            domain = self._domain(None)
            reader = self._sum.reader(self._own_setup(root, domain), last)
            self._move(AwaitingHeader(root=root, sum=None, domain=domain, reader=reader), b"")
            return []
        total, out = self._sum.union.join(self.setup, root, last)
        self._move(OfferingIds(root=root, sum=total), b"")
        return [*out, *self._offer(root, total)]

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._asked = None

    # --- 2. the union: its rows and decoys, under the secure sum --------------------------------

    def _on_sum(self, state: Any, data: bytes) -> Moved:
        out = state.sum.receive(SERVER, data)
        if isinstance(state, OfferingIds):
            out = [*out, *self._offer(state.root, state.sum)]
        return state, out

    def _offer(self, root: RootedEntropy, total: SumClient) -> list[Outbound]:
        """Its input, as soon as the secure sum asks for it."""
        if total.wants is None:
            return []
        coins = root.secret(Label.UNION_COINS)
        union = self._sum.union
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
        self._check_union(state.sum, union.message)
        try:
            domain = self._domain(union)
        except ConfigError as error:
            raise self._fault(f"sent a union that the plan cannot work with: {error}") from error
        reader = self._sum.reader(self._own_setup(state.root, domain), None)
        return AwaitingHeader(root=state.root, sum=state.sum, domain=domain, reader=reader), []

    # --- 3. fetch -------------------------------------------------------------------------------

    def _on_header(self, state: AwaitingHeader, header: Kept[SignedHeader]) -> Moved:
        """From here on both servers have agreed on a model: ask for rows of it."""
        plan = self.plan
        state.reader.receive(SERVER, header.data)
        keys, ideal = self._local.own_keys, self._sum.in_memory
        own_keys_of(state.domain.params, header.message.header, keys, ideal=ideal)  # or it leaves
        chosen = self._choose(state.domain.rows)
        out = state.reader.submit(
            {
                TableId(spec.table): chosen.requested[plan.tables[spec.table].name]
                for spec in state.domain.params.read
                if spec.reads_points
            }
        )
        rows = {table: chosen.requested[t.name] for table, t in plan.root_ids.items()}
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
        self._fetched(following)
        return following, []

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

    def _on_update(self, state: TrainingRows, supplied: TrainingOutput) -> Moved:
        """Write what came out of training; what cannot be sent goes out as zeros, like nothing."""
        trained = self._fetched(state).trained
        update = self._sound(supplied.update, trained)
        params = state.domain.params
        writer = self._sum.writer(self._own_setup(state.root, state.domain))
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
        if update is None:
            none = np.zeros(0, dtype=np.uint64)
            return following, writer.submit(None, {**dict.fromkeys(cuts, none), **own})
        encoded = self._words(update, trained, state.root)
        rows = {table: encoded.tables[name] for table, name in names.items()}
        tables = {table: RowUpdate(part.ids, part.words) for table, part in rows.items()}
        selected = written_cuts(plan, encoded.dense)
        own |= {table: part.ids for table, part in selected.items()}
        dense = encoded.dense[whole_part(plan)]
        return following, writer.submit(Written(dense=dense, tables={**tables, **selected}), own)


STEPS: Final[Steps] = {
    **{
        (state, kind): TwoServerClientRound._on_sum
        for state in AT_WORK
        for kind in secagg.FROM_SERVER
    },
    (OfferingIds, UnionOpened): TwoServerClientRound._on_union,
    (AwaitingHeader, SignedHeader): TwoServerClientRound._on_header,
    (FetchingRows, QueryAnswers): TwoServerClientRound._on_answers,
    (TrainingRows, TrainingOutput): TwoServerClientRound._on_update,
}
TwoServerClientRound.STEPS = STEPS
