"""BoundModel: a module together with its tables, as learners and rounds use it.

OwnRows: a client's rows of local tables, which never leave it, as they are before training. Their
first values are drawn from the client's lasting secret, and look like the module's. Drawn from a
public seed, or from the client's number, they would identify who holds what: the opened update of a
row over that of its bias is the holder's own row plus what the server can compute
(docs/threat-model.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.data.examples import NONE, ClientData, Examples, SecretOf
from tessera.errors import ConfigError, MisuseError, closest
from tessera.learning.tables.submodel import Floats, Ids, distinct
from tessera.learning.tables.table import (
    DenseTable,
    DerivedMap,
    Given,
    LazyTable,
    Normal,
    PerClient,
    Rule,
    StoredTable,
    TableSpec,
    shaped,
    units,
)

# --- declaration ----------------------------------------------------------------------------------
#
# How a user declares a table: `Table`, `Derived` or `Local`.


Source: TypeAlias = npt.NDArray[np.integer[Any]] | Callable[[Ids], npt.NDArray[np.integer[Any]]]
"""A public map from a parent's rows: an array over all of them, or a function of ids."""


class Table:
    """A table: its rows are fetched and updated. `fields` hold its ids, (N,) or (N, T).

    With `initial`, a row starts by that rule and not from the module's own values, and `size` may
    be any number of rows: the module's parameter then only gives the width.
    """

    def __init__(self, *fields: str, size: int | None = None, initial: Rule | None = None) -> None:
        self.fields = fields
        self.size = size
        self.initial = initial


class Derived:
    """A table whose rows follow from a parent's by a public map (items -> category).

    `fields` says which field of its own comes from which of the parent's; they are computed here,
    examples do not hold them.
    """

    def __init__(
        self,
        parent: str,
        source: Source,
        fields: Mapping[str, str],
        *,
        size: int | None = None,
        initial: Rule | None = None,
    ) -> None:
        self.parent = parent
        self.source = source
        self.fields = dict(fields)
        self.size = size
        self.initial = initial


