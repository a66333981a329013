"""Private masks: fitted from a client's own ratings alone, and the same alone as in a batch."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from own_secrets import secret_of
from tessera.data.examples import LABEL, Examples
from tessera.data.ratings import Attributes, RatingData
from tessera.errors import ConfigError, MisuseError
from tessera.learning.models import masked, private
from tessera.learning.models.masked import (
    ClientMasks,
    MaskTraining,
    Own,
    RatingScale,
    batches,
    held_back,
)
from tessera.learning.models.private import FactorisationMachine, Linear, Network

fit = partial(masked.fit, secret_of=secret_of)

torch.set_num_threads(1)

ORDERS = ("linear", "fm", "network")
COUNTS = (40, 3, 17, 25, 0, 10, 60, 9, 33, 120)
ITEMS, COLUMNS = 150, 5
BARE = 11
MEAN = 3.4


def ratings(
    counts: tuple[int, ...] = COUNTS, *, seed: int = 0, taste: float = 0.5, tested: int = 4
) -> RatingData:
    """Clients whose ratings follow their own weights of public attributes, with noise."""
    rng = np.random.default_rng(seed)
    values = np.c_[rng.random((ITEMS, COLUMNS - 1)) < 0.3, rng.normal(size=ITEMS)]
    values[BARE] = 0.0  # nothing is known of it

    def examples(sizes: tuple[int, ...]) -> tuple[Examples, npt.NDArray[np.int64]]:
        item = np.concatenate([rng.permutation(ITEMS)[:n] for n in sizes]).astype(np.int64)
        user = np.repeat(np.arange(len(sizes)), sizes)
        raw = 3.5 + (values[item] * tastes[user]).sum(-1) + rng.normal(0, 0.7, len(item))
        label = np.clip(np.round(raw), 1, 5).astype(np.float32)
        fields = {"user": user, "item": item, LABEL: label}
        return Examples(fields), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    tastes = rng.normal(0, taste, (len(counts), COLUMNS))
    train, offsets = examples(counts)
    test, test_offsets = examples((tested,) * len(counts))
    return RatingData(
        name="toy",
        train=train,
        offsets=offsets,
        test=test,
        test_offsets=test_offsets,
        sizes={"user": len(counts), "item": ITEMS},
        low=1.0,
        high=5.0,
        step=1.0,
        items=Attributes(tuple("abcde"), values.astype(np.float32)),
        profiles=Attributes((), np.zeros((len(counts), 0), np.float32)),
        titles=[""] * ITEMS,
    )


def with_labels(data: RatingData, change: dict[int, Any]) -> RatingData:
    """The same data, with other training ratings of some clients."""
    label = data.train[LABEL].copy()
    for client, value in change.items():
        label[data.offsets[client] : data.offsets[client + 1]] = value
    return replace(data, train=data.train.with_field(LABEL, label))


def of(column: Any, data: RatingData, client: int) -> Any:
    return column[data.offsets[client] : data.offsets[client + 1]]


def own_attributes(data: RatingData, client: int) -> npt.NDArray[np.float64]:
    return data.items.values[data.of(client)["item"]].astype(np.float64)


# -- what a mask is made of


def least_squares(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], penalty: float
) -> npt.NDArray[np.float64]:
    """Ridge as plain least squares, with a row per parameter for its penalty."""
    design = np.c_[np.ones(len(x)), x]
    rows = np.diag(np.sqrt([5.0, *[penalty] * x.shape[1]]))
    target = np.concatenate([y, np.zeros(len(rows))])
    return np.linalg.lstsq(np.vstack([design, rows]), target, rcond=None)[0]


def test_the_linear_mask_is_the_ridge_solution_over_all_of_a_clients_ratings() -> None:
    data = ratings()
    masks = fit(data, MaskTraining(order="linear", penalty=7.0), mean=MEAN)
    for client in (0, 2, 9):
        x, y = own_attributes(data, client), data.of(client)[LABEL] - MEAN
        theta = least_squares(x, y, 7.0)
        predicted = np.clip(MEAN + theta[0] + x @ theta[1:], 1, 5)
        np.testing.assert_allclose(of(masks.train, data, client), predicted, atol=1e-5)
        tested = data.items.values[data.test_of(client)["item"]].astype(np.float64)
        predicted = np.clip(MEAN + theta[0] + tested @ theta[1:], 1, 5)
        np.testing.assert_allclose(masks.test[4 * client : 4 * client + 4], predicted, atol=1e-5)


def by_hand(
    order: str, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor, penalty: float
) -> torch.Tensor:
    """One client's mask by torch's own optimiser, pair by pair and unit by unit; what it says."""
    ridge = torch.from_numpy(least_squares(x.double().numpy(), y.double().numpy(), penalty)).float()
    b, w, more = (part.clone().requires_grad_() for part in (ridge[:1], ridge[1:], start))

    def predict() -> torch.Tensor:
        out = b + x @ w
        if order == "fm":
            v = more.view(COLUMNS, -1)
            for i, j in combinations(range(COLUMNS), 2):
                out = out + (v[i] @ v[j]) * x[:, i] * x[:, j]
            return out
        hidden = len(more) // (COLUMNS + 2)
        inner = more[: COLUMNS * hidden].view(COLUMNS, hidden)
        bias, outer = more[COLUMNS * hidden :].view(2, hidden)
        for unit in range(hidden):
            z = x @ inner[:, unit] + bias[unit]
            out = out + outer[unit] * torch.where(z > 0.0, z, 0.0)
        return out

    adam = torch.optim.Adam([b, w, more], lr=0.05, eps=1e-3)
    for epoch in range(30):
        adam.param_groups[0]["lr"] = 0.05 * (30 - epoch) / 30
        adam.zero_grad()
        held = 5.0 * b.square().sum() + penalty * (w.square().sum() + 0.5 * more.square().sum())
        loss = ((y - predict()).square().sum() + held) / len(y)
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    return predict().detach()


@pytest.mark.parametrize("order", ["fm", "network"])
def test_higher_orders_are_what_a_plain_loop_at_one_client_gives(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "CLEAR", 1e9)  # nobody stops early
    data = ratings()
    masks = fit(data, MaskTraining(order=order, penalty=4.0, seed=3), mean=MEAN)
    start = masks.model.further  # type: ignore[attr-defined]
    for client in (0, 2, 9):
        x = torch.from_numpy(own_attributes(data, client)).float()
        y = torch.from_numpy(data.of(client)[LABEL]) - MEAN
        predicted = np.clip(MEAN + by_hand(order, start, x, y, 4.0).numpy(), 1, 5)
        np.testing.assert_allclose(of(masks.train, data, client), predicted, atol=2e-3)


def test_each_order_contains_the_one_below_it() -> None:
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    theta = torch.arange(10.0).view(2, 5)
    expected = Linear(4).predict(theta, x)
    for model in (FactorisationMachine(4, rank=3, seed=0), Network(4, hidden=3, seed=0)):
        nothing = torch.zeros(2, model.parameters - 5)
        torch.testing.assert_close(model.predict(torch.cat([theta, nothing], -1), x), expected)


@pytest.mark.parametrize("order", ["fm", "network"])
def test_higher_orders_fit_better_than_the_linear_model_where_there_is_more_to_fit(
    order: str,
) -> None:
    data = ratings((140,) * 6, seed=1)
    x = data.items.values[data.train["item"]]
    pair = (x[:, 0] > 0) ^ (x[:, 1] > 0)
    data = replace(data, train=data.train.with_field(LABEL, np.where(pair, 5, 2).astype("f4")))
    linear, higher = (
        fit(data, MaskTraining(order=name, penalty=0.1), mean=3.0).train - data.train[LABEL]
        for name in ("linear", order)
    )
    assert np.square(higher).mean() < 0.7 * np.square(linear).mean()


# -- whose ratings a mask depends on


@pytest.mark.parametrize("order", ORDERS)
def test_a_mask_does_not_change_by_a_bit_with_everybody_elses_ratings(order: str) -> None:
    data = ratings()
    training = MaskTraining(order=order)
    masks = fit(data, training, mean=MEAN)
    others = {c: 6.0 - data.of(c)[LABEL] for c in range(data.clients) if c != 8}
    other = fit(with_labels(data, others), training, mean=MEAN)
    assert_same_mask(masks, other, 8)  # which shares a batch with client 0
    assert not np.array_equal(masks.of(0, np.arange(ITEMS)), other.of(0, np.arange(ITEMS)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_mask_does_not_depend_on_who_else_is_there(order: str) -> None:
    """Alone, or among others who rated other items, and more or fewer of them."""
    data = ratings()
    masks = fit(data, MaskTraining(order=order), mean=MEAN)
    for client in (8, 9):  # of which 8 shares a batch with 0
        alone = fit(data, MaskTraining(order=order), mean=MEAN, clients=[client])
        assert alone.fitted.sum() == 1
        np.testing.assert_allclose(
            of(alone.train, data, client), of(masks.train, data, client), atol=1e-4
        )
        assert alone.penalty[client] == masks.penalty[client]
        assert alone.indicator[client] == pytest.approx(masks.indicator[client], abs=1e-5)
    counts = tuple(n if c == 9 else 2 * n + 7 for c, n in enumerate(COUNTS))
    other = ratings(counts, seed=5)
    moved = {name: column.copy() for name, column in other.train.fields.items()}
    for name in ("item", LABEL):
        of(moved[name], other, 9)[:] = of(data.train[name], data, 9)
    other = replace(other, train=Examples(moved), items=data.items)
    again = fit(other, MaskTraining(order=order), mean=MEAN)
    np.testing.assert_allclose(of(again.train, other, 9), of(masks.train, data, 9), atol=1e-4)


def assert_same_mask(one: ClientMasks, other: ClientMasks, client: int) -> None:
    everything = np.arange(ITEMS)
    np.testing.assert_array_equal(one.of(client, everything), other.of(client, everything))
    np.testing.assert_array_equal(one.theta[client], other.theta[client])
    assert one.penalty[client] == other.penalty[client]
    assert one.indicator[client] == other.indicator[client]


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_mask_says_of_an_item_is_the_same_everywhere(order: str) -> None:
    data = ratings()
    masks = fit(data, MaskTraining(order=order), mean=MEAN)
    for client in range(data.clients):
        predicted = masks.of(client, data.of(client)["item"])
        np.testing.assert_allclose(predicted, of(masks.train, data, client), atol=1e-5)
        predicted = masks.of(client, data.test_of(client)["item"])
        np.testing.assert_allclose(predicted, masks.test[4 * client : 4 * client + 4], atol=1e-5)
    assert masks.train.dtype == masks.test.dtype == np.float32


def test_a_clients_secret_decides_its_validation_part_and_nothing_is_drawn_elsewhere() -> None:
    data = ratings()
    state = torch.random.get_rng_state()
    training = MaskTraining(order="fm", seed=2)
    first, second = (fit(data, training, mean=MEAN) for _ in range(2))
    np.testing.assert_array_equal(first.train, second.train)
    others = masked.fit(data, training, mean=MEAN, secret_of=partial(secret_of, script=b"other"))
    assert (first.indicator[first.fitted] != others.indicator[first.fitted]).all()
    assert torch.equal(state, torch.random.get_rng_state())


def test_what_is_held_back_goes_with_the_secret_and_not_with_the_client() -> None:
    """Swap two clients' secrets and they swap what they hold back, whatever the seed is."""
    offsets = np.array([0, 40, 80])
    (batch,) = batches(offsets, np.arange(2))
    own = held_back(batch, 0.2, secret_of)
    swapped = held_back(batch, 0.2, lambda client: secret_of(1 - client))
    np.testing.assert_array_equal(own, swapped[::-1])
    assert (own[0] != own[1]).any()


