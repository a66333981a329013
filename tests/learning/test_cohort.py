"""A cohort trained side by side: the same as one by one, for modules of every kind, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.learning.bound_model import BoundModel, Derived, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable, Trained, click_loss
from tessera.learning.training.local import Sequential
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised import learner as learner_module
from tessera.learning.training.vectorised import step as step_module
from tessera.learning.training.vectorised.check import best
from tessera.learning.training.vectorised.learner import Vectorised

ITEMS, CATEGORIES, USERS, WIDTH, LENGTH = 60, 7, 40, 4, 8
CATEGORY_OF = np.arange(ITEMS) * 5 % CATEGORIES

# --- Modules and cohorts --------------------------------------------------------------------------


class Clicks(nn.Module):
    """Items, their categories, a history and a user: every kind of table there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.bias = nn.Embedding(ITEMS, 1)
        self.categories = nn.Embedding(CATEGORIES, WIDTH)
        self.users = nn.Embedding(USERS, WIDTH)
        self.first = nn.Linear(4 * WIDTH + 1, 6)
        self.last = nn.Linear(6, 1)

    def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
        history = batch["history"]
        rows = self.items(history.clamp(min=0)) + self.categories(
            batch["history_category"].clamp(min=0)
        )
        there = history.ge(0).unsqueeze(-1).to(rows.dtype)
        return (rows * there).sum(-2) / there.sum(-2).clamp(min=1.0)

    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        parts = (
            self.items(batch["item"]),
            self.categories(batch["category"]),
            self.users(batch["user"]),
            self.pooled(batch),
            batch["rate"].unsqueeze(-1),
        )
        return torch.tanh(self.first(torch.cat(parts, -1)))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logit = self.last(self.features(batch)) + self.bias(batch["item"])
        return logit.squeeze(-1)


class WithDropout(Clicks):
    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.dropout(super().features(batch), 0.5, self.training)


class WithItem(Clicks):
    """Reads a number out of a tensor, which differs from client to client."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().forward(batch) * (1.0 if batch["rate"].sum().item() > 0 else 2.0)


class WithBooleanIndex(Clicks):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        known = batch["history"][batch["history"] >= 0]
        return super().forward(batch) + self.items(known).sum() * 0.1


class WithBatchStatistics(Clicks):
    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = super().features(batch)
        return x - x.mean(0)


class WithoutMask(Clicks):
    """Takes row 0 for every id that is not there."""

    def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.items(batch["history"].clamp(min=0)).mean(-2)


class WithPositions(Clicks):
    """Weights one per place in the history: its length must be the full one."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.linspace(0.5, 1.5, LENGTH))

    def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
        history = batch["history"]
        there = history.ge(0).to(self.place.dtype) * self.place
        return (self.items(history.clamp(min=0)) * there.unsqueeze(-1)).sum(-2)


def bind(module: nn.Module) -> BoundModel:
    return Tables(
        {
            "items.weight": Table("item", "history"),
            "bias.weight": Table("item"),
            "categories.weight": Derived(
                "items.weight", CATEGORY_OF, {"category": "item", "history_category": "history"}
            ),
            "users.weight": Local("user"),
        }
    ).bind(module)


def examples(client: int, n: int, *, longest: int = LENGTH) -> Examples:
    rng = np.random.default_rng([7, client])
    own = rng.choice(ITEMS, 12, replace=False)
    history = rng.choice(own, (n, LENGTH))
    history[np.arange(LENGTH) >= rng.integers(0, longest + 1, n)[:, None]] = -1
    return Examples(
        {
            "user": np.full(n, client % USERS),
            "item": rng.choice(own, n),
            "history": history,
            "rate": rng.random(n, dtype=np.float32),
            "label": rng.integers(0, 2, n).astype(np.float32),
        }
    )


def job(module: nn.Module, bound: BoundModel, client: int, of: Examples) -> Job:
    rows = bound.all_row_ids_of(of)
    parts = {name: TablePart(ids, bound.initial(name)[ids]) for name, ids in rows.items()}
    users = parts.pop("users")
    trained = {name: part.ids for name, part in parts.items()}
    return Job(
        client,
        Submodel(bound.pack(module), parts, trained),
        of,
        {"users": users},
        coins=Secret(int(client).to_bytes(32, "big")),
    )


