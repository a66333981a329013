"""Knowledge: what an attacker has beside the transcript of a run.

The plan is public, and so are its seed and everybody's number. What a client draws must not follow
from them; here is what it would be if it did, in the ways that are near at hand: own rows as they
are in the module that the plan's seed builds, or secrets that follow from seed, round and number.
And a person may be known from elsewhere, such as by how many examples it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from tessera import tasks
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.data.examples import Examples
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.learning.bound_model import BoundModel, first_rows
from tessera.learning.training.jobs import drawn
from tessera.plan import Plan
from tessera.privacy.index.posterior import Floats
from tessera.tasks import Task


def public_secret(plan: Plan, *numbers: int) -> Secret:
    """A secret that is none: it follows from the plan's seed and public numbers."""
    return Secret(hashlib.sha256(encode_context(Label.PUBLIC_DRAWS, plan.seed, *numbers)).digest())


@dataclass(frozen=True, slots=True)
class PublicKnowledge:
    """What follows from a plan and its task; `examples` is known of persons."""

    plan: Plan
    bound: BoundModel = field(repr=False)
    examples: Mapping[ClientId, int] = field(repr=False)

    @classmethod
    def of(cls, plan: Plan, task: Task) -> Self:
        counts = np.diff(task.data.offsets).tolist()
        return cls(
            plan,
            task.bind(task.build(plan.seed)),
            {ClientId(client): count for client, count in enumerate(counts)},
        )

    def first_rows(self, clients: Sequence[ClientId], width: int) -> list[Floats]:
        """Of local tables with a row for each client and at least so many columns."""
        found = []
        for t in self.bound.tables:
            if not t.local or t.rows != len(self.examples) or t.width < width:
                continue
            ids = np.array([int(c) for c in clients], dtype=np.uint64)
            by_seed = self.bound.table(t.name, seed=self.plan.seed).values(ids)
            by_number = np.concatenate(
                [
                    first_rows(self.bound, t.name, ids[i : i + 1], public_secret(self.plan, int(c)))
                    for i, c in enumerate(clients)
                ]
            )
            found += [rows[:, :width].astype(np.float64) for rows in (by_seed, by_number)]
        return found

    def drawn(self, round_id: int, client: ClientId, count: int) -> npt.NDArray[np.int64]:
        """The places of the examples that a client with so many would train on in a round."""
        most = self.plan.local_training.examples
        coins = public_secret(self.plan, round_id, int(client))
        places: npt.NDArray[np.int64] = drawn(Examples({"place": np.arange(count)}), most, coins)[
            "place"
        ]
        return places


def of_run(plan: Plan) -> PublicKnowledge | None:
    """Of a run's task; None if it has none, or its data are not at hand."""
    try:
        task = tasks.load(plan.task.name, **plan.task.options)
    except ConfigError:
        return None
    return PublicKnowledge.of(plan, task)
