"""A run's folder as the report reads it: facts from run.json, figures from rounds.jsonl.

A figure that was not measured is None and never 0. Where a simulation plays only some of its rounds
message by message (sampled cryptography), bytes and protocol times exist in those only, so means
are over them; local training runs in every round and is averaged over all.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.engines.runs import EVENTS, PLAN, ROUNDS
from tessera.errors import ConfigError
from tessera.privacy.exposure import epsilon_longitudinal, epsilon_once
from tessera.privacy.guarantee import json_number
from tessera.privacy.response import IndexPrivacy
from tessera.report import faults

FACTS: Final = "run.json"
TRAIN: Final = "train"
"""The one stage that is no part of a protocol."""
TIE: Final = 5e-4
"""Scores closer than this are the same to three decimals."""

Round = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One run; `label` tells it from the others on the page."""

    folder: Path
    facts: Mapping[str, Any]
    rounds: tuple[Round, ...]
    why_given_up: Mapping[str, int]
    settings: str
    label: str

    @classmethod
    def open(cls, folder: Path) -> Run:
        for name in (FACTS, ROUNDS):
            if not (folder / name).is_file():
                raise ConfigError(
                    f"{folder} is not the folder of a training run: it has no {name}",
                    hint="`tessera run PLAN.toml` makes one under runs/",
                )
        facts = read_facts(folder / FACTS)
        plan = folder / PLAN
        return cls(
            folder=folder,
            facts=facts,
            rounds=tuple(finished_rounds(folder / ROUNDS)),
            why_given_up=faults.why_given_up(given_up(folder / EVENTS)),
            settings=read(plan) if plan.is_file() else "",
            label=str(facts["scheme"]),
        )

    # --- facts ----------------------------------------------------------------------------------

    @property
    def scheme(self) -> str:
        return str(self.facts["scheme"])

    @property
    def secure(self) -> bool:
        """Whether no server sees a client's update."""
        return self.scheme.startswith("secure-") or self.two_servers

    @property
    def two_servers(self) -> bool:
        return self.scheme == "two-server"

    @property
    def writing(self) -> Mapping[str, Any]:
        """How each table was last written between two servers, and why."""
        told = (mapping(r.get("writing")) for r in reversed(self.rounds))
        return next((found for found in told if found), {})

    @property
    def central(self) -> bool:
        return self.scheme == "central"

    @property
    def metric(self) -> str:
        return str(self.facts.get("metric", "AUC"))

    @property
    def lower_is_better(self) -> bool:
        return bool(self.facts.get("lower_is_better"))

    @property
    def task(self) -> Mapping[str, Any]:
        return mapping(self.facts["task"])

    @property
    def title(self) -> str:
        title = str(self.task.get("title") or self.task.get("name") or "an unnamed task")
        return title[:1].upper() + title[1:]

    @property
    def trivial(self) -> dict[str, float]:
        """The trivial predictors' scores, by name."""
        scores = {k: finite(v) for k, v in mapping(self.facts.get("trivial")).items()}
        return {name: score for name, score in scores.items() if score is not None}

    @property
    def planned(self) -> int | None:
        return whole(self.facts.get("rounds"))

    @property
    def given_up(self) -> int:
        """How many rounds ended with nothing opened."""
        return sum(self.why_given_up.values())

    @property
    def finished(self) -> int:
        return len(self.rounds)

    @property
    def cohort(self) -> int | None:
        """Clients in a round; None where there are no clients."""
        if self.central:
            return None
        told = self.rounds[-1].get("cohort") if self.rounds else self.facts.get("cohort")
        return whole(told) or None

    @property
    def test_entropy(self) -> bool:
        return str(self.facts.get("entropy", "system")) != "system"

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan as it is written; empty where it cannot be read."""
        try:
            return tomllib.loads(self.settings)
        except tomllib.TOMLDecodeError:
            return {}

    @property
    def switched_off(self) -> list[str]:
        """Safety rules that the plan switches off by name ("insecure_...")."""
        return sorted(insecure(self.plan))

    @property
    def sharing(self) -> str:
        """How updates reach a secure sum: "secure", "plain", or "auto", each as it decides."""
        return str(mapping(self.plan.get("security")).get("sharing", "secure"))

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
        if self.facts.get("metrics") == "federated":
            return "held-out examples of each round's own clients"
        return "the test part"

    @property
    def index_privacy(self) -> IndexPrivacy | None:
        """The probabilities, where a scheme randomises sets at all."""
        found = {k: number(v) for k, v in mapping(self.facts.get("index_privacy")).items()}
        if self.scheme != "secure-submodel" or None in (found.get(f"p{i}") for i in range(1, 5)):
            return None
        return IndexPrivacy(**{f"p{i}": found[f"p{i}"] or 0.0 for i in range(1, 5)})

    # --- figures --------------------------------------------------------------------------------

    @property
    def secure_rounds(self) -> tuple[Round, ...]:
        every = mapping(self.facts.get("crypto")).get("mode", "every") == "every"
        return tuple(r for r in self.rounds if self.secure and r.get("secure", every))

    @property
    def measured_rounds(self) -> tuple[Round, ...]:
        """Rounds with bytes and protocol times: under a secure scheme, those really masked."""
        if self.secure:
            return self.secure_rounds
        return tuple(r for r in self.rounds if r.get("measured", True))

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(rounds done, metric) wherever it was evaluated."""
        found = ((position(r), finite(r.get("metric"))) for r in self.rounds)
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
    def rival(self) -> tuple[str, float] | None:
        """The best of the trivial predictors."""
        sign = -1.0 if self.lower_is_better else 1.0
        return max(self.trivial.items(), key=lambda item: sign * item[1], default=None)

    def ahead_of(self, rival: float) -> float | None:
        """How much better than `rival` the final model is; negative if it loses."""
        if self.final is None:
            return None
        return rival - self.final if self.lower_is_better else self.final - rival

    def by_stage(self, name: str) -> dict[str, float]:
        """Means of what rounds tell by stage, stages without a figure left out."""
        found: dict[str, list[float]] = {}
        for rounds, wanted in ((self.measured_rounds, False), (self.rounds, True)):
            for line in rounds:
                for stage, value in mapping(line.get(name)).items():
                    amount = finite(value)
                    if amount is not None and (stage == TRAIN) is wanted:
                        found.setdefault(str(stage), []).append(amount)
        means = {stage: sum(values) / len(values) for stage, values in found.items()}
        return {stage: mean for stage, mean in means.items() if mean > 0.0}

    def per_round(self, name: str) -> float | None:
        """Bytes or seconds of a round over all its stages; None where nothing was measured."""
        return sum(self.by_stage(name).values()) or None

    @property
    def between(self) -> float | None:
        """Bytes between two servers for each client of a round."""
        values = [v for r in self.measured_rounds if (v := finite(r.get("bytes_between")))]
        return sum(values) / len(values) if values else None

    def mean(self, name: str) -> float | None:
        values = [v for r in self.rounds if (v := finite(r.get(name))) is not None]
        return sum(values) / len(values) if values else None

    def total(self, name: str) -> float | None:
        values = [v for r in self.rounds if (v := finite(r.get(name))) is not None]
        return sum(values) if values else None

    @property
    def row_rounds(self) -> tuple[Round, ...]:
        """Rounds whose union was taken and counted."""
        return tuple(r for r in self.rounds if (finite(r.get("union_rows")) or 0.0) > 0.0)

    def rows(self, name: str) -> list[tuple[float, float]]:
        """(rounds done, rows) of one kind."""
        found = ((position(r), finite(r.get(name))) for r in self.row_rounds)
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
        pairs = [(finite(r.get("cohort")), finite(r.get("survivors"))) for r in self.rounds]
        known = [(c, s) for c, s in pairs if c and s is not None]
        invited = sum(c for c, _ in known)
        return 1.0 - sum(s for _, s in known) / invited if invited else None

    @property
    def in_the_open(self) -> float | None:
        """Clients of a secure scheme that sent their updates unmasked, in the mean of a round."""
        return self.mean("in_the_open") if self.secure else None

    @property
    def rows_of_one(self) -> float | None:
        """The share of the opened rows that exactly one client wrote."""
        known = [r for r in self.rounds if finite(r.get("rows_of_one")) is not None]
        opened = sum(finite(r.get("rows_opened")) or 0.0 for r in known)
        return sum(float(r["rows_of_one"]) for r in known) / opened if opened else None

    @property
    def spent(self) -> float | None:
        """The highest level any client has spent so far, as the ledger said in the run."""
        if self.index_privacy is None:
            return None
        levels = [v for r in self.rounds if (v := number(r.get("epsilon"))) is not None]
        return max(levels, default=None)

    def summary(self) -> dict[str, Any]:
        """The run as one object for machines; null is "not measured" or "does not apply"."""
        best, privacy, rival = self.best, self.index_privacy, self.rival
        ahead = None if rival is None else self.ahead_of(rival[1])
        return {
            "folder": str(self.folder),
            "label": self.label,
            "scheme": self.scheme,
            "level": self.facts.get("level") if privacy else None,
            "rounds": self.finished,
            "rounds_planned": self.planned,
            "rounds_given_up": self.given_up,
            "why_given_up": dict(self.why_given_up),
            **faults.in_rounds(self.rounds),
            "rounds_measured": None if self.central else len(self.measured_rounds),
            "rounds_secure": len(self.secure_rounds) if self.secure else None,
            "cohort": self.cohort,
            "final": self.final,
            "best": None if best is None else best[1],
            "best_round": None if best is None else int(best[0]),
            "ahead_of_trivial": ahead,
            "bytes_up": self.by_stage("bytes_up") or None,
            "bytes_down": self.by_stage("bytes_down") or None,
            "client_seconds": self.by_stage("client_seconds") or None,
            "server_seconds": self.by_stage("server_seconds") or None,
            "helper_seconds": self.by_stage("helper_seconds") or None,
            "bytes_between": self.between,
            "writing": dict(self.writing) or None,
            "epsilon_once": None if privacy is None else json_number(epsilon_once(privacy)),
            "epsilon_ever": None if privacy is None else json_number(epsilon_longitudinal(privacy)),
            "epsilon_spent": None if self.spent is None else json_number(self.spent),
            "rows_below_quorum": self.below_quorum,
            "dropouts": self.dropouts,
            "in_the_open": self.in_the_open,
            "not_finite": self.total("not_finite"),
            "clipped": self.mean("clipped"),
            "insecure_test_entropy": self.test_entropy,
        }


