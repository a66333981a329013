"""Lags: which item comes next, from a weighted sum of the rows of the last ones.

    h = sum over lags of w[lag] * row(item so long ago)     w: a number per lag and column
    h = h + MLP(LayerNorm(h))                               one residual layer, GELU
    score of an item = h . its row + its bias

Items before and items to come have the same rows, so that a client fetches one row for each. The
weights start as exp(-lag / 4) + .02: the latest item counts most, and older ones a little. A fixed
decay per lag is what linear sequence models have (Choi et al. 2021); here it is learnt.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.learning.models.classifiers import reset

ITEMS, BIASES = "items.weight", "biases.weight"


def kept(drawn: Tensor, dropout: float) -> Tensor:
    """What dropout multiplies by, from draws between 0 and 1; in place.

    PyTorch's own takes twice as long to draw.
    """
    return drawn.lt_(1.0 - dropout).div_(1.0 - dropout)


class LagModel(nn.Module):
    """Logits (B, K) over the items at hand from a `sequence` (B, T), the latest item first.

    `sequence` is the field that holds it. `dropout` is of the residual layer, in training. `seed`
    alone decides the initial values.
    """

    def __init__(
        self,
        items: int,
        *,
        length: int = 50,
        width: int = 64,
        dropout: float = 0.2,
        spread: float = 0.05,
        sequence: str = "history",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dropout, self.sequence = dropout, sequence
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.items = nn.Embedding(items, width)
            self.biases = nn.Embedding(items, 1)
            self.lags = nn.Parameter(torch.empty(length, width))
            self.norm = nn.LayerNorm(width)
            self.inner = nn.Linear(width, 2 * width)
            self.outer = nn.Linear(2 * width, width)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        reset(self, generator)
        with torch.no_grad():
            self.norm.weight.fill_(1.0)
            self.norm.bias.zero_()
            self.lags.copy_((-torch.arange(length) / 4.0).exp().add(0.02)[:, None])
            self.items.weight.normal_(0.0, spread, generator=generator)
            self.biases.weight.zero_()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch[self.sequence]
        rows = self.items(ids.clamp(min=0)) * (ids >= 0).unsqueeze(-1)  # (B, T, W)
        h = (rows * self.lags[: ids.shape[-1]]).sum(-2)  # (B, W)
        inner = F.gelu(self.inner(self.norm(h)))
        if self.training and self.dropout:
            inner = inner * kept(torch.rand_like(inner), self.dropout)
        h = h + self.outer(inner)
        logits: Tensor = h @ self.items.weight.T + self.biases.weight.squeeze(-1)
        return logits  # (B, K)
