"""Tables over a user's own module: which parameters are tables, and which fields index them.

    tables = Tables({
        "items.weight": Rows("item", "history"),
        "categories.weight": Derived(
            "items.weight", category_of, {"category": "item", "history_category": "history"}
        ),
        "users.weight": Local("user"),
    })
    binding = tables.bind(module)

A module is called as `module(batch)` with a dictionary of tensors. It runs on a submodel as it does
on the whole model: ids become positions among the rows at hand, and `functional_call` puts those
rows where the parameter was. An id of -1 means none; in a sequence it reaches the module as -1, to
be clamped and masked there. A module that is fed so must not keep statistics of its batches.

Several tables may be indexed by one field (an embedding and a bias per item). The first of them is
the one that is fetched; the others follow it row for row, as derived tables do, since rows
randomised twice on their own would say more than once (003, VI).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tessera.data.examples import NONE, Examples
from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables import (
    BornTable,
    DenseTable,
    DerivedMap,
    Distribution,
    Given,
    Ids,
    Table,
    TableSpec,
)

Source: TypeAlias = npt.NDArray[np.integer[Any]] | Callable[[Ids], npt.NDArray[np.integer[Any]]]
"""A public map from a parent's rows: an array over all of them, or a function of ids."""

Floats: TypeAlias = npt.NDArray[np.float32]
Counts: TypeAlias = npt.NDArray[np.int64]

V = TypeVar("V")

Batch: TypeAlias = dict[str, npt.NDArray[Any]]
"""Columns in which ids are positions among the rows at hand."""

# --- What a user says -----------------------------------------------------------------------------


class Rows:
    """A table: its rows are fetched and updated. `fields` hold its ids, (N,) or (N, T).

    With `initial`, a row starts by that rule and not from the module's own values, and `size` may
    be any number of rows: the module's parameter then only gives the width.
    """

    def __init__(
        self, *fields: str, size: int | None = None, initial: Distribution | None = None
    ) -> None:
        self.fields = fields
        self.size = size
        self.initial = initial


