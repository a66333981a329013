"""Networks for the class of a sentence or an image; all their parameters are dense.

CNN: the network of McMahan et al. 2017, section 3, for images of 28 x 28 pixels.

Two convolutions of 5 x 5 with 32 and 64 channels, each followed by a maximum over 2 x 2, a layer of
512 units and one logit per class: 1,663,370 parameters for ten classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.data.mnist import IMAGE, SIDE
from tessera.data.trec import WORDS

# --- textcnn --------------------------------------------------------------------------------------
#
# TextCNN: the network of Kim 2014 for the class of a sentence, with words learnt from scratch.
#
# Convolutions over three, four and five words, the largest answer of each filter in the sentence,
# and one logit per class. The word vectors are a parameter like any other: this network has no
# tables.


# --- layers ---------------------------------------------------------------------------------------
#
# Initial values of layers that several models have.


@torch.no_grad()
def reset(module: nn.Module, generator: torch.Generator) -> None:
    """Layers and convolutions uniform by fan-in, as torch does, drawn from this generator."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            if layer.bias is not None:
                layer.bias.uniform_(-bound, bound, generator=generator)


# --- textcnn --------------------------------------------------------------------------------------


class TextCNN(nn.Module):
    """Logits (B, classes) from `words` (B, T); a negative id stands for nothing.

    `dropout` is of the filters' answers, in training. `seed` alone decides the initial values.
    """

    def __init__(
        self,
        words: int,
        classes: int,
        *,
        width: int = 100,
        filters: int = 100,
        spans: Sequence[int] = (3, 4, 5),
        dropout: float = 0.5,
        spread: float = 0.25,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.words = nn.Embedding(words, width)
            self.spans = nn.ModuleList(nn.Conv1d(width, filters, span) for span in spans)
            self.classes = nn.Linear(filters * len(spans), classes)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        reset(self, generator)
        with torch.no_grad():
            self.words.weight.uniform_(-spread, spread, generator=generator)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch[WORDS]
        vectors = self.words(ids.clamp(min=0)) * (ids >= 0).unsqueeze(-1)  # (B, T, W)
        over_time = vectors.transpose(-1, -2)
        answers = [torch.relu(span(over_time)).amax(-1) for span in self.spans]
        joined = F.dropout(torch.cat(answers, -1), self.dropout, self.training)
        logits: Tensor = self.classes(joined)
        return logits


# --- cnn ------------------------------------------------------------------------------------------


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
