"""A row of a client's data, looked for in all other words of a whole training's opened sums.

Every client of a small shop has one row that a fair coin left in its examples or took out of them.
The attacker sees what a round opens, knows all data but the coins, every client's secret of the
round (so its cut), and everybody's update; and scores each client's row by the *other* rows and the
dense part, over all rounds. Guesses about all of them bound epsilon from below
(`audit/canary_training.py`), at 99 %.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runs import toy
from tessera.audit.canary_training import Guessing
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import NONE, ClientData, Examples
from tessera.data.taobao_like import taobao_like
from tessera.ids import ClientId, RoundId
from tessera.learning.bound_model import Derived, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import ModelUpdate, Submodel
from tessera.learning.training.jobs import Job
from tessera.plan import Crypto, DPPlan, NoisyRows, Plan, SimulationPlan, Trust, UpdatePlan
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.rounds import encode
from tessera.rounds.messages import RoundResult
from tessera.rounds.noise import noise_of
from tessera.rounds.party import ServerModel
from tessera.rounds.root import simulated_coins
from tessera.runs.client_training import cut_examples
from tessera.runs.training import Training, complete
from tessera.tasks import Task

CLIENTS, GOODS, DELTA = 60, 40, 1e-5
ENTROPY = ScriptedEntropy(b"an index in a transcript")


def without(examples: Examples, row: int) -> Examples:
    left = examples.take(examples["item"] != row)
    return left.with_field("history", np.where(left["history"] == row, NONE, left["history"]))


class Shop:
    """Data with and without each client's row, and the truth about it."""

    def __init__(self) -> None:
        self.data = taobao_like(CLIENTS, GOODS, 4, examples=12, history=3, test_share=0.0, seed=2)
        coins = np.random.default_rng(5)
        self.present = coins.random(CLIENTS) < 0.5
        self.row = np.zeros(CLIENTS, np.int64)
        parts = []
        for client in range(CLIENTS):
            own = self.data.of(client)
            ids, counts = np.unique(own["history"][own["history"] >= 0], return_counts=True)
            self.row[client] = ids[counts.argmax()] if len(ids) else own["item"][0]
            left = own if self.present[client] else without(own, self.row[client])
            parts.append(left if len(left) else own.take(slice(0, 1)))
        fields = parts[0].fields
        columns = {name: np.concatenate([p[name] for p in parts]) for name in fields}
        train = Examples(columns)
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])])
        self.trained: ClientData = replace(
            self.data,
            train=train,
            offsets=offsets,
            test=train,
            test_offsets=offsets,
        )

    def world(self, client: int, *, there: bool) -> Examples:
        own = self.data.of(client)
        if there:
            return own
        left = without(own, int(self.row[client]))
        return left if len(left) else own.take(slice(0, 1))

    def task(self) -> Task:
        return Task(
            name="toy",
            data=self.trained,
            module=lambda: toy.Taste(GOODS, 4, CLIENTS),
            tables=Tables(
                {
                    "items.weight": Table("item", "history"),
                    "categories.weight": Derived(
                        "items.weight", self.data.category_of, {"category": "item"}
                    ),
                    "users.weight": Local("user"),
                }
            ),
        )


def planned(rounds: int, noise: float) -> Plan:
    return Plan(
        scheme="secure-submodel",
        cohort=CLIENTS,
        training=replace(toy.task().recommended.training, batch=1, rate=1.0, clip=0.0, decay=1.0),
        update=UpdatePlan(levels=2**17),
        dp=DPPlan(
            unit="index",
            noise=noise,
            delta=DELTA,
            clip=2.0,
            per_row=8,
            example_clip=0.1,
            rows=NoisyRows.ALL,
            trust=Trust.SHARES,
        ),
        simulation=SimulationPlan(rounds=rounds, evaluate_every=10 * rounds, crypto=Crypto.NONE),
    )