def cohort(
    module: nn.Module, sizes: Sequence[int], *, longest: int = LENGTH
) -> tuple[BoundModel, list[Job]]:
    bound = bind(module)
    return bound, [
        job(module, bound, client, examples(client, n, longest=longest))
        for client, n in enumerate(sizes)
    ]


def assert_same(found: Sequence[Trained], expected: Sequence[Trained]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.examples, one.finite, one.update.weight) == (
            other.examples,
            other.finite,
            other.update.weight,
        )
        assert_allclose(one.loss, other.loss, rtol=1e-5)
        assert_allclose(one.update.dense, other.update.dense, rtol=1e-4, atol=1e-6)
        assert one.update.tables.keys() == other.update.tables.keys()
        for name, update in other.update.tables.items():
            assert_allclose(one.update.tables[name].values, update.values, rtol=1e-4, atol=1e-6)
            assert_array_equal(one.update.tables[name].counts, update.counts)
        for name, part in other.local.items():
            assert_array_equal(one.local[name].ids, part.ids)
            assert_allclose(one.local[name].values, part.values, rtol=1e-4, atol=1e-6)


SIZES = (9, 0, 1, 30, 2, 7, 5, 3)
TRAINING = LocalTraining(batch=2, rate=0.2, decay=0.5)

# --- The same as one by one -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(TRAINING, id="plain"),
        pytest.param(replace(TRAINING, batch=4), id="odd counts"),
        pytest.param(replace(TRAINING, batch=64), id="a batch larger than any client"),
        pytest.param(replace(TRAINING, clip=0.05), id="clip"),
        pytest.param(replace(TRAINING, clip=3.0), id="a clip that hardly binds"),
        pytest.param(replace(TRAINING, weight_decay=0.3), id="weight decay"),
        pytest.param(replace(TRAINING, clip=0.1, weight_decay=0.1, batch=3), id="both"),
        pytest.param(replace(TRAINING, epochs=3), id="epochs"),
        pytest.param(replace(TRAINING, table_rate=4.0), id="table rate"),
    ],
)
def test_side_by_side_trains_as_one_by_one_does(training: LocalTraining) -> None:
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    learner = Vectorised(Trainable(module, bound, click_loss, training), slots=3)
    expected = Sequential(Trainable(module, bound, click_loss, training)).train(jobs, round_id=2)
    assert_same(learner.train(jobs, round_id=2), expected)
    assert max(np.abs(t.update.dense).max() for t in expected) > 1e-3  # something was learnt


@pytest.mark.parametrize("slots", [1, 2, 7, 50])
def test_the_number_of_slots_does_not_matter(slots: int) -> None:
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    found = Vectorised(Trainable(module, bound, click_loss, TRAINING), slots=slots)
    assert_same(found.train(jobs, round_id=0), expected)


def test_clients_laid_out_in_portions_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    monkeypatch.setattr(learner_module, "AT_ONCE", 500)
    learner = Vectorised(Trainable(module, bound, click_loss, TRAINING), slots=2)
    assert_same(learner.train(jobs, round_id=0), expected)


def test_only_trained_rows_count_and_cover_rows_stay() -> None:
    module = Clicks()
    bound, jobs = cohort(module, (12, 11, 10))
    kept = []
    for each in jobs:
        items = each.submodel.trained["items"][::2]
        fewer = {
            "items": items,
            "bias": items,
            "categories": bound.derived_maps()["categories"].row_ids(items),
        }
        kept.append(replace(each, submodel=replace(each.submodel, trained=fewer)))
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(kept, round_id=0)
    found = Vectorised(Trainable(module, bound, click_loss, TRAINING)).train(kept, round_id=0)
    assert_same(found, expected)
    assert any(0 < t.examples < len(j.examples) for t, j in zip(found, kept, strict=True))


