"""The report: one HTML file about one run, or several side by side, with nothing to fetch.

It has no scripts, fonts or styles from elsewhere, so it can be mailed, archived and printed, and
opening it tells nobody. What it says is in `report/sections/`, how curves are drawn in `charts.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tessera.errors import ConfigError, __version__
from tessera.report.document import GENERATOR, document
from tessera.report.figures import RunFigures
from tessera.report.lineup import load_all
from tessera.report.markup import Content, Markup, tag
from tessera.report.numbers import enumeration
from tessera.report.sections import costs, noise, safety, summary, training
from tessera.rounds.charged import NOT_CHARGED

PAGE: Final = "report.html"
MARK: Final = f'<meta name="generator" content="{GENERATOR}'
"""How a page of ours is known; anything else is not overwritten."""

Section = Callable[[Sequence[RunFigures]], list[Content]]
SECTIONS: Final[Sequence[tuple[str, str, Section]]] = (
    ("learning", "Learning", summary.curves),
    ("schemes", "The schemes in figures", costs.schemes),
    ("costs", "Traffic and time", costs.traffic),
    ("privacy", "Privacy", safety.privacy),
    ("noise", "Noise and budget", noise.noise),
    ("rows", "Rows", safety.rows),
    ("knowledge", "Who learns what", safety.knowledge),
    ("training", "How it was trained", training.training),
    ("data", "Data", training.data),
    ("settings", "Settings", training.settings),
)
SHOWN: Final[Mapping[str, Mapping[str, str]]] = {
    "learning": {"metric": "the metric", "trivial": "baselines"},
    "schemes": {
        "metric": "the metric",
        "trivial": "baselines",
        "bytes_up": "bytes",
        "client_seconds": "times",
        "rows_below_quorum": "rows below quorum",
        "dropouts": "dropouts",
    },
    "costs": {"bytes_up": "bytes", "client_seconds": "times"},
    "privacy": {"unmasked": "unmasked updates"},
    "noise": {"metric": "the metric", "trivial": "baselines"},
    "rows": {"union_rows": "numbers of rows", "singleton_rows": "singleton rows"},
    "training": {
        "not_finite": "clients that sent zeros",
        "clipped": "values clipped",
        "seconds": "wall time",
        "excluded": "what went wrong",
    },
    "data": {
        "task.examples": "numbers of examples",
        "task.facts": "facts about the data",
        "setup": "figures before the first round",
    },
}
"""The measured figures of each section, by field and in words, for its mark."""
BEFORE_ANY_ROUND: Final = frozenset({"privacy", "knowledge", "data", "settings"})
"""Sections that make sense for runs in which no round has finished."""


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the runs' own page to `out`, all of it or nothing, exact figures marked; return `out`.

    `ConfigError` if a folder holds no training run, if runs do not compare, or if `out` is
    there and not a page of ours.
    """
    return save(page(load_all(folders, exact=True)), out)


def save(text: str, out: Path) -> Path:
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", hint=f"name a file, such as {out / PAGE}")
    if out.exists() and not ours(out):
        raise ConfigError(
            f"{out} exists and is not a page written by tessera",
            hint="name another file, or remove it",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside its goal, so that the last step is a rename: a reader sees the old page or the new.
        draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(text, encoding="utf-8", newline="\n")
            draft.replace(out)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror}", hint="name a file in another folder"
        ) from None
    return out


def ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(1000)
    except OSError:
        return False


def mark(runs: Sequence[RunFigures], key: str) -> Markup | None:
    """Which figures of a section are exact, where a budget should have paid for them; and whose."""
    words = SHOWN.get(key, {})
    whose = [run for run in runs if run.uncharged(*words)]
    if not whose:
        return None
    names = dict.fromkeys(words[name] for run in whose for name in run.uncharged(*words))
    of = f" (of {enumeration([run.label for run in whose])})" if len(runs) > 1 else ""
    return tag("p", tag("b", f"{NOT_CHARGED}:"), f" {enumeration(list(names))}{of}.", class_="mark")


def page(runs: Sequence[RunFigures]) -> str:
    """The whole document."""
    title = summary.heading(runs)
    started = any(run.finished for run in runs)
    shown = [s for s in SECTIONS if started or s[0] in BEFORE_ANY_ROUND]
    versions = ", ".join(sorted({str(run.facts.get("version", "not known")) for run in runs}))
    return document(
        title,
        brand=GENERATOR,
        top=(
            summary.banners(runs),
            summary.lede(runs),
            summary.tiles(runs[0]) if len(runs) == 1 else None,
        ),
        sections=[
            (key, name, [mark(runs, key), *found])
            for key, name, build in shown
            if (found := build(runs))
        ],
        foot=f"Trained with tessera {versions}; page written by tessera {__version__}. "
        "Research code: tested against vectors and by attack, without external review.",
    )
