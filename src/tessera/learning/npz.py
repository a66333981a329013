"""Arrays from an .npz file that may be damaged or hostile: bounded before memory is spent on it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The file's arrays by name; ValueError for what `np.savez` does not write.

    Entries are stored and not compressed, and no header claims more than its entry holds, so that
    memory stays in proportion to the file.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            with archive.open(entry) as file:
                version = npy.read_magic(file)
                if version not in ((1, 0), (2, 0)):
                    raise ValueError(f"{entry.filename} has an unknown version")
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(file)
            claimed = dtype.itemsize
            for length in shape:  # Python integers: a product of any size
                claimed *= int(length)
            if dtype.hasobject or claimed > entry.file_size:
                raise ValueError(f"{entry.filename} claims more than it holds")
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
