"""ClippedClient: one step whose examples are clipped one by one, for noise that others add.

What it sends is a sum over examples of which each is at most the clip long, dense part and rows
together, as they are sent: a row's gradient by the factor on its rate. Local rows stay as they
began: trained without noise they would carry one row into the gradients of all later rounds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from tessera.errors import MisuseError
from tessera.learning.bound_model import BoundModel
from tessera.learning.local import Trained
from tessera.learning.noisy.client import NoisyClient
from tessera.learning.noisy.steps import Ints, NoisySteps
from tessera.learning.submodel import ModelUpdate, TableUpdate


def client_kind(noisy: NoisySteps) -> type[NoisyClient]:
    """Who takes the steps: with noise of its own, or none."""
    return ClippedClient if noisy.only_clips else NoisyClient


class ClippedClient(NoisyClient):
    """The sums of its one step, as they are."""

    _sums: tuple[Tensor, Mapping[str, tuple[Ints, Tensor]]] | None = None

    def settle(self, name: str, rows: Ints) -> None:
        """No row owes any noise."""

    def take(self, dense: Tensor, rows: Mapping[str, tuple[Ints, Tensor]]) -> None:
        self._sums = dense, rows
        self.step += 1

    def end(self) -> None:
        if self.step != 1:
            raise MisuseError(f"{self.step} steps were taken without noise, and one is due")

    def outcome(self, bound: BoundModel) -> Trained:
        """Deltas of every row at hand, as numbers of 64 bits: nothing is lost to a row's value."""
        assert self._sums is not None
        dense, rows = self._sums
        prepared, tables = self.prepared, {}
        for table in bound.tables:
            if table.local:
                continue
            values = np.zeros((len(prepared.rows[table.name]), table.width))
            touched, sums = rows.get(table.name, (np.zeros(0, np.int64), None))
            if sums is not None:
                values[touched] = -self._scale * sums.numpy().astype(np.float64)
            tables[table.name] = TableUpdate(values, prepared.counts[table.name])
        return Trained(
            ModelUpdate(-self._scale * dense.numpy().astype(np.float64), 1, tables),
            prepared.job.local,
            loss=self.mean_loss(),
            examples=prepared.examples,
            not_finite=self.not_finite,
        )
