"""The runs behind `tessera reproduce fedmmf`: every model of a table, trained once, kept, resumed.

Yang et al., *Practical and Secure Federated Recommendation with Personalized Masks*, section 4, on
the sets that are there. A cell of Table 4 is a run with a checkpoint in the cache folder; what was
stopped goes on, and what was done is read back.

Cryptography is sampled: of each set's first run of FedMF the first round is real; all others add
the same integers in the clear, which changes no bit of a model. In quick runs no round of more than
a hundred clients is real.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from papers.cells import Request
from papers.runs import Cache, Trainings
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.ratings import RatingData
from tessera.errors import ConfigError
from tessera.learning.metrics import averages
from tessera.learning.task_setup import SetupResult
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.plan import Crypto, Plan, PrivacyPlan, Scheme, SecurityPlan, SimulationPlan, TaskPlan
from tessera.privacy.masks import indicator
from tessera.protocols.secagg.params import GraphKind
from tessera.rounds.root import lasting_secret
from tessera.runs.central import CentralTraining
from tessera.runs.client_training import Trainer
from tessera.runs.folder import CHECKPOINT
from tessera.runs.training import Training, complete
from tessera.tasks import Task, known

SCRIPT: Final = "fedmmf"
ITEMS: Final = "items.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingModel:
    """A row of Table 4 that is trained; `rounds` and `quick` where they are not the set's own."""

    key: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scheme: Scheme | None = None
    rounds: int | None = None
    quick: int | None = None

    @property
    def mask(self) -> str | None:
        return self.options.get("mask")


