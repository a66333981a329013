"""The ideal handshake, retrieval and write: in the clear, behind the interfaces of the real ones.

Client, leader and helper are the real rounds, and so are the union's sum (`rounds/ideal.py`), the
list of reports, its least length and key periods: a client that leaves is missing where it would
be. Nothing is signed, sealed, hashed or shared. What clients ask for and write lies in memory
(`TrustedServers`), and messages carry nothing. A row that would find no bin finds one here.

Keys that last are noted in the same stores, without the keys: a round with real messages cannot
follow an ideal one of the same period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.errors import MisuseError, PeerError, RoundAborted
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId, TableId
from tessera.learning.tables.submodel import Floats, Ids, distinct
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
from tessera.protocols.machine import Outbound
from tessera.protocols.two_server.collector import LeaderSetup
from tessera.protocols.two_server.handshake import PHASE as HANDSHAKE
from tessera.protocols.two_server.handshake import (
    HelperHandshakeSetup,
    LeaderHandshakeSetup,
    ServedModel,
    TwoServerClientSetup,
)
from tessera.protocols.two_server.key_period import (
    IDEAL,
    KeyStore,
    OwnKeys,
    keep_keys,
    keys_of,
    living,
    own_keys_of,
    shortage,
    with_keys,
)
from tessera.protocols.two_server.messages import (
    AnswersDue,
    HandshakeConsent,
    HandshakeOffer,
    Header,
    OpenedSum,
    Query,
    QueryAnswers,
    SignedHeader,
    WriteReport,
)
from tessera.protocols.two_server.params import TwoServerParams
from tessera.protocols.two_server.read.client import Fetched, FetchedRows
from tessera.protocols.two_server.read.server import RetrievalHelperSetup, RetrievalLeaderSetup
from tessera.protocols.two_server.write.client import RowUpdate, Update
from tessera.protocols.two_server.write.helper import WriteHelperSetup
from tessera.protocols.two_server.write.leader import WriteLeaderSetup
from tessera.protocols.two_server.write.sums import (
    NoiseSecrets,
    RowSum,
    Share,
    TwoServerSum,
    with_noise,
)
from tessera.rounds.ideal import NONE, IdealRole, IdealSum, Shared, TrustedParty, posted, signal
from tessera.rounds.sums import InnerRole, Sum
from tessera.rounds.two_server.domain import served_rows
from tessera.rounds.two_server.shared_sum import (
    Adding,
    HelperAgreement,
    LeaderAgreement,
    LeaderRetrieval,
    LeaderWrite,
    RowReader,
    RowWriter,
    SharedSum,
)
from tessera.wire.index_set import client_array
from tessera.wire.stored import Kept

UNSIGNED = bytes(64)
NO_DIGEST = bytes(32)


class TrustedServers:
    """What both ideal servers and their clients share in a round."""

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        dense: Floats,
        tables: Mapping[str, StoredTable],
    ) -> None:
        self.plan, self.round_id = plan, round_id
        self.header: Header | None = None
        self.wanted: dict[ClientId, Mapping[TableId, Ids]] = {}
        self.reports: dict[ClientId, Update | None] = {}
        self.noise: dict[Party, NoiseSecrets] = {}  # what each server's follows from
        self.total: TwoServerSum | None = None
        self._tables = tables
        self._dense = dense.astype(plan.model.precision.dtype).tobytes()
        self._whole: dict[TableId, FetchedRows] = {}

    def agreed(self, params: TwoServerParams, store: KeyStore | None) -> Header:
        """On a header that nobody signs; new keys, unless those of an earlier round last."""
        held = living(params, store, params.round_id, ideal=True)
        self.header = Header(
            round_id=params.round_id,
            context=params.context,
            leader_nonce=NO_DIGEST,
            helper_nonce=NO_DIGEST,
            tables={},
            dense=NO_DIGEST,
            period=params.round_id if held is None else held.period,
            bins=None if held is None else held.seed,
        )
        return self.header

    def fetched(self, params: TwoServerParams, client: ClientId) -> Fetched:
        """What a client has asked for, and all of every table that is read whole."""
        found = {}
        for spec in params.read:
            if spec.reads_points:
                ids = self.wanted[client][spec.table]
                found[spec.table] = FetchedRows(
                    ids, served_rows(self.plan, spec, self._tables, ids)
                )
                continue
            if spec.table not in self._whole:
                ids = spec.named(np.arange(spec.rows))
                rows = served_rows(self.plan, spec, self._tables, ids)
                self._whole[spec.table] = FetchedRows(ids, rows)
            found[spec.table] = self._whole[spec.table]
        return Fetched(found, self._dense)

    def add_up(self, params: TwoServerParams, clients: Iterable[ClientId]) -> TwoServerSum:
        """The sum over these reports, as both servers would open it. None is a report of zeros."""
        listed, group = sorted(clients), params.group
        given = [each for each in (self.reports[c] for c in listed) if each is not None]
        dense = group.zeros(params.dense)
        for each in given:
            if each.dense is not None:
                group.iadd(dense, each.dense)
        tables = {}
        for spec in params.written:
            parts = [each.tables[spec.table] for each in given]
            ids = distinct(np.concatenate([*(part.ids for part in parts), NONE]))
            words = group.zeros((len(ids), spec.words))
            for part in parts:
                at = np.searchsorted(ids, part.ids)
                words[at] = group.add(words[at], part.words)
            # Two servers cannot tell zeros from what nobody wrote.
            there = words.any(axis=tuple(range(1, words.ndim)))
            tables[spec.table] = RowSum(rows=ids[there], words=words[there])
        total = TwoServerSum(survivors=client_array(listed), dense=dense, tables=tables)
        self.total = self._with_noise(params, total) if params.noise else total
        return self.total

    def _with_noise(self, params: TwoServerParams, total: TwoServerSum) -> TwoServerSum:
        """All rows, with both servers' noise as they draw it."""
        whole = {}
        for spec in params.written:
            words = params.group.zeros((spec.rows, spec.words))
            words[spec.index(total.tables[spec.table].rows)] = total.tables[spec.table].words
            whole[spec.table] = words
        share = Share(total.dense, whole)
        for server in (SERVER, HELPER):
            share = with_noise(params, share, self.noise[server], server)
        tables = {
            spec.table: RowSum(
                rows=spec.named(np.arange(spec.rows)), words=share.tables[spec.table]
            )
            for spec in params.written
        }
        return replace(total, dense=share.dense, tables=tables)


