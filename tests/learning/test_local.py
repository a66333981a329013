"""The reference trainer against plain SGD over the whole module, and what must not move."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import BoundModel, Derived, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import (
    Job,
    Trainable,
    Trained,
    click_loss,
    drawn,
    order,
    prepare,
)
from tessera.learning.training.local import Sequential, dropout_from
from tessera.learning.training.settings import LocalTraining

torch.set_num_threads(1)

ITEMS, KINDS, USERS, WIDTH = 20, 4, 6, 3
KIND_OF = np.arange(ITEMS) % KINDS
TABLES: Mapping[str, Any] = {
    "items.weight": Table("item", "history"),
    "kinds.weight": Derived("items.weight", KIND_OF, {"kind": "item"}),
    "users.weight": Local("user"),
}


class Toy(nn.Module):
    """Embeddings and one linear layer; `drop` for those who want dropout."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.users = nn.Embedding(USERS, WIDTH)
        self.score = nn.Linear(4 * WIDTH, 1)
        self.drop = nn.Dropout(drop)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history = batch["history"]  # (B, T)
        seen = self.items(history.clamp(min=0)) * (history >= 0).unsqueeze(-1)
        parts = (self.items(batch["item"]), self.kinds(batch["kind"]), self.users(batch["user"]))
        return self.score(self.drop(torch.cat((*parts, seen.sum(1)), -1))).squeeze(-1)


def coins_number(number: int) -> Secret:
    return Secret(number.to_bytes(32, "big"))


def toy(drop: float = 0.0) -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Toy(drop)


def made(seed: int, n: int = 11, user: int = 2) -> Examples:
    rng = np.random.default_rng(seed)
    return Examples(
        {
            "user": np.full(n, user),
            "item": rng.integers(0, ITEMS, n),
            "history": rng.integers(-1, ITEMS, (n, 3)),
            "label": rng.integers(0, 2, n).astype(np.float32),
        }
    )


def job_of(
    module: nn.Module,
    bound: BoundModel,
    examples: Examples,
    trained: np.ndarray | None = None,
    client: int = 2,
) -> Job:
    """Everything fetched; trained is what the examples touch, or the rows given."""
    rows = bound.row_ids_of(examples) if trained is None else {"items": trained}
    for name, to in bound.derived_maps().items():
        rows[name] = to.row_ids(rows[to.parent.name])
    parts = {
        table.name: TablePart(np.arange(table.rows, dtype=np.uint64), bound.initial(table.name))
        for table in bound.tables
    }
    local = {table.name: parts.pop(table.name) for table in bound.tables if table.local}
    return Job(
        client,
        Submodel(bound.pack(module), parts, rows),
        examples,
        local,
        coins=Secret(int(client).to_bytes(32, "big")),
    )


def trained_by(module: nn.Module, training: LocalTraining, job: Job, round_id: int = 3) -> Trained:
    bound = Tables(TABLES).bind(module)
    (outcome,) = Sequential(Trainable(module, bound, click_loss, training)).train(
        [job], round_id=round_id
    )
    return outcome


