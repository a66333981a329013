"""learning_rate: the full name of `rate`, in Python as in a plan's file.

Sections of a plan call it `rate`; who writes `learning_rate` means the same. Both at once is an
error.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any, TypeVar

from tessera.errors import ConfigError

K = TypeVar("K", bound=type[Any])

NAME = "learning_rate"


def spelt_out(kind: K) -> K:
    """The dataclass, which then takes `learning_rate=` for `rate=` and has it as a property."""
    make = kind.__init__

    @wraps(make)
    def init(self: Any, **given: Any) -> None:
        if NAME in given:
            if "rate" in given:
                raise ConfigError(
                    f"{kind.__name__}: {NAME} = {given[NAME]} and rate = {given['rate']}",
                    hint="they are two names for one thing",
                )
            given["rate"] = given.pop(NAME)
        make(self, **given)

    known = inspect.signature(make)
    rate = known.parameters["rate"]
    init.__signature__ = known.replace(  # type: ignore[attr-defined]
        parameters=[*known.parameters.values(), rate.replace(name=NAME)]
    )
    kind.__init__ = init
    setattr(kind, NAME, property(lambda self: self.rate, doc="`rate` by its full name."))
    return kind
