"""Tags as numbers: against TF-IDF and a singular value decomposition written out in full."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tessera.data import tags
from tessera.data.tags import Tagging, tag_attributes
from tessera.errors import ConfigError

ITEMS = 60


def given_tags(seed=1, words=25, times=500):
    """Some tags are far more common than others, and the last ten items have none."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, words + 1)
    item = rng.integers(0, ITEMS - 10, times)
    word = rng.choice(words, times, p=share / share.sum())
    return item.astype(np.int64), [f"tag {one:02}" for one in word]


def dense(item, words, most):
    """The TF-IDF matrix of the items that have one of the `most` tags, and which these are."""
    count = Counter(zip(item.tolist(), words, strict=True))
    on = Counter(word for _, word in count)
    used = sorted(sorted(on, key=lambda word: (-on[word], word))[:most])
    rows = sorted({one for one, word in count if word in used})
    matrix = np.array([[count[one, word] for word in used] for one in rows], dtype=float)
    matrix *= [np.log((1 + len(rows)) / (1 + on[word])) + 1 for word in used]
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True), rows


@pytest.mark.parametrize(("most", "columns"), [(1000, 5), (8, 3), (25, 20)])
@pytest.mark.parametrize("at_once", [7, 4096])
def test_the_numbers_are_principal_components_of_tf_idf(monkeypatch, most, columns, at_once):
    monkeypatch.setattr(tags, "_ROWS_AT_ONCE", at_once)
    item, words = given_tags()
    found = tag_attributes(Tagging.of(item, words), items=ITEMS, columns=columns, most=most)
    matrix, rows = dense(item, words, most)
    left, size, _ = np.linalg.svd(matrix - matrix.mean(axis=0), full_matrices=False)
    expected = (left * size)[:, :columns] / (size[0] / np.sqrt(len(rows)))
    own = found.values[rows]
    signs = np.sign((own * expected).sum(axis=0))
    np.testing.assert_allclose(own, expected * signs, atol=1e-5)
    assert own[:, 0].std() == pytest.approx(1, abs=1e-5)
    others = np.setdiff1d(np.arange(ITEMS), rows)
    assert len(others) >= 10
    assert not found.values[others].any()


def test_signs_are_fixed_by_the_largest_weight():
    item, words = given_tags()
    weights = tags._Weights.of(Tagging.of(item, words), 1000)
    components, _ = tags._principal(weights, 6)
    assert components.shape[1] == 6
    assert (components[np.abs(components).argmax(axis=0), np.arange(6)] > 0).all()


def test_the_order_of_the_file_does_not_matter():
    item, words = given_tags()
    order = np.random.default_rng(0).permutation(len(item))
    shuffled = Tagging.of(item[order], [words[one] for one in order])
    first = tag_attributes(Tagging.of(item, words), items=ITEMS)
    assert (first.values == tag_attributes(shuffled, items=ITEMS).values).all()
    assert first.names[:2] == ("tags 1", "tags 2")


def test_pairs_are_counted_and_what_is_not_listed_is_told():
    tagging = Tagging.of(np.array([2, 0, 2, 2, -1, -1, 0]), ["b", "a", "b", "a", "b", "c", ""])
    triples = zip(tagging.item.tolist(), tagging.tag.tolist(), tagging.count.tolist(), strict=True)
    assert list(triples) == [(0, 0, 1), (2, 0, 1), (2, 1, 2)]
    assert tagging.words == ("a", "b")
    assert tagging.facts()["tags left out: item not listed"] == 2
    assert tagging.facts()["tagged items"] == 2


@pytest.mark.parametrize(
    ("item", "words", "columns"),
    [
        ([], [], 5),  # no tags at all
        ([0], ["a"], 5),  # one item: nothing varies
        ([0, 1, 2], ["a", "a", "a"], 5),  # all alike
        ([0, 1], ["a", "b"], 0),
    ],
)
def test_tags_that_tell_nothing_give_no_columns(item, words, columns):
    tagging = Tagging.of(np.array(item, dtype=np.int64), words)
    found = tag_attributes(tagging, items=4, columns=columns)
    assert found.values.shape == (4, 0)
    assert found.names == ()


def test_there_are_no_more_columns_than_the_tags_give():
    tagging = Tagging.of(np.array([0, 1, 2]), ["a", "b", "c"])
    assert tag_attributes(tagging, items=5, columns=20).values.shape == (5, 2)


def test_a_negative_number_of_columns_is_refused():
    with pytest.raises(ConfigError, match="-1 columns"):
        tag_attributes(Tagging.of(np.array([0]), ["a"]), items=1, columns=-1)
