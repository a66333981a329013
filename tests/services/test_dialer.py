"""A client at the line of a leader that answers what it likes.

Whatever a leader answers, a client says nothing twice with other bytes, leaves the round for good
if it was in one, and its process goes on.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

pytest.importorskip("h11")

from rounds.population import plan
from services.service_lab import Lab
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.keys import SigningKey
from tessera.ids import ClientId, RoundId
from tessera.plan import ServicePlan
from tessera.services.client import ClientService
from tessera.services.group_commit import GroupCommit
from tessera.services.http import FIRST, RECEIVED, caller, dialer, requests
from tessera.services.http.connection import AnswerTooLong, HttpAnswer, LeaderConnection, NoAnswer
from tessera.services.http.dialer import Dialer, LeaderRefuses
from tessera.services.journal import Moment
from tessera.services.keyring import Keyring
from tessera.services.link import LinkStanding, Numbered
from tessera.services.logs import JsonLog

PLAN: Final = plan("secure-fedavg", cohort=4)
QUICK: Final = ServicePlan(poll=0.01, retry=0.001)
FINISHED: Final = HttpAnswer(410, {}, b'{"finished": true}')
Answered = HttpAnswer | Exception


def standing(round_id: int = 0, **other: Any) -> HttpAnswer:
    fields = asdict(LinkStanding(RoundId(round_id), 1, 0, 0)) | other
    return HttpAnswer(200, {}, json.dumps(fields).encode())


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ClientService]:
    lab = Lab(PLAN, tmp_path / "lab")
    yield lab.parties[ClientId(0)]
    lab.close()


class ScriptedConnection:
    """Answers in order; afterwards that all rounds are done."""

    def __init__(self, answers: list[Answered]) -> None:
        self.answers, self.asked = answers, cast("list[tuple[str, bytes]]", [])

    async def ask(self, method: str, target: str, headers: Any, body: bytes = b"") -> HttpAnswer:
        self.asked.append((target, body))
        answer = self.answers.pop(0) if self.answers else FINISHED
        if isinstance(answer, Exception):
            raise answer
        return answer


def led(client: ClientService, answers: list[Answered]) -> tuple[Dialer, ScriptedConnection]:
    """A client's process at this line, to its end."""
    line = ScriptedConnection(answers)
    key = SigningKey.from_secret(SystemEntropy().secret("test"))
    keyring = SimpleNamespace(signing=key, directory=SimpleNamespace(bundle=b"b" * 32))

    async def main() -> Dialer:
        steps = GroupCommit([client], QUICK.retry, JsonLog("", quiet=True))
        made = Dialer(
            client,
            cast(Keyring, keyring),
            cast(LeaderConnection, line),
            QUICK,
            JsonLog("", quiet=True),
            steps,
        )
        try:
            await asyncio.wait_for(made.run_or_be_refused(), 60)
        finally:
            steps.close()
        return made

    return asyncio.run(main()), line


HUGE: Final = "9" * 5000
BAD_STANDINGS: Final = {
    "not JSON": HttpAnswer(200, {}, b"<html>"),
    "nested without end": HttpAnswer(200, {}, b"[" * 200_000),
    "not an object": HttpAnswer(200, {}, b"[1]"),
    "no numbers": HttpAnswer(200, {}, b"{}"),
    "a number as text": standing(received="0"),
    "a truth value": standing(received=True),
    "infinite": HttpAnswer(
        200, {}, b'{"round_id": Infinity, "sent": 0, "received": 0, "acknowledged": 0}'
    ),
    "negative": standing(-1),
    "beyond the database": standing(1 << 63),
    "too long": AnswerTooLong("more than that"),
}


@pytest.mark.parametrize("bad", BAD_STANDINGS)
def test_a_standing_that_cannot_be_is_asked_for_again(client: ClientService, bad: str) -> None:
    made, line = led(client, [BAD_STANDINGS[bad]])
    assert made.refused is None and client.round_id is None
    assert len(line.asked) == 2