class Local:
    """A table whose rows never leave their client, such as its own user embedding."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields


Declaration: TypeAlias = Table | Derived | Local


# --- bound model ----------------------------------------------------------------------------------

V = TypeVar("V")

Batch: TypeAlias = dict[str, npt.NDArray[Any]]
"""Columns in which ids are positions among the rows at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTable:
    """A table of a bound module. `name` is the parameter's without a trailing ".weight".

    `derived_from` names the table whose rows decide its own. `initial` is the rule untouched rows
    follow; without one they are the module's. Of `candidates` every row at hand enters every
    output, as in a softmax.
    """

    name: str
    parameter: str
    rows: int
    width: int
    derived_from: str | None
    local: bool
    fields: tuple[str, ...]
    initial: Rule | None = None
    candidates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The rows among which a softmax finds its target: those of the table `root`.

    Other tables of the softmax follow it row for row. A client has its own rows, and as many
    `negatives` as it takes beside them: drawn evenly, or with these `weights`. `log_weights` says
    how much each row at hand stands for, by the number of rows and those that are its own. In fixed
    groups `whole_union` says whether all rows of a union are candidates. `counts_digest` is of the
    public counts behind all that.
    """

    root: str
    target: str
    rows: int
    negatives: int
    log_weights: Callable[[int, Ids, Ids], Floats]
    weights: npt.NDArray[np.float64] | None = None
    whole_union: bool = False
    counts_digest: bytes = b""


class BoundModel:
    """A module's parameters as a dense vector and tables, and examples as rows and positions."""

    def __init__(
        self,
        *,
        tables: tuple[BoundTable, ...],
        dense: tuple[tuple[str, tuple[int, ...]], ...],
        weights: Mapping[str, Tensor],
        derived: Mapping[str, Derived],
        leaders: Mapping[str, str],
        candidates: Candidates | None = None,
    ) -> None:
        """Not for callers: `Tables.bind` checks what this takes for granted."""
        self.tables = tables
        self.candidates = candidates
        self.dense = dense
        self.dense_size = sum(math.prod(shape) for _, shape in dense)
        self._by_name = {table.name: table for table in tables}
        self._weights = dict(weights)
        self._derived = dict(derived)
        self._leaders = dict(leaders)
        self._reads: dict[str, tuple[str, ...]] = {}  # leader -> the fields of all who follow it
        for name, leader in leaders.items():
            known = self._reads.get(leader, ())
            self._reads[leader] = tuple(dict.fromkeys((*known, *self._by_name[name].fields)))
        self._maps = {
            table.name: DerivedMap(
                self.spec(table.derived_from),
                self.spec(table.name),
                derived[table.name].source if table.name in derived else _itself,
            )
            for table in tables
            if table.derived_from is not None
        }

    def __getitem__(self, name: str) -> BoundTable:
        return self._by_name[name]

    @property
    def counts_digest(self) -> bytes:
        """Of the public counts by which negatives are drawn and weighed; none without any."""
        return b"" if self.candidates is None else self.candidates.counts_digest

    @property
    def union_candidates(self) -> str:
        """The table of which all rows of a fixed group's union are candidates; "" if none is."""
        softmax = self.candidates
        return softmax.root if softmax is not None and softmax.whole_union else ""

    # The parameters

    def pack(self, module: nn.Module) -> Floats:
        """The dense part of a module of this kind, one vector in the order of `dense`."""
        parameters = dict(module.named_parameters())
        parts = [parameters[name].detach().numpy().reshape(-1) for name, _ in self.dense]
        return np.concatenate([np.empty(0, np.float32), *parts]).astype(np.float32)

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The dense parameters as views of a vector."""
        if vector.shape[-1] != self.dense_size:
            raise MisuseError(
                f"a dense part of {vector.shape[-1]} values, the module has {self.dense_size}"
            )
        views, start = {}, 0
        for name, shape in self.dense:
            end = start + math.prod(shape)
            views[name] = vector[start:end].view(shape)
            start = end
        return views

    def initial(self, name: str) -> Floats:
        """A table's first rows: the module's own values, all of them."""
        table = self._by_name[name]
        if table.initial is not None:
            raise MisuseError(f"table {name!r} starts by a rule: see `table`")
        return self._weights[name].numpy().astype(np.float32)

    def spec(self, name: str, *, seed: int = 0) -> TableSpec:
        """A table as the rounds and the store know it; `Given` if it starts from the module."""
        table = self._by_name[name]
        return TableSpec(
            name=name,
            size=table.rows,
            width=table.width,
            initial=Given() if table.initial is None else table.initial,
            seed=seed,
        )

    def table(self, name: str, *, seed: int = 0) -> StoredTable:
        """The table before any training: from the module, or by its rule and this seed."""
        if self._by_name[name].initial is None:
            return DenseTable.from_array(name, self.initial(name))
        return LazyTable(self.spec(name, seed=seed))

    def parameters(self, dense: Floats, tables: Mapping[str, V]) -> dict[str, Floats | V]:
        """A dense vector and tables by their names, as one dictionary by parameter name."""
        parts: dict[str, Floats | V] = {
            name: view.numpy() for name, view in self.unpack(torch.tensor(dense)).items()
        }
        return parts | {table.parameter: tables[table.name] for table in self.tables}

    def derived_maps(self) -> dict[str, DerivedMap]:
        """For each table that follows another, the map from the other's rows to its own."""
        return dict(self._maps)

    # The examples

    def fields_of(self, name: str) -> tuple[str, ...]:
        """The fields that name rows of a table, or of one that shares its rows."""
        return self._reads[self._leaders[name]]

    def row_ids_of(self, examples: Examples) -> dict[str, Ids]:
        """The rows these examples touch, for tables that are fetched and follow no other."""
        return self._touched(examples, local=False)

    def local_row_ids_of(self, examples: Examples) -> dict[str, Ids]:
        """The rows these examples touch of the tables that stay with the client."""
        return self._touched(examples, local=True)

    def all_row_ids_of(self, examples: Examples, candidates: Ids | None = None) -> dict[str, Ids]:
        """Both of these, and the rows that follow in derived tables.

        Where there is a softmax, `candidates` are the rows it is over; without them it is over
        those that the examples touch.
        """
        given: dict[str, Ids] = {}
        if self.candidates is not None and candidates is not None:
            given[self.candidates.root] = candidates
        rows = self._touched(examples, local=False, given=given) | self.local_row_ids_of(examples)
        for name, to in self._maps.items():
            rows[name] = to.row_ids(rows[to.parent.name])
        return rows

    def cut(self, examples: Examples, trained: Mapping[str, Ids]) -> Examples:
        """The succinct training set: what these examples say about the rows in `trained`.

        The two rules of Niu et al. 2020, long version, section VI. An example whose single id of a
        table (the target) is not trained is left out. In sequences, ids that are not trained become
        "none", and an example that had ids in a sequence and has none left there is left out. We
        depart from the paper once: an example whose sequence was empty from the start stays, as a
        client's first clicks are examples too. A single id that is "none" asks for no row and stays
        as well.
        """
        return self.cut_with_places(examples, trained)[0]

    def cut_with_places(
        self, examples: Examples, trained: Mapping[str, Ids]
    ) -> tuple[Examples, dict[str, npt.NDArray[np.int64]]]:
        """The same, and by field where its ids stand among the trained rows, -1 for "none"."""
        keep = np.ones(len(examples), dtype=np.bool_)
        fields: dict[str, npt.NDArray[Any]] = {}
        places: dict[str, npt.NDArray[np.int64]] = {}
        for name, reads in self._reads.items():
            table = self._by_name[name]
            if table.local:
                continue
            if name not in trained:
                raise MisuseError(f"table {name!r}: the trained rows are missing")
            for own in reads:
                ids = self._column(examples, own, table)
                at, there = _search(ids, trained[name])
                places[own] = at
                if there.all():
                    continue
                if ids.ndim == 1:
                    keep &= there | (ids < 0)
                    continue
                keep &= there.any(axis=1) | (ids < 0).all(axis=1)
                fields[own] = np.where(there, ids, NONE)
        every = Examples({**examples.fields, **fields})
        if keep.all():
            return every, places
        return every.take(keep), {own: at[keep] for own, at in places.items()}

    def fetched_fields(self, examples: Examples) -> dict[str, dict[str, npt.NDArray[np.int64]]]:
        """The columns that name rows, by the table that they name them of; local tables aside.

        Tables that follow another have no rows of their own to name.
        """
        return {
            name: {own: self._column(examples, own, self._by_name[name]) for own in reads}
            for name, reads in self._reads.items()
            if not self._by_name[name].local
        }

    def positions(
        self,
        examples: Examples,
        ids: Mapping[str, Ids],
        known: Mapping[str, npt.NDArray[np.int64]] | None = None,
    ) -> Batch:
        """A batch for a module that holds, of each table, only the rows in `ids`.

        Id fields become int64 positions in the table's `ids`, "none" becomes -1, derived fields are
        added; all else is as it was. Derived tables that are missing in `ids` hold exactly the rows
        that follow from their parent's. `known` has the positions of some fields already.
        """
        batch: Batch = {**examples.fields, **(known or {})}
        for name, reads in self._reads.items():
            table = self._by_name[name]
            for own in reads:
                if known is not None and own in known:
                    continue
                batch[own] = _positions(self._column(examples, own, table), ids[name], table)
        for name, what in self._derived.items():
            parent = self._maps[name].parent.name
            images = self._maps[name].images(ids[parent])
            own_ids = ids[name] if name in ids else distinct(images)
            # One lookup per parent row, then one per id; the last entry serves "none", which is -1.
            to = _positions(images.astype(np.int64), own_ids, self._by_name[name])
            to = np.append(to, np.int64(NONE))
            for own, source in what.fields.items():
                batch[own] = to[batch[source]]
        return batch

    def involved(
        self, batch: Mapping[str, npt.NDArray[Any]], table: str, k: int
    ) -> npt.NDArray[np.int64]:
        """For each of the k rows at hand, how many examples involve it; each counts once.

        Every example involves all candidates of a softmax, so that counts do not tell a client's
        own rows from its negatives.
        """
        if self._by_name[table].candidates:
            return np.full(k, len(batch[self._by_name[table].fields[0]]), dtype=np.int64)
        columns = [
            column if column.ndim == 2 else column[:, None]
            for column in (batch[own] for own in self._by_name[table].fields)
        ]
        at = np.sort(np.concatenate(columns, axis=1), axis=1)
        first = at >= 0
        first[:, 1:] &= at[:, 1:] != at[:, :-1]
        return np.bincount(at[first], minlength=k).astype(np.int64)

    def _touched(
        self, examples: Examples, *, local: bool, given: Mapping[str, Ids] | None = None
    ) -> dict[str, Ids]:
        touched = dict(given or {})
        for name, leader in self._leaders.items():
            table = self._by_name[name]
            if table.local != local or table.derived_from is not None or name in touched:
                continue
            columns = [self._column(examples, own, table) for own in self._reads[leader]]
            flat = np.concatenate([column.reshape(-1) for column in columns])
            ids = distinct(flat[flat >= 0].astype(np.uint64))
            self.spec(name).check(ids)
            touched[name] = ids
        return touched

    def _column(self, examples: Examples, own: str, table: BoundTable) -> npt.NDArray[np.int64]:
        if own not in examples.fields:
            raise ConfigError(
                f"table {table.name!r} is indexed by field {own!r}, which the examples do not have",
                hint=closest(own, examples.fields),
            )
        column = examples[own]
        if column.dtype.kind not in "iu" or column.ndim not in (1, 2):
            raise ConfigError(
                f"field {own!r} indexes table {table.name!r} and is {column.dtype} with "
                f"{column.ndim} dimensions",
                hint="ids are whole numbers, one per example or one sequence per example",
            )
        return column.astype(np.int64, copy=False)


