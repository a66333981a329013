"""Secure sums on their own: clients with their inputs at hand, a server that walks its stages.

A round of training decides each input when its stage comes; where the inputs are known from the
start (a demo, a benchmark, a test, a federated statistic) these two need no further driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tessera.ids import Party, TableId
from tessera.protocols.machine import Outbound, RoundOutcome
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.server import Server
from tessera.protocols.secagg.states import Reveal


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInput:
    """A client's rows of one table: ascending positions and a matrix of words."""

    rows: npt.NDArray[np.uint64] = field(repr=False)
    words: npt.NDArray[Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """All that a client puts into one stage."""

    dense: npt.NDArray[Any] | None = field(default=None, repr=False)
    tables: Mapping[TableId, RowInput] = field(default_factory=dict, repr=False)
    quorum: int = 0


class Contributor:
    """A client that answers every message at once from the contributions it was given."""

    def __init__(self, client: Client, contributions: Sequence[Contribution]) -> None:
        self.client = client
        self.contributions = contributions

    @classmethod
    def wake(
        cls,
        snapshot: bytes,
        messages: Mapping[bytes, bytes],
        setup: SecAggClientSetup,
        contributions: Sequence[Contribution],
    ) -> Self:
        """The client is stored; its contributions are its caller's to keep."""
        return cls(Client.wake(snapshot, messages, setup), contributions)

    @property
    def phase(self) -> str:
        return self.client.phase

    @property
    def expected(self) -> frozenset[Party]:
        return self.client.expected

    def snapshot(self) -> bytes:
        return self.client.snapshot()

    @property
    def messages(self) -> Mapping[bytes, bytes]:
        return self.client.messages

    def over(self, outcome: RoundOutcome, reason: str = "") -> None:
        self.client.over(outcome, reason)

    def close_phase(self) -> list[Outbound]:
        return self.client.close_phase()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        out = self.client.receive(sender, data)
        while self.client.wants is not None:
            given = self.contributions[self.client.stage]
            if self.client.awaits_rows:
                wish = {table: part.rows for table, part in given.tables.items()}
                out += self.client.submit(Reveal(tables=wish, quorum=given.quorum))
                break
            tables = {
                table: given.tables[table].words[np.searchsorted(given.tables[table].rows, rows)]
                for table, rows in self.client.included.items()
            }
            out += self.client.submit(Input(dense=given.dense, tables=tables))
        return out


class Aggregator(Server):
    """A server whose stages follow each other without anybody's word."""

    def close_phase(self) -> list[Outbound]:
        out = super().close_phase()
        return [*out, *self.begin_stage()] if self.phase == "between" else out
