"""`tessera init`: a commented plan for a task, to be read, changed and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from rich.console import Console

from tessera.crypto.shamir import MAX_HOLDERS
from tessera.data.columns import SKIP
from tessera.data.examples import ClientData
from tessera.data.item_features import UNSOLD
from tessera.data.sequences import TIES
from tessera.data.split import VALIDATION
from tessera.errors import ConfigError
from tessera.learning.averaging import Average
from tessera.plan import (
    CohortsPlan,
    Crypto,
    DPPlan,
    DrawnBy,
    GroupsPlan,
    NoisyRows,
    Plan,
    PrivacyPlan,
    Scheme,
    SecurityPlan,
    SimulationPlan,
    Trust,
    TwoServerPlan,
    UnionPlan,
    Unit,
    UpdatePlan,
)
from tessera.plan.dp import trained_with
from tessera.plan.reference import MESSAGES, keys_of, section, task_section, top_level
from tessera.plan.sections import GROUP_SIZE
from tessera.privacy.index.bound import ANY_ROUNDS, COMING_AND_GOING, NAMED
from tessera.protocols.secagg.params import GraphKind
from tessera.rounds import schemes

if TYPE_CHECKING:
    from tessera.cli.init_noise import NoisyChoice
    from tessera.data.guess import Guess
    from tessera.data.sequences import SequenceData
    from tessera.runs.held import HeldRows
    from tessera.tasks import Known, Recommended, Task


# --- init own file --------------------------------------------------------------------------------
#
# A user's own file, looked at before a plan is written: columns, bad lines, what fits its size.


OWN_FILES: Final = (".csv", ".tsv", ".txt", ".gz", ".parquet", ".pq")

LEFT_OUT: Final = ", left out"
VISITS: Final = 5
"""Rounds that a client takes part in, on average, by default."""


class OwnModel(StrEnum):
    """What is learnt of a file of one's own."""

    NEXT = "next"
    PAIRS = "pairs"
    CLICKS = "clicks"


LARGEST_SHARE: Final = 3
"""Negatives are at most this part of a small catalogue."""
NOISY: Final = (
    "[dp] epsilon = 10 per user, noise of each of two servers on every cell: exact sums would let "
    "who knows an item of a history follow it from pair to pair (`--scheme secure-submodel` writes "
    "exact_pairs = true)."
)
ELSEWHERE: Final = (
    "A smaller epsilon keeps fewer pairs: on another data set, with times and attributes "
    "(MovieLens 1M, docs/results.md), epsilon 10 / 3 / 1 had NDCG@10 .081 / .061 / .055, "
    "popularity .018."
)
"""Means of three seeds, with each of two servers' noise."""
EXACT: Final = (
    "exact_pairs = true: whoever opens a sum has the exact counts of its pairs; {alone} of the "
    "pairs have one holder, and who knows an item of a history can follow it from pair to pair."
)


