"""Tables over a module: names and fields checked, examples to rows and positions against loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn
from torch.func import functional_call

from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.bound_model import BoundModel, Derived, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.table import DenseTable, Given, LazyTable, Normal

ITEMS, CATEGORIES, USERS, WIDTH = 30, 5, 8, 3
CATEGORY_OF = (np.arange(ITEMS) * 7) % CATEGORIES


class Toy(nn.Module):
    """Items with a bias, their categories, users, and a linear layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4 * WIDTH, 1)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.bias = nn.Embedding(ITEMS, 1)
        self.categories = nn.Embedding(CATEGORIES, WIDTH)
        self.users = nn.Embedding(USERS, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history, kinds = batch["history"], batch["history_category"]  # (B, T)
        known = (history >= 0).unsqueeze(-1)
        seen = self.items(history.clamp(min=0)) + self.categories(kinds.clamp(min=0))  # (B, T, D)
        parts = (
            self.items(batch["item"]),
            self.categories(batch["category"]),
            self.users(batch["user"]),
            (seen * known).sum(1),
        )
        return (self.score(torch.cat(parts, -1)) + self.bias(batch["item"])).squeeze(-1)


def declared() -> dict[str, Any]:
    return {
        "items.weight": Table("item", "history"),
        "bias.weight": Table("item"),
        "categories.weight": Derived(
            "items.weight", CATEGORY_OF, {"category": "item", "history_category": "history"}
        ),
        "users.weight": Local("user"),
    }


def bind_toy(module: nn.Module | None = None) -> BoundModel:
    return Tables(declared()).bind(module or Toy())


def made(seed: int, n: int = 12, length: int = 4) -> Examples:
    rng = np.random.default_rng(seed)
    history = rng.integers(0, ITEMS, (n, length))
    history[np.arange(length) >= rng.integers(0, length + 1, n)[:, None]] = -1
    return Examples(
        {
            "user": rng.integers(0, USERS, n),
            "item": rng.integers(0, ITEMS, n),
            "history": history,
            "label": rng.integers(0, 2, n).astype(np.float32),
        }
    )


def some_rows(seed: int, size: int = ITEMS) -> np.ndarray:
    rng = np.random.default_rng([seed, 1])
    return np.sort(rng.permutation(size)[: rng.integers(0, size + 1)]).astype(np.uint64)


seeds = st.integers(0, 2**32)

# --- What is refused ------------------------------------------------------------------------------


def test_a_missing_parameter_is_named_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"no parameter 'item.weight'") as caught:
        Tables({"item.weight": Table("item")}).bind(Toy())
    assert caught.value.hint == "did you mean 'items.weight'?"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"score.bias": Table("item")}, "rows and columns"),
        ({"items.weight": Table()}, "no fields"),
        ({"items.weight": Local()}, "no fields"),
        ({"items.weight": Table("item", size=99)}, "size = 99"),
        ({"items.weight": Table("item", initial=Given())}, "given"),
        ({"items.weight": Table("item"), "users.weight": Table("item")}, "share a field"),
        ({"items.weight": Table("item"), "users.weight": Local("item")}, "and a Local table"),
        ({"categories.weight": Derived("items.weight", CATEGORY_OF, {"c": "item"})}, "not a table"),
        (
            {
                "users.weight": Local("user"),
                "categories.weight": Derived("users.weight", CATEGORY_OF, {"c": "user"}),
            },
            "not a table that is fetched",
        ),
        (
            {
                "items.weight": Table("item"),
                "categories.weight": Derived("items.weight", CATEGORY_OF, {"c": "itm"}),
            },
            "does not index",
        ),
        (
            {
                "items.weight": Table("item"),
                "categories.weight": Derived("items.weight", CATEGORY_OF, {"item": "item"}),
            },
            "indexes 'items.weight' already",
        ),
        (
            {
                "items.weight": Table("item"),
                "categories.weight": Derived("items.weight", CATEGORY_OF[1:], {"c": "item"}),
            },
            "left out",
        ),
        (
            {
                "items.weight": Table("item"),
                "categories.weight": Derived("items.weight", CATEGORY_OF, {"c": "item"}),
                "users.weight": Derived("items.weight", CATEGORY_OF + 1, {"c": "item"}),
            },
            "in two ways",
        ),
    ],
)
def test_tables_that_cannot_work_are_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tables(tables).bind(Toy())


def with_layer(layer: nn.Module) -> nn.Module:
    module = Toy()
    module.extra = layer
    return module


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), "statistics"),
        (nn.Linear(2, 2, dtype=torch.float64), "float64"),
        (nn.Embedding(9, 2, padding_idx=0), "padding_idx"),
        (nn.Embedding(9, 2, max_norm=1.0), "max_norm"),
        (nn.Embedding.from_pretrained(torch.ones(9, 2)), "frozen"),
    ],
)
def test_a_module_that_cannot_be_shared_is_refused(layer: nn.Module, message: str) -> None:
    tables: dict[str, Any] = declared()
    if isinstance(layer, nn.Embedding):
        tables["extra.weight"] = Table("brand")
    with pytest.raises(ConfigError, match=message) as caught:
        Tables(tables).bind(with_layer(layer))
    assert caught.value.hint


