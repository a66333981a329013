"""A run's folder: the plan, what is known beforehand, its events as JSON lines, and what came out.

plan.toml      the plan, complete
run.json       the task, its trivial predictors, who trains, which entropy
events.jsonl   everything that happened; rounds.jsonl: one line per finished round
checkpoint/    where the run stands, for `--resume`
model/         what `tessera export` makes of it
views/, truth.json   with --record-views; helper.key: of two servers, what the helper opens
report.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from tessera.errors import ConfigError
from tessera.rounds.events import Event, RoundFinished, as_json
from tessera.rounds.plan import Plan

RUNS = Path("runs")
PLAN = "plan.toml"
RUN = "run.json"
CHECKPOINT = "checkpoint"
MODEL = "model"
REPORT = "report.html"
EVENTS = "events.jsonl"
ROUNDS = "rounds.jsonl"
VIEWS = "views"
TRUTH = "truth.json"
LABELS = "truth-labels.json"
HELPER_KEY = "helper.key"


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
                f"{folder} holds a run already",
                hint="go on with it by --resume, name another with --out, or remove it",
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

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write down what is known before the first round."""
        text = json.dumps(_finite(facts), indent=1, allow_nan=False)
        fresh = self.folder / f"{RUN}.tmp"
        fresh.write_text(text + "\n")
        fresh.replace(self.folder / RUN)

    @property
    def facts(self) -> dict[str, Any]:
        """What was known before the first round; empty for a run without a task."""
        path = self.folder / RUN
        if not path.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: {error}", hint="the file is damaged") from None
        return found

    def forget_after(self, last: int | None) -> None:
        """Drop the events of rounds after `last`: they are about to happen again."""
        for name in (EVENTS, ROUNDS):
            path = self.folder / name
            kept = []
            for line in path.read_text().splitlines(keepends=True):
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    break  # cut off in the middle of a write
                if last is not None and event["round_id"] <= last:
                    kept.append(line)
            fresh = path.with_suffix(".tmp")
            fresh.write_text("".join(kept))
            fresh.replace(path)

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


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def free_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that is not there."""
    number, folder = 1, RUNS / name
    while folder.exists():
        number += 1
        folder = RUNS / f"{name}-{number}"
    return folder
