"""Tables: which parameters of a user's own module are tables, and which fields index them.

    tables = Tables({
        "items.weight": Table("item", "history"),
        "categories.weight": Derived(
            "items.weight", category_of, {"category": "item", "history_category": "history"}
        ),
        "users.weight": Local("user"),
    })
    bound = tables.bind(module)

A module is called as `module(batch)` with a dictionary of tensors. It runs on a submodel as it does
on the whole model: ids become positions among the rows at hand, and `functional_call` puts those
rows where the parameter was. An id of -1 means none; in a sequence it reaches the module as -1, to
be clamped and masked there. A module that is fed so must not keep statistics of its batches.

Several tables may be indexed by one field (an embedding and a bias per item). The first of them is
the one that is fetched; the others follow it row for row, as derived tables do: two independent
randomised answers about one set would reveal more than one (Niu et al. 2020, long version, VI).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tessera.errors import ConfigError, closest
from tessera.learning.bound_model import (
    BoundModel,
    BoundTable,
    Candidates,
    Declaration,
    Derived,
    Local,
    Table,
)
from tessera.learning.softmax import Softmax
from tessera.learning.tables.table import Given

# --- module check ---------------------------------------------------------------------------------
#
# What a module and its parameters must be like, so that they can be trained by rows.


def check_module(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
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


def check_table(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    name: str,
    what: Declaration,
) -> None:
    if name not in parameters:
        raise ConfigError(f"the module has no parameter {name!r}", hint=closest(name, parameters))
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
            hint="leave max_norm out; [training] clip bounds the gradient",
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


# --- module tables --------------------------------------------------------------------------------


class Tables:
    """The tables of a module, by parameter name; parameters not named here are the dense part."""

    def __init__(self, tables: Mapping[str, Declaration]) -> None:
        self.tables = dict(tables)

    def bind(self, module: nn.Module, softmax: Softmax | None = None) -> BoundModel:
        """Check the names, shapes and fields against the module: a `ConfigError` says what is off.

        The module's values stay its own: they are the first model, and nothing here changes them.
        `softmax` is the loss, if it is one over the rows of a table.
        """
        parameters = dict(module.named_parameters())
        check_module(module, parameters)
        for name, what in self.tables.items():
            check_table(module, parameters, name, what)
        leaders = _leaders(self._fields(Table)) | _leaders(self._fields(Local))
        candidates = () if softmax is None else self._check_softmax(softmax, leaders)
        bound = {
            name: self._bound(name, parameters[name], leaders.get(name, name), name in candidates)
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
        return BoundModel(
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
            candidates=None
            if softmax is None
            else Candidates(
                root=_short(leaders[softmax.tables[0]]),
                target=softmax.target,
                rows=bound[softmax.tables[0]].rows,
                negatives=softmax.negatives,
                log_weights=softmax.log_weights,
                weights=softmax.weights,
                whole_union=softmax.whole_union,
                counts_digest=softmax.counts_digest,
            ),
        )

    def _check_softmax(self, softmax: Softmax, leaders: Mapping[str, str]) -> tuple[str, ...]:
        """The tables a softmax is over: fetched ones, row for row, that its target indexes."""
        for name in softmax.tables:
            if not isinstance(self.tables.get(name), Table):
                known = list(self._fields(Table))
                raise ConfigError(
                    f"Softmax: {name!r} is not a Table, whose rows are fetched and updated",
                    hint=closest(name, known),
                )
        first = softmax.tables[0]
        reads = [f for name in self._fields(Table) for f in self.tables[name].fields]
        if softmax.target not in reads:
            raise ConfigError(
                f"Softmax: its target {softmax.target!r} does not index {first!r}",
                hint=f'add the field to the table: Table(..., "{softmax.target}")',
            )
        for name in softmax.tables:
            if leaders[name] != leaders[first] or softmax.target not in self.tables[name].fields:
                raise ConfigError(
                    f"Softmax: table {name!r} is not indexed by the target {softmax.target!r}",
                    hint=f'add the field to the table: Table(..., "{softmax.target}")',
                )
        return softmax.tables

    def _fields(self, kind: type[Table] | type[Local]) -> dict[str, tuple[str, ...]]:
        return {name: what.fields for name, what in self.tables.items() if isinstance(what, kind)}

    def _bound(
        self, name: str, parameter: nn.Parameter, leader: str, candidates: bool
    ) -> BoundTable:
        what = self.tables[name]
        own, width = parameter.shape
        size = None if isinstance(what, Local) else what.size
        parent = None
        if isinstance(what, Derived):
            parent = what.parent
        elif isinstance(what, Table) and leader != name:
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
            candidates=candidates,
        )

    def _check_fields(self, leaders: Mapping[str, str]) -> None:
        """Every field has one meaning, and derived tables hang on tables that are fetched."""
        owner: dict[str, str] = {}  # field -> the table that leads there
        for name, leader in leaders.items():
            for own in self.tables[name].fields:
                if owner.setdefault(own, leader) != leader:
                    raise ConfigError(
                        f"field {own!r} indexes a Table and a Local table ({owner[own]!r}, "
                        f"{leader!r})",
                        hint="a local table's ids need a field of their own",
                    )
        derived: dict[str, tuple[str, Derived]] = {}
        for name, what in self.tables.items():
            if not isinstance(what, Derived):
                continue
            if not isinstance(self.tables.get(what.parent), Table) or (
                leaders[what.parent] != what.parent
            ):
                roots = [root for root in self._fields(Table) if leaders[root] == root]
                raise ConfigError(
                    f"table {name!r} is derived from {what.parent!r}, which is not a "
                    "table that is fetched on its own",
                    hint=closest(what.parent, roots),
                )
            for own, source in what.fields.items():
                if owner.get(source) != what.parent:
                    known = [f for f, leader in owner.items() if leader == what.parent]
                    raise ConfigError(
                        f"table {name!r}: field {own!r} comes from {source!r}, which does not "
                        f"index {what.parent!r}",
                        hint=closest(source, known),
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


def _short(parameter: str) -> str:
    return parameter.removesuffix(".weight") or parameter


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