# -- choosing on the validation part


def test_a_fifth_of_a_clients_ratings_is_held_back_and_at_least_one_is_not() -> None:
    data = ratings()
    for batch in batches(data.offsets, np.flatnonzero(np.diff(data.offsets) >= 2)):
        held = held_back(batch, 0.2, secret_of)
        assert not (held & ~batch.there).any()
        count = batch.there.sum(-1)
        np.testing.assert_array_equal(held.sum(-1), np.maximum(np.round(0.2 * count), 1))
        most = held_back(batch, 0.99, secret_of)
        assert (most.sum(-1) <= count - 1).all()


def owner(held: npt.NDArray[np.bool_]) -> Own:
    return Own(
        x=torch.zeros(*held.shape, 1),
        rating=np.full(held.shape, 3.0, np.float32),
        there=np.ones_like(held),
        held=held,
        scale=RatingScale(MEAN, 1.0, 5.0),
    )


def test_the_default_is_left_only_for_a_clear_gain() -> None:
    held = np.ones((1, 20), np.bool_)
    default = np.full((1, 20), 4.0, np.float32)  # squared error 1 on each
    clear = np.full((1, 20), 3.2, np.float32)
    lucky = default.copy()
    lucky[0, 0] = 3.0  # better on one of twenty: the mean of gains is its own standard error
    worse = np.full((1, 20), 5.0, np.float32)
    choose = owner(held).choose
    assert choose(np.stack([default, clear, worse]), default=0) == [1]
    assert choose(np.stack([clear, default, worse]), default=1) == [0]
    assert choose(np.stack([default, lucky, worse]), default=0) == [0]
    assert choose(np.stack([default, default]), default=1) == [1]
    broken = np.full((1, 20), np.nan, np.float32)
    assert choose(np.stack([default, broken, clear]), default=0) == [2]


