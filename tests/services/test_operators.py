"""What an operator sees: metrics by Prometheus' own parser, alerts that fire in each fault, trouble
that stays, who was missing, and what a client has spent. Nobody else sees it."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from rounds.population import plan
from services.asking import content
from services.one_loop import NEVER, NO_WAITS, OneLoop
from tessera.cli.main import main
from tessera.ids import ClientId, RoundId
from tessera.plan import ServicePlan
from tessera.services.http import listener
from tessera.services.http.listener import Connections
from tessera.services.http.metrics import LeaderMetrics, OperatorToken
from tessera.services.logs import JsonLog

ALERTS = Path(__file__).parents[2] / "examples" / "deploy" / "alerts.yml"
DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"
TOKEN = "a token of an operator"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
Scrape = dict[tuple[str, str], float]


def scraped(text: bytes) -> Scrape:
    """By name and first label's value, as Prometheus' own parser reads it."""
    found: Scrape = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    return found


def alerts() -> Iterator[tuple[str, str]]:
    """(name, expression) of the rules."""
    yield from re.findall(r"- alert: (\w+)\n\s+expr: (.*)\n", ALERTS.read_text())


def fires(expression: str, before: Scrape, now: Scrape) -> bool:
    """An expression of the kinds that there are: a gauge, or what a counter grew by."""

    def value(found: re.Match[str]) -> str:
        grown, name, label, _ = found.groups()
        key = (name, label or "")
        if grown:
            return str(now.get(key, 0.0) - before.get(key, 0.0))
        return str(now.get(key, 0.0))

    part = r"(increase\()?(tessera_\w+)(?:\{\w+=\"([^\"]*)\"\})?(\[\w+\]\))?"
    return bool(eval(re.sub(part, value, expression)))


class Watched(OneLoop):
    """A deployment whose operator looks at it."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.app._token = OperatorToken(TOKEN)

    async def scrape(self) -> Scrape:
        answer = await self.ask("/metrics", SHOWN)
        assert answer.status == 200
        return scraped(answer.body)

    async def firing(self, before: Scrape) -> set[str]:
        now = await self.scrape()
        return {name for name, expression in alerts() if fires(expression, before, now)}


