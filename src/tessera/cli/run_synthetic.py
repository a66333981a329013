"""A run of a plan without a task: rounds over synthetic clients, recorded in a folder.

Rows and updates are synthetic (`simulation/population.py`), and the output says so. All else
follows the plan: messages, bytes, unions, answers, dropouts and sums.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from tessera.cli.format import captioned
from tessera.errors import ConfigError, RoundAborted
from tessera.ids import HELPER, SERVER, RoundId
from tessera.plan import Plan
from tessera.privacy.dp.guarantee import json_number
from tessera.report.figures import abort_reasons, in_rounds
from tessera.report.numbers import count, epsilon, seconds, size
from tessera.report.progress import progress
from tessera.rounds import schemes
from tessera.rounds.events import Event, RoundAbort, RoundFinished, as_json
from tessera.runs.folder import HELPER_KEY, TRUTH, VIEWS, RunFolder
from tessera.runs.truth import write_truth
from tessera.simulation import population
from tessera.simulation.faults import random_dropouts
from tessera.simulation.federation import Federation
from tessera.simulation.two_server import write_box_key
from tessera.simulation.views import StreamedViews, Views

SYNTHETIC: Final = "rows and updates are synthetic: nothing is learnt, costs and privacy are real"
ROWS: Final = 50
MOST_WATCHED: Final = 200
"""Up to so many clients, their views are recorded too: each has a file open during the run."""


def run(
    plan: Plan,
    *,
    rounds: int,
    clients: int | None,
    rows_per_client: int | None,
    dropout: float,
    record_views: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Run a plan's rounds over synthetic clients and record them."""
    if plan.dp is not None:
        raise ConfigError(
            "[dp] without a task: synthetic clients train nothing, and add no noise",
            hint="name a [task], or leave [dp] out",
        )
    if not schemes.of(plan).federated:
        raise ConfigError(
            "central training needs a task: nothing can be learnt from synthetic rows",
            hint="add a [task]; `tessera init` lists what there is",
        )
    held = min(plan.union.max_rows, ROWS) if rows_per_client is None else rows_per_client
    members = population.participants(plan, 2 * plan.cohort if clients is None else clients, held)

    def federation(views: Views | None = None) -> Federation:
        return Federation(
            plan,
            members,
            dense=population.dense(plan),
            tables=population.tables(plan),
            trainer=population.cohort_trainer(plan, len(members)),
            derived=population.derived_maps(plan),
            faults=random_dropouts(dropout, plan.seed, plan) if dropout else None,
            views=views,
        )

    trial = federation()  # a cohort that cannot be drawn leaves no folder behind
    for number in range(rounds):
        trial.cohorts.sample(RoundId(number))
    log = RunFolder.create(out, plan)
    so_far = SyntheticRun(plan, log.folder, members=len(members), rows=held)
    console = Console(stderr=True, highlight=False)
    console.print(f"[yellow]{SYNTHETIC}[/]", soft_wrap=True)
    with ExitStack() as stack:
        views = None
        if record_views:
            write_truth(log.folder / TRUTH, members)
            views = stack.enter_context(StreamedViews(log.folder / VIEWS, so_far.watched))
        shown = stack.enter_context(progress(console, rounds))
        real = federation(views)
        if record_views and real.two_server is not None:
            write_box_key(log.folder / HELPER_KEY, real.two_server)
        for event in real.run(rounds):
            log.append(event)
            so_far.add(event)
            shown.on_event(event)
    if as_json:
        typer.echo(json.dumps(so_far.summary(record_views)))
    else:
        show(so_far, Console(highlight=False), record_views)
    if not so_far.finished and so_far.aborted:
        raise aborted_error(so_far.aborted[-1])


# --- the facts ------------------------------------------------------------------------------------


@dataclass(slots=True)
class SyntheticRun:
    """A run so far."""

    plan: Plan
    folder: Path
    members: int
    rows: int
    finished: list[RoundFinished] = field(default_factory=list)
    aborted: list[RoundAbort] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, event: Event) -> None:
        if isinstance(event, RoundFinished):
            self.finished.append(event)
        elif isinstance(event, RoundAbort):
            self.aborted.append(event)

    @property
    def done(self) -> int:
        return len(self.finished) + len(self.aborted)

    @property
    def left_out(self) -> int:
        """Rows of a client over the plan's cap."""
        if not schemes.of(self.plan).capped:
            return 0
        cap = self.plan.union.max_rows
        return sum(max(0, min(self.rows, t.rows) - cap) for t in self.plan.roots)

    @property
    def watched(self) -> frozenset[str] | None:
        """Whose views are recorded: everybody's, or the servers' where there are too many."""
        many = self.members > MOST_WATCHED or self.plan.privacy.pseudonyms
        return frozenset({SERVER, HELPER}) if many else None

    def mean(self, name: str) -> float:
        values = [float(getattr(event, name)) for event in self.finished]
        return sum(values) / len(values) if values else 0.0

    def means(self, name: str) -> dict[str, float]:
        """Means over the rounds, by kind."""
        return mean_of([getattr(event, name) for event in self.finished])

    def summary(self, recorded: bool) -> dict[str, Any]:
        """The run as one object for machines."""
        last = self.finished[-1] if self.finished else None
        return {
            "folder": str(self.folder),
            "scheme": self.plan.scheme.value,
            "data": "made up",
            "note": SYNTHETIC,
            "clients": self.members,
            "rows_per_client": self.rows,
            "rows_left_out": self.left_out,
            "cohort": self.plan.cohort,
            "rounds": self.done,
            "finished": len(self.finished),
            "given_up": len(self.aborted),
            "survivors": self.mean("survivors"),
            "not_finite": sum(event.not_finite for event in self.finished),
            **in_rounds(map(as_json, self.finished)),
            "why_given_up": abort_reasons(map(as_json, self.aborted)),
            "union_rows": self.mean("union_rows"),
            "union_residual": self.mean("union_residual"),
            "rows_opened": self.mean("rows_opened"),
            "rows_below_quorum": self.mean("rows_below_quorum"),
            "rows_shrunk": self.mean("rows_shrunk"),
            "rows_lost": self.mean("rows_lost"),
            "bytes_up": self.means("bytes_up"),
            "bytes_down": self.means("bytes_down"),
            "client_seconds": self.means("client_seconds"),
            "server_seconds": self.means("server_seconds"),
            "helper_seconds": self.means("helper_seconds"),
            "bytes_between": self.mean("bytes_between"),
            "writing": dict(last.writing) if last else {},
            "epsilon": json_number(last.epsilon) if last else 0.0,
            "condition": last.condition if last else "",
            "seconds": time.monotonic() - self.started,
            "views": str(self.folder / VIEWS) if recorded else None,
        }