def test_a_loss_of_ones_own() -> None:
    def squared(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (output - batch["rate"]).square()

    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    learner = best(Trainable(module, bound, squared, TRAINING), sample=jobs, compile=False)
    assert learner.name == "vectorised", learner.reason
    expected = Sequential(Trainable(module, bound, squared, TRAINING)).train(jobs, round_id=0)
    assert_same(learner.train(jobs, round_id=0), expected)


def test_short_histories_are_not_padded_to_the_full_length() -> None:
    seen: list[int] = []

    class Watching(Clicks):
        def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
            seen.append(batch["history"].shape[-1])
            return super().pooled(batch)

    module = Watching()
    bound, jobs = cohort(module, (6, 5), longest=3)
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    seen.clear()
    found = Vectorised(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    assert_same(found, expected)
    assert set(seen) == {4}  # 3 rounded up to a quarter of 8


def test_a_sequence_is_not_cut_where_another_column_goes_with_it() -> None:
    class Fading(Clicks):
        """Weighs its history by how long ago each entry was."""

        def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
            rows = self.items(batch["history"].clamp(min=0))
            there = batch["history"].ge(0) * batch["age"]
            return (rows * there.unsqueeze(-1)).sum(-2)

    module = Fading()
    bound, jobs = cohort(module, (6, 5, 4), longest=3)
    rng = np.random.default_rng(1)
    for at, each in enumerate(jobs):
        age = rng.random((len(each.examples), LENGTH), dtype=np.float32)
        jobs[at] = replace(each, examples=each.examples.with_field("age", age))
    learner = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs, compile=False)
    assert learner.name == "vectorised", learner.reason
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    assert_same(learner.train(jobs, round_id=0), expected)
    assert "full length" not in learner.reason  # nothing had to be tried first


def test_sequences_of_different_lengths_meet_in_one_cohort() -> None:
    module = Clicks()
    bound, jobs = cohort(module, (6, 5, 4), longest=5)
    short = jobs[1].examples.with_field("history", jobs[1].examples["history"][:, :5])
    jobs[1] = replace(jobs[1], examples=short)
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    found = Vectorised(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    assert_same(found, expected)


def test_nobody_with_examples_gives_nothing() -> None:
    module = Clicks()
    bound, jobs = cohort(module, (0, 0))
    learner = Vectorised(Trainable(module, bound, click_loss, TRAINING))
    assert [t.update.weight for t in learner.train(jobs, round_id=0)] == [0, 0]
    assert learner.train([], round_id=0) == []


# --- What must not spread -------------------------------------------------------------------------


def test_a_client_whose_loss_is_not_finite_does_not_touch_the_others() -> None:
    module = Clicks()
    training = replace(TRAINING, clip=0.1, weight_decay=0.01)
    bound, jobs = cohort(module, SIZES)
    bad = jobs[3].examples["rate"].copy()
    bad[4] = np.nan
    jobs[3] = replace(jobs[3], examples=jobs[3].examples.with_field("rate", bad))
    expected = Sequential(Trainable(module, bound, click_loss, training)).train(jobs, round_id=0)
    # Two slots: whoever follows the bad client gets its place.
    found = Vectorised(Trainable(module, bound, click_loss, training), slots=2).train(
        jobs, round_id=0
    )
    assert [t.finite for t in found] == [at != 3 for at in range(len(jobs))]
    assert not found[3].update.dense.any() and found[3].update.weight == 0
    assert_same(found, expected)


def test_training_leaves_the_module_the_jobs_and_torch_as_they_were() -> None:
    module = Clicks().eval()
    bound, jobs = cohort(module, SIZES)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    dense = jobs[0].submodel.dense.copy()
    rows = jobs[0].submodel.tables["items"].values.copy()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    learner = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs, compile=False)
    learner.train(jobs, round_id=0)
    assert not module.training
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert_array_equal(jobs[0].submodel.dense, dense)
    assert_array_equal(jobs[0].submodel.tables["items"].values, rows)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert float(torch.tensor([1e-40]) * 1.0) > 0  # denormals are numbers again


def test_the_same_jobs_and_coins_give_the_same_bits() -> None:
    module = WithDropout()
    bound, jobs = cohort(module, SIZES)
    learner = Vectorised(Trainable(module, bound, click_loss, replace(TRAINING, batch=64)), slots=3)
    others = [replace(job, coins=job.coins.derive("other")) for job in jobs]
    one, again, other = (learner.train(each, round_id=0) for each in (jobs, jobs, others))
    for a, b in zip(one, again, strict=True):
        assert_array_equal(a.update.dense, b.update.dense)
    # A client with one example has but one order: what differs there is what dropout draws.
    assert one[2].examples == 1
    assert not np.allclose(one[2].update.dense, other[2].update.dense, rtol=1e-2)


# --- The choice, and what is said about it --------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(WithItem, ".item()", id="item"),
        pytest.param(WithBooleanIndex, "vmap", id="boolean index"),
        pytest.param(WithBatchStatistics, "statistics of the batch", id="batch statistics"),
        pytest.param(WithoutMask, "without masking", id="no mask"),
    ],
)
def test_a_module_that_cannot_go_side_by_side_goes_one_by_one_and_says_why(
    make: Callable[[], nn.Module], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    module = make()
    training = replace(TRAINING, batch=4)
    bound, jobs = cohort(module, SIZES)
    learner = best(Trainable(module, bound, click_loss, training), sample=jobs)
    assert learner.name == "one by one"
    assert why in learner.reason
    assert "\n" not in learner.reason
    expected = Sequential(Trainable(module, bound, click_loss, training)).train(jobs, round_id=0)
    assert_same(learner.train(jobs, round_id=0), expected)
    assert capfd.readouterr() == ("", "")


def test_a_module_that_needs_the_full_length_gets_it() -> None:
    module = WithPositions()
    bound, jobs = cohort(module, SIZES, longest=3)
    learner = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs, compile=False)
    assert learner.name == "vectorised"
    assert "full length" in learner.reason
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    assert_same(learner.train(jobs, round_id=0), expected)


