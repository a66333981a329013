"""`tessera.simulate`: a task trained by a plan, in one process, into a folder of its own.

What the commands `run`, `demo` and `reproduce` do, and what a program calls:

    run = tessera.simulate(task, plan, rounds=50)
    run.report("report.html")
    tessera.compare([run, "runs/another"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError, __version__
from tessera.ids import HELPER, SERVER
from tessera.learning.metrics import NextMetric
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.plan import Plan
from tessera.plan.defaults import plan_beside
from tessera.report import comparison, lineup, page, tables
from tessera.report.figures import RunFigures
from tessera.report.markup import Markup, join, tag
from tessera.report.numbers import predictor, score
from tessera.report.progress import to_be_shown
from tessera.report.sections import ranking, summary
from tessera.rounds import schemes
from tessera.rounds.events import Event, is_charged, told
from tessera.rounds.noise import noise_of
from tessera.runs.central import CentralTraining
from tessera.runs.client_training import Trainer
from tessera.runs.folder import (
    BESIDE,
    CHECKPOINT,
    HELPER_KEY,
    LABELS,
    PLAN,
    REPORT,
    ROOT,
    TRUTH,
    VIEWS,
    RunFolder,
    describe,
    digest_of,
    free_folder,
    never_began,
)
from tessera.runs.ranking import full_ranking, keep_ranking
from tessera.runs.recommend import Recommendations, recommendations
from tessera.runs.setup import SetupProgress
from tessera.runs.standing import MIXTURE, weighed
from tessera.runs.training import Training, complete
from tessera.runs.truth import write_box_key, write_labels, write_truth
from tessera.simulation.views import StreamedViews, Views
from tessera.tasks import Task

BY_NAME: Final = {
    "compiled": Trainer.COMPILED,
    "vectorised": Trainer.VECTORISED,
    "one by one": Trainer.SEQUENTIAL,
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, read back.

    `task` is at hand after `simulate`; for a folder of earlier the plan names it, or it is passed.
    """

    folder: Path
    task: Task | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a string is a path, too

    @property
    def plan(self) -> Plan:
        return RunFolder.load(self.folder).plan

    @property
    def facts(self) -> dict[str, Any]:
        return RunFolder.load(self.folder).facts

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One record per finished round."""
        return list(RunFolder.load(self.folder).rounds())

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(rounds done, metric), where it was measured."""
        return [(r["round_id"] + 1, r["metric"]) for r in self.rounds if r["metric"] is not None]

    @property
    def metric(self) -> float | None:
        """The metric when it was last measured."""
        return self.curve[-1][1] if self.curve else None

    def to_frame(self, *, exact: bool = False) -> Any:
        """The finished rounds as a pandas DataFrame; bytes and seconds as sums of categories.

        Of a run with [dp] what is charged or public; with `exact` all, to keep, not to pass on.
        """
        return tables.as_frame([told(self.plan, line, exact=exact) for line in self.rounds])

    def _repr_html_(self) -> str:
        """For a notebook: what was run, and its curve."""
        figures = RunFigures.load(self.folder)
        facts = {"folder": self.folder, "scheme": figures.scheme, "rounds": figures.finished}
        if figures.final is not None:
            facts[f"{figures.metric}{summary.not_charged([figures])}"] = score(figures.final)
        facts |= {f"  {predictor(name)}": score(one) for name, one in figures.baselines.items()}
        curve = [summary.curve_chart([figures])] if figures.curve else []
        drawn = [Markup(tables.standalone(chart)) for chart in curve]
        return tables.card(figures.title, facts, *drawn, join(ranking.ranking([figures])))

    def report(self, path: Path | str | None = None, *, exact: bool = False) -> Path:
        """Write the page; without a path into the run's folder.

        Elsewhere the page of a run with [dp] has charged and public figures only, unless `exact`.
        """
        out = Path(path) if path else self.folder / REPORT
        return page.write([self.folder], out, exact=exact)

    def export(self, task: Task | None = None, out: Path | str | None = None) -> Path:
        """Save the trained model for `tessera.load`; a task of your own has to be passed."""
        from tessera.runs.export import export_run

        return export_run(self.folder, task or self.task, None if out is None else Path(out))

    def recommend(
        self, user: object, k: int = 10, *, task: Task | None = None
    ) -> list[tuple[str, float]]:
        """The `k` best items that a user does not have yet, by their ids, with predictions."""
        found = recommendations(self.folder, user=user, top=k, past=0, task=task or self.task)
        return [(item.id, item.predicted) for item in found.recommended]

    def recommendations(
        self, user: object, k: int = 10, *, task: Task | None = None
    ) -> Recommendations:
        """The same list with titles, what the user had before and, if known, what came next."""
        return recommendations(self.folder, user=user, top=k, task=task or self.task)

    def ranking(
        self, top: int = 10, *, users: int = 0, test: bool = False, task: Task | None = None
    ) -> dict[str, dict[str, float]]:
        """Recall and NDCG of what came next, among all there is; of the model and of baselines.

        With `test` of the test part, where the run is tested on a validation part: once.
        """
        found = full_ranking(self.folder, top=top, users=users, test=test, task=task or self.task)
        return found.figures


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs on the same data, side by side."""

    runs: list[RunFigures] = field(repr=False)

    @property
    def differing(self) -> dict[str, list[Any]]:
        """The settings that are not the same in all runs, by key of the plan."""
        return lineup.differing(self.runs)

    @property
    def together(self) -> str:
        """What all runs with noise have spent together, as they are over the same people."""
        return comparison.in_all(self.runs)

    def to_frame(self) -> Any:
        """One row per run, as a pandas DataFrame."""
        return tables.as_frame([run.summary() for run in self.runs])

    def to_csv(self) -> str:
        return tables.as_csv([run.summary() for run in self.runs])

    def report(self, path: Path | str) -> Path:
        """Write the page."""
        return page.save(page.page(self.runs), Path(path))

    def __str__(self) -> str:
        return comparison.text(self.runs)

    def _repr_html_(self) -> str:
        drawn = [run for run in self.runs if run.curve]
        chart = [Markup(tables.standalone(summary.curve_chart(self.runs)))] if drawn else []
        return tables.card(self.runs[0].title, {}, tag("pre", comparison.text(self.runs)), *chart)


def compare(runs: Sequence[Run | Path | str], *, exact: bool = False) -> Comparison:
    """Runs of `simulate`, or their folders; refused if they are not on the same data.

    With `exact` also figures of runs with [dp] that no budget paid for: to keep, not to pass on.
    """
    folders = [run.folder if isinstance(run, Run) else Path(run) for run in runs]
    return Comparison(lineup.load_all(folders, exact=exact))


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
    views: Views | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_setup: SetupProgress | None = None,
    progress: bool | None = None,
) -> Run:
    """Train until `rounds` rounds are done in total (default: the plan's).

    A new folder in runs/, or `out`, holds the run. With `resume` the run in `out` continues from
    its checkpoint and ends as if it had never stopped. `insecure_test_entropy` derives every secret
    from a text: for tests only, and the report says so. `record_views` writes what the servers see
    into the folder; `views` is told every message, and nothing is written. `on_setup` is called
    with the progress of what a task needs before the first round. `progress` shows rounds on
    stderr; by default on a terminal and in a notebook, and not where `on_event` is given.
    """
    given, plan = plan, complete(plan, task)
    second = None
    if task.beside is not None:  # whatever is refused of it is refused before the first round
        second = complete(plan_beside(given, task.beside.task), task.beside.task)
    total = plan.simulation.rounds if rounds is None else rounds
    if total < 1:
        raise ConfigError(f"rounds = {total} is not a number of rounds", hint="use 1 or more")
    folder = Path(out) if out is not None else free_folder(task.name)
    resume = resume and not never_began(folder)
    if resume:
        log = RunFolder.load(folder)
        trainer, script = _as_begun(log, task, plan, trainer, insecure_test_entropy, record_views)
    else:
        task.metric.check(task.data)
        task.try_out(plan.seed)
        log, script = RunFolder.create(folder, plan), insecure_test_entropy
    with ExitStack() as stack:
        stack.enter_context(single_threaded())
        if not resume:  # what fails before the first round leaves nothing behind
            stack.enter_context(_unless_begun(log))
        training, learner = _set_up(
            stack, log, task, plan, trainer, script, record_views, views, on_setup, total
        )
        if resume:
            log.forget_after(training.rounds_done - 1)
            log.describe({**log.facts, "rounds": total})
            if training.stopping is not None:
                training.stopping.go_on_from(r.get("validation") for r in log.rounds())
        else:
            trivial = task.metric.baselines(training.prepared.data)
            facts = describe(task, plan, total, learner, script, trivial)
            if training.setup is not None:
                facts["setup"] = dict(training.setup.facts)
            if isinstance(training, Training) and training.popularity is not None:
                facts["selection"] = training.popularity.facts
            log.keep_ids(task.data.ids)
            log.describe({**facts, "views": record_views})
        shown = stack.enter_context(
            to_be_shown(progress, total, task.metric.name, others=on_event is not None)
        )
        if learner["name"] == Trainer.COMPILED.value:
            shown.say("compiling the training step, about a minute")
        for event in training.run(total):
            log.append(event)
            shown.on_event(event)
            if on_event is not None:
                on_event(event)
        done = training.rounds_done
    if second is not None:
        _add_second(log, task, second, script, record_views)
    if done and isinstance(task.metric, NextMetric) and is_charged(plan, "figures"):
        keep_ranking(folder, task)
    return Run(folder, task)


def _add_second(
    log: RunFolder, task: Task, plan: Plan, script: str | None, record_views: bool
) -> None:
    """The run of a task's second model, inside the first's; then what it counts."""
    assert task.beside is not None
    inside = log.folder / BESIDE
    simulate(
        task.beside.task,
        plan,
        out=inside,
        resume=(inside / PLAN).exists(),
        insecure_test_entropy=script,
        record_views=record_views,
        on_event=lambda event: None,
    )
    with single_threaded():
        log.describe({**log.facts, MIXTURE: weighed(log, task)})


def _set_up(
    stack: ExitStack,
    log: RunFolder,
    task: Task,
    plan: Plan,
    trainer: Trainer | str,
    script: str | None,
    record_views: bool,
    views: Views | None,
    on_setup: SetupProgress | None,
    rounds: int,
) -> tuple[Training | CentralTraining, dict[str, str]]:
    """The training, and which learner it uses, with the reason."""
    checkpoint = log.folder / CHECKPOINT
    entropy = None if script is None else ScriptedEntropy(script.encode())
    if not schemes.of(plan).federated:
        if record_views or views is not None:
            raise ConfigError("central training has no views", hint="leave them out")
        central = stack.enter_context(
            CentralTraining(task, plan, folder=checkpoint, entropy=entropy, on_setup=on_setup)
        )
        return central, {"name": "in one place", "reason": central.how}
    if record_views:
        if views is not None:
            raise ConfigError("views go to the folder or elsewhere", hint="leave one of them out")
        views = stack.enter_context(StreamedViews(log.folder / VIEWS, frozenset({SERVER, HELPER})))
    training = stack.enter_context(
        Training(
            task,
            plan,
            folder=checkpoint,
            entropy=entropy,
            trainer=Trainer(trainer),
            rounds=rounds,
            views=views,
            on_setup=on_setup,
        )
    )
    if record_views:
        write_truth(log.folder / TRUTH, training.clients)
        if training.federation.two_server is not None:
            write_box_key(log.folder / HELPER_KEY, training.federation.two_server)
        if task.setup is not None:
            write_labels(log.folder / LABELS, training.task.data)
    chosen = training.learner
    return training, {"name": chosen.learner.name, "reason": chosen.reason}


@contextmanager
def _unless_begun(log: RunFolder) -> Iterator[None]:
    """Remove what was written if no round was started."""
    try:
        yield
    except BaseException:
        if not log.described:
            log.discard()
        raise


def _as_begun(
    log: RunFolder,
    task: Task,
    plan: Plan,
    trainer: Trainer | str,
    script: str | None,
    record_views: bool,
) -> tuple[Trainer, str | None]:
    """The trainer and the test entropy of a run to be resumed; refuses whatever is different.

    Rounds after the checkpoint are repeated under the same secrets, so they must be repeated
    exactly: other values under the same mask would reveal their difference.
    """
    log.check_described()
    facts, folder = log.facts, log.folder
    if another := plan.other_than(log.plan):
        raise ConfigError(
            f"{folder} was started with another {another}",
            hint="resume with the plan in its folder, in which only the number of rounds may "
            "change; or start a new run",
        )
    if noise_of(plan).follows_from_rounds and not plan.same_rounds(log.plan):
        raise ConfigError(
            f"{folder}: its plan has {log.plan.simulation.rounds} rounds, for which its noise was "
            "made: with other noise the same sums would be released twice",
            hint="start a new run, with a budget of its own",
        )
    if plan.bounds_rounds and not plan.same_rounds(log.plan):
        raise ConfigError(
            f"{folder}: its training has {log.plan.simulation.rounds} rounds, for which clients "
            "count theirs",
            hint="start a new run: a longer training is another one",
        )
    if facts.get("version") != __version__:
        raise ConfigError(
            f"{folder} was started by tessera {facts.get('version')}, this is {__version__}",
            hint="resume with the version it was started with, or start a new run",
        )
    if facts.get("data") != digest_of(task):
        raise ConfigError(
            f"{folder} was started with other data: the same secrets would answer for other rows",
            hint="resume with the data it was started with, or start a new run",
        )
    if facts.get("views") or record_views:
        raise ConfigError(
            f"{folder}: views are recorded from the first round to the last, or not at all",
            hint="start a new run with --record-views, or one without that can be resumed",
        )
    stored = facts.get("entropy_script")
    if script is not None and script != stored:
        raise ConfigError(
            f"{folder} was started with other entropy",
            hint="leave --insecure-test-entropy out: a run keeps the entropy it started with",
        )
    if stored is None and not (folder / CHECKPOINT / ROOT).exists():
        raise ConfigError(
            f"{folder}: its root secret is missing, and with a fresh one clients would draw again "
            "what they have drawn for good",
            hint="restore checkpoint/, or start a new run",
        )
    begun = BY_NAME.get(facts["learner"]["name"], Trainer.AUTO)
    if schemes.of(plan).federated and Trainer(trainer) not in (Trainer.AUTO, begun):
        raise ConfigError(
            f"{folder} was trained {facts['learner']['name']!r}, and must continue so",
            hint="leave --trainer out",
        )
    return begun, stored
