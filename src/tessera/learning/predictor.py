"""Predictions of a trained model, from columns in any usual form: lists, arrays, any integers.

Bad columns are the caller's to mend, so each is a `ConfigError` that names the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from tessera.data.clicks import PRIOR_RATE
from tessera.data.examples import NONE, Examples
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError, closest
from tessera.learning.bound_model import BoundTable, Derived
from tessera.learning.module_tables import Tables
from tessera.learning.scores import RowSource, evaluate
from tessera.learning.softmax import Softmax
from tessera.learning.tables.submodel import Floats, Ids

Kind: TypeAlias = tuple[str, int]
"""A column's type and dimensions, as ("int64", 2) for one sequence of ids per example."""


class Ranked(NamedTuple):
    """An item, and the probability of a click."""

    item: str
    probability: float


class Predictor:
    """A trained model. `module` is the plain module in eval mode, `about` says what it is.

    `kinds` are those of the columns that it was trained with, where they are known; `items` the ids
    that `recommend` takes and gives.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Tables,
        about: Mapping[str, Any],
        kinds: Mapping[str, Kind],
        items: RowNames | None = None,
        softmax: Softmax | None = None,
    ) -> None:
        self._items = items
        self.module = module.eval()
        self.about = about
        self._bound = tables.bind(module, softmax)
        self._target = None if softmax is None else softmax.target
        self._kinds = dict(kinds)
        self._tables: dict[str, list[BoundTable]] = {}  # by field
        self._computed: set[str] = set()
        for table in self._bound.tables:
            if isinstance(tables.tables[table.parameter], Derived):
                self._computed.update(table.fields)
                continue
            for name in table.fields:
                self._tables.setdefault(name, []).append(table)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that `predict` takes: ids of the tables, then what else was trained with."""
        every = dict.fromkeys((*self._tables, *self._kinds))
        return tuple(name for name in every if name != self._target)

    def predict(
        self,
        fields: Mapping[str, Any],
        *,
        local: Mapping[str, npt.ArrayLike] | None = None,
        batch: int = 4096,
    ) -> Floats:
        """Probabilities; see `scores` for what is taken.

        Of a click for each example, (N,); of a model of classes or over a table, of each class or
        row, (N, classes).
        """
        logits = self.scores(fields, local=local, batch=batch).astype(np.float64)
        if logits.ndim == 2:
            shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares: Floats = (shifted / shifted.sum(axis=1, keepdims=True)).astype(np.float32)
            return shares
        chances: Floats = np.exp(-np.logaddexp(0.0, -logits)).astype(np.float32)
        return chances

    def scores(
        self,
        fields: Mapping[str, Any],
        *,
        local: Mapping[str, npt.ArrayLike] | None = None,
        batch: int = 4096,
    ) -> Floats:
        """What the module itself gives for each example; logits, of a click model, of classes, or
        of all rows of the table that a softmax is over.

        `fields` are columns, one entry per example. Ids are whole numbers; a sequence of them is a
        list of any length, or a row of an array with -1 where nothing is. Derived fields are
        computed. A client that has rows of its own hands them over by table, as `local={"users":
        row}`: all examples are then its own, and the table's fields may be left out.
        """
        if batch < 1:
            raise ConfigError(f"batch = {batch} examples", hint="use 1 or more")
        rows = self._own_rows(local or {})
        columns = self._columns(fields, rows)
        parameters: dict[str, Floats | RowSource] = {
            name: value.detach().numpy() for name, value in self.module.named_parameters()
        }
        parameters |= rows
        try:
            return evaluate(
                self.module, self._bound, parameters, Examples(columns), batch=batch, rank=False
            )
        except KeyError as error:
            # Which fields a module reads beside its ids shows only when it reads them.
            name = error.args[0] if error.args else None
            if not isinstance(name, str) or name in columns or name in self._computed:
                raise
            raise self._missing([name], fields) from error
        except IndexError as error:
            for name, column in columns.items():
                if name in self._tables and column.ndim == 1 and (column == NONE).any():
                    raise ConfigError(
                        f"field {name!r}: id {NONE} means none, and the module needs one",
                        hint=f"give every example an id of {self._tables[name][0].name!r}",
                    ) from error
            raise

    def recommend(
        self,
        history: Iterable[object] = (),
        k: int = 10,
        *,
        local: Mapping[str, npt.ArrayLike] | None = None,
        seen: bool = False,
        batch: int = 4096,
        **fields: Any,
    ) -> list[Ranked]:
        """The `k` best items for somebody with this history, oldest first, in the user's own ids.

        Items of the history are left out unless `seen` is set, ids that the model does not know
        are passed over. `local` are rows of one's own, as for `scores`; without them a person is
        like nobody in particular (rows of zeros). `fields` are further fields of the model, one
        value each. All items are scored, `batch` at a time.
        """
        if k < 1:
            raise ConfigError(f"k = {k} items", hint="use 1 or more")
        if self._target is not None:
            return self._following(history, k, seen=seen, fields=fields)
        if "item" not in self._tables:
            raise ConfigError(
                "recommend: the model has no table over a field 'item'",
                hint=f"its fields are {', '.join(self.fields)}; use `scores`",
            )
        items = self.items
        asked = list(history)
        known = items.known(asked)
        if asked and not len(known):
            items.row(asked[0], what="item")  # names it, and what is near
        rows = items.filled
        columns: dict[str, npt.NDArray[Any]] = {"item": rows}
        for name in self.fields:
            if name == "item" or name in self._computed:
                continue
            if name == "history":
                length = self.about.get("history_length") or len(known)
                latest = known[-length:] if len(known) else np.array([NONE], dtype=np.int64)
                columns[name] = np.broadcast_to(latest, (len(rows), len(latest)))
            elif name in fields:
                columns[name] = np.broadcast_to(np.asarray(fields[name]), (len(rows),))
            elif name == "rate":
                columns[name] = np.full(len(rows), PRIOR_RATE, np.float32)
            elif not all(table.local for table in self._tables.get(name, [None])):  # type: ignore[union-attr]
                raise self._missing([name], ("history", *fields))
        own = {
            table.name: np.zeros(table.width, np.float32)
            for table in self._bound.tables
            if table.local
        }
        found = self.predict(columns, local={**own, **(local or {})}, batch=batch)
        if found.ndim != 1:
            raise ConfigError(
                f"recommend: the model gives {found.shape[1]} values for an item, not one",
                hint="use `scores`, and rank them as you need",
            )
        order = np.argsort(-found, kind="stable")
        if not seen:
            order = order[~np.isin(rows[order], known)]
        return [Ranked(items.name(rows[at]), float(found[at])) for at in order[:k]]

    def _following(
        self, history: Iterable[object], k: int, *, seen: bool, fields: Mapping[str, Any]
    ) -> list[Ranked]:
        """The likeliest rows of the table that a softmax is over, after this history."""
        asked = list(history)
        known = self.items.known(asked)
        if asked and not len(known):
            self.items.row(asked[0], what="id")  # names it, and what is near
        columns: dict[str, Any] = {name: np.asarray(value)[None] for name, value in fields.items()}
        for name in self.fields:
            if name in columns or name in self._computed or name not in self._tables:
                continue
            if self._kinds.get(name, ("int64", 2))[1] != 2:
                raise self._missing([name], ("history", *fields))
            length = self.about.get("sequence_length") or max(1, len(known))
            latest = known[::-1][:length]  # the latest first, as it was trained
            columns[name] = np.full((1, length), NONE, np.int64)
            columns[name][0, : len(latest)] = latest
        found = self.predict(columns)[0]
        order = np.argsort(-found, kind="stable")
        order = order[np.isin(order, self.items.filled)]  # a growing catalogue has rows without any
        if not seen:
            order = order[~np.isin(order, known)]
        return [Ranked(self.items.name(at), float(found[at])) for at in order[:k].tolist()]

    @property
    def items(self) -> RowNames:
        """The ids of the items; their rows, where the data had none of its own."""
        if self._items is None:
            table = self._tables["item" if self._target is None else self._target][0]
            self._items = RowNames.numbered(table.rows)
        return self._items

    def __repr__(self) -> str:
        return f"Predictor({type(self.module).__name__}: {', '.join(self.fields)})"

    def _own_rows(self, local: Mapping[str, npt.ArrayLike]) -> dict[str, _OwnRow]:
        """A client's own rows, by parameter."""
        known = {table.name: table for table in self._bound.tables if table.local}
        rows = {}
        for name, given in local.items():
            table = known.get(name.removesuffix(".weight"))
            if table is None:
                raise ConfigError(
                    f"local: this model has no local table {name!r}", hint=closest(name, known)
                )
            row = np.asarray(given, np.float32)
            if row.shape not in ((table.width,), (1, table.width)):
                raise ConfigError(
                    f"local: a row of {table.name!r} has {table.width} values, this has the shape "
                    f"{row.shape}",
                    hint="hand over one row, that of the client itself",
                )
            rows[table.parameter] = _OwnRow(row.reshape(-1))
        return rows

    def _columns(
        self, fields: Mapping[str, Any], rows: Collection[str]
    ) -> dict[str, npt.NDArray[Any]]:
        """The fields as checked columns, without those that are computed."""
        own = {  # fields whose ids do not matter, since whatever they name is at hand
            name
            for name, tables in self._tables.items()
            if all(table.parameter in rows for table in tables)
        }
        if missing := [
            name
            for name in self._tables
            if name not in fields and name not in own and name != self._target
        ]:
            raise self._missing(missing, fields)
        columns = {}
        for name, given in fields.items():
            if name in self._computed:
                continue
            column = _ids(name, given) if name in own else self._column(name, given)
            tables = self._tables.get(name, [])
            if any(table.parameter in rows for table in tables) and np.unique(column).size > 1:
                raise ConfigError(
                    f"local: one row of {tables[0].name!r}, and {name!r} names several clients",
                    hint="predict for one client at a time where its own row is handed over",
                )
            columns[name] = np.zeros(column.shape, np.int64) if name in own else column
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise ConfigError(
                f"fields of different lengths: {found}", hint="one entry per example in each"
            )
        n = next(iter(lengths.values()), 0)
        if self._target is not None:  # what is asked for: nobody knows it yet
            columns.setdefault(self._target, np.full(n, NONE, np.int64))
        return {name: np.zeros(n, np.int64) for name in own} | columns

    def _column(self, name: str, given: Any) -> npt.NDArray[Any]:
        kind, dimensions = self._kinds.get(name, (None, None))
        if name in self._tables:
            column = _ids(name, given)
            self._check_range(name, column)
            column = column.astype(np.int64)
        else:
            column = _numbers(name, given)
            if kind is None:
                kind = "float32" if column.dtype.kind == "f" else "int64"
            column = column.astype(kind)
        if dimensions is not None and column.ndim != dimensions:
            each, such = ("one entry", "[3]") if dimensions == 1 else ("one sequence", "[[3, 5]]")
            raise ConfigError(
                f"field {name!r} has {column.ndim} dimensions, the model was trained with "
                f"{dimensions}",
                hint=f"{each} per example: {such} is one example",
            )
        if column.ndim == 2 and column.shape[1] == 0:  # no sequence has anything: one empty place
            column = np.full((len(column), 1), NONE, column.dtype)
        return column

    def _check_range(self, name: str, ids: npt.NDArray[Any]) -> None:
        table = self._tables[name][0]
        for found in (int(ids.min(initial=0)), int(ids.max(initial=0))):
            if not NONE <= found < table.rows:
                raise ConfigError(
                    f"field {name!r}: id {found} is not in the {table.rows} rows of table "
                    f"{table.name!r}",
                    hint=f"ids are 0 to {table.rows - 1}, and {NONE} for none in a sequence",
                )

    def _missing(self, names: Collection[str], fields: Iterable[str]) -> ConfigError:
        which = "field" if len(names) == 1 else "fields"
        strange = [name for name in fields if name not in self.fields]
        close = difflib.get_close_matches(next(iter(names)), strange, n=1)
        return ConfigError(
            f"{which} {', '.join(map(repr, names))} missing",
            hint=f"is it {close[0]!r} among what was given?"
            if close
            else f"the model takes {', '.join(self.fields)}",
        )


