"""NoisyFactorizer: factors at shops with noise per person; a person's own row is free.

A row that belongs to one person follows from that person's ratings and from what everybody was
sent. With the person it comes and goes, and reaches nobody but by the person's part of the items'
sums. So it is fitted at home without clip and without noise, and only what a person gives to the
items' rows is clipped, all of it together, and hidden under noise. Where a row is of several people
that would be wrong: one of them would reach the parts of the others (`data/subjects.py` refuses
it). Per example it would be wrong, too, as the row carries one example into all later steps.

A round: every person at hand takes one step to the ridge solution of its own row, under the model
that was sent. Then the plan's steps: some people are drawn, each one's gradient over its items'
rows is clipped, and noise goes to every row (`noisy/steps.py`). What `models/factorization.py` does
without noise differs in the sums: there a row's is divided by the number of its raters, which is
nobody's business here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tessera.data.examples import LABEL
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel
from tessera.learning.ratings import BASE, ITEMS, USERS
from tessera.learning.tables.arrays import Floats
from tessera.learning.tables.submodel import TablePart
from tessera.learning.training.local import Job, PreparedJob, Trained
from tessera.learning.training.noisy.client import NoisyClient, at_hand, fresh_rows
from tessera.learning.training.noisy.steps import SHORTER, Ints, NoisySteps, StepBatch
from tessera.learning.training.settings import LocalTraining

Values = npt.NDArray[np.float64]

PENALTY: Final = 4.0
"""On a person's own row, as if so many more of its ratings were left at nothing."""


class NoisyFactorizer:
    """One round of factors at shops, with noise in every step on the items' rows."""

    name = "factorised, with noise"

    def __init__(self, bound: BoundModel, training: LocalTraining, noisy: NoisySteps) -> None:
        if training.weight_decay or training.clip:
            raise ConfigError(
                f"training: weight_decay = {training.weight_decay}, clip = {training.clip} with "
                "factors under noise",
                hint="leave both out: people's rows have a penalty of their own",
            )
        self.bound, self.training, self.noisy = bound, training, noisy

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """Each job by itself; all its randomness is the client's own."""
        return [self._train(job, round_id) for job in jobs]

    def fitted(self, jobs: Sequence[Job]) -> list[Mapping[str, TablePart]]:
        """Everybody's own rows under the model of the job; nothing is sent."""
        return [Shop(at_hand(self.bound, job)).people() for job in jobs]

    def _train(self, job: Job, round_id: int) -> Trained:
        prepared = at_hand(self.bound, job)
        shop = Shop(prepared)
        rows = torch.from_numpy(fresh_rows(prepared, ITEMS))
        client = NoisyClient(
            prepared,
            self.training,
            self.noisy,
            round_id=round_id,
            dense=torch.from_numpy(np.array(job.submodel.dense, np.float32)),
            rows={ITEMS: rows},
        )
        own = shop.people()
        for _ in range(self.noisy.steps):
            self._step(client, shop, own[USERS].values)
        client.end()
        trained = client.outcome(self.bound)
        if not trained.finite:
            return trained
        return replace(trained, local={**job.local, **own})

    def _step(self, client: NoisyClient, shop: Shop, own: Floats) -> None:
        drawn = client.draw()
        touched = np.unique(shop.item[drawn.which])
        client.settle(ITEMS, touched)
        q = client.rows[ITEMS].numpy()[shop.item[drawn.which]].astype(np.float64)
        p = own[shop.user[drawn.which]].astype(np.float64)
        errors = shop.value[drawn.which] - predicted(q, p)
        client.losses.append(torch.from_numpy(0.5 * errors.astype(np.float32) ** 2))
        p[:, -1] = 1.0  # the partner of an item's bias
        sums, lost = self.clipped(shop.item[drawn.which], drawn, -errors[:, None] * p, touched)
        client.not_finite += lost
        dense = torch.zeros(self.bound.dense_size, dtype=torch.int64)
        client.take(dense, {ITEMS: (touched, torch.from_numpy(sums))})

    def clipped(
        self, item: Ints, drawn: StepBatch, gradients: Values, touched: Ints
    ) -> tuple[npt.NDArray[np.int64], int]:
        """The groups' sums over the rows touched, in integers; and how many were not finite.

        What a group gives to one row adds up before its length is taken, and is cut towards zero.
        """
        noisy = self.noisy
        sums = np.zeros((len(touched), gradients.shape[1]), np.int64)
        if not len(item):
            return sums, 0
        place = np.searchsorted(touched, item)
        order = np.lexsort((place, drawn.groups))
        cells = drawn.groups[order] * len(touched) + place[order]
        begins = np.flatnonzero(np.diff(cells, prepend=-1))
        group, row = np.divmod(cells[begins], len(touched))
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below, group by group
            parts = np.add.reduceat(gradients[order], begins, axis=0)
            square = np.bincount(group, weights=np.square(parts).sum(1), minlength=drawn.many)
            finite = np.isfinite(square)
            scale = np.minimum(1.0, noisy.clip / np.sqrt(np.maximum(square, 1e-300)))
            scale = np.where(finite, scale * SHORTER / noisy.unit, 0.0)
        parts = np.where(finite[group][:, None], parts, 0.0)
        whole = np.trunc(parts * scale[group][:, None]).astype(np.int64)
        np.add.at(sums, row, whole)
        return sums, int((~finite).sum())


class Shop:
    """A client's ratings as places among its items' rows and its people's."""

    def __init__(self, prepared: PreparedJob) -> None:
        batch = prepared.batch
        self.prepared = prepared
        self.item, self.user = (np.asarray(batch[f], np.int64) for f in ("item", "user"))
        self.value: Values = np.asarray(batch[LABEL], np.float64) - batch[BASE]

    def people(self) -> dict[str, TablePart]:
        """Every person's own row, one step to its ridge solution under the model that was sent.

        The step is along the gradient over the ratings and the penalty together, so that a bias
        alone is solved in one. A row that is not finite then stays as it was.
        """
        part = self.prepared.job.local[USERS]
        own = part.values.astype(np.float64)
        q = self.prepared.values[ITEMS].astype(np.float64)[self.item]
        with np.errstate(over="ignore", invalid="ignore"):
            errors = self.value - predicted(q, own[self.user])
            q[:, -1] = 1.0  # the partner of a person's bias
            rated = np.bincount(self.user, minlength=len(own))
            order = np.argsort(self.user, kind="stable")
            begins = np.flatnonzero(np.diff(self.user[order], prepend=-1))
            pull = -PENALTY * own
            if len(begins):
                who = self.user[order][begins]
                pull[who] += np.add.reduceat((errors[:, None] * q)[order], begins, axis=0)
            found = own + pull / (rated[:, None] + PENALTY)
        good = np.isfinite(found).all(1) & (rated > 0)
        values = np.where(good[:, None], found, own).astype(np.float32)
        return {USERS: TablePart(part.ids, values)}


def predicted(q: Values, p: Values) -> Values:
    """What factors and biases say over the base, rating by rating."""
    found: Values = np.einsum("rk,rk->r", q[:, :-1], p[:, :-1]) + q[:, -1] + p[:, -1]
    return found