@dataclass(frozen=True, slots=True)
class OwnFile:
    """The task that fits a file, its options, and what is worth saying about it."""

    task: str
    options: dict[str, Any]
    lines: tuple[str, ...]
    recommended: Recommended
    clients: int
    items: int
    made: Task | None = None
    """Of what comes next."""

    def fitting(self, plan: Plan) -> int:
        """A max_rows that no client of the file exceeds."""
        from tessera.plan.defaults import rows_named

        rows = None if self.made is None else rows_named(plan, self.made)
        return self.recommended.max_rows if rows is None else -(-rows[1] // ROUND_UP) * ROUND_UP

    def summed(self, *, two_servers: bool) -> Recommended:
        """For sums over everybody: in one round, or where that is too much in several."""
        if two_servers:
            return self.recommended
        return replace(self.recommended, rounds=1, cohort=self.clients)

    @classmethod
    def of(
        cls, path: Path, given: Mapping[str, str], kind: str, also: Mapping[str, str], exact: bool
    ) -> Self:
        """By what the file has: with times what comes next, without what goes together.

        Sums of pairs may be `exact`, or have noise per user.
        """
        from tessera.data.guess import guess

        if not path.is_file():
            raise ConfigError(f"{path}: no such file", hint="`tessera init` lists the tasks")
        if kind and kind not in list(OwnModel):
            raise ConfigError(f"--model {kind}", hint=f"one of {', '.join(OwnModel)}")
        found = guess(path, given)
        if kind == OwnModel.CLICKS:
            return cls._clicks(path, found)
        return cls._next(path, found, kind, also, exact)

    @classmethod
    def _clicks(cls, path: Path, found: Guess) -> Self:
        from tessera import tasks

        known = tasks.known("interactions")
        options = {"path": str(path), **found.options()}
        data = known.read(**options, on_bad=SKIP)
        if _bad(data):
            options["on_bad"] = SKIP
        cohort = _cohort(data)
        rounds = min(300, max(30, -(-VISITS * data.clients // cohort)))
        shown = ["user", "item", "time", "label", "category"]
        return cls(
            "interactions",
            options,
            tuple(_said(path, found, shown, data)),
            replace(known.recommended, cohort=cohort, rounds=rounds),
            data.clients,
            data.sizes["item"],
        )

    @classmethod
    def _next(
        cls, path: Path, found: Guess, kind: str, also: Mapping[str, str], exact: bool
    ) -> Self:
        """Where labels are 0 and 1 only what was clicked counts; of ratings every line does."""
        from tessera import tasks
        from tessera.data.sequences import SequenceData

        known = tasks.known("sequences")
        options: dict[str, Any] = {
            "path": str(path),
            **{part: getattr(found, part) for part in ("user", "item", "time", "time_format")},
            "label": "" if found.threshold else found.label,
            "part": VALIDATION,
            **also,
        }
        data = known.read(**options, on_bad=SKIP)
        assert isinstance(data, SequenceData)
        if _bad(data):
            options["on_bad"] = SKIP
        chosen, why = _chosen(data, found, kind)
        exact = exact and chosen is OwnModel.PAIRS
        model: dict[str, Any] = {"model": chosen.value, "exact_pairs": exact}
        fewer = max(1, data.sizes["item"] // LARGEST_SHARE)
        model["negatives"] = min(known.options["negatives"], fewer)
        good = replace(known.recommended, cohort=_cohort(data))
        task = known.kind.make(data, title="", recommended=good, **model)
        shown = ["user", "item", "time", *(["label"] if options["label"] else [])]
        lines = [*_said(path, found, shown, data), *wrap(why, WIDTH)]
        if also:
            told = ", ".join(f"{name} = {one}" for name, one in also.items() if one)
            lines.append(f"about items: {told}")
        if exact:
            lines += wrap(EXACT.format(alone=task.data.facts["pairs with one holder"]), WIDTH)
        return cls(
            "sequences",
            options | model,
            tuple(lines),
            task.recommended,
            data.clients,
            data.sizes["item"],
            task,
        )


def _cohort(data: ClientData) -> int:
    """Clients of a round that fit so many."""
    cohort = next((n for n in (100, 50, 20) if data.clients >= 10 * n), 10)
    return max(2, min(cohort, data.clients))


def _bad(data: ClientData) -> dict[str, int]:
    """The facts about lines that are left out, of the file and of one about items."""
    return {
        f: n for f, n in data.facts.items() if f.endswith(LEFT_OUT) and _listing(f) in data.facts
    }


def _listing(fact: str) -> str:
    """What a fact's first lines are listed under."""
    return fact.removesuffix(LEFT_OUT).replace("bad ", "the first bad ")


def _chosen(data: SequenceData, found: Guess, kind: str) -> tuple[OwnModel, str]:
    """The model for a file, and why."""
    ties = int(data.facts.get(TIES, 0))
    equal = data.ordered and ties == data.facts["interactions"] - data.clients
    if kind:
        chosen, because = OwnModel(kind), "as asked"
    elif not data.ordered:
        chosen, because = OwnModel.PAIRS, f"as the file has no times{found.doubt}"
    elif equal:
        chosen, because = OwnModel.PAIRS, f"as all times of a user are equal in {found.time}"
    else:
        chosen, because = OwnModel.NEXT, f"as the file has times ({found.time})"
    about = "what comes next, trained in rounds"
    if chosen is OwnModel.PAIRS:
        about = "what follows what, by sums of pairs; nothing is trained"
        if not data.ordered:
            about = "what goes together (EASE), by sums of pairs; nothing is trained"
    if ties and chosen is OwnModel.NEXT:
        about += f". {ties:,} lines have the time of the one before, and keep the file's order"
    return chosen, f"model = {chosen.value}, {because}: {about}"


def _said(path: Path, found: Guess, shown: Sequence[str], data: ClientData) -> list[str]:
    chosen = [f"{part} = {getattr(found, part)}" for part in shown if getattr(found, part)]
    if found.threshold and "label" in shown:
        chosen.append(f"a click from {found.threshold:g} on")
    facts, bad = data.facts, _bad(data)
    lines = [
        f"{path}: {facts['interactions']:,} interactions of {data.clients:,} users with "
        f"{data.sizes['item']:,} items",
        f"columns: {', '.join(chosen)}",
    ]
    if "read as" in facts:
        lines.append(f"read with {facts['read as']}")
    for fact, number in bad.items():
        what = fact.removesuffix(LEFT_OUT)
        listed = facts[_listing(fact)]
        lines.append(f'{number:,} {what}, left out by on_bad = "skip"; the first {len(listed)}:')
        lines += [f"  {line}" for line in listed]
    if UNSOLD in facts:
        lines.append(f"{facts[UNSOLD]:,} of the items described are in nobody's history: left out")
    return lines


# --- init -----------------------------------------------------------------------------------------

HEAD: Final = """\
# A plan: everything a federation agrees on beforehand. A misspelt key is refused.
# `tessera plan {name}` checks it and predicts what it costs; `tessera run {name}` trains by it.
# What is left out of [training] and [server], a clip of 0 and an average of "auto" are what the
# task recommends; the run's folder has the plan complete. All keys are explained in docs/plan.md.
"""

WIDTH: Final = 80
ROUND_UP: Final = 16
FEW: Final = 0.01
"""Share of a dense part that is sent between two servers, where there are no tables."""
BUDGET: Final = 3.0
"""The epsilon that a plan with noise begins with."""
DELTA: Final = 1e-5
PAIRS_BUDGET: Final = 10.0
"""That of sums of pairs."""
LEVEL_NOTES: Final = (
    "groups: a row's one holder is identified with probability 1 / group at most (B),",
    "under conditions (`tessera plan`); cpp1 to cpp5: B = 1, the sums identify it",
)

IDEAL: Final = (
    "servers would look at every cell for every client: `tessera plan` says what that takes",
)

NO_NOISE: Final = """\
# [dp] is left out: no noise. `tessera init TASK --dp item` (or user, subject) writes it
"""

NO_SERVER: Final = """\
# [server] is left out: the task's, which depends on how many of its clients are in a round
"""


def init(
    task: Annotated[
        str,
        typer.Argument(help="A task, or your own CSV or Parquet; without it, tasks are listed."),
    ] = "",
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("plan.toml"),
    scheme: Annotated[
        str,
        typer.Option(
            help=f"One of the schemes; {schemes.DEFAULT.value} by default, or "
            f"{schemes.WITHOUT_TABLES.value} for a model without tables.",
            show_default=False,
        ),
    ] = "",
    dp: Annotated[
        str,
        typer.Option(
            help="Noise that protects each item, user or subject; or an epsilon per user, for the "
            "plan that is expected to learn most.",
            show_default=False,
        ),
    ] = "",
    at_once: Annotated[
        int, typer.Option(help="With --dp EPSILON: clients that can be in one round, at most.")
    ] = 1_000,
    user: Annotated[str, typer.Option(help="Of your own file: its column of users.")] = "",
    item: Annotated[str, typer.Option(help="Its column of items.")] = "",
    time: Annotated[str, typer.Option(help="Its column of times.")] = "",
    time_format: Annotated[
        str, typer.Option(help="How its times are written, as for strptime.", show_default=False)
    ] = "",
    label: Annotated[str, typer.Option(help="Its column of labels.")] = "",
    items: Annotated[
        str,
        typer.Option(metavar="FILE", help="A second file, about its items: titles and categories."),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="What is learnt of it: next, pairs, or clicks (among items that were shown); "
            "by default next if it has times, else pairs.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Write a commented plan for TASK to plan.toml, or to --out."""
    from tessera import tasks
    from tessera.data.guess import guess_items
    from tessera.tasks.sequences import is_about_next

    if not task:
        typer.echo("tasks:")
        for name, known in tasks.TASKS.items():
            typer.echo(f"  {name:<16} {known.summary}")
        typer.echo(
            "`tessera init TASK` writes a plan for one, `tessera init FILE.csv` for your own."
        )
        return
    if scheme and scheme not in list(Scheme):
        raise ConfigError(f"--scheme {scheme}", hint=f"one of {', '.join(Scheme)}")
    if out.exists():
        raise ConfigError(f"{out} is there already", hint="name another with --out")
    own = None
    if task not in tasks.TASKS and (Path(task).suffix in OWN_FILES or Path(task).is_file()):
        given = {"user": user, "item": item, "time": time, "label": label}
        # Exact sums of pairs let a history be followed: without a word about it they have noise.
        exact = bool(scheme) and not dp
        about = guess_items(items) if items else {}
        own = OwnFile.of(Path(task), {**given, "time_format": time_format}, model, about, exact)
        for line in own.lines:
            typer.echo(line)
        task = own.task
    elif model:
        raise ConfigError(f"--model {model}: of a file of your own", hint="[task] model says it")
    found = tasks.known(task)
    if own is not None:
        found = replace(found, recommended=own.recommended)
        if own.recommended.noisy_only:
            scheme, dp = scheme or schemes.UNDER_NOISE.value, dp or Unit.USER.value
            for line in (*wrap(NOISY, WIDTH), *wrap(ELSEWHERE, WIDTH)):
                typer.echo(line)
    choice, epsilon = None, parsed_epsilon(dp)
    if epsilon is not None:
        dp = Unit.USER.value
        if own is None and found.recommended.private is not None:
            choice = best_noise(task, found, epsilon, scheme, at_once)
            scheme = choice.plan.scheme.value
        elif not scheme:
            scheme = schemes.UNDER_NOISE.value
    if not scheme:
        scheme = (schemes.DEFAULT if found.kind.tables else schemes.WITHOUT_TABLES).value
    entry = schemes.named(scheme)
    if own is not None and own.task == "sequences" and own.recommended.server.optimizer == "sum":
        found = replace(found, recommended=own.summed(two_servers=entry.two_servers))
    if not found.kind.tables and entry.by_rows and not entry.two_servers:
        raise ConfigError(
            f"--scheme {scheme}: the model of {task} has no tables to choose rows from",
            hint=f"{schemes.WITHOUT_TABLES.value} sums all of it; two-server hides the largest "
            "changes",
        )
    noise = noise_for(dp, scheme, found)
    if noise is not None and epsilon is not None:
        noise = replace(noise, epsilon=epsilon) if choice is None else choice.plan.dp
    filled: dict[str, Any] = {} if own is None else dict(own.options)
    if is_about_next(found.kind):
        filled["part"] = VALIDATION  # the test part is for once: `tessera rank --test`
    private = found.recommended.private if noise is not None and noise.unit == "user" else None
    if private is not None:
        filled |= private.options
        if choice is not None:
            private = replace(
                private,
                cohort=choice.plan.cohort,
                rounds=choice.plan.simulation.rounds,
                server=choice.plan.server or private.server,
            )
        everybody = None if private.cohort else clients_of(task, {**found.options, **filled})
        found = replace(
            found,
            recommended=replace(
                found.recommended,
                training=private.training,
                server=private.server,
                shrinkage=0.0,
                rounds=private.rounds,
                cohort=private.cohort or everybody or found.recommended.cohort,
                average=Average.EXAMPLES,
            ),
        )
        if everybody is None and not private.cohort:
            typer.echo(
                "set cohort to the number of clients: noise per user is least with everybody"
            )
    write = partial(written, task, out.name, scheme, found, filled, noise=noise)
    if choice is not None:
        write = partial(write, drawn=choice.plan.cohorts)
    if own is not None and own.recommended.noisy_only:
        write = partial(write, cells=own.items**2)
    cap = found.recommended.max_rows
    text = write(cap=cap)
    if own is not None:
        cap = own.fitting(Plan.parse(text))
        text = write(cap=cap)
    if noise is None and not found.recommended.training.examples and Plan.parse(text).grouped:
        write = partial(write, **work(task, {**found.options, **filled}))
        text = write(cap=cap)
    if entry.two_servers and found.kind.tables and not found.recommended.noisy_only:
        held = counted(Plan.parse(text))
        if held is not None:
            cap = max(held.fitting, cap if own is not None else 0)
        text = write(cap=cap, notes=why(held, noisy=noise is not None))
    out.write_text(text)
    typer.echo(f"wrote {out}")
    if entry.hides and found.kind.tables and noise is None:
        for line in wrap(named_or_not(Plan.parse(text)), WIDTH):
            typer.echo(line)
    typer.echo(f"next: `tessera plan {out}`, then `tessera run {out}`")


def clients_of(task: str, options: Mapping[str, Any]) -> int | None:
    """How many a task has; None if its data is not at hand yet."""
    from tessera import tasks

    with Console(stderr=True).status(f"counting the clients of {task}"):
        try:
            return tasks.load(task, **options).data.clients
        except ConfigError:
            return None


def parsed_epsilon(text: str) -> float | None:
    """The number of `--dp 3`; None where it names a unit."""
    try:
        found = float(text)
    except ValueError:
        return None
    if not 0.0 < found < float("inf"):
        raise ConfigError(f"--dp {text}: not an epsilon", hint="a number above 0, such as 3")
    return found


def best_noise(task: str, known: Known, epsilon: float, scheme: str, at_once: int) -> NoisyChoice:
    """What the forecast finds, told with what it rests on."""
    from tessera import tasks
    from tessera.cli.init_noise import best_plan

    private = known.recommended.private
    assert private is not None
    if at_once < 2:
        raise ConfigError(f"--at-once {at_once}", hint="2 clients or more")
    with Console(stderr=True).status("forecasting plans with noise"):
        loaded = tasks.load(task, **{**known.options, **private.options})
        found = best_plan(loaded, private, epsilon, scheme, at_once)
    said = (
        f"by the forecast: {found.in_words()}. Users and the rows that they hold were counted in "
        "the task's data, which is outside epsilon."
    )
    warning = f"warning: {found.forecast.warning}" if found.forecast.warning else ""
    for line in (*wrap(said, WIDTH), *wrap(warning, WIDTH)):
        typer.echo(line)
    return found


def work(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A cap on the examples of a round, for groups that wait; 0 if the data is not at hand yet."""
    from tessera import tasks
    from tessera.plan.defaults import USUAL, usual_work

    with Console(stderr=True).status(f"counting the examples of {task}'s clients"):
        try:
            most = usual_work(tasks.load(task, **options))
        except ConfigError:
            return {"work_notes": (f"In groups: what {USUAL:.0%} of clients have at most",)}
    return {"work": most, "work_notes": (f"{USUAL:.0%} of clients have no more",)}


def noise_for(unit: str, scheme: str, known: Known) -> DPPlan | None:
    """A budget to begin with, for one unit; none without a unit.

    Per user it is by what the task recommends under noise, added by whom the scheme has for it.
    """
    if not unit:
        return None
    if unit not in list(Unit):
        raise ConfigError(f"--dp {unit}", hint=f"one of {', '.join(Unit)}")
    private, entry = known.recommended.private, schemes.named(scheme)
    if known.recommended.noisy_only:  # a vector of length 1, and every cell with noise
        each = entry.two_servers
        return DPPlan(
            unit=Unit.USER,
            epsilon=PAIRS_BUDGET,
            delta=DELTA,
            trust=Trust.EACH if each else Trust.SERVER,
            rows=NoisyRows.OWN if each else NoisyRows.ALL,
            clip=1.0,
        )
    if unit == "user" and private is not None and (entry.hides or not entry.by_rows):
        # Who sees no sum without noise, where the scheme has somebody like that.
        added = Trust.SHARES if entry.masks else Trust.SERVER
        return DPPlan(
            unit=Unit.USER,
            epsilon=BUDGET,
            delta=DELTA,
            trust=Trust.EACH if entry.two_servers else added,
            clip=private.clip,
            rows=NoisyRows.SELECTED,
            selection=private.selection,
            threshold=private.threshold,
        )
    if unit == "user":
        return DPPlan(unit=Unit.USER, epsilon=BUDGET, trust=Trust.SERVER)
    if unit == "index":
        raise ConfigError(
            "--dp index: examples per row and their clip have no good default",
            hint='--dp user, then unit = "index" with per_row, example_clip and rows: docs/plan.md',
        )
    kind = Unit.ITEM if unit == Unit.ITEM else Unit.SUBJECT
    return DPPlan(unit=kind, epsilon=BUDGET, sampling=0.1, steps=10)


def named_or_not(plan: Plan) -> str:
    """How likely a row's holder is identified over many rounds, where the user chooses."""
    if not plan.grouped:
        return f"{NAMED}."
    return (
        f'level = "groups": in groups of {plan.group_size} '
        f"{plan.promise.in_words()}, {ANY_ROUNDS}; {COMING_AND_GOING}."
    )


def counted(plan: Plan) -> HeldRows | None:
    """The rows that the task's clients hold; None if its data is not at hand yet."""
    from tessera import tasks
    from tessera.runs.held import HeldRows

    with Console(stderr=True).status(f"counting the rows of {plan.task.name}'s clients"):
        try:
            task = tasks.load(plan.task.name, **plan.task.options)
        except ConfigError:
            return None
        return HeldRows.of(task, plan)


def why(held: HeldRows | None, *, noisy: bool = False) -> tuple[str, ...]:
    """Between two servers a cap that is too high costs everybody bytes."""
    if held is None:
        return MESSAGES, "no more than clients hold; `tessera plan` says what fewer would take"
    said = f"clients hold {held.most:,} at most, {held.mean:,} on average"
    return MESSAGES, f"{said}; outside epsilon" if noisy else said


def written(
    task: str,
    name: str,
    scheme: str,
    known: Known,
    filled: Mapping[str, Any],
    *,
    cap: int,
    notes: tuple[str, ...] = (),
    work: int = 0,
    work_notes: tuple[str, ...] = (),
    noise: DPPlan | None = None,
    cells: int = 0,
    drawn: CohortsPlan | None = None,
) -> str:
    """The plan with what the task recommends, and its options as `filled` in.

    `cap` is max_rows and `work` bounds the examples of a round, each with notes about it. With so
    many `cells` of a table each has noise, and a simulation adds the same numbers up as they are.
    """
    from tessera.tasks.sequences import is_about_next

    good = known.recommended
    training = trained_with(noise, good.training)
    training = replace(training, examples=work or training.examples)
    steps = None
    if is_about_next(known.kind) and not training.weight_decay:  # it goes by the data
        steps = [one for one in keys_of("training") if one != "weight_decay"]
    keys = ["clip", "dense_clip", "levels", "max_count", "average"]
    update = UpdatePlan(clip=good.clip, dense_clip=good.dense_clip, average=good.average)
    if not known.kind.tables and schemes.named(scheme).two_servers:
        update = replace(update, top=FEW, error_feedback=True)
        keys += ["top", "top_by", "error_feedback"]
    union, cohorts = UnionPlan(max_rows=cap), drawn or CohortsPlan()
    answers = ("level", "decoys", "period_rounds", "own_rounds", "budget")
    if good.server.optimizer == "sum" and good.rounds > 1:  # who is in two rounds counts twice
        cohorts = CohortsPlan(drawn=DrawnBy.SCHEDULE)
    few = good.cohort < GROUP_SIZE and schemes.named(scheme).by_rows
    groups = GroupsPlan(size=good.cohort if few else 0)
    two_server, simulation = TwoServerPlan(), SimulationPlan(rounds=good.rounds)
    if cells:
        two_server = replace(two_server, row_limit=max(two_server.row_limit, cells))
        simulation = replace(simulation, crypto=Crypto.NONE)
    shared = SecurityPlan(
        graph=GraphKind.SPARSE if good.cohort > MAX_HOLDERS else GraphKind.COMPLETE
    )
    security = ("threat", "graph", "corrupt", "dropout", "sharing", "indicator")
    return "\n".join(
        [
            HEAD.format(name=name),
            top_level(federation=task, scheme=Scheme(scheme), cohort=good.cohort, seed=0),
            task_section(task, {**known.options, **filled}, known.kind.explained),
            section("training", training, steps, notes={"examples": work_notes}),
            NO_SERVER if good.shrinkage else section("server", good.server),
            section("update", update, tuple(keys)),
            section("privacy", PrivacyPlan(), answers, notes={"level": LEVEL_NOTES}),
            section("groups", groups, ("size", "age_weight", "period")),
            section("cohorts", cohorts, ("drawn", "rounds_per_client", "separation")),
            section("union", union, ("max_rows", "encoding"), notes={"max_rows": notes}),
            section("security", shared, security),
            section("two_server", two_server),
            NO_NOISE if noise is None else section("dp", noise, dp_keys(noise)),
            section("simulation", simulation, notes={"crypto": IDEAL if cells else ()}),
        ]
    )


def dp_keys(noise: DPPlan) -> tuple[str, ...]:
    """The keys that say something about this unit."""
    keys = ["unit", "epsilon", "delta", "noise", "clip", "trust"]
    if noise.rows is not NoisyRows.OWN:
        keys += ["rows", "selection", "threshold"]
    if noise.correlated:
        keys += ["correlated", "terms"]
    if noise.by_batches:
        keys += ["sampling", "steps"]
    if noise.unit == "subject":
        keys += ["drawn", "cap", "records_per_subject", "clients_per_subject", "unknown"]
    return tuple(keys)
