"""The helper as a service: the second server, which dials the leader like everybody else.

Reports it holds are in its journal as they came; its state is stored when a phase ends. It steps a
model of its own in the step in which it is shown the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tessera.ids import HELPER, ClientId, RoundId
from tessera.learning.tables.store import ModelStore
from tessera.plan import Plan
from tessera.protocols.machine import RoundOutcome
from tessera.protocols.two_server.key_period import KeyPeriod
from tessera.rounds import noise_chain
from tessera.rounds.course import HelperCourse
from tessera.rounds.noise import noise_of
from tessera.rounds.noise_chain import NoiseChain
from tessera.rounds.party import HelperParty, ServerModel, StoredRole
from tessera.rounds.two_server.helper import HelperRound
from tessera.services.dialing_party import DialingParty
from tessera.services.journal import Journal
from tessera.services.journal_stores import CHAIN, JournalKeys, JournalReplayGuard


class HelperService(DialingParty):
    """The helper; `first_model` makes the model of the bundle."""

    snapshot_each = False

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        *,
        first_model: Callable[[], ServerModel],
        party: HelperParty,
        directory: Mapping[ClientId, bytes],
    ) -> None:
        super().__init__(journal, HELPER)
        self.plan, self._first_model, self._directory = plan, first_model, directory
        self._noisy = noise_of(plan).erases_logs
        self._guard = JournalReplayGuard(journal)
        keys = JournalKeys(journal, HELPER, KeyPeriod)
        self._chain = JournalKeys(journal, HELPER, NoiseChain, CHAIN)
        self._party = replace(
            party, replay_guard=self._guard, key_store=keys, chain_store=self._chain
        )
        self.course: HelperCourse
        self.load()

    @property
    def model(self) -> ServerModel:
        return self.course.model

    def _load_own(self) -> None:
        model = self._first_model()
        store = ModelStore.within(
            self.journal.path,
            self.journal.database,
            plan_hash=self.plan.digest,
            tables=model.stored_tables,
        )
        if store.round_id is not None:
            model.restore(store.dense())

        def commit(round_id: RoundId, stepped: ServerModel) -> None:
            store.commit(round_id, stepped.dense_parts)

        self.course = HelperCourse(self.plan, model, self._party, commit=commit)

    def _save_own(self) -> None:
        self._guard.settle()
        if self._noisy and self.is_over:  # what its noise came from leaves the log, too
            noise_chain.settle(self._chain, self.plan)
            self.journal.after_commit(self.journal.fold)

    def _make(self, round_id: RoundId, stored: StoredRole | None) -> HelperRound:
        return self.course.helper(round_id, self._directory, stored)

    def _replay(self) -> None:
        self._guard.replaying = True
        try:
            super()._replay()
        finally:
            self._guard.replaying = False

    def _moved(self) -> None:
        """Once it was shown the sum: the model steps, and nothing else is left of the round."""
        if self.role.phase != "done":
            return
        assert self.round_id is not None and self.role.total is not None
        self.ended = {
            "included": len(self.role.total.survivors),
            "excluded": len(self.role.excluded),
        }
        self.course.conclude(self.round_id, self.role.result)
        self.role.over(RoundOutcome.DONE)
