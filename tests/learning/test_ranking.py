"""Ranks among all rows, and what they are worth; what needs no model is counted right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tessera.data.examples import ClientData, Examples
from tessera.data.speech import speakers_like
from tessera.errors import ConfigError
from tessera.learning.metrics import (
    POPULARITY,
    SUCCESSOR,
    RankMetric,
    hit_rate,
    ndcg,
    trivial_ranks,
)

METRIC = RankMetric(rows=5, target="next", sequence="context", top=2)


def data(train: list[tuple[int, int]], test: list[tuple[int, int]]) -> ClientData:
    def part(pairs: list[tuple[int, int]]) -> Examples:
        both = np.array(pairs, np.int64).reshape(-1, 2)
        return Examples({"context": both[:, :1], "next": both[:, 1]})

    return ClientData(
        name="by hand",
        train=part(train),
        offsets=np.array([0, len(train)]),
        test=part(test),
        test_offsets=np.array([0, len(test)]),
        sizes={"word": 5},
    )


def test_gains_by_hand():
    ranks = np.array([0.0, 1.0, 9.0, 10.0])
    assert hit_rate(ranks, 10) == 0.75 and hit_rate(ranks, 1) == 0.25
    assert ndcg(ranks, 10) == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(11)) / 4)
    assert math.isnan(ndcg(np.zeros(0), 10))


def test_the_figures_by_hand_and_from_statistics_of_parts():
    outputs = np.array([[0, -1.0], [1, -2.0], [4, -3.0]])
    examples = data([(0, 1)], [(0, 1)] * 3).test
    found = METRIC.measures(outputs, examples)
    assert found["top-2"] == pytest.approx(2 / 3) and found["perplexity"] == pytest.approx(
        math.exp(2)
    )
    parts = [
        METRIC.statistics(outputs[:1], examples.take(slice(0, 1))),
        METRIC.statistics(outputs[1:], examples.take(slice(1, None))),
        METRIC.statistics(outputs[:0], examples.take(slice(0, 0))),
    ]
    assert METRIC.from_statistics(sum(parts)) == pytest.approx(found["top-2"])


def test_what_is_most_frequent_and_what_most_often_followed_by_hand():
    held = data([(0, 1), (0, 1), (0, 2), (3, 4), (3, 4), (3, 4)], [(0, 1), (0, 4), (3, 1), (-1, 4)])
    found = trivial_ranks(held, rows=5, target="next", sequence="context")
    # 4 came three times, 1 twice, 2 once; of equals both stand ahead of each other.
    assert found[POPULARITY][:, 0].tolist() == [1, 0, 1, 0]
    assert found[SUCCESSOR][:, 0].tolist() == [0, 2, 1, 0]
    # Witten and Bell: two successors of 0 in three examples
    assert_allclose(np.exp(found[SUCCESSOR][0, 1]), 3 / 5 * 2 / 3 + 2 / 5 * 3 / 11)


@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_and_probabilities_are_those_of_the_whole_distribution(seed):
    """The independent answer: the mixed distribution of every test example, written out."""
    held = speakers_like(4, 60, spoken_each=60, seed=seed)
    rows = held.sizes["word"]
    found = trivial_ranks(held, rows=rows, target="next", sequence="context")[SUCCESSOR]
    train, test = held.train, held.test
    share = np.bincount(train["next"], minlength=rows) + 1.0
    share /= share.sum()
    for at in range(len(test)):
        last, target = int(test["context"][at, 0]), int(test["next"][at])
        follow = np.bincount(train["next"][train["context"][:, 0] == last], minlength=rows)
        whole = share
        if last >= 0 and follow.any():
            trust = follow.sum() / (follow.sum() + np.count_nonzero(follow))
            whole = trust * follow / follow.sum() + (1 - trust) * share
        assert whole.sum() == pytest.approx(1.0)
        if target < 0:
            assert found[at, 0] == rows
            continue
        assert found[at, 1] == pytest.approx(np.log(whole[target]))
        assert found[at, 0] == np.count_nonzero(whole >= whole[target] * (1 - 1e-12)) - 1


def test_outputs_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match="ranks and log-probabilities"):
        METRIC.measures(np.zeros(3), data([(0, 1)], [(0, 1)] * 3).test)
    with pytest.raises(ConfigError, match="no field 'context'"):
        METRIC.check(
            ClientData(
                name="x",
                train=Examples({"next": np.zeros(1, np.int64)}),
                offsets=np.array([0, 1]),
                test=Examples({"next": np.zeros(1, np.int64)}),
                test_offsets=np.array([0, 1]),
                sizes={},
            )
        )
