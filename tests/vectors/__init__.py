"""Known answers, read for tests: `load("x25519.json")` gives its vectors. The format: README.md."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera import errors

HERE = Path(__file__).parent


def load(file: str, kind: str | None = None) -> list[SimpleNamespace]:
    """The vectors of one file (of one kind, if it has several), hexadecimal fields as bytes."""
    document = json.loads((HERE / file).read_text())
    vectors = []
    for entry in document["vectors"]:
        if kind is None or entry["kind"] == kind:
            hexed = {k: bytes.fromhex(entry[k]) for k in document["hex"] if k in entry}
            vectors.append(SimpleNamespace(**{**entry, **hexed}))
    assert vectors, f"{file} has no vectors of kind {kind}"
    return vectors


def expectation(vector: SimpleNamespace) -> contextlib.AbstractContextManager[object]:
    """What running this vector should do: nothing in particular, or raise the error it names."""
    if vector.expect == "ok":
        return contextlib.nullcontext()
    return pytest.raises(getattr(errors, vector.expect), match=getattr(vector, "says", None))
