"""A run's folder: its only writer and its only reader.

    run = RunFolder.load(Path("runs/shop"))  # ConfigError: not a run, damaged, or another layout
    run.plan                                 # the Plan; run.plan_text is the file as it stands
    run.facts["scheme"]                      # run.json
    run.fact("setup", "mean")                # the same, but ConfigError if it is not there
    for line in run.rounds(): ...            # finished rounds: the fields of RoundFinished
    for event in run.events(): ...           # everything that happened

plan.toml      the plan, complete
run.json       the layout's number; the task, its baselines, who trains, which entropy
events.jsonl   everything that happened; rounds.jsonl: one line per finished round
ids.json       the ids of items and (simulated) users by row, where the data has its own
checkpoint/    where the run stands, for `--resume`
model/         what `tessera export` makes of it
ranking.json   where the model puts what came next, and three users' lists
tested.json    each look at the test part of a run that is tested on a validation part
audit.json     what `tessera audit` found; statement.html and .txt: the page to sign
beside/        the run of a second model that scores are mixed with, where the task has one
views/, truth.json   with --record-views; helper.key: of two servers, the helper's unsealing key
report.html

With `[dp]` each line, and run.json, names its exact figures under "simulation only, not charged"
(`rounds/events.py`).

A last line without a newline is still being written, and is left for the next look.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tessera.crypto.dpf import Forest
from tessera.crypto.entropy import Entropy, RootedEntropy, ScriptedEntropy
from tessera.crypto.secret import Secret
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError, __version__
from tessera.plan import Plan
from tessera.rounds import schemes
from tessera.rounds.events import Event, RoundFinished, as_json, marked
from tessera.rounds.forecast.traffic import TwoServerTraffic
from tessera.simulation.views import EVENTS as EVENT_SHAPES
from tessera.simulation.views import FACTS, NEEDED, misfit

if TYPE_CHECKING:
    from tessera.tasks import Task


LAYOUT: Final = 2
"""Of the files above. It grows when a reader of the old files would misread the new ones."""

RUNS = Path("runs")
PLAN = "plan.toml"
RUN = "run.json"
CHECKPOINT = "checkpoint"
MODEL = "model"
REPORT = "report.html"
EVENTS = "events.jsonl"
ROUNDS = "rounds.jsonl"
AHEAD = 16
"""Rounds that a checkpoint may be ahead of the log, when a run was killed between the two."""
VIEWS = "views"
TRUTH = "truth.json"
LABELS = "truth-labels.json"
HELPER_KEY = "helper.key"
IDS = "ids.json"
BESIDE = "beside"
RANKING = "ranking.json"
TESTED = "tested.json"
AUDIT = "audit.json"
STATEMENT = "statement.html"
STATEMENT_TEXT = "statement.txt"
CONTENTS: Final = (
    *(PLAN, RUN, f"{RUN}.tmp", IDS, EVENTS, ROUNDS, CHECKPOINT, MODEL, REPORT),
    *(VIEWS, TRUTH, LABELS, HELPER_KEY, BESIDE, RANKING, TESTED),
    *(AUDIT, STATEMENT, STATEMENT_TEXT),
)
"""Everything that a run writes into its folder, and all that is ever removed from it."""

_ROUND_FIELDS: Final = frozenset(
    f.name for f in fields(RoundFinished) if f.default is MISSING and f.default_factory is MISSING
)
_LATER_FIELDS: Final[Mapping[str, Any]] = {
    f.name: f.default if f.default_factory is MISSING else f.default_factory()
    for f in fields(RoundFinished)
    if f.name not in _ROUND_FIELDS
}
"""Fields that a round of an earlier version may lack, with what stands for them."""


class RunFolder:
    """Appends to a run's folder, and reads it back."""

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], *, made_folder: bool = False
    ) -> None:
        self.folder, self.facts = folder, dict(facts)
        self._made_folder = made_folder

    @classmethod
    def create(cls, folder: Path, plan: Plan) -> RunFolder:
        """A new folder; one that holds a run already is left alone, unless that never began."""
        if never_began(folder):
            cls(folder, {}).discard()
        if (folder / PLAN).exists():
            raise ConfigError(
                f"{folder} holds a run already",
                hint="go on with it by --resume, name another with --out, or remove it",
            )
        was_there = folder.exists()
        if was_there and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} is not empty, and what is in it is not a run of tessera",
                hint="name another with --out: a new one, or an empty one",
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EVENTS).touch()  # the first of all: by it `never_began` knows the folder
        (folder / ROUNDS).touch()
        (folder / PLAN).write_text(plan.to_toml())
        run = cls(folder, {}, made_folder=not was_there)
        run.describe({})
        return run

    def discard(self) -> None:
        """Remove the files of a run that did not begin, and the folder if `create` made it."""
        for name in CONTENTS:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self._made_folder:
            with contextlib.suppress(OSError):  # somebody else put a file into it
                self.folder.rmdir()

    @classmethod
    def load(cls, folder: Path) -> RunFolder:
        """An existing folder of this layout."""
        for name in (PLAN, RUN):
            _check_file(folder / name)
        path = folder / RUN
        try:
            facts = json.loads(_text(path))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path} is not valid JSON: {error.msg} in line {error.lineno}",
                hint="the file is damaged; run again elsewhere",
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", hint="the file is damaged; run again elsewhere"
            ) from None
        if not isinstance(facts, dict):
            raise ConfigError(
                f"{path} is not a JSON object", hint="the file is damaged; run again elsewhere"
            )
        layout = facts.get("layout", 1)
        if layout != LAYOUT:
            raise ConfigError(
                f"{path}: the folder has layout {layout}, this version of tessera reads {LAYOUT}",
                hint="read it with the version that wrote it, or run its plan again",
            )
        wrong = misfit(facts, dict(FACTS))
        if wrong is not None:
            raise ConfigError(
                f"{path}: {wrong} is not of the type that a run writes",
                hint="the file is damaged, or was edited; run again into another folder",
            )
        return cls(folder, facts)

    @cached_property
    def plan(self) -> Plan:
        return Plan.read(self.folder / PLAN)

    @property
    def plan_text(self) -> str:
        """plan.toml as it is written."""
        return _text(self.folder / PLAN)

    @property
    def described(self) -> bool:
        """Whether more is known than the layout: a run with a task, set up for its first round."""
        return self.facts.keys() > {"layout"}

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write down what is known before the first round."""
        self.facts = marked(self.plan, {**_finite(facts), "layout": LAYOUT})
        fresh = self.folder / f"{RUN}.tmp"
        fresh.write_text(json.dumps(self.facts, indent=1, allow_nan=False) + "\n")
        fresh.replace(self.folder / RUN)

    def keep(self, name: str, found: object) -> None:
        """Write one of the JSON files beside the log."""
        (self.folder / name).write_text(json.dumps(found) + "\n", encoding="utf-8")

    def kept(self, name: str) -> Any:
        """What `keep` wrote; None where there is no such file."""
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            return json.loads(_text(path))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON", hint="remove it") from error

    def keep_ids(self, ids: Mapping[str, RowNames]) -> None:
        """Write down what the rows of items and users are called."""
        if ids:
            named = {kind: names.as_json() for kind, names in ids.items()}
            (self.folder / IDS).write_text(json.dumps(named) + "\n", encoding="utf-8")

    @property
    def ids(self) -> dict[str, RowNames]:
        """The names of rows by kind; none where the data has no ids of its own."""
        path = self.folder / IDS
        if not path.exists():
            return {}
        try:
            found = json.loads(_text(path))
            return {str(kind): RowNames.from_json(one) for kind, one in found.items()}
        except (ValueError, AttributeError, ConfigError) as error:
            raise ConfigError(
                f"{path}: not ids by row ({error})",
                hint="the file is damaged, or was edited; run again into another folder",
            ) from error

    def fact(self, *names: str) -> Any:
        """One of the facts, by its name and the names below it."""
        found: Any = self.facts
        for name in names:
            if not isinstance(found, dict) or name not in found:
                raise ConfigError(
                    f"{self.folder / RUN} does not have {'.'.join(names)}",
                    hint="a run without a task has no facts of one"
                    if not self.described
                    else "the file is damaged, or was edited; run again into another folder",
                )
            found = found[name]
        return found

    def check_described(self) -> None:
        """Refuse a folder without the facts that every run of a task has."""
        for name in NEEDED:
            self.fact(*name.split("."))

    def forget_after(self, last: int | None) -> None:
        """Drop the events of rounds after `last`: they are about to happen again.

        An audit is of the rounds that there were, and goes, too.
        """
        (self.folder / AUDIT).unlink(missing_ok=True)
        for name in (EVENTS, ROUNDS):
            path = self.folder / name
            kept = []
            for line in _text(path).splitlines(keepends=True):
                try:
                    round_id = int(json.loads(line)["round_id"])
                except (ValueError, KeyError, TypeError):
                    break  # cut off in the middle of a write
                if last is not None and round_id <= last:
                    kept.append(line)
            fresh = path.with_suffix(".tmp")
            fresh.write_text("".join(kept))
            fresh.replace(path)

    def append(self, event: Event) -> None:
        line = json.dumps(marked(self.plan, as_json(event))) + "\n"
        with (self.folder / EVENTS).open("a") as out:
            out.write(line)
        if isinstance(event, RoundFinished):
            with (self.folder / ROUNDS).open("a") as out:
                out.write(line)

    def events(self) -> Iterator[dict[str, Any]]:
        """Everything that happened, in order."""
        return self._lines(EVENTS, frozenset({"event", "round_id"}))

    def rounds(self) -> Iterator[dict[str, Any]]:
        """The finished rounds, in order."""
        return ({**_LATER_FIELDS, **line} for line in self._lines(ROUNDS, _ROUND_FIELDS))

    def _lines(self, name: str, needed: frozenset[str]) -> Iterator[dict[str, Any]]:
        path = self.folder / name
        _check_file(path)
        for number, line in enumerate(_text(path).splitlines(keepends=True), start=1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith("\n"):
                    return
                raise ConfigError(
                    f"{path}: line {number} is cut off",
                    hint="`tessera run --resume` continues from the last checkpoint",
                ) from None
            missing = needed - found.keys() if isinstance(found, dict) else needed
            wrong = None
            if not missing:
                kind = RoundFinished.__name__ if name == ROUNDS else str(found["event"])
                # An event of another kind is wrong by its name.
                wrong = misfit(found, dict(EVENT_SHAPES.get(kind, {"event": int})))
            if missing or wrong is not None:
                raise ConfigError(
                    f"{path}: line {number} does not have {', '.join(sorted(missing))}"
                    if missing
                    else f"{path}: line {number} has an invalid {wrong}",
                    hint="the file is damaged, or was edited; run again into another folder",
                )
            yield found


def never_began(folder: Path) -> bool:
    """Whether a folder is that of a run which was killed before its first round, and only that.

    It has nothing but files of a run, no event, and no facts in run.json. A plan alone is its
    user's.
    """
    events = folder / EVENTS
    try:
        if not events.is_file() or any(path.name not in CONTENTS for path in folder.iterdir()):
            return False
        if any((folder / name).stat().st_size for name in (EVENTS, ROUNDS) if _there(folder, name)):
            return False
        return not _there(folder, RUN) or not RunFolder.load(folder).described
    except (OSError, ConfigError):
        return False


def _there(folder: Path, name: str) -> bool:
    return (folder / name).exists()


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(
            f"{path.parent} is not a run's folder: it has no {path.name}",
            hint="`tessera run PLAN.toml` makes one under runs/",
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="is it the file that the run wrote?"
        ) from None


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


def check_round(checkpoint: Path, last: int) -> None:
    """A checkpoint's last round, against the log beside it, if there is one.

    All rounds before it are drawn again, so a number that nobody has come to is not followed.
    """
    log = checkpoint.parent / EVENTS
    if not log.is_file():
        return
    with log.open("rb") as lines:
        logged = sum(1 for _ in lines)
    if last >= logged + AHEAD:
        raise ConfigError(
            f"{checkpoint}: its last round is {last:,}, and the log has {logged:,} events",
            hint="the checkpoint is damaged, or of another run: start a new one",
        )


# --- owner only -----------------------------------------------------------------------------------
#
# Files that only their owner may read: secrets, and what only a simulation may know.


def write_owner_only(path: Path, content: bytes) -> None:
    """A new file, on disk when this returns; its mode is set before there is anything in it."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


