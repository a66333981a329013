"""Runs that can stand side by side, each with a label that tells it from the others."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tessera.errors import ConfigError
from tessera.report.figures import RunFigures


def data_of(run: RunFigures) -> str:
    """What must be the same for two scores to be about the same examples.

    The digest of the training part, where there is one: a task may be called what it likes.
    """
    parts = ("clients", "examples", "test_examples")
    sizes = ", ".join(f"{run.task.get(part)} {part.replace('_', ' ')}" for part in parts)
    digest = run.facts.get("data")
    named = "" if digest is None else f", digest {str(digest)[:8]}"
    return f"{run.run.fact('task', 'name')}: {sizes}{named}"


def same_data(run: RunFigures) -> str:
    name, _, sizes = data_of(run).partition(": ")
    return sizes if run.facts.get("data") else f"{name}: {sizes}"


ALIKE: Final[Sequence[tuple[str, Callable[[RunFigures], str], Callable[[RunFigures], str]]]] = (
    ("metrics", lambda run: run.metric, lambda run: run.metric),
    ("data", same_data, data_of),
)
"""What the runs of one page have in common."""


def load_all(folders: Sequence[Path], *, exact: bool = False) -> list[RunFigures]:
    """The runs in these folders; `ConfigError` if their figures do not stand side by side.

    With `exact` also those figures of runs with [dp] that no budget paid for: for a page that stays
    where the data is.
    """
    if not folders:
        raise ConfigError("no run was named", hint="name one or more run folders")
    runs = [RunFigures.load(folder) for folder in folders]
    for what, of, named in ALIKE:
        kinds: dict[str, list[RunFigures]] = {}
        for run in runs:
            kinds.setdefault(of(run), []).append(run)
        if len(kinds) > 1:
            groups = "; ".join(
                f"{named(alike[0])} ({', '.join(run.folder.name for run in alike)})"
                for alike in kinds.values()
            )
            raise ConfigError(
                f"the runs are on different {what}: {groups}",
                hint="compare runs of one kind at a time: figures on different ones do not compare",
            )
    return labelled(runs if exact else [run.passed_on() for run in runs])


def differing(runs: Sequence[RunFigures]) -> dict[str, list[Any]]:
    """The settings of the plans that are not the same in all runs; the scheme is the label."""
    plans = [_keys(tomllib.loads(run.plan.to_toml())) for run in runs]
    names = dict.fromkeys(name for plan in plans for name in plan)
    values = {name: [plan.get(name) for plan in plans] for name in names}
    return {
        name: each
        for name, each in values.items()
        if name != "scheme" and any(one != each[0] for one in each)
    }


def _keys(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            found |= _keys(value, f"{above}{name}.")
        elif not isinstance(value, list):
            found[f"{above}{name}"] = value
    return found


def baselines(runs: Sequence[RunFigures]) -> dict[str, float]:
    """Scores of the baselines; the mean over runs where seeds made their test parts differ."""
    names = dict.fromkeys(name for run in runs for name in run.baselines)
    found = {name: [run.baselines[name] for run in runs if name in run.baselines] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


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
