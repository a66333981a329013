"""ServerModel: the model as one server has it, and the step that a round makes of it.

Leader and helper have one each. Both step it by the same means, and their digests stay the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from typing import Final

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError
from tessera.ids import RoundId
from tessera.learning.averaging import Averaging
from tessera.learning.popularity import Popularity
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.submodel import Floats
from tessera.learning.tables.table import StoredTable
from tessera.plan import Plan
from tessera.rounds.noise import noise_of
from tessera.rounds.words import RoundResult

DENSE: Final = "dense"
"""The dense part's name beside what the step remembers of it."""


class ServerModel:
    """Dense part, tables and what the plan's server step remembers."""

    def __init__(
        self,
        plan: Plan,
        *,
        dense: Floats,
        tables: Mapping[str, StoredTable],
        derived: Mapping[str, DerivedMap] | None = None,
        popularity: Popularity | None = None,
        counts: bytes = b"",
    ) -> None:
        """`popularity` says what rows' sums are divided by, where [dp] has them selected; `counts`
        is the digest of public counts by which clients draw negatives."""
        self.counts = counts
        self.dense, self.tables, self.derived = dense, tables, dict(derived or {})
        noise = noise_of(plan)
        self.averaging = Averaging(
            plan.server_step,
            plan.model.dense,
            tables,
            noise.divisors(popularity),
            noise.on_a_sum,
        )

    def step(self, result: RoundResult, round_id: RoundId) -> None:
        """Step by the means of a round."""
        # Without any examples there is no mean, and momentum does not advance either.
        mean = result.dense if result.weight else None
        self.dense = self.averaging.apply(
            self.dense, mean, result.tables, int(round_id), result.weight
        )

    def copy(self) -> ServerModel:
        """The same model as another server has it: nothing of it is shared but public maps."""
        return deepcopy(self, {id(self.derived): self.derived})

    @property
    def digest(self) -> bytes:
        """Of every value that has moved: the dense part, rows, and what is remembered."""
        hashed = hashlib.sha256(Label.SERVER_MODEL.encode())
        for name, array in sorted(self.dense_parts.items()):
            hashed.update(encode_context(name, array.tobytes()))
        for table in sorted(self.stored_tables, key=lambda table: table.name):
            ids = table.touched_ids
            values = table.values(ids)
            hashed.update(encode_context(table.name, ids.tobytes(), values.tobytes()))
        return hashed.digest()

    # --- for a store ----------------------------------------------------------------------------

    @property
    def stored_tables(self) -> tuple[StoredTable, ...]:
        """All that is kept by row."""
        return (*self.tables.values(), *self.averaging.state)

    @property
    def dense_parts(self) -> dict[str, Floats]:
        """All that is not, by name."""
        return {DENSE: self.dense, **self.averaging.dense_state}

    def restore(self, parts: Mapping[str, Floats]) -> None:
        """Take `dense_parts` back from a store; the tables are the store's business."""
        if DENSE not in parts:
            raise MisuseError("a stored model has a dense part, if an empty one")
        self.averaging.dense_state = {name: part for name, part in parts.items() if name != DENSE}
        self.dense = parts[DENSE]
