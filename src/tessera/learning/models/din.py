"""DIN, the deep interest network: the logit of a click from a user, an item and a history.

The shape is that of the papers (Niu et al. 2020, section 6.1; long version, VI): at width 18, with
categories and users, it has exactly 64,327 dense parameters. Every example is scored by itself.
Statistics over a batch would mean nothing at a client's batch of 2, would make a score depend on
who is scored beside it, and would void privacy per example. So where the original normalises over
the batch, the affine layer only scales and shifts, and Dice normalises over the features of the one
example. The history enters as its mean, not its sum: the step an item's row takes is then not
larger for being one of many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.errors import ConfigError

EXCLUDED: Final = -1e9
"""The attention score of padding: after the softmax its weight is zero."""

CERTAIN: Final = 1e-3
"""Click rates are kept this far from 0 and 1, where their logit is infinite."""


class DIN(nn.Module):
    """One logit per example from `item` and `history`, and from categories and `user` where given.

    `category` and `history_category` are read if `categories` is above 0, `user` if `users` is. A
    negative id in a history stands for nothing. `seed` alone decides the initial values.

    The switches add what plain averages know already, so that the network learns the rest. `bias`:
    a number per item, by the field `target` (the item once more), and one per user. `product`: the
    inner product of the user with the item and with its category. `rate`: the logit of the field
    `rate`, the client's own click rate so far, times a learned weight.

    Item biases are a table of their own, bound as derived from the items by `target` alone. As a
    column of the items they would be averaged with the items' counts, and there a client that liked
    an item, and has it in its histories ever after, outweighs one that did not many times over.
    """

    def __init__(
        self,
        items: int,
        categories: int = 0,
        users: int = 0,
        *,
        width: int = 18,
        attention: Sequence[int] = (80, 40),
        layers: Sequence[int] = (200, 80),
        bias: bool = False,
        product: bool = False,
        rate: bool = False,
        spread: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if items < 1 or categories < 0 or users < 0 or width < 1:
            raise ConfigError(
                f"DIN: {items} items, {categories} categories, {users} users, width {width}",
                hint="items and width are 1 or more; 0 categories or users leaves them out",
            )
        if product and not users:
            raise ConfigError("DIN: product without users", hint="give the number of users")
        self.width = width
        self.product = product
        item = 2 * width if categories else width
        inputs = 4 * item + (width if users else 0)
        with torch.device("meta"):  # no values yet: nothing is drawn from the global generator
            self.items = nn.Embedding(items, width)
            self.categories = nn.Embedding(categories, width) if categories else None
            self.users = nn.Embedding(users, width + bias) if users else None
            self.biases = nn.Embedding(items, 1) if bias else None
            self.attention = Attention(item, attention)
            self.affine = Affine(inputs)
            self.layers = stack([inputs, *layers, 2], Dice)
            self.trust = nn.Parameter(torch.empty(1)) if rate else None
        self.to_empty(device="cpu")
        self.reset(spread, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def reset(self, spread: float, generator: torch.Generator) -> None:
        """Rows normal with this deviation, layers uniform by fan-in, biases of rows zero."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, spread, generator=generator)
            elif isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.uniform_(-bound, bound, generator=generator)
            elif isinstance(module, Affine):
                module.scale.fill_(1.0)
                module.shift.zero_()
            elif isinstance(module, Dice):
                module.slope.zero_()
        if self.users is not None:
            self.users.weight[:, self.width :] = 0.0
        if self.biases is not None:
            self.biases.weight.zero_()
        if self.trust is not None:
            self.trust.fill_(1.0)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        q = self.items(batch["item"])  # (B, D)
        history = batch["history"]  # (B, T)
        h = self.items(history.clamp(min=0))  # (B, T, D)
        if self.categories is not None:
            q = torch.cat([q, self.categories(batch["category"])], -1)  # D doubles
            c = self.categories(batch["history_category"].clamp(min=0))
            h = torch.cat([h, c], -1)
        there = history.ge(0).unsqueeze(-1).to(h.dtype)  # (B, T, 1)
        total = (h * there).sum(-2) / there.sum(-2).clamp(min=1.0)  # (B, D)
        parts = [q, total, q * total, self.attention(q, h, there)]
        direct: list[Tensor] = []
        if self.users is not None:
            user, *bias = self.users(batch["user"]).split(self.width, -1)  # (B, W), (B, 1)
            parts.insert(0, user)
            direct.extend(bias)
            if self.product:  # with the item and, where there is one, its category
                direct.extend(
                    (user * part).sum(-1, keepdim=True) for part in q.split(self.width, -1)
                )
        if self.biases is not None:
            direct.append(self.biases(batch["target"]))
        if self.trust is not None:
            known = torch.logit(batch["rate"], eps=CERTAIN).unsqueeze(-1)
            direct.append(self.trust * known)
        no, yes = self.layers(self.affine(torch.cat(parts, -1))).unbind(-1)
        logit: Tensor = yes - no  # (B,)
        for term in direct:
            logit = logit + term.squeeze(-1)
        return logit


def stack(widths: Sequence[int], activation: Callable[[int], nn.Module]) -> nn.Sequential:
    """Linear layers of these widths, with an activation after all but the last."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation(after)]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    """How much each item of a history says about the target: their weighted sum."""

    def __init__(self, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.score = stack([4 * width, *hidden, 1], lambda _: nn.Sigmoid())

    def forward(self, q: Tensor, h: Tensor, there: Tensor) -> Tensor:
        q = q.unsqueeze(-2).expand_as(h)  # (B, T, D)
        score = self.score(torch.cat([q, h, q - h, q * h], -1))  # (B, T, 1)
        weight = torch.softmax(score.masked_fill(there.eq(0), EXCLUDED), -2)
        return (weight * there * h).sum(-2)  # (B, D), zeros where there is no history at all


class Affine(nn.Module):
    """A scale and a shift per input; what is left of batch normalisation without the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Dice(nn.Module):
    """A rectifier with a learned slope below, and a soft step between the two sides.

    The step lies at the mean of the example's own features, and its width is their deviation.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        side = torch.sigmoid(F.layer_norm(x, x.shape[-1:]))
        return x * (side + (1.0 - side) * self.slope)
