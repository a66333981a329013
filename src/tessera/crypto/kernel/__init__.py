"""The mask kernel: AES key streams and sums of them, in C where the machine has AES instructions.

`active()` is the backend in use. The environment variable TESSERA_KERNEL chooses it: `auto` (the
default) takes the fastest native path that exists and passes its self-check, `reference` the NumPy
twin, and `aesni`, `vaes256` or `vaes512` insist on one path. All give the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final

from tessera.crypto.kernel.backend import Backend
from tessera.crypto.kernel.native import PATHS, Probe, probe
from tessera.crypto.kernel.reference import Reference
from tessera.errors import ConfigError

__all__ = [
    "REFERENCE",
    "VARIABLE",
    "Backend",
    "Description",
    "active",
    "available",
    "describe",
    "use",
]

VARIABLE: Final = "TESSERA_KERNEL"

_REFERENCE: Final = Reference()
REFERENCE: Final = _REFERENCE.name
_chosen: list[Backend] = []  # `use` pushes, for tests and benchmarks; the last one counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What runs here and why, for `tessera doctor`."""

    name: str
    available: tuple[str, ...]  # best first; the last is always "reference"
    reason: str | None  # why no native path, or why not the best this CPU has


def active() -> Backend:
    """The backend in use."""
    return _chosen[-1] if _chosen else _from_environment(os.environ.get(VARIABLE, "auto"))


def available() -> tuple[str, ...]:
    """The names that `use` accepts on this machine, fastest first."""
    return (*(path.name for path in _probe().paths), _REFERENCE.name)


def describe() -> Description:
    """The backend in use, what else there is, and the reason when something is missing."""
    return Description(name=active().name, available=available(), reason=_probe().reason)


@contextmanager
def use(name: str) -> Iterator[Backend]:
    """Run a block with this backend, in the whole process: for tests and benchmarks."""
    _chosen.append(_named(name))
    try:
        yield _chosen[-1]
    finally:
        _chosen.pop()


@cache
def _probe() -> Probe:
    return probe(_REFERENCE)


@cache
def _from_environment(name: str) -> Backend:
    return _named(name)


def _named(name: str) -> Backend:
    if name == _REFERENCE.name:
        return _REFERENCE
    found = {path.name: path for path in _probe().paths}
    if name == "auto":
        return next(iter(found.values()), _REFERENCE)
    if name in found:
        return found[name]
    names = ("auto", _REFERENCE.name, *PATHS)
    if name in names:
        raise ConfigError(
            f"kernel {name!r} does not run here: {_probe().reason}",
            hint=f"unset {VARIABLE}, or take one of {', '.join(available())}",
        )
    raise ConfigError(f"kernel {name!r} is not one of {', '.join(names)}")
