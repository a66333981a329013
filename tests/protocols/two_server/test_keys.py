"""What is taken in as keys can be evaluated later, and is checked once."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import two_servers
from tessera.crypto import dpf
from tessera.crypto.cuckoo import Layout, SimpleTable
from tessera.crypto.dpf import BITS, HEADER_BYTES, SELECTORS, Forest, Values
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.errors import PeerError
from tessera.ids import ClientId, RoundId
from tessera.protocols.two_server.reports import TOGETHER_BYTES, batches, check_keys, check_words

CLIENT = ClientId(7)
KINDS = (
    BITS,
    SELECTORS,
    Values(Ring(17), 1),
    Values(Ring(20), 3),
    Values(Ring(22), 19),
    Values(Ring(32), 2),
    Values(Ring(61), 3),
    Values(Ring(100), 2),
    Values(Ring(128), 1),
    Values(Field(61), 3),
)


def refusal(client: ClientId, reason: str) -> PeerError:
    return PeerError(reason, round_id=RoundId(1), phase="test", peer=client)


def is_taken(forest: Forest, data: bytes) -> bool:
    try:
        check_keys([forest], [data], refusal, CLIENT)
    except PeerError as error:
        assert error.peer == CLIENT and error.reason.startswith("sent invalid keys")
        return False
    return True


def is_expandable(forest: Forest, data: bytes) -> bool:
    """By hand: the length, the forest they name, and every word unpacked."""
    if len(data) != forest.public_bytes or data[:HEADER_BYTES] != forest.digest:
        return False
    group = forest.values.group
    try:
        if group is not None:
            words = forest.trees.count * forest.values.per_leaf * forest.values.words
            group.unpack(data[len(data) - forest.finals_bytes :], words)
    except ValueError:
        return False
    return True


@lru_cache
def keys(values: Values, rows: int, bins: int, stash: int = 0) -> tuple[Forest, bytes]:
    """A forest over hashed bins, and one client's keys for it."""
    forest = Layout.of(SimpleTable.of(rows, bins, 5, stash=stash), values).forest
    points = np.where(forest.sizes > 0, forest.sizes - 1, -1)
    entropy = ScriptedEntropy(b"keys")
    words = None
    if values.group is None:
        aim = dpf.retrieval_points(forest, points, entropy.secret("aim"))
        points, words = aim.points, aim.values
    else:
        words = values.group.zeros((forest.bins, values.words))
    pair = dpf.gen(forest, points, words, report_id=bytes(32), entropy=entropy)
    return forest, pair.public.to_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_exactly_what_can_be_expanded_is_taken_in(data):
    """The check unpacks nothing where it need not, and says what unpacking would say."""
    values = data.draw(st.sampled_from(KINDS))
    shape = data.draw(st.tuples(st.integers(3, 60), st.integers(3, 20), st.integers(0, 1)))
    forest, good = keys(values, *shape)
    assert is_taken(forest, good) and is_expandable(forest, good)
    finals = len(good) - forest.finals_bytes
    ends = [place - 1 for place in (HEADER_BYTES, finals, len(good))]
    place = data.draw(st.sampled_from(ends) | st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[place] ^= data.draw(st.integers(1, 255))
    for odd in (bytes(changed), good[:-1], good + b"\0", b"", good[:HEADER_BYTES]):
        assert is_taken(forest, odd) == is_expandable(forest, odd)
    ones = good[:finals] + b"\xff" * forest.finals_bytes  # not reduced, where that is possible
    assert is_taken(forest, ones) == is_expandable(forest, ones)


def test_bits_astray_and_words_that_are_not_reduced_are_among_what_is_refused():
    """So that the test above has seen them: of each kind, one that only the last checks notice."""
    forest, good = keys(Values(Ring(17), 1), 20, 7)
    assert forest.finals_bytes * 8 % 17
    odd = bytearray(good)
    odd[-1] |= 0x80
    assert odd != good and not is_taken(forest, bytes(odd))
    forest, good = keys(Values(Field(61), 3), 20, 7)
    assert not is_taken(forest, good[: -forest.finals_bytes] + b"\xff" * forest.finals_bytes)


@given(data=st.data())
def test_packed_words_are_taken_as_they_would_be_unpacked(data):
    group = data.draw(st.sampled_from([Ring(17), Ring(22), Ring(32), Ring(100), Field(61)]))
    count = data.draw(st.integers(0, 9))
    size = -(-count * group.bits // 8)
    some = data.draw(
        st.binary(min_size=size, max_size=size) | st.just(b"\xff" * size) | st.binary(max_size=99)
    )
    said = []
    for step in (lambda: group.unpack(some, count), lambda: check_words(group, some, count)):
        try:
            step()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    assert said[0] == said[1]


def test_a_public_part_has_keys_for_every_table():
    forest, good = keys(BITS, 20, 7)
    with pytest.raises(PeerError, match="keys for 1 tables, 2 are expected"):
        check_keys([forest, forest], [good], refusal, CLIENT)


def test_keys_are_checked_once_at_each_server(monkeypatch):
    real, seen = dpf.PublicKeys.from_bytes.__func__, Counter()

    def counting(cls, forest, data):
        seen[bytes(data)] += 1
        return real(cls, forest, data)

    monkeypatch.setattr(dpf.PublicKeys, "from_bytes", classmethod(counting))
    network = two_servers.Network.of(
        two_servers.params(two_servers.table(), two_servers.table(name=1))
    )
    network.writing(network.handshake())
    rows = {0: two_servers.ids(1), 1: two_servers.ids(2)}
    network.write({c: two_servers.update(network.params, rows, c) for c in network.clients})
    assert network.total is not None
    assert len(seen) == 2 * len(network.clients) and set(seen.values()) == {2}


def test_more_reports_than_go_together_are_all_summed(monkeypatch):
    forest = Forest.of(np.full(2000, 3), BITS)
    most = TOGETHER_BYTES // (16 * 2000)
    sizes = [len(some) for some in batches([None] * (2 * most + 1), forest)]
    assert sizes == [most, most, 1]
    assert list(batches([], forest)) == []
    monkeypatch.setattr("tessera.protocols.two_server.reports.TOGETHER_BYTES", 1)
    network = two_servers.Network.of(two_servers.params(clients=5))
    header = network.handshake()
    network.writing(header)
    given_ = {
        c: two_servers.update(network.params, {0: two_servers.ids(c, 30)}, c)
        for c in network.clients
    }
    network.write(given_)
    assert two_servers.opened(network.params, network.total) == two_servers.plain_sum(
        network.params, given_.values()
    )
