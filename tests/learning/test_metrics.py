"""AUC against all pairs and against Mann-Whitney, sums against the scores they came from."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.data.examples import ClientData, Examples
from tessera.errors import MisuseError
from tessera.learning.bound_model import Derived, Local, Table
from tessera.learning.metrics import ClickMetric
from tessera.learning.module_tables import Tables
from tessera.learning.scores import LOSS_UNIT, ClickStatistics, auc, evaluate, log_loss
from tessera.learning.tables.table import LazyTable, Normal, TableSpec

torch.set_num_threads(1)

scored = st.lists(
    st.tuples(st.sampled_from([-30.0, -1.5, -0.2, 0.0, 0.2, 0.21, 4.0, 900.0]), st.booleans()),
    min_size=1,
    max_size=40,
)


def by_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    wins = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high, low in product(scores[labels == 1], scores[labels == 0])
    ]
    return float(np.mean(wins)) if wins else float("nan")


@given(scored)
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[float, bool]]) -> None:
    scores, labels = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    assert auc(scores, labels) == pytest.approx(by_pairs(scores, labels), nan_ok=True)


def test_auc_agrees_with_mann_whitney() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 3000)
    scores = np.round(rng.normal(size=3000) + labels, 1)
    theirs = stats.mannwhitneyu(scores[labels == 1], scores[labels == 0]).statistic
    n = np.count_nonzero(labels)
    assert auc(scores, labels) == pytest.approx(theirs / (n * (3000 - n)), abs=1e-12)


def test_auc_needs_both_kinds_and_numbers() -> None:
    assert np.isnan(auc(np.array([1.0, 2.0]), np.array([1, 1])))
    assert np.isnan(auc(np.empty(0), np.empty(0)))
    assert np.isnan(auc(np.array([1.0, np.nan]), np.array([0, 1])))


def test_log_loss_is_that_of_torch_and_survives_large_scores() -> None:
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=50) * 5, rng.integers(0, 2, 50).astype(np.float64)
    theirs = F.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(labels))
    assert log_loss(logits, labels) == pytest.approx(float(theirs))
    assert log_loss(np.array([-1e4, 1e4]), np.array([1, 0])) == pytest.approx(1e4)
    assert np.isnan(log_loss(np.empty(0), np.empty(0)))


# --- Baselines ------------------------------------------------------------------------------------


def clicks(rows: list[tuple[int, int, int]]) -> Examples:
    user, item, label = (np.array(column) for column in zip(*rows, strict=True))
    return Examples({"user": user, "item": item, "label": label.astype(np.float32)})


def test_trivial_predictors_are_smoothed_means_of_the_training_part() -> None:
    rng = np.random.default_rng(7)
    sizes, test_sizes = rng.integers(0, 9, 20), rng.integers(0, 5, 20)

    def part(counts: np.ndarray, items: int) -> list[tuple[int, int, int]]:
        return [
            (u, int(rng.integers(-1, items)), int(rng.integers(2)))
            for u, k in enumerate(counts)
            for _ in range(k)
        ]

    train, test = part(sizes, 8), part(test_sizes, 12)  # items 8 to 11 are new in the test
    data = ClientData(
        name="made",
        train=clicks(train),
        offsets=np.concatenate(([0], np.cumsum(sizes))),
        test=clicks(test),
        test_offsets=np.concatenate(([0], np.cumsum(test_sizes))),
        sizes={"user": 20, "item": 12},
    )
    overall = np.mean([label for _, _, label in train])

    def mean(which: int, value: int) -> float:
        labels = [row[2] for row in train if row[which] == value]
        return float((sum(labels) + 5 * overall) / (len(labels) + 5))

    truth = np.array([label for _, _, label in test])
    user = np.array([mean(0, u) for u, _, _ in test])
    item = np.array([mean(1, i) for _, i, _ in test])
    assert ClickMetric().baselines(data) == {
        "user mean": pytest.approx(by_pairs(user.round(12), truth)),
        "item mean": pytest.approx(by_pairs(item.round(12), truth)),
        "sum": pytest.approx(by_pairs((user + item).round(12), truth), abs=0.02),
    }


# --- Sufficient statistics ------------------------------------------------------------------------


@given(scored, st.integers(1, 30))
def test_the_bounds_hold_the_true_auc(pairs: list[tuple[float, bool]], bins: int) -> None:
    scores, labels = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    one = ClickStatistics.count(scores, labels, bins=bins)
    truth = by_pairs(scores, labels)
    low, high = one.auc_bounds()
    if np.isnan(truth):
        assert np.isnan(low) and np.isnan(high)
    else:
        assert low - 1e-12 <= truth <= high + 1e-12


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(max_examples=50)
def test_statistics_of_clients_add_up_to_those_of_all(seed: int, clients: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 20, clients)
    scores = [(rng.normal(size=k) * 3).astype(np.float32) for k in sizes]
    labels = [rng.integers(0, 2, k).astype(np.float32) for k in sizes]
    statistics = [ClickStatistics.count(s, y, bins=20) for s, y in zip(scores, labels, strict=True)]
    total = ClickStatistics.of(np.sum([one.vector() for one in statistics], axis=0))
    s, y = np.concatenate(scores), np.concatenate(labels)
    whole = ClickStatistics.count(s, y, bins=20)
    assert total.n == len(y) and total.clicks == int(y.sum())
    assert total.correct == sum((a > 0) == (b == 1) for a, b in zip(s, y, strict=True))
    assert_array_equal(total.misses, whole.misses)
    assert_array_equal(total.hits, whole.hits)
    assert int(total.misses.sum()) == total.n - total.clicks
    assert abs(total.loss - whole.loss) <= clients  # each client rounds once
    if len(y):
        assert total.mean_loss == pytest.approx(log_loss(s, y), abs=clients * LOSS_UNIT / len(y))
        assert total.accuracy == total.correct / total.n
    chained = statistics[0]
    for one in statistics[1:]:
        chained = chained + one
    assert_array_equal(chained.vector(), total.vector())


def test_many_bins_give_auc_closely() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 4000)
    scores = rng.normal(size=4000) + labels
    one = ClickStatistics.count(scores, labels, bins=200)
    low, high = one.auc_bounds()
    assert high - low < 0.02
    assert one.auc == pytest.approx(auc(scores, labels), abs=0.002)


def test_statistics_refuse_invalid_vectors() -> None:
    with pytest.raises(MisuseError, match="not a number"):
        ClickStatistics.count(np.array([np.nan]), np.array([1.0]))
    for vector in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, -1, 0]):
        with pytest.raises(MisuseError, match="not a sum"):
            ClickStatistics.of(np.array(vector))


def test_one_example_cannot_make_a_sum_large() -> None:
    one = ClickStatistics.count(np.array([1e30, -np.inf]), np.array([0, 1]))
    assert one.loss == 2 * 32 * 1024


# --- Scores ---------------------------------------------------------------------------------------

ITEMS, KINDS, USERS = 40, 6, 5
KIND_OF = np.arange(ITEMS) % KINDS


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 2)
        self.kinds = nn.Embedding(KINDS, 2)
        self.users = nn.Embedding(USERS, 2)
        self.score = nn.Linear(6, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history = batch["history"]
        seen = self.items(history.clamp(min=0)) * (history >= 0).unsqueeze(-1)
        parts = (self.kinds(batch["kind"]), self.users(batch["user"]), seen.sum(1))
        return self.score(self.drop(torch.cat(parts, -1))).squeeze(-1)


def toy() -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Toy()


TABLES = Tables(
    {
        "items.weight": Table("item", "history"),
        "kinds.weight": Derived("items.weight", KIND_OF, {"kind": "item"}),
        "users.weight": Local("user"),
    }
)


def a_test_set(n: int) -> Examples:
    rng = np.random.default_rng(3)
    return Examples(
        {
            "user": rng.integers(0, USERS, n),
            "item": rng.integers(0, ITEMS, n),
            "history": rng.integers(-1, ITEMS, (n, 3)),
        }
    )


@pytest.mark.parametrize("batch", [1, 7, 4096])
def test_scores_are_those_of_the_whole_module(batch: int) -> None:
    theirs, examples = toy(), a_test_set(20)
    fields = {name: torch.tensor(column) for name, column in examples.fields.items()}
    fields["kind"] = torch.tensor(KIND_OF)[fields["item"]]
    with torch.no_grad():
        wanted = theirs.eval()(fields).numpy()
    ours = toy()
    with torch.no_grad():
        for parameter in ours.parameters():  # its own values must not matter
            parameter.zero_()
    state = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    state["items.weight"].flags.writeable = False
    scores = evaluate(ours, TABLES.bind(ours), state, examples, batch=batch)
    assert scores.dtype == np.float32 and scores.shape == (20,)
    assert_allclose(scores, wanted, rtol=1e-5, atol=1e-6)
    assert ours.training


def test_of_a_large_table_only_touched_rows_are_read() -> None:
    module = toy()
    tables = dict(TABLES.tables)
    size = 2_000_000_000
    tables["items.weight"] = Table("item", "history", size=size, initial=Normal(0.1))
    tables["kinds.weight"] = Derived("items.weight", lambda ids: ids % KINDS, {"kind": "item"})
    bound = Tables(tables).bind(module)
    state = {name: value.detach().numpy() for name, value in module.named_parameters()}
    state["items.weight"] = LazyTable(
        TableSpec(name="items", size=size, width=2, initial=Normal(1))
    )
    examples = a_test_set(9).with_field("item", np.arange(9) + size - 9)
    scores = evaluate(module, bound, state, examples)
    assert np.isfinite(scores).all() and scores.std() > 0


def test_an_empty_test_set_and_a_missing_parameter() -> None:
    module = toy()
    bound = TABLES.bind(module)
    state = {name: value.detach().numpy() for name, value in module.named_parameters()}
    assert evaluate(module, bound, state, a_test_set(0)).shape == (0,)
    del state["kinds.weight"]
    with pytest.raises(MisuseError, match=r"'kinds.weight' is missing"):
        evaluate(module, bound, state, a_test_set(2))
