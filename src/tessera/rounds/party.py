"""What a party of a round has: a client's own state, the server's model, what roles are made with.

ServerModel  the model as one server has it, and the step that a round makes of it. Leader and
             helper step it by the same means, and their digests stay the same
LocalState   what a client has of its own and keeps from round to round
Set-up       what a role is made with, and woken with again: the plan, the round's number and what
             its party has of its own; all that a role does not store

A new role begins from its set-up record alone (`ClientRound(setup)`); one that was stored goes on
from snapshot and messages (`StateMachine.wake(snapshot, messages, setup)`), where the record must
be the same: the plan's digest is in the snapshot, and a server is given the model that it had. Who
has begun a round draws nothing from `entropy` any more: its root is in its state.

`ideal` is a sum in memory in place of the plan's own, one for all roles of a round, which cannot be
stored (`rounds/ideal.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Final, Protocol

from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.keys import Identity, SealingKey, SigningKey
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.data.row_names import OwnNames
from tessera.errors import ConfigError, MisuseError, RoundRefused
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.learning.averaging import Averaging
from tessera.learning.compression import Residual
from tessera.learning.popularity import Popularity
from tessera.learning.tables.submodel import Floats, Ids, TablePart
from tessera.learning.tables.table import DerivedMap, StoredTable
from tessera.plan import Plan, Sharing
from tessera.privacy.dp.events import ExactRelease
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import Agreement, PeriodStore
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.machine import RoundOutcome
from tessera.protocols.two_server.collector import ReplayGuard
from tessera.protocols.two_server.key_period import KeyStore, MemoryStore, OwnKeyStore
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.read.client import RowTagCache
from tessera.protocols.two_server.reports import SingleWorker, Workers
from tessera.protocols.union.decoys import Catalogue, WholeTable
from tessera.rounds import noise_chain
from tessera.rounds.attendance import Attendance, Place, attended
from tessera.rounds.messages import RoundResult
from tessera.rounds.noise import noise_of
from tessera.rounds.noise_chain import ChainStore
from tessera.rounds.resolve import resolve
from tessera.rounds.sums import ClientSetup, Sum


class Word(Enum):
    """Why a client takes it that a round has counted, or has not."""

    SERVER = "the server's word"
    OWN = "this client has not sent its update"
    CERTIFICATE = "everybody's signature that it has delivered"


class CarriedRows(Protocol):
    """A client's rows of tables that never leave it. What training makes of them is pending until
    the round is known to have counted: a round that did not count did not happen at home."""

    @property
    def pending(self) -> RoundId | None:
        """The round whose outcome is not known yet."""

    def offer(self, round_id: RoundId, rows: Mapping[str, TablePart]) -> None:
        """These are its rows if the round counts."""

    def settle(self, *, counted: bool) -> None:
        """Keep what is pending, or forget it."""


class OwnData(Protocol):
    """A client's data, of which a period has those up to its cut-off."""

    @property
    def timed(self) -> bool:
        """Whether they have times to cut by."""

    def up_to(self, cutoff: int) -> Mapping[str, Ids]:
        """The rows of the data of a new period, which are fixed with this: durably, whatever is
        added to the data later. What the client has already drawn beside earlier data stays."""


