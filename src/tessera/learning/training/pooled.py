"""Centralised training: all clients' examples in one place, as the reference for accuracy.

A round is as many examples as a cohort has on average (Niu et al. 2020, long version, VI-A), so
that curves can be laid over those of federated training. Only rows that the examples touch are
held, and a step costs what its batch touches: the optimiser's state of a row rests while no batch
names it (lazy), and Adam's bias correction counts the row's own steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples
from tessera.errors import ConfigError
from tessera.learning.softmax import CANDIDATES, log_weights
from tessera.learning.tables.submodel import Floats, Ids
from tessera.learning.tables.table import LazyTable, StoredTable
from tessera.learning.training.jobs import Trainable, order, tensor
from tessera.learning.training.local import dropout_from, gradients, train_mode

Optimizer: TypeAlias = Literal["adam", "adagrad", "sgd"]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

RATES: Final[Mapping[str, float]] = {"adam": 1e-3, "adagrad": 0.05}
FIRST: Final = 0.9
SECOND: Final = 0.999
SMALL: Final = 1e-8

DENSE: Final = ""
"""The dense part's name among the parts; a table cannot be called so."""


def round_size(data: ClientData, cohort: int, most: int = 0) -> int:
    """How many examples a cohort trains on, on average; `most`: of each client, 0: all."""
    mean = len(data.train) / data.clients
    return max(1, round(cohort * (min(mean, most) if most else mean)))


class OptimizedRows:
    """Some rows of parameters with the state of their optimiser. The dense part is one row."""

    def __init__(self, values: Tensor, optimizer: Optimizer) -> None:
        self.values = values
        self.optimizer = optimizer
        self.steps = torch.zeros(len(values), 1)
        kinds = {"adam": 2, "adagrad": 1, "sgd": 0}[optimizer]
        self.state = tuple(torch.zeros_like(values) for _ in range(kinds))

    def descend(self, at: Tensor, up: Tensor, rate: float) -> None:
        """Move the rows `at` against their gradient."""
        self.steps[at] += 1
        if self.optimizer == "adam":  # Kingma and Ba 2015, Alg. 1
            first, second = self.state
            m = first[at] = first[at].lerp(up, 1 - FIRST)
            v = second[at] = second[at] * SECOND + up * up * (1 - SECOND)
            t = self.steps[at]
            up = (m / (1 - FIRST**t)) / ((v / (1 - SECOND**t)).sqrt() + SMALL)
        elif self.optimizer == "adagrad":
            (total,) = self.state
            total[at] += up * up
            up = up / (total[at].sqrt() + SMALL)
        self.values[at] -= rate * up

    def arrays(self) -> Arrays:
        parts = {"values": self.values, "steps": self.steps}
        parts |= {f"state{i}": array for i, array in enumerate(self.state)}
        return {name: array.numpy().copy() for name, array in parts.items()}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.values, self.steps, *state = (torch.tensor(array) for array in arrays.values())
        self.state = tuple(state)


