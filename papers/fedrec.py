"""Recommenders of the literature beside ours: `tessera reproduce fedrec`.

MovieLens 100K and 1M, Last.fm 2K and Amazon electronics, as sequences; every user's last item is
held out. Both protocols: among all items that the user does not have, and among 99 of these that
are sampled, as papers on federated recommendation do. Popularity, successors and EASE need no
federation; FedMF and PFedRec are made again here (`papers/fedrec_models.py`); `next`, `pairs` and
their mixture are one run of `model = "next+pairs"`, whose two models leave out an item of each of
1,000 users to choose the weight by. All under `submodel`, with the bytes of a real round.

A training is kept in the cache folder and goes on where it was stopped; its figures are kept beside
it. Published figures are of the papers' own splits. Those marked secondary were taken from another
text than the paper that they are of.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import mean, pstdev
from typing import Any, Final

from papers.cells import Cell, Request, no_data, target, there
from papers.fedrec_models import MODELS, baseline_task, scores_of
from papers.runs import Cache, Trainings
from papers.show import Layout, Style
from tessera import tasks
from tessera.api import Run
from tessera.data.sequences import SequenceData
from tessera.errors import ConfigError
from tessera.learning.metrics import next_measures
from tessera.learning.rankers import predictors, ranks, sampled
from tessera.learning.scores import ItemScores
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.plan import Crypto, Plan, Scheme, SimulationPlan, TaskPlan
from tessera.report.numbers import score
from tessera.runs.folder import BESIDE, CHECKPOINT, RunFolder
from tessera.runs.ranking import sampled_measures
from tessera.runs.standing import standing
from tessera.runs.training import Training, complete

SCRIPT: Final = "fedrec"
ALL: Final = "among all items"
AMONG: Final = "among 99 sampled items"
TRAFFIC: Final = "what a client sends and fetches in the whole training"
BASELINES: Final = "baselines"
OURS: Final = "next+pairs"
VARIANTS: Final = (BASELINES, *MODELS, OURS)
KB: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSet:
    """A data set, and for how long is trained on it: ours in cohorts of 100, others with everybody.

    `options` are of its task.
    """

    title: str
    task: str
    rounds: int
    quick: int
    others: int = 30
    quick_others: int = 30
    options: Mapping[str, Any] = field(default_factory=dict)


SETS: Final = {
    "ml-100k": ItemSet(title="MovieLens 100K", task="sequences-100k", rounds=200, quick=60),
    "ml-1m": ItemSet(title="MovieLens 1M", task="sequences-1m", rounds=400, quick=40),
    "lastfm": ItemSet(
        title="Last.fm 2K",
        task="sequences-lastfm",
        rounds=200,
        quick=40,
        options={"penalty": 100.0},
    ),
    "amazon": ItemSet(title="Amazon electronics", task="sequences-amazon", rounds=200, quick=40),
}
PARTS: Final = tuple(SETS)
DEFAULT: Final = PARTS
TAKES: Final = ("seeds", "rounds", "variants", "data")
LAYOUT: Final = Layout(styles=(Style(text=score, noted=True, lines=False),))


@dataclass(frozen=True, slots=True)
class Published:
    """A figure in print."""

    value: float
    source: str
    secondary: bool = True

    @property
    def note(self) -> str:
        return f"published: {self.source}{', secondary' if self.secondary else ''}"


_PFEDREC: Final = "Zhang et al., IJCAI 2023"
_COFEDREC: Final = "He et al., WWW 2024"
_GSASREC: Final = "central, Petrov and Macdonald, RecSys 2023"
PUBLISHED: Final[Mapping[tuple[str, str], Mapping[str, Mapping[str, Published]]]] = {
    ("ml-1m", AMONG): {
        "FedMF": {"HR@10": Published(0.652, _PFEDREC), "NDCG@10": Published(0.394, _PFEDREC)},
        "PFedRec": {"HR@10": Published(0.733, _PFEDREC), "NDCG@10": Published(0.444, _PFEDREC)},
        "CoFedRec": {"HR@10": Published(0.778, _COFEDREC), "NDCG@10": Published(0.488, _COFEDREC)},
    },
    ("ml-1m", ALL): {
        "PFedRec": {"NDCG@10": Published(0.050, "federated, all items")},
        "CoFedRec": {"NDCG@10": Published(0.089, "federated, all items")},
        "SASRec": {"NDCG@10": Published(0.126, _GSASREC), "recall@10": Published(0.239, _GSASREC)},
        "gSASRec": {"NDCG@10": Published(0.173, _GSASREC), "recall@10": Published(0.300, _GSASREC)},
    },
}
TARGETS: Final[Mapping[tuple[str, str, str], float]] = {
    ("ml-1m", ALL, "NDCG@10"): 0.163,
    ("ml-1m", AMONG, "HR@10"): 0.78,
    ("ml-1m", AMONG, "NDCG@10"): 0.58,
}
"""Of the mixture, by set, protocol and figure."""

Figures = dict[str, dict[str, dict[str, float]]]
"""By row of a table, then by protocol or TRAFFIC, then by column."""


def cells(request: Request) -> list[Cell]:
    """Every set that was asked for and is there."""
    for name in request.variants:
        if name not in VARIANTS:
            raise ConfigError(f"fedrec: unknown row {name!r}", hint=f"one of {', '.join(VARIANTS)}")
    parts = request.parts
    if request.quick and parts == DEFAULT:
        parts = PARTS[:1]
    found: list[Cell] = []
    for part in parts:
        data = there(lambda: _sequences(request, part), part)  # noqa: B023
        if data is not None:
            found += _of_set(request, part, data)
    if not found:
        raise no_data("fedrec")
    return found


def _sequences(request: Request, part: str) -> SequenceData:
    options = {**SETS[part].options, "model": "pairs", "exact_pairs": True}
    data = tasks.load(SETS[part].task, data=request.data, **options).data
    assert isinstance(data, SequenceData)
    return data


def _of_set(request: Request, part: str, data: SequenceData) -> Iterator[Cell]:
    seeds = request.seeds_of()
    made = [_SetFigures(request, part, data, seed).every() for seed in seeds]
    for table in (ALL, AMONG, TRAFFIC):
        printed = PUBLISHED.get((part, table), {})
        for row in dict.fromkeys([*made[0], *printed]):
            columns = dict.fromkeys([*made[0].get(row, {}).get(table, {}), *printed.get(row, {})])
            for column in columns:
                values = [
                    one[row][table][column]
                    for one in made
                    if column in one.get(row, {}).get(table, {})
                ]
                paper = printed.get(row, {}).get(column)
                notes = [] if paper is None else [paper.note]
                aim = (
                    TARGETS.get((part, table, column))
                    if row == OURS and not request.quick
                    else None
                )
                if aim is not None and values:
                    notes.append(target(f"{aim:g}", met=mean(values) >= aim))
                yield Cell(
                    table=f"{SETS[part].title}, {table}",
                    row=row,
                    column=column,
                    paper=None if paper is None else paper.value,
                    ours=mean(values) if values else None,
                    unit="kB" if table == TRAFFIC and column != "rounds" else "",
                    note="; ".join(notes),
                    deviation=pstdev(values) if len(set(values)) > 1 else None,
                    doubtful=paper is not None and paper.secondary,
                )


class _SetFigures:
    """The figures of a set for one seed, each kept as soon as it is there."""

    def __init__(self, request: Request, part: str, data: SequenceData, seed: int) -> None:
        self.request, self.part, self.data, self.seed = request, part, data, seed
        self.of, self.cache = SETS[part], Cache(request.cache)
        self.trainings = Trainings(request.cache, SCRIPT, request.watch)

    def every(self) -> Figures:
        wanted = self.request.variants or VARIANTS
        found: Figures = {}
        for name in wanted:
            if name == BASELINES:
                found |= self._kept(name, self._baselines, seeded=False)
            elif name in MODELS:
                found |= self._kept(name, lambda: self._other(name))  # noqa: B023
            else:
                found |= self._kept(name, self._ours)
            gc.collect()
        return found

    def _kept(self, name: str, work: Callable[[], Figures], *, seeded: bool = True) -> Figures:
        setting = {
            "set": self.part,
            "row": name,
            "seed": self.seed if seeded else 0,
            "quick": self.request.quick,
            "rounds": self.request.rounds,
            "data": str(self.request.data or ""),
        }
        with single_threaded():
            return self.cache.get("fedrec", setting, work, title=f"{self.part}, {name}")

    def _measured(self, scores: ItemScores) -> dict[str, dict[str, float]]:
        test = self.data.test
        among = sampled(test, self.data.sizes["item"])
        return {
            ALL: next_measures(ranks(scores, test)),
            AMONG: sampled_measures(ranks(scores, test, among=among)),
        }

    def _baselines(self) -> Figures:
        made = predictors(self.data.events, self.data.sizes["item"])
        return {name: self._measured(make()) for name, make in made.items()}

    def _plan(self, cohort: int, rounds: int, options: Mapping[str, Any]) -> Plan:
        return Plan(
            scheme=Scheme.SUBMODEL,
            cohort=min(cohort, len(self.data.test)),
            federation=f"fedrec, {self.part}",
            seed=self.seed,
            task=TaskPlan(name=self.of.task, options=options),
            simulation=SimulationPlan(
                rounds=rounds,
                evaluate_every=rounds,
                crypto=Crypto.SAMPLED,
                crypto_every=rounds,  # messages of the first round are real, and counted
            ),
        )

    def _other(self, name: str) -> Figures:
        rounds = self.of.quick_others if self.request.quick else self.of.others
        task = baseline_task(self.data, name)
        plan = complete(self._plan(len(self.data.test), rounds, {}), task)
        place = self.trainings.place(f"fedrec-{name}-{self.part}", plan, rounds, self.request.data)
        run = self.trainings.run(place, task, plan, rounds, title=f"{self.of.title}, {name}")
        with self.trainings.reopened(task, plan, place / CHECKPOINT) as stood:
            assert isinstance(stood, Training)
            found = self._measured(scores_of(stood, name))
        return {name: found | {TRAFFIC: self._traffic(run)}}

    def _ours(self) -> Figures:
        rounds = self.request.rounds or (self.of.quick if self.request.quick else self.of.rounds)
        options = {**self.of.options, "model": OURS, "exact_pairs": True}
        task = tasks.load(self.of.task, data=self.request.data, **options)
        plan = self._plan(100, rounds, options)
        place = self.trainings.place(
            f"fedrec-ours-{self.part}", complete(plan, task), rounds, self.request.data
        )
        run = self.trainings.run(place, task, plan, rounds, title=f"{self.of.title}, {OURS}")
        beside = Run(place / BESIDE)
        with standing(RunFolder.load(run.folder), task) as model:
            found = {name: self._measured(part) for name, part in model.parts.items()}
            found[OURS] = self._measured(model.of_all_items)
        sent = self._traffic(run), self._traffic(beside)
        for name, each in zip(model.parts, sent, strict=True):
            found[name][TRAFFIC] = each
        found[OURS][TRAFFIC] = {key: sent[0][key] + sent[1][key] for key in sent[0]}
        return found

    def _traffic(self, run: Run) -> dict[str, float]:
        """Rounds that a client is in on average, and what it sends and fetches in them."""
        rounds = run.rounds
        real = [one for one in rounds if one["measured"]]
        times = len(rounds) * run.plan.cohort / len(self.data.test)
        each = {
            way: mean(sum(one[f"bytes_{way}"].values()) for one in real) / KB
            for way in ("up", "down")
        }
        return {"rounds": times, "up": each["up"] * times, "down": each["down"] * times}
