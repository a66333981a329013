"""Private masks: what a client predicts of its ratings from its own alone, before any round.

FedMMF (Yang et al. 2021, section 3.2, equations 10 to 12): every client fits a small model to its
own ratings, federates only what is left of them, and adds the model's prediction again. Here the
prediction becomes the field `base` of the client's examples; a client without a mask has the global
mean there. A fit sees the client's own ratings, the public attributes of items, and the global mean
that the set-up sum has given to all. The client's own profile (age, gender, occupation) is constant
over its ratings and could only move the intercept, so it is left out.

Penalty and number of epochs: a fifth of the client's ratings are held back, every candidate is
fitted to the others, and the default is left only for one that is better by more than two standard
errors of the difference. Then the mask is fitted to all of the client's ratings. Taking the best
candidate outright costs more than a fixed penalty, since twenty ratings rank penalties by chance.

Masks are clipped to the scale: the loss of Definition 3.1 is then in [0, 1], as Theorem 1 wants it.
To accuracy it makes no difference (one mask in a thousand leaves the scale).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.data.examples import LABEL, SecretOf
from tessera.data.ratings import RatingData
from tessera.errors import ConfigError, MisuseError
from tessera.learning.models.private import FactorisationMachine, Linear, Network, Private
from tessera.learning.rating_models import mask_penalties
from tessera.privacy.masks import indicator

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

ORDERS: Final = ("linear", "fm", "network")

CLEAR: Final = 2.0
"""Standard errors by which a candidate must beat the default on the validation part."""
ENOUGH: Final = 5
"""Held-back ratings below which a client does not choose at all."""

_SHORTEST: Final = 16
_RATINGS_AT_ONCE: Final = 1 << 14
_LARGEST: Final = 1e6

WITH: Final = "clients with a mask"
TOO_FEW: Final = "clients without a mask: too few ratings"
NOT_FINITE: Final = "clients without a mask: not finite"
CONSTANT: Final = "clients whose ratings are all equal"
BARE: Final = "rated items without attributes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTraining:
    """How every client fits its mask. `penalty` 0: the client's own validation part decides.

    `seed` gives the first values of "fm" and "network", the same at all clients.
    """

    order: str = "linear"
    penalty: float = 0.0
    validation: float = 0.2
    least: int = 10
    rank: int = 4
    hidden: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(
                f"mask: no order is called {self.order!r}", hint=f"one of {', '.join(ORDERS)}"
            )
        if not (self.penalty >= 0.0 and np.isfinite(self.penalty)):
            raise ConfigError(
                f"mask: a penalty of {self.penalty}",
                hint="0 lets each client choose; about 40 suits genres and ratings from 1 to 5",
            )
        if not 0.0 < self.validation < 1.0:
            raise ConfigError(
                f"mask: a validation part of {self.validation} must lie between 0 and 1"
            )
        if self.least < 2:
            raise ConfigError(
                f"mask: {self.least} ratings cannot be split into one part to fit and one to test",
                hint="2 or more",
            )
        if self.rank < 1 or self.hidden < 1 or self.seed < 0:
            raise ConfigError(
                f"mask: rank {self.rank}, hidden {self.hidden}, seed {self.seed}",
                hint="rank and hidden are 1 or more, the seed 0 or more",
            )

    def penalties(self, attributes: Singles) -> tuple[float, ...]:
        """Those that a client tries, the default first; public, as the attributes are."""
        return mask_penalties(self.penalty, attributes)

    def model(self, columns: int) -> Private:
        """The family of models over this many attributes."""
        if self.order == "fm":
            return FactorisationMachine(columns, rank=self.rank, seed=self.seed)
        if self.order == "network":
            return Network(columns, hidden=self.hidden, seed=self.seed)
        return Linear(columns)


@dataclass(frozen=True, slots=True)
class RatingScale:
    """Where ratings lie, and their global mean."""

    mean: float
    low: float
    high: float

    def clipped(self, raw: Tensor) -> Singles:
        """Ratings from what a model gives, which is less the mean."""
        rating = np.clip(raw.numpy() + self.mean, self.low, self.high)
        return np.asarray(rating, np.float32)


@dataclass(frozen=True, slots=True)
class ClientMasks:
    """Every client's mask, in the order of the data's examples; nothing of it is sent anywhere.

    `indicator` is Definition 3.1 as each client estimates it on its validation part, for ratings
    scaled to [0, 1]; NaN without a mask. `facts` counts clients with and without, and why.
    """

    train: Singles = field(repr=False)
    test: Singles = field(repr=False)
    indicator: Floats = field(repr=False)
    penalty: Floats = field(repr=False)
    fitted: Bools = field(repr=False)
    facts: dict[str, int]
    scale: RatingScale
    model: Private = field(repr=False)
    theta: Tensor = field(repr=False)
    attributes: Tensor = field(repr=False)

    def of(self, client: int, items: Ints) -> Singles:
        """What this client's mask predicts for any items; the global mean if it has none."""
        if not self.fitted[client]:
            return np.full(len(items), self.scale.mean, np.float32)
        return self.predict(np.array([client]), items[None]).reshape(-1)

    def predict(self, clients: Ints, items: Ints) -> Singles:
        """What masks (B,) predict for items (B, L), each for its own row."""
        x = self.attributes[torch.from_numpy(items)]
        return self.scale.clipped(self.model.predict(self.theta[torch.from_numpy(clients)], x))


