"""Agreement, signatures and boxes: the standards' answers, and every way of being refused."""

from __future__ import annotations

import copy
import pickle
from operator import attrgetter

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import keys
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import (
    AgreementKey,
    SealingKey,
    SigningKey,
    is_public_key,
    seal,
    seal_to,
    unseal,
    verify,
)
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError
from vectors import expectation, load

KINDS = [AgreementKey, SigningKey, SealingKey]
SECRETS = st.binary(min_size=32, max_size=32).map(Secret)


def private(name: str) -> Secret:
    return ScriptedEntropy(b"test keys").secret("private", name)


@pytest.mark.parametrize("vector", load("x25519.json"), ids=attrgetter("name"))
def test_agreement(vector):
    with expectation(vector):
        key = AgreementKey.from_secret(Secret(vector.private))
        assert key.public == vector.public
        assert key.agree(vector.peer, vector.label, *vector.context) == Secret(vector.agreed)


@given(SECRETS, SECRETS, st.text(max_size=8), st.integers())
def test_both_sides_agree(a, b, label, context):
    alice, bob = AgreementKey.from_secret(a), AgreementKey.from_secret(b)
    assert alice.agree(bob.public, label, context) == bob.agree(alice.public, label, context)


def test_each_use_and_each_pair_has_its_own_secret():
    alice, bob, carol = (AgreementKey.from_secret(private(n)) for n in ("alice", "bob", "carol"))
    agreed = [
        alice.agree(bob.public, "mask", 0),
        alice.agree(bob.public, "mask", 1),
        alice.agree(bob.public, "channel", 0),
        alice.agree(carol.public, "mask", 0),
        bob.agree(carol.public, "mask", 0),
    ]
    assert len({secret.reveal() for secret in agreed}) == len(agreed)


P = 2**255 - 19