# --- the root of a run ----------------------------------------------------------------------------
#
# All secrets of a simulation are derived from it, and it is stored with it.

ROOT: Final = "root.key"


def owners_folder(folder: Path) -> None:
    """A folder that only its owner reads: it holds the root, and simulated clients' own rows."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def run_root(folder: Path | None) -> RootedEntropy:
    """The run's root: the stored one, or a fresh one, stored before anything follows from it."""
    if folder is None:
        return RootedEntropy.fresh()
    path = folder / ROOT
    if path.exists():
        return _stored_root(path)
    fresh = RootedEntropy.fresh()
    owners_folder(folder)
    write_owner_only(path, fresh.root.reveal())
    return fresh


def _stored_root(path: Path) -> RootedEntropy:
    root = path.read_bytes()
    if len(root) != 32:
        raise ConfigError(f"{path}: {len(root)} bytes where a root has 32", hint="start a new run")
    return RootedEntropy(Secret(root))


def entropy_of(log: RunFolder) -> Entropy:
    """What the secrets of a run's clients followed from, to find again what they drew for good."""
    script = log.facts.get("entropy_script")
    if script is not None:
        return ScriptedEntropy(str(script).encode())
    path = log.folder / CHECKPOINT / ROOT
    if not path.is_file():
        raise ConfigError(
            f"{path}: missing, and what the run's clients drew for themselves follows from it",
            hint="copy the whole folder of the run, or start a new run",
        )
    return _stored_root(path)


