"""What a table costs, predicted from the plan and counted on the wire."""

from __future__ import annotations

import pytest

import pairs
from tessera.crypto.dpf import SEED_BYTES
from tessera.crypto.ring import Ring
from tessera.protocols import wire
from tessera.protocols.pair.costs import cheapest, read_bytes, write_bytes
from tessera.protocols.pair.params import Read, Write


@pytest.mark.parametrize("spec", [pairs.table(40, 3), pairs.table(500, 8, words=9, row_bytes=32)])
def test_predicted_bytes_are_those_on_the_wire_up_to_the_rounds_bins(spec):
    pair = pairs.Pair.of(pairs.params(spec))
    header = pair.open()
    pair.reading(header)
    pair.read({pair.clients[0]: {0: pairs.ids(1)}})
    query, answers = wire.decode(pair.said("Query")[0]), wire.decode(pair.said("Answers")[0])
    told = len(query.public[0]) + 2 * SEED_BYTES + 2 * len(answers.tables[0])
    assert told == pytest.approx(read_bytes(spec).points, rel=0.1)
    pair.writing(header)
    report = wire.decode(pair.roles[pair.clients[1]].submit(None)[0].data)
    told = len(report.public[0]) + 2 * SEED_BYTES
    assert told == pytest.approx(write_bytes(spec, Ring(32)).points, rel=0.1)
    plain = pairs.Pair.of(pairs.params(pairs.table(spec.rows, 3, words=9, write=Write.DENSE)))
    plain.writing(plain.open())
    report = wire.decode(plain.roles[plain.clients[0]].submit(None)[0].data)
    assert len(report.dense) == spec.rows * 9 * 4
    assert write_bytes(pairs.table(spec.rows, 3, words=9), Ring(32)).whole == len(report.dense)


def test_the_cheaper_way_is_taken():
    wide = cheapest(pairs.table(100_000, 50, words=19, row_bytes=72), Ring(32))
    assert (wide.read, wide.write) == (Read.POINTS, Write.POINTS)
    narrow = cheapest(pairs.table(200, 100, words=1, row_bytes=1), Ring(32))
    assert (narrow.read, narrow.write) == (Read.WHOLE, Write.DENSE)
    assert cheapest(pairs.table(200, 100, words=1, row_bytes=1, stash=1), Ring(32)).stash == 0
    single = cheapest(pairs.small_table(), Ring(32))
    assert (single.read, single.write) == (Read.WHOLE, Write.DENSE)
    assert read_bytes(single).points is None and write_bytes(single, Ring(32)).points is None
