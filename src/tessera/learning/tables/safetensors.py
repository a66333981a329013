"""Arrays in the safetensors format: a JSON header with shapes and places, then the bytes.

https://github.com/huggingface/safetensors (format). Written and read here without that library, of
which any version opens the files. Nothing in one can run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError

KINDS: Final[Mapping[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
METADATA: Final = "__metadata__"
MOST_HEADER: Final = 1 << 24
_PREFIX: Final = 8

Arrays = dict[str, npt.NDArray[Any]]


def packed(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """A file of these arrays, float32 or int64, with words about them."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    parts, end = [], 0
    for name, array in arrays.items():
        kind = "I64" if array.dtype.kind in "iu" else "F32"
        data = np.ascontiguousarray(array, KINDS[kind]).tobytes()
        place = [end, end := end + len(data)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": place}
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _PREFIX)  # data begin at a multiple of eight
    return b"".join([len(text).to_bytes(_PREFIX, "little"), text, *parts])


def unpacked(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """The arrays and the words about them; `ConfigError` for anything else."""
    try:
        length = int.from_bytes(data[:_PREFIX], "little")
        if not 2 <= length <= min(MOST_HEADER, len(data) - _PREFIX):
            raise ValueError("no header")
        body = memoryview(data)[_PREFIX + length :]
        header = json.loads(data[_PREFIX : _PREFIX + length])
        about = header.pop(METADATA, {})
        if not all(isinstance(v, str) for v in about.values()):
            raise ValueError("metadata")
        found: Arrays = {}
        for name, entry in header.items():
            kind, (begin, end) = KINDS[entry["dtype"]], entry["data_offsets"]
            shape = [int(side) for side in entry["shape"]]
            size = kind.itemsize * int(np.prod(shape, dtype=object))
            inside = 0 <= begin <= end <= len(body) and min(shape, default=0) >= 0
            if not inside or end - begin != size:
                raise ValueError(f"{name} does not fill its shape")
            found[name] = np.frombuffer(bytes(body[begin:end]), kind).reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not a model in safetensors: {error}", hint="export it again") from error
    return found, about
