"""Files that only their owner may read: secrets, and what only a simulation may know."""

from __future__ import annotations

import os
from pathlib import Path


def write_owner_only(path: Path, content: bytes) -> None:
    """A new file, on disk when this returns; its mode is set before there is anything in it."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
