"""A parcel: consecutive messages of a link as one body, each behind its length.

The number of the first one travels beside it. A request has as many messages as are on their way,
and so has an answer.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import isfinite
from typing import Final

from tessera.crypto.keys import SigningKey, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import TesseraError
from tessera.ids import Party
from tessera.services.keyring import Directory
from tessera.services.link import Numbered, name_of, party_of
from tessera.wire import DEFAULT_CAP

LENGTH: Final = struct.Struct(">I")
MOST_MESSAGES: Final = 64
ENOUGH_BYTES: Final = 1 << 22
"""Beyond it, further messages wait for the next request; a single one may be larger."""
MOST_BYTES: Final = DEFAULT_CAP + ENOUGH_BYTES + LENGTH.size * MOST_MESSAGES


def filled(messages: Iterable[Numbered]) -> list[Numbered]:
    """As many of these as fit into one parcel, at least one if there is one."""
    chosen: list[Numbered] = []
    size = 0
    for message in messages:
        size += len(message.data)
        if chosen and (size > ENOUGH_BYTES or len(chosen) == MOST_MESSAGES):
            break
        chosen.append(message)
    return chosen


def pack(messages: Sequence[Numbered]) -> bytes:
    return b"".join(part for m in messages for part in (LENGTH.pack(len(m.data)), m.data))


def unpack(first: int, body: bytes) -> list[Numbered]:
    """`ValueError` if these bytes are not a parcel."""
    messages: list[Numbered] = []
    at = 0
    while at < len(body):
        if len(messages) == MOST_MESSAGES or at + LENGTH.size > len(body):
            raise ValueError("not a parcel of messages")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if at + length > len(body):
            raise ValueError("a message is longer than its parcel")
        messages.append(Numbered(first + len(messages), body[at : at + length]))
        at += length
    return messages


# --- requests -------------------------------------------------------------------------------------
#
# Signed requests: who asks, what, when; checked before a body is read.
#
# The signature covers method, target, length and digest of the body, the bundle, the leader's
# session, the time and a nonce. A request that is too old or whose nonce was used is refused.
# Nonces are remembered as long as the process lives, and every process has a session of its own:
# what was signed for an earlier one is refused, and the answer names the new one to sign for. The
# numbers on a link make a repeated request harmless besides.


SENDER, TIME, NONCE = "tessera-sender", "tessera-time", "tessera-nonce"
DIGEST, SIGNATURE, SESSION = "tessera-digest", "tessera-signature", "tessera-session"
CLOCK: Final = "clock"
"""Why a request is refused whose time is not now."""
WINDOW: Final = 120.0
"""Seconds that a sender's clock may be off."""
MOST_NONCES: Final = 1 << 20
NONCE_LENGTH: Final = 32


class RefusedRequest(TesseraError):
    """401: nobody in the directory has signed it; 403: somebody has, who may not."""

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        session: str = "",
        kind: str = "",
        sender: Party | None = None,
    ) -> None:
        """`session`: what to sign for instead; `kind`: the reason in a word or two, one of a few,
        by which refusals are counted; `sender`: who has signed it, if somebody has."""
        super().__init__(reason)
        self.status, self.session, self.sender = status, session, sender
        self.kind = kind or HTTPStatus(status).phrase.lower()


def signed_headers(
    key: SigningKey,
    sender: Party,
    bundle: bytes,
    method: str,
    target: str,
    body: bytes,
    session: str = "",
) -> dict[str, str]:
    """What to send along with a request. `session` is the leader's, as it last said."""
    when, nonce = f"{time.time():.3f}", os.urandom(NONCE_LENGTH // 2).hex()
    digest = hashlib.sha256(body).hexdigest()
    name = name_of(sender)
    parts = (name, session, method, target, len(body), digest, when, nonce)
    statement = _statement(bundle, *parts)
    return {
        SENDER: name,
        TIME: when,
        NONCE: nonce,
        DIGEST: digest,
        SESSION: session,
        SIGNATURE: key.sign(statement).hex(),
    }


def _statement(
    bundle: bytes,
    sender: str,
    session: str,
    method: str,
    target: str,
    length: int,
    digest: str,
    when: str,
    nonce: str,
) -> bytes:
    return encode_context(
        Label.REQUEST, bundle, sender, session, method, target, length, digest, when, nonce
    )


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """A request whose signature was checked; its body is not read yet."""

    sender: Party
    length: int
    digest: str

    def matches(self, body: bytes) -> bool:
        return len(body) == self.length and hashlib.sha256(body).hexdigest() == self.digest


class RequestChecker:
    """Checks signatures, times and nonces against the directory."""

    def __init__(
        self, directory: Directory, bundle: bytes, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory, self._bundle, self._clock = directory, bundle, clock
        self._nonces: OrderedDict[str, float] = OrderedDict()
        self.session = os.urandom(16).hex()

    def check(self, method: str, target: str, headers: Mapping[str, str]) -> SignedRequest:
        """`RefusedRequest` unless a party of the directory has signed it just now."""
        try:
            name, when, nonce = headers[SENDER], headers[TIME], headers[NONCE]
            digest, signature = headers[DIGEST], bytes.fromhex(headers[SIGNATURE])
            length = int(headers.get("content-length", "0"))
            sender, at, session = party_of(name), float(when), headers.get(SESSION, "")
            if len(nonce) != NONCE_LENGTH or not isfinite(at):
                raise ValueError("a nonce of another length")  # it is remembered
        except (KeyError, ValueError):
            raise RefusedRequest(401, "the request is not signed", kind="not signed") from None
        public = self._directory.key_of(sender)
        if public is None:
            raise RefusedRequest(401, "the sender is not in the directory", kind="unknown sender")
        parts = (name, session, method, target, length, digest, when, nonce)
        if not verify(public, signature, _statement(self._bundle, *parts)):
            raise RefusedRequest(
                401, "the signature is wrong, or for another bundle", kind="wrong signature"
            )
        if session != self.session:
            raise RefusedRequest(
                401,
                "signed for another session",
                session=self.session,
                kind="other session",
                sender=sender,
            )
        now = self._clock()
        if not abs(now - at) <= WINDOW:
            off = f"{abs(now - at):.0f} s {'behind' if at < now else 'ahead of'}"
            raise RefusedRequest(
                401,
                f"the sender's clock is {off} the leader's, {WINDOW:.0f} s are allowed",
                kind=CLOCK,
                sender=sender,
            )
        if not self._is_new(f"{name} {nonce}", now):
            raise RefusedRequest(
                401, "the request was sent before", kind="sent before", sender=sender
            )
        return SignedRequest(sender, length, digest)

    def _is_new(self, nonce: str, now: float) -> bool:
        while self._nonces:
            oldest, at = next(iter(self._nonces.items()))
            if now - at <= 2 * WINDOW and len(self._nonces) < MOST_NONCES:
                break
            del self._nonces[oldest]
        if nonce in self._nonces:
            return False
        self._nonces[nonce] = now
        return True
