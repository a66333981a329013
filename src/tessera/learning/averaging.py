"""Per-row means into the model: how the server steps, on the rows of a round and no others.

A row's mean is over the clients that trained it, weighted by their examples that involve it; the
dense part's is over all, by training-set size (Niu et al. 2020, long version, Alg. 1). The server
takes the mean as it is, or as a gradient of its own (Reddi et al., *Adaptive Federated
Optimization*, ICLR 2021, Alg. 2):

    plain       x += rate * mean
    momentum    m = momentum * m + mean;  x += rate * m
    adaptive    m = momentum * m + (1 - momentum) * mean
                v = beta2 * v + (1 - beta2) * mean^2;  x += rate * m / (sqrt(v) + epsilon)
    adam        likewise, with m / (1 - momentum^t) and v / (1 - beta2^t) at a row's t-th step
    sum         x += mean * count: what clients sent, added up; under noise only what is over it

With noise counts are not known; where the rows' `Popularity` is, sums are divided by it.

With `shrinkage` a row's mean is first less shrinkage * row / count: a constant penalty, as of that
many examples that want the row at zero, which holds back the rows that few have trained.

Each row has its own m and v, which rest while the row is in no round: a step costs as much as the
union, not the table. We depart from the paper in that, and in v, which starts at 0 so that the
state of an untouched row need not be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables.submodel import Counts, Floats, Ids
from tessera.learning.tables.table import LazyTable, StoredTable, TableSpec, Zeros
from tessera.learning.training.settings import spelt_out

Optimizer: TypeAlias = Literal["plain", "momentum", "adaptive", "adam", "sum"]
Schedule: TypeAlias = Literal["constant", "linear"]

STEPS: Final = "steps"
"""How many steps a row has taken: one number each."""
STATES: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": (),
    "momentum": ("momentum",),
    "adaptive": ("momentum", "square"),
    "adam": ("momentum", "square", STEPS),
    "sum": (),
}


Divide: TypeAlias = Callable[[str, Ids, Counts], npt.NDArray[np.float64]]
"""(table, rows, clients in the sum) -> what the rows' sums are divided by; infinite: no step."""


class Average(StrEnum):
    """What a whole model's mean is taken by: training-set sizes, or row by row as rows are."""

    AUTO = "auto"  # the task's
    EXAMPLES = "examples"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class TableMean:
    """What a round says about a table: ids ascending, the mean delta of each row, its count."""

    ids: Ids = field(repr=False)
    mean: npt.NDArray[np.floating[Any]] = field(repr=False)
    counts: Counts = field(repr=False)


