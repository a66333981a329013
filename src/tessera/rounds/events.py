"""Typed facts about a run, for log, report and dashboard; each becomes one JSON line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted:
    """A cohort was chosen."""

    round_id: int
    period: int
    cohort: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseClosed:
    """The clock ended a phase with whoever had answered."""

    round_id: int
    phase: str
    visit: int
    time: float
    answered: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished:
    """A round's outcome. Bytes and seconds are means over the cohort, by stage of the round.

    `epsilon` is the highest conditional level that any client of the cohort has spent so far, and
    `condition` says given what. An ideal round is not `measured`: it has no bytes
    and no protocol seconds. `secure` says whether its sums were really masked. `metric` is the
    model's after the round, in rounds in which it was tested; `loss` the cohort's in training;
    `not_finite` counts clients whose training broke and who sent zeros, with two servers `broken`
    says why, where the trainer did not see to it itself; `clipped` is the share of values that were
    cut, and `left_home` how many rows the cohort's clients kept back because the plan caps how many
    one may name. `in_the_open` counts the clients of a secure scheme that sent their updates
    unmasked, as their plan or their choice allows. But for that, these are the simulation's
    knowledge: no server could tell. So is `singleton_rows`: opened rows that exactly one client
    wrote, and whose sum is its exact update. `excluded` counts by reason those who
    answered and are not in the sum: refused by a server, or gone because of one. With two servers
    `helper_seconds` are the second one's, `bytes_between` goes between the two, for each client of
    the cohort, and `writing` tells of each table how it was written and why.
    """

    round_id: int
    cohort: int
    survivors: int
    union_rows: int
    union_residual: int
    rows_opened: int
    rows_below_quorum: int
    rows_shrunk: int
    rows_lost: int
    weight: int
    measured: bool
    secure: bool
    bytes_up: Mapping[str, float]
    bytes_down: Mapping[str, float]
    client_seconds: Mapping[str, float]
    server_seconds: Mapping[str, float]
    epsilon: float
    condition: str
    metric: float | None = None
    loss: float | None = None
    not_finite: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)
    clipped: float = 0.0
    left_home: int = 0
    in_the_open: int = 0
    singleton_rows: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict)
    helper_seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_between: float = 0.0
    writing: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAbort:
    """Too few answered; nothing was opened. `reason` says why, where it is known."""

    round_id: int
    phase: str
    answered: int
    needed: int
    reason: str = ""


Event = RoundStarted | PhaseClosed | RoundFinished | RoundAbort


def as_json(event: Event) -> dict[str, Any]:
    """The event with its kind; an infinite level is the string "inf", and NaN is nothing."""
    values: dict[str, Any] = {"event": type(event).__name__, **asdict(event)}
    return {k: _plain(v) for k, v in values.items()}


def _plain(value: Any) -> Any:
    if not isinstance(value, float) or isfinite(value):
        return value
    return "inf" if value == float("inf") else None
