"""What a leader's operator sees: figures for Prometheus, a status, and whether it is ready.

Counters are incremented where things happen. Gauges are computed when somebody asks, from what the
conductor shows after a step. No label names a client. Where the plan has [dp] a figure that nobody
is charged for is left out (`NAMES` in `rounds/events.py`), since a database of metrics keeps it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tessera.plan import Plan
from tessera.rounds.events import FIGURES, is_charged
from tessera.services.http.listener import Connections

TOKEN: Final = "operator-token"
"""In the leader's folder of state: what /metrics and /status ask for."""
LEAST_DISK: Final = 1 << 24
"""Free bytes below which a leader is not ready: a round may not have room."""
SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
DISK, HELPER_GONE, OLD, LOADING = "disk", "helper", "old copy", "loading"
"""Kinds of trouble."""


@dataclass(slots=True)
class LeaderFigures:
    """A leader as it was after its last step, and what holds it up now."""

    shown: dict[str, Any] = field(default_factory=dict)
    clients: dict[str, int] = field(default_factory=dict)
    """How many are enrolled, are there, and are free for a round."""
    phase_seconds: float = 0.0
    deadline_seconds: float | None = None
    helper_silent: float | None = None
    """Seconds since the helper last asked; None: there is none, or nobody waits for it."""
    trouble: dict[str, str] = field(default_factory=dict)
    """By kind, in words."""


