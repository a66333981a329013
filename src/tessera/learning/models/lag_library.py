"""The loops of a lag model in C (`lags.c`), loaded through ctypes: without PyTorch, for doctor."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

MODULE: Final = "tessera.learning.models._lags"

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
_ARGUMENTS: Final[dict[str, list[Any]]] = {
    "tessera_lag_sums": [*[_POINTER] * 3, *[_SIZE] * 3, _POINTER],
    "tessera_lag_gradients": [*[_POINTER] * 3, *[_SIZE] * 3, *[_POINTER] * 3],
    "tessera_lag_softmax": [
        *(_POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
        *(_POINTER, _POINTER, _SIZE, ctypes.c_int),
        *[_POINTER] * 6,
    ],
    "tessera_lag_step": [_POINTER, _POINTER, _SIZE, _FLOAT, _FLOAT],
    "tessera_lag_examples": [],
}
_RESULTS: Final = {"tessera_lag_step": ctypes.c_int, "tessera_lag_examples": _SIZE}


@dataclass(frozen=True, slots=True)
class LagLibrary:
    """The loops, or why there are none: then PyTorch does the same."""

    loops: Any
    reason: str = ""


@cache
def lag_library() -> LagLibrary:
    """The library, if it was built and is of this version."""
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        return LagLibrary(None, "not built (no compiler at installation, or an older one)")
    try:
        library = ctypes.CDLL(found.origin)
        for name, types in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, _RESULTS.get(name)
    except OSError as error:
        return LagLibrary(None, f"does not load: {error}")
    except AttributeError as error:
        return LagLibrary(None, f"of another version: {error}")
    return LagLibrary(library)
