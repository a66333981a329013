"""Vectorised: a cohort's clients trained side by side, in slots that are refilled as they finish.

Shapes stay the same whoever is in a slot, so one compiled or recorded step serves all rounds. The
longest client goes first, or it would be left over at the end with nobody beside it. Which path and
which shapes a round takes follows from its jobs alone, never from rounds before: a resumed run ends
with the same bits.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tessera.learning.bound_model import BoundModel
from tessera.learning.tables.submodel import Floats
from tessera.learning.training.jobs import Job, PreparedJob, Trainable, Trained, finish, prepare
from tessera.learning.training.local import dropout_from, train_mode
from tessera.learning.training.vectorised.batches import Ints, Steps, lay_out
from tessera.learning.training.vectorised.step import Compiled, Step, side_by_side, take
from tessera.learning.training.vectorised.traced import Traced

SLOTS: Final = 20  # 16 to 20 are best on one core; beyond, weights fall out of its cache
AT_ONCE: Final = 1 << 26  # values laid out at a time, over all steps: 256 MB
RECORD_FROM: Final = 32  # steps; recording costs as much as a few dozen save
TAIL: Final = 4  # a quarter of the slots takes over once no more of them are busy

Outcome = tuple[int, Floats, dict[str, Floats], Floats]
"""A client, its dense part and rows after training, and its losses."""


class Vectorised:
    """Trains clients side by side; `check.best` says for which modules this is right."""

    def __init__(
        self,
        model: Trainable,
        *,
        compile: bool = False,
        slots: int = SLOTS,
        trim: bool = True,
        reason: str = "",
    ) -> None:
        """`trim`: sequences may reach the module shorter than they are in the examples."""
        self.name = "compiled" if compile else "vectorised"
        self.reason = reason
        self.model = model
        self.slots = slots
        self.trim = trim
        self.eager = side_by_side(model)
        self._compile = compile
        self._made: dict[tuple[object, ...], Step] = {}

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        """The jobs' outcomes, in their order."""
        clients = [prepare(self.model.bound, job) for job in jobs]
        done: dict[int, Trained] = {}
        for at, prepared in enumerate(clients):
            if prepared.examples == 0:
                rows = dict(prepared.values)
                none = np.empty(0, np.float32)
                done[at] = finish(
                    self.model.bound, prepared, prepared.job.submodel.dense, rows, none
                )
        busy = [at for at in range(len(clients)) if at not in done]
        if busy:
            coins = clients[busy[0]].job.coins  # dropout draws for all side by side
            with train_mode(self.model.module), dropout_from(coins), single_threaded():
                for some in self._portions(clients, busy):
                    own = [clients[at] for at in some]
                    steps = lay_out(self.model.bound, self.model.training, own, trim=self.trim)
                    for at, dense, rows, losses in self.outcomes(steps, round_id):
                        done[some[at]] = finish(self.model.bound, own[at], dense, rows, losses)
        return [done[at] for at in range(len(clients))]

    def _portions(self, clients: Sequence[PreparedJob], busy: Sequence[int]) -> Iterator[list[int]]:
        """Longest first, as many at a time as may be laid out together.

        Where there is a softmax every step takes all candidates of a client, filled up to those of
        the client that has most: clients with less than half as many go by themselves.
        """
        portion: list[int] = []
        held = 0
        root = None if self.model.bound.candidates is None else self.model.bound.candidates.root

        def candidates(at: int) -> int:
            return 0 if root is None else len(clients[at].rows[root])

        for at in sorted(busy, key=lambda at: (-candidates(at), -clients[at].examples, at)):
            batch = clients[at].batch.values()
            size = 2 * self.model.training.epochs * sum(column.size for column in batch)
            fewer = portion and 2 * candidates(at) < candidates(portion[0])
            if portion and (fewer or held + size > AT_ONCE):
                yield portion
                portion, held = [], 0
            portion.append(at)
            held += size
        if portion:
            yield portion

    def outcomes(self, steps: Steps, round_id: int) -> Iterator[Outcome]:
        """Run all steps; each client as it finishes."""
        slots = Slots(self.model.bound, steps, self.width(len(steps.clients)))
        rate = torch.tensor(self.model.training.rate_in(round_id), dtype=steps.weights.dtype)
        waiting = deque(range(len(steps.clients)))
        taken = 0
        while True:
            while waiting and slots.free:
                slots.fill(waiting.popleft())
            if not slots.busy:
                return
            ahead = slots.ahead
            narrower = self._narrower(slots, int(ahead.max()), taken)
            if not waiting and narrower is not None:
                slots = slots.narrowed(narrower)
            step = self.step_for(slots, int(ahead.max()))
            for _ in range(int(ahead.min())):
                slots.run(step, rate)
            taken += int(ahead.min())
            yield from slots.finished()

    def width(self, clients: int) -> int:
        """How many slots a round of this many clients gets.

        Compiled steps cost by the slot: two clients for each, so that short ones make up for long
        ones, and few different numbers. Others cost by the step.
        """
        if not self._compile:
            return min(self.slots, clients)
        return min(self.slots, -(-clients // 8) * 4)

    def _narrower(self, slots: Slots, left: int, taken: int) -> int | None:
        """To how many slots the clients left should move, if the rest is long enough to pay."""
        busy, width = len(slots.busy), slots.width
        if not self._compile:
            few = 1 << (busy - 1).bit_length()  # few different numbers, for few recordings
            return few if 2 * few <= width else None
        # Another shape is another compilation: for a fifth of the round's steps, not for less.
        few = max(1, self.slots // TAIL)
        return few if busy <= few < width and 4 * left >= taken else None

    def step_for(self, slots: Slots, steps: int) -> Step:
        """The step for slots of this shape, with this many steps to come.

        Compiled or recorded when it is first run, if it can be.
        """
        if not self._compile and steps < RECORD_FROM:
            return self.eager
        shape = slots.shape
        if shape not in self._made:
            kind, how = (Compiled, "compiled") if self._compile else (Traced, "recorded")
            what = f"; not {how} for {slots.width} slots"
            self._made[shape] = kind(self.eager, partial(self._note, what))
        return self._made[shape]

    def _note(self, what: str, why: str) -> None:
        self.reason += f"{what} ({why})"


class Slots:
    """Places for clients in training: their dense weights, and where each is in its steps."""

    def __init__(self, bound: BoundModel, steps: Steps, width: int) -> None:
        self.bound = bound
        self.steps = steps
        self.width = width
        kind = steps.weights.dtype
        self.dense = {name: torch.zeros((width, *shape), dtype=kind) for name, shape in bound.dense}
        self.rows = {  # of tables whose rows stay with their client
            name: torch.zeros((width, most, steps.values[name].shape[1]), dtype=kind)
            for name, most in steps.whole.items()
        }
        self.losses = torch.zeros_like(steps.weights)
        idle = int(steps.first[-1])
        self._client = np.full(width, -1)
        self._at = np.full(width, idle)
        self._end = np.full(width, idle)

    @property
    def busy(self) -> list[int]:
        return np.flatnonzero(self._client >= 0).tolist()

    @property
    def free(self) -> list[int]:
        return np.flatnonzero(self._client < 0).tolist()

    @property
    def ahead(self) -> Ints:
        """How many steps each busy slot still has to run."""
        ahead: Ints = (self._end - self._at)[self.busy]
        return ahead

    @property
    def shape(self) -> tuple[object, ...]:
        """What a compiled step depends on."""
        s = self.steps
        arrays = [*s.fields.items(), *s.rows.items(), *s.touched.items()]
        each = tuple((name, tuple(x.shape[1:]), x.dtype) for name, x in arrays)
        return (self.width, s.weights.dtype, each, tuple(s.whole.items()))

    def fill(self, client: int) -> None:
        """Give a free slot to a client: its own copy of the dense part it was sent."""
        slot = self.free[0]
        start = torch.from_numpy(np.array(self.steps.clients[client].job.submodel.dense))
        for name, view in self.bound.unpack(start).items():
            self.dense[name][slot].copy_(view)
        for name, rows in self.rows.items():
            begin, held = self._where(name, client)
            rows[slot].zero_()
            rows[slot, :held].copy_(self.steps.values[name][begin : begin + held])
        self._client[slot] = client
        self._at[slot], self._end[slot] = self.steps.first[client : client + 2]

    def _where(self, name: str, client: int) -> tuple[int, int]:
        """Where a client's rows begin among all, and how many there are."""
        return int(self.steps.begins[name][client]), len(self.steps.clients[client].values[name])

    def run(self, step: Step, rate: Tensor) -> None:
        """One step of every slot."""
        steps, values = self.steps, self.steps.values
        at = torch.from_numpy(self._at.copy())
        owner = steps.owner.index_select(0, at)
        where = {name: rows.index_select(0, at) for name, rows in steps.rows.items()}
        held = {name: _rows(values[name], rows) for name, rows in where.items()} | self.rows
        losses, new = step(
            self.dense,
            held,
            take(steps.fields, at) | take(steps.shared, owner),
            take(steps.touched, at),
            steps.weights.index_select(0, at),
            rate,
        )
        for name, rows in where.items():
            values[name].index_copy_(0, rows.view(-1), new[name].flatten(0, 1))
        self.losses.index_copy_(0, at, losses)
        self._at[self._client >= 0] += 1

    def finished(self) -> Iterator[Outcome]:
        """The clients that have run all their steps; their slots are free afterwards."""
        for slot in self.busy:
            if self._at[slot] < self._end[slot]:
                continue
            client = int(self._client[slot])
            parts = [weights[slot].reshape(-1) for weights in self.dense.values()]
            dense = torch.cat([torch.empty(0, dtype=self.losses.dtype), *parts]).numpy()
            losses = self.steps.losses_of(client, self.losses)
            for name, rows in self.rows.items():
                begin, held = self._where(name, client)
                self.steps.values[name][begin : begin + held].copy_(rows[slot, :held])
            yield client, dense, self.steps.values_of(client), losses
            self._client[slot] = -1
            self._at[slot] = self._end[slot] = self.steps.first[-1]

    def narrowed(self, width: int) -> Slots:
        """The busy slots among fewer."""
        fewer = Slots(self.bound, self.steps, width)
        fewer.losses = self.losses
        kept, n = self.busy, len(self.busy)
        for name, weights in self.dense.items():
            fewer.dense[name][:n].copy_(weights[kept])
        for name, rows in self.rows.items():
            fewer.rows[name][:n].copy_(rows[kept])
        for new, old in (
            (fewer._client, self._client),
            (fewer._at, self._at),
            (fewer._end, self._end),
        ):
            new[:n] = old[kept]
        return fewer


def _rows(values: Tensor, which: Tensor) -> Tensor:
    """values[which], for which `index_select` is the faster way."""
    return values.index_select(0, which.view(-1)).view(*which.shape, -1)


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread, denormals as zeros, and no warnings of torch about its own implementation.

    The matrices are small: more threads only cost. Saturated losses give denormal gradients, which
    slow the backward pass threefold.
    """
    threads = torch.get_num_threads()
    flushed = not bool(torch.tensor([1e-40]).mul(1.0).gt(0.0).any())
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
            yield
    finally:
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(threads)
