"""Signed requests: who asks, what, when, and once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import pytest

pytest.importorskip("starlette")

from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import SigningKey, identities
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.services.http import requests
from tessera.services.http.requests import (
    DIGEST,
    NONCE,
    SENDER,
    SESSION,
    SIGNATURE,
    TIME,
    WINDOW,
    RefusedRequest,
    RequestChecker,
    signed_headers,
)
from tessera.services.keyring import Directory
from tessera.simulation.two_server import TwoServerSetup

BUNDLE: Final = b"b" * 32
TARGET: Final = "/v1/messages?round=0&received=0&first=1"
BODY: Final = b"a message"


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A checker, its clock, and the keys of all who may ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entropy = ScriptedEntropy(b"requests")
        both = TwoServerSetup.of(entropy, "f")
        own = identities([ClientId(0), ClientId(1)], entropy, "f")
        directory = Directory(BUNDLE, both.servers, {c: i.key.public for c, i in own.items()})
        self.keys: dict[Party, SigningKey] = {c: i.key for c, i in own.items()}
        self.keys |= {SERVER: both.leader, HELPER: both.helper.signing}
        self.clock = Clock()
        self.checker = RequestChecker(directory, BUNDLE, self.clock)
        monkeypatch.setattr(requests.time, "time", self.clock)

    def headers(self, sender: Party, key: SigningKey | None = None, **other: Any) -> dict[str, str]:
        made = {"method": "POST", "target": TARGET, "body": BODY, "bundle": BUNDLE} | other
        session = made.pop("session", self.checker.session)
        headers = signed_headers(key or self.keys[sender], sender, session=session, **made)
        return headers | {"content-length": str(len(made["body"]))}

    def refused(self, headers: dict[str, str], method: str = "POST", target: str = TARGET) -> str:
        with pytest.raises(RefusedRequest) as error:
            self.checker.check(method, target, headers)
        assert error.value.status == 401
        return str(error.value)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


@pytest.mark.parametrize("sender", [ClientId(0), ClientId(1), HELPER])
def test_a_request_is_its_signers_and_comes_once(desk: Desk, sender: Party) -> None:
    headers = desk.headers(sender)
    found = desk.checker.check("POST", TARGET, headers)
    assert found.sender == sender and found.matches(BODY)
    assert not found.matches(BODY[:-1]) and not found.matches(b"another!!")
    assert "sent before" in desk.refused(headers)
    desk.clock.now += WINDOW
    assert "sent before" in desk.refused(headers), "remembered as long as it is valid"
    desk.clock.now += 2 * WINDOW
    assert "s behind the leader's" in desk.refused(headers)
    desk.checker.check("POST", TARGET, desk.headers(sender))
    assert len(desk.checker._nonces) == 1, "and forgotten afterwards"


def test_nobody_speaks_under_anothers_name(desk: Desk) -> None:
    """Client 0, who has a key and a place, as client 1, as the helper and as the leader."""
    for claimed in (ClientId(1), HELPER, SERVER):
        assert "wrong" in desk.refused(desk.headers(claimed, desk.keys[ClientId(0)]))
    headers = desk.headers(ClientId(0))
    assert "wrong" in desk.refused(headers | {SENDER: "client 1"})
    for unknown in ("client 7", "client", "nobody", "client x", "client -1", ""):
        desk.refused(headers | {SENDER: unknown})


def test_every_part_of_a_request_is_signed(desk: Desk) -> None:
    """What somebody on the way changes is noticed, and what is captured fits nowhere else."""
    headers = desk.headers(ClientId(0))
    digest = hashlib.sha256(b"another!!").hexdigest()
    for name, value in (
        (TIME, f"{desk.clock.now + 1:.3f}"),
        (NONCE, "0" * 32),
        (DIGEST, digest),
        (SESSION, "0" * 32),
        ("content-length", "8"),
    ):
        assert "wrong" in desk.refused(headers | {name: value}), name
    assert "wrong" in desk.refused(headers, method="GET")
    assert "wrong" in desk.refused(headers, target=TARGET.replace("received=0", "received=9"))
    assert "wrong" in desk.refused(headers, target=TARGET.replace("round=0", "round=1"))
    assert "wrong" in desk.refused(desk.headers(ClientId(0), bundle=b"c" * 32))
    desk.checker.check("POST", TARGET, headers)  # none of these used its nonce up


def test_what_was_signed_for_another_process_is_refused_and_told_the_session(desk: Desk) -> None:
    with pytest.raises(RefusedRequest) as error:
        desk.checker.check("POST", TARGET, desk.headers(ClientId(0), session=""))
    assert error.value.session == desk.checker.session
    again = RequestChecker(desk.checker._directory, BUNDLE, desk.clock)
    assert again.session != desk.checker.session
    with pytest.raises(RefusedRequest, match="another session"):
        again.check("POST", TARGET, desk.headers(ClientId(0)))


@pytest.mark.parametrize("when", ["nan", "inf", "-inf", "0", "1e308", "later", ""])
def test_a_time_that_is_not_now_is_refused(desk: Desk, when: str) -> None:
    parts = ("client 0", desk.checker.session, "POST", TARGET, len(BODY))
    digest, nonce = hashlib.sha256(BODY).hexdigest(), "0" * 32
    statement = requests._statement(BUNDLE, *parts, digest, when, nonce)
    signature = desk.keys[ClientId(0)].sign(statement).hex()
    headers = desk.headers(ClientId(0)) | {TIME: when, NONCE: nonce, SIGNATURE: signature}
    desk.refused(headers)
    assert not desk.checker._nonces


def test_a_nonce_is_remembered_and_so_has_one_length(desk: Desk) -> None:
    """Else a client has the leader keep 16 kB for each of its requests."""
    for nonce in ("", "0", "0" * 31, "0" * 16_000):
        parts = ("client 0", desk.checker.session, "POST", TARGET, len(BODY))
        headers = desk.headers(ClientId(0))
        statement = requests._statement(BUNDLE, *parts, headers[DIGEST], headers[TIME], nonce)
        signature = desk.keys[ClientId(0)].sign(statement).hex()
        desk.refused(headers | {NONCE: nonce, SIGNATURE: signature})
    assert not desk.checker._nonces