class _OwnRow:
    """A local table as its client sees it: its own row, whatever the id."""

    def __init__(self, row: Floats) -> None:
        self._row = row

    def values(self, ids: Ids, /) -> Floats:
        return np.repeat(self._row[None], ids.size, axis=0)


# --- columns in any usual form --------------------------------------------------------------------


def _ids(name: str, given: Any) -> npt.NDArray[Any]:
    """Whole numbers, (N,) or (N, T); sequences of different lengths are filled up with -1."""
    try:
        column = np.asarray(given)
    except (ValueError, TypeError, RuntimeError):  # of different lengths, or nothing we know
        column = _filled(name, given)
    if column.dtype == object:
        column = _filled(name, given)
    if column.size == 0 and column.dtype.kind == "f":
        column = column.astype(np.int64)  # an empty list says nothing about its type
    if column.dtype.kind not in "iu" or column.ndim not in (1, 2):
        raise _no_ids(name)
    return column


def _filled(name: str, given: Any) -> npt.NDArray[Any]:
    try:
        parts = [np.asarray(part) for part in given]
    except (ValueError, TypeError, RuntimeError) as error:
        raise _no_ids(name) from error
    for part in parts:
        whole = part.size == 0 or (part.dtype.kind in "iu" and int(part.max()) < 2**63)
        if part.ndim != 1 or not whole:
            raise _no_ids(name)
    column = np.full((len(parts), max((part.size for part in parts), default=0)), NONE, np.int64)
    for at, part in enumerate(parts):
        column[at, : part.size] = part
    return column


def _no_ids(name: str) -> ConfigError:
    return ConfigError(
        f"field {name!r} is not one id, or one sequence of ids, per example",
        hint="ids are whole numbers; a list of lists is one sequence per example",
    )


def _numbers(name: str, given: Any) -> npt.NDArray[Any]:
    try:
        column = np.asarray(given)
    except (ValueError, TypeError, RuntimeError):
        column = np.empty((), object)
    if column.dtype.kind not in "iufb" or column.ndim == 0:
        raise ConfigError(
            f"field {name!r} is not one number, or equally many, per example",
            hint="leave out what the model was not trained with",
        )
    return column
