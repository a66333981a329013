"""Linear masks that clients fit again in every round, over the items' rows as they are now.

A prediction is `base` + q.p + x.w + the item's bias + the user's: q and the item's bias are a row
that all share, x the item's public attributes, and p, w and the user's bias a row that never leaves
the user. In a mask that is fitted once (`learning/models/masked.py`) the user's own part was chosen
before anybody knew the items' rows. Here all of it is the ridge solution to what these leave over,
in closed form: what a client learns at home is sent to nobody, and costs nothing at user level.
Without factors the only words that need others are one bias per item.

`base` is the middle of the scale, which is public, and not the mean of all ratings, which would be
a release: the user's bias takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.examples import LABEL
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import BoundModel
from tessera.learning.models.features import FEATURES
from tessera.learning.models.masked import batches
from tessera.learning.models.private import solved
from tessera.learning.rating_models import BASE, BIAS_SHARE, INTERCEPT, ITEMS, USER_START, USERS
from tessera.learning.tables.submodel import Floats, ModelUpdate, TablePart, TableUpdate, places
from tessera.learning.training.jobs import Job, Trained
from tessera.learning.training.settings import LocalTraining


class Refitted(nn.Module):
    """A rating per example from `item`, `user`, `features` and `base`.

    An item's row is factors, then its bias; a user's is factors, a weight per attribute, its bias.
    """

    def __init__(
        self,
        items: int,
        users: int,
        *,
        columns: int,
        factors: int = 0,
        spread: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(items, users) < 1 or min(factors, columns) < 0:
            raise ConfigError(
                f"refitted: {items} items, {users} users, {factors} factors, {columns} attributes",
                hint="items and users are 1 or more, the others 0 or more",
            )
        self.factors = factors
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.items = nn.Embedding(items, factors + 1)
            self.users = nn.Embedding(users, factors + columns + 1)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.items.weight.normal_(0.0, spread, generator=generator)
            self.items.weight[:, -1] = 0.0
            self.users.weight.fill_(USER_START)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        q, p = self.items(batch["item"]), self.users(batch["user"])  # (B, K + 1), (B, K + D + 1)
        known = torch.cat([q[:, :-1], batch[FEATURES]], -1)  # (B, K + D)
        rating: Tensor = batch[BASE] + (known * p[:, :-1]).sum(-1) + q[:, -1] + p[:, -1]
        return rating


class Refitter:
    """One round: every client's own row anew, then one step of its items' rows.

    The own row minimises the squared errors with a `penalty` on the attributes' weights, one of
    `weight_decay` per rating on factors, and `INTERCEPT` on the bias. An item's row takes a step of
    `rate * table_rate` along its mean gradient over the client's ratings of it. There are no
    batches and no random choices.
    """

    name = "refitted at home"

    def __init__(self, bound: BoundModel, training: LocalTraining, *, penalty: float) -> None:
        if training.batch or training.clip or training.epochs != 1:
            raise ConfigError(
                f"training: batch = {training.batch}, epochs = {training.epochs}, clip = "
                f"{training.clip} with masks that are fitted again to all of a client's ratings",
                hint="use batch = 0, epochs = 1 and clip = 0.0, or leave [training] out",
            )
        self.training, self.penalty = training, penalty
        self.factors = bound[ITEMS].width - 1

    def fitted(self, jobs: Sequence[Job]) -> list[Mapping[str, TablePart]]:
        """Every client's local rows, fitted to the model of its job."""
        cohort = _HomeFits(jobs, self)
        return [cohort.own_row(place, job) for place, job in enumerate(jobs)]

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """Each job as if by itself: clients meet in the arrays, not in the sums."""
        cohort = _HomeFits(jobs, self)
        rate = self.training.rate_in(round_id) * self.training.table_rate
        return [cohort.outcome(place, job, rate) for place, job in enumerate(jobs)]


