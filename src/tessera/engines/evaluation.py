"""How good the model is after a round: on a test set in one place, or without one.

Where the held-out examples stay with their clients, each counts its own into a scorecard of whole
numbers, and only the secure sum of the cohort's cards leaves (`learning/metrics.py`). That sum is
exact; the AUC that follows from it is known to within the pairs of examples that share a bin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import nn

from tessera.crypto.entropy import Entropy
from tessera.crypto.ring import Ring
from tessera.data.examples import LABEL, Examples
from tessera.engines.simulator import Simulator
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.binding import Binding
from tessera.learning.metrics import Scorecard, auc, evaluate
from tessera.learning.tables import Table
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.params import SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.standalone import Aggregator, Contribution, Contributor
from tessera.rounds.plan import Plan
from tessera.tasks import Task

Floats = npt.NDArray[np.float32]

WHOLE = 1 << 20
"""Tables up to this many rows are copied once per test; larger ones are read batch by batch."""

CARD = Ring(40)
"""Room for the sums of any cohort: 2^30 units of loss from 1,000 clients."""


class Evaluation:
    """Scores of the current model over held-out examples."""

    def __init__(self, task: Task, module: nn.Module, binding: Binding) -> None:
        self._task, self._module, self._binding = task, module, binding

    def scores(self, dense: Floats, tables: Mapping[str, Table], examples: Examples) -> Floats:
        """Logits of these examples, each client's with its own local rows."""
        sources = {
            name: table.rows(np.arange(table.size, dtype=np.uint64))
            if table.size <= WHOLE
            else table
            for name, table in tables.items()
        }
        parameters = self._binding.parameters(dense, sources)
        return evaluate(self._module, self._binding, parameters, examples)

    def metric(self, dense: Floats, tables: Mapping[str, Table]) -> float:
        """AUC over everybody's held-out examples, in one place: what only a simulation can do."""
        test = self._task.data.test
        return auc(self.scores(dense, tables, test), test[LABEL])

    def federated(
        self,
        plan: Plan,
        round_id: RoundId,
        clients: Mapping[ClientId, ClientId],
        dense: Floats,
        tables: Mapping[str, Table],
        entropy: Entropy,
    ) -> Scorecard:
        """Held-out examples of `clients` (by their names in the round), counted where they are.

        Only the sum leaves. Its messages are real; their bytes are not in the round's figures.
        """
        cards = {}
        for name, client in clients.items():
            own = self._task.data.test_of(int(client))
            scores = self.scores(dense, tables, own)
            if np.isnan(scores).any():  # a card of nothing: that client has nothing to say
                own, scores = own.take(slice(0, 0)), scores[:0]
            cards[name] = Scorecard.count(scores, own[LABEL])
        return added(cards, plan, round_id, entropy)


def added(
    cards: Mapping[ClientId, Scorecard], plan: Plan, round_id: RoundId, entropy: Entropy
) -> Scorecard:
    """The secure sum of these cards, taken by the plan's security but in keys of its own."""
    if plan.security.threat is Threat.ACTIVE:
        raise ConfigError(
            "plan: federated metrics against an active server need signed keys for a second sum",
            hint='use metrics = "central" in [simulation], or threat = "semi-honest"',
        )
    length = len(next(iter(cards.values())).vector())
    params = SecAggParams(
        federation=f"{plan.federation}: metrics",
        round_id=round_id,
        plan_hash=hashlib.sha256(b"metrics" + plan.digest).digest(),
        cohort=len(cards),
        stages=(StageSpec(name="metrics", group=CARD, dense=length),),
        graph=plan.security.graph,
        corrupt=plan.security.corrupt,
        dropout=plan.security.dropout,
    )
    clients, opening = {}, {}
    for name, card in cards.items():
        client, opening[name] = Client.join(params, name, entropy=entropy)
        words = CARD.from_ints(card.vector())
        clients[name] = Contributor(client, (Contribution(dense=words),))
    server = Aggregator(params, tuple(cards), entropy=entropy)
    outcome = Simulator(server, clients, opening).run()
    if outcome.aborted is not None:
        raise outcome.aborted
    return Scorecard.of(server.sums[0].dense.astype(np.int64))