@dataclass(slots=True)
class LocalState:
    """What a client has of its own: its rows by table, its choice, and what it must remember."""

    real: Mapping[str, Ids] = field(repr=False)
    periods: PeriodStore
    ledger: Ledger = field(default_factory=Ledger)
    privacy: IndexPrivacy | None = None  # its own choice, where it differs from the plan's
    quorum: int = 0  # likewise
    derived: Mapping[str, DerivedMap] = field(default_factory=dict)
    counts: bytes = b""  # digest of the public counts that its negatives are drawn and weighed by
    candidates: str = ""  # the table of which a softmax is over all rows of a fixed group's union
    catalogue: Catalogue | None = None  # where decoys come from; None: any row of the tables
    pool: Mapping[str, Ids] = field(
        default_factory=dict, repr=False
    )  # public rows, to perturb with
    last_round: RoundId | None = None
    own_rounds: int | None = None  # its own least rounds in a period, where they are not the plan's
    sharing: Sharing | None = None  # its own choice, where it differs from the plan's
    indicator: float | None = None  # how far its mask is from its ratings, by its own estimate
    counted: dict[int, bool] = field(default_factory=dict)  # rounds that ended: was it in the sum?
    secret: Secret | None = field(default=None, repr=False)  # its lasting one (`rounds/root.py`)
    rows: CarriedRows | None = field(default=None, repr=False)  # of tables that never leave it
    data: OwnData | None = field(
        default=None, repr=False
    )  # where `real` is from; None: all is there
    broken: str = ""  # why its last training gave nothing: known to this client alone
    residual: Residual | None = field(default=None, repr=False)  # what it has not sent yet
    own_keys: OwnKeyStore = field(default_factory=MemoryStore, repr=False)  # between two servers
    names: OwnNames | None = None  # what its rows are called in its own data; None: made up
    agreement: Agreement | None = None  # what the rows kept and decoys under that secret go with
    attendance: dict[str, Attendance] = field(default_factory=dict)  # by the training's federation
    place: Place | None = None  # its own in the schedule, where there is one

    def attend(self, plan: Plan, round_id: RoundId, servers: Servers | None) -> None:
        """Count a round before anything of it is charged or leaves; `RoundRefused` if it is one
        too early or too many."""
        if not plan.bounds_rounds:
            return
        stored = self.attendance.get(plan.federation)
        try:
            now = attended(plan, servers, round_id, stored, self.place)
        except RoundRefused as refused:
            if isinstance(refused.record, Attendance):
                self.attendance[plan.federation] = refused.record
            raise
        self.attendance[plan.federation] = now

    def training(self, plan: Plan) -> str:
        """What the ledger calls the training of this plan, where it is charged as a whole."""
        stored = self.attendance.get(plan.federation)
        return "" if stored is None else stored.training.hex()

    def sends_unmasked(self, plan: Plan) -> bool:
        """Whether this client sends its update unmasked, in a cohort where others may mask."""
        return plan.security.unmasked(self.sharing, self.indicator)

    def answers(self, plan: Plan) -> IndexPrivacy:
        """The probabilities of its answers."""
        return plan.privacy.index if self.privacy is None else self.privacy

    def decoys_from(self, plan: Plan) -> Catalogue:
        """The ids that decoys are drawn from."""
        if self.catalogue is not None:
            return self.catalogue
        return WholeTable(max(1, plan.domain))  # without tables none is drawn

    def residual_in(self, plan: Plan) -> Residual | None:
        """What this client keeps of its dense updates, where the plan has it keep any."""
        kept = plan.kept_back
        if kept and (self.residual is None or len(self.residual.kept) != kept):
            self.residual = Residual.nothing(kept)
        return self.residual if kept else None

    def keep_pending(self, round_id: RoundId, rows: Mapping[str, TablePart]) -> None:
        """What training has made of this client's own rows, until the round is known to count."""
        if self.rows is not None and rows:
            self.rows.offer(round_id, rows)

    @property
    def unsettled(self) -> RoundId | None:
        """The round in which this client has sent something and does not know whether it counted.

        Until it does, what it carries over is neither kept nor dropped, and it trains nothing new.
        """
        if self.rows is not None and self.rows.pending is not None:
            return self.rows.pending
        offer = None if self.residual is None else self.residual.offer
        return None if offer is None else RoundId(offer.round_id)

    def must_be_settled(self) -> None:
        """Before another round: the carrier has asked the server about the last one."""
        if self.unsettled is not None:
            raise MisuseError(f"it is not known whether round {self.unsettled} has counted")

    def settle(self, round_id: RoundId, *, counted: bool, by: Word) -> None:
        """A round has ended, with this client's update in the sum or not; `by` says who says so."""
        self.counted[int(round_id)] = counted
        if round_id != self.unsettled:
            return
        if self.residual is not None:
            self.residual.settle(int(round_id), counted=counted)
        if self.rows is not None and self.rows.pending == round_id:
            self.rows.settle(counted=counted)

    def told(self, round_id: RoundId, outcome: RoundOutcome) -> None:
        """The server says how a round ended for this client."""
        self.settle(round_id, counted=outcome is RoundOutcome.DONE, by=Word.SERVER)

    def agreement_on(self, plan: Plan) -> Agreement:
        """What may not change while this client's decoys and answers are the same."""
        return Agreement(
            plan=plan.lasting_digest,
            decoys=plan.privacy.decoy_share,
            catalogue=self.decoys_from(plan).digest,
        )

    def release(self, plan: Plan, round_id: RoundId, *released: str) -> None:
        """Charge for what a round opens exactly."""
        for what in released:
            self.ledger.spend(
                ExactRelease(federation=plan.federation, round_id=round_id, what=what),
                reason=f"round {round_id}: {what}",
            )


