"""Keys and boxes: X25519 agreement, Ed25519 signatures, AES-256-GCM boxes, HPKE sealed boxes.

All of it is `cryptography`'s; what is added here is one encoding per thing, a label on every
derivation, and one way to fail. Bytes of another party that do not verify, unseal or
decode are a `CryptoError` (for `verify`, False), whatever the underlying library raises.
Private parts are `Secret`s and do not print; a key is stored as its `secret` and comes back by
`from_secret`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn, Self

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError
from tessera.ids import ClientId

KEY_BYTES: Final = 32
"""Length of every key here: private and public X25519 and Ed25519, and a box's."""

SIGNATURE_BYTES: Final = 64
NONCE_BYTES: Final = 12
BOX_OVERHEAD: Final = 16
"""A box is this much longer than its plaintext: the GCM tag."""

SEALED_OVERHEAD: Final = 32 + 16
"""A sealed box is this much longer than its plaintext: an ephemeral public key and the tag."""

_EXTRACT_SALT: Final = Label.AGREEMENT_SALT.encode()
_CURVE25519_PRIME: Final = 2**255 - 19

# The canonical u-coordinates of order 1, 2, 4 and 8, on the curve and its twist. Whatever private
# key is agreed with them, the result is zero.
_SMALL_ORDER: Final = frozenset(
    {
        0,
        1,
        _CURVE25519_PRIME - 1,
        0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
        0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
    }
)

# RFC 9180's first suite (A.1). The single-shot interface has `info` but no associated data: what a
# sealed box is bound to goes into `info`.
_HPKE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)


class _Key:
    """A 32-byte private part and its public key; it does not change, so a copy is itself."""

    __slots__ = ("public", "secret")

    secret: Final[Secret]
    public: Final[bytes]

    def __init__(self, secret: Secret, public: bytes) -> None:
        self.secret = secret
        self.public = public

    def __repr__(self) -> str:
        return f"{type(self).__name__}(public={self.public.hex()})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.secret == other.secret

    def __hash__(self) -> int:
        return hash((type(self), self.public))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is not pickled; store its secret")


class AgreementKey(_Key):
    """An X25519 key pair (RFC 7748), from which two parties derive the same secrets."""

    __slots__ = ("_private",)

    _private: Final[X25519PrivateKey]

    def __init__(self, secret: Secret) -> None:
        _check_length("an agreement key", secret, KEY_BYTES)
        self._private = X25519PrivateKey.from_private_bytes(secret.reveal())
        super().__init__(secret, self._private.public_key().public_bytes_raw())

    @classmethod
    def from_secret(cls, secret: Secret) -> Self:
        """The key pair whose private part is these 32 bytes (clamped as RFC 7748, 5 says)."""
        return cls(secret)

    def agree(self, peer: bytes, label: str, *context: int | bytes | str) -> Secret:
        """The 32-byte secret shared with the holder of public key `peer`, for one labelled use.

        X25519, HKDF-Extract, then `Secret.derive`. Both public keys are part of the derivation, in
        sorted order so that both sides agree: whoever passes off a key as its own gets a different
        secret. A point of small order, which would make the secret public, is refused.
        """
        point = _agreement_point(peer)
        try:
            shared = self._private.exchange(point)
        except ValueError:  # RFC 7748, 6.1: the all-zero result
            raise CryptoError("agreement: the peer's public key has small order") from None
        extracted = Secret(hmac.digest(_EXTRACT_SALT, shared, "sha256"))  # RFC 5869, 2.2
        return extracted.derive(label, *sorted((self.public, peer)), *context)


