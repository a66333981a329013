"""A hint for a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(wanted: str, names: Iterable[str]) -> str:
    """A hint: the name that was meant, or those there are."""
    known = sorted(names)
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there are: {', '.join(known) or 'none'}"