@spelt_out
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStep:
    """How the server applies the mean of a round.

    With a task, what a plan leaves out is the task's: the whole section, or single keys.
    """

    optimizer: Optimizer = "plain"
    """The server's step: "plain", "momentum", "adaptive", "adam" or "sum".

    As it is, with a running average, scaled by one of squares (Reddi et al. 2021, Alg. 2), the same
    with the first steps of each row corrected (Kingma and Ba 2015), or added up over clients.
    """
    rate: float = 1.0
    """The server's learning rate."""
    dense_rate: float = 0.0
    """That of the dense part; 0: the same as that of rows."""
    schedule: Schedule = "constant"
    """How the rate falls beside `decay`: not at all, or "linear", to 0 over `schedule_rounds`."""
    schedule_rounds: int = 0
    """Rounds over which a linear schedule falls; 0: those of [simulation]."""
    momentum: float = 0.9
    """Decay of the mean's running average, for all but "plain" and "sum"."""
    beta2: float = 0.99
    """Decay of the squared mean's running average, for "adaptive" and "adam"."""
    epsilon: float = 1e-3
    """Added to the root of that average."""
    shrinkage: float = 0.0
    """A penalty on every row, as of this many examples that want it at zero."""
    threshold: float = 0.0
    """Of "sum" under noise: deviations that a row's sum must be above; others are not merged.

    It is applied to noisy sums, and is not to be chosen by them. 0: all rows are merged.
    """
    decay: float = 1.0
    """Factor on the rate, per round."""

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(Optimizer):
            raise ConfigError(
                f"server: optimizer = {self.optimizer!r}",
                hint=f"it takes {', '.join(get_args(Optimizer))}",
            )
        if self.schedule not in get_args(Schedule):
            raise ConfigError(
                f"server: schedule = {self.schedule!r}",
                hint=f"it takes {', '.join(get_args(Schedule))}",
            )
        for own in ("dense_rate", "schedule_rounds", "threshold"):
            if not 0 <= getattr(self, own) < float("inf"):
                raise ConfigError(f"server: {own} = {getattr(self, own)}", hint="0 or more")
        for name in ("rate", "epsilon", "decay"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"server: {name} = {getattr(self, name)}", hint=f"{name} is above 0"
                )
        if not 0.0 <= self.shrinkage < float("inf"):
            raise ConfigError(
                f"server: shrinkage = {self.shrinkage}", hint="shrinkage is 0 or more"
            )
        for name in ("momentum", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"server: {name} = {getattr(self, name)}", hint=f"{name} is from 0 to below 1"
                )

    def rate_in(self, round_id: int, *, dense: bool = False) -> float:
        """The rate of a round, from 0 on; a linear schedule ends one step above zero."""
        rate = (dense and self.dense_rate) or self.rate
        if self.schedule == "linear" and self.schedule_rounds:
            rate *= max(1, self.schedule_rounds - round_id) / self.schedule_rounds
        return rate * self.decay**round_id

    def delta(
        self, mean: Floats, state: tuple[Floats, ...], rate: float
    ) -> tuple[Floats, tuple[Floats, ...]]:
        """How far to go at this rate, and the state after it, float32 and of the mean's shape."""
        if self.optimizer in ("plain", "sum"):
            return _scaled(mean, rate), ()
        if self.optimizer == "momentum":
            (m,) = state
            m = np.float32(self.momentum) * m + mean
            return _scaled(m, rate), (m,)
        m, v, *steps = state
        m = np.float32(self.momentum) * m + np.float32(1.0 - self.momentum) * mean
        v = np.float32(self.beta2) * v + np.float32(1.0 - self.beta2) * (mean * mean)
        first, second = m, v
        if steps:
            steps = [steps[0] + np.float32(1.0)]
            first = m / (1.0 - np.float32(self.momentum) ** steps[0])
            second = v / (1.0 - np.float32(self.beta2) ** steps[0])
        scale: Floats = np.sqrt(second, dtype=np.float32) + np.float32(self.epsilon)
        return _scaled(first / scale, rate), (m, v, *steps)


def _scaled(delta: Floats, rate: float) -> Floats:
    return delta if rate == 1.0 else np.float32(rate) * delta


