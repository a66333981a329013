"""Amazon electronics as prepared: histories are taken as published, the split is ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.data.amazon import amazon, sequences_amazon
from tessera.errors import ConfigError

LINES = [
    "1\t4\t100\t0",
    "0\t4\t300\t100",
    "1\t4\t200\t100",
    "1\t4\t500\t100,900,200",  # 900 is nobody's target
    "0\t4\t300\t100,900,200,500",
    "1\t2\t100\t0",
]


def write(folder: Path, lines=LINES) -> Path:
    own = folder / "amazon-electronics"
    own.mkdir(exist_ok=True)
    (own / "amazon_train").write_text("".join(line + "\n" for line in lines))
    return folder


def test_lines_become_examples_with_the_published_histories(tmp_path):
    data = amazon(write(tmp_path), history=3)
    assert data.sizes == {"user": 2, "item": 5}  # 100, 200, 300, 500, 900
    assert data.of(0)["item"].tolist() == [0]  # user 2
    own = data.of(1)
    assert own["item"].tolist() == [0, 2, 1, 3]
    assert own["label"].tolist() == [1, 0, 1, 1]
    assert own["history"].tolist() == [[-1, -1, -1], [0, -1, -1], [0, -1, -1], [0, 4, 1]]
    held = data.test_of(1)
    assert held["item"].tolist() == [2]
    assert held["history"].tolist() == [[4, 1, 3]]  # the last three
    assert held["rate"].tolist() == [pytest.approx((3 + 2.5) / (4 + 5))]


def test_without_empty_histories_rows_are_the_same(tmp_path):
    data = amazon(write(tmp_path, LINES[1:3]), history=2)
    assert data.sizes["item"] == 3
    assert data.train["history"].tolist() == [[0, -1], [0, -1]]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("2\t4\t100\t0", "line 7: 'click' is '2', not one of 0, 1"),
        ("1\t4\t0\t0", "line 7: ids start at 1"),
        ("1\t4\t100\t5,0", "line 7: ids start at 1"),
        ("1\t4\t100\t-5", "line 7: ids start at 1"),
        ("1\t4\t100\t", "line 7: 'history' are not whole numbers: ''"),
        ("1\t4\t100", "line 7: 3 fields where 4"),
        ("1\t4\tB00\t0", "line 7: 'item' is not a whole number: 'B00'"),
    ],
)
def test_a_line_that_cannot_be_is_named(tmp_path, line, match):
    with pytest.raises(ConfigError, match=match):
        amazon(write(tmp_path, [*LINES, line]))


def test_the_published_set_has_its_counts(published):
    data = amazon(published("amazon-electronics"))
    assert data.facts["examples"] == 99_710
    assert data.facts["clicks"] == 55_363
    assert data.facts["target items"] == 29_148
    assert data.clients == 1_859
    assert (len(data.train), len(data.test)) == (80_505, 19_205)
    per_user = np.diff(data.offsets) + np.diff(data.test_offsets)
    assert (per_user.min(), per_user.max()) == (1, 387)
    # Histories hold clicked items only: none of the user's other targets, unless it came twice.
    history = data.train["history"]
    assert history.max() < data.sizes["item"]
    assert ((history >= 0)[:, :-1] | (history < 0)[:, 1:]).all()  # padding is on the right


def test_as_sequences_every_review_counts_and_rare_products_are_left_out(tmp_path):
    data = sequences_amazon(write(tmp_path), least=1, history=2)
    names = data.names_of("item")
    assert [names.name(row) for row in data.events.of(1)] == ["100", "300", "200"]
    assert [names.name(row) for row in data.test_of(1)["item"]] == ["500"]
    assert len(data.test_of(0)) == 0  # user 2 has one item
    few = sequences_amazon(write(tmp_path), least=2, history=2)
    assert few.sizes["item"] == 2 and few.facts["items with fewer reviews, left out"] == 2
    with pytest.raises(ConfigError, match="no item has 9 reviews"):
        sequences_amazon(tmp_path, least=9)
    with pytest.raises(ConfigError, match="least = 0"):
        sequences_amazon(tmp_path, least=0)


def test_ids_are_those_of_the_file(tmp_path):
    data = amazon(write(tmp_path), history=3)
    assert data.names_of("item").names == ["100", "200", "300", "500", "900"]
    assert data.names_of("user").names == ["2", "4"]
