"""Every simulated client's ledger, charged for what leaves it before the first round.

A set-up sum and the popularity of rows are summed over all clients before there is a round. Each
client is charged for its part first: a budget that does not cover it is an error before a word
leaves anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.privacy.dp.events import THE_SETUP_SUM, ExactRelease, NoisySum
from tessera.privacy.dp.ledger import Ledger
from tessera.rounds import dp


class Ledgers:
    """One for every client that was asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made: dict[ClientId, Ledger] = {}

    def of(self, client: ClientId) -> Ledger:
        if client not in self._made:
            noisy = self._plan.dp is not None
            self._made[client] = Ledger(bounds=dp.bounds(self._plan)) if noisy else Ledger()
        return self._made[client]

    def charge_setup(self, clients: Iterable[ClientId]) -> None:
        """For their parts of a set-up sum; where it has no noise, every number is given it."""
        plan = self._plan
        if plan.dp is None:
            return
        exact = ExactRelease(federation=plan.federation, round_id=RoundId(0), what=THE_SETUP_SUM)
        self._charge(clients, [*dp.setup_events(plan)] if plan.dp.setup else [exact])

    def charge_selection(self, clients: Iterable[ClientId]) -> None:
        """For their marks, where rows are selected."""
        if self._plan.dp is not None:
            self._charge(clients, [*dp.selection_events(self._plan)])

    def _charge(
        self, clients: Iterable[ClientId], events: Sequence[NoisySum | ExactRelease]
    ) -> None:
        limits = dp.limits(self._plan)
        for client in clients:
            for event in events:
                reason = f"before the first round: {event.what}"
                self.of(client).spend(event, reason=reason, limits=limits)