def test_only_the_validation_part_decides_and_a_very_small_one_does_not() -> None:
    held = np.zeros((2, 20), np.bool_)
    held[0, :10] = held[1, :4] = True
    default = np.full((2, 20), 4.0, np.float32)
    good = np.where(held, 3.0, 5.0).astype(np.float32)
    bad = np.where(held, 5.0, 3.0).astype(np.float32)
    chosen = owner(held).choose(np.stack([default, good, bad]), default=0)
    np.testing.assert_array_equal(chosen, [1, 0])


def test_clients_with_strong_tastes_take_a_weaker_penalty() -> None:
    data = ratings((150,) * 8, seed=2, taste=1.5)
    masks = fit(data, MaskTraining(), mean=MEAN)
    default = MaskTraining().penalties(data.items.values)[0]
    assert (masks.penalty <= default).all()
    assert (masks.penalty < default).sum() >= 4
    rng = np.random.default_rng(0)
    noise = {c: rng.integers(1, 6, 150) for c in range(8)}
    masks = fit(with_labels(data, noise), MaskTraining(), mean=MEAN)
    assert (masks.penalty < default).sum() <= 1


def test_penalties_follow_the_size_of_the_attributes() -> None:
    values = ratings().items.values
    small, large = MaskTraining().penalties(values), MaskTraining().penalties(3 * values)
    np.testing.assert_allclose(large, 9 * np.array(small), rtol=1e-5)
    assert MaskTraining(penalty=30.0).penalties(values) == (30.0,)
    assert all(np.isfinite(MaskTraining().penalties(0 * values)))