_LISTED: Final = 1 << 16
"""Ids below this are found in a list of all of them, others by a search."""


def _itself(ids: Ids) -> Ids:
    return ids


def _search(
    ids: npt.NDArray[np.int64], rows: Ids
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where each id is among these rows, -1 where it is not, and whether it is; "none" never is."""
    if rows.size == 0:
        return np.full(ids.shape, NONE, np.int64), np.zeros(ids.shape, np.bool_)
    last = int(rows[-1])
    if last < _LISTED:
        places = np.full(last + 3, NONE, np.int64)  # the first and the last serve all others
        places[1:-1][rows] = np.arange(rows.size)
        at = places.take(ids + 1, mode="clip")
        return at, at >= 0
    known = rows.astype(np.int64)
    at = np.searchsorted(known, ids)
    at[at == known.size] = 0
    there = (known[at] == ids) & (ids >= 0)
    return np.where(there, at, NONE), there


def _positions(ids: npt.NDArray[np.int64], rows: Ids, table: BoundTable) -> npt.NDArray[np.int64]:
    """Positions in `rows`, -1 for "none"."""
    at, there = _search(ids, rows)
    if not (there.all() or (there | (ids < 0)).all()):
        raise MisuseError(f"table {table.name!r}: a batch needs a row that is not at hand")
    return at


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Tables that share fields, hence positions: one list of rows per step serves them all."""

    tables: tuple[BoundTable, ...]
    fields: tuple[str, ...]


def table_groups(bound: BoundModel) -> tuple[TableGroup, ...]:
    """The tables by the fields they share, directly or through others."""
    found: list[tuple[list[BoundTable], set[str]]] = []
    for table in bound.tables:
        tables, fields = [table], set(table.fields)
        apart = []
        for other in found:
            if fields & other[1]:
                tables, fields = other[0] + tables, fields | other[1]
            else:
                apart.append(other)
        found = [*apart, (tables, fields)]
    return tuple(TableGroup(tuple(tables), tuple(sorted(fields))) for tables, fields in found)


KEY_BYTES: Final = 16


def first_rows(bound: BoundModel, name: str, ids: Ids, secret: Secret) -> Floats:
    """The first values of a client's rows of a local table."""
    return _like(bound, name)(_drawn(name, ids, bound[name].width, secret))


def _drawn(name: str, ids: Ids, width: int, secret: Secret) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1), which follow from the client's secret alone."""
    key = secret.derive(Label.OWN_ROWS, name, size=KEY_BYTES).reveal()
    return units(key, ids, width)


