"""Training with noise: the vectorised way against the reference, and both against what is claimed.

Statistics have fixed secrets, and say how often they would fail by chance.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn

from tessera.crypto.noise import DEVIATION
from tessera.crypto.prg import CoinStream, Stream
from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables.submodel import ModelUpdate, TableUpdate
from tessera.learning.training.jobs import Job, PreparedJob, Trainable, Trained, click_loss
from tessera.learning.training.local import NoisySequential
from tessera.learning.training.noisy_steps import (
    EachExample,
    NoisyClient,
    NoisySteps,
    StepBatch,
    at_hand,
)
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised import noisy as vectorised
from tessera.learning.training.vectorised import step as step_module
from tessera.learning.training.vectorised.check import best_noisy
from tessera.learning.training.vectorised.noisy import NoisyVectorised
from tessera.rounds.clipped_vector import clipped_update, noisy_update
from tessera.runs.client_training import Trainer, choose_noisy
from tests.learning.test_cohort import Clicks, WithBatchStatistics, cohort, examples, job

SIZES = (9, 0, 1, 30, 2, 7)
TRAINING = LocalTraining(batch=4, rate=0.2, table_rate=3.0)
NOISY = NoisySteps(clip=0.3, noise=0.8, steps=5, batch=4, drawing=EachExample(0.4))


def with_secrets(jobs: Sequence[Job], first: int = 0) -> list[Job]:
    return [
        replace(job, coins=Secret((first + at).to_bytes(32, "little")))
        for at, job in enumerate(jobs)
    ]


class InThrees:
    """Groups of three examples, as a person's would be."""

    def __call__(self, prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        which = np.flatnonzero(coins.heads(prepared.examples, 0.6))
        return StepBatch.grouped(which, which // 3)


class Nobody:
    def __call__(self, prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        return StepBatch(np.empty(0, np.int64), np.empty(0, np.int64))


class Everybody:
    def __call__(self, prepared: PreparedJob, coins: CoinStream) -> StepBatch:
        return StepBatch(np.arange(prepared.examples), np.arange(prepared.examples))


def parts_of(trained: Trained) -> list[np.ndarray]:
    tables = [trained.update.tables[name].values for name in sorted(trained.update.tables)]
    local = [trained.local[name].values for name in sorted(trained.local)]
    return [trained.update.dense, *tables, *local]


def assert_alike(found: Sequence[Trained], expected: Sequence[Trained], atol: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.examples, one.finite, one.update.weight, one.not_finite) == (
            other.examples,
            other.finite,
            other.update.weight,
            other.not_finite,
        )
        assert_allclose(one.loss, other.loss, rtol=1e-4)
        for a, b in zip(parts_of(one), parts_of(other), strict=True):
            assert_allclose(a, b, rtol=1e-3, atol=atol)


# --- both ways ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawing", [EachExample(0.4), EachExample(1.0), InThrees(), Nobody()])
@pytest.mark.parametrize("at_once", [1 << 22, 700])
def test_all_groups_at_once_train_as_one_by_one(
    drawing: object, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch takes several passes."""
    monkeypatch.setattr(vectorised, "AT_ONCE", at_once)
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    noisy = replace(NOISY, drawing=drawing)
    slow = NoisySequential(Trainable(module, bound, click_loss, TRAINING), noisy)
    fast = NoisyVectorised(Trainable(module, bound, click_loss, TRAINING), noisy)
    jobs = with_secrets(jobs)
    expected = slow.train(jobs, round_id=2)
    found = fast.train(jobs, round_id=2)
    # A value may be cut to the integer beside, in each step and group.
    assert_alike(found, expected, atol=40 * noisy.unit * TRAINING.rate * TRAINING.table_rate)


def test_the_self_check_takes_the_fast_way_where_it_is_right() -> None:
    module = Clicks()
    bound, jobs = cohort(module, (9, 6, 7))
    found = best_noisy(Trainable(module, bound, click_loss, TRAINING), NOISY, sample=jobs)
    assert isinstance(found, NoisyVectorised) and "as one by one" in found.reason


def test_the_self_check_sees_a_module_that_looks_across_a_group() -> None:
    """Alone each example is its own mean: its features vanish; in a filled-up group they do not."""
    module = WithBatchStatistics()
    bound, jobs = cohort(module, (9, 6, 7))
    noisy = replace(NOISY, drawing=InThrees())
    found = best_noisy(Trainable(module, bound, click_loss, TRAINING), noisy, sample=jobs)
    assert isinstance(found, NoisySequential) and "differently" in found.reason


def as_it_is(step: Callable[..., object], **_: object) -> Callable[..., object]:
    """In place of `torch.compile`: the step in its fixed shapes, as it is."""
    return step


@pytest.mark.parametrize("drawing", [EachExample(0.4), EachExample(1.0), InThrees(), Nobody()])
@pytest.mark.parametrize("at_once", [1 << 22, 20_000, 700])
def test_fixed_shapes_train_as_one_by_one(
    drawing: object, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups, examples and clients that only fill up count for nothing."""
    monkeypatch.setattr(vectorised, "AT_ONCE", at_once)
    shapes = set()

    def noting(step: Callable[..., object], **_: object) -> Callable[..., object]:
        def call(*tensors: object) -> object:
            *parts, weights, _ = tensors
            every = (x for part in parts for x in part.values())  # type: ignore[attr-defined]
            shapes.add(tuple((tuple(x.shape), x.stride()) for x in (*every, weights)))
            return step(*tensors)

        return call

    monkeypatch.setattr(step_module.torch, "compile", noting)
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    noisy = replace(NOISY, drawing=drawing)
    jobs = with_secrets(jobs)
    expected = NoisySequential(Trainable(module, bound, click_loss, TRAINING), noisy).train(
        jobs, round_id=2
    )
    fixed = NoisyVectorised(Trainable(module, bound, click_loss, TRAINING), noisy, compile=True)
    found = fixed.train(jobs, round_id=2)
    assert_alike(found, expected, atol=40 * noisy.unit * TRAINING.rate * TRAINING.table_rate)
    if isinstance(drawing, EachExample):
        assert len(shapes) == 1  # strides too: whatever is drawn, nothing is compiled again
    assert len(shapes) <= 3  # groups of 1, 2 and 4


def test_what_is_compiled_with_little_noise_trains_with_the_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of the comparison's noise stays in what was made for it."""
    monkeypatch.setattr(step_module.torch, "compile", as_it_is)
    module = Clicks()
    bound, jobs = cohort(module, (9, 6, 7))
    found = best_noisy(
        Trainable(module, bound, click_loss, TRAINING), NOISY, sample=jobs, compile=True
    )
    assert found.name == "compiled, with noise", found.reason
    jobs = with_secrets(jobs)
    slow = NoisySequential(Trainable(module, bound, click_loss, TRAINING), NOISY)
    assert_alike(
        found.train(jobs, round_id=2),
        slow.train(jobs, round_id=2),
        atol=40 * NOISY.unit * TRAINING.rate * TRAINING.table_rate,
    )


def test_a_noisy_step_that_does_not_compile_or_to_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Clicks()
    bound, jobs = cohort(module, (9, 6, 7))

    def refusing(*_: object, **__: object) -> Callable[..., object]:
        def call(*_: object) -> object:
            raise RuntimeError("no compiler on this machine")

        return call

    def without_the_cut(step: Callable[..., Any], **_: object) -> Callable[..., object]:
        def call(*tensors: Any) -> object:
            total, *rest = step(*tensors)
            return (total * 2, *rest)

        return call

    for compiler, why in (
        (refusing, "no compiler on this machine"),
        (without_the_cut, "trains differently"),
    ):
        monkeypatch.setattr(step_module.torch, "compile", compiler)
        found = best_noisy(
            Trainable(module, bound, click_loss, TRAINING), NOISY, sample=jobs, compile=True
        )
        assert found.name == "vectorised, with noise"
        assert "as one by one" in found.reason and why in found.reason


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="no C++ compiler for torch.compile",
)
def test_a_compiled_noisy_step_trains_as_one_by_one_and_leaves_out_what_is_not_finite() -> None:
    module = Clicks()
    bound, jobs = cohort(module, (9, 6, 7))
    found = best_noisy(
        Trainable(module, bound, click_loss, TRAINING), NOISY, sample=jobs, compile=True
    )
    assert found.name == "compiled, with noise", found.reason
    broken = dict(jobs[0].examples.fields)
    broken["rate"] = broken["rate"].copy()
    broken["rate"][4] = np.nan
    jobs = with_secrets([replace(jobs[0], examples=Examples(broken)), *jobs[1:]])
    slow = NoisySequential(Trainable(module, bound, click_loss, TRAINING), NOISY).train(
        jobs, round_id=2
    )
    fast = found.train(jobs, round_id=2)
    assert fast[0].not_finite == slow[0].not_finite > 0
    atol = 40 * NOISY.unit * TRAINING.rate * TRAINING.table_rate
    for one, other in zip(fast, slow, strict=True):
        for a, b in zip(parts_of(one), parts_of(other), strict=True):
            assert_allclose(a, b, rtol=1e-3, atol=atol)
    assert "not compiled" not in found.reason


def test_the_same_secret_gives_the_same_bits_and_another_does_not() -> None:
    module = Clicks()
    bound, jobs = cohort(module, (9, 6))
    fast = NoisyVectorised(Trainable(module, bound, click_loss, TRAINING), NOISY)
    one, again = (fast.train(with_secrets(jobs), round_id=0) for _ in range(2))
    other = fast.train(with_secrets(jobs, first=9), round_id=0)
    for a, b, c in zip(one, again, other, strict=True):
        for x, y, z in zip(parts_of(a), parts_of(b), parts_of(c), strict=True):
            assert_array_equal(x, y)
            assert not np.array_equal(x, z)


# --- sensitivity ----------------------------------------------------------------------------------


def sums_of(module: nn.Module, which: np.ndarray, *, clip: float = 0.3) -> np.ndarray:
    """What the groups of a full batch of these examples give, in the clip's own measure."""
    collected: list[np.ndarray] = []

    class Collecting(NoisyClient):
        def take(self, dense, rows) -> None:  # type: ignore[no-untyped-def]
            full = [dense.numpy().astype(np.float64)]
            for name, values in self.rows.items():
                whole = np.zeros(values.shape)
                touched, sums = rows[name]
                whole[touched] = sums.numpy()
                full.append(whole.ravel())
            collected.append(np.concatenate(full) * self.noisy.unit)
            super().take(dense, rows)

    bound, (one,) = cohort(module, (12,))
    noisy = replace(NOISY, clip=clip, noise=0.01, steps=1, drawing=Everybody())
    learner = NoisySequential(Trainable(module, bound, click_loss, TRAINING), noisy)
    (secret,) = with_secrets([one])
    kept = replace(secret, examples=secret.examples.take(which))
    prepared = at_hand(bound, kept)
    client = Collecting(
        prepared,
        TRAINING,
        noisy,
        round_id=0,
        dense=torch.from_numpy(np.array(kept.submodel.dense)),
        rows={n: torch.from_numpy(np.array(v)) for n, v in prepared.values.items()},
    )
    learner.step(client)
    return collected[0]


def test_one_example_more_moves_the_sums_by_the_clip_at_most() -> None:
    module = Clicks()
    every = np.arange(12)
    whole = sums_of(module, every)
    lengths = [
        float(np.linalg.norm(whole - sums_of(module, every[every != left]))) for left in range(12)
    ]
    assert max(lengths) <= 0.3
    assert max(lengths) > 0.29  # and the clip does cut


def test_an_id_that_is_repeated_adds_up_before_the_norm() -> None:
    """Eight times one item: its row's gradient is that of all eight, in both ways."""
    module = Clicks()
    bound, _ = cohort(module, (3,))
    one = examples(5, 3)
    one.fields["history"][:] = one["item"][:, None]
    jobs = with_secrets([job(module, bound, 5, one)])
    noisy = replace(NOISY, noise=0.01, steps=2, drawing=EachExample(1.0))
    slow = NoisySequential(Trainable(module, bound, click_loss, TRAINING), noisy).train(
        jobs, round_id=0
    )
    fast = NoisyVectorised(Trainable(module, bound, click_loss, TRAINING), noisy).train(
        jobs, round_id=0
    )
    assert_alike(fast, slow, atol=1e-4)


def test_what_is_sent_does_not_count_examples() -> None:
    module = Clicks()
    bound, jobs = cohort(module, SIZES)
    fast = NoisyVectorised(Trainable(module, bound, click_loss, TRAINING), NOISY)
    for trained, job_ in zip(fast.train(with_secrets(jobs), round_id=0), jobs, strict=True):
        assert trained.update.weight == 1
        for name, part in trained.update.tables.items():
            assert len(part.counts) == len(job_.submodel.trained[name])
            assert (part.counts == 1).all()


def test_an_example_without_a_finite_gradient_is_left_out_alone() -> None:
    module = Clicks()
    bound, (one,) = cohort(module, (9,))
    broken = dict(one.examples.fields)
    broken["rate"] = broken["rate"].copy()
    broken["rate"][4] = np.nan
    noisy = replace(NOISY, steps=1, drawing=Everybody())
    without = np.delete(np.arange(9), 4)
    jobs = with_secrets([replace(one, examples=Examples(broken))])
    for learner in (
        NoisySequential(Trainable(module, bound, click_loss, TRAINING), noisy),
        NoisyVectorised(Trainable(module, bound, click_loss, TRAINING), noisy),
    ):
        (found,) = learner.train(jobs, round_id=0)
        (expected,) = learner.train(
            [replace(jobs[0], examples=one.examples.take(without))], round_id=0
        )
        assert found.finite and found.not_finite == 1
        assert_allclose(found.update.dense, expected.update.dense, atol=1e-6)


class Fails(Clicks):
    """Raises where a rate is beyond 1, as a check inside a module would."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rate = torch.as_tensor(batch["rate"])
        return super().forward(batch | {"rate": looked_at(rate)})


class Looked(torch.autograd.Function):
    """A look at plain values: `torch.func` hands those of all groups together."""

    generate_vmap_rule = False
    error: type[Exception] = ValueError

    @staticmethod
    def forward(rate: Tensor) -> Tensor:
        if bool((rate > 1.0).any()):
            raise Looked.error("a rate beyond 1")
        return rate.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, up: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return up

    @staticmethod
    def vmap(info, in_dims, rate: Tensor) -> tuple[Tensor, object]:  # type: ignore[no-untyped-def]
        return looked_at(rate), in_dims[0]


looked_at = Looked.apply


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_an_example_on_which_the_module_fails_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """All others count as without it, in both ways and for any error; and the noise is there."""
    monkeypatch.setattr(Looked, "error", error)
    module = Fails()
    bound, (one,) = cohort(module, (9,))
    broken = dict(one.examples.fields)
    broken["rate"] = broken["rate"].copy()
    broken["rate"][4] = 2.0
    noisy = replace(NOISY, steps=2, drawing=Everybody())
    jobs = with_secrets([replace(one, examples=Examples(broken))])
    kept = [replace(jobs[0], examples=one.examples.take(np.delete(np.arange(9), 4)))]
    for kind in (NoisySequential, NoisyVectorised):
        learner = kind(Trainable(module, bound, click_loss, TRAINING), noisy)
        (found,) = learner.train(jobs, round_id=0)
        (expected,) = learner.train(kept, round_id=0)
        assert found.finite and found.not_finite == 2 and not expected.not_finite
        for a, b in zip(parts_of(found), parts_of(expected), strict=True):
            assert_allclose(a, b, atol=4 * noisy.unit * TRAINING.rate * TRAINING.table_rate)
        with pytest.raises(error, match="beyond 1"):
            kind(Trainable(module, bound, click_loss, TRAINING), noisy, raises=True).train(
                jobs, round_id=0
            )


def test_a_module_that_fails_when_it_is_tried_stops_the_run() -> None:
    module = Fails()
    bound, (one,) = cohort(module, (9,))
    broken = {**one.examples.fields, "rate": np.full(9, 2.0, np.float32)}
    sample = [replace(one, examples=Examples(broken))]
    with pytest.raises(ValueError, match="beyond 1"):
        best_noisy(Trainable(module, bound, click_loss, TRAINING), NOISY, sample=sample)
    with pytest.raises(ValueError, match="beyond 1"):
        choose_noisy(
            Trainer.SEQUENTIAL,
            Trainable(module, bound, click_loss, TRAINING),
            NOISY,
            sample=sample,
            examples=9,
        )


# --- noise ----------------------------------------------------------------------------------------


class Eager(NoisyClient):
    """The twin: every row gets its noise in every step, whether it is read or not."""

    def take(self, dense, rows) -> None:  # type: ignore[no-untyped-def]
        super().take(dense, rows)
        for name, values in self.rows.items():
            self.settle(name, np.arange(len(values)))


def deltas(kind: type[NoisyClient], secrets: int, steps: int) -> np.ndarray:
    """The rows of many clients without data to speak of: (clients, rows, width) of the noise."""
    module = Clicks()
    bound, (one,) = cohort(module, (30,))
    noisy = replace(NOISY, steps=steps, drawing=EachExample(0.05), clip=1e-3, noise=50.0)
    found = []
    for secret in range(secrets):
        learner = NoisySequential(Trainable(module, bound, click_loss, TRAINING), noisy)
        prepared = at_hand(bound, replace(one, coins=Secret(secret.to_bytes(32, "big"))))
        client = kind(
            prepared,
            TRAINING,
            noisy,
            round_id=0,
            dense=torch.from_numpy(np.array(one.submodel.dense)),
            rows={n: torch.from_numpy(np.array(v)) for n, v in prepared.values.items()},
        )
        with torch.random.fork_rng(devices=[]):
            for _ in range(steps):
                learner.step(client)
        client.end()
        found.append(client.rows["items"].double().numpy() - prepared.values["items"])
    return np.array(found)


@pytest.mark.parametrize("kind", [NoisyClient, Eager])
def test_every_row_has_the_noise_of_all_steps(kind: type[NoisyClient]) -> None:
    """Lazy and eager alike; 5 standard errors, 1e-6 by chance. Gradients are 1/50 of the noise."""
    steps = 6
    found = deltas(kind, 40, steps)
    rate = TRAINING.rate * TRAINING.table_rate / NOISY.batch
    expected = rate * 50.0 * 1e-3 * sqrt(steps)
    measured = float(np.sqrt((found**2).mean()))
    assert abs(measured / expected - 1) < 5 / sqrt(2 * found.size)
    rows = np.sqrt((found**2).mean(axis=(0, 2)))
    assert rows.min() / rows.max() > 0.65  # touched or not


def test_noise_of_rows_and_steps_is_independent() -> None:
    found = deltas(NoisyClient, 60, 4)
    flat = found.reshape(len(found), -1)
    correlation = np.corrcoef(flat.T)
    np.fill_diagonal(correlation, 0.0)
    assert np.abs(correlation).max() < 6.5 / sqrt(len(found))  # of about 1,000 pairs


def test_steps_that_were_not_taken_are_noticed() -> None:
    module = Clicks()
    bound, (one,) = cohort(module, (3,))
    (secret,) = with_secrets([one])
    client = NoisySequential(Trainable(module, bound, click_loss, TRAINING), NOISY).begin(secret, 0)
    with pytest.raises(MisuseError, match="0 steps"):
        client.end()


def test_noise_that_is_as_good_as_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="as good as none"):
        replace(NOISY, noise=1e-5)


def test_batches_are_checked() -> None:
    for which, groups in (([1, 2], [0]), ([1, 2], [0, 2]), ([1, 2], [1, 1])):
        with pytest.raises(MisuseError):
            StepBatch(np.array(which), np.array(groups))
    drawn = StepBatch.grouped(np.array([4, 5, 6, 7]), np.array([9, 3, 9, 3]))
    assert drawn.which.tolist() == [5, 7, 4, 6] and drawn.groups.tolist() == [0, 0, 1, 1]


def test_batches_are_drawn_by_coins() -> None:
    module = Clicks()
    bound, (one,) = cohort(module, (30,))
    prepared, coins = at_hand(bound, one), CoinStream(Stream(bytes(16), bytes(8)))
    sizes = [len(EachExample(0.3)(prepared, coins).which) for _ in range(400)]
    assert abs(np.mean(sizes) - 9.0) < 5 * sqrt(30 * 0.3 * 0.7 / 400)
    assert abs(np.var(sizes) / 6.3 - 1) < 5 * sqrt(2 / 400)


# --- user level -----------------------------------------------------------------------------------


def update(scale: float) -> ModelUpdate:
    rng = np.random.default_rng(3)
    rows = TableUpdate(rng.standard_normal((4, 3)) * scale, np.array([1, 0, 7, 2]))
    return ModelUpdate(rng.standard_normal(5) * scale, 37, {"items": rows})


def length(of: ModelUpdate) -> float:
    parts = [of.dense, *(part.values for part in of.tables.values())]
    return float(np.sqrt(sum(np.square(part).sum() for part in parts)))


def test_a_users_update_is_clipped_as_a_whole_and_counts_nothing() -> None:
    found = clipped_update(update(10.0), 0.5)
    assert_allclose(length(found), 0.5)
    assert found.weight == 1 and (found.tables["items"].counts == 1).all()
    small = update(1e-3)
    assert_allclose(clipped_update(small, 0.5).dense, small.dense)
    broken = update(1.0)
    broken.dense[0] = np.inf
    assert length(clipped_update(broken, 0.5)) == 0.0


def test_a_users_own_noise_is_on_every_value() -> None:
    zeros = ModelUpdate(np.zeros(40_000), 1, {"items": TableUpdate(np.zeros((50, 4)), np.ones(50))})
    found = noisy_update(zeros, 2.0, 0.7, Secret(bytes(32)))
    assert abs(found.dense.std() / 1.4 - 1) < 5 / sqrt(2 * 40_000)
    assert found.tables["items"].values.all()
    unit = 1.4 / DEVIATION
    assert_allclose(found.dense / unit, np.round(found.dense / unit), atol=1e-6)