def test_the_indicator_is_of_ratings_that_the_mask_was_not_fitted_to() -> None:
    data = ratings()
    training = MaskTraining(penalty=7.0)
    masks = fit(data, training, mean=MEAN)
    (batch,) = batches(data.offsets, np.array([9]))
    held = held_back(batch, training.validation, secret_of)[0, :120]
    x, y = own_attributes(data, 9), data.of(9)[LABEL] - MEAN
    theta = least_squares(x[~held], y[~held], 7.0)
    predicted = np.clip(MEAN + theta[0] + x[held] @ theta[1:], 1, 5)
    expected = np.square((predicted - MEAN - y[held]) / 4).mean()
    assert masks.indicator[9] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("order", ["fm", "network"])
def test_a_client_that_stops_early_has_the_mask_of_that_epoch(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ratings()
    monkeypatch.setattr(Own, "choose", lambda self, guess, default: np.zeros(len(self.x), np.int64))
    early = fit(data, MaskTraining(order=order, penalty=4.0), mean=MEAN)
    monkeypatch.setattr(private, "STOPS", (10,))
    stopped = fit(data, MaskTraining(order=order, penalty=4.0), mean=MEAN)
    np.testing.assert_array_equal(early.train, stopped.train)
    monkeypatch.setattr(private, "STOPS", (30,))
    late = fit(data, MaskTraining(order=order, penalty=4.0), mean=MEAN)
    assert not np.array_equal(early.train, late.train)


# -- what is wrong with the input


@pytest.mark.parametrize("order", ORDERS)
def test_clients_without_a_mask_have_the_global_mean_and_are_counted(order: str) -> None:
    data = with_labels(ratings(), {6: np.nan, 8: np.inf})
    masks = fit(data, MaskTraining(order=order), mean=MEAN)
    assert masks.facts["clients with a mask"] == 5
    assert masks.facts["clients without a mask: too few ratings"] == 3  # of 3, 0 and 9 ratings
    assert masks.facts["clients without a mask: not finite"] == 2
    for client in (1, 4, 7, 6, 8):
        assert not masks.fitted[client]
        assert np.isnan(masks.indicator[client]) and np.isnan(masks.penalty[client])
        assert (of(masks.train, data, client) == np.float32(MEAN)).all()
        assert (masks.test[4 * client : 4 * client + 4] == np.float32(MEAN)).all()
        assert (masks.of(client, np.arange(5)) == np.float32(MEAN)).all()
    assert np.isfinite(masks.train).all() and np.isfinite(masks.test).all()
    assert np.isfinite(masks.indicator[masks.fitted]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_a_constant_client_gets_its_constant_a_little_nearer_to_the_mean(order: str) -> None:
    data = with_labels(ratings(), {9: 5.0, 0: 1.0})
    masks = fit(data, MaskTraining(order=order), mean=MEAN)
    assert masks.facts["clients whose ratings are all equal"] == 2
    assert 4.7 < of(masks.train, data, 9).mean() <= 5.0
    assert 1.0 <= of(masks.train, data, 0).mean() < 1.5


@pytest.mark.parametrize("order", ORDERS)
def test_an_item_without_attributes_gets_what_the_client_gives_on_the_whole(order: str) -> None:
    data = ratings()
    masks = fit(data, MaskTraining(order=order), mean=MEAN)
    intercept = MEAN + float(masks.theta[9, 0])
    if order != "network":  # there the units have intercepts of their own
        assert masks.of(9, np.array([BARE]))[0] == pytest.approx(intercept, abs=1e-5)
    assert BARE in data.train["item"]
    assert masks.facts["rated items without attributes"] == 1


def test_attributes_that_are_not_numbers_count_as_missing() -> None:
    data = ratings()
    values = data.items.values.copy()
    values[3] = np.nan
    values[4] = np.inf
    zeros = values.copy()
    zeros[3:5] = 0.0
    broken, clean = (
        fit(replace(data, items=Attributes(data.items.names, v)), MaskTraining(), mean=MEAN)
        for v in (values, zeros)
    )
    np.testing.assert_array_equal(broken.train, clean.train)
    assert broken.facts == clean.facts


def test_a_fit_that_runs_away_is_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "RATE", 1e12)
    masks = fit(ratings(), MaskTraining(order="fm"), mean=MEAN)
    assert not masks.fitted.any()
    assert masks.facts["clients without a mask: not finite"] == 7
    assert (masks.train == np.float32(MEAN)).all()


def test_without_any_attributes_a_mask_is_a_shrunken_user_mean() -> None:
    data = ratings()
    data = replace(data, items=Attributes((), np.zeros((ITEMS, 0), np.float32)))
    masks = fit(data, MaskTraining(), mean=MEAN)
    own = data.of(9)[LABEL].astype(np.float64)
    expected = (own.sum() + 5 * MEAN) / (len(own) + 5)
    np.testing.assert_allclose(of(masks.train, data, 9), expected, rtol=1e-5)


def test_masks_stay_on_the_scale() -> None:
    data = with_labels(ratings(), {9: np.where(ratings().of(9)["item"] % 2, 1.0, 5.0)})
    masks = fit(replace(data, low=2.0, high=4.0), MaskTraining(penalty=0.01), mean=MEAN)
    assert masks.train.min() >= 2.0 and masks.train.max() <= 4.0
    assert masks.of(9, np.arange(ITEMS)).max() <= 4.0


def test_progress_is_told_by_clients() -> None:
    calls: list[tuple[int, int]] = []
    fit(ratings(), MaskTraining(), mean=MEAN, progress=lambda *now: calls.append(now))
    assert calls[-1] == (7, 7)
    assert calls == sorted(calls)


def test_padding_depends_on_a_clients_own_number_of_ratings_alone() -> None:
    offsets = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int64)
    seen = {}
    for batch in batches(offsets, np.arange(len(COUNTS))):
        for client, rows, there in zip(batch.clients, batch.rows, batch.there, strict=True):
            seen[int(client)] = len(there)
            np.testing.assert_array_equal(
                rows[there], np.arange(offsets[client], offsets[client + 1])
            )
    assert seen == {0: 48, 1: 16, 2: 24, 3: 32, 5: 16, 6: 64, 7: 16, 8: 48, 9: 128}