# --- a client -------------------------------------------------------------------------------------


class IdealReader(IdealRole):
    """Fetches rows: what it asks for is there as soon as the queries are closed."""

    phase = "query"

    def __init__(self, party: TrustedServers, setup: TwoServerClientSetup) -> None:
        self._party, self._params, self._me = party, setup.params, setup.party
        self.fetched: Fetched | None = None

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """The header, and later the answers."""
        if self._me in self._party.wanted:
            self.fetched = self._party.fetched(self._params, self._me)
        return []

    def submit(self, wanted: Mapping[TableId, Ids]) -> list[Outbound]:
        self._party.wanted[self._me] = wanted
        return [signal(SERVER, Query)]


class IdealWriter(IdealRole):
    """Writes rows: of tables that are written by keys only those it has keys for."""

    phase = "collect"

    def __init__(self, party: TrustedServers, setup: TwoServerClientSetup) -> None:
        self._party, self._params, self._me = party, setup.params, setup.party
        self._entropy, self._own_keys = setup.entropy, setup.own_keys
        self._header: Header | None = None

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        return []

    def prepare(self, signed: Kept[SignedHeader]) -> None:
        self._header = signed.message.header

    def submit(self, update: Update | None, rows: Mapping[TableId, Ids]) -> list[Outbound]:
        assert self._header is not None
        if self._params.key_rounds > 1:
            made = self._keys(self._header, rows)
            if update is not None:
                update = _among(made.rows, update)
        self._party.reports[self._me] = update
        return [signal(SERVER, WriteReport)]

    def _keys(self, header: Header, rows: Mapping[TableId, Ids]) -> OwnKeys:
        """What its keys are for, kept as the real ones are."""
        made = own_keys_of(self._params, header, self._own_keys, ideal=True)
        if made is None:
            root = self._entropy.secret(Label.KEY_PERIOD_ROOT, header.digest, int(self._me))
            made = OwnKeys.begun(self._params, header, rows, root=root, report_id=IDEAL)
        if self._own_keys is None:
            raise MisuseError("two servers: keys that last longer than a round need a store")
        self._own_keys.keep(replace(made, epoch=header.epoch, sent=b""))
        return made