class Derived:
    """A table whose rows follow from a parent's by a public map (goods -> category).

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
        initial: Distribution | None = None,
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


class Tables:
    """The tables of a module, by parameter name; parameters not named here are the dense part."""

    def __init__(self, tables: Mapping[str, Rows | Derived | Local]) -> None:
        self.tables = dict(tables)

    def bind(self, module: nn.Module) -> Binding:
        """Check the names, shapes and fields against the module: a `ConfigError` says what is off.

        The module's values stay its own: they are the first model, and nothing here changes them.
        """
        parameters = dict(module.named_parameters())
        _check_module(module, parameters)
        for name, what in self.tables.items():
            _check_table(module, parameters, name, what)
        leaders = _leaders(self._fields(Rows)) | _leaders(self._fields(Local))
        bound = {
            name: self._bound(name, parameters[name], leaders.get(name, name))
            for name in self.tables
        }
        for name, leader in leaders.items():
            if bound[name].rows != bound[leader].rows:
                raise ConfigError(
                    f"tables {leader!r} and {name!r} share a field and have {bound[leader].rows} "
                    f"and {bound[name].rows} rows",
                    hint="make them equally long, or index them by fields of their own",
                )
        self._check_fields(leaders)
        return Binding(
            tables=tuple(bound.values()),
            dense=tuple(
                (name, tuple(parameter.shape))
                for name, parameter in parameters.items()
                if parameter.requires_grad and name not in self.tables
            ),
            weights={_short(name): parameters[name].detach() for name in self.tables},
            derived={
                _short(name): what
                for name, what in self.tables.items()
                if isinstance(what, Derived)
            },
            leaders={_short(name): _short(leader) for name, leader in leaders.items()},
        )

    def _fields(self, kind: type[Rows] | type[Local]) -> dict[str, tuple[str, ...]]:
        return {name: what.fields for name, what in self.tables.items() if isinstance(what, kind)}

    def _bound(self, name: str, parameter: nn.Parameter, leader: str) -> BoundTable:
        what = self.tables[name]
        own, width = parameter.shape
        size = None if isinstance(what, Local) else what.size
        parent = None
        if isinstance(what, Derived):
            parent = what.parent
        elif isinstance(what, Rows) and leader != name:
            parent = leader
        return BoundTable(
            name=_short(name),
            parameter=name,
            rows=own if size is None else size,
            width=width,
            derived_from=None if parent is None else _short(parent),
            local=isinstance(what, Local),
            fields=tuple(what.fields),
            initial=None if isinstance(what, Local) else what.initial,
        )

    def _check_fields(self, leaders: Mapping[str, str]) -> None:
        """Every field has one meaning, and derived tables hang on tables that are fetched."""
        owner: dict[str, str] = {}  # field -> the table that leads there
        for name, leader in leaders.items():
            for own in self.tables[name].fields:
                if owner.setdefault(own, leader) != leader:
                    raise ConfigError(
                        f"field {own!r} indexes a table of Rows and a Local one ({owner[own]!r}, "
                        f"{leader!r})",
                        hint="a local table's ids need a field of their own",
                    )
        derived: dict[str, tuple[str, Derived]] = {}
        for name, what in self.tables.items():
            if not isinstance(what, Derived):
                continue
            if not isinstance(self.tables.get(what.parent), Rows) or (
                leaders[what.parent] != what.parent
            ):
                roots = [root for root in self._fields(Rows) if leaders[root] == root]
                raise ConfigError(
                    f"table {name!r} is derived from {what.parent!r}, which is no table that is "
                    "fetched on its own",
                    hint=_closest(what.parent, roots),
                )
            for own, source in what.fields.items():
                if owner.get(source) != what.parent:
                    known = [f for f, leader in owner.items() if leader == what.parent]
                    raise ConfigError(
                        f"table {name!r}: field {own!r} comes from {source!r}, which does not "
                        f"index {what.parent!r}",
                        hint=_closest(source, known),
                    )
                if own in owner:
                    raise ConfigError(
                        f"table {name!r}: field {own!r} indexes {owner[own]!r} already",
                        hint="give the derived table a field of its own",
                    )
                twin, first = derived.setdefault(own, (name, what))
                if (first.parent, first.fields[own]) != (what.parent, source) or (
                    first.source is not what.source
                ):
                    raise ConfigError(
                        f"tables {twin!r} and {name!r} derive field {own!r} in two ways",
                        hint="use one map for both, or two fields",
                    )


# --- What the learners use ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTable:
    """A table of a bound module. `name` is the parameter's without a trailing ".weight".

    `derived_from` names the table whose rows decide its own. `initial` is the rule untouched rows
    follow; without one they are the module's.
    """

    name: str
    parameter: str
    rows: int
    width: int
    derived_from: str | None
    local: bool
    fields: tuple[str, ...]
    initial: Distribution | None = None


class Binding:
    """A module's parameters as a dense vector and tables, and examples as rows and positions."""

    def __init__(
        self,
        *,
        tables: tuple[BoundTable, ...],
        dense: tuple[tuple[str, tuple[int, ...]], ...],
        weights: Mapping[str, Tensor],
        derived: Mapping[str, Derived],
        leaders: Mapping[str, str],
    ) -> None:
        """Not for callers: `Tables.bind` checks what this takes for granted."""
        self.tables = tables
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

    def table(self, name: str, *, seed: int = 0) -> Table:
        """The table before any training: from the module, or by its rule and this seed."""
        if self._by_name[name].initial is None:
            return DenseTable.from_array(name, self.initial(name))
        return BornTable(self.spec(name, seed=seed))

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

    def rows_of(self, examples: Examples) -> dict[str, Ids]:
        """The rows these examples touch, for tables that are fetched and follow no other."""
        return self._touched(examples, local=False)

    def local_rows_of(self, examples: Examples) -> dict[str, Ids]:
        """The rows these examples touch of the tables that stay with the client."""
        return self._touched(examples, local=True)

    def all_rows_of(self, examples: Examples) -> dict[str, Ids]:
        """Both of these, and the rows that follow in derived tables."""
        rows = self.rows_of(examples) | self.local_rows_of(examples)
        for name, to in self._maps.items():
            rows[name] = to.rows(rows[to.parent.name])
        return rows

    def cut(self, examples: Examples, trained: Mapping[str, Ids]) -> Examples:
        """The succinct training set: what these examples say about the rows in `trained`.

        The two rules of 003, section VI. An example whose single id of a table (the target) is not
        trained is left out. In sequences, ids that are not trained become "none", and an example
        that had ids in a sequence and has none left there is left out. We depart from the paper
        once: an example whose sequence was empty from the start stays, as a client's first clicks
        are examples too. A single id that is "none" asks for no row and stays as well.
        """
        keep = np.ones(len(examples), dtype=np.bool_)
        fields: dict[str, npt.NDArray[Any]] = {}
        for name, reads in self._reads.items():
            table = self._by_name[name]
            if table.local:
                continue
            if name not in trained:
                raise MisuseError(f"table {name!r}: the trained rows are missing")
            for own in reads:
                ids = self._column(examples, own, table)
                _, there = _search(ids, trained[name])
                if ids.ndim == 1:
                    keep &= there | (ids < 0)
                    continue
                keep &= there.any(axis=1) | (ids < 0).all(axis=1)
                fields[own] = np.where(there, ids, NONE)
        if keep.all():
            return Examples({**examples.fields, **fields})
        return Examples({**examples.fields, **fields}).take(keep)

    def positions(self, examples: Examples, ids: Mapping[str, Ids]) -> Batch:
        """A batch for a module that holds, of each table, only the rows in `ids`.

        Id fields become int64 positions in the table's `ids`, "none" becomes -1, derived fields are
        added; all else is as it was. Derived tables that are missing in `ids` hold exactly the rows
        that follow from their parent's.
        """
        batch: Batch = dict(examples.fields)
        for name, reads in self._reads.items():
            table = self._by_name[name]
            for own in reads:
                batch[own] = _positions(self._column(examples, own, table), ids[name], table)
        for name, what in self._derived.items():
            parent = self._maps[name].parent.name
            images = self._maps[name].images(ids[parent])
            own_ids = ids[name] if name in ids else _distinct(images)
            # One lookup per parent row, then one per id; the last entry serves "none", which is -1.
            to = _positions(images.astype(np.int64), own_ids, self._by_name[name])
            to = np.append(to, np.int64(NONE))
            for own, source in what.fields.items():
                batch[own] = to[batch[source]]
        return batch

    def involved(self, batch: Mapping[str, npt.NDArray[Any]], table: str, k: int) -> Counts:
        """For each of the k rows at hand, how many examples involve it; each counts once."""
        columns = [
            column if column.ndim == 2 else column[:, None]
            for column in (batch[own] for own in self._by_name[table].fields)
        ]
        at = np.sort(np.concatenate(columns, axis=1), axis=1)
        first = at >= 0
        first[:, 1:] &= at[:, 1:] != at[:, :-1]
        return np.bincount(at[first], minlength=k).astype(np.int64)

    def _touched(self, examples: Examples, *, local: bool) -> dict[str, Ids]:
        touched = {}
        for name, leader in self._leaders.items():
            table = self._by_name[name]
            if table.local != local or table.derived_from is not None:
                continue
            columns = [self._column(examples, own, table) for own in self._reads[leader]]
            flat = np.concatenate([column.reshape(-1) for column in columns])
            ids = _distinct(flat[flat >= 0].astype(np.uint64))
            self.spec(name).check(ids)
            touched[name] = ids
        return touched

    def _column(self, examples: Examples, own: str, table: BoundTable) -> npt.NDArray[np.int64]:
        if own not in examples.fields:
            raise ConfigError(
                f"table {table.name!r} is indexed by field {own!r}, which the examples do not have",
                hint=_closest(own, examples.fields),
            )
        column = examples[own]
        if column.dtype.kind not in "iu" or column.ndim not in (1, 2):
            raise ConfigError(
                f"field {own!r} indexes table {table.name!r} and is {column.dtype} with "
                f"{column.ndim} dimensions",
                hint="ids are whole numbers, one per example or one sequence per example",
            )
        return column.astype(np.int64, copy=False)


