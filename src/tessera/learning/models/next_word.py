"""NextWord: which word comes next, from the few words before it.

A log-bilinear model (Mnih and Hinton 2007, section 4): the vectors of the words before, each
through a matrix of its place, add up to a prediction of the next word's vector; a hidden layer over
the same words adds what is not linear. Words before and words to come have vectors of their own,
and every word to come a bias.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.data.speech import CONTEXT
from tessera.learning.models.classifiers import reset


class NextWord(nn.Module):
    """Logits (B, K) over the words at hand from `context` (B, T), the latest word first.

    `dropout` is of the words' vectors and of the hidden layer, in training. `seed` alone decides
    the initial values.
    """

    def __init__(
        self,
        words: int,
        *,
        length: int = 4,
        width: int = 64,
        hidden: int = 64,
        dropout: float = 0.2,
        spread: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.before = nn.Embedding(words, width)
            self.words = nn.Embedding(words, width)
            self.biases = nn.Embedding(words, 1)
            self.places = nn.Linear(length * width, width)
            self.inner = nn.Linear(length * width, hidden)
            self.outer = nn.Linear(hidden, width)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        reset(self, generator)
        with torch.no_grad():
            self.before.weight.normal_(0.0, spread, generator=generator)
            self.words.weight.normal_(0.0, spread, generator=generator)
            self.biases.weight.zero_()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch[CONTEXT]
        vectors = self.before(ids.clamp(min=0)) * (ids >= 0).unsqueeze(-1)  # (B, T, W)
        joined = F.dropout(vectors.flatten(-2), self.dropout, self.training)
        inner = F.dropout(torch.relu(self.inner(joined)), self.dropout, self.training)
        expected = self.places(joined) + self.outer(inner)  # (B, W)
        logits: Tensor = expected @ self.words.weight.T + self.biases.weight.squeeze(-1)
        return logits  # (B, K)