def check_rows(plan: Plan, local: LocalState) -> None:
    """Rows outside their tables, and a map that is missing, are refused before a round."""
    for name, rows in local.real.items():
        limit = plan.table(name).rows
        if len(rows) and int(rows.max()) >= limit:
            raise ConfigError(
                f"table {name!r}: row id {int(rows.max())} is outside its {limit} rows"
            )
    missing = [t.name for t in resolve(plan).rows.followed(plan) if t.name not in local.derived]
    if missing:
        raise ConfigError(f"table {missing[0]!r} is derived, and its map is missing")
    plan.privacy.check_own(local.privacy)
    agreed = resolve(plan)
    if plan.security.signs and agreed.rows.must_name_all(local.privacy):
        raise ConfigError(
            'a client with its own index privacy under threat = "active": it does not name the '
            "whole union, so that it cannot check who shares its rows",
            hint="leave privacy to the plan",
        )
    engine_given = (None, 1, plan.privacy.least_rounds)  # 1 where groups are drawn, or the plan's
    agreed.cohorts.check_choices(
        {
            "sharing": local.sharing not in (None, plan.security.sharing),
            "privacy": local.privacy not in (None, plan.privacy.index),
            "quorum": local.quorum not in (0, plan.quorum),
            "own_rounds": local.own_rounds not in engine_given,
        }
    )


DENSE: Final = "dense"
"""The dense part's name beside what the step remembers of it."""


class ServerModel:
    """Dense part, tables and what the plan's server step remembers."""

    def __init__(
        self,
        plan: Plan,
        *,
        dense: Floats,
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap] | None = None,
        popularity: Popularity | None = None,
        counts: bytes = b"",
    ) -> None:
        """`popularity` says what rows' sums are divided by, where [dp] has them selected; `counts`
        is the digest of public counts by which clients draw negatives."""
        self.counts = counts
        self.dense, self.tables, self.derived = dense, tables, dict(derived or {})
        noise = noise_of(plan)
        self.averaging = Averaging(
            plan.server_step,
            plan.model.dense,
            tables,
            noise.divisors(popularity),
            noise.on_a_sum,
        )

    def step(self, result: RoundResult, round_id: RoundId) -> None:
        """Step by the means of a round."""
        # Without any examples there is no mean, and momentum does not advance either.
        mean = result.dense if result.weight else None
        self.dense = self.averaging.apply(
            self.dense, mean, result.tables, int(round_id), result.weight
        )

    def copy(self) -> ServerModel:
        """The same model as another server has it: nothing of it is shared but public maps."""
        return deepcopy(self, {id(self.derived): self.derived})

    @property
    def digest(self) -> bytes:
        """Of every value that has moved: the dense part, rows, and what is remembered."""
        hashed = hashlib.sha256(Label.SERVER_MODEL.encode())
        for name, array in sorted(self.dense_parts.items()):
            hashed.update(encode_context(name, array.tobytes()))
        for table in sorted(self.stored_tables, key=lambda table: table.name):
            ids = table.touched_ids
            values = table.values(ids)
            hashed.update(encode_context(table.name, ids.tobytes(), values.tobytes()))
        return hashed.digest()

    # --- for a store ----------------------------------------------------------------------------

    @property
    def stored_tables(self) -> tuple[StoredTable, ...]:
        """All that is kept by row."""
        return (*self.tables.values(), *self.averaging.state)

    @property
    def dense_parts(self) -> dict[str, Floats]:
        """All that is not, by name."""
        return {DENSE: self.dense, **self.averaging.dense_state}

    def restore(self, parts: Mapping[str, Floats]) -> None:
        """Take `dense_parts` back from a store; the tables are the store's business."""
        if DENSE not in parts:
            raise MisuseError("a stored model has a dense part, if an empty one")
        self.averaging.dense_state = {name: part for name, part in parts.items() if name != DENSE}
        self.dense = parts[DENSE]


# --- coins ----------------------------------------------------------------------------------------
#
# Where a client's draws come from: secrets of its own, never its number or a public seed.
#
# What lasts (the first values of its own rows, its negatives) follows from one secret for the
# whole federation, stored before anything is drawn from it. What is drawn in a round (examples,
# order of batches, dropout masks, noise) follows from that round's root. A root is drawn anew for
# every round and never computed from a number that a server can hold still: a round that is said
# not to have counted, run again with the same noise over another model, would cancel it.


