"""A process of many clients: what goes wrong with one of them is that client's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("h11")

from tessera.errors import ConfigError
from tessera.plan import ServicePlan
from tessera.services.http import dialer
from tessera.services.http.dialer import LeaderRefuses
from tessera.services.logs import JsonLog

SECRET = "row 4711"


def fails() -> None:
    raise KeyError(SECRET)


def is_refused() -> None:
    raise LeaderRefuses(403, "the sender takes no part")


def is_misconfigured() -> None:
    raise ConfigError("not this plan")


def ended(clients: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """(the status of a process of these clients, or what it raised; how many came to their end).
    Nobody who works comes to an end before everybody who fails."""
    finished = []

    class Stub:
        def __init__(self, party: Any, *_: Any) -> None:
            self.party, self.refused, self.failed, self.rounds_ended = party, None, None, 1

        async def run_or_be_refused(self) -> None:
            try:
                self.party.work()
            except LeaderRefuses as refused:
                self.refused = refused
                return
            for _ in range(10):
                await asyncio.sleep(0)
            finished.append(self.party.name)

    monkeypatch.setattr(dialer, "Dialer", Stub)
    parties = [
        (
            SimpleNamespace(name=f"client {n}", work=work, journal=None),
            SimpleNamespace(folder=Path()),
        )
        for n, work in enumerate(clients)
    ]
    made = dialer._dial("http://127.0.0.1:1", parties, ServicePlan(), JsonLog("clients"))  # type: ignore[arg-type]
    try:
        return asyncio.run(made), len(finished)
    except (ConfigError, LeaderRefuses) as error:
        return error, len(finished)


def works() -> None:
    pass


@pytest.mark.parametrize("others", [3, 30])
def test_a_client_whose_work_fails_ends_alone_and_the_status_says_so(
    others: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a process of so many that it logs none of them, too."""
    assert ended([works, fails, *[works] * (others - 1)], monkeypatch) == (1, others)
    said = capfd.readouterr().err
    (line,) = [each for each in map(json.loads, said.splitlines()) if each["event"] == "failed"]
    assert (line["member"], line["error"]) == ("client 1", "KeyError")
    assert line["at"][-1].startswith("test_dialer_process.py:") and line["at"][-1].endswith(
        " fails"
    )
    assert SECRET not in said


def test_a_process_in_which_nothing_failed_ends_with_status_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ended([works] * 3, monkeypatch) == (0, 3)


@pytest.mark.parametrize("trouble", [is_refused, is_misconfigured])
def test_an_error_with_words_for_its_reader_is_shown_at_the_end(
    trouble: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, others = ended([fails, trouble, works, works], monkeypatch)
    assert isinstance(shown, ConfigError | LeaderRefuses) and others == 2