def mean_of(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    kinds = list(dict.fromkeys(kind for part in parts for kind in part))
    return {kind: sum(part.get(kind, 0.0) for part in parts) / len(parts) for kind in kinds}


# --- for people -----------------------------------------------------------------------------------


def show(so_far: SyntheticRun, console: Console, recorded: bool) -> None:
    """The outcome of the run, in at most 80 columns."""
    facts = so_far.summary(recorded)
    width = min(console.width, 100)
    console.print(
        f"[bold]{facts['scheme']}[/], {facts['finished']} of {facts['rounds']} rounds finished, "
        f"{facts['cohort']} of {facts['clients']} clients in each; {SYNTHETIC}.",
        width=width,
    )
    console.print(captioned(lines(so_far, facts)))
    for name, reason in facts["writing"].items():
        console.print(f"[dim]{escape(name)}: written by {escape(reason)}[/]", width=width)
    if so_far.left_out:
        console.print(
            f"{so_far.left_out} rows of each client are over the cap and were left out: max_rows = "
            f"{so_far.plan.union.max_rows}.",
            width=width,
        )
    who = "both servers" if schemes.of(so_far.plan).two_servers else "the server"
    seen = "each party" if so_far.watched is None else who
    also = f", views of {seen}, true rows" if recorded else ""
    console.print(
        f"Written to {escape(str(so_far.folder))}: plan, events, rounds{also}.", soft_wrap=True
    )
    if recorded:
        console.print(f"`tessera audit {escape(str(so_far.folder))}` attacks what {who} saw.")


def lines(so_far: SyntheticRun, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not so_far.finished:
        return
    yield "survivors", count(facts["survivors"])
    if schemes.of(so_far.plan).randomises:
        union, opened = "rows in the union", "  opened"
        if so_far.plan.grouped:
            union, opened = "rows in the largest union of a group", "  opened, in all groups"
        yield union, count(facts["union_rows"])
        yield opened, count(facts["rows_opened"])
        yield "  below the quorum, not updated", count(facts["rows_below_quorum"])
        yield "  below it after dropouts", count(facts["rows_shrunk"])
        if so_far.plan.privacy.strict_quorum:
            yield "  and therefore not opened", count(facts["rows_lost"])
    for way in ("up", "down"):
        by_kind = facts[f"bytes_{way}"]
        yield f"bytes {way}, per client", size(sum(by_kind.values()))
        for kind, amount in sorted(by_kind.items(), key=lambda item: -item[1])[:3]:
            if amount:
                yield f"  {kind}", size(amount)
    yield "CPU per round, one client", seconds(sum(facts["client_seconds"].values()))
    yield "CPU per round, the server", seconds(sum(facts["server_seconds"].values()))
    if schemes.of(so_far.plan).two_servers:
        yield "CPU per round, the helper", seconds(sum(facts["helper_seconds"].values()))
        yield "bytes between servers, per client", size(facts["bytes_between"])
        yield "rows written by any client, opened", count(facts["rows_opened"])
    if schemes.of(so_far.plan).randomises:
        yield f"epsilon spent, per index, {facts['condition']}", epsilon(facts["epsilon"])
    yield from fault_lines(facts)


def aborted_error(last: RoundAbort) -> RoundAborted:
    """The error of a run in which every round was aborted."""
    return RoundAborted(
        round_id=RoundId(last.round_id),
        phase=last.phase,
        answered=last.answered,
        needed=last.needed,
    )


def fault_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, how many) of all that went wrong, for a terminal."""
    for caption, many, reasons in (
        ("clients not in a sum, in all", sum(facts["excluded"].values()), facts["excluded"]),
        ("clients that sent zeros, in all", facts["not_finite"], facts["broken"]),
        ("rounds aborted", sum(facts["why_given_up"].values()), facts["why_given_up"]),
    ):
        if many:
            yield caption, f"{many:,}"
            yield from ((f"  {why}", f"{count:,}") for why, count in reasons.items())
