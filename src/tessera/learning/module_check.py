"""What a module and its parameters must be like, so that they can be trained by rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tessera.errors import ConfigError
from tessera.learning.declaration import Declaration, Local
from tessera.learning.initial import Given
from tessera.learning.spelling import closest


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
