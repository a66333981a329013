"""What was measured and trained, kept by what it was and by which code.

A measurement is one file of figures. A training is a run's folder (`tessera.simulate`) with a
checkpoint: what was stopped goes on, and what no record of a round says is read from the training
as its last round has left it. Secrets of trainings come from a text, so that figures come out
again: accuracy is valid, and there is no privacy in them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tessera
from papers.cells import Watch, say, unwatched
from tessera.crypto import kernel
from tessera.crypto.entropy import ScriptedEntropy
from tessera.rounds import schemes
from tessera.runs.folder import PLAN

if TYPE_CHECKING:
    from tessera.api import Run
    from tessera.plan import Plan
    from tessera.runs.central import CentralTraining
    from tessera.runs.training import Training
    from tessera.tasks import Task


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of measurements; another version of the code, or of the kernel, measures anew."""

    folder: Path
    version: str = field(default_factory=lambda: code_version())

    def get(
        self,
        kind: str,
        setting: Mapping[str, Any],
        work: Callable[[], dict[str, Any]],
        *,
        title: str,
        repeat: int = 0,
    ) -> dict[str, Any]:
        """What was measured under this setting, or what `work` measures now."""
        key = {
            "kind": kind,
            "setting": setting,
            "repeat": repeat,
            "code": self.version,
            "kernel": kernel.describe().name,
        }
        path = self.folder / f"{kind}-{digest_of(key)}.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())["found"]
            return found
        say(f"{kind}: {title}")
        found = work()
        self.folder.mkdir(parents=True, exist_ok=True)
        finished = path.with_suffix(".part")  # whoever is stopped while writing leaves no half file
        finished.write_text(json.dumps({"key": key, "found": found}))
        finished.replace(path)
        return found

    def number(
        self, kind: str, setting: Mapping[str, Any], work: Callable[[], float], *, title: str
    ) -> float:
        """The same of a single figure."""
        return float(self.get(kind, setting, lambda: {kind: work()}, title=title)[kind])


@dataclass(frozen=True, slots=True)
class Trainings:
    """Where trainings are kept, and the text that their secrets come from."""

    folder: Path
    script: str
    watch: Watch = unwatched
    version: str = field(default_factory=lambda: training_version())

    def place(self, name: str, plan: Plan, rounds: int, data: Path | None = None) -> Path:
        """The folder of the training of a complete plan for so many rounds."""
        key = {
            "plan": plan.to_toml(),
            "rounds": rounds,
            "data": str(data or ""),
            "code": self.version,
        }
        return self.folder / f"{slug(name)}-{digest_of(key)}"

    def run(
        self,
        place: Path,
        task: Task,
        plan: Plan,
        rounds: int,
        *,
        title: str,
        trainer: str = "auto",
    ) -> Run:
        """The run in this folder after so many rounds; trained as far as it is not there."""
        from tessera.api import Run, simulate  # they need torch, and measurements do not

        run, started = Run(place, task), (place / PLAN).exists()
        if started and len(run.rounds) >= rounds:
            return run
        with self.watch(rounds, title=title, metric=task.metric.name) as watcher:
            return simulate(
                task,
                plan,
                rounds,
                out=place,
                resume=started,
                trainer="auto" if started else trainer,
                insecure_test_entropy=None if started else self.script,
                on_event=watcher.on_event,
            )

    def reopened(self, task: Task, plan: Plan, checkpoint: Path) -> Training | CentralTraining:
        """A training of a complete plan as this checkpoint has it."""
        from tessera.runs.central import CentralTraining
        from tessera.runs.training import Training

        entropy = ScriptedEntropy(self.script.encode())
        if not schemes.of(plan).federated:
            return CentralTraining(task, plan, folder=checkpoint, entropy=entropy)
        return Training(task, plan, folder=checkpoint, entropy=entropy)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# --- versions -------------------------------------------------------------------------------------


def digest_of(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]


def code_version() -> str:
    """A digest of the sources of package and papers: other code, other figures."""
    digest = hashlib.sha256(tessera.__version__.encode())
    digest.update(_sources(".py", ".c"))
    return digest.hexdigest()[:20]


def training_version() -> str:
    """A digest of what a model's bits depend on: other code, other curves."""
    return hashlib.sha256(_sources(".py", without=("audit", "report", "cli"))).hexdigest()


def _sources(*suffixes: str, without: tuple[str, ...] = ()) -> bytes:
    found = []
    for root in (Path(tessera.__file__).parent, Path(__file__).parent):
        for path in sorted(p for p in root.rglob("*") if p.suffix in suffixes):
            name = path.relative_to(root)
            if name.parts[0] not in without:
                found.append(name.as_posix().encode() + b"\0" + path.read_bytes())
    return b"".join(found)
