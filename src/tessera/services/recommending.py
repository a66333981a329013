"""Recommendations at a client, from the exported model: nothing about it is sent to anybody.

The model is downloaded whole, once per version, by the same request from everybody. Whoever never
trained gets a list as well. What a model has of each user alone (a DIN's own row) is read from the
client's state; without one the person is like nobody in particular.
"""

from __future__ import annotations

import sqlite3
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import numpy as np
import torch

from tessera.data.examples import LABEL, ClientData
from tessera.data.row_names import RowNames
from tessera.data.sequences import SequenceData
from tessera.errors import ConfigError
from tessera.learning.predictor import Kind, Predictor
from tessera.learning.softmax import Softmax
from tessera.learning.tables.submodel import Floats
from tessera.services.bundle import Bundle
from tessera.services.journal import NAME
from tessera.services.model_export import ExportedModel, newest
from tessera.tasks.own import OwnInteractions, id_key

if TYPE_CHECKING:
    from tessera.services.packing import TaskFunction

MODEL: Final = "/v1/model"
MOST_BYTES: Final = 1 << 33
TIMEOUT: Final = 60.0
PEOPLE: Final = ("user", "subject")
"""Fields that say whose an example is; only a table over them reads them."""


@dataclass(frozen=True, slots=True)
class RankedItem:
    """An item with its title and the model's score, which only orders items."""

    id: str
    title: str
    score: float


def fetched(where: str, bundle: Bundle, cache: Path, ca: Path | None = None) -> ExportedModel:
    """The model of a leader, or of a file or folder; a leader's is kept and asked for by version.

    Everybody's request is the same but for the version it has.
    """
    if not where.startswith(("http://", "https://")):
        path = Path(where)
        file = newest(path) if path.is_dir() else path
        if file is None or not file.is_file():
            raise ConfigError(f"{where}: no model there", hint="`tessera export STATE` writes one")
        return ExportedModel.from_bytes(file.read_bytes(), bundle)
    kept = cache / bundle.digest.hex()[:16]
    have = newest(kept)
    asked = Request(where.rstrip("/") + MODEL)
    if have is not None:
        asked.add_header("If-None-Match", f'"{have.stem}"')
    trusted = ssl.create_default_context(cafile=None if ca is None else str(ca))
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=trusted))
    try:
        with opener.open(asked, timeout=TIMEOUT) as answer:
            data = answer.read(MOST_BYTES)
    except HTTPError as error:
        error.close()
        if error.code == 304 and have is not None:
            return ExportedModel.from_bytes(have.read_bytes(), bundle)
        raise ConfigError(
            f"{where}: {error.code}: no model is exported there",
            hint="the leader serves one with --export DIR",
        ) from error
    except (URLError, OSError) as error:
        raise ConfigError(
            f"{where}: {error}", hint="is a leader there? --ca names its authority"
        ) from error
    found = ExportedModel.from_bytes(data, bundle)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / f"model-{found.round_id:06}.safetensors").write_bytes(data)
    for old in kept.glob("model-*.safetensors"):
        if old.stem != f"model-{found.round_id:06}":
            old.unlink()
    return found


def recommended(
    bundle: Bundle,
    model: ExportedModel,
    make: TaskFunction,
    source: Any = None,
    *,
    top: int = 10,
    state: Path | None = None,
    as_of: int | None = None,
) -> list[RankedItem]:
    """The best items that are not among a client's own; without any for whoever has none."""
    listed = bundle.catalogue
    if listed is None:
        raise ConfigError(
            "hashed ids have no names to recommend", hint="pack with --items for recommendations"
        )
    own = OwnInteractions(
        clients=bundle.clients,
        catalogue=listed,
        key=id_key(bundle.plan.federation),
        source=source,
        as_of=as_of,
    )
    task = make(own)
    module = task.build(bundle.plan.seed)
    _fill(module, model)
    names = RowNames(listed.ids)
    if model.rows is not None:
        names = RowNames([listed.ids[row] for row in model.rows.tolist()], model.rows)
    softmax = task.loss if isinstance(task.loss, Softmax) else None
    indexed = {name for table in task.tables.tables.values() for name in table.fields}
    kinds: dict[str, Kind] = {
        name: (column.dtype.name, column.ndim)
        for name, column in task.data.train.fields.items()
        if name != LABEL and (name not in PEOPLE or name in indexed)
    }
    length = bundle.shape.history or None
    about = {"history_length": length, "sequence_length": length}
    predictor = Predictor(module, task.tables, about, kinds, names, softmax)
    history = [listed.ids[row] for row in held(task.data)]
    if model.rows is not None:  # of others it has no rows
        inside = set(names.names)
        history = [one for one in history if one in inside]
    local = own_rows_of(state) if state is not None and softmax is None else {}
    found = predictor.recommend(history, top, local=local)
    return [
        RankedItem(one.item, listed.title(listed.row(one.item)), one.probability) for one in found
    ]


def held(data: ClientData) -> list[int]:
    """The items that this client liked, the oldest first, what is held out of training included."""
    if isinstance(data, SequenceData):
        return [*data.events.item.tolist(), *data.test["item"].tolist()]
    rows: list[int] = []
    for part in (data.train, data.test):
        item, label = part["item"], part.fields.get(LABEL)
        liked = (item >= 0) if label is None else (item >= 0) & (label > 0)
        rows += item[liked].tolist()
    return rows


def own_rows_of(state: Path) -> Mapping[str, Floats]:
    """A client's rows of tables that never leave it, as its journal has them: of each the first."""
    path = state / NAME
    if not path.exists():
        raise ConfigError(
            f"{state}: there is no state here", hint="name the client's --state folder"
        )
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            rows = database.execute(
                "SELECT name, data FROM local_row ORDER BY row_id DESC"
            ).fetchall()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path}: {error}", hint="is it a state of tessera?") from error
    return {name: np.frombuffer(data, "<f4").astype(np.float32) for name, data in rows}


def _fill(module: torch.nn.Module, model: ExportedModel) -> None:
    """The exported values in the module; rows that were not exported are zeros."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            found = model.parameters.get(name)
            if found is None:
                continue  # a table that never leaves its client
            values = torch.from_numpy(np.array(found, np.float32))
            if values.shape == parameter.shape:
                parameter.copy_(values)
            else:
                assert model.rows is not None
                parameter.zero_()
                parameter[torch.from_numpy(np.array(model.rows))] = values