# --- Checks and small steps -----------------------------------------------------------------------


def _short(parameter: str) -> str:
    return parameter.removesuffix(".weight") or parameter


def _closest(wanted: str, names: Iterable[str]) -> str:
    known = list(names)
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known) or 'none'}"


def _check_module(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, _ in module.named_buffers():
        last = name.rpartition(".")[2]
        if last.startswith(("running_", "moving_")) or last == "num_batches_tracked":
            raise ConfigError(
                f"the module keeps statistics of its batches in {name!r}, which clients with a few "
                "examples each cannot share",
                hint="normalise per example (LayerNorm), or track_running_stats=False",
            )
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}, models are trained in float32",
                hint="call module.float() first",
            )


def _check_table(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    name: str,
    what: Rows | Derived | Local,
) -> None:
    if name not in parameters:
        raise ConfigError(f"the module has no parameter {name!r}", hint=_closest(name, parameters))
    parameter = parameters[name]
    if parameter.ndim != 2:
        raise ConfigError(
            f"parameter {name!r} has shape {tuple(parameter.shape)}, a table has rows and columns",
            hint="for one number per row use a width of 1, as in nn.Embedding(rows, 1)",
        )
    if not parameter.requires_grad:
        raise ConfigError(
            f"parameter {name!r} is frozen, so there is nothing to fetch and update",
            hint="leave it out of Tables, or set requires_grad",
        )
    owner = module.get_submodule(name.rpartition(".")[0])
    if getattr(owner, "padding_idx", None) is not None:
        raise ConfigError(
            f"table {name!r} has padding_idx = {owner.padding_idx}, which is another row in each "
            "submodel",
            hint="leave padding_idx out; clamp ids at 0 and mask where they are negative",
        )
    if getattr(owner, "max_norm", None) is not None:
        raise ConfigError(
            f"table {name!r} has max_norm, which changes rows outside of training",
            hint="leave max_norm out; recipe.clip bounds the gradient",
        )
    if not what.fields:
        raise ConfigError(
            f"table {name!r} has no fields",
            hint=f'name the fields that hold its ids, as in {type(what).__name__}("item")',
        )
    if isinstance(what, Local):
        return
    if isinstance(what.initial, Given):
        raise ConfigError(
            f"table {name!r}: rows that are given are those of the module",
            hint="leave initial out",
        )
    if what.initial is None and what.size not in (None, len(parameter)):
        raise ConfigError(
            f"table {name!r} has {len(parameter)} rows in the module, and size = {what.size}",
            hint="say how a row starts, as in initial=Normal(0.01), or leave size out",
        )