# --- negatives ------------------------------------------------------------------------------------
#
# Negatives: rows that a client takes beside its own, so that a softmax has more than its targets.
#
# They are drawn from the client's lasting secret, once and for good: negatives drawn anew leave
# the client's own rows in the intersection of what it asked for before and after. They count as
# the client's rows everywhere: under `max_rows`, in unions, answers, downloads and updates. What
# they hide and what not: docs/threat-model.md.


@dataclass(frozen=True, slots=True)
class StoredRole:
    """A role at rest: its snapshot, and the messages that the snapshot names, by digest."""

    snapshot: bytes = field(repr=False)
    messages: Mapping[bytes, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class ClientRoundSetup(ClientSetup):
    """A client in a round. `servers` are pinned in it where there are two; these take reports
    signed by its `identity`."""

    local: LocalState = field(repr=False)
    entropy: Entropy = field(repr=False)
    servers: Servers | None = None
    ideal: Sum | None = None

    def __post_init__(self) -> None:
        check_rows(self.plan, self.local)

    @property
    def sum(self) -> Sum:
        return self.ideal or resolve(self.plan).sum


# --- servers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParty:
    """What the server has for all rounds; a key and the helper's, where it is the leader of two.

    `row_tags`, `key_store` and `chain_store` have what it keeps from earlier rounds.
    """

    entropy: Entropy = field(repr=False)
    servers: Servers | None = None
    key: SigningKey | None = field(default=None, repr=False)
    workers: Workers = field(default_factory=SingleWorker)
    row_tags: RowTagCache | None = field(default=None, repr=False)
    key_store: KeyStore | None = field(default=None, repr=False)
    chain_store: ChainStore | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class HelperKeys:
    """What the helper has of its own: it signs, and it unseals what clients seal to it."""

    signing: SigningKey = field(repr=False)
    box: SealingKey = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperParty:
    """What the helper has for all rounds. What it remembers of reports must outlast each."""

    entropy: Entropy = field(repr=False)
    servers: Servers
    keys: HelperKeys = field(repr=False)
    replay_guard: ReplayGuard
    workers: Workers = field(default_factory=SingleWorker)
    row_tags: RowTagCache | None = field(default=None, repr=False)
    key_store: KeyStore | None = field(default=None, repr=False)
    chain_store: ChainStore | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class OverModel:
    """A server in a round, over the model as it stands: the role reads it, and steps nothing."""

    party: ClassVar[Party]
    replays: ClassVar[bool] = False
    """Whether a role that is woken may come to the same step once more."""

    own: ServerParty | HelperParty
    plan: Plan
    round_id: RoundId
    dense: Floats = field(repr=False)
    tables: Mapping[str, StoredTable] = field(repr=False)
    derived: Mapping[str, DerivedMap] = field(default_factory=dict, repr=False)
    ideal: Sum | None = None

    def __post_init__(self) -> None:
        shape, names = (self.plan.model.dense,), {t.name for t in self.plan.tables}
        if self.dense.shape != shape or self.tables.keys() != names:
            raise MisuseError("the model is not the plan's")

    @property
    def context(self) -> bytes:
        return self.plan.digest

    def noise_secrets(self, root: RootedEntropy) -> tuple[Secret, ...]:
        """What its noise on this round's sum follows from, stored where later rounds need it."""
        return noise_chain.round_secrets(
            resolve(self.plan).noise.correlation,
            self.own.chain_store,
            noise_chain.own_secret(root),
            self.round_id,
            noise_chain.drawn_again(self.own.entropy, self.plan, self.party),
            replayed=self.replays,
        )

    @property
    def sum(self) -> Sum:
        return self.ideal or resolve(self.plan).sum


@dataclass(frozen=True, kw_only=True)
class ServerRoundSetup(OverModel):
    """The server in a round, or the leader of two; `identity` has the directory of public keys."""

    invited: Collection[ClientId]
    own: ServerParty
    identity: Identity | None = None

    party: ClassVar[Party] = SERVER


@dataclass(frozen=True, kw_only=True)
class HelperRoundSetup(OverModel):
    """The helper in a round, over its own copy of the model; `directory` has the clients' keys."""

    own: HelperParty
    directory: Mapping[ClientId, bytes] = field(repr=False)

    party: ClassVar[Party] = HELPER
    replays: ClassVar[bool] = True  # its replay guard has the one list of a round
