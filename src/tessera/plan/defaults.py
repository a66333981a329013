"""Defaults: what a task fills in where a plan leaves it open, as one table, with its reasons.

`filled_in` walks the table from top to bottom: a key that the plan leaves open takes the value of
the first of its lines that applies. `with_defaults` writes the values into the plan, all at once.
What has to be computed from the whole, the least noise that keeps a budget, comes after it
(`Noise.calibrated` in `rounds/noise_account.py`). What a plan cannot be with its task is refused
here, too, before anything is filled in: rules that need no task are in `checks.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import nn

from tessera.data.sequences import SequenceData
from tessera.errors import ConfigError
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.bound_model import BoundModel
from tessera.learning.compression import TopBy, shapes_text
from tessera.learning.models.noisy_pairs import threshold_for
from tessera.learning.softmax import Softmax
from tessera.learning.training.row_cut import aimed_at
from tessera.learning.training.settings import LocalTraining
from tessera.plan.dp import SETUP_SHARE, DPPlan, NoisyRows, trained_with
from tessera.plan.places import in_a_pass, most_by_seed, rounds_of_a_pass
from tessera.plan.plan import Plan
from tessera.plan.scheme import Scheme
from tessera.plan.sections import (
    CohortsPlan,
    DrawnBy,
    ModelPlan,
    PrivacyPlan,
    TablePlan,
    TaskPlan,
    UnionPlan,
    UpdatePlan,
)
from tessera.plan.toml import toml_value
from tessera.privacy.dp.accounting import check_people
from tessera.privacy.dp.guarantee import Trust, Unit
from tessera.tasks.task import Recommended, Task


@dataclass(frozen=True)
class TaskFacts:
    """What defaults follow from: the plan as it was given, the task, and the task's model.

    Values that go with some plans only are None with the others.
    """

    plan: Plan
    task: Task

    @cached_property
    def module(self) -> nn.Module:
        return self.task.build(self.plan.seed)

    @cached_property
    def bound(self) -> BoundModel:
        return self.task.bind(self.module)

    @property
    def good(self) -> Recommended:
        return self.task.recommended

    @property
    def tables(self) -> tuple[TablePlan, ...]:
        """Those that are shared."""
        return tuple(
            TablePlan(name=t.name, rows=t.rows, width=t.width, derived_from=t.derived_from or "")
            for t in self.bound.tables
            if not t.local
        )

    @property
    def shapes(self) -> str:
        """Of the dense part's tensors."""
        return shapes_text([shape for _, shape in self.bound.dense])

    @property
    def in_steps(self) -> Settings | None:
        """Where a learner of the task's own adds noise to its steps."""
        dp, training = self.plan.dp, self.good.per_person
        if dp is None or not dp.by_batches or self.task.noisy_learner is None or training is None:
            return None
        return self._settings(training, ServerStep(), 0.0)

    @property
    def on_updates(self) -> Settings | None:
        """Where noise is on a client's update as a whole."""
        dp, private = self.plan.dp, self.good.private
        if dp is None or dp.by_examples or private is None:
            return None
        step = private.server
        if self.plan.cohorts.scheduled:
            step = in_a_pass(step, self.clients, self.plan.cohort)
        return self._settings(private.training, step, 0.0)

    @property
    def recommended(self) -> Settings:
        """A smaller cohort counts less of a row, and gets its part of the shrinkage."""
        good, clients = self.good, self.task.data.clients
        part = min(self.plan.cohort, clients) / clients
        return self._settings(good.training, good.server, good.shrinkage * part)

    def _settings(self, training: LocalTraining, server: ServerStep, shrinkage: float) -> Settings:
        """With what the plan gives of the two sections, less what does not go with its noise."""
        given = self.plan.partial
        stepped = replace(server, **{"shrinkage": shrinkage, **given.get("server", {})})
        if stepped.schedule == "linear" and not stepped.schedule_rounds:
            stepped = replace(stepped, schedule_rounds=self.plan.simulation.rounds)
        return Settings(
            replace(trained_with(self.plan.dp, training), **given.get("training", {})), stepped
        )

    @property
    def work_cap(self) -> int | None:
        """Where fixed groups wait for everybody's training, and nothing else bounds it."""
        plan, settings = self.plan, self.in_steps or self.on_updates or self.recommended
        if not plan.grouped or (plan.dp is not None and plan.dp.by_examples):
            return None
        return None if (plan.training or settings.training).examples else usual_work(self.task)

    @property
    def threshold(self) -> float | None:
        """Where sums of a task have noise."""
        dp = self.plan.dp
        return None if dp is None or self.task.solve is None else threshold_for(dp.epsilon)

    @property
    def fine_levels(self) -> int | None:
        return None if self.plan.dp is None or self.task.solve is None else FINE

    @property
    def noisy_clip(self) -> float | None:
        dp = self.plan.dp
        return None if dp is None else max(1.0, dp.clip)

    @property
    def noisy_average(self) -> Average | None:
        """Where selected rows or secret cohorts decide what sums are divided by."""
        selects = self.plan.dp is not None and self.plan.dp.rows is NoisyRows.SELECTED
        return Average.EXAMPLES if selects or self.plan.drawn_in_secret else None

    @property
    def separation(self) -> int | None:
        """Where every client has its place in a pass."""
        if not self.plan.cohorts.scheduled:
            return None
        return rounds_of_a_pass(self.clients, self.plan.cohort)

    @property
    def rounds_per_client(self) -> int | None:
        """Where places are given, or noise is to be for as few rounds as cohorts allow."""
        plan, dp = self.plan, self.plan.dp
        if plan.cohorts.scheduled:
            apart = plan.cohorts.separation or self.separation
            return plan.cohorts.rounds_per_client or -(-plan.simulation.rounds // (apart or 1))
        by_seed = plan.cohorts.drawn is DrawnBy.SEED and not plan.grouped
        if not by_seed or dp is None or dp.noise or self.clients < plan.cohort:
            return None
        return most_by_seed(plan, self.clients)

    @cached_property
    def clients(self) -> int:
        return clients_with_data(self.plan, self.task)

    @property
    def setup_share(self) -> float | None:
        """Where a sum over everybody comes before the first round, with noise per user."""
        dp, setup = self.plan.dp, self.task.setup
        if dp is None or dp.unit is not Unit.USER or setup is None or not setup.sums:
            return None
        return SETUP_SHARE


FINE: Final = 2**18
"""Levels with which 30 million words lengthen a vector by less than a thousandth."""
UNKNOWN: Final = 100
"""Examples that a client trains on in a round, at most, where nobody has seen any."""
USUAL: Final = 0.95
"""The share of clients that train on all they have, under a cap that a task gives."""


def clients_with_data(plan: Plan, task: Task) -> int:
    """Those of a task who have enough examples to take part."""
    counts = np.diff(task.data.offsets)
    return int(np.count_nonzero(counts >= max(1, plan.simulation.min_examples)))


def usual_work(task: Task) -> int:
    """As many examples as this share of clients has at most."""
    counts = np.diff(task.data.offsets)
    if not counts.any():  # of nobody: a catalogue
        return UNKNOWN
    return int(np.quantile(counts[counts > 0], USUAL, method="higher"))


def rows_named(plan: Plan, task: Task) -> tuple[npt.NDArray[np.int64], int] | None:
    """Rows of a table that each client with data names, on average over what it draws, and at most.

    Of tasks about what comes next: its items and its negatives, or its pairs. None with others, and
    where nothing caps them.
    """
    data, capped = task.data, plan.has_union or plan.scheme is Scheme.TWO_SERVER
    if not capped or not isinstance(data, SequenceData) or task.recommended.noisy_only:
        return None
    if task.solve is not None:
        counts = np.diff(data.offsets)
        return counts[counts > 0], int(counts.max(initial=0))
    in_union = plan.grouped and plan.has_union
    loss = (task.in_groups(plan.group_size) if in_union else task).loss
    if not isinstance(loss, Softmax):
        return None
    drawn, counts, items = float(loss.negatives), data.events.counts, data.sizes["item"]
    if loss.weights is not None:  # some are drawn twice
        drawn = float((1.0 - (1.0 - loss.weights) ** loss.negatives).sum())
    rows = counts[counts > 0]
    named = rows + (drawn * (1.0 - rows / items)).astype(np.int64)  # own ones are no negatives
    return named, min(int(counts.max(initial=0)) + loss.negatives, items)


@dataclass(frozen=True, slots=True)
class Settings:
    """How clients train, and how the server steps: they go together."""

    training: LocalTraining
    server: ServerStep


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Default:
    """One line: what a key takes that the plan leaves open, unless this line has nothing for it."""

    key: str
    """As `section.key`, or a whole section."""
    open: Callable[[Plan], bool]
    """Whether the plan leaves it open."""
    value: Callable[[TaskFacts], Any]
    """None where the line does not apply."""
    because: str


MODEL: Final = "the task's model"
GOOD: Final = "recommended with the task"
ON_UPDATES: Final = "recommended with the task for noise on whole updates"
IN_STEPS: Final = "recommended with the task for noise in the steps of its own learner"
BARE: Final = "under noise a client sends its change, and not times its examples"


def _no_model(plan: Plan) -> bool:
    return not plan.is_complete


def _by_tensors(plan: Plan) -> bool:
    return plan.selects and plan.update.top_by is TopBy.ROW


def _no_training(plan: Plan) -> bool:
    return plan.training is None


def _no_work_cap(plan: Plan) -> bool:
    return plan.training is None or not plan.training.examples


def _no_server(plan: Plan) -> bool:
    return plan.server is None


def _no_schedule(plan: Plan) -> bool:
    step = plan.server
    return step is not None and step.schedule == "linear" and not step.schedule_rounds


def _no_threshold(plan: Plan) -> bool:
    return plan.server is None or not plan.server.threshold


def _no_levels(plan: Plan) -> bool:
    return plan.update.levels == UpdatePlan().levels


def _no_clip(plan: Plan) -> bool:
    return not plan.update.clip


def _no_clips(plan: Plan) -> bool:
    return not plan.update.dense_clip and not plan.update.clip  # that of rows is for both


def _no_average(plan: Plan) -> bool:
    return plan.update.average is Average.AUTO


def _no_cap(plan: Plan) -> bool:
    return plan.union.max_rows == UnionPlan().max_rows


def _no_setup_share(plan: Plan) -> bool:
    return plan.dp is not None and not plan.dp.setup


def _no_separation(plan: Plan) -> bool:
    return not plan.cohorts.separation


def _no_rounds_per_client(plan: Plan) -> bool:
    return not plan.cohorts.rounds_per_client


DEFAULTS: Final = (
    Default("tables", _no_model, lambda f: f.tables, MODEL),
    Default("model.dense", _no_model, lambda f: f.bound.dense_size, MODEL),
    Default("model.shapes", _by_tensors, lambda f: f.shapes, "a selection goes by their rows"),
    Default("training", _no_training, lambda f: f.in_steps and f.in_steps.training, IN_STEPS),
    Default("training", _no_training, lambda f: f.on_updates and f.on_updates.training, ON_UPDATES),
    Default("training", _no_training, lambda f: f.recommended.training, GOOD),
    Default(
        "training.examples",
        _no_work_cap,
        lambda f: f.work_cap,
        f"work in fixed groups is bounded: {USUAL:.0%} of clients have no more",
    ),
    Default("server", _no_server, lambda f: f.in_steps and f.in_steps.server, IN_STEPS),
    Default("server", _no_server, lambda f: f.on_updates and f.on_updates.server, ON_UPDATES),
    Default("server", _no_server, lambda f: f.recommended.server, GOOD),
    Default(
        "server.threshold",
        _no_threshold,
        lambda f: f.threshold,
        "cells of sums that are not over their noise are left out; by the budget alone",
    ),
    Default(
        "server.schedule_rounds",
        _no_schedule,
        lambda f: f.plan.simulation.rounds,
        "a linear schedule falls over the rounds of the run",
    ),
    Default(
        "update.levels",
        _no_levels,
        lambda f: f.fine_levels,
        "rounding of millions of words would lengthen a client's vector, and the noise with it",
    ),
    Default("update.clip", _no_clip, lambda f: f.noisy_clip, BARE),
    Default("update.clip", _no_clip, lambda f: f.good.clip, GOOD),
    Default("update.dense_clip", _no_clips, lambda f: f.noisy_clip, BARE),
    Default("update.dense_clip", _no_clips, lambda f: f.good.dense_clip, GOOD),
    Default(
        "update.average",
        _no_average,
        lambda f: f.noisy_average,
        "what sums are divided by follows from [dp]",
    ),
    Default("update.average", _no_average, lambda f: f.good.average, GOOD),
    Default("union.max_rows", _no_cap, lambda f: f.good.max_rows, GOOD),
    Default(
        "dp.setup",
        _no_setup_share,
        lambda f: f.setup_share,
        "the task sums over all clients before the first round, and the sum takes its share",
    ),
    Default(
        "cohorts.separation",
        _no_separation,
        lambda f: f.separation,
        "a client is in one round of a pass over all clients of the task",
    ),
    Default(
        "cohorts.rounds_per_client",
        _no_rounds_per_client,
        lambda f: f.rounds_per_client,
        "no client of the task has more places in all rounds; noise is for these",
    ),
)
"""What is filled in, in this order; of several lines for a key, the first that applies."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A key that was left open, what a task has made of it, and why."""

    key: str
    value: Any
    because: str

    @property
    def text(self) -> str:
        """The value in a line: of a section what is not as it is by default."""
        if isinstance(self.value, tuple):
            return ", ".join(table.name for table in self.value)
        if not is_dataclass(self.value):
            return toml_value(self.value)
        kinds = [(f, getattr(self.value, f.name)) for f in fields(self.value)]
        said = [
            f"{f.name} = {toml_value(now)}"
            for f, now in kinds
            if f.default is MISSING or now != f.default
        ]
        return ", ".join(said) or "as by default"


def filled_in(plan: Plan, task: Task) -> list[Filled]:
    """What the task gives to the plan; a `ConfigError` if the two do not go together."""
    facts = TaskFacts(plan, task)
    check_task(facts)
    found: dict[str, Filled] = {}
    for line in DEFAULTS:
        if line.key in found or not line.open(plan):
            continue
        value = line.value(facts)
        if value is not None:
            found[line.key] = Filled(line.key, value, line.because)
    return list(found.values())


def with_defaults(plan: Plan, filled: Iterable[Filled]) -> Plan:
    """The plan with these values, in one step: halfway it might be refused."""
    whole: dict[str, Any] = {"partial": {}}
    parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for one in filled:
        section, _, key = one.key.partition(".")
        if key:
            parts[section][key] = one.value
        else:
            whole[section] = one.value
    for name, keys in parts.items():
        whole[name] = replace(whole.get(name, getattr(plan, name)), **keys)
    return replace(plan, **whole)


def plan_beside(plan: Plan, task: Task) -> Plan:
    """The agreement of a task's second model, that clients send sums for: its own settings.

    Everybody in one round; between two servers, whose sums are over what a cohort writes, in rounds
    of disjoint clients. Federation and seed are the first model's, and with them the fixed groups:
    whatever is opened of a client is opened over the same group.
    """
    clients = clients_with_data(plan, task)
    rounds, privacy, cohorts = 1, plan.privacy, CohortsPlan()
    cohort = clients
    if plan.scheme is Scheme.TWO_SERVER and task.recommended.rounds > 1:
        cohort = -(-clients // task.recommended.rounds)
        rounds = rounds_of_a_pass(clients, cohort)
        privacy = PrivacyPlan(level="cpp1", period_rounds=rounds)
        cohorts = CohortsPlan(drawn=DrawnBy.SCHEDULE, rounds_per_client=1, separation=rounds)
    return replace(
        plan,
        cohort=cohort,
        cohorts=cohorts,
        tables=(),
        model=ModelPlan(),
        privacy=privacy,
        union=UnionPlan(),
        update=UpdatePlan(),
        training=None,
        server=None,
        partial={},
        task=TaskPlan(name=plan.task.name, options={**plan.task.options, "model": "pairs"}),
        simulation=replace(plan.simulation, rounds=rounds, patience=0),
    )


# --- what a plan cannot be with its task ----------------------------------------------------------


def check_task(facts: TaskFacts) -> None:
    """Refuse another model, and what would not hold with this task of what the plan promises."""
    plan, task, bound = facts.plan, facts.task, facts.bound
    if plan.is_complete and (plan.tables, plan.model.dense) != (facts.tables, bound.dense_size):
        raise ConfigError(
            f"plan: its tables and dense part are not those of task {task.name!r}",
            hint="leave [[table]] and dense out: the task knows them",
        )
    if plan.dp is not None:
        check_people(plan.dp.delta, task.data.subjects)
        check_dictionary(plan.dp, task)
        if plan.dp.by_examples:
            check_home(plan.dp, task)
            check_examples(plan.dp, facts)
        check_weights(bound)
    if plan.grouped:
        check_shared_rows(task, bound)
    if not _no_cap(plan):
        check_cap(plan, task)
    if plan.simulation.cuts_data:
        check_cutoffs(plan, task)
    if task.solve is not None:
        check_sums(facts)
    if task.beside is not None:
        check_beside(plan, task)


def check_cap(plan: Plan, task: Task) -> None:
    """Refuse a cap that more than a few clients are over: of those few what is over is left out and
    counted."""
    found, cap = rows_named(plan, task), plan.union.max_rows
    if found is None or not found[0].size or np.mean(found[0] <= cap) >= USUAL:
        return
    rows, most = found
    what, fewer = "items of its history and negatives", ", or fewer negatives in [task]"
    if task.solve is not None:
        what, fewer = "pairs", ""
    raise ConfigError(
        f"max_rows = {cap:,}: {np.count_nonzero(rows > cap):,} of {rows.size:,} clients of task "
        f"{task.name!r} have more rows ({what}), and rows over it are not trained",
        hint=f"max_rows = {most} in [union] is enough for everybody{fewer}"
        + ("" if plan.dp is None else "; it is counted in the data, outside epsilon"),
    )


def check_beside(plan: Plan, task: Task) -> None:
    """Refuse two budgets, and clients in other groups than with the other model."""
    assert task.beside is not None
    if plan.dp is not None:
        raise ConfigError(
            f"[dp] with two models of task {task.name!r}: one budget would have to pay for both",
            hint='model = "next" or model = "pairs" in [task]',
        )
    least = max(1, plan.simulation.min_examples)
    first, second = (np.diff(t.data.offsets) >= least for t in (task, task.beside.task))
    if plan.grouped and not np.array_equal(first, second):
        raise ConfigError(
            f"min_examples = {least}: the two models of task {task.name!r} would have other "
            "clients, hence other groups, and whoever is in two groups is found",
            hint="leave min_examples out",
        )


def check_weights(bound: BoundModel) -> None:
    """Refuse negatives drawn by counts of rows: with [dp] nobody has paid for these counts."""
    softmax = bound.candidates
    weights = None if softmax is None else softmax.weights
    if weights is not None and np.ptp(weights[weights > 0]) > 0:
        raise ConfigError(
            "[dp] with negatives that are drawn by how often items occur: the counts follow from "
            "the data, and nothing is charged for them",
            hint="power = 0.0 in [task] draws them evenly",
        )


def check_cutoffs(plan: Plan, task: Task) -> None:
    """Refuse cut-offs where there are no periods, or nothing to cut by."""
    said = f"[simulation] cutoff = {plan.simulation.cutoff}"
    if not plan.grouped:
        raise ConfigError(f"{said} without fixed groups, whose periods they are", hint="cutoff = 1")
    if task.data.timeline is None:
        raise ConfigError(
            f"{said} with task {task.name!r}, whose events have no times", hint="cutoff = 1"
        )
    if task.setup is not None or task.solve is not None:
        raise ConfigError(
            f"{said} with task {task.name!r}, which takes sums over all data at once",
            hint="cutoff = 1",
        )


def check_sums(facts: TaskFacts) -> None:
    """Refuse what would not add up, every client being in the sums once, and sums of vectors that
    are made for noise without it."""
    plan, task = facts.plan, facts.task
    said = f"task {task.name!r}, whose clients send sums"
    if plan.dp is not None:
        check_noisy_sums(plan, plan.dp, task, said)
    elif task.recommended.noisy_only:
        raise ConfigError(
            f"{said} of pairs, without [dp]: most pairs have one holder, and who knows an item of "
            "a history can follow it from pair to pair in exact sums",
            hint='[dp] unit = "user", epsilon = 10 and trust = "each" with scheme = "two-server"; '
            "or exact_pairs = true in [task] if the server may have them",
        )
    if plan.scheme not in (Scheme.SUBMODEL, Scheme.SECURE_SUBMODEL, Scheme.TWO_SERVER):
        raise ConfigError(
            f"scheme = {plan.scheme.value!r} with {said} by the row",
            hint="submodel, secure-submodel or two-server",
        )
    if plan.simulation.patience:
        raise ConfigError(f"patience with {said}: nothing is trained", hint="leave patience out")
    once = plan.cohorts.scheduled and facts.rounds_per_client == 1
    if plan.simulation.rounds > 1 and not once:
        raise ConfigError(
            f"{plan.simulation.rounds} rounds with {said}: who is in two of them counts twice",
            hint=f"rounds = 1 and cohort = {task.data.clients}, or one pass of a schedule: "
            '[cohorts] drawn = "schedule"',
        )


def check_noisy_sums(plan: Plan, dp: DPPlan, task: Task, said: str) -> None:
    """Refuse noise that would not cover which rows are written, or exact vectors."""
    if not task.recommended.noisy_only:
        raise ConfigError(
            f"[dp] with {said} exactly: their vectors have no bound",
            hint="leave exact_pairs out of [task], or [dp] out of the plan",
        )
    if dp.unit is not Unit.USER:
        raise ConfigError(
            f"[dp] unit = {dp.unit.value!r} with {said}: a client's vector is clipped as a whole",
            hint='use unit = "user"',
        )
    whole = dp.trust is not Trust.LOCAL and dp.rows is NoisyRows.ALL
    if plan.scheme is Scheme.TWO_SERVER:
        whole = dp.trust is Trust.EACH
    if not whole:
        raise ConfigError(
            f"[dp] trust = {dp.trust.value!r} and rows = {dp.rows.value!r} with scheme = "
            f"{plan.scheme.value!r} and {said}: which cells are written says which pairs exist",
            hint='trust = "each" with scheme = "two-server", or trust = "server" and rows = "all" '
            'with scheme = "submodel"',
        )
    if plan.simulation.rounds > 1:
        raise ConfigError(
            f"[dp] in {plan.simulation.rounds} rounds with {said}: each has noise of its own on "
            "every cell",
            hint=f"rounds = 1 and cohort = {task.data.clients}",
        )
    if dp.clip != 1.0 or dp.counts:
        raise ConfigError(
            f"[dp] clip = {dp.clip:g} and counts = {dp.counts:g} with {said}: their vectors have "
            "length 1, and no counts",
            hint="leave both out",
        )


def check_dictionary(section: DPPlan, task: Task) -> None:
    """Refuse to select among rows that follow from the data."""
    if section.rows is NoisyRows.SELECTED and not task.data.public_rows:
        raise ConfigError(
            f'[dp] rows = "selected" over a dictionary that is made of the data of {task.name!r}: '
            "which rows there are would show who holds them",
            hint='[task] dictionary = FILE with a public list of items, or ids = "hash"',
        )


def check_home(section: DPPlan, task: Task) -> None:
    """Refuse state at home that would carry what noise is to hide past the noise.

    Per example nothing may stay that is not trained under noise; per person what belongs to one
    person may, as it comes and goes with the person.
    """
    own, unit = task.setup is not None and task.setup.keeps, section.unit.value
    several = task.data.train.subjects is not None
    if section.unit in ("index", "item") and (own or task.learner is not None):
        what = "fit masks" if own else "do not train by gradient descent"
        raise ConfigError(
            f"[dp] unit = {unit!r} with task {task.name!r}, whose clients {what}: what "
            "they keep would carry one example into all later updates",
            hint='use unit = "user" or "subject", or a task that trains by batches',
        )
    if own and several:
        raise ConfigError(
            f"[dp] unit = {unit!r} with task {task.name!r}, whose clients fit masks to the "
            "data of several people: a mask carries one person into the updates of the others",
            hint='leave mask out, or use unit = "user"',
        )
    if task.learner is not None and task.noisy_learner is None:
        raise ConfigError(
            f"[dp] unit = {unit!r} with task {task.name!r}, whose clients do not train by "
            "gradient descent: no step of theirs is clipped per person",
            hint='use unit = "user": where a client is one person it protects the same',
        )


def check_examples(section: DPPlan, facts: TaskFacts) -> None:
    """Refuse what would let one example, person or row move more than the noise is for."""
    unit, softmax = f"[dp] unit = {section.unit.value!r}", facts.bound.candidates
    if softmax is not None:
        raise ConfigError(
            f"{unit} with a softmax over table {softmax.root!r}: every example moves "
            "every row, and noisy steps are over the rows of single examples",
            hint='use unit = "user"',
        )
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in facts.module.modules()):
        raise ConfigError(
            f"{unit} with dropout: which units are left out goes by the "
            "place of an example among the others, so that one more moves all after it",
            hint="a model without dropout; noise keeps it from overfitting",
        )
    if section.per_row:
        _check_index(facts.task, facts.bound)


def _check_index(task: Task, bound: BoundModel) -> None:
    """Refuse what would let a row of a client's data move more than its examples."""
    aimed_at(bound.fetched_fields(task.data.train.take(slice(0, 1))), 1)
    if task.architecture is not None and task.architecture.get("rate"):
        raise ConfigError(
            f'[dp] unit = "index" with task {task.name!r}, whose examples have the client\'s own '
            "click rate: it changes with every row the client has met",
            hint='[task] model = "biased", or another model without the rate',
        )


def check_shared_rows(task: Task, bound: BoundModel) -> None:
    """Refuse a shared table with a row for each client, where a fixed group is to hide holders.

    Such a row says whose it is. Its values are in the model, and the updates of all other rows that
    its client holds follow from them: whoever compares finds the holder of each.
    """
    whose = np.repeat(np.arange(task.data.clients), np.diff(task.data.offsets))
    for table in bound.tables:
        roots = () if table.local or table.derived_from else table.fields
        columns = [task.data.train[name] for name in roots]
        same = any(column.ndim == 1 and np.array_equal(column, whose) for column in columns)
        if "user" in roots if task.data.of_nobody else same:
            raise ConfigError(
                f'level = "groups" with table {table.name!r}, which has a row for each client: '
                "its group would not hide which rows the client holds",
                hint="leave share_users out (in a task of one's own, declare the table as Local), "
                "or name another level",
            )
