"""Keys of a plan that once had another name, or were not there.

The digest keeps the former names, and leaves a key that came later out where it has the value that
went without saying: it binds every key and signature of a round, so a plan that says the same must
keep the digest it had. A file with a former name is refused with a hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FORMER: Final[Mapping[tuple[str, str], str]] = {
    ("server", "beta2"): "memory",
    ("server", "shrinkage"): "pull",
    ("task", "items"): "goods",
    ("privacy", "group"): "fixed_groups",
}
"""(section, key): what the key was called before."""

ADDED: Final[Mapping[tuple[str, str], Any]] = {
    ("model", "packed"): "",
    ("model", "largest"): 65504.0,
    ("model", "shapes"): "",
    ("training", "examples"): 0,
    ("update", "top"): 1.0,
    ("update", "top_by"): "element",
    ("update", "error_feedback"): False,
    ("dp", "corrupt"): 0,
    ("dp", "rows"): "own",
    ("dp", "row_list"): "",
    ("dp", "row_limit"): 2**20,
    ("dp", "counts"): 0.0,
    ("dp", "printed"): "none",
    ("dp", "participation"): 0.0,
}
"""(section, key): the value under which plans without this key are meant."""


def former(section: str, key: str) -> str:
    """The name under which a key enters the digest."""
    return FORMER.get((section, key), key)


def implied(section: str, key: str, value: Any) -> bool:
    """Whether a key stays out of the digest."""
    return (section, key) in ADDED and bool(ADDED[section, key] == value)


def current(section: str, key: str) -> str | None:
    """What a key is called now, if this is its former name."""
    return next((new for (of, new), old in FORMER.items() if (of, old) == (section, key)), None)