def _among(rows: Mapping[TableId, Ids], update: Update) -> Update:
    """The update without rows that its client has no keys for; they wait for the next period."""

    def kept(table: TableId, part: RowUpdate) -> RowUpdate:
        if table not in rows:
            return part
        there = np.isin(part.ids, rows[table], assume_unique=True)
        return RowUpdate(part.ids[there], part.words[there])

    return Update(update.dense, {table: kept(table, part) for table, part in update.tables.items()})


# --- the leader -----------------------------------------------------------------------------------


class IdealHandshake(IdealRole):
    """The leader's side. The helper says whose keys last."""

    def __init__(self, party: TrustedServers, setup: LeaderHandshakeSetup) -> None:
        self._party, self._params = party, setup.params
        self._invited, self._key_store = frozenset(setup.invited), setup.key_store
        self.signed_header: Kept[SignedHeader] | None = None

    @property
    def phase(self) -> str:
        return HANDSHAKE if self.signed_header is None else "done"

    @property
    def expected(self) -> frozenset[Party]:
        return frozenset({HELPER}) if self.signed_header is None else frozenset()

    def begin(self) -> list[Outbound]:
        return [signal(HELPER, HandshakeOffer)]

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        header = self._party.header
        assert header is not None
        signed = SignedHeader(header=header, leader=UNSIGNED, helper=UNSIGNED)
        self.signed_header = Kept.received(signed, b"", b"")
        here = with_keys(self._params, header, self._key_store, self._invited, ideal=True)
        return posted(here, self.signed_header)

    def close_phase(self) -> list[Outbound]:
        raise MisuseError("an ideal helper answers at once")


class _Collecting(IdealRole):
    """One message from everybody; `close_phase` goes on with whoever has sent one."""

    PHASE: str

    def __init__(self, party: TrustedServers, setup: LeaderSetup) -> None:
        self.header, self._party, self._params = setup.header, party, setup.params
        self._missing = set(setup.invited)
        self._here: set[ClientId] = set()
        self._closed = False

    @property
    def phase(self) -> str:
        return "done" if self._closed else self.PHASE

    @property
    def expected(self) -> frozenset[Party]:
        return frozenset() if self._closed else frozenset(self._missing)

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        if isinstance(sender, str) or sender not in self._missing or self._closed:
            raise PeerError(
                "is not due", round_id=self._party.round_id, phase=self.phase, peer=sender
            )
        self._missing.remove(sender)
        self._here.add(sender)
        return []


class IdealRetrieval(_Collecting):
    """The leader's side: everybody who asked is answered at once."""

    PHASE = "query"
    refused: frozenset[ClientId] = frozenset()

    def close_phase(self) -> list[Outbound]:
        self._closed = True
        answers = QueryAnswers(
            round_id=self._party.round_id, report_id=NO_DIGEST, tables=(), dense=b"", box=b""
        )
        kept = Kept.received(answers, b"", b"")
        return [signal(HELPER, AnswersDue), *posted(self._here, kept)]


class IdealWrite(_Collecting):
    """The leader's side: it may open what the real one may, and no more."""

    PHASE = "collect"
    excluded: Mapping[ClientId, str] = {}

    def __init__(self, party: TrustedServers, setup: WriteLeaderSetup) -> None:
        super().__init__(party, setup)
        self._key_store = setup.key_store
        self.total: TwoServerSum | None = None

    def close_phase(self) -> list[Outbound]:
        keys = keys_of(self._params, self.header, self._key_store, ideal=True)
        if found := shortage(self._params, keys, self._here):
            answered, needed, reason = found
            raise RoundAborted(
                round_id=self._party.round_id,
                phase=self.phase,
                answered=answered,
                needed=needed,
                reason=reason,
            )
        note_keys(self._params, self.header, self._key_store, self._here)
        self._closed = True
        self.total = self._party.add_up(self._params, self._here)
        return [signal(HELPER, OpenedSum)]


