"""ClientRound: union -> choose -> fetch -> train -> upload, each step once and in this order.

Sums come from `protocols/`, randomised answers from `privacy/`. Everything that is released is
charged to the ledger before the first message leaves. Training takes time, and time
is the engine's: a round that has fetched its rows shows them as `pending`, and goes on when it is
given the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, ServerFault, WireError
from tessera.ids import ClientId, RoundId, TableId
from tessera.learning.arrays import Floats, Ids
from tessera.learning.derived_map import DerivedMap
from tessera.learning.quantize import Quantizer
from tessera.learning.submodel import ModelUpdate, Submodel, TablePart
from tessera.privacy.ledger import THE_SUMS, THE_UNION, ExactRelease, IndexAnswers, Ledger
from tessera.privacy.period import Agreement, FrozenPeriod, PeriodStore, freeze, keyed_subset
from tessera.privacy.response import IndexPrivacy
from tessera.protocols import wire
from tessera.protocols.machine import Outbound
from tessera.protocols.plainsum import PlainClient
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.messages import Roster
from tessera.protocols.secagg.states import Reveal
from tessera.protocols.union.decoys import Catalogue, WholeTable, with_decoys
from tessera.rounds.messages import FROM_SERVER, Download, UnionOpened, most_union_bytes
from tessera.rounds.plan import ONE_SERVER, UNION, Plan, Scheme, Sharing, TablePlan, check_scheme

NOTHING: Final = "training gave nothing"
"""Why a client sends zeros whose caller gave it no update."""


@dataclass(slots=True)
class LocalState:
    """What a client has of its own: its rows by table, its choice, and what it must remember."""

    real: Mapping[str, Ids] = field(repr=False)
    periods: PeriodStore
    ledger: Ledger = field(default_factory=Ledger)
    privacy: IndexPrivacy | None = None  # its own choice, where it differs from the plan's
    quorum: int = 0  # likewise
    derived: Mapping[str, DerivedMap] = field(default_factory=dict)
    catalogue: Catalogue | None = None  # where decoys come from; None: any row of the tables
    pool: Mapping[str, Ids] = field(
        default_factory=dict, repr=False
    )  # public rows, to perturb with
    last_round: RoundId | None = None
    sharing: Sharing | None = None  # its own choice, where it differs from the plan's
    indicator: float | None = None  # how far its mask is from its ratings, by its own estimate
    secret: Secret | None = field(default=None, repr=False)  # what lasts longer than a round's name
    agreement: Agreement | None = None  # what the rows kept and decoys under that secret go with

    def sends_unmasked(self, plan: Plan) -> bool:
        """Whether this client sends its update unmasked, in a cohort where others may mask."""
        sharing = self.sharing or plan.security.sharing
        if sharing is not Sharing.AUTO:
            return sharing is Sharing.PLAIN
        # Without an estimate the update is masked; NaN compares as false.
        return self.indicator is not None and self.indicator <= plan.security.indicator


@dataclass(slots=True)
class Clipped:
    """How many values of an update were clipped; known to the client only."""

    cut: int = 0
    of: int = 0

    def count(self, values: npt.NDArray[np.float64], quantizer: Quantizer) -> None:
        self.cut += int(np.count_nonzero(np.abs(values) > quantizer.clip))
        self.of += values.size


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
        self.plan, self.round_id, self.me = plan, round_id, me
        self._local, self._entropy = local, entropy
        self._identity = identity
        self._sum: Client | PlainClient | None = None
        self._frozen: FrozenPeriod | None = None
        self._union: dict[str, Ids] = {}
        self._context = bytes(32)
        self._revealed: dict[str, Ids] = {}
        self._trained: dict[str, Ids] = {}
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
            self._release(THE_SUMS)

    def _release(self, *released: str) -> None:
        """Charge for what is opened exactly."""
        for what in released:
            self._local.ledger.spend(
                ExactRelease(federation=self.plan.federation, round_id=self.round_id, what=what),
                reason=f"round {self.round_id}: {what}",
            )

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
        none = np.zeros(0, dtype=np.uint64)
        real = {table: local.real.get(t.name, none) for table, t in roots.items()}
        if plan.privacy.add and not local.pool:
            raise ConfigError(
                f"plan: add = {plan.privacy.add} perturbs the real set, and there is no pool",
                hint="give the client a public list of rows, such as an earlier union",
            )
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
            pool={table: local.pool.get(t.name, none) for table, t in roots.items()},
            agreement=self._agreement,
        )
        self._release(THE_UNION, THE_SUMS)
        local.ledger.spend(
            IndexAnswers(
                federation=plan.federation,
                period=plan.period(self.round_id),
                round_id=self.round_id,
                privacy=self._frozen.privacy,
            ),
            reason=f"round {self.round_id}: rows revealed",
        )

    # --- messages -------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Outbound]:
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
            out = self._sum.receive(data)
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
        offered = [
            part.offered + np.uint64(plan.offsets[plan.tables[part.table].name])
            for part in frozen.tables
        ]
        held = np.concatenate([*offered, np.zeros(0, dtype=np.uint64)])
        # Keyed to the period: decoys drawn anew each round would fade from intersections.
        return self._covered(held, frozen.secret, frozen.period)

    def _covered(self, held: Ids, secret: Secret, period: int) -> Ids:
        """Rows of the one space of ids with the decoys that follow from a secret of this client."""
        plan = self.plan
        if not plan.privacy.decoy_share:
            return held
        stream = Stream.of(secret, Label.DECOYS, plan.federation, period)
        return with_decoys(held, self._catalogue, stream, share=plan.privacy.decoy_share)

    @property
    def _catalogue(self) -> Catalogue:
        return self._local.catalogue or WholeTable(self.plan.domain)

    @property
    def _agreement(self) -> Agreement:
        """What may not change while this client's decoys and answers are the same."""
        plan = self.plan
        return Agreement(
            plan=plan.lasting_digest,
            decoys=plan.privacy.decoy_share,
            catalogue=self._catalogue.digest,
        )

    def _union_input(self) -> Input:
        encoding = self.plan.union_encoding(self.round_id)
        fresh = self._entropy.secret(
            Label.UNION_COINS, self.plan.federation, int(self.round_id), int(self.me)
        )
        words = encoding.encode(self.offered(), Stream.of(fresh, Label.UNION_COINS))
        return Input(dense=words)

    def _take_union(self, message: UnionOpened) -> None:
        plan = self.plan
        if self._union and wire.digest(message) == self._context:
            return  # the same bytes again: a repetition by the transport
        summed = isinstance(self._sum, Client) and self._sum.knows_survivors(UNION)
        if not plan.has_union or not summed or self._union:
            raise self._fault("sent a union that is not due")
        if message.tables.keys() != {plan.table_id(t.name) for t in plan.roots}:
            raise self._fault("sent a union of other tables")
        for t in plan.roots:
            ids = message.tables[plan.table_id(t.name)]
            if len(ids) and int(ids[-1]) >= t.rows:
                raise self._fault(f"sent a union with rows outside table {t.name!r}")
        rows = sum(len(ids) for ids in message.tables.values())
        if rows > plan.most_union:
            raise self._fault("sent a union of more rows than its cohort can name")
        self.take_union({t.name: message.tables[plan.table_id(t.name)] for t in plan.roots})
        self._context = wire.digest(message)

    def take_union(self, roots: Mapping[str, Ids]) -> None:
        """The opened union, by table; rows of derived tables follow."""
        self._union.update(roots)
        for t in self.plan.tables:
            if t.derived_from:
                self._union[t.name] = self._local.derived[t.name].row_ids(
                    self._union[t.derived_from]
                )

    # --- 3. the rows this client asks for ------------------------------------------

    def choose(self) -> Reveal:
        """The rows this client asks for, cover included, by their place in the union."""
        plan = self.plan
        for t in plan.roots:
            if plan.scheme is not Scheme.SECURE_SUBMODEL:
                rows = self._kept(t)
                if t.name in self._union:  # what a union lost has to wait for another round
                    rows = rows[np.isin(rows, self._union[t.name], assume_unique=True)]
                self._revealed[t.name] = self._trained[t.name] = rows
                continue
            assert self._frozen is not None
            answers = self._frozen.answer(
                plan.table_id(t.name),
                self._union[t.name],
                round_id=self.round_id,
                entropy=_ClientEntropy(self._entropy, self.me),
            )
            self._revealed[t.name], self._trained[t.name] = answers.revealed, answers.succinct
        for t in plan.tables:
            if t.derived_from:  # never answered for on its own: that would reveal more
                follow = self._local.derived[t.name]
                self._revealed[t.name] = follow.row_ids(self._revealed[t.derived_from])
                self._trained[t.name] = follow.row_ids(self._trained[t.derived_from])
        return Reveal(
            tables={
                plan.table_id(n): self._positions(n, rows) for n, rows in self._revealed.items()
            },
            quorum=self._local.quorum,
            context=self._context,
        )

    def _positions(self, name: str, ids: Ids) -> Ids:
        """Rows are addressed by their place in the union, or by their id where there is none."""
        if name not in self._union:
            return ids
        return np.searchsorted(self._union[name], ids).astype(np.uint64)

    def _ids(self, name: str, positions: Ids) -> Ids:
        return self._union[name][positions] if name in self._union else positions

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
        if plan.scheme.by_rows and self._revealed.keys() != {t.name for t in plan.tables}:
            raise self._fault("sent rows before any were requested")
        if message.tables.keys() != {plan.table_id(t.name) for t in plan.tables}:
            raise self._fault("sent other tables than were requested")
        values = {
            t.name: self._floats(
                message.tables[plan.table_id(t.name)], (self._fetched(t), t.width), dtype
            )
            for t in plan.tables
        }
        dense = self._floats(message.dense, (plan.model.dense,), dtype)
        self._submodel = self.submodel(dense, values)
        self._download = message

    def submodel(self, dense: Floats, values: Mapping[str, Floats]) -> Submodel:
        """The values of the rows that were requested, with their ids and which are trained."""
        plan, trained = self.plan, self._trained
        if not plan.scheme.by_rows:
            trained = dict(self._local.real)
            for t in plan.tables:
                if t.derived_from and t.name in self._local.derived:
                    trained[t.name] = self._local.derived[t.name].row_ids(trained[t.derived_from])
        tables = {
            t.name: TablePart(
                self._revealed[t.name]
                if plan.scheme.by_rows
                else np.arange(t.rows, dtype=np.uint64),
                values[t.name],
            )
            for t in plan.tables
        }
        return Submodel(dense, tables, trained)

    @property
    def requested(self) -> Mapping[str, Ids] | None:
        """The rows this client asked for, by table; None if it gets the whole model."""
        return self._revealed if self.plan.scheme.by_rows else None

    def _fetched(self, table: TablePlan) -> int:
        return len(self._revealed[table.name]) if self.plan.scheme.by_rows else table.rows

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
        return ModelUpdate(np.zeros(self.plan.model.dense), 0)

    def _floats(self, data: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Floats:
        if len(data) != int(np.prod(shape)) * dtype.itemsize:
            raise self._fault(f"sent {len(data)} bytes for {shape} parameters")
        values: Floats = np.frombuffer(data, dtype=dtype).reshape(shape)
        return values.astype(np.float32, copy=False)  # a view where nothing is to be converted

    # --- 5. upload ------------------------------------------------------------------------------

    def quantised(self, update: ModelUpdate, included: Mapping[TableId, Ids]) -> Input:
        """The update as words of the ring: deltas times their weights, and the weights.

        By rows a delta weighs as many examples as involve its row (FedSubAvg); in a whole model
        everything weighs the size of the training set, unless it carries its rows' counts.
        """
        plan, ring = self.plan, self.plan.ring
        dense, weight = self._dense_words(update)
        if not plan.scheme.by_rows and not plan.counts_rows:
            return Input(dense=np.concatenate([dense, weight]), context=self._context)
        tables: dict[TableId, npt.NDArray[Any]] = {}
        for t in plan.tables:
            table = plan.table_id(t.name)
            trained, weighted = self._row_words(t, update)
            if plan.counts_rows:
                words = ring.zeros((t.rows, t.width + 1))
                words[trained] = weighted
            else:
                ids = self._ids(t.name, included[table])
                words = ring.zeros((len(ids), t.width + 1))
                at, source = _match(ids, trained)
                words[at] = weighted[source]
                self.written[t.name] = ids[words.any(axis=1)]  # and not those below quorum
            tables[table] = words
        if plan.counts_rows:
            flat = [words.reshape(-1) for words in tables.values()]
            return Input(dense=np.concatenate([dense, *flat, weight]), context=self._context)
        return Input(dense=np.concatenate([dense, weight]), tables=tables, context=self._context)

    def quantised_rows(
        self, update: ModelUpdate
    ) -> tuple[npt.NDArray[Any], dict[str, tuple[Ids, npt.NDArray[Any]]]]:
        """What a whole model with counts is made of, without the zeros: for ideal rounds."""
        dense, weight = self._dense_words(update)
        rows = {t.name: self._row_words(t, update) for t in self.plan.tables}
        return np.concatenate([dense, weight]), rows

    def _dense_words(self, update: ModelUpdate) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The dense part, or the whole model where it has no counts; and its weight."""
        plan, quantizer, ring = self.plan, self.plan.dense_quantizer, self.plan.ring
        examples = min(update.weight, plan.update.max_count)
        if plan.scheme.by_rows or plan.counts_rows:
            weighted = np.asarray(update.dense, dtype=np.float64) * examples
        else:
            weighted = self._whole_vector(update) * examples
        self.clipped.count(weighted, quantizer)
        words = quantizer.encode(weighted, ring, Stream.of(self._coins(), Label.ROUNDING, "dense"))
        return words, quantizer.encode_counts(np.array([examples]), ring)

    def _row_words(self, t: TablePlan, update: ModelUpdate) -> tuple[Ids, npt.NDArray[Any]]:
        """This client's trained rows of a table; of each, delta times count, and the count."""
        plan, quantizer, ring = self.plan, self.plan.quantizer, self.plan.ring
        trained = self._own(t) if plan.counts_rows else self._trained[t.name]
        words = ring.zeros((len(trained), t.width + 1))
        part = update.tables.get(t.name)
        if part is not None and len(trained):
            if part.values.shape != (len(trained), t.width) or len(part.counts) != len(trained):
                raise MisuseError(f"table {t.name!r}: the trainer changed the rows it was given")
            counts = np.minimum(part.counts, plan.update.max_count)
            weighted = np.asarray(part.values, dtype=np.float64) * counts[:, None]
            self.clipped.count(weighted, quantizer)
            coins = Stream.of(self._coins(), Label.ROUNDING, "table", t.name)
            words[:, :-1] = quantizer.encode(weighted, ring, coins)
            words[:, -1] = quantizer.encode_counts(counts, ring)
        self.written[t.name] = trained[words.any(axis=1)]
        return trained, words

    def _coins(self) -> Secret:
        """What this client's rounding follows from, in this round."""
        return self._entropy.secret(
            Label.ROUNDING, self.plan.federation, int(self.round_id), int(self.me)
        )

    def _whole_vector(self, update: ModelUpdate) -> npt.NDArray[np.float64]:
        """The whole model's delta, zeros where this client has none: dense, then each table."""
        plan = self.plan
        parts = [np.asarray(update.dense, dtype=np.float64)]
        for t in plan.tables:
            whole = np.zeros((t.rows, t.width))
            if t.name in update.tables:
                own, delta = self._own(t), update.tables[t.name].values
                whole[own] = delta
                self.written[t.name] = own[np.any(delta, axis=1)]
            parts.append(whole.reshape(-1))
        return np.concatenate(parts)

    def _kept(self, table: TablePlan) -> Ids:
        """This client's rows of a root table, as many as the plan lets it name between two servers.

        Which those are follows from a secret of its own and each row's id, not from its place among
        them: drawn by place, one row more would exchange most of those kept.
        """
        real = self._local.real.get(table.name, np.zeros(0, dtype=np.uint64))
        most = self.plan.union.max_rows
        if self.plan.scheme is not Scheme.TWO_SERVER or len(real) <= most:
            return real
        assert self._local.secret is not None
        secret = self._local.secret.derive(Label.ROWS_KEPT, table.name)
        return keyed_subset(real, most, secret=secret, context=(self.plan.federation,))

    def _own(self, table: TablePlan) -> Ids:
        """This client's real rows of a table; those of a derived one follow."""
        rows = self._local.real.get(table.name)
        if rows is None:
            rows = self._local.derived[table.name].row_ids(self._local.real[table.derived_from])
        return rows

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.round_id, phase=self.phase)


class _ClientEntropy:
    """Entropy of one client: scripted entropy is addressed by client, too."""

    def __init__(self, entropy: Entropy, me: ClientId) -> None:
        self._entropy, self._me = entropy, me

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Any:
        return self._entropy.secret(label, int(self._me), *context, size=size)


def _match(ids: Ids, trained: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(places in ids, places in trained) of the rows that are in both; both ascend."""
    _, at, source = np.intersect1d(ids, trained, assume_unique=True, return_indices=True)
    return at, source