# --- reading ------------------------------------------------------------------------------------


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="is it the file that the run wrote?"
        ) from None


def read_facts(path: Path) -> Mapping[str, Any]:
    try:
        facts = json.loads(read(path))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is no JSON: {error.msg} in line {error.lineno}",
            hint="the run writes it once, when it starts; run again into another folder",
        ) from None
    if not isinstance(facts, dict) or "scheme" not in facts or "task" not in facts:
        raise ConfigError(
            f"{path} does not say which scheme and task were run",
            hint="it may be of another version of tessera",
        )
    return facts


def finished_rounds(path: Path) -> Iterator[Round]:
    """The finished rounds; a last line that is still being written is left for the next look."""
    lines = read(path).split("\n")
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            if at == len(lines):
                return
            raise ConfigError(
                f"{path}: line {at} is cut off",
                hint="`tessera run --resume` continues from the last checkpoint",
            ) from None
        if not isinstance(found, dict) or whole(found.get("round_id")) is None:
            raise ConfigError(
                f"{path}: line {at} is no finished round", hint="was it edited by hand?"
            )
        yield found


def given_up(path: Path) -> Iterator[Mapping[str, Any]]:
    """The events of rounds that were given up; a line that is still being written is left out."""
    lines = read(path).splitlines() if path.is_file() else []
    for line in lines:
        if '"RoundGivenUp"' in line:
            try:
                yield mapping(json.loads(line))
            except json.JSONDecodeError:
                continue


def insecure(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from insecure(value)
        elif name.startswith("insecure") and value is True:
            yield name


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """A figure, or None for what is none; "inf" is how JSON carries an infinite level."""
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