class SigningKey(_Key):
    """An Ed25519 key pair (RFC 8032)."""

    __slots__ = ("_private",)

    _private: Final[Ed25519PrivateKey]

    def __init__(self, secret: Secret) -> None:
        _check_length("a signing key", secret, KEY_BYTES)
        self._private = Ed25519PrivateKey.from_private_bytes(secret.reveal())
        super().__init__(secret, self._private.public_key().public_bytes_raw())

    @classmethod
    def from_secret(cls, secret: Secret) -> Self:
        """The key pair of this 32-byte seed."""
        return cls(secret)

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes, deterministic. The message has to say what it is for."""
        return self._private.sign(message)


def is_public_key(public: bytes) -> bool:
    """Whether `AgreementKey.agree` would take this as a peer's key; makes no exchange.

    False for another length, a coordinate that is not reduced, and points of small order. Every key
    of a roster is checked, and an exchange for each would cost more than the round.
    """
    if len(public) != KEY_BYTES:
        return False
    coordinate = int.from_bytes(public, "little")
    return coordinate < _CURVE25519_PRIME and coordinate not in _SMALL_ORDER


def verify(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` on `message` was made with `public`'s key; False for any other bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def seal(key: Secret, plaintext: bytes, *, nonce: bytes, associated: bytes) -> bytes:
    """A box that only a holder of `key` makes or unseals: AES-256-GCM, ciphertext then tag.

    A (key, nonce) pair seals one plaintext only: a second one would reveal the difference of the
    two and allow forgeries. Callers derive a key per use, or a nonce per message.
    """
    return _box(key, nonce).encrypt(nonce, plaintext, associated)


def unseal(key: Secret, box: bytes, *, nonce: bytes, associated: bytes) -> bytes:
    """The plaintext of a box, if key, nonce and associated data are those it was sealed with."""
    try:
        return _box(key, nonce).decrypt(nonce, box, associated)
    except InvalidTag:
        raise CryptoError(f"box: {len(box)} bytes cannot be unsealed with this key") from None


class SealingKey(_Key):
    """An HPKE key pair (RFC 9180, base mode): anybody seals to its public key, only it unseals.

    DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-128-GCM. The sender is anonymous and has to be
    authenticated by a signature inside. The library draws the ephemeral key itself, so sealing
    twice gives different bytes; what may have to be resent is stored.
    """

    __slots__ = ("_private",)

    _private: Final[X25519PrivateKey]

    def __init__(self, secret: Secret) -> None:
        _check_length("a sealing key", secret, KEY_BYTES)
        self._private = X25519PrivateKey.from_private_bytes(secret.reveal())
        super().__init__(secret, self._private.public_key().public_bytes_raw())

    @classmethod
    def from_secret(cls, secret: Secret) -> Self:
        """The key pair whose private part is these 32 bytes."""
        return cls(secret)

    @classmethod
    def generate(cls) -> Self:
        """A fresh key pair from the system's generator, for a server's long-lived key."""
        return cls(SystemEntropy().secret(Label.SEALING_KEY))

    def unseal(self, sealed: bytes, info: bytes) -> bytes:
        """The plaintext that was sealed to this key with the same `info`."""
        try:
            return _HPKE.decrypt(sealed, self._private, info)
        except (InvalidTag, ValueError):
            raise CryptoError(
                f"sealed box: {len(sealed)} bytes cannot be unsealed with this key"
            ) from None


def seal_to(public: bytes, plaintext: bytes, info: bytes) -> bytes:
    """A box for the holder of a `SealingKey` alone: ephemeral public key, ciphertext, tag."""
    point = _agreement_point(public)
    try:
        return _HPKE.encrypt(plaintext, point, info)
    except ValueError:
        raise CryptoError("sealed box: the receiver's public key has small order") from None


def _agreement_point(public: bytes) -> X25519PublicKey:
    """Decode an X25519 public key, in its one canonical encoding.

    RFC 7748 has receivers mask the top bit and reduce, so that a point has several spellings. We
    compare, hash and sign keys as bytes: the other spellings are refused.
    """
    _check_length("a public key", public, KEY_BYTES)
    if int.from_bytes(public, "little") >= _CURVE25519_PRIME:
        raise CryptoError("a public key is not a reduced X25519 coordinate")
    return X25519PublicKey.from_public_bytes(public)


def _box(key: Secret, nonce: bytes) -> AESGCM:
    _check_length("a box's key", key, KEY_BYTES)
    _check_length("a box's nonce", nonce, NONCE_BYTES)
    return AESGCM(key.reveal())


def _check_length(what: str, content: bytes | Secret, due: int) -> None:
    if len(content) != due:
        raise CryptoError(f"{what} has {due} bytes, not {len(content)}")


# --- identities -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    """A client's long-term signing key, and the directory of everybody's public keys."""

    key: SigningKey = field(repr=False)
    directory: Mapping[ClientId, bytes] = field(repr=False)


def identities(
    clients: Iterable[ClientId], entropy: Entropy, federation: str
) -> dict[ClientId, Identity]:
    """A signing key for each client, and the directory that an authority would certify."""
    keys = {
        client: SigningKey.from_secret(entropy.secret(Label.IDENTITY, federation, int(client)))
        for client in clients
    }
    directory = {client: key.public for client, key in keys.items()}
    return {client: Identity(key, directory) for client, key in keys.items()}
