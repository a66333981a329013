"""A saved model predicts as the trained one did, and a folder that is not one is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from tessera.data.examples import Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning import saved
from tessera.learning.bound_model import Derived, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.predictor import Predictor
from tessera.learning.saved import ABOUT, MAPS, STATE, load, save, state_of
from tessera.learning.scores import evaluate
from tessera.learning.tables.table import Normal

ITEMS, KINDS, USERS, WIDTH = 30, 4, 5, 3
KIND_OF = np.arange(ITEMS) % KINDS


class Toy(nn.Module):
    """An embedding and a linear layer, with the mean of a history and a number beside it."""

    def __init__(self, items: int = ITEMS, *, kinds: bool = True, users: bool = True) -> None:
        super().__init__()
        self.items = nn.Embedding(items, WIDTH)
        if kinds:
            self.kinds = nn.Embedding(KINDS, WIDTH)
        if users:
            self.users = nn.Embedding(USERS, WIDTH)
        self.out = nn.Linear(WIDTH * (2 + kinds + users) + 1, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        there = batch["history"].ge(0).unsqueeze(-1)
        past = (self.items(batch["history"].clamp(min=0)) * there).sum(1)
        parts = [self.items(batch["item"]), past, batch["price"].unsqueeze(-1)]
        if hasattr(self, "kinds"):
            parts.append(self.kinds(batch["kind"]))
        if hasattr(self, "users"):
            parts.append(self.users(batch["user"]))
        found: Tensor = self.out(torch.cat(parts, -1)).squeeze(-1)
        return found


def tables_of(module: Toy) -> Tables:
    named: dict[str, Table | Derived | Local] = {"items.weight": Table("item", "history")}
    if hasattr(module, "kinds"):
        named["kinds.weight"] = Derived("items.weight", KIND_OF, {"kind": "item"})
    if hasattr(module, "users"):
        named["users.weight"] = Local("user")
    return Tables(named)


def examples(n: int = 40, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    history = rng.integers(0, ITEMS, (n, 4))
    history[np.arange(4)[None, :] >= rng.integers(0, 5, n)[:, None]] = -1
    return Examples(
        {
            "user": rng.integers(0, USERS, n),
            "item": rng.integers(0, ITEMS, n),
            "history": history,
            "price": rng.normal(size=n).astype(np.float32),
            "label": rng.integers(0, 2, n).astype(np.float32),
        }
    )


def values_of(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def saved_toy(folder: Path, module: Toy, **settings: Any) -> Path:
    given: dict[str, Any] = {
        "parameters": values_of(module),
        "tables": tables_of(module),
        "architecture": None,
        "about": {"task": {"name": "toy"}},
        "examples": examples(),
    }
    return save(folder, **given | settings)


@pytest.fixture
def module() -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Toy()


@pytest.fixture
def folder(tmp_path: Path, module: Toy) -> Path:
    return saved_toy(tmp_path / "model", module)


@pytest.fixture
def model(folder: Path) -> Predictor:
    return load(folder, Toy())


def columns(part: Examples, *left_out: str) -> dict[str, Any]:
    return {n: c for n, c in part.fields.items() if n not in {"label", *left_out}}


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda about: None) -> None:
    """Change about.json, with digests that fit the files again: what somebody who means it does."""
    about = json.loads((folder / ABOUT).read_text())
    for name in (STATE, MAPS):
        about["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    change(about)
    (folder / ABOUT).write_text(json.dumps(about))


# --- the round trip -------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [True, False])
@pytest.mark.parametrize("users", [True, False])
def test_a_saved_model_scores_as_the_trained_one_to_the_bit(
    tmp_path: Path, kinds: bool, users: bool
) -> None:
    trained, part = Toy(kinds=kinds, users=users), examples()
    expected = evaluate(trained, tables_of(trained).bind(trained), values_of(trained), part)
    folder = saved_toy(tmp_path / "model", trained)
    model = load(folder, Toy(kinds=kinds, users=users))
    np.testing.assert_array_equal(model.scores(columns(part)), expected)
    chances = model.predict(columns(part))
    assert chances.dtype == np.float32 and chances.shape == (40,)
    sigmoid = 1.0 / (1.0 + np.exp(-expected.astype(np.float64)))
    np.testing.assert_allclose(chances, sigmoid, rtol=1.2e-7)  # to the last bit of a float32


def test_a_module_of_ours_is_made_again_from_its_architecture(tmp_path: Path) -> None:
    from tessera.learning.architecture import build

    plan = {"name": "din", "items": np.int64(ITEMS), "users": USERS, "width": 4, "layers": (8, 4)}
    trained = build(plan)
    tables = Tables({"items.weight": Table("item", "history"), "users.weight": Local("user")})
    save(
        tmp_path / "model",
        parameters=values_of(trained),
        tables=tables,
        architecture=plan,
        about={},
    )
    model = load(tmp_path / "model")
    part = examples()
    expected = evaluate(trained, tables.bind(trained), values_of(trained), part)
    np.testing.assert_array_equal(model.scores(columns(part)), expected)


def test_loading_draws_nothing_from_the_users_generator(
    tmp_path: Path, module: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "build", lambda architecture: Toy())
    path = saved_toy(tmp_path / "model", module, architecture={"name": "toy"})
    before = torch.random.get_rng_state()
    assert type(load(path).module) is Toy
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_state_loads_into_the_plain_module_in_ordinary_torch_code(
    folder: Path, module: Toy
) -> None:
    plain = Toy()
    plain.load_state_dict(torch.load(folder / STATE, weights_only=True), strict=True)
    for name, value in module.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)


def test_the_predictor_holds_a_plain_module_in_eval_mode(model: Predictor) -> None:
    assert type(model.module) is Toy and not model.module.training
    part = examples()
    batch = {name: torch.from_numpy(c) for name, c in part.fields.items()}
    batch["kind"] = torch.from_numpy(KIND_OF)[batch["item"]]
    with torch.no_grad():
        np.testing.assert_array_equal(model.module(batch).numpy(), model.scores(columns(part)))


def test_about_says_what_the_model_is(model: Predictor) -> None:
    assert model.about["task"] == {"name": "toy"}
    assert model.about["local_rows"] == "as they began"
    kinds = {t["parameter"]: (t["kind"], t["parent"]) for t in model.about["tables"]}
    assert kinds == {
        "items.weight": ("table", None),
        "kinds.weight": ("derived", "items.weight"),
        "users.weight": ("local", None),
    }
    assert model.fields == ("item", "history", "user", "price")
    assert repr(model) == "Predictor(Toy: item, history, user, price)"


def test_a_map_that_is_a_function_is_saved_as_what_it_gives(tmp_path: Path, module: Toy) -> None:
    named = tables_of(module).tables | {
        "kinds.weight": Derived("items.weight", lambda ids: ids % KINDS, {"kind": "item"})
    }
    path = saved_toy(tmp_path / "model", module, tables=Tables(named))
    with np.load(path / MAPS, allow_pickle=False) as maps:
        np.testing.assert_array_equal(maps["map_0"], KIND_OF)
    part = examples()
    np.testing.assert_array_equal(
        load(path, Toy()).scores(columns(part)),
        evaluate(module, tables_of(module).bind(module), values_of(module), part),
    )


def test_a_table_longer_than_its_module_is_saved_whole(tmp_path: Path) -> None:
    short = Toy(items=1, kinds=False, users=False)
    tables = Tables({"items.weight": Table("item", "history", size=ITEMS, initial=Normal(0.1))})
    rows = np.random.default_rng(1).normal(size=(ITEMS, WIDTH)).astype(np.float32)
    parameters = values_of(short) | {"items.weight": rows}
    path = saved_toy(tmp_path / "model", short, tables=tables, parameters=parameters)
    model = load(path, Toy(items=1, kinds=False, users=False))
    assert model.module.get_parameter("items.weight").shape == (ITEMS, WIDTH)
    part = examples()
    np.testing.assert_array_equal(
        model.scores(columns(part)), evaluate(short, tables.bind(short), parameters, part)
    )


def test_the_state_has_tied_and_frozen_parameters_and_buffers_too() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.again = self.first
            self.fixed = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
            self.register_buffer("scale", torch.tensor([3], dtype=torch.int64))

    odd = Odd()
    state = state_of(odd, {"first.weight": np.ones((2, 2), np.float32)})
    assert list(state) == list(odd.state_dict())
    assert torch.equal(state["again.weight"], torch.ones(2, 2))
    assert torch.equal(state["fixed"], odd.fixed) and torch.equal(state["scale"], odd.scale)
    assert not torch.equal(odd.first.weight, torch.ones(2, 2))  # the module is as it was


# --- writing --------------------------------------------------------------------------------------


def test_a_model_that_is_there_is_replaced_only_when_told(folder: Path, module: Toy) -> None:
    before = (folder / STATE).read_bytes()
    with torch.no_grad():
        module.out.bias.add_(1.0)
    with pytest.raises(ConfigError, match="holds a model already") as caught:
        saved_toy(folder, module)
    assert caught.value.hint and (folder / STATE).read_bytes() == before
    saved_toy(folder, module, overwrite=True)
    assert load(folder, Toy()).module.state_dict()["out.bias"] == module.out.bias
    assert os.listdir(folder.parent) == [folder.name]


def test_what_is_no_model_is_never_replaced(tmp_path: Path, module: Toy) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / ABOUT).write_text('{"format": "something else"}')
    with pytest.raises(ConfigError, match="not a model"):
        saved_toy(tmp_path / "letters", module, overwrite=True)
    assert [p.name for p in (tmp_path / "letters").iterdir()] == [ABOUT]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a model"):
        saved_toy(tmp_path / "file", module, overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_write_that_fails_leaves_the_old_model_and_nothing_else(
    folder: Path, module: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = (folder / ABOUT).read_bytes()
    with monkeypatch.context() as broken:
        broken.setattr(np, "savez", full)
        with pytest.raises(ConfigError, match="No space left"):
            saved_toy(folder, module, overwrite=True)
    rename = Path.rename

    def fails_once(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails_once)
    with pytest.raises(ConfigError, match="Input/output"):
        saved_toy(folder, module, overwrite=True)
    assert os.listdir(folder.parent) == [folder.name]
    assert (folder / ABOUT).read_bytes() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"about": {"tables": 1}},
        {"about": {"rounds": float("nan")}},
        {"about": {"task": Toy}},
        {"parameters": {"out.bias": np.zeros(1, np.float32)}},
    ],
)
def test_a_caller_who_hands_over_nonsense_is_told(
    tmp_path: Path, module: Toy, wrong: dict[str, Any]
) -> None:
    with pytest.raises(MisuseError, match="save: "):
        saved_toy(tmp_path / "model", module, **wrong)
    assert not list(tmp_path.iterdir())


# --- folders that are not whole -------------------------------------------------------------------


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_code_in_the_state_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    torch.save({"items.weight": Payload(mark)}, folder / STATE)
    with pytest.raises(ConfigError, match="of another model"):
        load(folder, Toy())
    reseal(folder)
    with pytest.raises(ConfigError, match="nothing in it was run") as caught:
        load(folder, Toy())
    assert caught.value.hint and not mark.exists()
    torch.load(folder / STATE, weights_only=False)  # what it would have done
    assert mark.exists()


def test_code_in_the_maps_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    np.savez(folder / MAPS, map_0=np.array([Payload(mark)], dtype=object))
    reseal(folder)
    with pytest.raises(ConfigError, match="damaged"):
        load(folder, Toy())
    assert not mark.exists()


@pytest.mark.parametrize("name", [STATE, MAPS])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_cut_or_changed_file_is_refused(folder: Path, name: str, sealed: bool) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    if sealed:
        reseal(folder)
    with pytest.raises(ConfigError) as caught:
        load(folder, Toy())
    assert name in str(caught.value) and caught.value.hint
    at = len(whole) // 2
    (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    if not sealed:
        with pytest.raises(ConfigError, match="damaged"):
            load(folder, Toy())


@pytest.mark.parametrize("name", [STATE, MAPS, ABOUT])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as caught:
        load(folder, Toy())
    assert caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"format": "tensors", "version": 1}']
)
def test_an_about_that_is_not_ours_is_refused(folder: Path, content: bytes) -> None:
    (folder / ABOUT).write_bytes(content)
    with pytest.raises(ConfigError, match=r"about\.json") as caught:
        load(folder, Toy())
    assert caught.value.hint


def test_a_newer_layout_is_refused(folder: Path) -> None:
    reseal(folder, lambda about: about.update(version=3, tessera="9.1"))
    with pytest.raises(ConfigError, match="layout 3, this version of tessera reads 2") as caught:
        load(folder, Toy())
    assert "tessera 9.1" in (caught.value.hint or "")


def test_a_model_of_the_old_layout_is_refused_with_a_hint(folder: Path) -> None:
    def as_before(about: dict[str, Any]) -> None:
        about["version"] = 1
        for table in about["tables"]:
            table["kind"] = {"table": "rows"}.get(table["kind"], table["kind"])

    reseal(folder, as_before)
    with pytest.raises(ConfigError, match="layout 1, this version of tessera reads 2") as caught:
        load(folder, Toy())
    assert "export it again" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("files"),
        lambda about: about.pop("tables"),
        lambda about: about.update(tables=3),
        lambda about: about["tables"][0].update(kind="other"),
        lambda about: about["tables"][1].update(map="map_9"),
        lambda about: about["tables"][1].update(fields=["kind"]),
        lambda about: about.update(fields={"price": ["object", 1]}),
        lambda about: about.update(fields={"price": 4}),
        lambda about: about.update(architecture=[]),
    ],
)
def test_a_damaged_about_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    reseal(folder, change)
    with pytest.raises(ConfigError, match="damaged") as caught:
        load(folder, Toy())
    assert caught.value.hint


def test_a_map_to_rows_that_are_not_there_is_refused(folder: Path) -> None:
    np.savez(folder / MAPS, map_0=KIND_OF + 1)
    reseal(folder)
    with pytest.raises(ConfigError, match="maps to 4"):
        load(folder, Toy())


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"a": 1}, {3: torch.zeros(1)}])
def test_a_state_that_is_no_dictionary_of_tensors_is_refused(folder: Path, content: Any) -> None:
    torch.save(content, folder / STATE)
    reseal(folder)
    with pytest.raises(ConfigError, match="no dictionary of tensors"):
        load(folder, Toy())


def test_a_file_that_is_no_model_at_all_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="not a model's folder"):
        load(tmp_path)
    with pytest.raises(ConfigError):
        load(folder / STATE)
    with zipfile.ZipFile(folder / STATE, "w") as other:
        other.writestr("hello", "world")
    reseal(folder)
    with pytest.raises(ConfigError, match="something else than named tensors"):
        load(folder, Toy())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_forged_bytes_are_an_error_and_never_a_crash(folder: Path) -> None:
    rng = np.random.default_rng(5)
    whole = (folder / STATE).read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    head = next(name for name in parts if name.endswith("data.pkl"))
    refused = 0
    for _ in range(300):
        changed = bytearray(parts[head])
        for at in rng.integers(0, len(changed), 2):
            changed[at] = rng.integers(0, 256)
        with zipfile.ZipFile(folder / STATE, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, bytes(changed) if name == head else part)
        reseal(folder)
        try:
            load(folder, Toy())
        except ConfigError as error:
            refused += 1
            assert error.hint
    assert refused > 200


# --- modules that do not fit ----------------------------------------------------------------------


def test_a_model_without_an_architecture_needs_its_module(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not one of tessera's") as caught:
        load(folder)
    assert "module=YourModule()" in (caught.value.hint or "")


def test_an_architecture_that_cannot_be_made_is_an_error(folder: Path) -> None:
    for settings in ({"name": "din", "items": -3}, {"name": "dinn"}, {"name": "din", "size": 1}):
        reseal(folder, lambda about, new=settings: about.update(architecture=new))
        with pytest.raises(ConfigError) as caught:
            load(folder)
        assert caught.value.hint


class Renamed(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.outs, self.out = self.out, nn.Identity()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("other", "message", "hint"),
    [
        (lambda: Toy(items=ITEMS + 1), r"\(30, 3\).*\(31, 3\)", "sizes"),
        (lambda: Toy(users=False), "saved model has 'users.weight'", "module that was trained"),
        (Renamed, "module has 'outs.weight'", "did you mean 'out.weight'"),
    ],
)
def test_a_module_that_does_not_fit_is_told_where(
    folder: Path, other: Callable[[], nn.Module], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder, other())
    assert hint in (caught.value.hint or "")


def test_a_module_that_lacks_what_was_saved_is_told_so(tmp_path: Path) -> None:
    path = saved_toy(tmp_path / "model", Toy(users=False))
    with pytest.raises(ConfigError, match=r"module has 'users.weight', the saved model does not"):
        load(path, Toy())


# --- predicting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64, np.int64])
def test_ids_may_be_of_any_integer_type(model: Predictor, dtype: type) -> None:
    part = examples()
    given = columns(part) | {name: part[name].astype(dtype) for name in ("user", "item")}
    np.testing.assert_array_equal(model.scores(given), model.scores(columns(part)))


def test_columns_may_be_lists_tensors_and_sequences_of_different_lengths(
    model: Predictor,
) -> None:
    part = examples()
    expected = model.scores(columns(part))
    ragged = [[int(i) for i in row if i >= 0] for row in part["history"]]
    objects = np.empty(len(ragged), object)
    objects[:] = [np.array(row, np.int32) for row in ragged]
    for history in (ragged, objects, torch.from_numpy(part["history"]), part["history"].tolist()):
        given = {
            "user": part["user"].tolist(),
            "item": torch.from_numpy(part["item"]),
            "history": history,
            "price": [float(p) for p in part["price"]],
        }
        np.testing.assert_allclose(model.scores(given), expected, rtol=1e-6)


def test_nobody_having_a_history_is_one_empty_place(folder: Path) -> None:
    class Picky(Toy):
        def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
            batch["history"].max(dim=1)  # fails over nothing, as many a pooling does
            return super().forward(batch)

    model = load(folder, Picky())
    given: dict[str, Any] = {"user": [0, 1], "item": [2, 3], "price": [1, 0]}
    empty = model.scores(given | {"history": [[], []]})
    np.testing.assert_array_equal(empty, model.scores(given | {"history": [[-1], [-1]]}))


def test_no_examples_give_no_predictions(model: Predictor) -> None:
    given: dict[str, Any] = {"user": [], "item": [], "history": np.empty((0, 4), int), "price": []}
    found = model.predict(given)
    assert found.shape == (0,) and found.dtype == np.float32


def test_the_batch_size_does_not_matter(model: Predictor) -> None:
    given = columns(examples())
    np.testing.assert_allclose(model.predict(given, batch=7), model.predict(given), rtol=1e-6)
    with pytest.raises(ConfigError, match="batch"):
        model.predict(given, batch=0)


def test_extreme_scores_stay_probabilities(model: Predictor) -> None:
    given = columns(examples(2)) | {"price": np.array([1e6, -1e6], np.float32)}
    np.testing.assert_array_equal(np.sort(model.predict(given)), [0.0, 1.0])


def test_derived_fields_of_the_caller_are_computed_all_the_same(model: Predictor) -> None:
    part = columns(examples())
    np.testing.assert_array_equal(model.scores(part | {"kind": [99]}), model.scores(part))


def test_a_client_hands_over_its_own_row(model: Predictor) -> None:
    part = examples()
    row = model.module.get_parameter("users.weight").detach().numpy()[2]
    theirs = columns(part) | {"user": np.full(40, 2)}
    expected = model.scores(theirs)
    new = columns(part) | {"user": np.full(40, 10**9)}  # unknown to the table: its row is at hand
    for given in (columns(part, "user"), theirs, new):
        for name, own in (("users", row), ("users.weight", row[None]), ("users", row.tolist())):
            np.testing.assert_array_equal(model.scores(given, local={name: own}), expected)
    assert not np.array_equal(model.scores(theirs, local={"users": row + 1}), expected)


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"user": np.zeros(WIDTH)}, "no local table 'user'"),
        ({"items": np.zeros(WIDTH)}, "no local table 'items'"),
        ({"users": np.zeros(WIDTH + 1)}, "has 3 values"),
        ({"users": np.zeros((2, WIDTH))}, "has 3 values"),
        ({"users": np.zeros(WIDTH)}, "names several clients"),
    ],
)
def test_a_row_that_cannot_be_the_clients_own_is_refused(
    model: Predictor, local: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        model.predict(columns(examples()), local=local)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": [30]}, "field 'item': id 30 is not in the 30 rows"),
        ({"item": [-2]}, "field 'item': id -2"),
        ({"item": [-1]}, "field 'item': id -1 means none"),
        ({"item": np.array([2**64 - 1], np.uint64)}, f"field 'item': id {2**64 - 1}"),
        ({"history": [[1, 31]]}, "field 'history': id 31"),
        ({"history": [np.array([2**64 - 1], np.uint64), []]}, "'history' is not one id"),
        ({"user": [5]}, "field 'user': id 5"),
        ({"user": [1.0]}, "'user' is not one id"),
        ({"user": ["anna"]}, "'user' is not one id"),
        ({"user": [True]}, "'user' is not one id"),
        ({"user": 3}, "'user' is not one id"),
        ({"user": [2**70]}, "'user' is not one id"),
        ({"user": None}, "'user' is not one id"),
        ({"history": [1, 2]}, "'history' has 1 dimensions"),
        ({"history": [[1], 2]}, "'history' is not one id"),
        ({"history": [[1.5], [2, 3]]}, "'history' is not one id"),
        ({"item": [[1]]}, "'item' has 2 dimensions"),
        ({"price": ["cheap"]}, "'price' is not one number"),
        ({"price": 1.0}, "'price' is not one number"),
        ({"price": [[1.0], [1.0, 2.0]]}, "'price' is not one number"),
        ({"price": [[1.0]]}, "'price' has 2 dimensions"),
        ({"price": [1.0, 2.0]}, "fields of different lengths: .*price has 2"),
    ],
)
def test_bad_columns_are_errors_that_name_the_field(
    model: Predictor, change: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"user": [1], "item": [2], "history": [[3]], "price": [0.5]}
    assert model.predict(given).shape == (1,)
    with pytest.raises(ConfigError, match=message) as caught:
        model.predict(given | change)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (("item",), "field 'item' missing"),
        (("item", "user"), "fields 'item', 'user' missing"),
        (("price",), "field 'price' missing"),
    ],
)
def test_missing_fields_are_named(
    model: Predictor, left_out: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        model.predict(columns(examples(), *left_out))
    assert caught.value.hint == "the model takes item, history, user, price"


def test_a_misspelt_field_is_guessed(model: Predictor) -> None:
    given = columns(examples(), "item") | {"items": examples()["item"]}
    with pytest.raises(ConfigError, match="'item' missing") as caught:
        model.predict(given)
    assert "'items'" in (caught.value.hint or "")


def test_a_fault_of_the_module_itself_is_not_blamed_on_the_fields(
    tmp_path: Path, module: Toy
) -> None:
    class Faulty(Toy):
        def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
            raise {"key": KeyError(7), "index": IndexError("mine")}[self.how]

        how = "key"

    faulty = Faulty()
    model = load(saved_toy(tmp_path / "model", module), faulty)
    with pytest.raises(KeyError):
        model.predict(columns(examples()))
    faulty.how = "index"
    with pytest.raises(IndexError):
        model.predict(columns(examples()))


def test_without_known_columns_types_follow_from_what_is_given(tmp_path: Path, module: Toy) -> None:
    model = load(saved_toy(tmp_path / "model", module, examples=None), Toy())
    part = examples()
    given = columns(part) | {"price": part["price"].astype(np.float64)}
    np.testing.assert_array_equal(
        model.scores(given),
        evaluate(module, tables_of(module).bind(module), values_of(module), part),
    )
    assert model.about["fields"] == {} and saved.LAYOUT == 2
