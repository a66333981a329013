"""Masks come off: ratings follow from what the mask left of them, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from own_secrets import secret_of
from runs import raters
from tessera.audit.ratings.plain_uploads import best, unmasked
from tessera.learning.models.masked import MaskTraining, fit
from tessera.learning.rating_models import INTERCEPT


def test_the_map_is_the_inverse_of_a_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    x, y, penalty = rng.normal(size=(30, 4)), rng.normal(size=30), 7.0
    design = np.column_stack([np.ones(30), x])
    ridge = design.T @ design + np.diag([INTERCEPT, *[penalty] * 4])
    left = y - design @ np.linalg.solve(ridge, design.T @ y)
    np.testing.assert_allclose(unmasked(left, x, penalty), y, atol=1e-10)
    assert np.abs(unmasked(left, x, 2 * penalty) - y).max() > 0.1


@pytest.mark.parametrize("penalty", [30.0, 0.0])
def test_masked_ratings_of_real_fits_come_back_exactly(penalty: float) -> None:
    data = raters.films(each=24)
    mean = float(data.train["label"].mean())
    training = MaskTraining(penalty=penalty)
    masks = fit(data, training, mean=mean, secret_of=secret_of)
    true = data.train["label"].astype(np.float64)
    for client in range(data.clients):
        part = slice(data.offsets[client], data.offsets[client + 1])
        found = best(
            true[part] - masks.train[part],
            data.items.values[data.train["item"][part]].astype(np.float64),
            training.penalties(data.items.values),
            mean=mean,
            low=data.low,
            high=data.high,
            step=data.step,
        )
        assert found.tolist() == true[part].tolist()


def test_a_client_without_a_mask_needs_none_taken_off() -> None:
    ratings = np.array([1.0, 4.0, 5.0, 2.0, 3.0])
    attributes = 1.3 * np.eye(5)[:, :3]
    found = best(ratings - 3.3, attributes, (1.0, 2.0), mean=3.3, low=1.0, high=5.0, step=1.0)
    assert found.tolist() == ratings.tolist()
