"""The lag model by its formula, and the loss over a client's negatives."""

from __future__ import annotations

import numpy as np
import torch
from numpy.testing import assert_allclose

from tessera.learning.models.lags import LagModel
from tessera.learning.softmax import CANDIDATES, SampledSoftmax, ranked

ITEMS = 9


def test_scores_follow_the_formula_and_padding_counts_for_nothing():
    model = LagModel(ITEMS, length=4, width=3, seed=1).eval()
    history = torch.tensor([[2, 5, -1, -1], [-1, -1, -1, -1]])
    with torch.no_grad():
        found = model({"history": history})
        h = model.lags[0] * model.items.weight[2] + model.lags[1] * model.items.weight[5]
        inner = torch.nn.functional.gelu(model.inner(model.norm(h)))
        h = h + model.outer(inner)
        expected = model.items.weight @ h + model.biases.weight[:, 0]
    assert_allclose(found[0], expected, rtol=1e-5)
    short = model({"history": history[:, :2]})
    assert_allclose(short.detach(), found, rtol=1e-5)
    assert_allclose(model.lags[:, 0].detach(), np.exp(-np.arange(4) / 4) + 0.02, rtol=1e-6)


def test_the_first_values_follow_from_the_seed_alone():
    one, two, other = (LagModel(ITEMS, width=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.items.weight, two.items.weight)
    assert not torch.equal(one.items.weight, other.items.weight)


def test_a_clients_other_items_are_no_wrong_answers():
    """Own rows 0 and 1, negatives 2 and 3: the target stands against the negatives alone."""
    weights = np.arange(1.0, ITEMS + 1)
    loss = SampledSoftmax("items.weight", target="item", negatives=4, weights=weights)
    at_hand, own = np.array([0, 1, 2, 3], np.uint64), np.array([0, 1], np.uint64)
    logs = loss.log_weights(ITEMS, at_hand, own)
    chance = 1 - (1 - weights[2:4] / weights.sum()) ** 4
    assert np.isneginf(logs[:2]).all()
    assert_allclose(logs[2:], -np.log(chance), rtol=1e-6)
    output = torch.tensor([[1.0, 9.0, 0.5, -0.5]], requires_grad=True)
    batch = {"item": torch.tensor([0]), CANDIDATES: torch.from_numpy(logs)}
    found = loss(output, batch)
    rest = np.exp(np.array([0.5, -0.5])) / chance
    assert_allclose(found.item(), np.log((np.e + rest.sum()) / np.e), rtol=1e-5)
    found.sum().backward()
    assert output.grad is not None
    assert output.grad[0, 1] == 0 and output.grad[0, 0] < 0 < output.grad[0, 2]


def test_over_all_rows_it_is_the_whole_softmax():
    """Where every row but the own one is surely drawn, nothing is corrected."""
    weights = np.ones(ITEMS)
    loss = SampledSoftmax("items.weight", target="item", negatives=10_000, weights=weights)
    every = np.arange(ITEMS, dtype=np.uint64)
    logs = loss.log_weights(ITEMS, every, np.array([4], np.uint64))
    output = torch.randn(1, ITEMS, generator=torch.Generator().manual_seed(0))
    batch = {"item": torch.tensor([4]), CANDIDATES: torch.from_numpy(logs)}
    expected = torch.nn.functional.cross_entropy(output, batch["item"], reduction="none")
    assert_allclose(loss(output, batch), expected, rtol=1e-5)
    assert_allclose(loss(output, {"item": batch["item"]}), expected, rtol=1e-5)


def test_what_is_seen_stands_behind_all_others():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    target = torch.tensor([2])
    assert ranked(logits, target)[0, 0] == 2
    assert ranked(logits, target, torch.tensor([[0, -1]]))[0, 0] == 1
    assert ranked(logits, target, torch.tensor([[0, 1, -1, -1]]))[0, 0] == 0
    assert ranked(logits, target, torch.tensor([[2, 2]]))[0, 0] == 2  # never the target itself