def test_normalisation_without_moving_statistics_is_fine() -> None:
    module = with_layer(
        nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False))
    )
    assert Tables(declared()).bind(module).dense_size == 4 * WIDTH + 1 + 8 + 8


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"itm": np.zeros(2, np.int64)}, "'item', which the examples do not", "did you mean 'itm'"),
        ({"item": np.zeros(2, np.float32)}, "is float32", "whole numbers"),
        ({"item": np.array([0, ITEMS])}, "row id 30 is outside", "the last is 29"),
    ],
)
def test_examples_that_do_not_fit_are_refused(
    fields: dict[str, np.ndarray], message: str, hint: str
) -> None:
    bound = Tables({"items.weight": Table("item")}).bind(Toy())
    with pytest.raises(ConfigError, match=message) as caught:
        bound.row_ids_of(Examples(fields))
    assert hint in (caught.value.hint or "")


# --- Parameters -----------------------------------------------------------------------------------


def test_tables_and_dense_part_share_out_the_module() -> None:
    module = Toy()
    bound = bind_toy(module)
    assert [(t.name, t.rows, t.width, t.derived_from, t.local) for t in bound.tables] == [
        ("items", ITEMS, WIDTH, None, False),
        ("bias", ITEMS, 1, "items", False),
        ("categories", CATEGORIES, WIDTH, "items", False),
        ("users", USERS, WIDTH, None, True),
    ]
    assert bound.dense == (("score.weight", (1, 4 * WIDTH)), ("score.bias", (1,)))
    whole = bound.dense_size + sum(t.rows * t.width for t in bound.tables)
    assert whole == sum(parameter.numel() for parameter in module.parameters())
    views = bound.unpack(torch.from_numpy(bound.pack(module)))
    for name, _ in bound.dense:
        assert_array_equal(views[name], module.get_parameter(name).detach())
    assert_array_equal(bound.initial("items"), module.items.weight.detach())
    named = bound.parameters(bound.pack(module), {t.name: t.name for t in bound.tables})
    assert list(named) == [n for n, _ in bound.dense] + [t.parameter for t in bound.tables]
    assert named["users.weight"] == "users"
    with pytest.raises(MisuseError):
        bound.unpack(torch.zeros(bound.dense_size + 1))


def test_the_first_rows_are_a_copy() -> None:
    bound = bind_toy()
    bound.initial("items")[:] = 7.0
    assert not (bound.initial("items") == 7.0).any()


def test_a_module_needs_no_tables_and_no_dense_part() -> None:
    bound = Tables({}).bind(nn.Linear(3, 1))
    assert bound.dense_size == 4
    examples = Examples({"x": np.zeros((2, 3), np.float32)})
    assert bound.row_ids_of(examples) == {} and len(bound.cut(examples, {})) == 2
    alone = nn.Embedding(3, 2)
    assert Tables({"weight": Table("item")}).bind(alone).pack(alone).shape == (0,)


def test_a_table_may_start_by_a_rule_and_be_larger_than_the_module() -> None:
    tables = Tables({"items.weight": Table("item", size=2_000_000_000, initial=Normal(0.1))})
    bound = tables.bind(Toy())
    table = bound.table("items", seed=3)
    assert isinstance(table, LazyTable) and table.size == 2_000_000_000
    assert isinstance(bind_toy().table("items"), DenseTable)
    far = Examples({"item": np.array([1_999_999_999, 5])})
    assert_array_equal(bound.row_ids_of(far)["items"], [5, 1_999_999_999])
    assert_array_equal(bound.positions(far, bound.row_ids_of(far))["item"], [1, 0])
    with pytest.raises(MisuseError):
        bound.initial("items")


# --- Examples -------------------------------------------------------------------------------------


def test_rows_are_the_distinct_ids_of_all_fields() -> None:
    examples = made(5)
    bound = bind_toy()
    wanted = sorted({*examples["item"].tolist(), *examples["history"].ravel().tolist()} - {-1})
    assert bound.row_ids_of(examples).keys() == {"items"}
    assert_array_equal(bound.row_ids_of(examples)["items"], wanted)
    assert bound.row_ids_of(examples)["items"].dtype == np.uint64
    assert_array_equal(bound.local_row_ids_of(examples)["users"], sorted(set(examples["user"])))
    rows = bound.all_row_ids_of(examples)
    assert_array_equal(rows["categories"], sorted({int(CATEGORY_OF[i]) for i in wanted}))
    assert_array_equal(rows["bias"], wanted)


