"""Fresh secrets from the system; addressed, repeatable ones for tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto.entropy import Entropy, ScriptedEntropy, SystemEntropy
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError

ADDRESSES = st.tuples(
    st.text(max_size=8), st.lists(st.integers() | st.binary(max_size=8), max_size=3)
)


def test_the_systems_answers_are_fresh():
    entropy: Entropy = SystemEntropy()
    assert entropy.secret("seed", 1) != entropy.secret("seed", 1)


def test_the_systems_answers_come_from_the_operating_system(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: b"\x07" * size)
    assert SystemEntropy().secret("seed", 1, size=5) == Secret(b"\x07" * 5)


@given(st.lists(ADDRESSES, unique_by=str, max_size=6), st.randoms(use_true_random=False))
def test_scripted_answers_depend_on_the_address_and_not_on_the_order(addresses, random):
    first, second = ScriptedEntropy(b"script"), ScriptedEntropy(b"script")
    answers = {str(a): first.secret(a[0], *a[1]).reveal() for a in addresses}
    shuffled = random.sample(addresses, len(addresses))
    assert answers == {str(a): second.secret(a[0], *a[1]).reveal() for a in shuffled}
    assert len(set(answers.values())) == len(addresses)


def test_a_scripted_answer_is_the_same_when_asked_for_again():
    entropy = ScriptedEntropy(b"script")
    assert entropy.secret("seed", 1) == entropy.secret("seed", 1)
    assert entropy.secret("seed", 1) != entropy.secret("seed", 2)
    assert entropy.secret("seed", 1) != entropy.secret("key", 1)


def test_another_seed_is_another_script():
    one, other = ScriptedEntropy(b"one"), ScriptedEntropy(b"other")
    assert one.secret("seed") != other.secret("seed")


@pytest.mark.parametrize("entropy", [SystemEntropy(), ScriptedEntropy(b"script")])
class TestBothSources:
    def test_give_as_many_bytes_as_asked_for(self, entropy):
        assert [len(entropy.secret("x", size=n)) for n in (1, 32, 100)] == [1, 32, 100]
        assert len(entropy.secret("x")) == 32

    @pytest.mark.parametrize("size", [0, -1, 255 * 32 + 1])
    def test_refuse_a_length_that_is_none(self, entropy, size):
        with pytest.raises(MisuseError, match="bytes"):
            entropy.secret("x", size=size)

    def test_refuse_an_address_that_is_none(self, entropy):
        with pytest.raises(MisuseError, match="context"):
            entropy.secret("x", 0.5)

    def test_print_no_content(self, entropy):
        assert repr(entropy) in ("SystemEntropy()", "ScriptedEntropy(insecure)")


def test_a_scripts_seed_is_bytes():
    with pytest.raises(MisuseError, match="from bytes"):
        ScriptedEntropy(7)
