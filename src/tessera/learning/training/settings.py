"""LocalTraining: how a client trains in a round; numbers only, so that a plan can hold it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar

from tessera.errors import ConfigError

# --- learning rate --------------------------------------------------------------------------------
#
# learning_rate: the full name of `rate`, in Python as in a plan's file.
#
# Sections of a plan call it `rate`; who writes `learning_rate` means the same. Both at once is an
# error.


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


# --- local training -------------------------------------------------------------------------------

MOST_BATCH: Final = 2**31
MOST_EPOCHS: Final = 100_000

FAILURES: Final = (
    ArithmeticError,
    AssertionError,
    IndexError,
    MemoryError,
    RuntimeError,
    ValueError,
)
"""What training raises because of the values it was given. A misspelt name, an object of the wrong
type or a missing file is a fault of the program, whoever trains, and stops the run."""


@spelt_out
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """Stochastic gradient descent of a client over its own examples.

    With a task, what a plan leaves out is the task's: the whole section, or single keys.
    """

    batch: int = 8
    """Examples in a batch; 0: all at once."""
    epochs: int = 1
    """Passes over a client's examples in a round."""
    examples: int = 0
    """Examples that a client trains on in a round, at most; 0: all it has.

    They are drawn anew in each round, without replacement. In fixed groups 0 is what 95% of the
    task's clients have at most: others do not wait for whoever has more.
    """
    rate: float = 0.3
    """The learning rate."""
    decay: float = 0.999
    """Factor on the rate, per round."""
    clip: float = 0.0
    """Bound on the norm of a batch's gradient; 0: none.

    Dense part and rows together.
    """
    weight_decay: float = 0.0
    """L2 penalty on the parameters that a batch touches."""
    table_rate: float = 1.0
    """Factor on the rate for rows of tables."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("batch", 0, MOST_BATCH),
            ("epochs", 1, MOST_EPOCHS),
            ("examples", 0, MOST_BATCH),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}", hint=f"{name} is {least} to {most:,}"
                )
        for name in ("rate", "decay", "table_rate"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} = {getattr(self, name)}", hint=f"{name} is above 0")
        for name in ("clip", "weight_decay"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} = {getattr(self, name)}", hint=f"{name} is 0 or more")

    def rate_in(self, round_id: int) -> float:
        """The learning rate of a round; rounds count from 0."""
        return self.rate * self.decay**round_id
