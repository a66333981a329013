"""Small models of one client each, fitted for many clients at once: what a mask is made of.

A model is a row of parameters `theta` (B, P) per client. `x` (B, L, D) are the attributes of the
items that a client rated and `y` (B, L) its ratings less the global mean, padded to one length;
`weight` (B, L) is 0 where there is nothing. No number of one client enters another's row: who
stands in a batch together is only a matter of speed.

Every order contains the one below it and starts from the ridge solution, so that a client whose few
ratings say nothing about products of attributes ends where the linear model does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

INTERCEPT: Final = 5.0
"""The penalty on a client's intercept: as if five more of its ratings were the global mean."""


class Private(ABC):
    """A family of models, fitted by penalised least squares."""

    dtype: torch.dtype
    parameters: int

    @abstractmethod
    def train(
        self, x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """(epochs so far, theta) wherever fitting may stop; the last is where it stops if in doubt.

        `penalty` (B,) is each client's own.
        """

    @abstractmethod
    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """The rating less the global mean, (B, L)."""


class Linear(Private):
    """Order one: an intercept and a weight per attribute, in closed form."""

    dtype = torch.float64

    def __init__(self, columns: int) -> None:
        self.parameters = 1 + columns

    def train(
        self, x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        yield 1, ridge(x, y, weight, penalty)

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        return linear(theta, x)


def linear(theta: Tensor, x: Tensor) -> Tensor:
    """Intercept, then a weight per attribute; what follows in `theta` is another's business."""
    return theta[:, :1] + torch.bmm(x, theta[:, 1 : 1 + x.shape[-1], None]).squeeze(-1)


def ridge(x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor) -> Tensor:
    """theta (B, 1 + D) that minimises sum w (y - f)^2 + penalty |weights|^2 + 5 intercept^2."""
    x, y, weight, penalty = (part.to(torch.float64) for part in (x, y, weight, penalty))
    design = torch.cat([torch.ones_like(x[..., :1]), x], -1)  # (B, L, 1 + D)
    weighted = (design * weight.unsqueeze(-1)).transpose(1, 2)
    diagonal = penalty.unsqueeze(-1).repeat(1, design.shape[-1])
    diagonal[:, 0] = INTERCEPT
    normal = torch.bmm(weighted, design) + torch.diag_embed(diagonal)
    return torch.linalg.solve(normal, torch.bmm(weighted, y.unsqueeze(-1))).squeeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """Full-batch Adam (Kingma and Ba 2015) from the ridge solution, its rate falling to zero."""

    rate: float
    epochs: int
    stops: int
    """Places, evenly spread and the end among them, where fitting may stop."""


class Descended(Private):
    """The ridge solution and further parameters, fitted together by gradient descent."""

    dtype = torch.float32
    descent: Descent

    @abstractmethod
    def start(self) -> Tensor:
        """The further parameters (P - 1 - D,), for every client the same."""

    @abstractmethod
    def shrink(self) -> Tensor:
        """What to multiply the penalty by for each further parameter."""

    def train(
        self, x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        first = ridge(x, y, weight, penalty).to(self.dtype)
        theta = torch.cat([first, self.start().expand(len(x), -1)], -1)  # (B, P)
        count = weight.sum(-1, keepdim=True).clamp(min=1.0)
        ratio = torch.cat([torch.ones(first.shape[-1]), self.shrink()])
        decay = penalty.to(self.dtype).unsqueeze(-1) * ratio
        decay[:, 0] = INTERCEPT
        decay, weight = decay / count, weight / count
        plan = self.descent
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        for epoch in range(1, plan.epochs + 1):
            theta.requires_grad_(True)
            loss = (weight * (y - self.predict(theta, x)).square()).sum()
            (slope,) = torch.autograd.grad(loss, theta)
            theta = theta.detach()
            slope = slope + 2.0 * decay * theta
            m = 0.9 * m + 0.1 * slope
            v = 0.999 * v + 0.001 * slope.square()
            rate = plan.rate * (1.0 - (epoch - 1) / plan.epochs)
            step = (m / (1 - 0.9**epoch)) / ((v / (1 - 0.999**epoch)).sqrt() + 1e-8)
            theta = theta - rate * step
            if epoch * plan.stops % plan.epochs < plan.stops:
                yield epoch, theta


class FactorisationMachine(Descended):
    """Order two: Rendle 2010, equation 1, with `rank` numbers per attribute."""

    def __init__(
        self, columns: int, *, rank: int, seed: int, descent: Descent, ratio: float, spread: float
    ) -> None:
        self.columns, self.rank, self.descent, self.ratio = columns, rank, descent, ratio
        self.parameters = 1 + columns + columns * rank
        generator = torch.Generator().manual_seed(seed)
        self.drawn = spread * torch.randn(columns * rank, generator=generator)

    def start(self) -> Tensor:
        return self.drawn

    def shrink(self) -> Tensor:
        return torch.full_like(self.drawn, self.ratio)

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        v = theta[:, 1 + self.columns :].view(-1, self.columns, self.rank)  # (B, D, R)
        # Lemma 3.1: the sum over pairs in linear time.
        pairs = torch.bmm(x, v).square().sum(-1) - torch.bmm(
            x.square(), v.square().sum(-1, keepdim=True)
        ).squeeze(-1)
        return linear(theta, x) + 0.5 * pairs


class Network(Descended):
    """High order: one hidden layer beside the linear part."""

    def __init__(
        self, columns: int, *, hidden: int, seed: int, descent: Descent, ratio: float, spread: float
    ) -> None:
        self.columns, self.hidden, self.descent, self.ratio = columns, hidden, descent, ratio
        generator = torch.Generator().manual_seed(seed)
        inner = torch.randn(columns * hidden, generator=generator) * spread
        self.drawn = torch.cat([inner, torch.zeros(2 * hidden)])
        self.parameters = 1 + columns + len(self.drawn)

    def start(self) -> Tensor:
        return self.drawn

    def shrink(self) -> Tensor:
        return torch.full_like(self.drawn, self.ratio)

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        d, h = self.columns, self.hidden
        rest = theta[:, 1 + d :]
        w = rest[:, : d * h].view(-1, d, h)
        bias, outer = rest[:, d * h : d * h + h], rest[:, d * h + h :]
        z = torch.tanh(torch.baddbmm(bias.unsqueeze(1), x, w))  # (B, L, H)
        return linear(theta, x) + torch.bmm(z, outer.unsqueeze(-1)).squeeze(-1)