class CentralTrainer:
    """Trains a module on pooled examples, shuffled anew in every epoch.

    `rate` defaults to the usual one of Adam or Adagrad, and to `training.rate` for SGD. It falls by
    `training.decay` per round; clip, weight decay and table rate are those of `training`, whose
    batch and epochs are a client's and not used here. Local tables are trained like the others. A
    batch whose loss or gradient is not finite is left out and counted in `not_finite`.
    """

    def __init__(
        self,
        model: Trainable,
        *,
        examples: Examples,
        tables: Mapping[str, StoredTable],
        coins: Secret,
        batch: int = 256,
        optimizer: Optimizer = "adam",
        rate: float | None = None,
        negatives: int = 0,
    ) -> None:
        """`tables` are as training begins. Order, dropout and negatives follow from the `coins`.

        `negatives` are rows that a softmax has beside those of the batch; 0: all there are.
        """
        if optimizer not in get_args(Optimizer):
            raise ConfigError(
                f"central: optimizer = {optimizer!r}",
                hint=f"it takes {', '.join(get_args(Optimizer))}",
            )
        if batch < 1 or not len(examples):
            raise ConfigError(
                f"central: batch = {batch}, {len(examples)} examples", hint="both are 1 or more"
            )
        bound, training = model.bound, model.training
        self.model = model
        self.batch = batch
        self.rate = RATES.get(optimizer, training.rate) if rate is None else rate
        self.negatives = negatives
        self._coins, self._examples, self._start = coins, examples, tables
        self._ids = bound.all_row_ids_of(examples)
        dense = torch.from_numpy(bound.pack(model.module)).view(1, bound.dense_size)
        self._parts = {DENSE: OptimizedRows(dense, optimizer)}
        for name, ids in self._ids.items():
            self._parts[name] = OptimizedRows(
                torch.from_numpy(self._start[name].values(ids)), optimizer
            )
        self._epoch = self._at = self._owed = self.rounds = self.not_finite = 0
        self._order = self._shuffled()

    def run(self, examples: int) -> float:
        """One round over the next `examples` examples, on into new epochs; its mean loss.

        Batches stay whole: what a round has too many, the next has less.
        """
        self._owed += examples
        rate = self.rate * self.model.training.decay**self.rounds
        losses = []
        with train_mode(self.model.module):
            while self._owed > 0:
                which = self._order[self._at : self._at + self.batch]
                with dropout_from(self._coins_here):
                    losses.append(self._step(which, rate))
                self._owed -= which.size
                self._at += which.size
                if self._at == self._order.size:
                    self._epoch, self._at = self._epoch + 1, 0
                    self._order = self._shuffled()
        self.rounds += 1
        seen = np.concatenate([np.empty(0, np.float32), *losses])
        return float(seen.mean(dtype=np.float64)) if seen.size else float("nan")

    @property
    def dense(self) -> Floats:
        """The dense part as it is now."""
        return self._parts[DENSE].values.view(-1).numpy().copy()

    def tables(self) -> dict[str, Floats | StoredTable]:
        """Every table as it is now: all rows as an array, or by id where rows start by a rule."""
        now: dict[str, Floats | StoredTable] = {}
        for name, ids in self._ids.items():
            values = self._parts[name].values.numpy()
            if self.model.bound[name].initial is None:
                array = self.model.bound.initial(name)
                array[ids] = values
                now[name] = array
            else:
                table = LazyTable(self._start[name].spec)
                table.put(ids, values, np.ones(ids.size, np.int64))
                now[name] = table
        return now

    def parameters(self) -> dict[str, Floats | StoredTable]:
        """The model by parameter name, as `evaluate` takes it."""
        return self.model.bound.parameters(self.dense, self.tables())

    def state(self) -> Arrays:
        """All that a later process needs to go on as if it were this one."""
        where = [self._epoch, self._at, self._owed, self.rounds, self.not_finite]
        arrays: Arrays = {"position": np.array(where, np.int64)}
        for name, part in self._parts.items():
            arrays |= {f"{name}/{kind}": array for kind, array in part.arrays().items()}
        return arrays

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from an exported state, of the same module, examples and settings."""
        ours = {name: (array.shape, array.dtype) for name, array in self.state().items()}
        if {name: (array.shape, array.dtype) for name, array in state.items()} != ours:
            raise ConfigError(
                "central: the stored state is of another model, data set or optimiser",
                hint="resume with the plan and the data the run was started with",
            )
        where = (int(value) for value in state["position"])
        self._epoch, self._at, self._owed, self.rounds, self.not_finite = where
        for name, part in self._parts.items():
            part.load({kind: state[f"{name}/{kind}"] for kind in part.arrays()})
        self._order = self._shuffled()

    def _shuffled(self) -> npt.NDArray[np.int64]:
        return order(self._coins, self._epoch, len(self._examples))

    @property
    def _coins_here(self) -> Secret:
        """Those of the next batch."""
        return self._coins.derive(Label.CENTRAL_BATCH, self._epoch, self._at)

    def _step(self, which: npt.NDArray[np.int64], rate: float) -> Floats:
        """One batch; its losses before the step, or none if it had to be left out."""
        examples = self._examples.take(which)
        candidates, shared = self._candidates(examples)
        ids = self.model.bound.all_row_ids_of(examples, candidates)
        batch = self.model.bound.positions(examples, ids)
        slots = {
            name: torch.from_numpy(np.searchsorted(self._ids[name], own))
            for name, own in ids.items()
        }
        dense = self._parts[DENSE]
        rows = {name: self._parts[name].values[at] for name, at in slots.items()}
        ups = gradients(
            self.model,
            dense=dense.values.view(-1),
            rows={name: _never_empty(values) for name, values in rows.items()},
            batch={name: tensor(column) for name, column in batch.items()} | shared,
        )
        every = (ups.losses, *ups.dense.values(), *ups.rows.values())
        if not all(bool(torch.isfinite(array).all()) for array in every):
            self.not_finite += 1
            return np.empty(0, np.float32)
        with torch.no_grad():
            flat = torch.cat([torch.empty(0), *(up.reshape(-1) for up in ups.dense.values())])
            dense.descend(torch.zeros(1, dtype=torch.int64), flat.view(1, flat.numel()), rate)
            for name, at in slots.items():
                # Rows can be here only because a table beside theirs needs them: those rest.
                own = torch.from_numpy(self.model.bound.involved(batch, name, len(at)) > 0)
                up = ups.rows[name][: len(at)][own]
                self._parts[name].descend(at[own], up, rate * self.model.training.table_rate)
        losses: Floats = ups.losses.numpy()
        return losses

    def _candidates(self, examples: Examples) -> tuple[Ids | None, dict[str, Tensor]]:
        """The rows that a softmax is over in this batch, and what they stand for.

        Nothing is hidden in one place: negatives are drawn anew for every batch.
        """
        softmax = self.model.bound.candidates
        if softmax is None:
            return None, {}
        every = self._ids[softmax.root]
        if not self.negatives:
            return every, {}
        own = self.model.bound.row_ids_of(examples)[softmax.root]
        coins = CoinStream(Stream.of(self._coins_here, Label.CENTRAL_NEGATIVES))
        u = coins.uniform(min(self.negatives, every.size))
        drawn = every[(u * every.size).astype(np.int64)]
        candidates = np.union1d(own, drawn)
        return candidates, {CANDIDATES: tensor(log_weights(every.size, candidates, own))}


def _never_empty(values: Tensor) -> Tensor:
    """At least one row, as a module looks up row 0 for a masked id."""
    return values if len(values) else values.new_zeros(1, values.shape[1])
