"""Small models of one client each, fitted for many clients at once: what a mask is made of.

A model is a row of parameters `theta` (B, P) per client. `x` (B, L, D) are the attributes of the
items that a client rated and `y` (B, L) its ratings less the global mean, padded to one length;
`weight` (B, L) is 0 where there is nothing. No number of one client enters another's row: who
stands in a batch together is only a matter of speed.

Every order contains the one below it and starts from the ridge solution, so that a client whose few
ratings say nothing about products of attributes ends near the linear model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final

import torch
from torch import Tensor

from tessera.learning.rating_models import INTERCEPT

EPOCHS: Final = 30
STOPS: Final = (10, 20, 30)
"""Epochs after which fitting may stop; the last is where it does if in doubt."""
RATE: Final = 0.05
EPSILON: Final = 1e-3
"""Adam's, and large: the ridge solution has no slope but rounding, which must not become steps."""
FURTHER: Final = 0.5
"""The penalty on what an order adds to the linear model, as a share of the penalty there."""


class Private(ABC):
    """A family of models, fitted by penalised least squares."""

    dtype: ClassVar[torch.dtype]
    parameters: int

    @abstractmethod
    def train(self, x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor) -> Iterator[Tensor]:
        """theta wherever fitting may stop, the last where it does if in doubt.

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

    def train(self, x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor) -> Iterator[Tensor]:
        yield ridge(x, y, weight, penalty)

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        return theta[:, :1] + torch.bmm(x, theta[:, 1:, None]).squeeze(-1)


def ridge(x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor) -> Tensor:
    """theta (B, 1 + D) that minimises sum w (y - f)^2 + penalty |weights|^2 + 5 intercept^2."""
    diagonal = penalty.to(torch.float64).unsqueeze(-1).repeat(1, 1 + x.shape[-1])
    diagonal[:, 0] = INTERCEPT
    return solved(x, y, weight, diagonal)


def solved(x: Tensor, y: Tensor, weight: Tensor, diagonal: Tensor) -> Tensor:
    """theta (B, 1 + D) that minimises sum w (y - f)^2 + sum of diagonal * theta^2."""
    x, y, weight, diagonal = (part.to(torch.float64) for part in (x, y, weight, diagonal))
    design = torch.cat([torch.ones_like(weight).unsqueeze(-1), x], -1)  # (B, L, 1 + D)
    weighted = (design * weight.unsqueeze(-1)).transpose(1, 2)
    normal = torch.bmm(weighted, design) + torch.diag_embed(diagonal)
    theta: Tensor = torch.linalg.solve(normal, torch.bmm(weighted, y.unsqueeze(-1)))
    return theta.squeeze(-1)


class Descended(Private):
    """The ridge solution and further parameters, then fitted together by full-batch Adam.

    Kingma and Ba 2015, Algorithm 1, with a rate that falls to zero over `EPOCHS` steps.
    """

    dtype = torch.float32

    def __init__(self, columns: int, further: Tensor) -> None:
        """`further` (P - 1 - D,) is where the parameters beyond the linear ones start."""
        self.columns = columns
        self.further = further
        self.parameters = 1 + columns + len(further)

    def train(self, x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor) -> Iterator[Tensor]:
        start = ridge(x, y, weight, penalty).to(self.dtype)
        theta = torch.cat([start, self.further.expand(len(x), -1)], -1)
        count = weight.sum(-1, keepdim=True).clamp(min=1.0)
        decay = penalty.to(self.dtype).unsqueeze(-1).repeat(1, self.parameters)
        decay[:, 0] = INTERCEPT
        decay[:, 1 + self.columns :] *= FURTHER
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        for epoch in range(1, EPOCHS + 1):
            leaf = theta.detach().requires_grad_()
            loss = (weight / count * (y - self.predict(leaf, x)).square()).sum()
            (slope,) = torch.autograd.grad(loss, leaf)
            slope = slope + 2.0 * decay / count * theta
            m = 0.9 * m + 0.1 * slope
            v = 0.999 * v + 0.001 * slope.square()
            rate = RATE * (1.0 - (epoch - 1) / EPOCHS)
            size = (v / (1.0 - 0.999**epoch)).sqrt() + EPSILON
            theta = theta - rate * m / (1.0 - 0.9**epoch) / size
            if epoch in STOPS:
                yield theta


class FactorisationMachine(Descended):
    """Order two: a product of `rank` numbers for every pair of attributes.

    Rendle 2010, equation 1. All clients start from the same numbers, which are public.
    """

    def __init__(self, columns: int, *, rank: int, seed: int) -> None:
        self.rank = rank
        generator = torch.Generator().manual_seed(seed)
        super().__init__(columns, 0.05 * torch.randn(columns * rank, generator=generator))

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        weights, rest = torch.split(theta[:, 1:], [self.columns, len(self.further)], -1)
        factors = rest.view(-1, self.columns, self.rank)  # (B, D, R)
        both = torch.bmm(x, torch.cat([weights.unsqueeze(-1), factors], -1))  # (B, L, 1 + R)
        # The sum over pairs in linear time: Lemma 3.1.
        alone = torch.bmm(x.square(), factors.square().sum(-1, keepdim=True)).squeeze(-1)
        return theta[:, :1] + both[..., 0] + 0.5 * (both[..., 1:].square().sum(-1) - alone)


class Network(Descended):
    """High order: one layer of `hidden` rectified units, beside the linear part.

    The weights out of the layer start at zero, so that the network starts as the ridge solution.
    """

    def __init__(self, columns: int, *, hidden: int, seed: int) -> None:
        self.hidden = hidden
        generator = torch.Generator().manual_seed(seed)
        inner = 0.3 * torch.randn(columns * hidden, generator=generator)
        super().__init__(columns, torch.cat([inner, torch.zeros(2 * hidden)]))

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        sizes = [1, self.columns, self.columns * self.hidden, self.hidden, self.hidden]
        intercept, weights, inner, bias, outer = torch.split(theta, sizes, -1)
        inner = inner.view(-1, self.columns, self.hidden)
        both = torch.bmm(x, torch.cat([weights.unsqueeze(-1), inner], -1))  # (B, L, 1 + H)
        layer = torch.relu(both[..., 1:] + bias.unsqueeze(1))
        return intercept + both[..., 0] + torch.bmm(layer, outer.unsqueeze(-1)).squeeze(-1)
