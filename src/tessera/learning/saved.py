"""A trained model in a folder: a plain `state_dict`, what it is, and the public maps it needs.

state_dict.pt   {parameter: tensor}, for `torch.load(..., weights_only=True)` and any torch program
about.json      what was trained and how; its tables, their fields, the architecture
maps.npz        the public maps of derived tables (items -> category), as arrays
ids.json        the ids of the items by row, where they have any

    model = tessera.load("runs/shop/model")
    model.predict({"user": [3], "item": [7], "history": [[1, 5, 2]]})
    model.recommend(history=["SKU-15", "SKU-3"], k=10)

Nothing in it runs as code when it is read. The digests in about.json tell damaged and mixed-up
files from whole ones; they do not prove who wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tessera.data.clicks import MOST_HISTORY
from tessera.data.examples import LABEL, Examples
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError, MisuseError, __version__, closest
from tessera.learning.architecture import build
from tessera.learning.bound_model import Derived, Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.predictor import Kind, Predictor
from tessera.learning.softmax import Softmax
from tessera.learning.tables.submodel import read_npz

STATE: Final = "state_dict.pt"
ABOUT: Final = "about.json"
MAPS: Final = "maps.npz"
IDS: Final = "ids.json"
FORMAT: Final = "tessera model"
LAYOUT: Final = 2
"""Layout 1 called a `Table` "rows"."""

AS_THEY_BEGAN: Final = "as they began"
"""What a model's local rows are by default: trained ones stay with their clients."""