def _leaders(fields: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """For each table the first one it shares fields with, directly or through others."""
    names = list(fields)
    leader: dict[str, str] = {}  # by field
    for name, own in fields.items():
        met = {leader[f] for f in own if f in leader}
        first = min({*met, name}, key=names.index)
        leader.update({f: first for f, other in leader.items() if other in met})
        leader.update(dict.fromkeys(own, first))
    return {name: leader[own[0]] for name, own in fields.items()}


def _itself(ids: Ids) -> Ids:
    return ids


def _distinct(ids: npt.NDArray[np.uint64]) -> Ids:
    """Sorted, without repeats; `np.unique` is far slower for uint64."""
    ids = np.sort(ids)
    first = np.ones(ids.size, dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    return ids[first]


def _search(
    ids: npt.NDArray[np.int64], rows: Ids
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where each id is among these rows, and whether it is; "none" never is."""
    if rows.size == 0:
        return np.zeros(ids.shape, np.int64), np.zeros(ids.shape, np.bool_)
    known = rows.astype(np.int64)
    at = np.searchsorted(known, ids)
    at[at == known.size] = 0
    return at, (known[at] == ids) & (ids >= 0)


def _positions(ids: npt.NDArray[np.int64], rows: Ids, table: BoundTable) -> npt.NDArray[np.int64]:
    """Positions in `rows`, -1 for "none"."""
    at, there = _search(ids, rows)
    if not (there | (ids < 0)).all():
        raise MisuseError(f"table {table.name!r}: a batch needs a row that is not at hand")
    return np.where(there, at, NONE)
