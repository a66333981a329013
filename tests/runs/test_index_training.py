"""Training per index: what a client sends in both worlds, through the cut, clip and rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runs import toy
from tessera.api import simulate
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.secret import Secret
from tessera.data.examples import NONE, ClientData, Examples
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.bound_model import Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.learning.training import row_cut
from tessera.learning.training.jobs import Job, Trainable, Trained
from tessera.learning.training.local import NoisySequential
from tessera.learning.training.vectorised.noisy import NoisyVectorised
from tessera.plan import DPPlan, Plan, Trust, UnionPlan, UpdatePlan
from tessera.rounds.clipped_vector import ClippedVector, clipped_vector
from tessera.rounds.noise import noise_of
from tessera.runs.client_training import cut_examples, noisy_steps
from tessera.runs.folder import RunFolder
from tessera.runs.training import Training, complete
from tessera.tasks import Task

INDEX = DPPlan(unit="index", noise=2.0, per_row=6, example_clip=0.1, rows="all", trust=Trust.SHARES)
RUNS = [
    ("secure-fedavg", Trust.SHARES),
    ("secure-submodel", Trust.SHARES),
    ("two-server", Trust.EACH),
    ("fedavg", Trust.SERVER),
    ("secure-submodel", Trust.LOCAL),
]
MARK = "mark"


def planned(scheme: str = "secure-fedavg", section: DPPlan = INDEX) -> Plan:
    return replace(
        toy.plan(scheme),
        training=None,
        update=UpdatePlan(),
        union=UnionPlan(max_rows=toy.GOODS),
        dp=section,
    )


@pytest.mark.parametrize(("scheme", "trust"), RUNS)
def test_a_run_per_index_has_a_number_with_the_users_beside_it(
    tmp_path: Path, scheme: str, trust: Trust
) -> None:
    section = replace(INDEX, trust=trust, steps=2 if trust is Trust.LOCAL else 1)
    simulate(toy.task(), planned(scheme, section), 2, out=tmp_path / "run")
    last = list(RunFolder.load(tmp_path / "run").rounds())[-1]
    assert 0.0 < last["noise_epsilon"] < 50.0
    assert last["noise_scope"].startswith("delta 1e-06 per index (")
    assert ("no number per user" in last["noise_scope"]) is (trust is Trust.LOCAL)
    assert "given" not in last["noise_scope"]


@pytest.mark.parametrize("trust", [Trust.SHARES, Trust.SERVER])
def test_a_clients_own_rows_stay_as_they_began(trust: Trust) -> None:
    scheme = "fedavg" if trust is Trust.SERVER else "secure-fedavg"
    task = toy.task()
    plan = complete(planned(scheme, replace(INDEX, trust=trust)), task)
    with Training(task, plan, entropy=ScriptedEntropy(b"own")) as training:
        every = np.arange(toy.USERS, dtype=np.uint64)
        before = training.local["users"].values(every).copy()
        list(training.run(2))
        assert np.array_equal(before, training.local["users"].values(every))


# --- both worlds through the trainer --------------------------------------------------------------


class Flips(nn.Module):
    """The worst module: what stands in a history turns the gradient of all else round."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(30, 2)
        self.own = nn.Embedding(1, 1)
        self.dense = nn.Parameter(torch.zeros(3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history = batch["history"]
        entries = history.ge(0).sum(-1)
        sign = 1.0 - 2.0 * (entries % 2)
        rows = self.items(batch["item"]).sum(-1) + self.own(batch["user"]).sum(-1)
        past = (self.items(history.clamp(min=0)).sum(-1) * history.ge(0)).sum(-1)
        dense = (self.dense * torch.tensor([1.0, 2.0, 3.0])).sum()
        return sign * (dense + rows) + past


def steep(output: Tensor, batch: object) -> Tensor:
    return -100.0 * output


def examples_of(rng: np.random.Generator, count: int, places: int = 4) -> Examples:
    weights = 1.0 / np.arange(1, 31)
    drawn = rng.choice(30, size=(count, 1 + places), p=weights / weights.sum())
    return Examples(
        {
            "item": drawn[:, 0],
            "history": np.where(rng.random((count, places)) < 0.3, NONE, drawn[:, 1:]),
            "user": np.zeros(count, np.int64),
            "label": np.ones(count, np.float32),
            MARK: np.arange(count),
        }
    )


def task_of(data: Examples) -> Task:
    offsets = np.array([0, len(data)])
    client = ClientData(
        name="flips",
        train=data,
        offsets=offsets,
        test=data,
        test_offsets=offsets,
        sizes={"user": 1, "item": 30},
    )
    return replace(
        toy.task(),
        data=client,
        module=Flips,
        loss=steep,
        tables=Tables(
            {"items.weight": Table("item", "history"), "own.weight": Local("user")},
        ),
    )


class SameCoins:
    """Coins by an example's mark, so that it has the same ones in both worlds."""

    def __init__(self, marks: np.ndarray) -> None:
        self._marks, self._at = marks, 0

    def uniform(self, count: int) -> np.ndarray:
        self._at += 1
        each = count // max(1, len(self._marks))
        rows = [np.random.default_rng([self._at, int(m)]).random(each) for m in self._marks]
        return np.concatenate([np.empty(0), *rows])


def without(examples: Examples, row: int) -> Examples:
    left = examples.take(examples["item"] != row)
    return left.with_field("history", np.where(left["history"] == row, NONE, left["history"]))


class Client:
    """One client of a plan, whose trainer and encoding are the real ones."""

    def __init__(self, plan: Plan, data: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
        self.task = task_of(data)
        self.plan = complete(plan, self.task)
        self.module = self.task.build(0)
        self.bound = self.task.bind(self.module)
        self.patch = monkeypatch
        every = np.arange(30, dtype=np.uint64)
        rows = {"items": TablePart(every, self.bound.table("items").values(every))}
        self.submodel = Submodel(self.bound.pack(self.module), rows, {"items": every})

    def trained(self, examples: Examples, *, cut: bool = True) -> Trained:
        self.patch.setattr(row_cut, "CoinStream", lambda _: SameCoins(examples[MARK]))
        secret = Secret(bytes(32))
        if cut:
            examples = cut_examples(self.plan, self.bound, examples, secret)
        self.patch.undo()
        assert self.plan.training is not None
        learner = NoisyVectorised(
            Trainable(self.module, self.bound, steep, self.plan.training), noisy_steps(self.plan)
        )
        job = Job(0, self.submodel, examples, own_row(), coins=secret)
        (found,) = learner.train([job], round_id=0)
        return found

    def sent(self, update: ModelUpdate) -> ClippedVector:
        vector = self.plan.noisy_vector
        assert vector is not None
        widths = {t.name: t.width for t in self.plan.tables}
        return clipped_vector(
            vector, update, self.submodel.trained, widths, 1, Secret(bytes([7] * 32))
        )

    def moved(self, data: Examples, row: int, *, cut: bool = True) -> float:
        """How far the integers of both worlds are apart, over what the account allows."""
        one, other = (
            self.sent(self.trained(world, cut=cut).update) for world in (data, without(data, row))
        )
        squares = float(np.square(one.dense - other.dense).sum())
        squares += float(np.square(one.tables["items"] - other.tables["items"]).sum())
        vector, setting = self.plan.noisy_vector, noise_of(self.plan).setting
        assert vector is not None
        return squares**0.5 / (setting.row_moves * vector.bound)


def own_row() -> dict[str, TablePart]:
    return {"own": TablePart(np.zeros(1, np.uint64), np.zeros((1, 1), np.float32))}


@pytest.mark.parametrize("per_row", [1, 3, 6])
@pytest.mark.parametrize("clip", [1.0, 10.0], ids=["clipped", "whole"])
def test_no_row_moves_what_a_client_sends_by_more_than_the_account_says(
    monkeypatch: pytest.MonkeyPatch, per_row: int, clip: float
) -> None:
    rng = np.random.default_rng(per_row)
    data = examples_of(rng, 60)
    section = replace(INDEX, per_row=per_row, example_clip=0.2, clip=clip)
    client = Client(planned(section=section), data, monkeypatch)
    assert (noise_of(client.plan).setting.row_moves < 2.0) is (0.4 * per_row < 1.9 * clip)
    found = [client.moved(data, row) for row in range(8)]
    assert max(found) <= 1.0
    assert max(found) > 0.05  # and it is not that nothing moves


def test_without_the_cut_a_row_moves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken once: a row that stands in most examples moves all of them."""
    data = examples_of(np.random.default_rng(1), 60)
    client = Client(planned(section=replace(INDEX, per_row=3, clip=10.0)), data, monkeypatch)
    assert client.moved(data, 0) <= 1.0 < client.moved(data, 0, cut=False)


def test_an_examples_part_is_as_long_as_its_clip_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = examples_of(np.random.default_rng(2), 20)
    training = replace(toy.task().recommended.training, rate=0.7, table_rate=5.0, batch=4, clip=0.0)
    plan = replace(planned(), training=training)
    client = Client(plan, data, monkeypatch)
    for at in range(5):
        update = client.trained(data.take(np.array([at]))).update
        assert update.weight == 1 and set(update.tables["items"].counts) == {1}
        length = np.square(update.dense).sum() + np.square(update.tables["items"].values).sum()
        assert 0.0999 < length**0.5 <= 0.1


def test_an_example_without_a_finite_gradient_is_zeros_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = examples_of(np.random.default_rng(3), 10)
    client = Client(planned(), data, monkeypatch)

    def sick(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return torch.where(batch[MARK] == 3, float("nan"), -100.0) * output

    plan = client.plan
    assert plan.training is not None
    for kind in (NoisyVectorised, NoisySequential):
        model = Trainable(client.module, client.bound, sick, plan.training)
        learner = kind(model, noisy_steps(plan))
        job = Job(0, client.submodel, data, own_row(), coins=Secret(bytes(32)))
        (found,) = learner.train([job], round_id=0)
        assert found.finite and found.not_finite == 1
        assert np.isfinite(found.update.dense).all() and np.abs(found.update.dense).sum() > 0


def test_both_ways_of_training_clip_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    data = examples_of(np.random.default_rng(4), 40)
    training = replace(toy.task().recommended.training, table_rate=3.0, batch=4, clip=0.0)
    client = Client(replace(planned(), training=training), data, monkeypatch)
    job = Job(0, client.submodel, data, own_row(), coins=Secret(bytes(32)))
    assert client.plan.training is not None
    found = [
        kind(
            Trainable(client.module, client.bound, steep, client.plan.training),
            noisy_steps(client.plan),
        )
        .train([job], round_id=2)[0]
        .update
        for kind in (NoisyVectorised, NoisySequential)
    ]
    np.testing.assert_allclose(found[0].dense, found[1].dense, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        found[0].tables["items"].values, found[1].tables["items"].values, rtol=1e-4, atol=1e-7
    )


# --- what is refused ------------------------------------------------------------------------------


def test_a_rate_that_grows_is_refused() -> None:
    training = replace(toy.task().recommended.training, decay=1.01, batch=4, clip=0.0)
    plan = complete(replace(planned(), training=training), toy.task())
    with pytest.raises(ConfigError, match=r"decay = 1.01"):
        noisy_steps(plan)


def test_dropout_and_two_targets_are_refused() -> None:
    class Leaves(toy.Taste):
        def __init__(self) -> None:
            super().__init__(toy.GOODS, 8, toy.USERS)
            self.left_out = nn.Dropout(0.5)

    with pytest.raises(ConfigError, match="dropout"):
        complete(planned(), replace(toy.task(), module=Leaves))
    item = DPPlan(unit="item", noise=1.0, trust="local")
    for section in (item, replace(item, unit="subject")):
        complete(planned(section=section), toy.task())
        with pytest.raises(ConfigError, match="dropout"):
            complete(planned(section=section), replace(toy.task(), module=Leaves))
    complete(planned(section=replace(item, unit="user")), replace(toy.task(), module=Leaves))
    tables = Tables({"items.weight": Table("item", "history"), "users.weight": Table("user")})

    class Both(toy.Taste):
        def __init__(self) -> None:
            super().__init__(toy.GOODS, 8, toy.USERS)
            del self.categories

    with pytest.raises(ConfigError, match="aimed at 2 rows"):
        complete(planned(), replace(toy.task(), module=Both, tables=tables))


def test_the_cut_follows_from_the_round_and_the_clients_secret() -> None:
    task = toy.task()
    plan = complete(planned(section=replace(INDEX, per_row=1)), task)
    with Training(task, plan, entropy=ScriptedEntropy(b"cut")) as training:
        jobs = [
            training.job(ClientId(0), training._whole(ClientId(0)), RoundId(r)) for r in (0, 0, 1)
        ]
    assert np.array_equal(jobs[0].examples["item"], jobs[1].examples["item"])
    items = jobs[0].examples["item"]
    assert len(np.unique(items)) == len(items) and (jobs[0].examples["history"] == NONE).all()
    assert len(items) < len(task.data.of(0)) or len(items) == len(
        np.unique(task.data.of(0)["item"])
    )