TEST_ENTROPY: Final = "insecure test entropy"
SYSTEM: Final = "system"


def digest_of(task: Task) -> str:
    """Names the training part as it is read: its columns and whose they are.

    Before clients draw their negatives, so that it is the same in every run over the same data.
    """
    digest = hashlib.sha256(task.data.offsets.tobytes())
    for name, column in sorted(task.data.train.fields.items()):
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(column).data)
    return digest.hexdigest()


def describe(
    task: Task,
    plan: Plan,
    rounds: int,
    learner: dict[str, str],
    script: str | None,
    trivial: Mapping[str, float],
) -> dict[str, Any]:
    """What is known before the first round: run.json. `trivial` is what needs no model."""
    data, simulation, privacy = task.data, plan.simulation, plan.privacy.index
    bound = task.bind(task.build(plan.seed))
    facts: dict[str, Any] = {
        "version": __version__,
        "name": plan.federation,
        "scheme": plan.scheme.value,
        "task": {
            "name": task.name,
            "title": task.title or task.name,
            "facts": dict(data.facts),
            "clients": data.clients,
            "examples": len(data.train),
            "test_examples": len(data.test),
        },
        "data": digest_of(task),
        "metric": task.metric.name,
        "lower_is_better": task.metric.lower_is_better,
        "metrics": simulation.metrics.value,
        "trivial": dict(trivial),
        "learner": learner,
        "entropy": SYSTEM if script is None else TEST_ENTROPY,
        "crypto": {"mode": simulation.crypto.value, "every": simulation.crypto_every},
        "rounds": rounds,
        "cohort": plan.cohort,
        "model": {
            "dense": bound.dense_size,
            "tables": [
                {
                    "name": t.name,
                    "rows": t.rows,
                    "width": t.width,
                    "derived_from": t.derived_from or "",
                    "local": t.local,
                }
                for t in bound.tables
            ],
        },
        "level": plan.privacy.level,
        "naming_bound": plan.promise.bound(),
        "index_privacy": {"p1": privacy.p1, "p2": privacy.p2, "p3": privacy.p3, "p4": privacy.p4},
    }
    entry = schemes.of(plan)
    if entry.two_servers:
        facts["two_server"] = describe_two_server(
            plan, None if entry.rows.union else TwoServerTraffic(plan, None, {})
        )
    if script is not None:
        facts["entropy_script"] = script
    return facts


