"""The report: one HTML file about one run, or several side by side, with nothing to fetch.

It has no scripts, fonts or styles from elsewhere, so it can be mailed, archived and printed, and
opening it tells nobody. What it says is in `report/sections/`, how curves are drawn in `charts.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tessera.errors import ConfigError, __version__
from tessera.report.document import GENERATOR, document
from tessera.report.figures import RunFigures
from tessera.report.lineup import load_all
from tessera.report.markup import Content, Markup, tag
from tessera.report.numbers import enumeration
from tessera.report.sections import costs, mixture, noise, ranking, safety, summary, training
from tessera.rounds.events import NOT_CHARGED

PAGE: Final = "report.html"
MARK: Final = f'<meta name="generator" content="{GENERATOR}'
"""How a page of ours is known; anything else is not overwritten."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. `exact`: its measured figures, by field and in words, for its mark."""

    key: str
    heading: str
    build: Callable[[Sequence[RunFigures]], list[Content]]
    exact: Mapping[str, str] = field(default_factory=dict)
    before_any_round: bool = False  # it makes sense for runs in which no round has finished

    def mark(self, runs: Sequence[RunFigures]) -> Markup | None:
        """Which figures are exact, where a budget should have paid for them; and whose."""
        whose = [run for run in runs if run.uncharged(*self.exact)]
        if not whose:
            return None
        names = [self.exact[name] for run in whose for name in run.uncharged(*self.exact)]
        of = f" (of {enumeration([run.label for run in whose])})" if len(runs) > 1 else ""
        text = f" {enumeration(list(dict.fromkeys(names)))}{of}."
        return tag("p", tag("b", f"{NOT_CHARGED}:"), text, class_="mark")


SCORES: Final = {"metric": "the metric", "trivial": "baselines"}
COSTS: Final = {"bytes_up": "bytes", "client_seconds": "times"}
SECTIONS: Final = (
    Section("learning", "Learning", summary.curves, SCORES),
    Section("ranking", "What users would be shown", ranking.ranking),
    Section("mixture", "Two models", mixture.mixture),
    Section(
        "schemes",
        "The schemes in figures",
        costs.schemes,
        {**SCORES, **COSTS, "rows_below_quorum": "rows below quorum", "dropouts": "dropouts"},
    ),
    Section("costs", "Traffic and time", costs.traffic, COSTS),
    Section(
        "privacy",
        "Privacy",
        safety.privacy,
        {"unmasked": "unmasked updates"},
        before_any_round=True,
    ),
    Section("noise", "Noise and budget", noise.noise, SCORES),
    Section(
        "rows",
        "Rows",
        safety.rows,
        {"union_rows": "numbers of rows", "singleton_rows": "singleton rows"},
    ),
    Section("knowledge", "Who learns what", safety.knowledge, before_any_round=True),
    Section(
        "training",
        "How it was trained",
        training.training,
        {
            "not_finite": "clients that sent zeros",
            "clipped": "values clipped",
            "seconds": "wall time",
            "excluded": "what went wrong",
        },
    ),
    Section(
        "data",
        "Data",
        training.data,
        {
            "task.examples": "numbers of examples",
            "task.facts": "facts about the data",
            "setup": "figures before the first round",
        },
        before_any_round=True,
    ),
    Section("settings", "Settings", training.settings, before_any_round=True),
)


def write(folders: Sequence[Path], out: Path, *, exact: bool = False) -> Path:
    """Write the runs' page to `out`, all of it or nothing; return `out`.

    In a run's own folder, and anywhere with `exact`, it has the figures that no budget paid for,
    marked; elsewhere those of runs with [dp] are withheld.
    `ConfigError` if a folder holds no training run, if runs do not compare, or if `out` is
    there and not a page of ours.
    """
    own = len(folders) == 1 and out.resolve().is_relative_to(Path(folders[0]).resolve())
    return save(page(load_all(folders, exact=exact or own)), out)


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


def page(runs: Sequence[RunFigures]) -> str:
    """The whole document."""
    title = summary.heading(runs)
    started = any(run.finished for run in runs)
    shown = [section for section in SECTIONS if started or section.before_any_round]
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
            (section.key, section.heading, [section.mark(runs), *found])
            for section in shown
            if (found := section.build(runs))
        ],
        foot=f"Trained with tessera {versions}; page written by tessera {__version__}. "
        "Research code: tested against vectors and by attack, without external review.",
    )
