"""Full ranking: where a run's model puts what came next, among everything there is.

Of a click model: for each user with a click in its test part, the first of these is the target, and
every item that the user did not have before is a candidate, scored with what was known then. Of a
softmax over a table: every test example, among all rows. Of sequences: each user's last item, among
all that it does not have (`learning/rankers.py`). None is sampled, unless a paper's protocol is
asked for.
Beside the model stand predictors that need none: what was clicked most often in the training part,
and what most often came after the last item there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.ratings import RatingData
from tessera.data.sequences import SEEN, SequenceData
from tessera.data.split import TEST, VALIDATION
from tessera.errors import ConfigError
from tessera.learning import rankers
from tessera.learning.metrics import RankMetric, hit_rate, ndcg, next_measures, successors
from tessera.learning.rankers import POPULARITY, SUCCESSOR
from tessera.learning.scores import ItemScores
from tessera.runs.export import named_task
from tessera.runs.folder import RANKING, TESTED, RunFolder
from tessera.runs.recommend import following
from tessera.runs.standing import RunModel, check_run, standing
from tessera.tasks import Task

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MODEL: Final = "model"
USERS: Final = 1_000
"""That a command looks at unless more are asked for."""
AT_ONCE: Final = 1 << 16
"""Examples that are scored at a time."""

Progress = Callable[[int, int], None]
"""(users done, of how many)."""


@dataclass(frozen=True, slots=True)
class FullRanking:
    """Figures by predictor and name. `targets` were ranked, each among about `candidates`.

    These are all there are, unless so many of them were `sampled`.
    """

    run: str
    task: str
    scheme: str
    rounds: int
    targets: int
    candidates: int
    figures: dict[str, dict[str, float]]
    sampled: int = 0
    part: str = TEST
    looks: int = 0
    """At the test part of this run before, where it is tested on a validation part."""


def full_ranking(
    folder: Path,
    *,
    top: int = 10,
    users: int = 0,
    data: Path | None = None,
    task: Task | None = None,
    on_progress: Progress | None = None,
    sampled: int = 0,
    test: bool = False,
) -> FullRanking:
    """Of a run's last checkpoint. `users` at most are looked at, spread evenly; 0: all.

    A run of `part` "validation" is ranked on that; with `test` on the test part, and the look is
    noted in its folder: settings that are chosen by it are not tested any more.

    Of sequences, what came next may be ranked among so many `sampled` items, as papers do.
    """
    if top < 1 or users < 0:
        raise ConfigError(f"top = {top}, users = {users}", hint="top is 1 or more, users 0 or more")
    log = RunFolder.load(folder)
    task = task or named_task(log, data)
    softmax = isinstance(task.metric, RankMetric)
    if not softmax and not _clicks(task):
        raise ConfigError(
            f"{folder}: task {task.name!r} is neither about clicks on items nor a softmax over a "
            "table, so there is nothing to rank",
            hint="its metric is in the report",
        )
    if sampled and not isinstance(task.data, SequenceData):
        raise ConfigError(
            f"{folder}: items are sampled beside what came next in a sequence, and this has none",
            hint="leave --sampled out",
        )
    check_run(log, task)
    part, looks = TEST, 0
    with standing(log, task) as stood:
        if isinstance(task.data, SequenceData):
            held, part = held_out(task.data, test=test)
            some = spread(held, users)
            figures = _next_figures(task.data, stood, some, on_progress, sampled)
            items = task.data.sizes["item"]
            targets, candidates = len(some), sampled + 1 if sampled else _candidates(items, some)
        elif isinstance(task.metric, RankMetric):
            every = task.data.test
            figures = {MODEL: task.metric.measures(stood.scores(every), every)}
            figures |= task.metric.baseline_measures(task.data)
            targets, candidates = len(every), task.metric.rows
        else:
            ranks, candidates = _item_ranks(task.data, stood.scores, users, on_progress)
            targets = len(ranks[MODEL])
            figures = {
                name: {
                    f"recall@{top}": hit_rate(found, top),
                    f"NDCG@{top}": ndcg(found, top),
                    "recall@1": hit_rate(found, 1),
                }
                for name, found in ranks.items()
            }
    if test:
        earlier = log.kept(TESTED) or []
        looks = len(earlier)
        log.keep(TESTED, [*earlier, {"rounds": stood.rounds, "users": users, "figures": figures}])
    return FullRanking(
        run=str(folder),
        task=task.title or task.name,
        scheme=log.plan.scheme.value,
        rounds=stood.rounds,
        targets=targets,
        candidates=candidates,
        figures=figures,
        sampled=sampled,
        part=part,
        looks=looks,
    )


def held_out(data: SequenceData, *, test: bool) -> tuple[Examples, str]:
    """What is ranked, and the name of that part."""
    if data.final is None:
        return data.test, TEST
    return (data.final, TEST) if test else (data.test, VALIDATION)


SHOWN: Final = 3
"""Users whose lists stand in a report."""


def keep_ranking(folder: Path, task: Task) -> None:
    """At the end of a run: its ranking and a few users' lists, into its folder."""
    found = full_ranking(folder, users=USERS, task=task)
    log, data = RunFolder.load(folder), task.data
    assert isinstance(data, SequenceData)
    whose = np.unique(data.test["user"])
    chosen = whose[(2 * np.arange(SHOWN) + 1) * len(whose) // (2 * SHOWN)]
    with standing(log, task) as stood:
        lists = [
            asdict(following(log, task, data, stood, int(client), 10, 5))
            for client in dict.fromkeys(chosen.tolist())
        ]
    log.keep(RANKING, {"ranking": asdict(found), "lists": lists})


def spread(examples: Examples, most: int) -> Examples:
    """At most so many of these, spread evenly; 0: all."""
    step = max(1, -(-len(examples) // most)) if most else 1
    return examples.take(slice(None, None, step))


def _candidates(items: int, examples: Examples) -> int:
    """Items that an example's own is ranked among, on average."""
    return round(items - float((examples[SEEN] >= 0).sum(axis=1).mean()))


def _next_figures(
    data: SequenceData,
    model: RunModel,
    examples: Examples,
    on_progress: Progress | None,
    sampled: int,
) -> dict[str, dict[str, float]]:
    """Of the model first, with the parts of a mixture, then of the predictors that need none."""
    items = data.sizes["item"]
    among = rankers.sampled(examples, items, sampled) if sampled else None
    models: dict[str, ItemScores] = {MODEL: model.of_all_items, **model.parts}
    made: dict[str, Callable[[], ItemScores]] = {
        **{name: partial(_given, scores) for name, scores in models.items()},
        **rankers.predictors(data.events, items),
    }
    figures = {}
    for place, (name, make) in enumerate(made.items()):

        def progress(done: int, of: int, before: int = place) -> None:
            if on_progress is not None:
                on_progress((before * of + done) // len(made), of)

        found = rankers.ranks(make(), examples, progress, among)
        figures[name] = sampled_measures(found) if sampled else next_measures(found)
    return figures


def sampled_measures(found: Doubles) -> dict[str, float]:
    """Of ranks among sampled items, by the names that papers give them."""
    return {"HR@10": hit_rate(found, 10), "NDCG@10": ndcg(found, 10)}


def _given(scores: ItemScores) -> ItemScores:
    return scores


def _clicks(task: Task) -> bool:
    data = task.data
    return (
        {"item", LABEL} <= data.train.fields.keys()
        and "item" in data.sizes
        and not isinstance(data, RatingData)
        and data.train.subjects is None
    )


def _item_ranks(
    data: ClientData,
    score: Callable[[Examples], npt.NDArray[np.float32]],
    users: int,
    on_progress: Progress | None,
) -> tuple[dict[str, Doubles], int]:
    """Ranks of every user's next click, by predictor, and among how many items on average."""
    rows = data.names_of("item").filled
    clicked = data.train["item"][data.train[LABEL] > 0]
    popular = np.bincount(clicked, minlength=data.sizes["item"]).astype(np.float64)
    after = _followers(data)
    chosen = [c for c in range(data.clients) if (data.test_of(c)[LABEL] > 0).any()]
    if not chosen:
        raise ConfigError(f"{data.name}: no click in the test part", hint="nothing can be ranked")
    if users:
        chosen = chosen[:: max(1, -(-len(chosen) // users))]
    ranks: dict[str, list[int]] = {MODEL: [], POPULARITY: [], SUCCESSOR: []}
    candidates = 0
    waiting: list[tuple[Examples, int]] = []

    def flush() -> None:
        fields = waiting[0][0].fields
        whole = Examples(
            {name: np.concatenate([each[name] for each, _ in waiting]) for name in fields}
        )
        found, at = score(whole).astype(np.float64), 0
        for each, target in waiting:
            own = found[at : at + len(each)]
            ranks[MODEL].append(_rank(own, target))
            at += len(each)
        waiting.clear()

    for done, client in enumerate(chosen, start=1):
        train, test = data.of(client), data.test_of(client)
        at = int(np.argmax(test[LABEL] > 0))
        had = np.concatenate([train["item"], test["item"][:at]])
        left = rows[~np.isin(rows, had)]
        item = int(test["item"][at])
        if item not in left:  # it came before, and is no recommendation
            continue
        target = int(np.searchsorted(left, item))
        liked = np.concatenate(
            [part["item"][part[LABEL] > 0] for part in (train, test.take(slice(0, at)))]
        )
        follow = popular[left] / (1.0 + popular.sum())
        if len(liked) and int(liked[-1]) in after:
            following, often = after[int(liked[-1])]
            inside = np.isin(following, left)
            follow[np.searchsorted(left, following[inside])] += often[inside]
        ranks[POPULARITY].append(_rank(popular[left], target))
        ranks[SUCCESSOR].append(_rank(follow, target))
        one = test.take(slice(at, at + 1))
        fields = {
            name: np.broadcast_to(column, (len(left), *column.shape[1:]))
            for name, column in one.fields.items()
        }
        waiting.append((Examples({**fields, "item": left}), target))
        candidates += len(left)
        if sum(len(each) for each, _ in waiting) >= AT_ONCE:
            flush()
            if on_progress is not None:
                on_progress(done, len(chosen))
    if waiting:
        flush()
    found = {name: np.array(each, np.float64) for name, each in ranks.items()}
    return found, round(candidates / max(1, len(ranks[MODEL])))


def _followers(data: ClientData) -> dict[int, tuple[Ints, Doubles]]:
    """For each item what was clicked next after it, and how often; within a client."""
    clicked = data.train[LABEL] > 0
    item = data.train["item"][clicked]
    owner = np.repeat(np.arange(data.clients), np.diff(data.offsets))[clicked]
    same = owner[1:] == owner[:-1]
    return successors(item[:-1][same], item[1:][same], data.sizes["item"])


def _rank(scores: Doubles, target: int) -> int:
    """How many are as good as the target, or better; ties and what is no number stand ahead."""
    return int(np.count_nonzero(~(scores < scores[target]))) - 1
