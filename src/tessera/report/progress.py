"""Progress of a run on stderr: a bar on a terminal, elsewhere lines; with the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from tessera.report.numbers import epsilon, score, seconds, size
from tessera.rounds.events import Event, RoundAbort, RoundFinished


class RunProgress(Protocol):
    """Progress, wherever it goes."""

    def on_event(self, event: Event) -> None: ...

    def say(self, text: str) -> None:
        """What takes a while now."""

    def on_setup(self, what: str, done: int, of: int) -> None:
        """What is done before the first round."""


@contextmanager
def progress(
    console: Console, rounds: int, *, title: str = "round", metric: str = "AUC"
) -> Iterator[RunProgress]:
    """Show rounds on the way to `rounds` in total, wherever they begin."""
    if not console.is_terminal:
        yield ProgressLines(console, rounds, title, metric)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
        StatusColumn("{task.fields[status]}", table_column=Column()),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        console=console,
    )
    with bar:
        yield ProgressBar(bar, rounds, title, metric)


class StatusColumn(TextColumn):
    """The one column that is cut where the terminal is narrow: rounds and time left stay whole."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None else None
    return type(found).__name__ == "ZMQInteractiveShell"


@contextmanager
def to_be_shown(
    wanted: bool | None, rounds: int, metric: str, *, others: bool
) -> Iterator[RunProgress]:
    """Progress on stderr if it is wanted: by default where somebody looks and nobody else shows."""
    console = Console(stderr=True, highlight=False)
    if wanted is None:
        wanted = not others and (console.is_terminal or in_notebook())
    if not wanted:
        yield NoProgress()
        return
    with progress(console, rounds, metric=metric) as shown:
        yield shown


class NoProgress:
    """Silence."""

    def on_event(self, event: Event) -> None:
        """Nothing is shown."""

    def on_setup(self, what: str, done: int, of: int) -> None:
        """Nothing is shown."""

    def say(self, text: str) -> None:
        """Nothing is shown."""


class ProgressBar:
    """One line that changes."""

    def __init__(self, bar: Progress, rounds: int, title: str, metric: str) -> None:
        self._bar, self._name = bar, metric
        self._task = bar.add_task(title, total=rounds, status="")
        self._metric = ""

    def on_event(self, event: Event) -> None:
        if isinstance(event, RoundFinished | RoundAbort):
            self._metric = measured(event, self._name) or self._metric
            status = self._metric + sentence(event)
            self._bar.update(self._task, completed=event.round_id + 1, status=status)

    def say(self, text: str) -> None:
        self._bar.update(self._task, status=text)

    def on_setup(self, what: str, done: int, of: int) -> None:
        self._bar.update(self._task, status=f"{what}: {done:,} of {of:,} clients")


class ProgressLines:
    """A line per round; in long runs one every few seconds."""

    EVERY = 2.0

    def __init__(self, console: Console, rounds: int, title: str, metric: str) -> None:
        self._console, self._rounds, self._title = console, rounds, title
        self._name = metric
        self._first: int | None = None
        self._started = self._last_shown = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def on_setup(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if done == of or now - self._last_shown > self.EVERY:
            self._last_shown = now
            self._console.print(f"{what}: {done:,} of {of:,} clients", soft_wrap=True)
        self._started = now  # rounds are timed from here

    def on_event(self, event: Event) -> None:
        if not isinstance(event, RoundFinished | RoundAbort):
            return
        done, now = event.round_id + 1, time.monotonic()
        if self._first is None:
            self._first = event.round_id
        last = done == self._rounds
        early = done - self._first <= 3
        metric = measured(event, self._name)
        if not (last or metric or early or now - self._last_shown > self.EVERY):
            return
        self._last_shown = now
        spent = (now - self._started) / (done - self._first)
        left = seconds(spent * (self._rounds - done), digits=2)
        self._console.print(
            f"{self._title} {done}/{self._rounds}  {metric}{sentence(event)}  {left} left",
            soft_wrap=True,
        )


def measured(event: Event, metric: str) -> str:
    """The model's metric, if this round measured it."""
    if isinstance(event, RoundFinished) and event.metric is not None:
        return f"{metric} {score(event.metric)}  "
    return ""


def sentence(event: RoundFinished | RoundAbort) -> str:
    """A round in a few words; what was not measured is left out."""
    if isinstance(event, RoundAbort):
        text = f"aborted in {event.phase}: {event.answered} answered, {event.needed} needed"
        return f"{text} ({event.reason})" if event.reason else text
    parts = []
    if event.delivered or event.waited:  # fixed groups: who is merged was invited earlier, in part
        parts.append(f"{event.delivered}/{event.cohort} delivered  {event.survivors} merged")
    elif event.cohort:
        parts.append(f"{event.survivors}/{event.cohort} survivors")
    if event.noise_epsilon is not None:
        parts.append(f"epsilon {epsilon(event.noise_epsilon)} spent")
    if event.excluded:
        parts.append(f"{sum(event.excluded.values())} excluded")
    if event.rows_exposed:
        parts.append(f"{event.rows_exposed:,} rows exposed")
    if event.measured:
        up, down = sum(event.bytes_up.values()), sum(event.bytes_down.values())
        parts.append(f"{size(up)} up  {size(down)} down")
    elif event.loss is not None:
        parts.append(f"loss {score(event.loss)}")
    if event.union_rows:
        parts.append(f"union {event.union_rows:,}")
    return "  ".join(parts)
