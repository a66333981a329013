"""The figures of a run, as its page and `tessera compare` show them: a view over `RunFolder`.

A figure that was not measured is None and never 0. Where a simulation plays only some of its rounds
message by message (sampled cryptography), bytes and protocol times exist in those only, so means
are over them; local training runs in every round and is averaged over all.

Of a run with `[dp]`, `RunFigures.passed_on` has charged and public figures only, as a comparison
shows it; its own report has all, and names those that `uncharged` finds (`rounds/events.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.data.split import TEST
from tessera.plan import Plan
from tessera.privacy.dp.guarantee import json_number
from tessera.privacy.index.exposure import epsilon_longitudinal, epsilon_per_round
from tessera.privacy.index.response import IndexPrivacy
from tessera.report.numbers import NOT_MEASURED
from tessera.rounds import schemes
from tessera.rounds.events import is_charged, marked, passed_on
from tessera.rounds.no_noise import Noise
from tessera.rounds.noise import noise_of
from tessera.rounds.schemes import SchemeEntry
from tessera.runs.folder import BESIDE, RunFolder

TRAIN: Final = "train"
"""The one cost category that is not part of a protocol."""
TIE: Final = 5e-4
"""Scores closer than this are the same to three decimals."""

Round = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run; `label` tells it from the others on the page."""

    run: RunFolder
    rounds: tuple[Round, ...]
    abort_reasons: Mapping[str, int]
    label: str
    withholds: bool = False  # exact figures that a budget should have paid for

    @classmethod
    def load(cls, folder: Path) -> RunFigures:
        """Of a run that trains a task; `ConfigError` as `RunFolder` has it."""
        run = RunFolder.load(folder)
        return cls(
            run=run,
            rounds=tuple(run.rounds()),
            abort_reasons=abort_reasons(run.events()),
            label=str(run.fact("scheme")),
        )

    def passed_on(self) -> RunFigures:
        """The run as it is shown to others: the same where there is no [dp]."""
        if not self.noisy:
            return self
        return replace(
            self,
            run=RunFolder(self.folder, passed_on(self.plan, self.facts)),
            rounds=tuple(passed_on(self.plan, line) for line in self.rounds),
            withholds=True,
        )

    def uncharged(self, *names: str) -> list[str]:
        """Those of these figures that are here, and that no budget paid for."""
        if self.withholds:
            return []
        return [name for name in names if not is_charged(self.plan, name)]

    def said(self, text: str) -> str:
        """What stands for a figure that is not there, by its reason."""
        return text.replace(NOT_MEASURED, "not charged") if self.withholds else text

    # --- facts ----------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.run.facts

    @property
    def plan(self) -> Plan:
        return self.run.plan

    @property
    def beside(self) -> RunFigures | None:
        """The run of a second model, once it is there and its weight is chosen."""
        return RunFigures.load(self.folder / BESIDE) if "mixture" in self.facts else None

    @property
    def scheme(self) -> str:
        return str(self.run.fact("scheme"))

    @property
    def entry(self) -> SchemeEntry:
        """What the table of schemes has about it; `ConfigError` if that is nothing."""
        return schemes.named(self.scheme)

    @property
    def noise(self) -> Noise:
        """The noise of its plan; an object that answers for none, too."""
        return noise_of(self.plan)

    @property
    def noisy(self) -> bool:
        """Whether its plan has a section [dp]."""
        return self.plan.dp is not None

    @property
    def secure(self) -> bool:
        """Whether no server sees a client's update."""
        return self.entry.hides

    @property
    def two_servers(self) -> bool:
        return self.entry.two_servers

    @property
    def writing(self) -> Mapping[str, Any]:
        """How each table was last written between two servers, and why."""
        return next((r["writing"] for r in reversed(self.rounds) if r["writing"]), {})

    @property
    def central(self) -> bool:
        return not self.entry.federated

    @property
    def metric(self) -> str:
        return str(self.run.fact("metric"))

    @property
    def lower_is_better(self) -> bool:
        return bool(self.facts.get("lower_is_better"))

    @property
    def task(self) -> Mapping[str, Any]:
        return mapping(self.run.fact("task"))

    @property
    def title(self) -> str:
        title = str(self.run.fact("task", "title"))
        return title[:1].upper() + title[1:]

    @property
    def baselines(self) -> dict[str, float]:
        """Scores of the baselines, by name."""
        scores = {k: finite(v) for k, v in mapping(self.run.fact("trivial")).items()}
        return {name: score for name, score in scores.items() if score is not None}

    @property
    def planned(self) -> int | None:
        return whole(self.run.fact("rounds"))

    @property
    def aborted(self) -> int:
        """How many rounds ended with nothing opened."""
        return sum(self.abort_reasons.values())

    @property
    def finished(self) -> int:
        return len(self.rounds)

    @property
    def cohort(self) -> int | None:
        """Clients in a round; None where there are no clients."""
        if self.central:
            return None
        return whole(self.rounds[-1]["cohort"] if self.rounds else self.run.fact("cohort")) or None

    @property
    def test_entropy(self) -> bool:
        return str(self.run.fact("entropy")) != "system"

    @property
    def switched_off(self) -> list[str]:
        """Safety rules that the plan switches off by name ("insecure_...")."""
        return sorted(insecure(self.plan))

    @property
    def setup(self) -> Mapping[str, Any]:
        """What was agreed on before the first round; empty for tasks without such a step."""
        return mapping(self.facts.get("setup"))

    @property
    def sampled(self) -> bool:
        """Whether only some of the rounds were played message by message."""
        return not self.central and len(self.measured_rounds) < len(self.rounds)

    @property
    def tested_on(self) -> str:
        """Which examples the metric is about."""
        if self.run.fact("metrics") == "federated":
            return "held-out examples of each round's own clients"
        part = self.plan.task.options.get("part", TEST)
        return f"the {part} part"

    @property
    def naming_bound(self) -> float:
        """How likely the only holder of a row is identified, at most; 1: no bound."""
        return number(self.facts.get("naming_bound")) or 1.0

    @property
    def bound_in_words(self) -> str:
        """B with its conditions; "" where a holder is not hidden."""
        return self.plan.promise.in_words() if self.naming_bound < 1.0 else ""

    @property
    def answers_differ(self) -> bool:
        """Whether answers differ by what a client holds: where all answer alike there is no ε."""
        found = self.index_privacy
        return found is not None and epsilon_per_round(found) > 0.0

    @property
    def index_privacy(self) -> IndexPrivacy | None:
        """The probabilities, where a scheme randomises sets at all."""
        found = {k: number(v) for k, v in mapping(self.run.fact("index_privacy")).items()}
        if not self.entry.randomises or None in (found.get(f"p{i}") for i in range(1, 5)):
            return None
        return IndexPrivacy(**{f"p{i}": found[f"p{i}"] or 0.0 for i in range(1, 5)})

    # --- figures --------------------------------------------------------------------------------

    @property
    def secure_rounds(self) -> tuple[Round, ...]:
        return tuple(r for r in self.rounds if self.secure and r["secure"])

    @property
    def measured_rounds(self) -> tuple[Round, ...]:
        """Rounds with bytes and protocol times: of fixed groups, if any of them had messages."""
        return tuple(r for r in self.rounds if r["measured"])

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(rounds done, metric) wherever it was evaluated."""
        found = ((position(r), finite(r["metric"])) for r in self.rounds)
        return [(at, value) for at, value in found if value is not None]

    @property
    def final(self) -> float | None:
        return self.curve[-1][1] if self.curve else None

    @property
    def best(self) -> tuple[float, float] | None:
        """(round, metric) of the best evaluation."""
        sign = -1.0 if self.lower_is_better else 1.0
        return max(self.curve, key=lambda point: sign * point[1], default=None)

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The best of the baselines."""
        sign = -1.0 if self.lower_is_better else 1.0
        return max(self.baselines.items(), key=lambda item: sign * item[1], default=None)

    def margin_over(self, score: float) -> float | None:
        """How much better than `score` the final model is; negative if it loses."""
        if self.final is None:
            return None
        return score - self.final if self.lower_is_better else self.final - score

    def by_category(self, name: str) -> dict[str, float]:
        """Means of a field by cost category, without categories that have no figure."""
        found: dict[str, list[float]] = {}
        for rounds, wanted in ((self.measured_rounds, False), (self.rounds, True)):
            for line in rounds:
                for category, value in line[name].items():
                    amount = finite(value)
                    if amount is not None and (category == TRAIN) is wanted:
                        found.setdefault(str(category), []).append(amount)
        means = {category: sum(values) / len(values) for category, values in found.items()}
        return {category: mean for category, mean in means.items() if mean > 0.0}

    def per_round(self, name: str) -> float | None:
        """Bytes or seconds of a round, all categories together; None where nothing was measured."""
        return sum(self.by_category(name).values()) or None

    @property
    def bytes_between(self) -> float | None:
        """Bytes between two servers for each client of a round."""
        values = [v for r in self.measured_rounds if (v := finite(r["bytes_between"]))]
        return sum(values) / len(values) if values else None

    def mean(self, name: str) -> float | None:
        values = [v for r in self.rounds if (v := finite(r[name])) is not None]
        return sum(values) / len(values) if values else None

    def total(self, name: str) -> float | None:
        values = [v for r in self.rounds if (v := finite(r[name])) is not None]
        return sum(values) if values else None

    @property
    def row_rounds(self) -> tuple[Round, ...]:
        """Rounds whose union was taken and counted."""
        return tuple(r for r in self.rounds if r["union_rows"])

    def rows(self, name: str) -> list[tuple[float, float]]:
        """(rounds done, rows) of one kind."""
        found = ((position(r), finite(r[name])) for r in self.row_rounds)
        return [(at, value) for at, value in found if value is not None]

    @property
    def below_quorum(self) -> float | None:
        """The share of the union's rows that too few clients named."""
        union = sum(value for _, value in self.rows("union_rows"))
        return sum(v for _, v in self.rows("rows_below_quorum")) / union if union else None

    @property
    def dropouts(self) -> float | None:
        """The share of invited clients that did not stay to the end."""
        if self.central:
            return None
        invited, stayed = self.total("cohort"), self.total("survivors")
        return 1.0 - stayed / invited if invited and stayed is not None else None

    @property
    def unmasked(self) -> float | None:
        """Clients of a secure scheme that sent their updates unmasked, on average per round."""
        return self.mean("unmasked") if self.secure else None

    @property
    def singleton_rows(self) -> float | None:
        """The share of the opened rows that exactly one client wrote."""
        opened, alone = self.total("rows_opened"), self.total("singleton_rows")
        return alone / opened if opened and alone is not None else None

    @property
    def epsilon_spent(self) -> float | None:
        """The highest epsilon any client has spent so far, by the ledger of the run."""
        if not self.answers_differ:
            return None
        found = [v for r in self.rounds if (v := number(r["epsilon"])) is not None]
        return max(found, default=None)

    @property
    def noise_spent(self) -> tuple[float, str] | None:
        """The highest epsilon that noise has left any client with, and what it is about."""
        found = [
            (v, str(r["noise_scope"]))
            for r in self.rounds
            if (v := number(r["noise_epsilon"])) is not None
        ]
        return max(found, default=None)

    def summary(self) -> dict[str, Any]:
        """The run as one object for machines; null is "not measured" or "does not apply"."""
        best, privacy, baseline = self.best, self.index_privacy, self.best_baseline
        margin = None if baseline is None else self.margin_over(baseline[1])
        random = self.answers_differ
        found = {
            "folder": str(self.folder),
            "label": self.label,
            "scheme": self.scheme,
            "level": self.facts.get("level") if privacy else None,
            "rounds": self.finished,
            "rounds_planned": self.planned,
            "rounds_given_up": self.aborted,
            "why_given_up": dict(self.abort_reasons),
            **in_rounds(self.rounds),
            "rounds_measured": None if self.central else len(self.measured_rounds),
            "rounds_secure": len(self.secure_rounds) if self.secure else None,
            "cohort": self.cohort,
            "final": self.final,
            "best": None if best is None else best[1],
            "best_round": None if best is None else int(best[0]),
            "ahead_of_trivial": margin,
            "bytes_up": self.by_category("bytes_up") or None,
            "bytes_down": self.by_category("bytes_down") or None,
            "client_seconds": self.by_category("client_seconds") or None,
            "server_seconds": self.by_category("server_seconds") or None,
            "helper_seconds": self.by_category("helper_seconds") or None,
            "bytes_between": self.bytes_between,
            "writing": dict(self.writing) or None,
            "naming_bound": self.naming_bound,
            "epsilon_once": json_number(epsilon_per_round(privacy)) if privacy and random else None,
            "epsilon_ever": json_number(epsilon_longitudinal(privacy))
            if privacy and random
            else None,
            "epsilon_spent": None
            if self.epsilon_spent is None
            else json_number(self.epsilon_spent),
            "noise_epsilon": None if self.noise_spent is None else json_number(self.noise_spent[0]),
            "noise_scope": None if self.noise_spent is None else self.noise_spent[1],
            "rows_below_quorum": self.below_quorum,
            "dropouts": self.dropouts,
            "in_the_open": self.unmasked,
            "not_finite": self.total("not_finite"),
            "clipped": self.mean("clipped"),
            "insecure_test_entropy": self.test_entropy,
        }
        return marked(self.plan, found) if not self.withholds else found


