"""Softmax: cross-entropy over the rows of a table, of which a client has only a few at hand.

The module returns one logit per row *at hand* and example, as `hidden @ self.words.weight.T` does:
on a submodel these are the client's candidates, its own rows and some negatives. The sum over the
whole table in the denominator is estimated from them. Each own row stands for itself and each of n
negatives, drawn without regard to their values, for 1 / n of all others: its logit is raised by
log((rows - own) / n), the correction of sampled softmax (Bengio and Senecal 2003, section 4).

Negatives are drawn from a secret of the client's own (`rounds/root.py`), never from the plan's
seed: whoever can draw them again takes them away, and what is left is the client's own rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError
from tessera.learning.tables.submodel import Floats, Ids

Doubles = npt.NDArray[np.float64]

CANDIDATES: Final = "log weights of candidates"
"""What a batch says of each row at hand, (K,): -inf where a row only fills up."""

MOST_NEGATIVES: Final = 2**24


class Softmax:
    """A loss over the rows of a table: which of them is the example's `target`?

    `tables` are the parameters whose rows at hand all enter the output: the vectors of words, and a
    bias each, if there is one. `target` is the field that holds the right row. A client takes
    `negatives` further rows beside its own. `kind` is the kind of ids that the rows are, for their
    names (`ClientData.ids`).
    """

    whole_union: bool = False
    """Whether all rows of a fixed group's union are candidates of each of its members."""

    def __init__(self, *tables: str, target: str, negatives: int = 200, kind: str = "item") -> None:
        if not tables:
            raise ConfigError(
                "Softmax: no table", hint='name its parameter: Softmax("words.weight", ...)'
            )
        if not 1 <= negatives <= MOST_NEGATIVES:
            raise ConfigError(
                f"Softmax: negatives = {negatives}",
                hint="1 or more: among its own rows alone a client learns nothing of the others, "
                "and shows which they are",
            )
        self.tables = tables
        self.target = target
        self.negatives = negatives
        self.kind = kind
        self.weights: Doubles | None = None

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.tables))
        return f"Softmax({names}, target={self.target!r}, negatives={self.negatives})"

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The losses (B,) of logits (B, K); 0 where there is no target."""
        logits = output
        if CANDIDATES in batch:
            logits = output + batch[CANDIDATES].to(output.dtype)
        target = batch[self.target]
        right = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(target >= 0, torch.logsumexp(logits, -1) - right, 0.0)

    def log_weights(self, rows: int, at_hand: Ids, own: Ids) -> Floats:
        """How much each row at hand stands for in the sum over a table of `rows` rows, as a log."""
        return log_weights(rows, at_hand, own)

    @property
    def counts_digest(self) -> bytes:
        """Of the public counts that negatives are drawn and weighed by; none where it is evenly."""
        return b""

    def in_groups(self, size: int) -> Softmax:
        """The loss of members of fixed groups, who have their whole union at hand."""
        return self


def _among(at_hand: Ids, own: Ids) -> npt.NDArray[np.bool_]:
    """Which of the rows at hand are own; both ascending."""
    found = np.zeros(at_hand.size, np.bool_)
    at = np.searchsorted(at_hand, own)
    at = at[at < at_hand.size]
    found[at[at_hand[at] == own[: at.size]]] = True
    return found


def log_weights(rows: int, at_hand: Ids, own: Ids) -> Floats:
    """The same where all that are not own were drawn evenly."""
    mine = _among(at_hand, own)
    drawn = int(np.count_nonzero(~mine))
    each = np.log((rows - np.count_nonzero(mine)) / drawn) if drawn else 0.0
    return np.where(mine, 0.0, each).astype(np.float32)


class SampledSoftmax(Softmax):
    """The target against the client's negatives alone; its other own rows are no candidates.

    Negatives are so many draws from `weights`, which are public, one per row: a row that is in them
    with probability p stands for 1 / p rows like it, so that log(p) is taken off its logit. What is
    a client's own is left out of the sum: an item that came earlier, or will come, is no wrong
    answer. Whatever the client does not have in its training part may be a negative.

    In fixed groups, if each member draws `union_negatives`, the whole union is a candidate: see
    `UnionSoftmax`. `held` is for that, the share of all users that hold each row, which is public.
    """

    def __init__(
        self,
        *tables: str,
        target: str,
        negatives: int = 300,
        weights: Doubles,
        kind: str = "item",
        held: Doubles | None = None,
        union_negatives: int = 0,
    ) -> None:
        super().__init__(*tables, target=target, negatives=negatives, kind=kind)
        self.weights = weights / weights.sum()
        self.held, self.union_negatives = held, union_negatives

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The losses (B,) of logits (B, K)."""
        if CANDIDATES not in batch:
            return super().__call__(output, batch)
        right = output.gather(-1, batch[self.target].unsqueeze(-1))
        logits = torch.cat([output + batch[CANDIDATES].to(output.dtype), right], -1)
        return torch.logsumexp(logits, -1) - right.squeeze(-1)

    def log_weights(self, rows: int, at_hand: Ids, own: Ids) -> Floats:
        found = self._log_weights[at_hand]
        found[_among(at_hand, own)] = -np.inf
        return found

    @cached_property
    def _log_weights(self) -> Floats:
        """Of every row, if it is not one's own."""
        return (-np.log(self.chance())).astype(np.float32)

    def chance(self) -> Doubles:
        """The probability with which each row is a candidate, if it is not one's own."""
        assert self.weights is not None
        found: Doubles = -np.expm1(self.negatives * np.log1p(-self.weights))
        return found

    @property
    def counts_digest(self) -> bytes:
        arrays = (a for a in (self.weights, self.held) if a is not None)
        parts = [array.astype("<f8").tobytes() for array in arrays]
        return hashlib.sha256(encode_context(Label.EPOCH_COUNTS, self.negatives, *parts)).digest()

    def in_groups(self, size: int) -> Softmax:
        if not self.union_negatives or self.held is None:
            return self
        return UnionSoftmax(self, size)


