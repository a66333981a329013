"""Which figures of a run may be passed on: with [dp] those that are charged, and those public.

A figure is *charged* if it follows from noisy sums alone, whose events are in every client's
ledger. It is *public* if it follows from the plan, from the list of clients and who of them
answered, or from the account itself. Every other one is an exact function of somebody's data. A
simulation knows such figures, no budget has paid for them, and one of them may undo the rest: an
AUC of 16 digits over a few examples tells their labels. So a plan's figures are looked up here by
name, and a name that nobody has decided about is not charged.

What is made to be passed on (an exported model, `tessera compare`) holds charged and public figures
only. A run's own files, report and terminal keep the others, each marked `NOT_CHARGED`. A plan
without [dp] has no number that they could break, and nothing is marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tessera.plan import Plan
from tessera.rounds.noise import noise_of
from tessera.rounds.noise_account import Figure

NOT_CHARGED: Final = "simulation only, not charged"
"""How every exact figure is marked; in files it is the key under which their names are."""

NAMES: Final = {
    Figure.PUBLIC: {
        # The plan's, the account's, the machine's and the code's.
        *("event", "round_id", "period", "measured", "secure", "epsilon", "condition"),
        *("noise_epsilon", "noise_scope", "layout", "version", "name", "scheme", "level", "rounds"),
        *("metrics", "lower_is_better", "learner", "entropy", "entropy_script", "crypto", "views"),
        *("model", "naming_bound", "bound_in_words", "index_privacy", "two_server", "needed"),
        *("label", "folder"),
        *("task.name", "task.title", "task.clients", "rounds_planned", "epsilon_once"),
        *("epsilon_ever", "epsilon_spent", "insecure_test_entropy", "measured_rounds"),
        *("rounds_measured", "rounds_secure", "page", "differing", "together", "task", "run"),
        # Of who answered, and when. Training that fails through data sends zeros like any other.
        *("phase", "visit", "time", "reason", "why_given_up", "rounds_given_up", "ended"),
        *("groups_aborted", "groups_opened", "groups_retired", "waited"),
        *("seeds", "folders", "predictor"),
        # Rows of the marks and of the popularity have noise (`learning/popularity.py`).
        "selection",
    },
    Figure.METRIC: {
        *("metric", "validation", "final", "finals", "best", "best_round", "curve"),
        *("still_improving", "mean", "deviation"),
    },
    Figure.COHORT: {
        "cohort",
        "survivors",
        "answered",
        "missing",
        "delivered",
        "dropouts",
        "counted",
    },
    Figure.ROWS: {"bytes_up", "bytes_down", "bytes_between", "writing"},
}
FIGURES: Final = {name: figure for figure, names in NAMES.items() for name in names}


def is_charged(plan: Plan, name: str) -> bool:
    """Whether a figure of this name may be passed on: charged, public, or of a plan without [dp].

    Names are those of events, of run.json (a part of the task as "task.PART") and of summaries.
    """
    return noise_of(plan).covers(FIGURES.get(name, Figure.EXACT))


def marked(plan: Plan, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, with the names of those that are not charged under `NOT_CHARGED`."""
    kept = {name: value for name, value in figures.items() if name != NOT_CHARGED}
    names = [name for name, value in _flat(kept).items() if not _passes(plan, name, value)]
    return {**kept, NOT_CHARGED: ", ".join(names)} if names else kept


def passed_on(plan: Plan, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what is not charged: None, or without entries where a figure has parts."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if name == "task" and isinstance(value, Mapping):
            parts = passed_on(plan, _flat({name: value}))
            found[name] = {part.partition(".")[2]: one for part, one in parts.items()}
        elif name != NOT_CHARGED:
            without: dict[str, Any] | None = {} if isinstance(value, Mapping) else None
            found[name] = value if _passes(plan, name, value) else without
    return found


def _passes(plan: Plan, name: str, value: Any) -> bool:
    named = name == "metric" and isinstance(value, str)  # run.json and summaries: what it is called
    return named or is_charged(plan, name)


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The task of run.json has parts of both kinds: each by its own name."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        parts = value if name == "task" and isinstance(value, Mapping) else None
        found |= {name: value} if parts is None else {f"task.{one}": parts[one] for one in parts}
    return found
