"""The model out of a leader's state: as a file for others, while it leads or after. No PyTorch.

    model-000120.safetensors   every parameter by its name, after round 120
    items.parquet              an item's id, title and vector, for a nearest-neighbour index

It is read in one transaction of the leader's database, whose process goes on meanwhile. The same
file is for everybody: a client that fetched some rows of it would show its history. `rows` makes it
smaller, for all alike: the most popular by the catalogue, or its first ones.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data import delimited
from tessera.errors import ConfigError
from tessera.learning.tables import safetensors
from tessera.learning.tables.store import ModelStore
from tessera.learning.tables.table import StoredTable
from tessera.rounds.party import ServerModel
from tessera.services.bundle import Bundle
from tessera.services.journal import NAME

NAMED: Final = re.compile(r"model-(\d{6,})\.safetensors")
PARQUET: Final = "items.parquet"
ROWS: Final = "tessera.rows"
"""The array that says which rows of tables over items a file has, where it has not all."""
LOOK: Final = 1.0
"""Seconds until a state is looked at again."""
LEADER: Final = "leader"
MOST_VALUES: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """Parameters by name, after a round; `rows` of the tables over items, or None for all."""

    federation: str
    bundle: str
    round_id: int
    parameters: safetensors.Arrays = field(repr=False)
    rows: npt.NDArray[np.int64] | None = field(default=None, repr=False)

    def to_bytes(self) -> bytes:
        more = {} if self.rows is None else {ROWS: self.rows}
        about = {
            "format": "tessera",
            "federation": self.federation,
            "bundle": self.bundle,
            "round": str(self.round_id),
        }
        return safetensors.packed({**self.parameters, **more}, about)

    @classmethod
    def from_bytes(cls, data: bytes, bundle: Bundle) -> ExportedModel:
        """`ConfigError` if it is not a model of this bundle."""
        arrays, about = safetensors.unpacked(data)
        if about.get("bundle") != bundle.digest.hex():
            raise ConfigError(
                f"a model of bundle {about.get('bundle', '?')[:16]}, not of "
                f"{bundle.digest.hex()[:16]}",
                hint="name the bundle that it was trained by",
            )
        rows = arrays.pop(ROWS, None)
        wanted = dict(bundle.shape.dense) | {
            parameter: _shape_of(bundle, name, rows)
            for name, parameter in bundle.shape.tables.items()
        }
        for name, shape in wanted.items():
            if name not in arrays or arrays[name].shape != tuple(shape):
                raise ConfigError(
                    f"a model without {name!r} of {tuple(shape)}", hint="export it again"
                )
        return cls(about["federation"], about["bundle"], int(about["round"]), arrays, rows)


def _over_items(bundle: Bundle, name: str) -> bool:
    listed = bundle.catalogue
    return listed is not None and bundle.specs[name].size == listed.rows


def _shape_of(bundle: Bundle, name: str, rows: npt.NDArray[Any] | None) -> tuple[int, int]:
    spec = bundle.specs[name]
    limited = rows is not None and _over_items(bundle, name)
    return (len(rows) if limited and rows is not None else spec.size, spec.width)


# --- out of a state -------------------------------------------------------------------------------


def stored_round(state: Path, bundle: Bundle) -> int | None:
    """The last round whose model the state has; None before the first."""
    with _reading(state, bundle) as database:
        return _round_in(database)


def exported(state: Path, bundle: Bundle, *, rows: int = 0) -> ExportedModel:
    """The model as the state has it now, all in one transaction; with `rows` so many of the tables
    over items."""
    if not bundle.shape.tables and not bundle.shape.dense:
        raise ConfigError(
            "the bundle is of synthetic clients, who train no model", hint="pack a plan with a task"
        )
    if bundle.plan.task.options.get("model") == "pairs":
        raise ConfigError(
            "sums of pairs are not exported yet",
            hint='model = "next" is; `tessera run` solves them',
        )
    with _reading(state, bundle) as database:
        model = bundle.first_model()
        store = ModelStore.reading(
            state / NAME, database, plan_hash=bundle.plan.digest, tables=model.stored_tables
        )
        if store.round_id is None:
            raise ConfigError(f"{state}: no round has ended yet", hint="wait for the first one")
        model.restore(store.dense())
        round_id = int(store.round_id)
    return ExportedModel(
        bundle.plan.federation,
        bundle.digest.hex(),
        round_id,
        *_parameters(model, bundle, rows),
    )


def _reading(state: Path, bundle: Bundle) -> closing[sqlite3.Connection]:
    """A leader's database, in a transaction that only reads."""
    path = state / NAME
    if not path.exists():
        raise ConfigError(f"{state}: there is no state here", hint="name a leader's --state folder")
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
        database.execute("BEGIN")
        owner, plan = database.execute("SELECT owner, plan FROM journal").fetchone()
    except sqlite3.OperationalError as error:
        raise ConfigError(
            f"{path}: {error}: another process holds it",
            hint="export from the machine of the leader; a copy of a state is none",
        ) from error
    except (sqlite3.DatabaseError, TypeError) as error:
        raise ConfigError(f"{path}: {error}", hint="is it a state of tessera?") from error
    if owner != LEADER:
        database.close()
        raise ConfigError(
            f"{state}: the state of {owner}, which has no model to export",
            hint="name the leader's",
        )
    if plan != bundle.digest.hex():
        database.close()
        raise ConfigError(
            f"{state}: of bundle {plan[:16]}, not of {bundle.digest.hex()[:16]}",
            hint="--bundle names the one that is led by it",
        )
    return closing(database)