def root(square: int) -> int | None:
    """A square root modulo P = 5 mod 8, if there is one."""
    square %= P
    found = pow(square, (P + 3) // 8, P)
    if found * found % P != square:
        found = found * pow(2, (P - 1) // 4, P) % P
    return found if found * found % P == square else None


def halves(v: int) -> set[int]:
    """The u whose double is v = 1 or -1 on y^2 = u^3 + A u^2 + u or its twist.

    (u^2 - 1)^2 = 4 v u (u^2 + A u + 1), which divided by u^2 is quadratic in w = u + 1/u.
    """
    under = root(2 + v * 486662)
    found: set[int] = set()
    for w in set() if under is None else {2 * v + 2 * under, 2 * v - 2 * under}:
        apart = root(w * w - 4)
        if apart is not None:
            found |= {(w + sign * apart) * pow(2, -1, P) % P for sign in (1, -1)}
    return found


def test_the_points_of_small_order_are_these_and_no_others():
    """0 has order 2 and doubles to infinity, 1 and -1 double to 0, and `halves` to those.

    There is no way on: cofactors are 8 and 4, and the group's part of that order is cyclic.
    """
    small = {0, 1, P - 1} | halves(1) | halves(-1)
    assert len(small) == 5
    assert small == keys._SMALL_ORDER


@pytest.mark.parametrize("coordinate", sorted(keys._SMALL_ORDER))
def test_a_key_of_small_order_is_none_and_agreement_refuses_it(coordinate):
    public = coordinate.to_bytes(32, "little")
    assert not is_public_key(public)
    with pytest.raises(CryptoError, match="small order"):
        AgreementKey.from_secret(private("alice")).agree(public, "mask")


@given(
    st.binary(min_size=32, max_size=32)
    | st.integers(0, 2**256 - 1).map(lambda u: u.to_bytes(32, "little"))
    | st.integers(-3, 25).map(lambda u: (P + u).to_bytes(32, "little"))
    | st.integers(0, 25).map(lambda u: u.to_bytes(32, "little"))
    | st.binary(max_size=40)
)
def test_what_is_a_public_key_is_what_agreement_takes(public):
    alice = AgreementKey.from_secret(private("alice"))
    if is_public_key(public):
        assert alice.agree(public, "mask")
    else:
        with pytest.raises(CryptoError):
            alice.agree(public, "mask")


@pytest.mark.parametrize("vector", load("ed25519.json"), ids=attrgetter("name"))
def test_signatures(vector):
    due = vector.expect == "ok"
    assert verify(vector.public, vector.signature, vector.message) is due
    if due:
        key = SigningKey.from_secret(Secret(vector.private))
        assert key.public == vector.public
        assert key.sign(vector.message) == vector.signature


@given(SECRETS, st.binary(max_size=200))
def test_what_was_signed_verifies(secret, message):
    key = SigningKey.from_secret(secret)
    assert verify(key.public, key.sign(message), message)


@given(st.binary(max_size=70), st.binary(max_size=70), st.binary(max_size=70))
def test_verifying_noise_is_false_and_never_an_error(public, signature, message):
    assert verify(public, signature, message) is False


@pytest.mark.parametrize("vector", load("boxes.json"), ids=attrgetter("name"))
def test_boxes(vector):
    with expectation(vector):
        key, where = Secret(vector.key), {"nonce": vector.nonce, "associated": vector.associated}
        assert unseal(key, vector.box, **where) == vector.plaintext
        assert seal(key, vector.plaintext, **where) == vector.box


@given(SECRETS, st.binary(max_size=200), st.binary(min_size=12, max_size=12), st.binary())
def test_a_box_opens_to_what_was_put_in(key, plaintext, nonce, associated):
    box = seal(key, plaintext, nonce=nonce, associated=associated)
    assert len(box) == len(plaintext) + keys.BOX_OVERHEAD
    assert unseal(key, box, nonce=nonce, associated=associated) == plaintext


@given(st.binary(max_size=80), st.binary(max_size=14))
def test_noise_does_not_open(box, nonce):
    with pytest.raises(CryptoError):
        unseal(private("box"), box, nonce=nonce, associated=b"")


@pytest.mark.parametrize("vector", load("hpke.json"), ids=attrgetter("name"))
def test_sealed_boxes(vector):
    with expectation(vector):
        key = SealingKey.from_secret(Secret(vector.private))
        assert key.unseal(vector.sealed, vector.info) == vector.plaintext
        assert key.public == vector.public


def test_the_sealed_vector_ends_in_the_standards_own_key_and_nonce():
    vector = load("hpke.json")[0]
    standard = AESGCM(vector.key).encrypt(vector.base_nonce, vector.plaintext, vector.aad)
    assert standard == vector.ct
    ours = AESGCM(vector.key).encrypt(vector.base_nonce, vector.plaintext, b"")
    assert ours == vector.sealed[32:]


@given(st.binary(max_size=200), st.binary(max_size=300))
def test_what_is_sealed_to_a_key_opens_with_it_alone(plaintext, info):
    key, other = SealingKey.from_secret(private("helper")), SealingKey.from_secret(private("x"))
    sealed = seal_to(key.public, plaintext, info)
    assert len(sealed) == len(plaintext) + keys.SEALED_OVERHEAD
    assert key.unseal(sealed, info) == plaintext
    with pytest.raises(CryptoError, match="cannot be unsealed"):
        other.unseal(sealed, info)
    with pytest.raises(CryptoError, match="cannot be unsealed"):
        key.unseal(sealed, info + b"!")


def test_sealing_twice_gives_different_bytes():
    public = SealingKey.from_secret(private("helper")).public
    assert seal_to(public, b"report", b"") != seal_to(public, b"report", b"")


@pytest.mark.parametrize(
    "vector",
    [v for v in load("x25519.json") if v.expect == "CryptoError" and len(v.private) == 32],
    ids=attrgetter("name"),
)
def test_nothing_is_sealed_to_a_key_that_agreement_would_refuse(vector):
    with pytest.raises(CryptoError, match=vector.says):
        seal_to(vector.peer, b"report", b"")


@given(st.binary(max_size=100), st.binary(max_size=20))
def test_noise_is_no_sealed_box(sealed, info):
    with pytest.raises(CryptoError):
        SealingKey.from_secret(private("helper")).unseal(sealed, info)


def test_generated_sealing_keys_are_fresh_and_come_back_from_their_secret():
    key = SealingKey.generate()
    assert key != SealingKey.generate()
    assert SealingKey.from_secret(key.secret) == key
    assert SealingKey.from_secret(key.secret).unseal(seal_to(key.public, b"x", b""), b"") == b"x"


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKey:
    def test_prints_its_public_part_only(self, kind):
        key = kind.from_secret(Secret(b"ABCDEFGH" * 4))
        assert repr(key) == f"{kind.__name__}(public={key.public.hex()})"
        assert "ABC" not in repr(key) and b"ABC".hex() not in repr(key)

    def test_comes_back_from_its_secret(self, kind):
        key = kind.from_secret(private("alice"))
        assert kind.from_secret(key.secret) == key
        assert kind.from_secret(key.secret).public == key.public
        assert hash(kind.from_secret(key.secret)) == hash(key)
        assert key != kind.from_secret(private("bob"))

    def test_differs_from_a_key_of_another_kind(self, kind):
        assert all(kind(private("a")) != k(private("a")) for k in KINDS if k is not kind)

    def test_is_not_pickled_and_copies_to_itself(self, kind):
        key = kind.from_secret(private("alice"))
        with pytest.raises(TypeError, match="store its secret"):
            pickle.dumps(key)
        assert copy.deepcopy(key) is key
        assert copy.copy(key) is key

    @pytest.mark.parametrize("size", [0, 31, 33, 64])
    def test_refuses_a_private_part_of_another_length(self, kind, size):
        with pytest.raises(CryptoError, match=f"32 bytes, not {size}"):
            kind.from_secret(Secret(bytes(size)))
