"""MNIST: handwritten digits of 28 x 28 pixels (LeCun et al. 1998), over clients that are all alike.

Files are in the IDX layout: two zero bytes, the kind of number (8: unsigned bytes), the number of
dimensions, each dimension as four bytes with the highest first, then the numbers.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.data import published
from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.split import TEST, spread_evenly
from tessera.errors import ConfigError

SOURCE: Final = published.Source(
    title="MNIST",
    publisher="Y. LeCun, C. Cortes and C. Burges",
    page="The MNIST database of handwritten digits",
    folders=("mnist",),
    files=(
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ),
)

CLASSES: Final = 10
SIDE: Final = 28
IMAGE: Final = "image"
MOST: Final = 1 << 30
"""Bytes of the largest file that is read."""


def mnist(
    folder: Path | str | None = None, *, clients: int = 100, seed: int = 0, part: str = TEST
) -> ClientData:
    """60,000 training and 10,000 test images; pixels are from 0 to 1."""
    train, test = (_examples(folder, stem) for stem in ("train", "t10k"))
    return spread_evenly(
        "mnist",
        train,
        test,
        clients=clients,
        seed=seed,
        part=part,
        sizes={"class": CLASSES},
        facts={
            "source": SOURCE.title,
            "images": f"{len(train):,} for training, {len(test):,} published for testing",
        },
    )


def _examples(folder: Path | str | None, stem: str) -> Examples:
    image_path = SOURCE.find(f"{stem}-images-idx3-ubyte", folder)
    label_path = SOURCE.find(f"{stem}-labels-idx1-ubyte", folder)
    images, labels = idx(image_path, 3), idx(label_path, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise ConfigError(f"{image_path}: images of {images.shape[1:]} pixels, {SIDE} x {SIDE} due")
    if len(images) != len(labels):
        raise ConfigError(f"{label_path}: {len(labels)} labels for {len(images)} images")
    if labels.size and int(labels.max()) >= CLASSES:
        raise ConfigError(f"{label_path}: a label of {int(labels.max())}, digits go up to 9")
    return Examples(
        {IMAGE: images.astype(np.float32) / np.float32(255), LABEL: labels.astype(np.int64)}
    )


def idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The unsigned bytes of an IDX file, in its shape."""
    data = published.content(path, most=MOST)
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, 8, dimensions]):
        raise ConfigError(
            f"{path}: not an IDX file of bytes with {dimensions} dimensions",
            hint="fetch or copy it again",
        )
    shape = tuple(int(n) for n in np.frombuffer(data, dtype=">u4", count=dimensions, offset=4))
    if len(data) - header != prod(shape):
        raise ConfigError(
            f"{path}: {len(data) - header:,} bytes where its header says {prod(shape):,}",
            hint="fetch or copy it again",
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)