class LeaderMetrics(Collector):
    """Counters of a leader's process, and its gauges when they are asked for."""

    def __init__(self, plan: Plan | None = None, state: Path | None = None) -> None:
        """`state`: the folder whose disk has to have room."""
        self.registry = CollectorRegistry()
        self.plan, self._state = plan, state
        self.figures: Callable[[], LeaderFigures] = LeaderFigures
        self.connections: Connections | None = None
        self.rounds = Counter(
            "tessera_rounds", "Rounds that have ended.", ["outcome"], registry=self.registry
        )
        self.aborts = Counter(
            "tessera_aborts", "Rounds aborted, by phase.", ["phase"], registry=self.registry
        )
        self.deadlines = Counter(
            "tessera_deadlines",
            "Phases that were closed at a deadline.",
            ["phase"],
            registry=self.registry,
        )
        self.missed = Counter(
            "tessera_missed",
            "Answers that were missing at deadlines, of all rounds.",
            registry=self.registry,
        )
        self.refusals = Counter(
            "tessera_refusals", "Requests refused.", ["reason"], registry=self.registry
        )
        self.bytes = Counter(
            "tessera_bytes", "Bytes of bodies.", ["direction"], registry=self.registry
        )
        self.commits = Counter(
            "tessera_commits", "Steps on disk, and not.", ["outcome"], registry=self.registry
        )
        self.seconds = Histogram(
            "tessera_round_seconds", "From opening to end.", buckets=SECONDS, registry=self.registry
        )
        self.registry.register(self)

    # --- counting -------------------------------------------------------------------------------

    def round_ended(self, event: dict[str, Any], seconds: float | None) -> None:
        """`event`: as the journal has it."""
        done = event.get("event") == "RoundFinished"
        self.rounds.labels("done" if done else "aborted").inc()
        if not done:
            self.aborts.labels(str(event.get("phase", ""))).inc()
        if seconds is not None:
            self.seconds.observe(seconds)

    def closed_at_deadline(self, phase: str, missing: int) -> None:
        self.deadlines.labels(phase).inc()
        if self._passes("missing"):
            self.missed.inc(missing)

    def transferred(self, direction: str, length: int) -> None:
        """`direction`: in or out."""
        if self._passes("bytes_up"):
            self.bytes.labels(direction).inc(length)

    def charged(self, shown: dict[str, Any]) -> dict[str, Any]:
        """A status or an event without what nobody is charged for."""
        if self.plan is None:
            return shown
        kept = {n: v for n, v in shown.items() if n not in FIGURES or self._passes(n)}
        if not self._passes("missing"):
            kept.pop("missing_clients", None)
        if "rounds" in kept:
            kept["rounds"] = [self.charged(each) for each in kept["rounds"]]
        return kept

    def committed(self, done: bool) -> None:
        self.commits.labels("on disk" if done else "failed").inc()

    # --- asked for ------------------------------------------------------------------------------

    @property
    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)

    @property
    def free_disk(self) -> int | None:
        try:
            return None if self._state is None else shutil.disk_usage(self._state).free
        except OSError:
            return None

    @property
    def trouble(self) -> dict[str, str]:
        """What keeps the leader from leading rounds now, by kind."""
        found, free = dict(self.figures().trouble), self.free_disk
        if free is not None and free < LEAST_DISK:
            found.setdefault(DISK, f"{free} bytes are free on the disk of the state")
        return found

    def _passes(self, name: str) -> bool:
        return self.plan is None or is_charged(self.plan, name)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        figures, trouble = self.figures(), self.trouble
        shown = figures.shown

        def gauge(name: str, text: str, value: float | None) -> Iterator[GaugeMetricFamily]:
            if value is not None:
                yield GaugeMetricFamily(f"tessera_{name}", text, value)

        def labelled(
            name: str, text: str, label: str, values: dict[str, float]
        ) -> Iterator[GaugeMetricFamily]:
            family = GaugeMetricFamily(f"tessera_{name}", text, labels=[label])
            for key, value in values.items():
                family.add_metric([key], value)
            if values:
                yield family

        yield from gauge("ready", "1 if nothing keeps it from leading rounds.", not trouble)
        kinds = dict.fromkeys((DISK, HELPER_GONE, OLD, LOADING), 0.0)
        yield from labelled(
            "trouble", "1 while it lasts.", "kind", kinds | dict.fromkeys(trouble, 1.0)
        )
        yield from gauge("round", "The round in hand, or the last one.", shown.get("round"))
        yield from labelled(
            "phase", "1 for the one under way.", "phase", {str(shown.get("phase", "")): 1.0}
        )
        yield from gauge("phase_seconds", "Since it began.", figures.phase_seconds)
        yield from gauge("deadline_seconds", "Until it is closed.", figures.deadline_seconds)
        if self._passes("missing"):
            yield from gauge("missing", "Messages that are due.", shown.get("missing"))
        yield from labelled(
            "clients", "Enrolled, there, free for a round.", "state", dict(figures.clients)
        )
        groups = {
            key: float(shown[name])
            for key, name in (("waiting", "open"), ("retired", "retired"), ("all", "groups"))
            if name in shown
        }
        yield from labelled("groups", "Fixed groups.", "state", groups)
        yield from gauge("helper_silent_seconds", "Since the helper asked.", figures.helper_silent)
        yield from gauge("journal_bytes", "On disk.", shown.get("disk"))
        yield from gauge("disk_free_bytes", "On the state's disk.", self.free_disk)
        yield from gauge("restarts", "Of the leader's process.", shown.get("restarts"))
        if self.connections is not None:
            count = self.connections
            values = {"open": count.accepted, "served": count.established}
            yield from labelled("connections", "Now.", "state", dict(values))
            turned = {"full": count.turned_away, "handshake": count.closed_early}
            yield from labelled("connections_refused", "So far.", "reason", dict(turned))


class OperatorToken:
    """What an operator shows to see more than that the leader is alive."""

    def __init__(self, token: str) -> None:
        self._expected = token.strip().encode()

    @classmethod
    def of(cls, state: Path, file: Path | None = None) -> OperatorToken:
        """That of `file`, or the one in the folder of state, made when it is first asked for."""
        path = file
        if path is None:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = state / TOKEN
            if not path.exists():
                made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                with os.fdopen(made, "w") as out:
                    out.write(secrets.token_urlsafe(32) + "\n")
        return cls(path.read_text(encoding="utf-8"))

    def matches(self, authorization: str) -> bool:
        kind, _, given = authorization.partition(" ")
        told = given.strip().encode("utf-8", "replace")
        return bool(self._expected) and (
            kind.lower() == "bearer" and hmac.compare_digest(told, self._expected)
        )
