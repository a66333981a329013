"""Centralised training against torch's own optimisers, and resuming to the bit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples
from tessera.errors import ConfigError
from tessera.learning.bound_model import BoundModel, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.scores import auc, evaluate
from tessera.learning.tables.table import LazyTable, Normal
from tessera.learning.training.jobs import Trainable, click_loss, order
from tessera.learning.training.pooled import CentralTrainer, round_size
from tessera.learning.training.settings import LocalTraining

torch.set_num_threads(1)

ITEMS, USERS, WIDTH = 30, 7, 3
STEADY = LocalTraining(rate=0.2, decay=1.0)


class Toy(nn.Module):
    def __init__(self, drop: float = 0.0, items: int = ITEMS) -> None:
        super().__init__()
        self.items = nn.Embedding(items, WIDTH)
        self.bias = nn.Embedding(items, 1)
        self.users = nn.Embedding(USERS, WIDTH)
        self.score = nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(drop)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history = batch["history"]  # (B, T)
        seen = (self.items(history.clamp(min=0)) * (history >= 0).unsqueeze(-1)).sum(1)
        both = (self.items(batch["item"]) + seen) * self.users(batch["user"])
        return (self.score(self.drop(both)) + self.bias(batch["item"])).squeeze(-1)


TABLES: dict[str, Any] = {
    "items.weight": Table("item", "history"),
    "bias.weight": Table("item"),
    "users.weight": Local("user"),
}


def central_trainer(
    module: nn.Module, bound: BoundModel, *settings: Any, seed: int = 0, **more: Any
) -> CentralTrainer:
    tables = {t.name: bound.table(t.name, seed=seed) for t in bound.tables}
    coins = Secret(bytes([seed] * 32))
    loss, training = settings
    model = Trainable(module, bound, loss or click_loss, training)
    return CentralTrainer(model, tables=tables, coins=coins, **more)


def toy(drop: float = 0.0) -> tuple[Toy, BoundModel]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        module = Toy(drop)
    return module, Tables(TABLES).bind(module)


def made(n: int, seed: int = 0) -> Examples:
    """Clicks on odd items."""
    rng = np.random.default_rng(seed)
    item, user = rng.integers(0, ITEMS - 5, n), rng.integers(0, USERS, n)
    return Examples(
        {
            "item": item,
            "user": user,
            "history": rng.integers(-1, ITEMS - 5, (n, 2)),
            "label": (item % 2).astype(np.float32),
        }
    )


def torch_optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    if name == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=rate, eps=1e-8)
    return torch.optim.SGD(model.parameters(), lr=rate)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_whole_batches_equal_torchs_own_optimiser(optimizer: Any) -> None:
    """Every batch names every row of the examples, so lazy and whole updates are the same."""
    module, bound = toy()
    examples = made(60)
    central = central_trainer(
        module, bound, None, STEADY, examples=examples, batch=60, optimizer=optimizer, rate=0.05
    )
    model = copy.deepcopy(module)
    theirs = torch_optimizer(optimizer, model, 0.05)
    batch = {name: torch.tensor(column) for name, column in examples.fields.items()}
    for _ in range(5):
        theirs.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        theirs.step()
        assert central.run(60) == pytest.approx(float(loss.detach()), rel=1e-4)
    for name, value in central.parameters().items():
        assert_allclose(value, model.get_parameter(name).detach(), rtol=1e-4, atol=2e-5)


def one_by_one(module: Toy, examples: Examples, which: list[int], rate: float) -> Toy:
    """Adam with batches of 1, where each row has an optimiser of its own."""
    model = copy.deepcopy(module)
    moments: dict[tuple[str, int], tuple[Tensor, Tensor, int]] = {}
    for n in which:
        batch = {k: torch.tensor(v[n : n + 1]) for k, v in examples.fields.items()}
        model.zero_grad()
        F.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
        items = {*batch["item"].tolist(), *batch["history"].ravel().tolist()} - {-1}
        touched = {
            "items.weight": items,
            "bias.weight": set(batch["item"].tolist()),
            "users.weight": set(batch["user"].tolist()),
            "score.weight": {0},
            "score.bias": {0},
        }
        for name, rows in touched.items():
            parameter = model.get_parameter(name)
            for row in rows:
                g = parameter.grad[row]
                m, v, t = moments.get((name, row), (torch.zeros(()), torch.zeros(()), 0))
                m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, t + 1
                moments[name, row] = m, v, t
                step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                parameter.data[row] -= rate * step
    return model


def test_adam_is_lazy_and_corrects_by_a_rows_own_steps() -> None:
    module, bound = toy()
    examples = made(15)
    central = central_trainer(
        module, bound, None, STEADY, examples=examples, batch=1, rate=0.05, seed=6
    )
    for _ in range(3):
        central.run(7)
    which = [*order(Secret(bytes([6] * 32)), 0, 15), *order(Secret(bytes([6] * 32)), 1, 15)[:6]]
    model = one_by_one(module, examples, [int(n) for n in which], 0.05)
    for name, value in central.parameters().items():
        assert_allclose(value, model.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)


def test_every_example_is_seen_once_per_epoch_and_rounds_even_out() -> None:
    module, bound = toy()
    seen: list[int] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.extend(batch["number"].tolist())
        return output

    examples = made(20).with_field("number", np.arange(20))
    central = central_trainer(module, bound, loss, STEADY, examples=examples, batch=8, rate=1e-6)
    sizes = []
    for _ in range(12):
        before = len(seen)
        central.run(5)
        sizes.append(len(seen) - before)
    assert sum(sizes) == 60 and max(sizes) <= 12
    epochs = [seen[:20], seen[20:40], seen[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_rows_no_example_names_stay_as_they_were() -> None:
    module, bound = toy()
    central = central_trainer(module, bound, None, STEADY, examples=made(40), optimizer="sgd")
    central.run(80)
    for name in ("items", "bias"):
        now = central.tables()[name]
        assert isinstance(now, np.ndarray)
        assert_array_equal(now[ITEMS - 5 :], bound.initial(name)[ITEMS - 5 :])
        assert (now[: ITEMS - 5] != bound.initial(name)[: ITEMS - 5]).any()


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(optimizer: Any) -> None:
    examples = made(50)
    training = LocalTraining(rate=0.2, decay=0.9, clip=1.0, weight_decay=0.01, table_rate=2.0)

    def fresh() -> CentralTrainer:
        module, bound = toy(drop=0.3)
        return central_trainer(
            module, bound, None, training, examples=examples, batch=8, optimizer=optimizer, seed=3
        )

    straight, stopped, resumed = fresh(), fresh(), fresh()
    wanted = [straight.run(30) for _ in range(6)][-1]
    for _ in range(3):
        stopped.run(30)
    state = {name: array.copy() for name, array in stopped.state().items()}
    stopped.run(30)  # what was exported stays what it was
    resumed.load(state)
    for _ in range(3):
        loss = resumed.run(30)
    assert loss == wanted
    assert resumed.state().keys() == straight.state().keys()
    for name, array in straight.state().items():
        assert_array_equal(resumed.state()[name], array)


def test_a_state_of_something_else_is_refused() -> None:
    module, bound = toy()
    central = central_trainer(module, bound, None, STEADY, examples=made(50))
    other = central_trainer(module, bound, None, STEADY, examples=made(50), optimizer="sgd")
    before = central.state()
    with pytest.raises(ConfigError, match="stored state"):
        central.load(other.state())
    for name, array in before.items():
        assert_array_equal(central.state()[name], array)


def test_a_batch_that_is_not_finite_is_left_out_and_counted() -> None:
    module, bound = toy()

    def loss(output: Tensor, batch: Any) -> Tensor:
        return batch["bad"] * output

    bad = np.where(np.arange(40) % 8 == 3, np.nan, 1.0).astype(np.float32)
    examples = made(40).with_field("bad", bad)
    central = central_trainer(module, bound, loss, STEADY, examples=examples, batch=1)
    mean = central.run(40)
    assert central.not_finite == 5
    assert np.isfinite(mean) and np.isfinite(central.dense).all()


def test_training_learns_what_there_is_to_learn() -> None:
    module, bound = toy()
    central = central_trainer(module, bound, None, STEADY, examples=made(600), batch=32, rate=0.02)
    for _ in range(20):
        central.run(600)
    test = made(300, seed=1)
    assert auc(evaluate(module, bound, central.parameters(), test), test["label"]) > 0.95


def test_a_table_that_starts_by_a_rule_holds_only_touched_rows() -> None:
    module, _ = toy()
    rule = {"size": 2_000_000_000, "initial": Normal(0.1)}
    tables = {
        **TABLES,
        "items.weight": Table("item", "history", **rule),
        "bias.weight": Table("item", **rule),
    }
    bound = Tables(tables).bind(module)
    examples = made(30).with_field("item", np.arange(30) + 1_999_999_000)
    central = central_trainer(module, bound, None, STEADY, examples=examples)
    central.run(30)
    items = central.tables()["items"]
    assert isinstance(items, LazyTable) and items.touched <= 30 + ITEMS
    assert np.isfinite(evaluate(module, bound, central.parameters(), examples)).all()


@pytest.mark.parametrize("wrong", [{"optimizer": "lion"}, {"batch": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    module, bound = toy()
    with pytest.raises(ConfigError, match="central"):
        central_trainer(module, bound, None, STEADY, examples=made(5), **wrong)


def test_a_round_is_as_long_as_a_cohort_has_examples() -> None:
    data = ClientData(
        name="made",
        train=made(50),
        offsets=np.array([0, 10, 15, 50]),
        test=made(3),
        test_offsets=np.array([0, 1, 2, 3]),
        sizes={},
    )
    assert round_size(data, cohort=2) == 33