def watched(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_are_what_prometheus_reads_and_name_no_client(tmp_path: Path) -> None:
    async def run() -> None:
        made = Watched(plan("two-server", cohort=4), 6, tmp_path, rounds=3)
        made.start()
        made.help()
        made.join(range(6))
        try:
            await made.until(lambda: made.conductor.finished)
            found = await made.scrape()
            assert found["tessera_rounds_total", "done"] == 3
            assert found["tessera_round", ""] == 2 and found["tessera_ready", ""] == 1
            assert found["tessera_round_seconds_count", ""] == 3
            assert found["tessera_clients", "enrolled"] == found["tessera_clients", "there"] == 6
            assert found["tessera_bytes_total", "in"] > 0 < found["tessera_bytes_total", "out"]
            assert found["tessera_commits_total", "on disk"] > 3
            assert found["tessera_journal_bytes", ""] > 0
            assert ("tessera_missing", "") in found
            text = (await made.ask("/metrics", SHOWN)).body.decode()
            labels = set(re.findall(r"\{(\w+)=", text)) | set(re.findall(r",(\w+)=", text))
            assert labels <= {"outcome", "phase", "reason", "direction", "kind", "state", "le"}
            assert "client 3" not in text and not re.search(r'="\d+"', text)
        finally:
            await made.close()

    watched(run)


def test_only_the_operator_sees_more_than_that_it_is_alive(tmp_path: Path) -> None:
    async def run() -> None:
        made = Watched(plan("secure-fedavg", cohort=4), 4, tmp_path)
        made.start()
        made.join(range(3))
        try:
            await made.until(lambda: made.conductor.leader is not None)
            for path in ("/metrics", "/status"):
                for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": TOKEN}):
                    answer = await made.ask(path, wrong)
                    assert answer.status == 401 and "token" in content(answer)["error"]
                    assert answer.headers["www-authenticate"] == "Bearer"
                assert (await made.ask(path, SHOWN)).status == 200
            assert content(await made.ask("/healthz")) == {"ok": True}
            assert set(content(await made.ask("/readyz"))) == {"ready", "trouble"}
            assert (await made.scrape())["tessera_refusals_total", "operator token"] == 6
            made.app._token = None
            assert (await made.ask("/metrics", SHOWN)).status == 401
        finally:
            await made.close()

    watched(run)


def test_a_token_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    made = OperatorToken.of(tmp_path / "state")
    file = tmp_path / "state" / "operator-token"
    assert file.stat().st_mode & 0o777 == 0o600
    shown = f"Bearer {file.read_text().strip()}"
    assert made.matches(shown) and OperatorToken.of(tmp_path / "state").matches(shown)
    assert not made.matches("Bearer ") and not OperatorToken("").matches("Bearer ")
    mine = tmp_path / "mine"
    mine.write_text("abc\n")
    assert OperatorToken.of(tmp_path / "state", mine).matches("bearer abc")


def test_under_noise_only_charged_figures_leave() -> None:
    """Where cohorts are secret, how many were drawn, came or were missing is nobody's to see."""
    from rounds.test_secret_cohorts import SECURE_SERVER, planned

    secret = LeaderMetrics(planned(*SECURE_SERVER))
    secret.closed_at_deadline("collect", 3)
    shown = {"round": 1, "missing": 3, "missing_clients": [1], "survivors": 9, "rows_opened": 4}
    kept = secret.charged({**shown, "rounds": [{"round": 0, "survivors": 9, "reason": ""}]})
    assert kept == {"round": 1, "rounds": [{"round": 0, "reason": ""}]}
    assert ("tessera_missing", "") not in scraped(secret.text)
    assert scraped(secret.text)["tessera_missed_total", ""] == 0
    open_to_all = LeaderMetrics(plan("secure-fedavg", cohort=4))
    assert open_to_all.charged(shown) == shown


# --- faults, and the alerts of the docs -----------------------------------------------------------


def test_the_docs_have_every_alert_with_its_expression() -> None:
    page = DEPLOY.read_text(encoding="utf-8")
    for name, expression in alerts():
        assert f"| {name} | `{expression}` |" in page, name


def test_a_full_disk_is_trouble_until_it_is_over(tmp_path: Path) -> None:
    async def run() -> None:
        made = Watched(plan("secure-fedavg", cohort=4), 4, tmp_path)
        made.start()
        try:
            await made.until(lambda: made.conductor.leader is not None)
            leader = made.conductor.leader
            assert leader is not None
            before, full = await made.scrape(), [True]
            step = leader.journal._at

            def at(moment: object) -> None:
                if full:
                    raise sqlite3.OperationalError("database or disk is full")
                step(moment)  # type: ignore[arg-type]

            leader.journal._at = at  # type: ignore[method-assign]
            made.join(range(4))
            await made.until(lambda: made.conductor.trouble)
            for _ in range(5):  # nobody asks for anything, and it is still there
                await asyncio.sleep(0.02)
                assert "disk is full" in content(await made.ask("/status", SHOWN))["trouble"]
            ready = await made.ask("/readyz")
            assert ready.status == 503 and content(ready)["trouble"] == ["disk"]
            assert await made.firing(before) == {"TesseraDiskFull"}
            full.clear()
            await made.until(lambda: not made.conductor.trouble)
            await made.until(lambda: (made.conductor.shown["round"] or 0) >= 2)
            assert (await made.ask("/readyz")).status == 200
            assert await made.firing(before) == set()
        finally:
            await made.close()

    watched(run)


def test_a_leader_without_a_helper_is_not_ready_and_says_so(tmp_path: Path) -> None:
    now = [0.0]

    async def run() -> None:
        deadlines = ServicePlan(join=NEVER, phase=NEVER, poll=20.0, retry=0.01)
        made = Watched(
            plan("two-server", cohort=4), 4, tmp_path, deadlines=deadlines, clock=lambda: now[0]
        )
        made.start()
        try:
            await made.until(lambda: made.conductor.leader is not None)
            ready = await made.ask("/readyz")
            assert ready.status == 503 and content(ready)["trouble"] == ["helper"]
            made.help()
            await made.until(lambda: made.conductor._helper_came)
            made.join(range(4))
            await made.until(lambda: made.conductor.shown.get("round"))
            assert (await made.ask("/readyz")).status == 200
            before = await made.scrape()
            made.tasks[1].cancel()  # the helper is gone
            now[0] += 100.0
            for client in range(4):
                made.conductor.asked(ClientId(client))  # and clients are there
            assert await made.firing(before) == {"TesseraHelperGone"}
            assert (
                "the helper has not asked" in content(await made.ask("/status", SHOWN))["trouble"]
            )
        finally:
            await made.close()

    watched(run)


def test_a_clock_that_is_off_and_clients_that_are_gone_fire(tmp_path: Path) -> None:
    now = [0.0]

    async def run() -> None:
        deadlines = ServicePlan(join=NEVER, phase=NEVER, poll=20.0, retry=0.01)
        made = Watched(
            plan("secure-fedavg", cohort=4), 9, tmp_path, deadlines=deadlines, clock=lambda: now[0]
        )
        made.start()
        try:
            await made.until(lambda: made.conductor.leader is not None)
            made.join(range(9))
            await made.until(lambda: made.conductor.shown.get("round"))
            before = await made.scrape()
            assert await made.firing(before) == set()
            checker, real = made.app._checker, made.app._checker._clock
            checker._clock = lambda: real() + 500.0
            await made.until(lambda: all(each.refused for each in made.dialers))
            now[0] += 5.0
            assert await made.firing(before) == {"TesseraClockOff"}
            now[0] += 100.0  # and nobody asks any more
            assert await made.firing(before) == {"TesseraClockOff", "TesseraClientsGone"}
        finally:
            await made.close()

    watched(run)


def test_connections_above_the_cap_and_aborted_rounds_fire() -> None:
    metrics = LeaderMetrics()
    metrics.connections = Connections(5)
    before = scraped(metrics.text)
    metrics.connections.turned_away += 1
    for _ in range(3):
        metrics.round_ended({"event": "RoundAbort", "phase": "share"}, 1.0)
    now = scraped(metrics.text)
    found = {name for name, expression in alerts() if fires(expression, before, now)}
    assert found == {"TesseraConnectionsFull", "TesseraRoundsAborted"}
    assert now["tessera_aborts_total", "share"] == 3 and listener.HANDSHAKES > 0


# --- why, and who ---------------------------------------------------------------------------------


def test_why_a_round_was_aborted_and_who_was_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    async def run() -> None:
        deadlines = ServicePlan(join=30.0, phase=30.0, poll=NEVER, retry=0.01)
        made = Watched(
            plan("secure-fedavg", cohort=4), 4, tmp_path, deadlines=deadlines, clock=lambda: now[0]
        )
        made.conductor._log = JsonLog("leader", clients=True)
        made.start()
        try:
            await made.until(lambda: made.conductor.leader is not None)
            for client in range(4):  # all say that they are there, and then nothing
                made.conductor.asked(ClientId(client))
                made.conductor.waits(ClientId(client), None, object())
            await made.until(lambda: made.conductor.shown["round"] == 0)
            now[0] = 31.0
            made.conductor._wake.set()
            leader = made.conductor.leader
            assert leader is not None
            await made.until(lambda: leader.outcome(RoundId(0)))
            await made.until(lambda: made.conductor.shown["phase"] == "between rounds")
            (ended,) = content(await made.ask("/status", SHOWN))["rounds"]
            assert ended["outcome"] == "aborted" and ended["answered"] == 0 < ended["needed"]
            (gone,) = ended["missing"].values()
            assert gone == [f"client {client}" for client in range(4)]
        finally:
            await made.close()

    watched(run)
    lines = [json.loads(each) for each in capsys.readouterr().err.splitlines()]
    (deadline,) = [each for each in lines if each["event"] == "deadline"]
    assert deadline["level"] == "warning" and deadline["client"] == [0, 1, 2, 3]
    assert main(["status", str(tmp_path / "L")]) == 0
    assert "missing in" in (told := capsys.readouterr().out) and "client 2" in told


def test_refusals_are_in_the_log_and_a_flood_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    log = JsonLog("leader", clock=lambda: now[0])
    for _ in range(1000):
        log.seldom("refused", "not signed", client="client 3", status=401)
    now[0] = 2.0
    log.seldom("refused", "not signed", status=401)
    log("round opened", round=1)
    JsonLog("leader", level="warning")("round opened", round=1)
    JsonLog("leader", clients=True)("refused", client="client 3")
    first, second, opened, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["level"] == "warning" and "client" not in first and first["status"] == 401
    assert second["left_out"] == 999 and opened["level"] == "info"
    assert third["client"] == "client 3"


def test_a_client_sees_what_it_has_spent_and_which_rounds_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        made = Watched(plan("secure-submodel", cohort=4), 4, tmp_path, rounds=3)
        made.start()
        made.join(range(4))
        try:
            await made.until(lambda: made.conductor.finished)
            await made.until(lambda: all(each.rounds_ended == 3 for each in made.dialers))
        finally:
            await made.close()

    watched(run)
    assert main(["status", str(tmp_path / "C0"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["clients"]
    assert set(found) == {f"client {client}" for client in range(4)}
    for each in found.values():
        assert each["counted_rounds"] == [0, 1, 2] and each["charges"] >= 3
        assert each["spent"][0]["unit"] == "index" and each["spent"][0]["epsilon"] > 0
        assert each["exact"]
    assert main(["status", str(tmp_path / "C0")]) == 0
    assert "counted in 3 rounds (0, 1, 2)" in capsys.readouterr().out


def test_a_status_asks_for_the_operators_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "https://127.0.0.1:1"]) == 2
    assert "hint: --token-file STATE/operator-token" in capsys.readouterr().err
    assert NO_WAITS.poll == NEVER
