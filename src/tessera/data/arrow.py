"""pyarrow, which is part of the extra `train`: imported when data is read, and not before."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from tessera.errors import ConfigError


class Arrow(NamedTuple):
    """The modules of pyarrow that are used here."""

    arrow: Any
    compute: Any
    csv: Any
    parquet: Any


def load() -> Arrow:
    try:
        return Arrow(
            import_module("pyarrow"),
            import_module("pyarrow.compute"),
            import_module("pyarrow.csv"),
            import_module("pyarrow.parquet"),
        )
    except ImportError as absent:
        raise ConfigError(
            "reading data of your own needs pyarrow, which is not installed",
            hint="install pyarrow, or this package with its extra `train`",
        ) from absent
