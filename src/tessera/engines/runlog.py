"""A run's folder: the plan, its events as JSON lines, one line per round, and recorded views."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import ConfigError
from tessera.rounds.events import Event, RoundFinished, as_json
from tessera.rounds.plan import Plan

PLAN = "plan.toml"
EVENTS = "events.jsonl"
ROUNDS = "rounds.jsonl"
VIEWS = "views"
TRUTH = "truth.json"


@dataclass(frozen=True, slots=True)
class RunLog:
    """Appends to a run's folder, and reads it back."""

    folder: Path
    plan: Plan

    @classmethod
    def create(cls, folder: Path, plan: Plan) -> RunLog:
        """A new folder; one that holds a run already is left alone."""
        if (folder / PLAN).exists():
            raise ConfigError(
                f"{folder} holds a run already", hint="name another with --out, or remove it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_text(plan.to_toml())
        (folder / EVENTS).touch()
        (folder / ROUNDS).touch()
        return cls(folder, plan)

    @classmethod
    def open(cls, folder: Path) -> RunLog:
        if not (folder / PLAN).exists():
            raise ConfigError(
                f"{folder} is not a run's folder: it has no {PLAN}",
                hint="`tessera run PLAN.toml` makes one",
            )
        return cls(folder, Plan.read(folder / PLAN))

    def append(self, event: Event) -> None:
        line = json.dumps(as_json(event)) + "\n"
        with (self.folder / EVENTS).open("a") as out:
            out.write(line)
        if isinstance(event, RoundFinished):
            with (self.folder / ROUNDS).open("a") as out:
                out.write(line)

    def events(self) -> Iterator[dict[str, Any]]:
        return self._lines(EVENTS)

    def rounds(self) -> Iterator[dict[str, Any]]:
        return self._lines(ROUNDS)

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        with (self.folder / name).open() as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    raise ConfigError(f"{self.folder / name}: line {number} is cut off") from None
