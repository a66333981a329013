"""RMSE as it is defined; statistics summed over clients give what one place would give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.examples import ClientData, Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.metrics import ClickMetric, RatingMetric, averages

METRIC = RatingMetric(1.0, 5.0)


def of(labels: list[float]) -> Examples:
    return Examples({"label": np.array(labels, np.float32)})


def test_predictions_are_cut_to_the_scale_first():
    found = METRIC.measures(np.array([7.0, 3.0, -2.0]), of([5.0, 4.0, 2.0]))
    assert found == {"RMSE": pytest.approx(math.sqrt(2 / 3)), "MAE": pytest.approx(2 / 3)}
    assert all(math.isnan(v) for v in METRIC.measures(np.zeros(0), of([])).values())


@given(st.lists(st.tuples(st.floats(-2, 8), st.integers(1, 5)), min_size=1, max_size=40), st.data())
def test_statistics_add_up_to_what_one_place_measures(pairs, data):
    outputs = np.array([p for p, _ in pairs])
    labels = [float(r) for _, r in pairs]
    cut = data.draw(st.integers(0, len(pairs)))
    statistics = [
        METRIC.statistics(outputs[part], of(labels[part]))
        for part in (slice(cut), slice(cut, None))
    ]
    whole = METRIC.measures(outputs, of(labels))["RMSE"]
    # each client rounds its sum to 2^-10
    assert METRIC.from_statistics(statistics[0] + statistics[1]) ** 2 == pytest.approx(
        whole**2, abs=2 * 2.0**-11 / len(pairs) + 1e-9
    )


def test_a_prediction_that_is_not_a_number_has_no_statistics():
    with pytest.raises(MisuseError, match="not a number"):
        METRIC.statistics(np.array([np.nan]), of([3.0]))
    assert math.isnan(METRIC.from_statistics(np.zeros(3, np.int64)))


def small() -> ClientData:
    train = {"item": [0, 1, 1, 2], "label": [5.0, 1.0, 3.0, 3.0]}
    test = {"item": [0, 9, 1], "label": [4.0, 2.0, 3.0]}
    return ClientData(
        name="small",
        train=Examples({k: np.array(v) for k, v in train.items()}),
        offsets=np.array([0, 2, 4]),
        test=Examples({k: np.array(v) for k, v in test.items()}),
        test_offsets=np.array([0, 2, 3]),
        sizes={"user": 2, "item": 10},
    )


def test_means_are_drawn_to_the_overall_one_and_unknown_items_have_it():
    overall = 3.0
    user = [(6 + 5 * overall) / 7, (6 + 5 * overall) / 7]
    item = {0: (5 + 15) / 6, 1: (4 + 15) / 7, 9: overall}
    found = averages(small())
    assert found["user mean"] == pytest.approx([user[0], user[0], user[1]])
    assert found["item mean"] == pytest.approx([item[0], item[9], item[1]])
    assert found["sum"] == pytest.approx(
        [user[0] + item[0] - 3, user[0] + item[9] - 3, user[1] + item[1] - 3]
    )
    errors = np.array([user[0] - 4, user[0] - 2, user[1] - 3])
    assert METRIC.baselines(small())["user mean"] == pytest.approx(np.sqrt(np.mean(errors**2)))


def test_a_test_part_that_tells_nothing_is_refused():
    data = small()
    with pytest.raises(ConfigError, match="nothing but clicks"):
        ClickMetric().check(data)
    METRIC.check(data)
    empty = ClientData(
        name="empty",
        train=data.train,
        offsets=data.offsets,
        test=data.test.take(slice(0)),
        test_offsets=np.array([0, 0, 0]),
        sizes=data.sizes,
    )
    with pytest.raises(ConfigError, match="no test part"):
        METRIC.check(empty)
