"""Matrix factorisation in a federation: items are a table, a user's factors never leave the user.

Yang et al., *Practical and Secure Federated Recommendation with Personalized Masks*, section 2.2:
every party takes a step with its own factors, then says where the rows of its items should go. Two
things differ from the paper, for the sake of accuracy. Biases are coordinates whose partner is
fixed at 1, and the server divides an item's sum by the number of raters in it (per-row averaging)
where the paper adds up; equation 7 as printed has the wrong sign, and climbs.

A prediction is `base` + q.p + the item's bias + the user's. The base is the global mean, or what a
private mask predicts (`learning/models/masked.py`): the federation learns what that leaves over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tessera.data.examples import LABEL
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import BoundModel
from tessera.learning.rating_models import BASE, BIAS_SHARE, ITEMS, USER_START, USERS
from tessera.learning.tables.submodel import Floats, ModelUpdate, TablePart, TableUpdate, places
from tessera.learning.training.jobs import Job, PreparedJob, Trained
from tessera.learning.training.noisy_steps import (
    SHORTER,
    Ints,
    NoisyClient,
    NoisySteps,
    StepBatch,
    at_hand,
    fresh_rows,
)
from tessera.learning.training.settings import LocalTraining

Places = npt.NDArray[np.int64]


class Factorization(nn.Module):
    """A rating per example from `item`, `user` and `base`; rows are factors, then the bias."""

    def __init__(
        self, items: int, users: int, *, factors: int = 64, spread: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        if items < 1 or users < 1 or factors < 0:
            raise ConfigError(
                f"factorization: {items} items, {users} users, {factors} factors",
                hint="items and users are 1 or more, factors 0 or more: 0 are biases alone",
            )
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.items = nn.Embedding(items, factors + 1)
            self.users = nn.Embedding(users, factors + 1)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.items.weight.normal_(0.0, spread, generator=generator)
            self.items.weight[:, -1] = 0.0
            self.users.weight.fill_(USER_START)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        q, p = self.items(batch["item"]), self.users(batch["user"])  # (B, K + 1)
        match = (q[:, :-1] * p[:, :-1]).sum(-1)
        rating: Tensor = batch[BASE] + match + q[:, -1] + p[:, -1]
        return rating


def rating_loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Half the squared error of each example."""
    return 0.5 * (output - batch[LABEL]).square()


class Factorizer:
    """One round of federated matrix factorisation at many clients at once.

    Each client takes `epochs` steps of `rate` with its own row, or with the row of each of its
    people, on the mean gradient of all their ratings; then its items' rows take one step of
    `rate * table_rate` along their mean gradient at the new rows. `weight_decay` is the penalty of
    both. There are no batches and no random choices: what a client sends follows from its ratings
    and what it was sent.
    """

    name = "factorised"

    def __init__(self, bound: BoundModel, training: LocalTraining) -> None:
        if training.batch or training.clip:
            raise ConfigError(
                f"training: batch = {training.batch}, clip = {training.clip} with factors, which "
                "are trained on all of a client's ratings at once",
                hint="use batch = 0 and clip = 0.0, or leave [training] out",
            )
        self.training = training
        self.width = bound[ITEMS].width

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """Each job as if by itself: clients meet in the arrays, not in the sums."""
        cohort = _Cohort(jobs, self.width)
        rate = self.training.rate_in(round_id)
        with np.errstate(over="ignore", invalid="ignore"):  # found below, client by client
            errors = cohort.errors()
            losses = cohort.mean_by_client(0.5 * errors * errors)
            for _ in range(self.training.epochs):
                cohort.step_users(rate, self.training.weight_decay)
            deltas = cohort.deltas(rate * self.training.table_rate, self.training.weight_decay)
        return [
            cohort.outcome(place, job, deltas, float(losses[place]))
            for place, job in enumerate(jobs)
        ]