def test_dropout_goes_side_by_side_with_draws_of_its_own_for_each_client() -> None:
    module = WithDropout()
    bound, jobs = cohort(module, (8,))
    learner = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs, compile=False)
    assert learner.name == "vectorised"
    assert "random" in learner.reason
    # Two clients with the same number, examples and weights differ by nothing but what they draw.
    one, twin = learner.train([jobs[0], jobs[0]], round_id=0)
    assert one.finite and twin.finite
    assert (one.update.dense != twin.update.dense).any()


def test_without_an_example_nothing_faster_is_tried() -> None:
    module = Clicks()
    bound, jobs = cohort(module, (0,))
    for sample in ([], jobs):
        learner = best(Trainable(module, bound, click_loss, TRAINING), sample=sample)
        assert learner.name == "one by one"
        assert "no example" in learner.reason


def test_where_compiling_fails_the_step_is_used_uncompiled(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refusing(*_: object, **__: object) -> Callable[..., object]:
        def call(*_: object, **__: object) -> object:
            raise RuntimeError("no compiler on this machine\nand much more")

        return call

    monkeypatch.setattr(step_module.torch, "compile", refusing)
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    learner = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs, slots=3)
    assert learner.name == "vectorised"
    assert "no compiler on this machine" in learner.reason
    assert "much more" not in learner.reason
    # And where it fails only later, for another shape, the round goes on all the same.
    late = Vectorised(Trainable(module, bound, click_loss, TRAINING), compile=True, slots=3)
    expected = Sequential(Trainable(module, bound, click_loss, TRAINING)).train(jobs, round_id=0)
    assert_same(late.train(jobs, round_id=0), expected)
    assert "not compiled for 3 slots" in late.reason
    assert capfd.readouterr() == ("", "")


def test_a_step_that_compiles_to_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(step: Callable[..., object], **_: object) -> Callable[..., object]:
        def call(dense: dict[str, Tensor], *rest: object) -> object:
            done = step(dense, *rest)
            dense["first.bias"] += 0.01
            return done

        return call

    monkeypatch.setattr(step_module.torch, "compile", wrong)
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    learner = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs, slots=3)
    assert learner.name == "vectorised"
    assert "it then trains differently" in learner.reason


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="no C++ compiler for torch.compile",
)
@pytest.mark.parametrize("make", [Clicks, WithDropout])
def test_a_compiled_step_trains_as_one_by_one_does(make: Callable[[], nn.Module]) -> None:
    module = make()
    training = replace(TRAINING, clip=0.1, weight_decay=0.1)
    bound, jobs = cohort(module, (5, 0, 1, 40, 2, 7))
    learner = best(Trainable(module, bound, click_loss, training), sample=jobs, slots=4)
    assert learner.name == "compiled", learner.reason
    # The long client is left alone at the end: both shapes are used.
    found = learner.train(jobs, round_id=1)
    again = learner.train(jobs, round_id=1)
    for one, other in zip(found, again, strict=True):
        assert_array_equal(one.update.dense, other.update.dense)
    if make is Clicks:
        expected = Sequential(Trainable(module, bound, click_loss, training)).train(
            jobs, round_id=1
        )
        assert_same(found, expected)
    assert "not compiled" not in learner.reason
