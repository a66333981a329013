"""Metric: how good a model's outputs are, in one place or from statistics summed over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.sequences import SequenceData
from tessera.errors import ConfigError, MisuseError
from tessera.learning.rankers import POPULARITY, SUCCESSOR, predictors
from tessera.learning.rankers import ranks as item_ranks
from tessera.learning.scores import ClickStatistics, Numbers, auc, log_loss

Statistics: TypeAlias = npt.NDArray[np.int64]
"""Sufficient statistics of a metric: whole numbers that add up over clients."""

Few: TypeAlias = npt.NDArray[np.float64]
NOISY_BINS: Final = 10
"""Bins of the predicted probability where their sums have noise: each has as much of it."""

PRIOR: Final = 5.0
"""A mean starts from this many examples of the overall mean."""

ERROR_UNIT: Final = 2.0**-10


class Metric(Protocol):
    """How good outputs are, against the labels of their examples."""

    @property
    def name(self) -> str:
        """The name of the one figure that a run reports."""

    @property
    def lower_is_better(self) -> bool:
        """Whether that figure is an error."""

    def measures(self, outputs: Numbers, examples: Examples) -> dict[str, float]:
        """Every figure by name, the metric itself first."""

    def statistics(self, outputs: Numbers, examples: Examples) -> Statistics:
        """Whole numbers that add up over clients, equally many for everybody."""

    def from_statistics(self, total: Statistics) -> float:
        """The metric, from a sum of statistics."""

    def few(self, outputs: Numbers, examples: Examples) -> Few:
        """The same in as few numbers as the metric needs, for sums with noise.

        An example adds about 1 to some of them; a client's are clipped together afterwards.
        """

    def from_few(self, total: Few) -> float:
        """The metric, from a noisy sum of these; any number may be negative."""

    def baselines(self, data: ClientData) -> dict[str, float]:
        """The metric, on the test part, of predictors that need no model."""

    def check(self, data: ClientData) -> None:
        """A `ConfigError` where the test part cannot tell good from bad."""


class ClickMetric:
    """Logits against clicks: AUC."""

    name = "AUC"
    lower_is_better = False

    def measures(self, outputs: Numbers, examples: Examples) -> dict[str, float]:
        labels = examples[LABEL]
        return {"AUC": auc(outputs, labels), "log loss": log_loss(outputs, labels)}

    def statistics(self, outputs: Numbers, examples: Examples) -> Statistics:
        return ClickStatistics.count(outputs, examples[LABEL]).vector()

    def from_statistics(self, total: Statistics) -> float:
        return ClickStatistics.of(total).auc

    def few(self, outputs: Numbers, examples: Examples) -> Few:
        found = ClickStatistics.count(outputs, examples[LABEL], bins=NOISY_BINS)
        return np.concatenate([found.misses, found.hits]).astype(np.float64)

    def from_few(self, total: Few) -> float:
        misses, hits = np.split(np.maximum(total, 0.0), 2)
        pairs = misses.sum() * hits.sum()
        below = np.cumsum(misses) - misses / 2.0
        return float((hits * below).sum() / pairs) if pairs else float("nan")

    def baselines(self, data: ClientData) -> dict[str, float]:
        return {name: auc(scores, data.test[LABEL]) for name, scores in averages(data).items()}

    def check(self, data: ClientData) -> None:
        labels = data.test[LABEL] if LABEL in data.test.fields else None
        if labels is not None and len(np.unique(labels > 0.5)) < 2:
            raise ConfigError(
                f"task {data.name!r}: its test part has no clicks, or nothing but clicks: no AUC",
                hint="check the labels and their threshold; without labels, negatives are drawn",
            )


@dataclass(frozen=True, slots=True)
class RatingMetric:
    """Predicted ratings, cut to the scale, against true ones: the root of the mean squared error.

    Over all ratings and not by user first, as most published work has it (Yang et al.
    2021, section 4.1).
    """

    low: float
    high: float
    name: str = "RMSE"
    lower_is_better: bool = True

    def errors(self, outputs: Numbers, examples: Examples) -> npt.NDArray[np.float64]:
        cut = np.clip(np.asarray(outputs, np.float64), self.low, self.high)
        return np.asarray(cut - examples[LABEL])

    def measures(self, outputs: Numbers, examples: Examples) -> dict[str, float]:
        errors = self.errors(outputs, examples)
        if not errors.size:
            return {"RMSE": float("nan"), "MAE": float("nan")}
        return {
            "RMSE": float(np.sqrt(np.mean(errors * errors))),
            "MAE": float(np.mean(np.abs(errors))),
        }

    def statistics(self, outputs: Numbers, examples: Examples) -> Statistics:
        """The number of ratings, their squared and their absolute error in units of 2^-10."""
        errors = self.errors(outputs, examples)
        if np.isnan(errors).any():
            raise MisuseError("metrics: a rating is not a number")
        sums = (np.sum(errors * errors), np.sum(np.abs(errors)))
        return np.array([errors.size, *(round(float(s) / ERROR_UNIT) for s in sums)], np.int64)

    def from_statistics(self, total: Statistics) -> float:
        n, squares, _ = (int(value) for value in total)
        return float(np.sqrt(squares * ERROR_UNIT / n)) if n else float("nan")

    def few(self, outputs: Numbers, examples: Examples) -> Few:
        errors = self.errors(outputs, examples)
        return np.array([errors.size, float(np.sum(errors * errors)) / self._usual])

    def from_few(self, total: Few) -> float:
        n, squares = (float(value) for value in total)
        if n <= 0.0 or squares <= 0.0:  # nothing but noise
            return float("nan")
        return float(np.sqrt(squares * self._usual / n))

    @property
    def _usual(self) -> float:
        """A squared error about as large as many are: a quarter of the scale, squared."""
        return ((self.high - self.low) / 4.0) ** 2

    def baselines(self, data: ClientData) -> dict[str, float]:
        return {
            name: self.measures(guess, data.test)[self.name]
            for name, guess in averages(data).items()
        }

    def check(self, data: ClientData) -> None:
        if not len(data.test):
            raise ConfigError(
                f"task {data.name!r}: no test part, so no {self.name}",
                hint="use a larger test_share",
            )


@dataclass(frozen=True, slots=True)
class ClassMetric:
    """Logits (N, classes) against the right class: accuracy, the share of examples whose largest
    logit is that of their class."""

    classes: int
    name: str = "accuracy"
    lower_is_better: bool = False

    def right(self, outputs: Numbers, examples: Examples) -> npt.NDArray[np.bool_]:
        outputs = np.asarray(outputs, np.float64)
        if outputs.shape != (len(examples), self.classes):
            raise ConfigError(
                f"a model of {self.classes} classes gave {outputs.shape} for {len(examples)} "
                "examples",
                hint="it returns one logit per example and class",
            )
        if np.isnan(outputs).any():
            raise MisuseError("metrics: a logit is not a number")
        return np.asarray(outputs.argmax(axis=1) == examples[LABEL])

    def measures(self, outputs: Numbers, examples: Examples) -> dict[str, float]:
        right = self.right(outputs, examples)
        return {"accuracy": float(right.mean()) if right.size else float("nan")}

    def statistics(self, outputs: Numbers, examples: Examples) -> Statistics:
        """The number of examples, and how many of them were right."""
        if not len(examples):
            return np.zeros(2, np.int64)
        right = self.right(outputs, examples)
        return np.array([right.size, np.count_nonzero(right)], np.int64)

    def from_statistics(self, total: Statistics) -> float:
        n, right = (int(value) for value in total)
        return right / n if n else float("nan")

    def few(self, outputs: Numbers, examples: Examples) -> Few:
        return self.statistics(outputs, examples).astype(np.float64)

    def from_few(self, total: Few) -> float:
        return share_of(total)

    def baselines(self, data: ClientData) -> dict[str, float]:
        """Who always says the class that most training examples have."""
        most = int(np.bincount(data.train[LABEL], minlength=self.classes).argmax())
        return {"largest class": float(np.mean(data.test[LABEL] == most))}

    def check(self, data: ClientData) -> None:
        labels = np.concatenate([data.train[LABEL], data.test[LABEL]])
        if labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < self.classes)).all():
            raise ConfigError(
                f"task {data.name!r}: labels that are not classes 0 to {self.classes - 1}",
                hint="a label is the number of a class, as int64",
            )
        if not len(data.test):
            raise ConfigError(
                f"task {data.name!r}: no test part, so no {self.name}", hint="hold some out"
            )


def share_of(total: Few) -> float:
    """The second of two noisy numbers as a share of the first, within 0 and 1."""
    n, part = (float(value) for value in total)
    return float(np.clip(part / n, 0.0, 1.0)) if n > 0.0 else float("nan")


def averages(data: ClientData) -> dict[str, npt.NDArray[np.float64]]:
    """For each test example what its user's and its item's mean say, and both together.

    Means are of the training part, drawn towards the overall one. A user is a client here.
    """
    if "item" not in data.train.fields:
        return {}
    labels = data.train[LABEL].astype(np.float64)
    overall = float(labels.mean())

    def mean_of(group: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float64]:
        total = np.bincount(group, weights=labels, minlength=size)
        return np.asarray((total + PRIOR * overall) / (np.bincount(group, minlength=size) + PRIOR))

    clients = np.arange(data.clients)
    by_user = mean_of(np.repeat(clients, np.diff(data.offsets)), data.clients)
    user = by_user[np.repeat(clients, np.diff(data.test_offsets))]
    known, group = np.unique(data.train["item"], return_inverse=True)
    by_item = mean_of(group.reshape(-1), known.size)
    at = np.minimum(np.searchsorted(known, data.test["item"]), known.size - 1)
    item = np.where(known[at] == data.test["item"], by_item[at], overall)
    return {"user mean": user, "item mean": item, "sum": user + item - overall}


# --- ranking --------------------------------------------------------------------------------------
#
# RankMetric: where the right row stands among all rows of a table, and what that is worth.
#
# Full ranking: every row is a candidate, none is sampled (Krichene and Rendle 2020 show what
# samples do to such figures). One right row per example, so that recall and hit rate at k are the
# same: the share of examples whose row is among the first k.
#
# Two predictors need no model: what is most frequent in the training part, and what most often
# followed the last id there (a bigram; for items the successor of the last one).


Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNIT: Final = 2.0**-10
"""Gains and logarithms are summed over clients in these."""


def hit_rate(ranks: Doubles, k: int) -> float:
    """The share of examples whose row is among the first k; recall at k, where one row is right."""
    return float(np.mean(ranks < k)) if ranks.size else float("nan")


def gains(ranks: Doubles, k: int) -> Doubles:
    """What each rank is worth in NDCG at k: 1 / log2(rank + 2) among the first k, else 0."""
    return np.where(ranks < k, 1.0 / np.log2(ranks + 2.0), 0.0)


def ndcg(ranks: Doubles, k: int) -> float:
    """Jarvelin and Kekalainen 2002 with one right row, whose best gain is 1."""
    return float(np.mean(gains(ranks, k))) if ranks.size else float("nan")


@dataclass(frozen=True, slots=True)
class RankMetric:
    """Ranks and log-probabilities (N, 2), as a softmax gives them, against nothing else.

    `target` is the field of the right row among `rows`, `sequence` that of the ids before it, the
    latest first, if there are any. The one figure that a run reports is the share of targets among
    the first `top`.
    """

    rows: int
    target: str
    sequence: str | None = None
    top: int = 3
    lower_is_better: bool = False

    @property
    def name(self) -> str:
        return f"top-{self.top}"

    def measures(self, outputs: Numbers, examples: Examples) -> dict[str, float]:
        """Hit rates (recall) at `top`, 1 and 10, NDCG at 10, and perplexity."""
        ranks, logs = self._columns(outputs, examples)
        return {
            self.name: hit_rate(ranks, self.top),
            **{f"top-{k}": hit_rate(ranks, k) for k in (1, 10) if k != self.top},
            "NDCG@10": ndcg(ranks, 10),
            "perplexity": float(np.exp(-logs.mean())) if logs.size else float("nan"),
        }

    def statistics(self, outputs: Numbers, examples: Examples) -> Statistics:
        """Examples, hits, and the logarithms' sum in units of 2^-10."""
        ranks, logs = self._columns(outputs, examples)
        sums = round(float(-logs.sum()) / UNIT) if logs.size else 0
        return np.array([ranks.size, np.count_nonzero(ranks < self.top), sums], np.int64)

    def from_statistics(self, total: Statistics) -> float:
        n, hits, _ = (int(value) for value in total)
        return hits / n if n else float("nan")

    def few(self, outputs: Numbers, examples: Examples) -> Few:
        return self.statistics(outputs, examples)[:2].astype(np.float64)

    def from_few(self, total: Few) -> float:
        return share_of(total)

    def baselines(self, data: ClientData) -> dict[str, float]:
        return {name: found[self.name] for name, found in self.baseline_measures(data).items()}

    def baseline_measures(self, data: ClientData) -> dict[str, dict[str, float]]:
        """All figures of the predictors that need no model."""
        return {
            name: self.measures(outputs, data.test)
            for name, outputs in trivial_ranks(
                data, rows=self.rows, target=self.target, sequence=self.sequence
            ).items()
        }

    def check(self, data: ClientData) -> None:
        for part, what in ((data.train, "training"), (data.test, "test")):
            for field in filter(None, (self.target, self.sequence)):
                if field not in part.fields:
                    raise ConfigError(
                        f"task {data.name!r}: its {what} part has no field {field!r}, which "
                        f"{self.name} is about",
                        hint=f"its fields are {', '.join(part.fields)}",
                    )
        if not len(data.test):
            raise ConfigError(
                f"task {data.name!r}: no test part, so no {self.name}", hint="hold some out"
            )

    def _columns(self, outputs: Numbers, examples: Examples) -> tuple[Doubles, Doubles]:
        found = np.asarray(outputs, np.float64)
        if not len(examples):
            return np.zeros(0), np.zeros(0)
        if found.shape != (len(examples), 2):
            raise ConfigError(
                f"{self.name} takes ranks and log-probabilities, and got {found.shape} for "
                f"{len(examples)} examples",
                hint="it goes with loss=tessera.Softmax(...)",
            )
        if np.isnan(found[:, 1]).any():
            raise MisuseError("metrics: a log-probability is not a number")
        return found[:, 0], found[:, 1]