class _Cohort:
    """Everybody's rows, one client's after the other's, and the ratings that point at them.

    A client has item rows and the rows of its people: itself, or those who shop there. A cell is
    one person's word on one item; the same person may have rated it several times.
    """

    def __init__(self, jobs: Sequence[Job], width: int) -> None:
        rows, slots, values, own, people, owner = [], [], [], [], [], []
        self.starts = np.zeros(len(jobs) + 1, np.int64)  # of each client's item rows
        self.firsts = np.zeros(len(jobs) + 1, np.int64)  # likewise of its people
        for place, job in enumerate(jobs):
            trained, local = job.submodel.trained[ITEMS], job.local[USERS]
            at, there = places(trained, job.examples["item"])
            who, known = places(local.ids, job.examples["user"])
            if not known.all():
                raise MisuseError(f"client {job.client}: a rating of a person without a row")
            rows.append(job.submodel.tables[ITEMS].of(trained))
            slots.append(self.starts[place] + at[there])
            values.append((job.examples[LABEL] - job.examples[BASE])[there])
            owner.append(np.full(int(there.sum()), place))
            own.append(local.values)
            people.append(self.firsts[place] + who[there])
            self.starts[place + 1] = self.starts[place] + len(trained)
            self.firsts[place + 1] = self.firsts[place] + len(local.ids)
        self.q = np.concatenate([np.zeros((0, width), np.float32), *rows])
        self.p = np.concatenate([np.zeros((0, width), np.float32), *own])
        self.owner = np.concatenate([np.zeros(0, np.int64), *owner])
        self.value = np.concatenate([np.zeros(0, np.float32), *values])
        slot = np.concatenate([np.zeros(0, np.int64), *slots])
        person = np.concatenate([np.zeros(0, np.int64), *people])
        self.counts = np.bincount(slot, minlength=len(self.q))
        self.ratings = np.bincount(self.owner, minlength=len(jobs))
        self.rated = np.bincount(person, minlength=len(self.p))
        cells, cell = np.unique(person * max(len(self.q), 1) + slot, return_inverse=True)
        self.cell = cell.reshape(-1)
        self.person, self.slot = np.divmod(cells, max(len(self.q), 1))  # of each cell, by person

    def errors(self) -> Floats:
        """Of every rating, with the people's rows as they are now."""
        p, q = self.p[self.person], self.q[self.slot]
        match = np.einsum("rk,rk->r", q[:, :-1], p[:, :-1]) + q[:, -1] + p[:, -1]
        return np.asarray(self.value - match[self.cell], np.float32)

    def mean_by_client(self, values: Floats) -> npt.NDArray[np.float64]:
        total = np.bincount(self.owner, weights=values, minlength=len(self.ratings))
        return np.asarray(total / np.maximum(self.ratings, 1))

    def step_users(self, rate: float, penalty: float) -> None:
        """p <- p - rate (penalty p - mean of e q), the bias with q's coordinate fixed at 1."""
        by_cell = self._by_cell(self.errors())
        products = by_cell[:, None] * self.q[self.slot]  # e q
        products[:, -1] = by_cell
        total = _sums(products, self.person, len(self.p))
        mean = total / np.maximum(self.rated, 1)[:, None].astype(np.float32)
        self.p = self.p - np.float32(rate) * (self.p * _penalties(penalty, self.q) - mean)

    def deltas(self, rate: float, penalty: float) -> Floats:
        """rate (mean of e p - penalty q) for each row, over a client's ratings of the item."""
        share = np.maximum(self.counts, 1).astype(np.float32)[self.slot]
        partner = self.p[self.person]
        partner[:, -1] = 1.0
        products = (self._by_cell(self.errors()) / share)[:, None] * partner
        by_slot = np.argsort(self.slot, kind="stable")
        total = _sums(products[by_slot], self.slot[by_slot], len(self.q))
        deltas = total - self.q * _penalties(penalty, self.q)
        deltas[self.counts == 0] = 0.0
        return np.asarray(np.float32(rate) * deltas, np.float32)

    def outcome(self, place: int, job: Job, deltas: Floats, loss: float) -> Trained:
        low, high = self.starts[place], self.starts[place + 1]
        n, part = int(self.ratings[place]), job.local[USERS]
        rows, own = deltas[low:high], self.p[self.firsts[place] : self.firsts[place + 1]]
        if not (np.isfinite(rows).all() and np.isfinite(own).all() and np.isfinite(loss)):
            nothing = TableUpdate(np.zeros_like(rows), np.zeros(high - low, np.int64))
            update = ModelUpdate(np.zeros_like(job.submodel.dense), 0, {ITEMS: nothing})
            return Trained(update, job.local, float("nan"), n, finite=False)
        update_of_items = TableUpdate(rows, self.counts[low:high])
        update = ModelUpdate(np.zeros_like(job.submodel.dense), n, {ITEMS: update_of_items})
        if not n:
            return Trained(update, job.local, float("nan"), 0)
        return Trained(update, {**job.local, USERS: TablePart(part.ids, own)}, loss, n)

    def _by_cell(self, values: Floats) -> Floats:
        summed = np.bincount(self.cell, weights=values, minlength=len(self.slot))
        return summed.astype(np.float32)


def _sums(values: Floats, group: Places, groups: int) -> Floats:
    """The sum of each group's values; they stand group by group."""
    total = np.zeros((groups, values.shape[1]), np.float32)
    if len(group):
        begins = np.flatnonzero(np.diff(group, prepend=-1))
        total[group[begins]] = np.add.reduceat(values, begins, axis=0)
    return total


def _penalties(penalty: float, rows: Floats) -> Floats:
    """What each column of a row is pulled to zero with."""
    found = np.full(rows.shape[1], penalty, np.float32)
    found[-1] = penalty * BIAS_SHARE
    return found


# --- factors --------------------------------------------------------------------------------------
#
# NoisyFactorizer: factors at shops with noise per person; a person's own row is free.
#
# A row that belongs to one person follows from that person's ratings and from what everybody was
# sent. With the person it comes and goes, and reaches nobody but by the person's part of the
# items' sums. So it is fitted at home without clip and without noise, and only what a person gives
# to the items' rows is clipped, all of it together, and hidden under noise. Where a row is of
# several people that would be wrong: one of them would reach the parts of the others
# (`data/subjects.py` refuses it). Per example it would be wrong, too, as the row carries one
# example into all later steps.
#
# A round: every person at hand takes one step to the ridge solution of its own row, under the
# model that was sent. Then the plan's steps: some people are drawn, each one's gradient over its
# items' rows is clipped, and noise goes to every row (`training/noisy_steps.py`). What
# `Factorizer` does without noise differs in the sums: there a row's is divided by the
# number of its raters, which must stay secret here.


Values = npt.NDArray[np.float64]

PENALTY: Final = 4.0
"""On a person's own row, as if it had this many more ratings, all equal to the base."""


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