def by_hand(
    module: Toy, examples: Examples, training: LocalTraining, round_id: int
) -> tuple[Toy, float]:
    """Plain PyTorch over all rows: one optimiser, whole gradients, ids as they are."""
    model = copy.deepcopy(module)
    rate = training.rate * training.decay**round_id
    tables = [model.items.weight, model.kinds.weight, model.users.weight]
    optimizer = torch.optim.SGD(
        [
            {"params": model.score.parameters()},
            {"params": tables, "lr": rate * training.table_rate},
        ],
        lr=rate,
    )
    losses = []
    for epoch in range(training.epochs):
        which = order(coins_number(2), epoch, len(examples))
        for start in range(0, len(which), training.batch):
            part = examples.take(which[start : start + training.batch])
            batch = {name: torch.tensor(column) for name, column in part.fields.items()}
            batch["kind"] = torch.tensor(KIND_OF)[batch["item"]]
            loss = F.binary_cross_entropy_with_logits(
                model(batch), batch["label"], reduction="none"
            )
            optimizer.zero_grad()
            loss.mean().backward()
            if training.clip:
                nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            named = [torch.cat((batch["item"], batch["history"].flatten())), batch["kind"]]
            for table, ids in zip(tables, (*named, batch["user"]), strict=True):
                touched = ids[ids >= 0].unique()
                table.grad[touched] += training.weight_decay * table.detach()[touched]
            for dense in model.score.parameters():
                dense.grad += training.weight_decay * dense.detach()
            optimizer.step()
            losses += loss.tolist()
    return model, float(np.mean(losses))


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 14),
    training=st.builds(
        LocalTraining,
        batch=st.integers(1, 5),
        epochs=st.integers(1, 2),
        rate=st.sampled_from([0.05, 0.3]),
        decay=st.sampled_from([1.0, 0.9]),
        clip=st.sampled_from([0.0, 0.2, 50.0]),
        weight_decay=st.sampled_from([0.0, 0.1]),
        table_rate=st.sampled_from([1.0, 2.0]),
    ),
)
@settings(max_examples=40)
def test_training_a_submodel_equals_sgd_over_the_whole_module(
    seed: int, n: int, training: LocalTraining
) -> None:
    module, examples = toy(), made(seed, n)
    bound = Tables(TABLES).bind(module)
    job = job_of(module, bound, examples)
    outcome = trained_by(module, training, job)
    model, loss = by_hand(module, examples, training, round_id=3)
    close = {"rtol": 1e-4, "atol": 1e-5}
    assert_allclose(outcome.update.dense, bound.pack(model) - bound.pack(module), **close)
    for name in ("items", "kinds"):
        weight = model.get_parameter(f"{name}.weight").detach().numpy()
        moved = weight - bound.initial(name)
        rows = job.submodel.trained[name]
        assert_allclose(outcome.update.tables[name].values, moved[rows], **close)
        assert not np.delete(moved, rows, axis=0).any()  # so nothing is missing in the update
    assert_allclose(outcome.local["users"].values, model.users.weight.detach(), **close)
    assert outcome.loss == pytest.approx(loss, rel=1e-4)
    assert outcome.finite and outcome.examples == outcome.update.weight == n


@given(st.integers(0, 2**32))
@settings(max_examples=40)
def test_rows_no_kept_example_involves_do_not_move(seed: int) -> None:
    module, examples = toy(), made(seed)
    bound = Tables(TABLES).bind(module)
    rng = np.random.default_rng([seed, 1])
    trained = np.sort(rng.permutation(ITEMS)[: rng.integers(0, ITEMS)]).astype(np.uint64)
    job = job_of(module, bound, examples, trained)
    outcome = trained_by(module, LocalTraining(batch=2, weight_decay=0.1), job)
    kept = set(trained.tolist())
    counts, weight = dict.fromkeys(kept, 0), 0
    for item, history in zip(examples["item"], examples["history"].tolist(), strict=True):
        left = [i for i in history if i in kept]
        if int(item) in kept and (left or max(history) < 0):
            weight += 1
            for row in {int(item), *left}:
                counts[row] += 1
    update = outcome.update.tables["items"]
    assert update.values.shape == (trained.size, WIDTH)
    assert update.counts.tolist() == [counts[row] for row in trained.tolist()]
    assert_array_equal(update.values.any(axis=1), update.counts > 0)
    assert outcome.update.weight == outcome.examples == weight
    by_kind = outcome.update.tables["kinds"]
    assert_array_equal(by_kind.values.any(axis=1), by_kind.counts > 0)
    moved = outcome.local["users"].values != bound.initial("users")
    assert not np.delete(moved, 2, axis=0).any()
    assert moved[2].any() == (weight > 0)


def test_training_leaves_its_input_alone() -> None:
    module = toy()
    job = job_of(module, Tables(TABLES).bind(module), made(1))
    before = copy.deepcopy(job)
    weights = copy.deepcopy(module.state_dict())
    module.eval()
    trained_by(module, LocalTraining(), job)
    assert not module.training
    assert_array_equal(job.submodel.dense, before.submodel.dense)
    assert_array_equal(job.submodel.tables["items"].values, before.submodel.tables["items"].values)
    assert_array_equal(job.local["users"].values, before.local["users"].values)
    for name, value in module.state_dict().items():
        assert_array_equal(value, weights[name])


def test_read_only_examples_will_do() -> None:
    module, examples = toy(), made(1)
    for column in examples.fields.values():
        column.flags.writeable = False
    assert trained_by(
        module, LocalTraining(), job_of(module, Tables(TABLES).bind(module), examples)
    ).finite


