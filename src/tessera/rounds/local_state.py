"""LocalState: what a client has of its own and keeps from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tessera.crypto.secret import Secret
from tessera.data.row_names import OwnNames
from tessera.errors import ConfigError, MisuseError, RoundRefused
from tessera.ids import RoundId
from tessera.learning.compression import Residual
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.submodel import Ids, TablePart
from tessera.plan import Plan, Sharing
from tessera.privacy.dp.events import ExactRelease
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import Agreement, PeriodStore
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.machine import RoundOutcome
from tessera.protocols.two_server.key_period import MemoryStore, OwnKeyStore
from tessera.protocols.two_server.params import Servers
from tessera.protocols.union.decoys import Catalogue, WholeTable
from tessera.rounds.attendance import Attendance, Place, attended
from tessera.rounds.resolve import resolve


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