def describe_two_server(plan: Plan, traffic: TwoServerTraffic | None) -> dict[str, Any]:
    """What two servers look at and how tables are written, as plain JSON values.

    The same in `tessera plan --json` and in run.json. `traffic` is None where a union decides, in
    each round anew; that round then tells.
    """
    least = max(2, plan.least_survivors)
    forests: list[Forest] = []
    if traffic is not None:
        layouts = (*traffic.layouts.reading.values(), *traffic.layouts.writing.values())
        forests = [layout.forest for layout in layouts]
    return {
        "domain": schemes.of(plan).rows.domain,
        "write": plan.two_server.write.value,
        "check": plan.two_server.check,
        "verify": plan.two_server.verify,
        "key_rounds": plan.two_server.key_rounds,
        "absent": plan.two_server.absent.value,
        "report_bytes": None if traffic is None else list(traffic.report_bytes),
        "row_limit": plan.two_server.row_limit,
        "max_rows": plan.union.max_rows,
        "min_cohort": least,
        "may_vanish": plan.cohort - least,
        "most_excluded": plan.most_missing,
        "rows_looked_at": None if traffic is None else sum(int(f.sizes.sum()) for f in forests),
        "aes_blocks": None if traffic is None else sum(f.aes_blocks for f in forests),
        "tables": [
            {
                "name": cost.table,
                "rows": cost.rows,
                "write": cost.write.value,
                "keys": cost.keys,
                "shares": cost.shares,
                "reason": cost.reason,
            }
            for cost in (() if traffic is None else traffic.writing)
        ],
    }
