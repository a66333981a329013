"""TREC and MNIST: files as published, over clients that get equally many."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from tessera.data.mnist import mnist
from tessera.data.trec import trec
from tessera.errors import ConfigError

TRAIN = ["DESC:manner How does rain fall ?", "HUM:ind Who was Ada ?", "NUM:date When is noon ?"]
TEST = ["HUM:ind Who saw rain fall ?"]


def questions(folder: Path, train=TRAIN, test=TEST) -> Path:
    own = folder / "trec"
    own.mkdir(exist_ok=True)
    (own / "train_5500.label").write_text("".join(line + "\n" for line in train), "latin-1")
    (own / "TREC_10.label").write_text("".join(line + "\n" for line in test), "latin-1")
    return folder


def idx(shape: tuple[int, ...], values: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + values.tobytes()


def images(folder: Path, train: int = 12, test: int = 5, **changed: bytes) -> Path:
    own = folder / "mnist"
    own.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    for stem, count in (("train", train), ("t10k", test)):
        pixels = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        files = {
            f"{stem}-images-idx3-ubyte": idx(pixels.shape, pixels),
            f"{stem}-labels-idx1-ubyte": idx((count,), (np.arange(count) % 10).astype(np.uint8)),
        }
        for name, data in (files | changed).items():
            (own / f"{name}.gz").write_bytes(gzip.compress(data))
    return folder


def test_questions_become_words_of_the_training_part(tmp_path):
    data = trec(questions(tmp_path), clients=3, words=4)
    assert data.sizes == {"class": 6, "word": 11}  # ? ada does fall how is noon rain was when who
    assert data.clients == 3 and np.diff(data.offsets).tolist() == [1, 1, 1]
    (asked,) = data.test["words"]
    assert asked.tolist() == [10, -1, 7, 3]  # who saw rain fall: nobody was taught "saw"
    assert data.test["label"].tolist() == [3] and sorted(data.train["label"]) == [1, 3, 5]


def test_who_gets_which_example_follows_from_the_seed(tmp_path):
    folder = images(tmp_path)
    first, again, other = (mnist(folder, clients=4, seed=s) for s in (0, 0, 1))
    assert np.array_equal(first.train["label"], again.train["label"])
    assert not np.array_equal(first.train["label"], other.train["label"])
    assert sorted(first.train["label"]) == sorted(other.train["label"])
    assert first.train["image"].shape == (12, 28, 28) and first.train["image"].max() <= 1.0


def test_settings_are_tuned_on_examples_that_nobody_trains_on(tmp_path):
    folder = images(tmp_path, train=20)
    whole, tuned = mnist(folder, clients=2), mnist(folder, clients=2, part="validation")
    assert (len(tuned.train), len(tuned.test)) == (18, 2)
    seen = {image.tobytes() for image in tuned.train["image"]}
    assert not seen & {image.tobytes() for image in tuned.test["image"]}
    assert seen < {image.tobytes() for image in whole.train["image"]}


@pytest.mark.parametrize(
    ("line", "match"),
    [("WHAT:x What ?", "line 4: 'WHAT' is not one of"), ("HUM:ind", "line 4: no question")],
)
def test_lines_that_are_no_questions_are_named(tmp_path, line, match):
    with pytest.raises(ConfigError, match=match):
        trec(questions(tmp_path, train=[*TRAIN, line]))


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("train-images-idx3-ubyte", b"\x00\x00\x08", "not an IDX file"),
        ("train-images-idx3-ubyte", idx((1, 28, 28), np.zeros(784, np.uint8), 9), "not an IDX"),
        ("train-images-idx3-ubyte", idx((2, 28, 28), np.zeros(784, np.uint8)), "784 bytes where"),
        ("train-images-idx3-ubyte", idx((1, 9, 9), np.zeros(81, np.uint8)), r"\(9, 9\) pixels"),
        ("train-labels-idx1-ubyte", idx((3,), np.zeros(3, np.uint8)), "3 labels for 12"),
        ("train-labels-idx1-ubyte", idx((12,), np.full(12, 11, np.uint8)), "a label of 11"),
    ],
)
def test_files_that_are_no_images_are_refused(tmp_path, name, data, match):
    with pytest.raises(ConfigError, match=match):
        mnist(images(tmp_path, **{name: data}))


@pytest.mark.parametrize(
    ("options", "match"),
    [({"clients": 0}, "0 clients"), ({"clients": 13}, "13 clients"), ({"part": "x"}, "part = 'x'")],
)
def test_what_cannot_be_dealt_out_is_refused(tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        mnist(images(tmp_path), **options)


def test_the_published_counts(published):
    asked = trec(published("trec"))
    assert (len(asked.train), len(asked.test), asked.sizes["word"]) == (5452, 500, 8678)
    assert np.diff(asked.offsets).tolist() == [1363] * 4
    digits = mnist(published("mnist"))
    assert (len(digits.train), len(digits.test), digits.clients) == (60_000, 10_000, 100)
    assert np.bincount(digits.test["label"]).tolist()[:3] == [980, 1135, 1032]
