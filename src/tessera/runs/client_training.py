"""How a client of a task trains in a round: the same in a simulation and as a service.

What fails because of a client's own data is sent as zeros: if a client left for it, or said
otherwise, whoever sees that would learn about the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.bound_model import BoundModel
from tessera.learning.tables.arrays import Ids
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart, TableUpdate
from tessera.learning.training.jobs import Job, Learner, Trained, drawn
from tessera.learning.training.settings import FAILURES, LocalTraining
from tessera.plan import Plan
from tessera.rounds.root import with_negatives
from tessera.runs.noisy import cut_examples


def own_rows(bound: BoundModel, examples: Examples, secret: Secret) -> dict[str, Ids]:
    """The rows of a client's examples, and negatives where there is a softmax."""
    own, softmax = bound.row_ids_of(examples), bound.candidates
    if softmax is None:
        return own
    return with_negatives(own, softmax.root, softmax.rows, softmax.negatives, secret)


@dataclass(frozen=True, slots=True)
class ClientTraining:
    """A plan's local training over a bound model."""

    plan: Plan
    bound: BoundModel
    training: LocalTraining
    learner: Learner

    def job(
        self,
        client: int,
        submodel: Submodel,
        examples: Examples,
        local: Mapping[str, TablePart],
        coins: Secret,
    ) -> Job:
        """What a client trains in a round; `examples` and `local` are all that it has."""
        some = drawn(examples, self.training.examples, coins)
        some = cut_examples(self.plan, self.bound, some, coins)
        return Job(client, submodel, some, local, coins=coins)

    def alone(
        self,
        client: int,
        submodel: Submodel,
        examples: Examples,
        local: Mapping[str, TablePart],
        coins: Secret,
        round_id: RoundId,
    ) -> Trained:
        """What came of one client's training, as a service does it: whatever fails is zeros."""
        try:
            job = self.job(client, submodel, examples, local, coins)
        except Exception as error:  # noqa: BLE001 (as below)
            return untrained(submodel, local, error)
        return self.train([job], round_id)[0]

    def train(self, jobs: Sequence[Job], round_id: RoundId) -> list[Trained]:
        """What came of each job; zeros, and why, of one whose training failed.

        If training all together fails, it is not known whose failure it was: then each is trained
        alone. If all of several fail, the reason is no client's data: `ConfigError`.
        """
        try:
            return self.learner.train(jobs, round_id=int(round_id))
        except Exception as error:
            if len(jobs) == 1:  # whatever it was: data that nobody foresaw raise any error
                return [untrained(jobs[0].submodel, jobs[0].local, error)]
            if not isinstance(error, FAILURES):
                raise
            alone = [self.train([job], round_id)[0] for job in jobs]
            if all(each.failed for each in alone):
                raise ConfigError(
                    f"training fails for each of {len(jobs)} clients: {error}",
                    hint="try the module and its loss on a few examples, outside tessera",
                ) from error
            return alone


def untrained(submodel: Submodel, local: Mapping[str, TablePart], error: Exception) -> Trained:
    """What a client has to send whose training failed: as many values as others, all zeros."""
    tables = {
        name: TableUpdate(
            np.zeros((len(ids), submodel.tables[name].values.shape[1]), np.float32),
            np.zeros(len(ids), np.int64),
        )
        for name, ids in submodel.trained.items()
    }
    update = ModelUpdate(np.zeros_like(submodel.dense), 0, tables)
    why = f"training raised {type(error).__name__}"
    return Trained(update, local, 0.0, 0, finite=False, failed=why)
