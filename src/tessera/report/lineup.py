"""Runs that can stand side by side, each with a label that tells it from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tessera.errors import ConfigError
from tessera.report.figures import RunFigures


def data_of(run: RunFigures) -> str:
    """What must be the same for two scores to be about the same examples."""
    parts = ("clients", "examples", "test_examples")
    return ", ".join(f"{run.task.get(part)} {part.replace('_', ' ')}" for part in parts)


ALIKE: Final[Sequence[tuple[str, Callable[[RunFigures], str]]]] = (
    ("tasks", lambda run: str(run.run.fact("task", "name"))),
    ("metrics", lambda run: run.metric),
    ("data", data_of),
)
"""What the runs of one page have in common."""


def load_all(folders: Sequence[Path]) -> list[RunFigures]:
    """The runs in these folders; `ConfigError` if their figures do not stand side by side."""
    if not folders:
        raise ConfigError("no run was named", hint="name one or more run folders")
    runs = [RunFigures.load(folder) for folder in folders]
    for what, of in ALIKE:
        kinds: dict[str, list[str]] = {}
        for run in runs:
            kinds.setdefault(of(run), []).append(run.folder.name)
        if len(kinds) > 1:
            groups = "; ".join(f"{kind} ({', '.join(names)})" for kind, names in kinds.items())
            raise ConfigError(
                f"the runs are on different {what}: {groups}",
                hint="compare runs of one kind at a time: figures on different ones do not compare",
            )
    return labelled(runs)


def labelled(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """Label each run by its scheme or, where several have it, by preset, name or folder."""
    labels = [label(run, runs) for run in runs]
    return [
        replace(run, label=name if labels.count(name) == 1 else f"{name} ({at})")
        for at, (run, name) in enumerate(zip(runs, labels, strict=True), start=1)
    ]


def with_preset(run: RunFigures) -> str:
    """The scheme with its preset of index privacy, where it has one."""
    return f"{run.scheme} {run.facts.get('level') or ''}".strip()


NAMES: Final[Sequence[Callable[[RunFigures], str]]] = (
    lambda run: run.scheme,
    with_preset,
    lambda run: str(run.facts.get("name") or run.folder.name),
    lambda run: run.folder.name,
)
"""From the shortest to the surest."""


def label(run: RunFigures, runs: Sequence[RunFigures]) -> str:
    peers = [other for other in runs if other.scheme == run.scheme]
    for name in NAMES:
        if [name(other) for other in peers].count(name(run)) == 1:
            return name(run)
    return str(run.folder)
