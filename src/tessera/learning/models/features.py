"""Ratings from attributes alone, one model for everybody: the baselines of Yang et al. 2021.

Linear, a factorisation machine (Rendle 2010, equation 1), or a small network over a client's own
profile and the public attributes of an item. All parameters are dense: there is no table, and no
row to hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from tessera.errors import ConfigError
from tessera.learning.rating_models import BASE

FEATURES: Final = "features"
ORDERS: Final = ("linear", "fm", "network")


class FeatureModel(nn.Module):
    """`base` plus what the attributes say; `order` is "linear", "fm" or "network"."""

    def __init__(
        self,
        columns: int,
        *,
        order: str = "linear",
        rank: int = 8,
        hidden: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ConfigError(f"model = {order!r}", hint=f"one of {', '.join(ORDERS)}")
        self.order = order
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.linear = nn.Linear(columns, 1)
            if order == "fm":
                self.pairs = nn.Parameter(torch.empty(columns, rank))
            if order == "network":
                self.inner = nn.Linear(columns, hidden)
                self.outer = nn.Linear(hidden, 1)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "pairs":
                    parameter.normal_(0.0, 0.05, generator=generator)
                elif name == "inner.weight":
                    parameter.normal_(0.0, columns**-0.5, generator=generator)
                else:
                    parameter.zero_()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch[FEATURES]  # (B, F)
        rating: Tensor = batch[BASE] + self.linear(x).squeeze(-1)
        if self.order == "fm":
            # The sum over pairs in linear time (Rendle 2010, Lemma 3.1).
            joint = (x @ self.pairs).square() - x.square() @ self.pairs.square()
            rating = rating + 0.5 * joint.sum(-1)
        elif self.order == "network":
            rating = rating + self.outer(torch.relu(self.inner(x))).squeeze(-1)
        return rating
