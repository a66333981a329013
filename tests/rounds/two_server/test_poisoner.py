"""One poisoner among a hundred clients: what it does to a table, with and without what bounds it.

Two rules bound it: both servers check that it writes one row in a bin (`verify`), and what honest
clients could not have summed to is not merged (`rounds/clipped_vector.py`). Within both it still
moves its rows, each by less than two clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import two_servers
from tessera.crypto.dpf import HEADER_BYTES
from tessera.crypto.kernel.points import BLOCK
from tessera.crypto.ring import Ring
from tessera.ids import SERVER
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.reports import layouts_of
from tessera.protocols.two_server.write.client import RowUpdate, Update
from tessera.rounds.clipped_vector import SumBounds

CLIENTS, ROWS, MOST, WIDTH, BITS = 100, 1000, 20, 4, 22
TOP, MAX_COUNT = 127, 5
BOUNDS = SumBounds(clients=CLIENTS, top=TOP, max_count=MAX_COUNT)


@dataclass(frozen=True)
class Damage:
    """Rows whose mean differs from what honest clients alone give, by how many clips at most, and
    rows that are not merged for it."""

    moved: int
    clips: float
    lost: int


def honest(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    rows = np.sort(rng.choice(ROWS, MOST, replace=False)).astype(np.uint64)
    counts = rng.integers(1, MAX_COUNT + 1, (MOST, 1))
    return rows, np.concatenate([rng.integers(-TOP, TOP + 1, (MOST, WIDTH)), counts], axis=1)


def any_keys(forest, public: bytes, rng: np.random.Generator) -> bytes:
    end = HEADER_BYTES + BLOCK * forest.trees.total_steps
    return public[:HEADER_BYTES] + rng.bytes(end - HEADER_BYTES) + public[end:]


def damage(how: str, *, verify: bool, bounded: bool) -> Damage:
    ring = Ring(BITS)
    params = two_servers.params(
        two_servers.table(ROWS, MOST, words=WIDTH + 1), clients=CLIENTS, group=ring, verify=verify
    )
    network = two_servers.Network.of(params)
    network.writing(network.handshake())
    due = np.zeros((ROWS, WIDTH + 1), dtype=np.int64)
    for c in network.clients:
        rng = np.random.default_rng(c)
        rows, values = honest(rng)
        cheat = c == network.clients[0]
        if not cheat:
            due[rows.astype(int)] += values
        elif how == "large":
            values[:, :WIDTH] = 1 << BITS - 1
        elif how == "within":
            values[:, :WIDTH], values[:, WIDTH] = TOP * MAX_COUNT, MAX_COUNT
        words = ring.from_ints(values.reshape(-1) % (1 << BITS)).reshape(MOST, WIDTH + 1)
        with pytest.MonkeyPatch.context() as patch:
            if cheat and how == "everywhere":
                forest = layouts_of(params, network.roles[SERVER].header).writing[0].forest
                real = reports.seal_box

                def sealed(context, public, forest=forest, real=real, rng=rng, **more):
                    public[0] = any_keys(forest, public[0], rng)
                    return real(context, public, **more)

                patch.setattr(reports, "seal_box", sealed)
            out = network.roles[c].submit(Update(None, {0: RowUpdate(rows, words)}))
        network.carry(c, out)
    network.close()
    part, found = network.total.tables[0], np.zeros_like(due)
    raw = np.array(ring.to_ints(part.words)).reshape(-1, WIDTH + 1)
    found[part.rows.astype(int)] = np.where(raw >> BITS - 1, raw - (1 << BITS), raw)
    merged = np.ones(ROWS, dtype=bool)
    if bounded:
        merged = BOUNDS.rows_within(found[:, :WIDTH], found[:, WIDTH])
    means, expected = (
        total[:, :WIDTH] / np.maximum(total[:, WIDTH:], 1) / TOP for total in (found, due)
    )
    apart = np.abs(means - expected).max(axis=1) * merged
    return Damage(int((apart > 0).sum()), float(apart.max()), int((~merged).sum()))


def test_with_neither_rule_one_client_moves_every_row_by_any_amount():
    found = damage("everywhere", verify=False, bounded=False)
    assert found.moved > 0.99 * ROWS and found.clips > 1000


def test_with_bounds_alone_it_keeps_the_whole_table_from_being_merged():
    found = damage("everywhere", verify=False, bounded=True)
    assert found.lost > 0.99 * ROWS


def test_with_the_check_it_is_left_out_and_nothing_moves():
    for bounded in (True, False):
        assert damage("everywhere", verify=True, bounded=bounded) == Damage(0, 0.0, 0)


def test_large_values_in_its_own_rows_pass_the_check_and_not_the_bounds():
    free = damage("large", verify=True, bounded=False)
    assert free.moved == MOST and free.clips > 1000
    held = damage("large", verify=True, bounded=True)
    assert held == Damage(0, 0.0, MOST), "its rows stay as they were, and no others"


def test_within_both_rules_it_moves_its_own_rows_by_less_than_two_clips():
    found = damage("within", verify=True, bounded=True)
    assert 0 < found.moved <= MOST and 0.5 < found.clips < 2.0 and found.moved + found.lost == MOST