TITLES: Final = {"linear": "linear", "fm": "FM", "network": "network"}
"""Models of the attributes, by the name of the mask that is one."""
ORDERS: Final = {"linear": "one order", "fm": "two order", "network": "high order"}
FEDMF: Final = RatingModel(key="fedmf", name="FedMF")
MASKED: Final = tuple(
    RatingModel(key=f"fedmmf-{mask}", name=f"FedMMF, {order}", options={"mask": mask})
    for mask, order in ORDERS.items()
)
BY_ATTRIBUTES: Final = tuple(
    RatingModel(
        key=f"fed-{name}",
        name=f"federated {title}",
        options={"model": name},
        scheme=Scheme.SECURE_FEDAVG,  # there are no rows in it
        rounds=30,
        quick=6,
    )
    for name, title in TITLES.items()
)
CENTRAL: Final = RatingModel(
    key="central", name="biased MF, central", scheme=Scheme.CENTRAL, rounds=30, quick=12
)
MODELS: Final = (FEDMF, *BY_ATTRIBUTES, *MASKED, CENTRAL)
EVERY: Final = tuple(model.key for model in MODELS)
FEW: Final = (FEDMF.key, MASKED[0].key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingSet:
    """A data set, how its runs are summed, and how much of it is done.

    `rounds` is what its task recommends if None. `paper` names the column of Table 4 beside it, and
    `same` says whether that is the same data. Where it is not `real`, no round is masked.
    """

    name: str
    task: str
    cohort: int
    seeds: tuple[int, ...]
    quick: int
    scheme: Scheme = Scheme.SECURE_FEDAVG
    options: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = EVERY
    quick_models: tuple[str, ...] = FEW
    rounds: int | None = None
    paper: str = ""
    same: bool = True
    real: bool = True


ML100K: Final = RatingSet(
    name="MovieLens 100K",
    task="ratings-100k",
    cohort=943,
    seeds=(0, 1, 2, 3, 4),
    quick=30,
    quick_models=EVERY,
    paper="MovieLens 100K",
)
UA: Final = replace(
    ML100K,
    name="MovieLens 100K, published ua split",
    options={"split": "published"},
    models=FEW,
    quick_models=FEW,
    seeds=(0, 1, 2),
    quick=20,
    paper="",
)
ML1M: Final = RatingSet(
    name="MovieLens 1M",
    task="ratings-1m",
    cohort=1000,
    seeds=(0,),
    quick=20,
    paper="MovieLens 10M",
    same=False,
)
LASTFM: Final = RatingSet(
    name="Last.fm 2K",
    task="ratings-lastfm",
    real=False,  # 1.16 million words from each of 1,000 clients
    cohort=1000,
    seeds=(0, 1, 2),
    quick=10,
    paper="LastFM",
)
SETS: tuple[RatingSet, ...] = (ML100K, UA, ML1M, LASTFM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run gave. `alone` is the error of the masks without a federation, `indicator` what is
    left of the ratings by Definition 3.1: of those that are shared, and as clients estimate it."""

    seed: int
    measures: dict[str, float]
    baselines: dict[str, dict[str, float]]
    split: str
    scheme: str
    rounds: int
    cohort: int
    clients: int
    real: int  # rounds with real messages
    unmasked: float
    alone: dict[str, float] | None
    indicator: dict[str, float] | None
    folder: str


class RatingSource:
    """The data of a set, read once and kept until another set is read."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._key: tuple[str, str] | None = None
        self._data: RatingData | None = None

    def read(self, task: str, options: Mapping[str, Any]) -> RatingData:
        key = (task, json.dumps(dict(options), sort_keys=True))
        if self._key != key or self._data is None:
            found = known(task).read(folder=self.folder, **options)
            if not isinstance(found, RatingData):
                raise ConfigError(f"task {task!r} has no ratings")
            self._key, self._data = key, found
        return self._data

    def task(self, name: str, options: Mapping[str, Any], model: Mapping[str, Any]) -> Task:
        about, data = known(name), self.read(name, options)
        title = about.title.format(data=data)
        return about.kind.make(
            data, title=title, recommended=about.recommended, **about.fixed, **model
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """Where runs are kept, and how much of each is done."""

    cache: Cache
    trainings: Trainings
    data: RatingSource
    quick: bool
    rounds: int | None = None

    @classmethod
    def of(cls, request: Request) -> Bench:
        folder = request.cache / SCRIPT
        trainings = Trainings(folder, SCRIPT, request.watch)
        data = RatingSource(request.data)
        return cls(Cache(folder), trainings, data, request.quick, request.rounds)

    def result(
        self,
        of: RatingSet,
        model: RatingModel,
        seed: int,
        *,
        options: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        rounds: int | None = None,
    ) -> Result:
        """The run's, from the cache where it is there. `options` are more of the model's."""
        about = {**model.options, **(options or {})}
        own = {**of.options, "seed": seed}
        total = self.rounds or rounds or self._rounds(of, model)
        plan = plan or self.plan(of, model, seed, total)
        plan = replace(plan, task=TaskPlan(name=of.task, options={**own, **about}))
        name = f"{of.name}-{model.key}-{seed}"
        place = self.trainings.place(name, plan, total, self.data.folder)
        more = "".join(f", {name} {value:g}" for name, value in (options or {}).items())
        title = f"{of.name}, {model.name}{more}, seed {seed}"

        def work() -> dict[str, Any]:
            task = self.data.task(of.task, own, about)
            return asdict(self._train(place, task, complete(plan, task), total, title))

        return Result(**self.cache.get("model", {"run": place.name}, work, title=title))

    def _rounds(self, of: RatingSet, model: RatingModel) -> int:
        if self.quick:
            return model.quick or of.quick
        return model.rounds or of.rounds or known(of.task).recommended.rounds

    def plan(self, of: RatingSet, model: RatingModel, seed: int, rounds: int) -> Plan:
        """How this model is trained; training and the server's step are the task's own."""
        return Plan(
            scheme=model.scheme or of.scheme,
            cohort=of.cohort,
            federation=federation(of),
            seed=seed,
            privacy=PrivacyPlan(period_rounds=10_000),
            security=SecurityPlan(graph=GraphKind.SPARSE),
            simulation=SimulationPlan(
                rounds=rounds,
                crypto=Crypto.SAMPLED if self._is_real(of, model, seed) else Crypto.NONE,
                crypto_every=100_000,
                evaluate_every=10,
            ),
        )

    def _is_real(self, of: RatingSet, model: RatingModel, seed: int) -> bool:
        """Whether the first round is masked: at a thousand clients once for each set will do."""
        return not self.quick and of.real and model is FEDMF and seed == of.seeds[0]

    def _train(self, place: Path, task: Task, plan: Plan, rounds: int, title: str) -> Result:
        trainer = Trainer.VECTORISED if self.quick else Trainer.AUTO  # a few rounds earn no compile
        run = self.trainings.run(place, task, plan, rounds, title=title, trainer=trainer)
        lines = run.rounds
        with single_threaded(), self.trainings.reopened(task, plan, place / CHECKPOINT) as training:
            if isinstance(training, Training) and "items" in training.tables:
                table = training.tables["items"]
                np.save(place / ITEMS, table.values(np.arange(table.size, dtype=np.uint64)))
            return Result(
                seed=plan.seed,
                measures=_measures(training),
                baselines={
                    name: task.metric.measures(guess, task.data.test)
                    for name, guess in averages(task.data).items()
                },
                split=str(task.data.facts["split"]),
                scheme=plan.scheme.value,
                rounds=rounds,
                cohort=plan.cohort,
                clients=task.data.clients,
                real=sum(bool(x["measured"]) for x in lines),
                unmasked=float(np.mean([x["unmasked"] for x in lines])),
                alone=_alone(task, training.setup),
                indicator=indicators(training.setup),
                folder=str(place),
            )


def federation(of: RatingSet) -> str:
    """Every model of a set is trained by the same clients, who hold back the same ratings."""
    return f"fedmmf, {of.name}"


def _measures(training: Training | CentralTraining) -> dict[str, float]:
    if isinstance(training, CentralTraining):
        return training.measures()
    return training.evaluation.measures(training.dense, training.tables | training.local)


def _alone(task: Task, ready: SetupResult | None) -> dict[str, float] | None:
    if ready is None or ready.masks is None:
        return None
    return task.metric.measures(ready.masks.test, task.data.test)


def indicators(ready: SetupResult | None) -> dict[str, float] | None:
    """Definition 3.1 over everybody: on ratings that are shared, held back by clients, and tested.

    The paper's curve is the first. A client cannot know the last; the one between is its estimate.
    """
    if ready is None or ready.masks is None or not isinstance(ready.data, RatingData):
        return None
    data, masks = ready.data, ready.masks
    own = ready.masks.indicator
    return {
        "shared": indicator(data.train["label"], masks.train, data.low, data.high),
        "estimated": float(np.nanmean(own)) if np.isfinite(own).any() else float("nan"),
        "tested": indicator(data.test["label"], masks.test, data.low, data.high),
    }


def prepared(task: Task, of: RatingSet) -> SetupResult:
    """The task's data with everybody's mask; the sum over all is taken here, in one place."""
    if task.setup is None:
        raise ConfigError(f"task {task.name!r} has no set-up")
    secret = partial(lasting_secret, ScriptedEntropy(SCRIPT.encode()), federation(of))
    return task.setup.finish(task.data, task.setup.count(task.data.train), secret)