def test_a_round_that_was_is_not_begun_again(client: ClientService) -> None:
    """Its number would be used for other bytes."""
    gone = HttpAnswer(410, {}, b'{"outcome": "aborted"}')
    made, line = led(client, [standing(5), gone, standing(5), standing(4)])
    assert made.refused is None and client.round_id == RoundId(5)
    sent = [target for target, body in line.asked if body]
    assert len(sent) == 1, "one first word, in one round"


GARBAGE: Final = requests.pack([Numbered(1, b"no message")])
BAD_ANSWERS: Final = {
    "no message": HttpAnswer(200, {FIRST: "1", RECEIVED: "1"}, GARBAGE),
    "no parcel": HttpAnswer(200, {FIRST: "1", RECEIVED: "1"}, b"\0\0\0\x09cut"),
    "a gap": HttpAnswer(200, {FIRST: "7", RECEIVED: "1"}, GARBAGE),
    "number 0": HttpAnswer(200, {RECEIVED: "1"}, GARBAGE),
    "more received than was sent": HttpAnswer(204, {RECEIVED: "99"}, b""),
    "a count beyond all bounds": HttpAnswer(204, {RECEIVED: HUGE}, b""),
    "a conflict": HttpAnswer(409, {}, b"<html>"),
    "an end that is none": HttpAnswer(410, {}, b"<html>"),
    "an outcome that is none": HttpAnswer(410, {}, b'{"outcome": "lost"}'),
    "too long": AnswerTooLong("more than that"),
}


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_bad_answer_ends_the_round_for_good_and_not_the_process(
    client: ClientService, bad: str
) -> None:
    made, line = led(client, [standing(0), BAD_ANSWERS[bad], standing(1)])
    assert made.refused is None
    targets = [target for target, _ in line.asked]
    assert sum("round=0" in target for target in targets) == 1, "nothing more is said in it"
    assert client.round_id == RoundId(1), "the next round is another one"


@pytest.mark.parametrize(
    "trouble",
    [
        NoAnswer("gone"),
        HttpAnswer(503, {}, b""),
        HttpAnswer(408, {}, b"{}"),
        HttpAnswer(429, {}, b"{}"),
        HttpAnswer(502, {}, b"<html>"),
    ],
    ids=lambda each: str(getattr(each, "status", "broken")),
)
def test_what_passes_is_tried_again_with_the_same_bytes(
    client: ClientService, trouble: Answered
) -> None:
    made, line = led(client, [standing(0), trouble, trouble])
    assert made.refused is None
    first, *again = [body for _, body in line.asked if body]
    assert first and again == [first, first], "the third one is told that all rounds are over"


def test_a_signature_that_grew_old_while_a_process_was_suspended_is_made_anew(
    client: ClientService, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 500.0])
    monkeypatch.setattr(caller.time, "time", lambda: next(moments, 500.0))
    made, line = led(client, [HttpAnswer(401, {}, b'{"error": "the time is not now"}')])
    assert made.refused is None and len(line.asked) == 2


def test_a_full_disk_at_a_client_is_no_step_and_nothing_is_sent(client: ClientService) -> None:
    """Then there is room, it looks where its journal is, and says its first word once."""
    failing = [True] * 3

    def watch(moment: Moment) -> None:
        if moment is Moment.BEFORE_COMMIT and failing:
            failing.pop()
            raise sqlite3.OperationalError("database or disk is full")

    client.journal.watch = watch
    made, line = led(client, [standing(0)] * 4)
    assert made.refused is None and not failing
    assert client.round_id == RoundId(0)
    asked = [target.partition("?")[0] for target, _ in line.asked]
    assert asked == ["/v1/standing"] * 4 + ["/v1/messages", "/v1/standing"]
    assert [bool(body) for _, body in line.asked] == [False] * 4 + [True, False]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_who_is_refused_ends_with_the_reason(client: ClientService, status: int) -> None:
    made, _ = led(client, [HttpAnswer(status, {}, b'{"error": "not you"}')])
    assert isinstance(made.refused, LeaderRefuses) and "not you" in str(made.refused)


def test_nothing_of_this_is_taken_for_an_answer_by_mistake() -> None:
    """The tables above would pass if every answer were bad."""
    parse: Callable[[bytes], LinkStanding] = dialer._standing
    assert parse(standing(3).body) == LinkStanding(RoundId(3), 1, 0, 0)