# What torch.load raises for bytes that it will not read, or that were forged. The first is
# pickle's own, by way of torch, since nothing here may import pickle.
UNREADABLE: Final[tuple[type[Exception], ...]] = (
    torch.serialization.pickle.UnpicklingError,  # type: ignore[attr-defined]
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
NO_ARRAYS: Final = (
    EOFError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    zipfile.BadZipFile,
    zlib.error,
)


# --- writing --------------------------------------------------------------------------------------


def state_of(module: nn.Module, parameters: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """The module's `state_dict` with these values: tied names follow, frozen ones and buffers stay.

    The module itself is not changed.
    """
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        known = first.get(id(value), name)
        state[name] = (
            torch.from_numpy(np.array(parameters[known], order="C"))
            if known in parameters
            else value.detach().clone()
        )
    return state


def save(
    folder: Path | str,
    *,
    parameters: Mapping[str, npt.NDArray[Any] | Tensor],
    tables: Tables,
    architecture: Mapping[str, Any] | None,
    about: Mapping[str, Any],
    examples: Examples | None = None,
    items: RowNames | None = None,
    local_rows: str = AS_THEY_BEGAN,
    overwrite: bool = False,
    softmax: Softmax | None = None,
) -> Path:
    """Write a model's folder, all of it or nothing; the folder.

    `parameters` go by parameter name, whole tables included. `about` is kept as it is (task,
    scheme, rounds, metric). Of `examples` only the types of the columns are kept, so that `predict`
    can check what it is given. `items` are the ids that `recommend` answers in. A folder that is
    there already is replaced only if it holds a model and `overwrite` is set.
    """
    target = Path(folder).resolve()
    state = {name: _tensor(value) for name, value in parameters.items()}
    maps, described = _describe(tables, state)
    facts = {
        "format": FORMAT,
        "version": LAYOUT,
        "tessera": __version__,
        "architecture": None if architecture is None else dict(architecture),
        "tables": described,
        "softmax": None
        if softmax is None
        else {"tables": list(softmax.tables), "target": softmax.target},
        "fields": {} if examples is None else _kinds(examples),
        "local_rows": local_rows,
        "files": {},
    }
    if taken := facts.keys() & about.keys():
        raise MisuseError(f"save: {', '.join(sorted(taken))} in `about` would hide our own")
    _check_free(target, overwrite)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        _write(partial / STATE, lambda out: torch.save(state, out))
        _write(partial / MAPS, lambda out: np.savez(out, **maps))  # type: ignore[arg-type]
        if items is not None:
            named = json.dumps({"item": items.as_json()}) + "\n"
            _write(partial / IDS, lambda out: out.write(named.encode()))
        facts["files"] = {path.name: _digest(path) for path in sorted(partial.iterdir())}
        text = _as_json({**about, **facts})
        _write(partial / ABOUT, lambda out: out.write(text.encode()))
        _move(partial, target)
    except OSError as error:
        raise ConfigError(
            f"{folder}: the model could not be written: {error.strerror or error}",
            hint="name another folder, on a disk with room",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Path(folder)


def _describe(
    tables: Tables, state: Mapping[str, Tensor]
) -> tuple[dict[str, npt.NDArray[Any]], list[dict[str, Any]]]:
    """The maps by name, and the tables as JSON. Tables that share a map go on sharing it."""
    maps: dict[str, npt.NDArray[Any]] = {}
    names: dict[int, str] = {}
    described = []
    for parameter, what in tables.tables.items():
        if parameter not in state or state[parameter].ndim != 2:
            raise MisuseError(f"save: table {parameter!r} is not among the parameters")
        rows, width = state[parameter].shape
        entry: dict[str, Any] = {
            "parameter": parameter,
            "kind": type(what).__name__.lower(),
            "fields": list(what.fields),
            "parent": None,
            "rows": rows,
            "width": width,
            "by_rule": not isinstance(what, Local) and what.initial is not None,
        }
        if isinstance(what, Derived):
            if id(what.source) not in names:
                names[id(what.source)] = f"map_{len(maps)}"
                maps[names[id(what.source)]] = _images(what, state)
            entry |= {
                "fields": dict(what.fields),
                "parent": what.parent,
                "map": names[id(what.source)],
            }
        described.append(entry)
    return maps, described


def _images(what: Derived, state: Mapping[str, Tensor]) -> npt.NDArray[Any]:
    """The map over all of the parent's rows; a function is called once for all of them."""
    if what.parent not in state:
        raise MisuseError(f"save: table {what.parent!r} is not among the parameters")
    images = what.source
    if not isinstance(images, np.ndarray):
        images = images(np.arange(len(state[what.parent]), dtype=np.uint64))
    return images.astype(np.min_scalar_type(int(images.max())), copy=False)


def _kinds(examples: Examples) -> dict[str, Kind]:
    return {
        name: (column.dtype.name, column.ndim)
        for name, column in examples.fields.items()
        if name != LABEL
    }


def _tensor(value: npt.NDArray[Any] | Tensor) -> Tensor:
    """A tensor of its own, so that a view does not drag the whole it is cut from into the file."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return torch.from_numpy(np.array(value, order="C"))


def _as_json(facts: Mapping[str, Any]) -> str:
    try:
        return json.dumps(facts, indent=1, allow_nan=False, default=_plain) + "\n"
    except ValueError as error:
        raise MisuseError(f"save: about: {error}") from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise MisuseError(f"save: {type(value).__name__} cannot be written as JSON")


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    with path.open("xb") as out:
        write(out)
        out.flush()
        os.fsync(out.fileno())


def _check_free(target: Path, overwrite: bool) -> None:
    """Only a model of ours is ever replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not _is_model(target):
        raise ConfigError(
            f"{target} holds something that is not a model; it was left alone",
            hint="name another folder",
        )
    if not overwrite:
        raise ConfigError(
            f"{target} holds a model already",
            hint="name another folder, or say that it may be overwritten",
        )


def _is_model(folder: Path) -> bool:
    try:
        _read_about(folder, any_layout=True)
    except ConfigError:
        return False
    return True


def _move(partial: Path, target: Path) -> None:
    """Put the finished folder in place; an old model is away only for the time of two renames."""
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- reading --------------------------------------------------------------------------------------


def load(folder: Path | str, module: nn.Module | None = None) -> Predictor:
    """The model in this folder, ready to predict.

    A task's own model is made again from its architecture. For a module of your own hand over a
    fresh one of the same kind: it takes the saved values.
    """
    folder = Path(folder)
    about = _read_about(folder)
    state = _read_state(folder, about)
    tables, by_rule = _read_tables(folder, about)
    if module is None:
        module = _built(folder, about["architecture"])
    _fill(folder, module, state, by_rule)
    kinds: dict[str, Kind] = {name: (kind, n) for name, (kind, n) in about["fields"].items()}
    softmax = _read_softmax(folder, about)
    return Predictor(module, tables, about, kinds, _read_ids(folder, about), softmax)


def _read_ids(folder: Path, about: Mapping[str, Any]) -> RowNames | None:
    """The ids of the items, where the model came with any."""
    if IDS not in about["files"]:
        return None
    path = _check_whole(folder, about, IDS)
    try:
        return RowNames.from_json(json.loads(path.read_bytes())["item"])
    except (ValueError, LookupError, TypeError, ConfigError) as error:
        raise _damaged(path, "no ids by row") from error


def _read_softmax(folder: Path, about: Mapping[str, Any]) -> Softmax | None:
    """The softmax over a table, where the model was trained with one."""
    found = about.get("softmax")
    if found is None:
        return None
    try:
        tables, target = list(found["tables"]), found["target"]
        if not tables or not all(isinstance(one, str) for one in (*tables, target)):
            raise TypeError("softmax")
    except (KeyError, TypeError) as error:
        raise _damaged(folder / ABOUT, "its softmax cannot be read") from error
    return Softmax(*tables, target=target)


def _read_about(folder: Path, *, any_layout: bool = False) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        about = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is not a model's folder: it has no {ABOUT}",
            hint="`tessera export RUN` makes one, RUN/model",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", hint="export the model again") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ConfigError(
            f"{path} does not describe a tessera model", hint="`tessera export RUN` makes one"
        )
    if not any_layout and about.get("version") != LAYOUT:
        raise ConfigError(
            f"{path}: the model has layout {about.get('version')}, this version of tessera reads "
            f"{LAYOUT}",
            hint=f"it was written by tessera {about.get('tessera')}: train and export it again, or "
            "load it with that version",
        )
    return about


def _check_whole(folder: Path, about: Mapping[str, Any], name: str) -> Path:
    path = folder / name
    try:
        whole = _digest(path) == about["files"][name]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="export the model again") from error
    except (KeyError, TypeError):
        raise _damaged(folder / ABOUT, f"no digest of {name}") from None
    if not whole:
        raise ConfigError(
            f"{path}: damaged, or of another model than {ABOUT}", hint="export the model again"
        )
    return path


def _read_state(folder: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    path = _check_whole(folder, about, STATE)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise ConfigError(
            f"{path}: holds something else than named tensors; nothing in it was run",
            hint="load only models that `tessera export` wrote",
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided
        for name, value in state.items()
    ):
        raise _damaged(path, "no dictionary of tensors")
    return state


def _read_tables(folder: Path, about: Mapping[str, Any]) -> tuple[Tables, set[str]]:
    """The tables, and which of them a module of another length may hold."""
    path = _check_whole(folder, about, MAPS)
    try:
        maps = {name: array.astype(np.int64) for name, array in read_npz(path).items()}
    except NO_ARRAYS as error:
        raise _damaged(path, "no arrays") from error
    tables: dict[str, Table | Derived | Local] = {}
    by_rule = set()
    try:
        for entry in about["tables"]:
            name, kind, fields = entry["parameter"], entry["kind"], entry["fields"]
            if not all(isinstance(one, str) for one in (name, *fields)):
                raise TypeError("parameter")
            if kind == "derived":
                tables[name] = Derived(entry["parent"], maps[entry["map"]], fields)
            else:
                tables[name] = {"table": Table, "local": Local}[kind](*fields)
            if entry["by_rule"]:
                by_rule.add(name)
        for column, (kind, dimensions) in about["fields"].items():
            if np.dtype(kind).kind not in "iufb" or dimensions not in range(1, 9):
                raise ValueError(column)
        if not isinstance(about["architecture"], dict | None):
            raise TypeError("architecture")
        for key in ("history_length", "sequence_length"):
            length = about.get(key)
            if length is not None and not (type(length) is int and 0 < length <= MOST_HISTORY):
                raise TypeError(key)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder / ABOUT, "its tables cannot be read") from error
    return Tables(tables), by_rule


def _built(folder: Path, architecture: Mapping[str, Any] | None) -> nn.Module:
    if architecture is None:
        raise ConfigError(
            f"{folder}: this model's module is not one of tessera's",
            hint=f'hand it over: tessera.load("{folder}", module=YourModule())',
        )
    with torch.random.fork_rng(devices=[]):  # first values that nobody sees
        try:
            return build(architecture)
        except (RuntimeError, ValueError) as error:
            raise _damaged(folder / ABOUT, f"no such module: {error}") from error


def _fill(
    folder: Path, module: nn.Module, state: Mapping[str, Tensor], by_rule: Collection[str]
) -> None:
    """Put the saved values into the module, after a look at every name and shape."""
    own = module.state_dict()
    for names, others, holder, other in (
        (own, state, "the module", "the saved model"),
        (state, own, "the saved model", "the module"),
    ):
        for name in names:
            if name not in others:
                strange = others.keys() - names.keys()
                raise ConfigError(
                    f"{folder}: {holder} has {name!r}, {other} does not",
                    hint=closest(name, strange)
                    if strange
                    else "is it the module that was trained?",
                )
    for name, value in state.items():
        if own[name].shape == value.shape:
            continue
        if name in by_rule and own[name].shape[1:] == value.shape[1:]:
            _lengthen(module, name, len(value))
            continue
        raise ConfigError(
            f"{folder}: {name!r} is {tuple(value.shape)} in the saved model and "
            f"{tuple(own[name].shape)} in the module",
            hint="make the module with the sizes it was trained with",
        )
    module.load_state_dict(dict(state))
    module.eval()


def _lengthen(module: nn.Module, name: str, rows: int) -> None:
    """Room for all rows of a table of which the module only gave the width."""
    parameter = module.get_parameter(name)
    parameter.data = parameter.new_zeros((rows, parameter.shape[1]))
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding):
        owner.num_embeddings = rows


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: damaged: {what}", hint="export the model again")
