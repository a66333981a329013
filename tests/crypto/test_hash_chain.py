"""Committed chains: one value for each number, and none of them early."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.hash_chain import MAX_LENGTH, HashChain, follows
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from vectors import load


@pytest.mark.parametrize("vector", load("membership.json", "value"), ids=attrgetter("name"))
def test_values(vector: SimpleNamespace) -> None:
    found = follows(vector.value, vector.number, vector.commitment, vector.whose)
    assert found is vector.expect
    if found:
        chain = HashChain(Secret(vector.last), vector.length, vector.whose)
        assert chain.commitment == vector.commitment
        assert chain.value(vector.number) == vector.value


@given(st.binary(min_size=32, max_size=32), st.integers(1, 20), st.data())
def test_a_value_follows_from_every_earlier_one(
    last: bytes, length: int, data: st.DataObject
) -> None:
    chain = HashChain(Secret(last), length, b"helper")
    number = data.draw(st.integers(1, length))
    since = data.draw(st.integers(0, number - 1))
    known = chain.value(since) if since else chain.commitment
    value = chain.value(number)
    assert follows(value, number, known, b"helper", since=since)
    other = data.draw(st.integers(since + 1, length + 1).filter(lambda n: n != number))
    assert not follows(value, other, known, b"helper", since=since)
    assert not follows(known, number, known, b"helper", since=since)


def test_a_verifier_walks_no_further_than_the_longest_chain() -> None:
    assert not follows(bytes(32), 2**63, bytes(32), b"helper")
    assert not follows(bytes(32), MAX_LENGTH + 1, bytes(32), b"helper")
    assert not follows(bytes(32), 0, bytes(32), b"helper")


def test_a_chain_does_not_print_its_secret() -> None:
    chain = HashChain(Secret(b"\xab" * 32), 4, b"helper")
    assert "ab" * 4 not in repr(chain) and "\\xab" not in repr(chain)


def test_what_cannot_be_a_chain_is_refused() -> None:
    with pytest.raises(MisuseError, match="32 bytes"):
        HashChain(Secret(bytes(16)), 4, b"helper")
    for length in (0, MAX_LENGTH + 1):
        with pytest.raises(ConfigError, match=f"a hash chain of {length} values"):
            HashChain(Secret(bytes(32)), length, b"helper")
    for number in (0, 5):
        with pytest.raises(MisuseError, match=f"value {number} of a hash chain"):
            HashChain(Secret(bytes(32)), 4, b"helper").value(number)
