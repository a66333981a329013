"""Initial values of layers that several models have."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def reset(module: nn.Module, generator: torch.Generator) -> None:
    """Layers and convolutions uniform by fan-in, as torch does, drawn from this generator."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            if layer.bias is not None:
                layer.bias.uniform_(-bound, bound, generator=generator)