class Averaging:
    """A server's step over one model, and what the step remembers.

    `state` are tables like the model's, zero where nothing was trained, for the same store;
    `dense_state` is to be stored and set with the dense part.
    """

    def __init__(
        self,
        step: ServerStep,
        dense_size: int,
        tables: Mapping[str, StoredTable],
        divide: Divide | None = None,
        deviation: float = 0.0,
    ) -> None:
        """`divide` gives what rows' sums are divided by, where that is not their counts;
        `deviation` is that of the noise on a sum, for the step's threshold."""
        self.step, self.divide = step, divide
        self.least = step.threshold * deviation
        self._tables = dict(tables)
        kinds = STATES[step.optimizer]
        self._state: dict[str, tuple[StoredTable, ...]] = {
            name: tuple(
                LazyTable(
                    TableSpec(
                        name=f"{name}.{kind}",
                        size=table.size,
                        width=1 if kind == STEPS else table.width,
                        initial=Zeros(),
                    )
                )
                for kind in kinds
            )
            for name, table in tables.items()
        }
        self._dense_state = {
            kind: np.zeros(1 if kind == STEPS else dense_size, np.float32) for kind in kinds
        }

    @property
    def state(self) -> tuple[StoredTable, ...]:
        """The tables of what is remembered per row."""
        return tuple(table for tables in self._state.values() for table in tables)

    @property
    def dense_state(self) -> dict[str, Floats]:
        """What is remembered of the dense part; set it to go on from a checkpoint."""
        return {kind: array.copy() for kind, array in self._dense_state.items()}

    @dense_state.setter
    def dense_state(self, state: Mapping[str, Floats]) -> None:
        shapes = {kind: array.shape for kind, array in self._dense_state.items()}
        if {kind: np.shape(array) for kind, array in state.items()} != shapes:
            raise ConfigError(
                f"server: the stored state is not that of {self.step.optimizer!r} steps over this "
                "dense part",
                hint="resume with the plan the run was started with",
            )
        self._dense_state = {kind: np.array(state[kind], np.float32) for kind in shapes}

    def apply(
        self,
        dense: Floats,
        dense_mean: npt.NDArray[np.floating[Any]] | None,
        means: Mapping[str, TableMean],
        round_id: int = 0,
        weight: int = 1,
    ) -> Floats:
        """Step the tables in place, and give the dense part after its step; `weight` is what its
        mean was divided by.

        Rows with count 0 and tables without a mean stay as they are, remembered state included; so
        does the dense part without a mean, when nobody's examples stand behind it. A step that
        would leave the floats is a `MisuseError`, and nothing is changed then.
        """
        if unknown := means.keys() - self._tables.keys():
            raise MisuseError(f"server: no table {sorted(unknown)[0]!r} to average into")
        with np.errstate(over="ignore", invalid="ignore"):  # found below, before anything changes
            stepped = dense.copy()
            dense_state: tuple[Floats, ...] | None = None
            if dense_mean is not None:
                if self.step.optimizer == "sum":
                    dense_mean = dense_mean * weight
                before = tuple(self._dense_state.values())
                rate = self.step.rate_in(round_id, dense=True)
                delta, dense_state = self.step.delta(dense_mean.astype(np.float32), before, rate)
                stepped += delta
            rows = [self._stepped(self._tables[name], means[name], round_id) for name in means]
        changed = [stepped, *(dense_state or ()), *(row for _, rows_ in rows for _, row in rows_)]
        if not all(np.isfinite(array).all() for array in changed):
            raise MisuseError("server: a step gives values that are not finite; none was taken")
        for ids, writes in rows:
            for table, values in writes:
                table.put(ids, values, np.ones(ids.size, np.int64))
        if dense_state is not None:
            self._dense_state = dict(zip(self._dense_state, dense_state, strict=True))
        return stepped

    def _stepped(
        self, table: StoredTable, mean: TableMean, round_id: int
    ) -> tuple[Ids, list[tuple[StoredTable, Floats]]]:
        """The rows with a positive count, and what they and their state are to be."""
        kept = mean.counts > 0
        if self.least:
            kept &= (mean.mean * mean.counts[:, None]).max(axis=1, initial=-np.inf) > self.least
        ids = mean.ids[kept]
        states, values = self._state[table.name], table.values(ids)
        means = mean.mean[kept].astype(np.float32)
        if self.step.optimizer == "sum":
            means = (mean.mean[kept] * mean.counts[kept, None]).astype(np.float32)
        if self.divide is not None:
            counts = mean.counts[kept]
            divided = counts / self.divide(table.name, ids, counts)
            means = means * divided[:, None].astype(np.float32)
        if self.step.shrinkage:
            share = np.float32(self.step.shrinkage) / mean.counts[kept, None].astype(np.float32)
            means = means - share * values
        before = tuple(state.values(ids) for state in states)
        delta, after = self.step.delta(means, before, self.step.rate_in(round_id))
        return ids, [(table, values + delta), *zip(states, after, strict=True)]