def fit(
    data: RatingData,
    training: MaskTraining,
    *,
    mean: float,
    secret_of: SecretOf,
    clients: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ClientMasks:
    """Fit every client's mask, or those of some `clients` only, as each would do by itself.

    Which ratings a client holds back follows from its lasting secret.
    `progress` is called with the number of clients done and the number to do.
    """
    if not np.isfinite(mean):
        raise MisuseError(f"masks: a global mean of {mean}")
    scale = RatingScale(mean, data.low, data.high)
    wanted = np.arange(data.clients) if clients is None else np.asarray(clients, np.int64)
    enough = wanted[np.diff(data.offsets)[wanted] >= training.least]
    sound = [c for c in enough if np.isfinite(data.of(int(c))[LABEL]).all()]
    values = np.nan_to_num(data.items.values, nan=0.0, posinf=0.0, neginf=0.0)
    model, penalties = training.model(values.shape[1]), training.penalties(values)
    attributes = torch.from_numpy(values).to(model.dtype)

    theta = torch.full((data.clients, model.parameters), torch.nan, dtype=model.dtype)
    penalty, estimated = np.full(data.clients, np.nan), np.full(data.clients, np.nan)
    constant = done = 0
    for batch in batches(data.offsets, np.array(sound, np.int64)):
        rating = data.train[LABEL][batch.rows]
        constant += int(((rating == rating[:, :1]) | ~batch.there).all(-1).sum())
        own = Own(
            x=attributes[torch.from_numpy(data.train["item"][batch.rows])],
            rating=rating,
            there=batch.there,
            held=held_back(batch, training.validation, secret_of),
            scale=scale,
        )
        places = torch.from_numpy(batch.clients)
        theta[places], penalty[batch.clients], estimated[batch.clients] = own.fit(model, penalties)
        done += len(batch.clients)
        if progress is not None:
            progress(done, len(sound))
    # Not a number, or so large that single precision would end there for some item.
    fitted = (theta.abs().amax(-1) < _LARGEST).numpy()
    masks = ClientMasks(
        train=np.full(len(data.train), mean, np.float32),
        test=np.full(len(data.test), mean, np.float32),
        indicator=np.where(fitted, estimated, np.nan),
        penalty=np.where(fitted, penalty, np.nan),
        fitted=fitted,
        facts={
            WITH: int(fitted.sum()),
            TOO_FEW: len(wanted) - len(enough),
            NOT_FINITE: len(enough) - int(fitted.sum()),
            CONSTANT: constant,
            BARE: int((~values[np.unique(data.train["item"])].any(-1)).sum()),
        },
        scale=scale,
        model=model,
        theta=theta,
        attributes=attributes,
    )
    for column, examples, offsets in (
        (masks.train, data.train, data.offsets),
        (masks.test, data.test, data.test_offsets),
    ):
        for batch in batches(offsets, np.flatnonzero(fitted)):
            predicted = masks.predict(batch.clients, examples["item"][batch.rows])
            column[batch.rows[batch.there]] = predicted[batch.there]
    return masks


@dataclass(frozen=True, slots=True)
class ClientBatch:
    """Clients with about as many examples: `rows` (B, L) are places, `there` says which are."""

    clients: Ints
    rows: Ints
    there: Bools


def batches(offsets: Ints, clients: Ints) -> Iterator[ClientBatch]:
    """Clients by padded length, which depends on a client's own number of examples alone."""
    counts = np.diff(offsets)
    clients = clients[counts[clients] > 0]
    length = np.full(len(clients), _SHORTEST)
    while (short := length < counts[clients]).any():
        # 16, 24, 32, 48, 64, ...: less than half of it is padding.
        power = (length & (length - 1)) == 0
        length[short] = np.where(power, length * 3 // 2, length * 4 // 3)[short]
    for size in np.unique(length):
        same = clients[length == size]
        most = max(1, _RATINGS_AT_ONCE // int(size))
        for some in np.split(same, range(most, len(same), most)):
            there = np.arange(size) < counts[some][:, None]
            yield ClientBatch(
                some, np.where(there, offsets[some][:, None] + np.arange(size), 0), there
            )


def held_back(batch: ClientBatch, validation: float, secret_of: SecretOf) -> Bools:
    """Each client's validation part: a random share of its ratings, drawn from its own secret."""
    held = np.zeros_like(batch.there)
    for place, client in enumerate(batch.clients):
        count = int(batch.there[place].sum())
        share = min(max(round(validation * count), 1), count - 1)
        coins = CoinStream(Stream.of(secret_of(int(client)), Label.MASK_VALIDATION))
        held[place, np.argsort(coins.words(count))[:share]] = True
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What the clients of a batch fit their masks to, each to its own row."""

    x: Tensor
    rating: Singles
    there: Bools
    held: Bools
    scale: RatingScale

    def fit(self, model: Private, penalties: Sequence[float]) -> tuple[Tensor, Floats, Floats]:
        """Choose on the validation part, then fit to everything: theta, penalty and indicator.

        The penalty is chosen for the linear model, which is quick, and holds for every order.
        """
        rest = self.there & ~self.held
        tried = np.repeat(np.array(penalties)[:, None], len(self.x), axis=1)  # (C, B)
        linear = Linear(self.x.shape[-1])
        guess = np.concatenate([self.guess(linear, self.train(linear, rest, p)) for p in tried])
        penalty = np.take_along_axis(tried, self.choose(guess, default=0)[None], 0)[0]

        guess = self.guess(model, self.train(model, rest, penalty))  # (stops, B, L)
        stop = self.choose(guess, default=len(guess) - 1)
        estimated = [
            indicator(rating[held], guess[end, place, held], self.scale.low, self.scale.high)
            for place, (rating, held, end) in enumerate(
                zip(self.rating, self.held, stop, strict=True)
            )
        ]
        theta = torch.stack(self.train(model, self.there, penalty))  # (stops, B, P)
        return theta[torch.from_numpy(stop), torch.arange(len(stop))], penalty, np.array(estimated)

    def train(self, model: Private, part: Bools, penalty: Floats) -> list[Tensor]:
        """theta at each point where fitting to this part of the ratings may stop."""
        y = np.where(self.there, self.rating - self.scale.mean, 0.0)
        columns = [torch.from_numpy(column).to(model.dtype) for column in (y, part, penalty)]
        return list(model.train(self.x.to(model.dtype), *columns))

    def guess(self, model: Private, thetas: Sequence[Tensor]) -> Singles:
        """Ratings (stops, B, L) by each of these parameters."""
        x = self.x.to(model.dtype)
        return np.stack([self.scale.clipped(model.predict(theta, x)) for theta in thetas])

    def choose(self, guess: Singles, *, default: int) -> Ints:
        """Which candidate (C, B, L) each client takes, by its validation part.

        The default, unless another is better by more than `CLEAR` standard errors.
        """
        count = np.maximum(self.held.sum(-1), 1)
        error = (guess - self.rating) ** 2
        gain = np.where(self.held, error[default] - error, 0.0)
        mean = gain.sum(-1) / count  # (C, B)
        spread = np.where(self.held, gain - mean[..., None], 0.0)
        deviation = np.sqrt((spread**2).sum(-1) / np.maximum(count - 1, 1))
        surplus = mean - CLEAR * deviation / np.sqrt(count)
        # Of not finite guesses nothing is known, and of very few not enough.
        surplus[~(np.isfinite(surplus) & (count >= ENOUGH))] = -np.inf
        surplus[default] = 0.0
        return np.where(surplus.max(0) > 0.0, surplus.argmax(0), default).astype(np.int64)
