"""Public attributes of items from a second file."""

from __future__ import annotations

import pytest
from numpy.testing import assert_allclose

from tessera import tasks
from tessera.data import item_features
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError

NAMES = RowNames(["a", "b", "c"])


def read(tmp_path, text: str):
    path = tmp_path / "items.csv"
    path.write_text(text)
    return item_features.of_file(path, NAMES, items=3, item="sku").attributes


def test_words_are_classes_and_several_count_a_part_each(tmp_path):
    found = read(tmp_path, "kind,sku,shelf\nx|y,c,1\nx,a,2\n")
    assert list(found) == ["kind", "shelf"]
    assert_allclose(found["kind"], [[1, 0], [0, 0], [0.5, 0.5]])
    assert_allclose(found["shelf"], [[0, 1], [0, 0], [1, 0]])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("sku,kind\na,x\nz,y\n", "only 1 of 3 items are in it, and item 'z'"),
        ("sku,kind\na,x\na,y\n", "line 3: item 'a' a second time"),
        ("thing,kind\na,x\n", "sku"),
        ("sku\na\n", "no attributes"),
        ("sku,kind\n", "no line below"),
        ("", "empty"),
        ("sku,kind\na\n", "line 2"),
        ("sku,kind\na," + "|".join(map(str, range(65))) + "\n", "'kind' has 65 classes"),
    ],
)
def test_what_is_not_one_line_for_each_item_is_refused(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match) as caught:
        read(tmp_path, text)
    assert caught.value.hint


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv"):
        item_features.of_file(tmp_path / "none.csv", NAMES, items=3, item="sku")


def test_pairs_with_noise_count_by_them(tmp_path):
    (tmp_path / "items.csv").write_text("item,kind\na,x\nb,y\nc,x\n")
    lines = [f"{user},{item}" for user in range(4) for item in "abc"]
    (tmp_path / "own.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    options = {"path": str(tmp_path / "own.csv"), "model": "pairs"}
    task = tasks.load("sequences", **options, item_features=str(tmp_path / "items.csv"))
    assert task.data.facts["attributes"] == "kind (2 classes)"
    assert task.architecture["dense"] == 2 * 2 + 3
    assert tasks.load("sequences", **options).architecture["dense"] == 3
