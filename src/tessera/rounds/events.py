"""Typed facts about a run, for log, report and dashboard; each becomes one JSON line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from typing import Any, Final

from tessera.plan import Plan
from tessera.rounds.no_noise import Figure
from tessera.rounds.noise import noise_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """A cohort was chosen."""

    round_id: int
    period: int
    cohort: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseClosed:
    """The clock ended a phase with the clients that had answered."""

    round_id: int
    phase: str
    visit: int
    time: float
    answered: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished:
    """A round's outcome. Bytes and seconds are means over the cohort, by cost category.

    `epsilon` is the most that any client of the cohort has spent so far, and `condition` says what
    it is conditional on. An ideal round is not `measured`: it has no bytes and no protocol seconds.
    `secure` says whether sums were masked, and `unmasked` counts the clients of a secure scheme
    that sent their updates in the clear, as the plan or their own choice allows. `metric` is the
    model's after the round, if it was tested, and `validation` that of the part that was held out
    to stop by; `loss` is the cohort's in training. `excluded` counts by reason the clients that
    answered and are not in the sum. With two servers `helper_seconds` are the helper's,
    `bytes_between` go between the two, per client of the cohort, and `writing` says how each table
    was written and why. `rows_out_of_bounds` were opened and not merged
    (`rounds/clipped_vector.py`); `groups_aborted` are fixed groups that lacked a member and opened
    nothing. Of groups that wait, `delivered` counts the clients that delivered in this round,
    `groups_opened` the groups that became full and were merged, `survivors` their members (more
    than were invited, if some of them delivered in earlier rounds), `waited` the rounds from base
    to merge of each, and `groups_retired` those that have ended for good.

    Some are known to a simulation only, and to no server. `not_finite` counts clients whose
    training failed and that sent zeros; with two servers `broken` counts them by reason. `clipped`
    is the share of values that were clipped, `rows_over_cap` the rows that clients left out because
    of the plan's max_rows, and `singleton_rows` the rows in the sum that exactly one client wrote,
    whose sum is its exact update. `rows_exposed` are those of clients that were missing in a round
    of their keys and show in the difference of two sums. With noise (`[dp]`) `noise_epsilon` is the
    most that any client of the cohort has spent per unit against whoever sees most, `noise_scope`
    says what it is about, and `groups_not_finite` counts groups of examples left out, as their
    gradient was not finite.
    """

    round_id: int
    cohort: int
    survivors: int
    union_rows: int = 0
    union_residual: int = 0
    rows_opened: int = 0
    rows_below_quorum: int = 0
    rows_shrunk: int = 0
    rows_lost: int = 0
    weight: int
    measured: bool = False
    secure: bool = False
    bytes_up: Mapping[str, float] = field(default_factory=dict)
    bytes_down: Mapping[str, float] = field(default_factory=dict)
    client_seconds: Mapping[str, float] = field(default_factory=dict)
    server_seconds: Mapping[str, float] = field(default_factory=dict)
    epsilon: float = nan
    condition: str = ""
    metric: float | None = None
    validation: float | None = None
    loss: float | None = None
    not_finite: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)
    clipped: float = 0.0
    rows_over_cap: int = 0
    unmasked: int = 0
    singleton_rows: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict)
    helper_seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_between: float = 0.0
    writing: Mapping[str, str] = field(default_factory=dict)
    rows_out_of_bounds: int = 0
    groups_aborted: int = 0
    groups_opened: int = 0
    groups_retired: int = 0
    delivered: int = 0
    waited: tuple[int, ...] = ()
    noise_epsilon: float | None = None
    noise_scope: str = ""
    groups_not_finite: int = 0
    rows_exposed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAbort:
    """Too few clients answered, and no sum was opened. `reason` says why, if it is known."""

    round_id: int
    phase: str
    answered: int
    needed: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded:
    """Training ended before this round, in good order, with the reason."""

    round_id: int
    reason: str


Event = RoundStarted | PhaseClosed | RoundFinished | RoundAbort | TrainingEnded


def as_json(event: Event) -> dict[str, Any]:
    """The event with its kind; an infinite epsilon is the string "inf", and NaN is null."""
    values: dict[str, Any] = {"event": type(event).__name__, **asdict(event)}
    return {k: _plain(v) for k, v in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, float) or isfinite(value):
        return value
    return "inf" if value == float("inf") else None


# --- what of an event may be passed on ------------------------------------------------------------
#
# Which figures of a run may be passed on: with [dp] those that are charged, and those public.
#
# A figure is *charged* if it follows from noisy sums alone, whose events are in every client's
# ledger. It is *public* if it follows from the plan, from the list of clients and who of them
# answered, or from the account itself. Every other one is an exact function of somebody's data. A
# simulation knows such figures, no budget has paid for them, and one of them may undo the rest: an
# AUC of 16 digits over a few examples tells their labels. So a plan's figures are looked up here by
# name, in the one list there is, and a name that nobody has decided about is not charged. A test
# (`tests/runs/test_charged.py`) finds names that are missing.
#
# What leaves a run's own folder has charged and public figures only (`passed_on`): an exported
# model, `tessera compare`, a page elsewhere, CSV, JSON and data frames. The files in that folder,
# its report and a terminal keep the others, each marked `NOT_CHARGED`. A plan without [dp] has no
# number that they could break, and nothing is marked or withheld.

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
        *("seed", "seeds", "folders", "predictor", "sampled", "part", "scale", "score"),
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
    Figure.EXACT: {
        # Of what clients trained and sent, without noise.
        *("union_rows", "union_residual", "rows_opened", "rows_below_quorum", "rows_shrunk"),
        *("rows_lost", "rows_exposed", "rows_out_of_bounds", "rows_over_cap", "rows_left_home"),
        *("singleton_rows", "weight", "loss", "clipped", "not_finite", "broken", "excluded"),
        *("groups_not_finite", "unmasked", "in_the_open", "local rows"),
        # Times: training takes as long as a client has examples.
        *("client_seconds", "server_seconds", "helper_seconds", "seconds"),
        # Of the data itself, and of predictors that are computed where all of it is.
        *("task.facts", "task.examples", "task.test_examples", "data", "trivial"),
        *("ahead_of_trivial", "setup", "mixture"),
        # Of a ranking (`runs/ranking.py`) and of one user's lists (`runs/recommend.py`).
        *("figures", "targets", "candidates", "looks", "client", "user", "ratings", "mask"),
        *("recommended", "past", "came_next", "place"),
    },
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


def told(plan: Plan, figures: Mapping[str, Any], *, exact: bool) -> dict[str, Any]:
    """Figures for a file or another program: what may be passed on, or with `exact` all, marked."""
    return marked(plan, figures) if exact else passed_on(plan, figures)


def passed_on(plan: Plan, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what is not charged: None, or without entries where a figure has parts.

    All of it, where the plan has no [dp].
    """
    if plan.dp is None:
        return dict(figures)
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
