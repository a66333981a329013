"""A client as a service: one member of a federation, over its journal.

Until its update is on disk a client may train again; afterwards never: the update's bytes, and the
local rows that were trained with it, are one step. Those rows are pending until the leader says
that the update has counted, or that it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.plan import Plan
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import PeriodStore
from tessera.protocols.machine import Outbound, RoundOutcome
from tessera.protocols.two_server.params import Servers
from tessera.rounds.course import RoundClient, client_role
from tessera.rounds.noise import noise_of
from tessera.rounds.party import ClientRoundSetup, LocalState, StoredRole, Word
from tessera.services.dialing_party import DialingParty
from tessera.services.journal import Journal
from tessera.services.journal_stores import JournalPeriods, charges, load_local, save_local
from tessera.services.link import LinkStanding
from tessera.services.offered_rows import OneGroup

MakeLocal = Callable[[PeriodStore, Ledger], LocalState]
"""A client's own data and choices, over what it remembers."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What came out of training: an update, and rows that stay with the client.

    `broken` says why there are zeros instead of an update; only this client knows.
    """

    update: ModelUpdate
    local: Mapping[str, TablePart] = field(default_factory=dict, repr=False)
    broken: str = ""


Train = Callable[[RoundId, Submodel, Secret], TrainingResult]
"""Trains with the coins of the round. What fails because of the client's data gives zeros."""


class ClientService(DialingParty):
    """One client."""

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        me: ClientId,
        *,
        local: MakeLocal,
        train: Train,
        entropy: Entropy,
        identity: Identity | None = None,
        servers: Servers | None = None,
    ) -> None:
        super().__init__(journal, me)
        self.plan, self.client = plan, me
        self._make_local, self._train = local, train
        self._entropy, self._identity, self._servers = entropy, identity, servers
        self.local: LocalState
        self.load()

    def _load_own(self) -> None:
        ledger = Ledger(entries=charges(self.journal, self.name))
        self.local = self._make_local(JournalPeriods(self.journal, self.name), ledger)
        load_local(self.journal, self.name, self.local)

    def _save_own(self) -> None:
        save_local(self.journal, self.name, self.local)

    def _make(self, round_id: RoundId, stored: StoredRole | None) -> RoundClient:
        setup = ClientRoundSetup(
            plan=self.plan,
            round_id=round_id,
            party=self.client,
            local=self.local,
            entropy=self._entropy,
            identity=self._identity,
            servers=self._servers,
        )
        return client_role(setup, stored)

    def _begun(self, role: RoundClient) -> list[Outbound]:
        try:
            if isinstance(self.local.periods, OneGroup):
                self.local.periods.begin_round(self.local.real)
            return role.start()
        except ConfigError as error:
            # A period that comes too early, which is counted; no budget is left; or rows that were
            # offered elsewhere since this process was started.
            self.left = str(error)
            role.over(RoundOutcome.ABORTED, self.left)
        return []

    def begin(self, standing: LinkStanding) -> None:
        """Before another round: whether the last update counted, where no message has said so."""
        last = self.local.unsettled
        if last is not None:
            with self.journal.step():
                counted = standing.counted == int(last)
                self.local.settle(last, counted=counted, by=Word.SERVER)
                self._save_own()
        super().begin(standing)

    # --- training -------------------------------------------------------------------------------

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now."""
        return None if self.role is None else self.role.pending

    def train(self) -> bool:
        """Train what is pending, and have the update on its way; False if nothing is."""
        submodel, round_id = self.pending, self.round_id
        if submodel is None or round_id is None:
            return False
        coins = self.role.coins
        trained = self._train(round_id, submodel, coins)
        update = noise_of(self.plan).contribution(trained.update, coins)
        self.supply(replace(trained, update=update))
        return True

    def supply(self, trained: TrainingResult) -> None:
        """What came out of training `pending`; where the plan has [dp], clipped and noisy."""
        if self.pending is None:
            raise MisuseError("an update is not due")
        with self.journal.step():
            self._send(self.role.supply(trained.update))
            self.local.keep_pending(self.role.round_id, trained.local)
            self.local.broken = trained.broken
            self._store()