def assert_zero(outcome: Trained, job: Job) -> None:
    assert outcome.update.weight == 0 and not outcome.update.dense.any()
    assert outcome.update.tables.keys() == {"items", "kinds"}
    for name, update in outcome.update.tables.items():
        assert update.values.shape == (job.submodel.trained[name].size, WIDTH)
        assert not update.values.any() and not update.counts.any()
    assert_array_equal(outcome.local["users"].values, job.local["users"].values)
    assert np.isnan(outcome.loss)


def poisoned_loss(bad: float, late: bool) -> Any:
    """Not finite for one example: its loss alone, or so large that parameters leave the floats."""

    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(output, batch["label"], reduction="none")
        if late:
            return losses * bad
        return losses + torch.where(batch["label"] == 0, bad, 0.0)

    return loss


@pytest.mark.parametrize(
    ("bad", "late"), [(float("nan"), False), (float("inf"), False), (3e38, True)]
)
def test_a_client_that_is_not_finite_gives_zeros(bad: float, late: bool) -> None:
    module = toy()
    bound = Tables(TABLES).bind(module)
    jobs = [job_of(module, bound, made(seed)) for seed in (1, 2)]
    learner = Sequential(Trainable(module, bound, poisoned_loss(bad, late), LocalTraining(batch=4)))
    for job, outcome in zip(jobs, learner.train(jobs, round_id=0), strict=True):
        assert not outcome.finite and outcome.examples == 11
        assert_zero(outcome, job)


def test_a_gradient_that_is_not_finite_is_seen_though_the_loss_is() -> None:
    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.sqrt(0.0 * output)  # 0, and its slope is 0 times infinity

    module = toy()
    bound = Tables(TABLES).bind(module)
    job = job_of(module, bound, made(1))
    learner = Sequential(Trainable(module, bound, loss, LocalTraining(batch=11)))
    (outcome,) = learner.train([job], round_id=0)
    assert not outcome.finite
    assert_zero(outcome, job)


def test_a_client_without_examples_left_gives_zeros() -> None:
    module = toy()
    bound = Tables(TABLES).bind(module)
    job = job_of(module, bound, made(1), trained=np.empty(0, np.uint64))
    outcome = trained_by(module, LocalTraining(), job)
    assert outcome.finite and outcome.examples == 0
    assert_zero(outcome, job)


def test_a_sequence_that_is_always_empty_needs_no_row() -> None:
    class Histories(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(ITEMS, 1)
            self.score = nn.Linear(1, 1)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            known = (batch["history"] >= 0).unsqueeze(-1)
            seen = self.items(batch["history"].clamp(min=0)) * known
            return self.score(seen.sum(1)).squeeze(-1)

    module = Histories()
    bound = Tables({"items.weight": Table("history")}).bind(module)
    examples = Examples({"history": np.full((3, 2), -1), "label": np.ones(3, np.float32)})
    job = job_of(module, bound, examples, trained=np.array([4, 5], np.uint64))
    learner = Sequential(Trainable(module, bound, click_loss, LocalTraining()))
    (outcome,) = learner.train([job], round_id=0)
    assert outcome.update.weight == 3 and outcome.update.dense.any()
    assert not outcome.update.tables["items"].values.any()
    assert not outcome.update.tables["items"].counts.any()


def test_a_module_without_tables_and_with_its_own_loss_is_trained() -> None:
    class Classifier(nn.Linear):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["x"])

    module = Classifier(2, 3)
    bound = Tables({}).bind(module)
    rng = np.random.default_rng(0)
    examples = Examples(
        {"x": rng.normal(size=(40, 2)).astype(np.float32), "kind": rng.integers(0, 3, 40)}
    )

    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["kind"], reduction="none")

    learner = Sequential(Trainable(module, bound, loss, LocalTraining(batch=40, rate=0.5)))
    job = Job(0, Submodel(bound.pack(module), {}, {}), examples, coins=Secret(bytes(32)))
    (outcome,) = learner.train([job], round_id=0)
    x, kind = torch.tensor(examples["x"]), torch.tensor(examples["kind"])
    F.cross_entropy(nn.Linear.forward(module, x), kind).backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    assert_allclose(outcome.update.dense, -0.5 * gradient, rtol=1e-4, atol=1e-6)