class _HomeFits:
    """Everybody's ratings, one client's after the other's, and the row each fits to its own."""

    def __init__(self, jobs: Sequence[Job], how: Refitter) -> None:
        self.how = how
        self.slots, known, left, starts = [], [], [], [0]
        for job in jobs:
            trained = job.submodel.trained[ITEMS]
            at, there = places(trained, job.examples["item"])
            if len(job.local[USERS].ids) > 1:
                raise MisuseError(f"client {job.client}: several people, each without a mask")
            rows = job.submodel.tables[ITEMS].of(trained)[at[there]].astype(np.float64)  # (L, K+1)
            known.append(np.hstack([rows[:, :-1], job.examples[FEATURES][there]]))
            base = job.examples[BASE][there] + rows[:, -1]
            left.append(job.examples[LABEL][there] - base)
            self.slots.append(at[there])
            starts.append(starts[-1] + int(there.sum()))
        self.starts = np.array(starts)
        columns = job.examples[FEATURES].shape[1] if jobs else 0
        self.known = np.concatenate([np.zeros((0, how.factors + columns)), *known])
        self.left = np.concatenate([np.zeros(0), *left])
        self.theta = self._fit()  # (clients, 1 + K + D), the bias first

    def _fit(self) -> Floats:
        counts, columns = np.diff(self.starts), self.known.shape[1]
        theta = np.zeros((len(counts), 1 + columns))
        penalties = np.empty((len(counts), 1 + columns))
        penalties[:, 0] = INTERCEPT
        penalties[:, 1:] = self.how.penalty
        # 1e-9: a client may hold an attribute in none of its ratings.
        decay = np.maximum(self.how.training.weight_decay * counts, 1e-9)
        penalties[:, 1 : 1 + self.how.factors] = decay[:, None]
        for batch in batches(self.starts, np.arange(len(counts))):
            found = solved(
                torch.from_numpy(self.known[batch.rows]),
                torch.from_numpy(np.where(batch.there, self.left[batch.rows], 0.0)),
                torch.from_numpy(batch.there),
                torch.from_numpy(penalties[batch.clients]),
            )
            theta[batch.clients] = found.numpy()
        return np.asarray(theta, np.float32)

    def own_row(self, place: int, job: Job) -> Mapping[str, TablePart]:
        found = self.theta[place]
        if not (len(self.slots[place]) and np.isfinite(found).all()):
            return job.local
        row = np.concatenate([found[1:], found[:1]])[None]
        return {**job.local, USERS: TablePart(job.local[USERS].ids, row)}

    def outcome(self, place: int, job: Job, rate: float) -> Trained:
        theta, slots = self.theta[place], self.slots[place]
        mine = slice(self.starts[place], self.starts[place + 1])
        errors = self.left[mine] - theta[0] - self.known[mine] @ theta[1:]
        rows = job.submodel.tables[ITEMS].of(job.submodel.trained[ITEMS])
        counts = np.bincount(slots, minlength=len(rows))
        mean = np.bincount(slots, weights=errors, minlength=len(rows)) / np.maximum(counts, 1)
        partner = np.append(theta[1 : 1 + self.how.factors], np.float32(1.0))
        decay = np.full(len(partner), self.how.training.weight_decay)
        decay[-1] *= BIAS_SHARE
        deltas = (rate * (mean[:, None] * partner - decay * rows)).astype(np.float32)
        deltas[counts == 0] = 0.0
        loss = float(0.5 * np.mean(errors * errors)) if len(errors) else float("nan")
        dense, own = np.zeros_like(job.submodel.dense), self.own_row(place, job)
        if not len(slots):
            nothing = TableUpdate(deltas, counts)
            return Trained(ModelUpdate(dense, 0, {ITEMS: nothing}), job.local, loss, 0)
        if not (np.isfinite(deltas).all() and np.isfinite(loss)):
            nothing = TableUpdate(np.zeros_like(deltas), np.zeros_like(counts))
            update = ModelUpdate(dense, 0, {ITEMS: nothing})
            return Trained(update, job.local, float("nan"), len(slots), finite=False)
        update = ModelUpdate(dense, len(slots), {ITEMS: TableUpdate(deltas, counts)})
        return Trained(update, own, loss, len(slots))
