"""A row is offered to one group in its client's life: to another one it is not sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from lying_server import TABLE, LyingServer
from tessera.data.row_names import OwnNames, RowNames
from tessera.ids import ClientId
from tessera.privacy.index.period import AnotherGroup, MemoryPeriods
from tessera.services.offered_rows import OfferedRows, OneGroup


def with_store(server: LyingServer, store: OfferedRows, *, other: bool = False) -> None:
    """Every client of this group keeps what it offers in one store of its account; in the `other`
    group of these clients one of them is somebody else."""
    names = RowNames([f"thing {row}" for row in range(server.plan.table(TABLE).rows)])
    keys = {leaf.client: leaf.key for leaf in server.group.leaves}
    if other:
        keys[ClientId(0)] = bytes(32)
    for client, device in server.devices.items():
        own = OwnNames(
            person=f"person {client}",
            source="its own",
            naming="things",
            kinds={TABLE: "thing"},
            names={"thing": names},
        )
        periods = OneGroup(
            MemoryPeriods(), store, server.plan, client, own, directory=keys, members=tuple(keys)
        )
        server.devices[client] = device.with_periods(periods)


def test_rows_are_offered_to_one_group_only(tmp_path: Path) -> None:
    store = OfferedRows(tmp_path)
    first, same, second = LyingServer(0), LyingServer(0), LyingServer(0)  # the same rows
    for server in (first, same, second):
        with_store(server, store, other=server is second)
    first.epoch()
    same.epoch()
    with pytest.raises(AnotherGroup):
        second.epoch()
