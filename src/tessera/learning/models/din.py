"""DIN, the deep interest network: a click's logit from a user, a target item and a history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from tessera.errors import ConfigError

EXCLUDED: Final = -1e9


class DIN(nn.Module):
    """x"""

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
        rate: bool = False,
        seed: int = 0,
        std: float = 0.1,
        norm: bool = True,
        dice_norm: bool = True,
        att_act: str = "sigmoid",
        pool: str = "sum",
        softmax: bool = True,
        product: bool = False,
        ratein: bool = False,
        zero_out: bool = False,
    ) -> None:
        super().__init__()
        extra = 1 if bias else 0
        self.width, self.bias, self.rate = width, bias, rate
        self.norm, self.att_act, self.pool, self.softmax = norm, att_act, pool, softmax
        self.product, self.ratein = product, ratein
        self.items = skip_init(nn.Embedding, items, width + extra)
        if categories:
            self.categories = skip_init(nn.Embedding, categories, width)
        if users:
            self.users = skip_init(nn.Embedding, users, width + extra)
        self.has_categories, self.has_users = categories > 0, users > 0
        item = width * (2 if categories else 1)
        inputs = 4 * item + (width if users else 0) + (1 if ratein else 0)
        self.attend = Stack([4 * item, *attention, 1], None, dice_norm)
        self.attend.act = att_act
        self.affine = Affine(inputs, norm)
        self.score = Stack([inputs, *layers, 2], "dice", dice_norm)
        if rate:
            self.trust = nn.Parameter(torch.ones(1))
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name in ("items.weight", "categories.weight", "users.weight"):
                    p.normal_(0.0, std, generator=g)
                    if bias and name != "categories.weight":
                        p[:, width] = 0.0
            for stack in (self.attend, self.score):
                for lin in stack.linears:
                    bound = lin.in_features**-0.5
                    lin.weight.uniform_(-bound, bound, generator=g)
                    lin.bias.uniform_(-bound, bound, generator=g)
            if zero_out:
                self.score.linears[-1].weight.zero_()
                self.score.linears[-1].bias.zero_()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        history = batch["history"]
        present = history.ge(0)
        row = self.items(batch["item"])
        q = row[..., : self.width]
        h = self.items(history.clamp(min=0))[..., : self.width]
        if self.has_categories:
            q = torch.cat([q, self.categories(batch["category"])], -1)
            h = torch.cat([h, self.categories(batch["history_category"].clamp(min=0))], -1)
        mask = present.unsqueeze(-1).to(h.dtype)
        h = h * mask
        total = h.sum(-2)
        if self.pool == "mean":
            total = total / mask.sum(-2).clamp(min=1.0)
        elif self.pool == "sqrt":
            total = total / mask.sum(-2).clamp(min=1.0).sqrt()
        wide = q.unsqueeze(-2).expand_as(h)
        w = self.attend(torch.cat([wide, h, wide - h, wide * h], -1))
        if self.softmax:
            w = torch.softmax(w.masked_fill(mask.eq(0), EXCLUDED), -2) * mask
        interest = (w * h).sum(-2)
        parts = [q, total, q * total, interest]
        logit = 0.0
        if self.has_users:
            u = self.users(batch["user"])
            parts.insert(0, u[..., : self.width])
            if self.bias:
                logit = logit + u[..., self.width]
            if self.product:
                logit = logit + (u[..., : self.width] * q[..., : self.width]).sum(-1)
        if self.bias:
            logit = logit + row[..., self.width]
        if self.rate:
            r = torch.logit(batch["rate"], eps=1e-3)
            logit = logit + self.trust * r
            if self.ratein:
                parts.append(r.unsqueeze(-1))
        z = self.score(self.affine(torch.cat(parts, -1)))
        return logit + z[..., 1] - z[..., 0]


class Affine(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        if self.norm:
            x = F.layer_norm(x, x.shape[-1:])
        return x * self.scale + self.shift


class Dice(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(width))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(F.layer_norm(x, x.shape[-1:]) if self.norm else x)
        return x * (gate + (1 - gate) * self.slope)


class Stack(nn.Module):
    def __init__(self, widths: Sequence[int], act: str | None, norm: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            skip_init(nn.Linear, a, b) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.act = act
        if act == "dice":
            self.dice = nn.ModuleList(Dice(w, norm) for w in widths[1:-1])

    def forward(self, x: Tensor) -> Tensor:
        for k, lin in enumerate(self.linears):
            x = lin(x)
            if k < len(self.linears) - 1:
                if self.act == "dice":
                    x = self.dice[k](x)
                elif self.act == "sigmoid":
                    x = torch.sigmoid(x)
                else:
                    x = F.silu(x)
        return x
