"""The published sets, where somebody has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def published() -> Callable[[str], Path]:
    """The data folder, if a set of this name is in it; otherwise the test is skipped."""

    def folder(name: str) -> Path:
        root = os.environ.get("TESSERA_DATA", "")
        if not root or not (Path(root) / name).is_dir():
            pytest.skip(f"no {name} in TESSERA_DATA")
        return Path(root)

    return folder