def _like(bound: BoundModel, name: str) -> Callable[[npt.NDArray[np.float64]], Floats]:
    """Values by the table's rule; where the table begins as the module has it, each column is
    normal with the mean and deviation that it has there, so that a constant one stays so."""
    rule = bound[name].initial
    if rule is not None:
        return lambda u: shaped(rule, u).astype(np.float32)
    begins = bound.initial(name).astype(np.float64)
    mean, deviation = begins.mean(0), begins.std(0)
    return lambda u: (mean + shaped(Normal(1.0), u) * deviation).astype(np.float32)


class OwnRows(LazyTable):
    """A local table of all clients of a simulation: each row is first drawn by its client."""

    def __init__(self, bound: BoundModel, name: str, data: ClientData, secret_of: SecretOf) -> None:
        shape = bound[name]
        super().__init__(
            TableSpec(name=name, size=shape.rows, width=shape.width, initial=PerClient())
        )
        self._secret_of, self._like = secret_of, _like(bound, name)
        self._rows, self._clients = owners(bound, name, data)
        self._first = LazyTable(TableSpec(name=name, size=shape.rows, width=shape.width))

    def initial(self, ids: Ids) -> Floats:
        """Drawn when first read, and kept: a row may be read in every test of the model."""
        fresh = ids[~self._first.holds(ids)]
        if fresh.size:
            self._first.restore(fresh, self._like(self._units(fresh)))
        return self._first.values(ids)

    def _units(self, ids: Ids) -> npt.NDArray[np.float64]:
        u = np.full((ids.size, self.width), 0.5)  # for rows that nobody has
        at = np.searchsorted(self._rows, ids)
        there = np.flatnonzero(at < self._rows.size)
        there = there[self._rows[at[there]] == ids[there]]
        whose = self._clients[at[there]]
        order = np.argsort(whose, kind="stable")
        begins = np.flatnonzero(np.diff(whose[order], prepend=-1))
        for own in np.split(there[order], begins[1:]):
            if own.size:
                secret = self._secret_of(int(self._clients[at[own[0]]]))
                u[own] = _drawn(self.name, ids[own], self.width, secret)
        return u


def owners(bound: BoundModel, name: str, data: ClientData) -> tuple[Ids, npt.NDArray[np.int64]]:
    """The rows of a local table that some client's examples touch, and whose each is: of several
    clients', the first's."""
    rows, clients = [], []
    for examples, offsets in ((data.train, data.offsets), (data.test, data.test_offsets)):
        client = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        for field in bound[name].fields:
            column = examples[field]
            rows.append(column.reshape(-1))
            clients.append(np.repeat(client, column.size // max(len(column), 1)))
    every, whose = np.concatenate(rows), np.concatenate(clients)
    order = np.lexsort((whose, every))
    every, whose = every[order], whose[order]
    first = every >= 0
    first[1:] &= every[1:] != every[:-1]
    return every[first].astype(np.uint64), whose[first]