class Attacked(Training):
    """A training that notes, beside what it opens, what each world of each client would send."""

    shop: Shop

    def attack(self, shop: Shop) -> Attacked:
        self.shop, self.seen = shop, []
        self.scores = np.zeros(CLIENTS)
        self.apart = np.zeros(CLIENTS)
        self.looked_at = np.ones(self.plan.full_length, np.bool_)
        self._pending: tuple[Any, ...] | None = None
        return self

    def _train_cohort(self, round_id: RoundId, submodels: Any) -> Any:
        outcome = super()._train_cohort(round_id, submodels)
        # Everybody is sent all rows, and in its other world a client trains others of them.
        every = {t.name: np.arange(t.rows, dtype=np.uint64) for t in self.plan.tables}
        whole = {c: replace(submodel, trained=every) for c, submodel in submodels.items()}
        jobs = [
            self._world(ClientId(c), whole[ClientId(c)], round_id, there=there)
            for c in range(CLIENTS)
            for there in (True, False)
        ]
        found = self.learner.learner.train(jobs, round_id=int(round_id))
        worlds = np.stack(
            [
                flat(self.plan, one.update, whole[ClientId(job.client)])
                for job, one in zip(jobs, found, strict=True)
            ]
        )
        sent = np.stack(
            [flat(self.plan, outcome.updates[c], submodels[c]) for c in sorted(submodels)]
        )
        self._pending = worlds.reshape(CLIENTS, 2, -1), sent
        return outcome

    def _world(
        self, client: ClientId, submodel: Submodel, round_id: RoundId, *, there: bool
    ) -> Job:
        secret = simulated_coins(self.entropy, self.plan, round_id, client)
        own = self.shop.world(int(client), there=there)
        cut = cut_examples(self.plan, self.bound, own, secret)
        local = super().job(client, submodel, round_id).local
        return Job(int(client), submodel, cut, local, coins=secret)

    def opened(self, result: RoundResult) -> None:
        """Score everybody's row by all words but its own."""
        assert self._pending is not None
        worlds, sent = self._pending
        means = [result.dense] + [result.tables[t.name].mean.reshape(-1) for t in self.plan.tables]
        noise = np.concatenate(means) * CLIENTS - sent.sum(axis=0)
        variance = (noise_of(self.plan).in_the_sum * noise_of(self.plan).dp.clip) ** 2
        for client in range(CLIENTS):
            others = self.looked_at & ~words_of(self.plan, int(self.shop.row[client]))
            apart = (worlds[client, 0] - worlds[client, 1])[others]
            middle = worlds[client].mean(axis=0)[others]
            residual = (noise + sent[client])[others] - middle
            self.scores[client] += residual @ apart / variance
            self.apart[client] += apart @ apart


def flat(plan: Plan, update: ModelUpdate, submodel: Submodel) -> np.ndarray:
    """All words of the model, zeros where the client has none."""
    parts = [np.asarray(update.dense, np.float64)]
    for t in plan.tables:
        whole = np.zeros((t.rows, t.width))
        whole[submodel.trained[t.name].astype(np.int64)] = update.tables[t.name].values
        parts.append(whole.reshape(-1))
    return np.concatenate(parts)


def words_of(plan: Plan, row: int) -> np.ndarray:
    """The words of one row of the items."""
    found = np.zeros(plan.full_length, np.bool_)
    start = plan.model.dense
    for t in plan.tables:
        if t.name == "items":
            found[start + row * t.width : start + (row + 1) * t.width] = True
        start += t.rows * t.width
    return found


def attacked(
    rounds: int, noise: float, monkeypatch: pytest.MonkeyPatch, *, rows_looked_at: bool = True
) -> tuple[Attacked, Plan]:
    """Without `rows_looked_at` no row that is looked for is looked at, of whichever client."""
    shop = Shop()
    task = shop.task()
    plan = complete(planned(rounds, noise), task)
    with Attacked(task, plan, entropy=ENTROPY) as training:
        training.attack(shop)
        for row in () if rows_looked_at else np.unique(shop.row):
            training.looked_at &= ~words_of(plan, int(row))
        step = ServerModel.step

        def watched(self: ServerModel, result: RoundResult, round_id: RoundId) -> None:
            training.opened(result)
            step(self, result, round_id)

        monkeypatch.setattr(ServerModel, "step", watched)
        for _ in training.run(rounds):
            pass
    return training, plan


def measured(training: Attacked) -> float:
    scored = training.apart > 0.0  # whoever has nothing else to show is not guessed about
    assert scored.sum() >= 50
    guesses = Guessing(training.scores[scored], training.shop.present[scored])
    return guesses.bound(delta=DELTA, level=0.99)


def printed(plan: Plan, rounds: int) -> float:
    ledger = noise_of(plan).setting.ledger(rounds)
    return ledger.guarantee(unit=Unit.INDEX, against=Observer.LEADER, delta=DELTA).epsilon


@pytest.mark.slow
def test_two_hundred_rounds_stay_within_the_printed_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = 200
    training, plan = attacked(rounds, 30.0, monkeypatch)
    epsilon = printed(plan, rounds)
    assert 0.5 < epsilon < 2.5
    assert measured(training) <= epsilon
    # No score is further from even odds than the epsilon, either: each is a log likelihood ratio.
    assert np.abs(training.scores).max() <= epsilon


def test_a_few_rounds_with_the_noise_off_pass_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "add_noise", lambda ring, deviation, words, stream: words)
    training, plan = attacked(2, 30.0, monkeypatch)
    right = (training.scores > 0) == training.shop.present
    assert right[training.apart > 0].all()
    assert measured(training) > printed(plan, 200)


def test_noise_on_the_rows_own_words_alone_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client's row has all of its noise, and the others tell which clients have theirs."""
    real, rows = encode.add_noise, np.unique(Shop().row)
    plan = complete(planned(2, 30.0), Shop().task())

    def on_rows(ring: Any, deviation: float, words: Any, stream: Any) -> Any:
        noisy = real(ring, deviation, words, stream)
        own = np.zeros(len(words), np.bool_)
        for row in rows:
            own[: plan.full_length] |= words_of(plan, int(row))
        return np.where(own, noisy, words)

    monkeypatch.setattr(encode, "add_noise", on_rows)
    training, plan = attacked(2, 30.0, monkeypatch, rows_looked_at=False)
    assert measured(training) > printed(plan, 200)
