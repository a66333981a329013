"""Networks without tables, their loss, and accuracy with the largest class beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.data.examples import ClientData, Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.architecture import build
from tessera.learning.metrics import ClassMetric
from tessera.learning.module_tables import Tables
from tessera.learning.training.jobs import class_loss


def test_the_image_network_has_the_size_that_its_paper_says():
    module = build({"name": "cnn"})
    assert sum(p.numel() for p in module.parameters()) == 1_663_370
    assert module({"image": torch.zeros(3, 28, 28)}).shape == (3, 10)
    assert Tables({}).bind(module).dense_size == 1_663_370


def test_padding_says_nothing_to_the_network_for_questions():
    module = build({"name": "textcnn", "words": 50, "classes": 6, "width": 8, "filters": 4}).eval()
    asked = torch.tensor([[3, 9, 11, 2, 4, 7, *[-1] * 5]])  # beyond the widest span
    longer = torch.cat([asked, torch.full((1, 3), -1)], dim=1)
    assert torch.allclose(module({"words": asked}), module({"words": longer}))
    assert module({"words": asked}).shape == (1, 6)


@pytest.mark.parametrize("name", ["cnn", "textcnn"])
def test_a_seed_decides_the_first_values(name):
    more = {"words": 20, "classes": 3} if name == "textcnn" else {}
    first, again, other = (build({"name": name, **more, "seed": s}) for s in (0, 0, 1))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_the_loss_is_one_number_per_example():
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    losses = class_loss(logits, {"label": torch.tensor([0, 1])})
    assert losses.tolist() == pytest.approx([np.log(1 + np.exp(-2.0)), np.log(2.0)])


def data_of(train: list[int], test: list[int]) -> ClientData:
    labels = [Examples({"label": np.array(part, dtype=np.int64)}) for part in (train, test)]
    offsets = [np.array([0, len(part)]) for part in (train, test)]
    return ClientData(
        name="some",
        train=labels[0],
        offsets=offsets[0],
        test=labels[1],
        test_offsets=offsets[1],
        sizes={"class": 3},
    )


def test_accuracy_adds_up_over_clients():
    metric, rng = ClassMetric(3), np.random.default_rng(0)
    labels = rng.integers(0, 3, 40)
    outputs = rng.normal(size=(40, 3))
    right = np.mean(outputs.argmax(axis=1) == labels)
    whole = Examples({"label": labels})
    assert metric.measures(outputs, whole) == {"accuracy": right}
    parts = [slice(0, 13), slice(13, 13), slice(13, 40)]
    total = sum(metric.statistics(outputs[p], whole.take(p)) for p in parts)
    assert metric.from_statistics(total) == right
    assert np.isnan(metric.from_statistics(np.zeros(2, np.int64)))


def test_the_baseline_always_says_the_class_that_most_training_examples_have():
    metric = ClassMetric(3)
    assert metric.baselines(data_of([0, 2, 2, 1], [2, 2, 1, 1, 1])) == {"largest class": 0.4}


def test_outputs_and_labels_that_are_no_classes_are_refused():
    metric, some = ClassMetric(3), Examples({"label": np.array([0, 1])})
    with pytest.raises(ConfigError, match=r"gave \(2,\) for 2"):
        metric.measures(np.zeros(2), some)
    with pytest.raises(MisuseError, match="not a number"):
        metric.measures(np.full((2, 3), np.nan), some)
    for train, test in (([0, 3], [1]), ([0], [-1]), ([0], [])):
        with pytest.raises(ConfigError, match="task 'some'"):
            metric.check(data_of(train, test))