class UnionSoftmax(SampledSoftmax):
    """The target against all that a fixed group of `size` members has in its union.

    Everybody fetches the union anyway. It has the rows of ten histories, which alone would teach a
    model little about what nobody there has, and some negatives of each member. A row that is not
    one's own is in it if one of the others holds it or any member has drawn it: with probability
    1 - (1 - held)^(size - 1) (1 - q)^(size * negatives), if members are as good as drawn by chance.
    """

    whole_union = True

    def __init__(self, alone: SampledSoftmax, size: int) -> None:
        assert alone.weights is not None and alone.held is not None
        super().__init__(
            *alone.tables,
            target=alone.target,
            negatives=alone.union_negatives,
            weights=alone.weights,
            kind=alone.kind,
            held=alone.held,
            union_negatives=alone.union_negatives,
        )
        self.size = size

    def chance(self) -> Doubles:
        assert self.weights is not None and self.held is not None
        with np.errstate(divide="ignore"):  # what everybody holds is in it
            nobody = (self.size - 1) * np.log1p(-self.held)
        undrawn = self.size * self.negatives * np.log1p(-self.weights)
        found: Doubles = -np.expm1(nobody + undrawn)
        return found


def ranked(logits: Tensor, target: Tensor, seen: Tensor | None = None) -> Tensor:
    """(B, 2): the target's rank among all rows, the best is 0, and its log-probability.

    Rows in `seen` (B, S), which has -1 where there are no more, stand behind all others.
    Ties count against the target, so that a constant output is no good guess. A target of -1, one
    that no row stands for, ranks behind all rows and counts as one of equally likely rows.
    """
    rows = logits.shape[-1]
    if seen is not None:
        other = torch.where(seen.eq(target.unsqueeze(-1)) | seen.lt(0), rows, seen).long()
        logits = torch.cat([logits, logits[..., :1]], -1)
        logits = logits.scatter(-1, other, -torch.inf)[..., :rows]
    right = logits.gather(-1, target.clamp(min=0).unsqueeze(-1))
    ahead = (~(logits < right)).sum(-1) - 1  # so does what is not a number
    known = target >= 0
    log_p = right.squeeze(-1) - torch.logsumexp(logits, -1)
    rank = torch.where(known, ahead, rows)
    return torch.stack([rank.float(), torch.where(known, log_p, -float(np.log(rows)))], -1)
