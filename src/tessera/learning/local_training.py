"""LocalTraining: how a client trains in a round; numbers only, so that a plan can hold it."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """Stochastic gradient descent over a client's examples, `epochs` times in batches.

    A `batch` of 0 is all examples at once.
    The rate falls by `decay` per round. `clip` bounds the norm of a batch's gradient, dense part
    and rows together (0: no bound); `weight_decay` pulls what a batch touches towards zero.
    `table_rate` multiplies the rate of table rows.
    """

    batch: int = 8
    epochs: int = 1
    rate: float = 0.3
    decay: float = 0.999
    clip: float = 0.0
    weight_decay: float = 0.0
    table_rate: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("batch", 0), ("epochs", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}", hint=f"{name} is {least} or more"
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