def _round_in(database: sqlite3.Connection) -> int | None:
    try:
        found = database.execute("SELECT round_id FROM model_state").fetchone()
    except sqlite3.OperationalError:
        return None
    return None if found is None or found[0] is None else int(found[0])


def _parameters(
    model: ServerModel, bundle: Bundle, rows: int
) -> tuple[safetensors.Arrays, npt.NDArray[np.int64] | None]:
    found: safetensors.Arrays = {}
    start = 0
    for name, shape in bundle.shape.dense:
        end = start + int(np.prod(shape, dtype=np.int64))
        found[name] = model.dense[start:end].reshape(shape)
        start = end
    some = _most_popular(bundle, rows) if rows else None
    for name, parameter in bundle.shape.tables.items():
        limited = some is not None and _over_items(bundle, name)
        found[parameter] = _values(model.tables[name], some if limited else None)
    return found, some


def _most_popular(bundle: Bundle, rows: int) -> npt.NDArray[np.int64] | None:
    listed = bundle.catalogue
    if listed is None:
        raise ConfigError("the most popular rows of hashed ids", hint="export all of them")
    if rows >= len(listed.ids):
        return None
    counts = np.array(listed.popularity or [0.0] * len(listed.ids))
    return np.sort(np.argsort(-counts, kind="stable")[:rows]).astype(np.int64)


def _values(table: StoredTable, rows: npt.NDArray[np.int64] | None) -> npt.NDArray[np.float32]:
    if rows is None and table.size * table.width > MOST_VALUES:
        raise ConfigError(
            f"table {table.name!r} has {table.size:,} rows", hint="--rows N exports some of them"
        )
    ids = np.arange(table.size, dtype=np.uint64) if rows is None else rows.astype(np.uint64)
    return table.values(ids)


# --- files ----------------------------------------------------------------------------------------


def write(model: ExportedModel, folder: Path) -> Path:
    """As one file, which is there as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"model-{model.round_id:06}.safetensors"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        out.write(model.to_bytes())
        out.flush()
        os.fsync(out.fileno())
    partial.rename(path)
    return path


def write_vectors(model: ExportedModel, bundle: Bundle, folder: Path) -> Path:
    """Ids, titles and vectors of items as Parquet."""
    pa = delimited.load()
    listed = bundle.catalogue
    parameters = [p for name, p in bundle.shape.tables.items() if _over_items(bundle, name)]
    if listed is None or not parameters:
        raise ConfigError("no table over a catalogue of items", hint="export without --parquet")
    vectors = model.parameters[parameters[0]]
    rows = np.arange(len(listed.ids)) if model.rows is None else model.rows
    values = vectors[: len(rows)].astype(np.float32)
    table = pa.arrow.table(
        {
            "id": [listed.ids[row] for row in rows.tolist()],
            "title": [listed.title(row) for row in rows.tolist()],
            "vector": pa.arrow.FixedSizeListArray.from_arrays(
                pa.arrow.array(values.reshape(-1)), values.shape[1]
            ),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(table, folder / PARQUET)
    return folder / PARQUET


def newest(folder: Path) -> Path | None:
    """The model of the latest round in a folder."""
    found = [path for path in folder.glob("model-*.safetensors") if NAMED.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.stem.removeprefix("model-")), default=None)


def follow(
    state: Path,
    bundle: Bundle,
    folder: Path,
    *,
    every: int,
    rows: int = 0,
    stop: threading.Event,
    written: Callable[[Path], None] = lambda _: None,
    look: float = LOOK,
    last: int | None = None,
) -> None:
    """The model of every so many rounds, until `stop`; the last one when it ends. `last` is the
    round of the one that is there."""

    def once(least: int) -> None:
        nonlocal last
        now = stored_round(state, bundle) if (state / NAME).exists() else None
        if now is not None and (last is None or now - last >= least):
            written(write(exported(state, bundle, rows=rows), folder))
            last = now

    while not stop.wait(look):
        once(every)
    once(1)