def note_keys(
    params: TwoServerParams, header: Header, store: KeyStore | None, here: Iterable[ClientId]
) -> None:
    """Whose keys last from this round on, if any do."""
    if params.key_rounds > 1 and not header.epoch:
        keep_keys(params, header, store, dict.fromkeys(here, (IDEAL, (), ())))


# --- the helper -----------------------------------------------------------------------------------


class IdealHelperHandshake(IdealRole):
    """The helper's side: consents at once."""

    def __init__(self, party: TrustedServers, setup: HelperHandshakeSetup) -> None:
        self._party, self._params, self._key_store = party, setup.params, setup.key_store
        self.header: Header | None = None

    @property
    def phase(self) -> str:
        return HANDSHAKE if self.header is None else "done"

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        self.header = self._party.agreed(self._params, self._key_store)
        return [signal(SERVER, HandshakeConsent)]


class IdealHelperRetrieval(IdealRole):
    """The helper's side: there is nothing to answer that the leader has not."""

    phase = "query"

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        self.phase = "done"
        return []


class IdealHelperWrite(IdealRole):
    """The helper's side: it is shown the sum."""

    excluded: Mapping[ClientId, str] = {}

    def __init__(self, party: TrustedServers, setup: WriteHelperSetup) -> None:
        self._party, self._params = party, setup.params
        self._header, self._key_store = setup.header, setup.key_store
        self.total: TwoServerSum | None = None

    @property
    def phase(self) -> str:
        return "collect" if self.total is None else "done"

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        self.total = self._party.total
        assert self.total is not None
        survivors = [ClientId(int(c)) for c in self.total.survivors]
        note_keys(self._params, self._header, self._key_store, survivors)
        return []


# --- the sum --------------------------------------------------------------------------------------


class NotServed(ServedModel):
    """Nothing is read from it: clients find rows in the model itself."""

    def check(self, params: TwoServerParams) -> None:
        return


class IdealSharedSum(Shared, SharedSum):
    """The sum between two servers in memory: lists and key periods are those of the real one."""

    in_memory = True

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        cohort: Iterable[ClientId],
        dense: Floats,
        tables: Mapping[str, StoredTable],
    ) -> None:
        super().__init__()
        self._party = TrustedServers(plan, round_id, dense, tables)
        self._round = (plan, round_id, cohort)

    @cached_property
    def union(self) -> Sum:
        plan, round_id, cohort = self._round
        return IdealSum(TrustedParty(plan, round_id, cohort, plan.union_sum(round_id)))

    def served(self, make: Callable[[], ServedModel]) -> ServedModel:
        return NotServed()

    def reader(self, setup: TwoServerClientSetup, last_round: RoundId | None) -> RowReader:
        return IdealReader(self._party, setup)

    def writer(self, setup: TwoServerClientSetup) -> RowWriter:
        return IdealWriter(self._party, setup)

    def handshake(
        self, setup: LeaderHandshakeSetup, model: ServedModel, root: Entropy
    ) -> LeaderAgreement:
        return IdealHandshake(self._party, setup)

    def retrieve(self, setup: RetrievalLeaderSetup) -> LeaderRetrieval:
        return IdealRetrieval(self._party, setup)

    def add_up(self, setup: WriteLeaderSetup, noise: NoiseSecrets) -> LeaderWrite:
        self._party.noise[SERVER] = noise
        return IdealWrite(self._party, setup)

    def consent(self, setup: HelperHandshakeSetup, root: Entropy) -> HelperAgreement:
        return IdealHelperHandshake(self._party, setup)

    def help_retrieve(self, setup: RetrievalHelperSetup) -> InnerRole:
        return IdealHelperRetrieval()

    def help_add_up(self, setup: WriteHelperSetup, root: Entropy, noise: NoiseSecrets) -> Adding:
        self._party.noise[HELPER] = noise
        return IdealHelperWrite(self._party, setup)
