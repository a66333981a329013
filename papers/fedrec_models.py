"""FedMF and PFedRec, as clients of a submodel federation: items are a table, the rest stays home.

FedMF (Chai et al., *Secure Federated Matrix Factorization*, IEEE Intelligent Systems 2021, with the
binary cross-entropy that PFedRec's authors give it as their baseline): a user's vector is a local
row, an item's a row of the table; the score is their product.

PFedRec (Zhang et al., *Dual Personalization on Federated Recommendation*, IJCAI 2023, section 4): a
user has a score function of its own, one linear layer, which is a local row with a bias. A client
first steps its score function over the items it was sent, then steps the items with the new one
(post-tuning), and sends these. What it predicts with are the items as it has tuned them.

Both: binary cross-entropy of what a user has against four items drawn for each of them. Two things
differ from the authors' programs. A client fetches and sends the rows of its own examples, and a
row's mean is over those who hold it; theirs send the whole table, and its mean is over everybody.
And negatives are drawn once, by the client, from all that it does not have in its training part:
theirs are drawn anew in every round, and never from what is held out, which tells the held-out item
by its never being a negative (docs/results.md has what that is worth).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tessera.data.clicks import offsets
from tessera.data.examples import LABEL, NONE, ClientData, Examples, Pools
from tessera.data.sequences import SequenceData
from tessera.ids import ClientId
from tessera.learning.bound_model import BoundModel, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.scores import ItemScores
from tessera.learning.tables.submodel import ModelUpdate, TablePart, TableUpdate, places
from tessera.learning.training.jobs import Job, Trained
from tessera.learning.training.settings import LocalTraining
from tessera.runs.training import Training
from tessera.tasks.task import Recommended, Task

Doubles = npt.NDArray[np.float64]

ITEMS: Final = "items"
OWN: Final = "own"
WIDTH: Final = 32
NEGATIVES: Final = 4
MODELS: Final = {
    "FedMF": LocalTraining(batch=0, epochs=1, rate=5.0, decay=1.0, table_rate=0.2),
    "PFedRec": LocalTraining(batch=0, epochs=1, rate=5.0, decay=1.0, table_rate=0.2),
}
"""How clients train; rates by the validation part of MovieLens 100K."""


class Bilinear(nn.Module):
    """A logit per example from `item` and `user`: the item's row, the user's own, and its bias."""

    def __init__(self, items: int, users: int, width: int, seed: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.own = nn.Embedding(users, width + 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.items.weight.normal_(0.0, 0.1, generator=generator)
            self.own.weight.normal_(0.0, 0.1, generator=generator)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        own = self.own(batch["user"])
        logit: Tensor = (self.items(batch["item"]) * own[:, :-1]).sum(-1) + own[:, -1]
        return logit


class BilinearLearner:
    """Full steps over all of a client's examples; `tuned` is PFedRec's order, with a bias."""

    def __init__(self, training: LocalTraining, *, tuned: bool) -> None:
        self.training, self.tuned = training, tuned
        self.name = "PFedRec" if tuned else "FedMF"

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        return [self._trained(job, self.training.rate_in(round_id)) for job in jobs]

    def _trained(self, job: Job, rate: float) -> Trained:
        trained, local = job.submodel.trained[ITEMS], job.local[OWN]
        at, there = places(trained, job.examples["item"])
        at, label = at[there], job.examples[LABEL][there].astype(np.float64)
        before = job.submodel.tables[ITEMS].of(trained).astype(np.float64)
        rows, own = before.copy(), local.values[0].astype(np.float64)
        if not self.tuned:
            own[-1] = 0.0
        counts = np.bincount(at, minlength=len(rows)).astype(np.int64)
        loss = float("nan")
        for _ in range(self.training.epochs if len(at) else 0):
            logits = rows[at] @ own[:-1] + own[-1]
            error = _sigmoid(logits) - label
            if np.isnan(loss):
                loss = float(np.mean(np.logaddexp(0.0, logits) - logits * label))
            gradient = np.append(error @ rows[at], error.sum() if self.tuned else 0.0) / len(at)
            stepped = own - rate * gradient
            if self.tuned:
                error = _sigmoid(rows[at] @ stepped[:-1] + stepped[-1]) - label
            partner = stepped if self.tuned else own
            pull = np.bincount(at, weights=error, minlength=len(rows))
            rows -= rate * self.training.table_rate * pull[:, None] * partner[None, :-1]
            own = stepped
        delta = (rows - before).astype(np.float32)
        update = ModelUpdate(
            np.zeros_like(job.submodel.dense), len(at), {ITEMS: TableUpdate(delta, counts)}
        )
        kept = {**job.local, OWN: TablePart(local.ids, own[None].astype(np.float32))}
        return Trained(update, kept, loss, len(at))


def _sigmoid(x: Doubles) -> Doubles:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -40.0, 40.0))))


def baseline_task(data: SequenceData, name: str) -> Task:
    """One of the two over the training part of these sequences."""
    training = MODELS[name]
    return Task(
        name=data.name,
        title=f"{name}, {data.name}",
        data=_clicks(data),
        module=lambda: Bilinear(data.sizes["item"], data.clients, WIDTH, torch.initial_seed()),
        tables=Tables({"items.weight": Table("item"), "own.weight": Local("user")}),
        learner=lambda bound, settings: BilinearLearner(settings, tuned=name == "PFedRec"),
        recommended=Recommended(
            training=training, clip=8.0, max_rows=int(5 * data.events.counts.max()), rounds=100
        ),
    )


def _clicks(data: SequenceData) -> ClientData:
    """What users have, each item with its empty places for negatives; the held-out with one."""

    def part(item: npt.NDArray[np.int64], user: npt.NDArray[np.int64], each: int) -> Examples:
        every = np.full((len(item), 1 + each), NONE, np.int64)
        every[:, 0] = item
        label = np.zeros(every.shape, np.float32)
        label[:, 0] = 1.0
        return Examples(
            {
                "user": np.repeat(user, 1 + each),
                "item": every.reshape(-1),
                LABEL: label.reshape(-1),
            }
        )

    users = np.repeat(np.arange(data.clients), data.events.counts)
    every = np.arange(data.sizes["item"])
    return ClientData(
        name=data.name,
        train=part(data.events.item, users, NEGATIVES),
        offsets=offsets(data.events.counts * (1 + NEGATIVES)),
        test=part(data.test["item"], data.test["user"], 1),
        test_offsets=data.test_offsets * 2,
        sizes=data.sizes,
        ids=data.ids,
        facts={**data.facts, "negatives": f"{NEGATIVES} for each item of a user, drawn once"},
        undrawn=Pools(every, every),
    )


def scores_of(training: Training, name: str) -> ItemScores:
    """Every item's score for the users of examples, as each would compute it at home."""
    bound: BoundModel = training.bound
    table = training.tables[ITEMS]
    items = table.values(np.arange(bound[ITEMS].rows, dtype=np.uint64)).astype(np.float64)
    own = training.local[OWN]
    learner = BilinearLearner(training.plan.local_training, tuned=name == "PFedRec")
    eligible = frozenset(training.clients.eligible)

    def scores(some: Examples) -> Doubles:
        found = np.empty((len(some), len(items)))
        for at, user in enumerate(some["user"].tolist()):
            (row,) = own.values(np.array([user], np.uint64)).astype(np.float64)
            bias = row[-1] if learner.tuned else 0.0
            found[at] = items @ row[:-1] + bias
            if learner.tuned and user in eligible:
                found[at] += _tuned(user, row)
        return found

    def _tuned(user: int, row: Doubles) -> Doubles:
        """What the user's own tuning of its items adds, with its score function as it is now."""
        client = ClientId(user)
        job = training.job(client, training._whole(client))
        update = learner.train([job], round_id=training.rounds_done)[0].update
        more = np.zeros(len(items))
        ids = job.submodel.trained[ITEMS].astype(np.int64)
        more[ids] = update.tables[ITEMS].values.astype(np.float64) @ row[:-1]
        return more

    return scores
