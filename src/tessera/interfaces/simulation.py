"""`tessera.simulate`: a task trained by a plan, in one process, into a folder of its own.

What the commands `run`, `demo` and `reproduce` do, and what a program calls:

    run = tessera.simulate(task, plan, rounds=50)
    run.report("report.html")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tessera import __version__
from tessera.crypto.entropy import ScriptedEntropy
from tessera.engines.central import CentralTraining
from tessera.engines.federation import write_truth
from tessera.engines.learners import Trainer
from tessera.engines.runlog import CHECKPOINT, PLAN, REPORT, TRUTH, VIEWS, RunLog, free_folder
from tessera.engines.training import Training, complete
from tessera.engines.views import StreamedViews
from tessera.errors import ConfigError
from tessera.ids import SERVER
from tessera.learning.metrics import trivial
from tessera.rounds.events import Event
from tessera.rounds.plan import Plan, Scheme
from tessera.tasks import Task

TEST_ENTROPY: Final = "insecure test entropy"
SYSTEM: Final = "system"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, read back."""

    folder: Path

    @property
    def plan(self) -> Plan:
        return RunLog.open(self.folder).plan

    @property
    def facts(self) -> dict[str, Any]:
        return RunLog.open(self.folder).facts

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One record per finished round."""
        return list(RunLog.open(self.folder).rounds())

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(rounds done, metric), where it was measured."""
        return [(r["round_id"] + 1, r["metric"]) for r in self.rounds if r["metric"] is not None]

    @property
    def metric(self) -> float | None:
        """The metric when it was last measured."""
        return self.curve[-1][1] if self.curve else None

    def report(self, path: Path | str | None = None) -> Path:
        """Write the page; without a path into the run's folder."""
        from tessera.interfaces import report

        return report.write([self.folder], Path(path) if path else self.folder / REPORT)


def simulate(
    task: Task,
    plan: Plan,
    rounds: int | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    trainer: Trainer | str = Trainer.AUTO,
    insecure_test_entropy: str | None = None,
    record_views: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Train until `rounds` rounds are done in all (else as many as the plan says).

    A new folder in runs/, or `out`, holds everything that happened. With `resume` the run in `out`
    goes on from its checkpoint and ends as if it had never stopped. `insecure_test_entropy` makes
    every secret follow from a text: for tests only, and said in the report.
    """
    plan = complete(plan, task)
    total = plan.simulation.rounds if rounds is None else rounds
    if total < 1:
        raise ConfigError(f"{total} rounds are no run", hint="use 1 or more")
    folder = Path(out) if out is not None else free_folder(task.name)
    if not resume and (folder / PLAN).exists():
        RunLog.create(folder, plan)  # refuses
    if resume:
        insecure_test_entropy = _check_same(folder, plan, insecure_test_entropy)
    with ExitStack() as stack:
        stack.enter_context(quick_and_the_same())
        training: Training | CentralTraining
        checkpoint = folder / CHECKPOINT
        if plan.scheme is Scheme.CENTRAL:
            if record_views:
                raise ConfigError("central training has no views", hint="leave them out")
            training = stack.enter_context(CentralTraining(task, plan, folder=checkpoint))
            learner = {"name": "in one place", "reason": training.how}
        else:
            views = None
            if record_views:
                views = stack.enter_context(StreamedViews(folder / VIEWS, frozenset({SERVER})))
            script = insecure_test_entropy
            training = stack.enter_context(
                Training(
                    task,
                    plan,
                    folder=checkpoint,
                    entropy=None if script is None else ScriptedEntropy(script.encode()),
                    trainer=Trainer(trainer),
                    views=views,
                )
            )
            chosen = training.learner
            learner = {"name": chosen.learner.name, "reason": chosen.reason}
            if record_views:
                write_truth(folder / TRUTH, training.clients)
        if resume:
            log = RunLog.open(folder)
            log.forget_after(training.rounds_done - 1)
        else:
            facts = describe(task, plan, total, learner, insecure_test_entropy)
            log = RunLog.create(folder, plan, facts)
        for event in training.run(total):
            log.append(event)
            if on_event is not None:
                on_event(event)
    return Run(folder)


@contextmanager
def quick_and_the_same() -> Iterator[None]:
    """Torch as training wants it, and back afterwards.

    One thread: steps this small gain nothing from a second, and sums keep their order. Denormals
    are flushed: saturated losses would slow training threefold.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flushed = torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if flushed:
            torch.set_flush_denormal(False)


def _check_same(folder: Path, plan: Plan, script: str | None) -> str | None:
    """The test entropy of a run that is to go on, if it has one; refuses another plan."""
    log = RunLog.open(folder)
    if log.plan.digest != plan.digest:
        raise ConfigError(
            f"{folder} was started with another plan",
            hint="resume with the plan in its folder, or start a new run",
        )
    if log.facts.get("version") != __version__:
        raise ConfigError(
            f"{folder} was started by tessera {log.facts.get('version')}, this is {__version__}",
            hint="resume with the version it was started with, or start a new run",
        )
    stored = log.facts.get("entropy_script")
    if script is not None and script != stored:
        raise ConfigError(
            f"{folder} was started with other entropy",
            hint="leave --insecure-test-entropy out: a run keeps what it began with",
        )
    return stored


def describe(
    task: Task, plan: Plan, rounds: int, learner: dict[str, str], script: str | None
) -> dict[str, Any]:
    """What is known before the first round: run.json."""
    data, simulation, privacy = task.data, plan.simulation, plan.privacy.index
    binding = task.tables.bind(task.build(plan.seed))
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
        "metric": task.metric,
        "metrics": simulation.metrics.value,
        "trivial": trivial(data) if "item" in data.train.fields else {},
        "learner": learner,
        "entropy": SYSTEM if script is None else TEST_ENTROPY,
        "crypto": {"mode": simulation.crypto.value, "every": simulation.crypto_every},
        "rounds": rounds,
        "cohort": plan.cohort,
        "model": {
            "dense": binding.dense_size,
            "tables": [
                {
                    "name": t.name,
                    "rows": t.rows,
                    "width": t.width,
                    "derived_from": t.derived_from or "",
                    "local": t.local,
                }
                for t in binding.tables
            ],
        },
        "level": plan.privacy.level,
        "index_privacy": {"p1": privacy.p1, "p2": privacy.p2, "p3": privacy.p3, "p4": privacy.p4},
    }
    if script is not None:
        facts["entropy_script"] = script
    return facts
