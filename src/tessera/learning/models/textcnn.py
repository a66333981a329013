"""TextCNN: the network of Kim 2014 for the class of a sentence, with words learnt from scratch.

Convolutions over three, four and five words, the largest answer of each filter in the sentence, and
one logit per class. The word vectors are a parameter like any other: this network has no tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.data.trec import WORDS

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