# --- what went wrong, by reason ----------------------------------------------------------------
#
# Reasons are the engine's words (`RoundFinished.excluded` and `broken`, `RoundAbort.reason`).


UNKNOWN: Final = "too few answered"


def by_reason(counted: Iterable[Any]) -> dict[str, int]:
    """Counts by reason added up, the most frequent first; anything else is ignored."""
    total: Counter[str] = Counter()
    for part in counted:
        if isinstance(part, Mapping):
            total.update({str(why): many for why, many in part.items() if isinstance(many, int)})
    return dict(total.most_common())


def in_rounds(rounds: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Of finished rounds: who is not in a sum, and who sent zeros because training failed."""
    every = list(rounds)
    return {name: by_reason(r.get(name) for r in every) for name in ("excluded", "broken")}


def waited(rounds: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of groups that wait: the share of invitations whose training was merged, and rounds waited.

    `groups_opened` is 0 where no group has waited.
    """
    every = list(rounds)
    ages = [age for r in every for age in r.get("waited") or ()]
    invited, merged = (sum(int(r[name] or 0) for r in every) for name in ("cohort", "survivors"))
    return {
        "groups_opened": len(ages),
        "groups_retired": int(every[-1].get("groups_retired") or 0) if every else 0,
        "counted": merged / invited if invited else 0.0,
        "waited": {
            "mean": float(np.mean(ages)) if ages else 0.0,
            "p95": float(np.quantile(ages, 0.95)) if ages else 0.0,
        },
    }


def abort_reasons(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many rounds were aborted, by reason, from a run's events."""
    return by_reason(
        {str(e.get("reason") or UNKNOWN): 1} for e in events if e.get("event") == "RoundAbort"
    )


# --- values ---------------------------------------------------------------------------------------


def insecure(section: Any) -> Iterator[str]:
    """Names of switches "insecure_..." that are on, in a section of a plan and those below it."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from insecure(value)
        elif field.name.startswith("insecure") and value is True:
            yield field.name


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """A figure, or None for what is not a number; "inf" is how JSON carries an infinite epsilon."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)


def finite(value: Any) -> float | None:
    """A figure that can be drawn and averaged."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def position(line: Round) -> float:
    """How many rounds were done after this one; ids begin at 0."""
    return float(line["round_id"]) + 1.0