def test_dropout_follows_from_the_coins_and_leaves_no_trace() -> None:
    module = toy(drop=0.5)
    bound = Tables(TABLES).bind(module)
    examples = made(3)
    learner = Sequential(Trainable(module, bound, click_loss, LocalTraining(batch=11)))

    def dense(client: int, coins: int) -> np.ndarray:
        job = replace(job_of(module, bound, examples, client=client), coins=coins_number(coins))
        return learner.train([job], round_id=0)[0].update.dense

    state = torch.get_rng_state()
    first = dense(1, 0)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    assert_array_equal(dense(1, 0), first)
    # One batch of all: only what was dropped can differ by more than rounding.
    assert np.abs(dense(1, 1) - first).max() > 1e-3


def test_nothing_that_is_drawn_follows_from_the_clients_number() -> None:
    module = toy(drop=0.5)
    bound = Tables(TABLES).bind(module)
    learner = Sequential(Trainable(module, bound, click_loss, LocalTraining(batch=3, epochs=2)))
    job = job_of(module, bound, made(3), client=1)
    other = replace(job, client=7)
    one, two = learner.train([job, other], round_id=4)
    assert_array_equal(one.update.dense, two.update.dense)


def test_dropout_draws_from_a_state_that_is_drawn_whole() -> None:
    """An independent Mersenne Twister with the same 624 words gives what torch then gives."""
    coins = coins_number(5)
    words = CoinStream(Stream.of(coins, Label.DROPOUT_MASKS)).words(624)
    twister = np.random.MT19937()
    key = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 624}}
    with dropout_from(coins):
        found = torch.rand(1000) * 2**24
    assert_array_equal(found.numpy(), twister.random_raw(1000) % 2**24)


def test_clients_do_not_depend_on_each_other() -> None:
    module = toy(drop=0.3)
    bound = Tables(TABLES).bind(module)
    jobs = [job_of(module, bound, made(seed), client=seed) for seed in range(4)]
    learner = Sequential(Trainable(module, bound, click_loss, LocalTraining(batch=3)))
    together = learner.train(jobs, round_id=1)
    for job, outcome in zip(reversed(jobs), reversed(together), strict=True):
        (alone,) = learner.train([job], round_id=1)
        assert_array_equal(alone.update.dense, outcome.update.dense)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, batch: output.mean(), r"shape \(\) for"),
        (lambda output, batch: output.detach(), "does not depend"),
    ],
)
def test_a_loss_that_cannot_work_is_refused(loss: Any, message: str) -> None:
    module = toy()
    bound = Tables(TABLES).bind(module)
    with pytest.raises(ConfigError, match=message) as caught:
        job = job_of(module, bound, made(1))
        Sequential(Trainable(module, bound, loss, LocalTraining())).train([job], round_id=0)
    assert caught.value.hint


def test_a_job_that_lacks_rows_is_a_bug_of_the_caller() -> None:
    module = toy()
    bound = Tables(TABLES).bind(module)
    job = job_of(module, bound, made(1))
    with pytest.raises(MisuseError, match="'users' is missing"):
        prepare(bound, Job(2, job.submodel, job.examples, coins=Secret(bytes(32))))
    short = {**job.submodel.tables, "items": TablePart(np.empty(0, np.uint64), np.empty((0, 3)))}
    with pytest.raises(MisuseError, match="not fetched"):
        prepare(
            bound,
            Job(
                2,
                Submodel(job.submodel.dense, short, job.submodel.trained),
                job.examples,
                job.local,
                coins=Secret(bytes(32)),
            ),
        )


def test_the_order_of_examples_is_a_shuffle_of_its_own_for_each_pass() -> None:
    first = order(coins_number(1), 0, 50)
    assert sorted(first.tolist()) == list(range(50))
    assert_array_equal(order(coins_number(1), 0, 50), first)
    for coins, epoch in ((0, 0), (1, 1)):
        assert order(coins_number(coins), epoch, 50).tolist() != first.tolist()


def test_a_part_of_the_examples_is_drawn_anew_with_the_coins_of_each_round() -> None:
    examples = Examples({"item": np.arange(50), "label": np.zeros(50, np.float32)})
    first = drawn(examples, 20, coins_number(1))["item"]
    assert len(first) == len(set(first.tolist())) == 20
    assert_array_equal(drawn(examples, 20, coins_number(1))["item"], first)
    assert set(drawn(examples, 20, coins_number(2))["item"].tolist()) != set(first.tolist())
    often = [drawn(examples, 20, coins_number(r))["item"] for r in range(200)]
    counts = np.bincount(np.concatenate(often), minlength=50)  # 80 each, deviation 6.9
    assert counts.min() > 40 and counts.max() < 120
    for most in (0, 50, 99):
        assert drawn(examples, most, coins_number(1)) is examples
