"""CNN: the network of McMahan et al. 2017, section 3, for images of 28 x 28 pixels.

Two convolutions of 5 x 5 with 32 and 64 channels, each followed by a maximum over 2 x 2, a layer of
512 units and one logit per class: 1,663,370 parameters for ten classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.data.mnist import IMAGE, SIDE
from tessera.learning.models.textcnn import reset


class CNN(nn.Module):
    """Logits (B, classes) from `image` (B, 28, 28). `seed` alone decides the initial values."""

    def __init__(
        self,
        classes: int = 10,
        *,
        channels: tuple[int, int] = (32, 64),
        hidden: int = 512,
        seed: int = 0,
    ) -> None:
        super().__init__()
        first, second = channels
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.near = nn.Conv2d(1, first, 5, padding=2)
            self.far = nn.Conv2d(first, second, 5, padding=2)
            self.hidden = nn.Linear(second * (SIDE // 4) ** 2, hidden)
            self.classes = nn.Linear(hidden, classes)
        self.to_empty(device="cpu")
        reset(self, torch.Generator().manual_seed(seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch[IMAGE].unsqueeze(-3)  # (B, 1, 28, 28)
        x = F.max_pool2d(torch.relu(self.near(x)), 2)
        x = F.max_pool2d(torch.relu(self.far(x)), 2)
        logits: Tensor = self.classes(torch.relu(self.hidden(x.flatten(-3))))
        return logits