@pytest.mark.parametrize(
    "wrong",
    [
        {"order": "cubic"},
        {"penalty": -1.0},
        {"penalty": float("nan")},
        {"penalty": float("inf")},
        {"validation": 0.0},
        {"validation": 1.0},
        {"least": 1},
        {"rank": 0},
        {"hidden": 0},
        {"seed": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mask"):
        MaskTraining(**wrong)


def test_a_mean_that_is_none_is_the_callers_mistake() -> None:
    with pytest.raises(MisuseError, match="mean"):
        fit(ratings(), MaskTraining(), mean=float("nan"))


def test_masks_beat_the_users_means_on_movielens() -> None:
    from tessera.data.movielens import ratings_100k

    if "TESSERA_DATA" not in os.environ:
        pytest.skip("TESSERA_DATA is not set")
    data = ratings_100k(Path(os.environ["TESSERA_DATA"]) / "ml-100k", part="validation")
    truth = data.test[LABEL]
    mean = float(data.train[LABEL].mean())
    linear = fit(data, MaskTraining(), mean=mean)
    bare = replace(data, items=Attributes((), np.zeros((len(data.titles), 0), np.float32)))
    means = fit(bare, MaskTraining(), mean=mean)
    error, plain = (np.sqrt(np.square(m.test - truth).mean()) for m in (linear, means))
    assert error < plain - 0.015
    assert error < 1.03