def test_tables_of_one_field_follow_the_first_of_them() -> None:
    module = nn.ModuleDict({name: nn.Embedding(9, 2) for name in "abcd"})
    tables = Tables(
        {"a.weight": Table("x"), "b.weight": Table("z", "y"), "c.weight": Table("y", "x")}
    )
    bound = tables.bind(module)
    assert [table.derived_from for table in bound.tables] == [None, "a", "a"]
    examples = Examples({"x": np.array([1, 4]), "y": np.array([8, -1]), "z": np.array([4, 4])})
    assert_array_equal(bound.row_ids_of(examples)["a"], [1, 4, 8])
    maps = bound.derived_maps()
    assert maps.keys() == {"b", "c"}
    assert_array_equal(maps["b"].row_ids(np.array([1, 4, 8], np.uint64)), [1, 4, 8])
    batch = bound.positions(examples, bound.all_row_ids_of(examples))
    assert_array_equal(batch["y"], [2, -1])
    assert_array_equal(batch["z"], [1, 1])
    assert_array_equal(bound.involved(batch, "b", 3), [0, 2, 1])  # by its own fields only


@given(seeds)
def test_the_cut_follows_the_two_rules(seed: int) -> None:
    examples, trained = made(seed), some_rows(seed)
    kept = set(trained.tolist())
    wanted: list[tuple[int, list[int]]] = []
    for item, history in zip(examples["item"], examples["history"].tolist(), strict=True):
        left = [i if i in kept else -1 for i in history]
        had, has = any(i >= 0 for i in history), any(i >= 0 for i in left)
        if int(item) in kept and (has or not had):
            wanted.append((int(item), left))
    cut = bind_toy().cut(examples, {"items": trained})
    assert len(cut["label"]) == len(cut) == len(wanted)
    assert cut["item"].tolist() == [item for item, _ in wanted]
    assert cut["history"].tolist() == [left for _, left in wanted]


def test_the_cut_changes_nothing_when_all_is_trained() -> None:
    examples = made(1)
    before = {name: column.copy() for name, column in examples.fields.items()}
    bound = bind_toy()
    cut = bound.cut(examples, bound.row_ids_of(examples))
    for name, column in before.items():
        assert_array_equal(cut[name], column)
        assert_array_equal(examples[name], column)
    with pytest.raises(MisuseError, match="missing"):
        bound.cut(examples, {})


def test_a_single_id_that_is_none_stays() -> None:
    bound = Tables({"items.weight": Table("item")}).bind(Toy())
    examples = Examples({"item": np.array([-1, 3, 4])})
    assert bound.cut(examples, {"items": np.array([4], np.uint64)})["item"].tolist() == [-1, 4]


@given(seeds)
def test_positions_point_back_at_the_ids(seed: int) -> None:
    examples, bound = made(seed), bind_toy()
    ids = bound.all_row_ids_of(examples)
    # More rows at hand than needed, as a client has them that fetched cover.
    ids["items"] = np.union1d(ids["items"], some_rows(seed)).astype(np.uint64)
    del ids["categories"], ids["bias"]
    batch = bound.positions(examples, ids)
    kinds = np.array(sorted({int(CATEGORY_OF[int(i)]) for i in ids["items"]}))
    for own, source in (("category", "item"), ("history_category", "history")):
        known = examples[source] >= 0
        assert_array_equal(batch[source][~known], -1)
        assert_array_equal(batch[own][~known], -1)
        assert_array_equal(ids["items"][batch[source][known]], examples[source][known])
        assert_array_equal(kinds[batch[own][known]], CATEGORY_OF[examples[source][known]])
    assert_array_equal(ids["users"][batch["user"]], examples["user"])
    assert batch["label"] is examples["label"]
    assert {"category", "history_category"} <= batch.keys()


def test_a_row_that_is_not_at_hand_is_a_bug_of_the_caller() -> None:
    bound = Tables({"items.weight": Table("item")}).bind(Toy())
    for rows in ([], [1, 3], [7]):
        with pytest.raises(MisuseError, match="not at hand"):
            bound.positions(Examples({"item": np.array([2])}), {"items": np.array(rows, np.uint64)})


@given(seeds)
@settings(max_examples=30)
def test_a_module_gives_the_same_on_a_submodel(seed: int) -> None:
    torch.manual_seed(0)
    module = Toy()
    bound, examples = bind_toy(module), made(seed)
    everything = {t.name: np.arange(t.rows, dtype=np.uint64) for t in bound.tables}
    outputs = []
    for ids in (everything, bound.all_row_ids_of(examples)):
        rows = {t.parameter: torch.tensor(bound.initial(t.name)[ids[t.name]]) for t in bound.tables}
        batch = {k: torch.tensor(v) for k, v in bound.positions(examples, ids).items()}
        outputs.append(functional_call(module, rows, (batch,)).detach())
    assert_allclose(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)


@given(seeds)
def test_an_example_counts_once_for_each_row_it_involves(seed: int) -> None:
    examples, bound = made(seed), bind_toy()
    ids = bound.all_row_ids_of(examples)
    batch = bound.positions(examples, ids)
    for table in bound.tables:
        k = ids[table.name].size
        counts = [0] * k
        for n in range(len(examples)):
            touched: set[int] = set()
            for own in table.fields:
                touched |= set(np.atleast_1d(batch[own][n]).tolist())
            for row in touched - {-1}:
                counts[row] += 1
        assert bound.involved(batch, table.name, k).tolist() == counts
