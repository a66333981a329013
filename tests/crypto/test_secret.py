"""A Secret keeps its bytes to itself, and what derives from it is what RFC 5869 says."""

from __future__ import annotations

import copy
import dataclasses
import hmac
import pickle
import traceback
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.secret import MAX_DERIVED, Secret, encode_context
from tessera.errors import MisuseError
from vectors import expectation, load

CONTENT = bytes(range(0x41, 0x61))  # printable, so that a leak would be readable
CONTEXT = st.lists(st.integers() | st.binary(max_size=12) | st.text(max_size=12), max_size=4)


@dataclasses.dataclass(frozen=True)
class Record:
    key: Secret


@pytest.mark.parametrize(
    "shown",
    [
        repr(Secret(CONTENT)),
        str(Secret(CONTENT)),
        f"{Secret(CONTENT)}",
        f"{Secret(CONTENT)!r:>40}",
        f"{Secret(CONTENT):>40}",
        "%s" % Secret(CONTENT),  # noqa: UP031
        repr([Secret(CONTENT)]),
        repr(Record(Secret(CONTENT))),
        repr(dataclasses.asdict(Record(Secret(CONTENT)))),
    ],
)
def test_no_way_of_printing_shows_the_content(shown):
    assert "Secret(32 bytes)" in shown
    assert "ABC" not in shown
    assert CONTENT.hex() not in shown


def test_a_failed_derivation_does_not_show_the_content():
    with pytest.raises(MisuseError) as caught:
        Secret(b"ABCDEFG").derive("label")
    assert "ABC" not in "".join(traceback.format_exception(caught.value)).replace(
        'Secret(b"ABCDEFG")', ""
    )


def test_reveal_gives_the_bytes_back():
    assert Secret(CONTENT).reveal() == CONTENT
    assert Secret(bytearray(CONTENT)).reveal() == CONTENT
    assert Secret(memoryview(CONTENT)[4:]).reveal() == CONTENT[4:]


def test_a_secret_does_not_follow_the_buffer_it_was_made_from():
    buffer = bytearray(CONTENT)
    secret = Secret(buffer)
    buffer[0] ^= 1
    assert secret.reveal() == CONTENT


def test_length_and_truth_are_those_of_the_bytes():
    assert len(Secret(CONTENT)) == 32
    assert Secret(CONTENT)
    assert not Secret(b"")


def test_it_equals_a_secret_with_the_same_bytes_and_nothing_else():
    assert Secret(CONTENT) == Secret(CONTENT)
    assert Secret(CONTENT) != Secret(CONTENT[:-1])
    assert Secret(CONTENT) != Secret(CONTENT[:-1] + b"!")
    assert Secret(CONTENT) != CONTENT
    assert Secret(b"") != None  # noqa: E711


def test_comparison_goes_through_the_constant_time_one(monkeypatch):
    asked = []

    def spy(a, b):
        asked.append((a, b))
        return True

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert Secret(b"one") == Secret(b"two")
    assert asked == [(b"one", b"two")]


def test_it_is_no_dictionary_key():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Secret(CONTENT))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_is_not_pickled(protocol):
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Secret(CONTENT), protocol)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Record(Secret(CONTENT)), protocol)


def test_its_state_is_not_shown_either():
    with pytest.raises(TypeError):
        Secret(CONTENT).__getstate__()
    with pytest.raises(TypeError):
        vars(Secret(CONTENT))
    with pytest.raises(TypeError):
        bytes(Secret(CONTENT))


def test_a_copy_is_the_secret_itself():
    secret = Secret(CONTENT)
    assert copy.copy(secret) is secret
    assert copy.deepcopy(Record(secret)).key is secret


def test_it_does_not_change():
    secret = Secret(CONTENT)
    with pytest.raises(AttributeError):
        secret._content = b""
    with pytest.raises(AttributeError):
        del secret._content
    with pytest.raises(AttributeError):
        secret.note = "mine"
    assert secret == Secret(CONTENT)


@pytest.mark.parametrize("content", [32, "text", None, [1, 2], Secret(b"x")])
def test_it_is_made_of_bytes_only(content):
    with pytest.raises(MisuseError, match="made of bytes"):
        Secret(content)


def extract(salt: bytes, ikm: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), ikm, "sha256")


def expand(key: bytes, info: bytes, size: int) -> bytes:
    """RFC 5869, 2.3, written from the text."""
    output = block = b""
    for i in range(1, -(-size // 32) + 1):
        block = hmac.digest(key, block + info + bytes([i]), "sha256")
        output += block
    return output[:size]


@pytest.mark.parametrize("vector", load("hkdf.json", "rfc5869"), ids=attrgetter("name"))
def test_the_oracle_below_is_rfc_5869(vector):
    assert extract(vector.salt, vector.ikm) == vector.prk
    assert expand(vector.prk, vector.info, len(vector.okm)) == vector.okm


@pytest.mark.parametrize("vector", load("hkdf.json", "derive"), ids=attrgetter("name"))
def test_derive_gives_the_known_answer(vector):
    with expectation(vector):
        derived = Secret(vector.key).derive(vector.label, *vector.context, size=vector.size)
        assert derived == Secret(vector.output)


@given(st.binary(min_size=32, max_size=80), st.text(), CONTEXT, st.integers(1, 200))
def test_derive_is_hkdf_expand_over_the_encoded_context(key, label, context, size):
    info = b"tessera-1\0" + encode_context(size, label, *context)
    derived = Secret(key).derive(label, *context, size=size)
    assert derived.reveal() == expand(key, info, size)


def test_derive_reaches_as_far_as_the_rfc_allows():
    assert len(Secret(CONTENT).derive("long", size=MAX_DERIVED)) == MAX_DERIVED


def decode(data: bytes) -> list[int | bytes | str]:
    """The inverse of `encode_context`: that there is one is what makes it unambiguous."""
    items: list[int | bytes | str] = []
    while data:
        size = int.from_bytes(data[1:9], "big")
        tag, content, data = data[:1], data[9 : 9 + size], data[9 + size :]
        if tag == b"i":
            items.append(int.from_bytes(content, "big", signed=True))
        else:
            items.append(content if tag == b"b" else content.decode())
    return items


@given(CONTEXT)
def test_a_context_can_be_read_back_from_its_encoding(context):
    assert decode(encode_context(*context)) == context


@given(CONTEXT, CONTEXT)
def test_two_contexts_have_one_encoding_only_if_they_are_one(a, b):
    assert (encode_context(*a) == encode_context(*b)) == (a == b)


@given(st.integers(-(2**63), 2**63 - 1))
def test_numpys_integers_are_integers(value):
    assert encode_context(np.int64(value)) == encode_context(value)