class NextMetric(RankMetric):
    """Where the item that came next stands among all that its user does not have: NDCG at 10.

    Outputs are as of `RankMetric`. Predictors that need no model are in `learning/rankers.py`.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        return "NDCG@10"

    def measures(self, outputs: Numbers, examples: Examples) -> dict[str, float]:
        return next_measures(self._columns(outputs, examples)[0])

    def statistics(self, outputs: Numbers, examples: Examples) -> Statistics:
        """Examples, and the sum of gains in units of 2^-10."""
        ranks, _ = self._columns(outputs, examples)
        return np.array([ranks.size, round(float(gains(ranks, 10).sum()) / UNIT)], np.int64)

    def from_statistics(self, total: Statistics) -> float:
        n, found = (int(value) for value in total)
        return found * UNIT / n if n else float("nan")

    def few(self, outputs: Numbers, examples: Examples) -> Few:
        ranks, _ = self._columns(outputs, examples)
        return np.array([ranks.size, float(gains(ranks, 10).sum())])

    def check(self, data: ClientData) -> None:
        if not isinstance(data, SequenceData):
            raise ConfigError(
                f"task {data.name!r}: {self.name} is about what came next, and the data says not "
                "what came before it",
                hint="tessera.data.sequences.sequence_data makes such data",
            )

    def baseline_measures(self, data: ClientData) -> dict[str, dict[str, float]]:
        assert isinstance(data, SequenceData)
        made = predictors(data.events, self.rows)
        return {name: next_measures(item_ranks(make(), data.test)) for name, make in made.items()}


def next_measures(found: Doubles) -> dict[str, float]:
    """NDCG at 10, recall at 10 and at 20, of ranks."""
    return {
        "NDCG@10": ndcg(found, 10),
        "recall@10": hit_rate(found, 10),
        "recall@20": hit_rate(found, 20),
    }


def trivial_ranks(
    data: ClientData, *, rows: int, target: str, sequence: str | None
) -> Mapping[str, Doubles]:
    """Ranks and log-probabilities (N, 2) of the test part, by predictors that need no model.

    The most frequent: shares of the training part, with one more of each row. The successor of the
    last: shares of what followed the same id, mixed with those as Witten and Bell 1991 do (method
    C): an id that had many different successors counts less.
    """
    train_next, test_next = data.train[target], data.test[target]
    times = np.bincount(train_next[train_next >= 0], minlength=rows) + 1.0
    share = times / times.sum()
    order = np.sort(share)
    unknown = test_next < 0
    own = share[np.maximum(test_next, 0)]
    popular = np.stack([_place(order, own) - 1.0, np.log(own)], 1)
    popular[unknown] = (rows, -np.log(rows))
    if sequence is None:
        return {POPULARITY: popular}
    following = popular.copy()
    train_last, test_last = data.train[sequence][:, 0], data.test[sequence][:, 0]
    counts = successors(train_last, train_next, rows)
    by_last = np.argsort(test_last, kind="stable")
    bounds = np.flatnonzero(np.diff(test_last[by_last], prepend=-2))
    for begin, end in zip(bounds, [*bounds[1:], len(by_last)], strict=True):
        which = by_last[begin:end]
        last = int(test_last[which[0]])
        if last < 0 or last not in counts:
            continue
        after, often = counts[last]
        trust = often.sum() / (often.sum() + after.size)
        mixed = trust * often / often.sum() + (1.0 - trust) * share[after]
        wanted = np.maximum(test_next[which], 0)
        at = np.minimum(np.searchsorted(after, wanted), after.size - 1)
        value = np.where(after[at] == wanted, mixed[at], (1.0 - trust) * share[wanted])
        # Those who followed by their own value, all others by what is left of their share.
        ahead = (mixed[None] >= value[:, None]).sum(1)
        others = _place(order, value / (1.0 - trust))
        others -= (share[after][None] >= (value / (1.0 - trust))[:, None]).sum(1)
        following[which] = np.stack([ahead + others - 1, np.log(value)], 1)
    following[unknown] = (rows, -np.log(rows))
    return {POPULARITY: popular, SUCCESSOR: following}


def _place(ascending: Doubles, values: Doubles) -> Ints:
    """How many of the ascending numbers are as large as each value, or larger."""
    return np.asarray(ascending.size - np.searchsorted(ascending, values * (1 - 1e-12)))


def successors(last: Ints, following: Ints, rows: int) -> dict[int, tuple[Ints, Doubles]]:
    """For each id what followed it, ascending, and how often."""
    there = (last >= 0) & (following >= 0)
    pairs, often = np.unique(last[there] * rows + following[there], return_counts=True)
    first, after = pairs // rows, pairs % rows
    bounds: Sequence[int] = np.flatnonzero(np.diff(first, prepend=-1)).tolist()
    ends = [*bounds[1:], len(pairs)]
    return {
        int(first[begin]): (after[begin:end], often[begin:end].astype(np.float64))
        for begin, end in zip(bounds, ends, strict=True)
    }
