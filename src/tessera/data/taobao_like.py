"""A synthetic shop, whose users are as uneven and as scattered as those of the SFSL papers.

The papers' Taobao data was never released; Niu et al. (2020, Table 2 and section 6) print its
numbers: 49,023 users, 143,534 items, 4,815 categories, 323 samples, 301 items and 117 categories
per client, and 86.7 % of the items in the union of 100 clients held by one of them. `PAPERS` has
the arguments that give these; `tests/data/test_taobao_like.py` measures them.

Model. Items have a popularity by a power law and a quality; they lie in categories, and
categories in a few topics. A user has a taste for each topic, a tendency to click at all and some
favourite categories, drawn more often from topics it likes. It is shown items: mostly of its
favourites, some from anywhere, each in proportion to popularity. It clicks with probability

    sigmoid(offset + tendency of the user + quality of the item + taste for the item's topic)

The first two are what a user's and an item's mean can learn. The last, which is most of it, takes
a model that compares the item with what the same user clicked before. Labels are drawn from these
probabilities, so their own AUC ("oracle") is the best that any model can hope for: it is among the
facts.

With `shops` it is a retail: the shops are the clients, every user is a shopper at some of them, and
each of its examples lies with one (`data/subjects.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data.clicks import MOST_EXAMPLES, Floats, Ints, Log, check, click_data
from tessera.data.examples import LABEL, ClientData, Examples
from tessera.data.subjects import at_clients, held_by
from tessera.errors import ConfigError

MOST_IDS: Final = 2**28
PAPERS: Final[Mapping[str, Any]] = {
    "users": 49_023,
    "items": 143_534,
    "categories": 4_815,
    "examples": 323,
    "history": 20,  # 50 would take 6 GB
    "test_share": 0.06,  # the papers' 1,010,284 test samples beside 15,854,357
}
"""`taobao_like(**PAPERS)` has the papers' Table 2. It takes up to a minute and 4.6 GB."""

TOPICS: Final = 6
SKEW: Final = 0.47  # of the popularity of items: the chance of rank x falls as x^-SKEW
CATEGORY_SKEW: Final = 0.8  # likewise of how many items a category has
FAVOURITES: Final = 0.19  # favourite categories of a user, for each example it has
ANYWHERE: Final = 0.34  # share of what is shown from outside the favourites
KEENNESS: Final = 0.3  # how much likelier a favourite is in a topic that is liked
UNEVEN: Final = 4.0  # shape of the gamma distribution of examples per user

# The log odds of a click: their mean, and the standard deviations of the three parts.
OFFSET: Final = -0.3
TENDENCY: Final = 0.45
QUALITY: Final = 0.55
TASTE: Final = 1.3

_NAME: Final = "taobao-like"
_ODDS: Final = "odds"
_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Shop:
    """Items on the shelf, one topic after the other and within it by category."""

    category: Ints = field(repr=False)
    topic: Ints = field(repr=False)
    quality: Floats = field(repr=False)
    reach: npt.NDArray[np.float64] = field(repr=False)  # popularity summed up to and with an item
    name: Ints = field(repr=False)  # the public id: it says nothing about the shelf

    @classmethod
    def stocked(cls, items: int, categories: int, topics: int, rng: np.random.Generator) -> _Shop:
        # Every category has an item of its own; the others fall into categories by a power law.
        sizes = np.ones(categories, dtype=np.int64)
        uniform = rng.random(items - categories)
        drawn = (categories * uniform ** (1 / (1 - CATEGORY_SKEW))).astype(np.int64)
        sizes += np.bincount(drawn, minlength=categories)
        rng.shuffle(sizes)
        category = np.repeat(np.arange(categories), sizes)
        rank = rng.permutation(items)
        popularity = (rank + 1.0) ** (1 - SKEW) - rank ** (1 - SKEW)
        return cls(
            category=category,
            topic=category * topics // categories,
            quality=rng.standard_normal(items, dtype=np.float32),
            reach=np.cumsum(popularity),
            name=rng.permutation(items),
        )

    def pick(self, low: Ints, high: Ints, uniform: npt.NDArray[np.float64]) -> Ints:
        """An item from each stretch of the shelf [low, high), in proportion to popularity."""
        before = np.concatenate([np.zeros(1), self.reach])
        target = before[low] + (before[high] - before[low]) * uniform
        found: Ints = np.searchsorted(self.reach, target, side="right")
        return np.minimum(np.maximum(found, low), high - 1)  # rounding may step over an end


def taobao_like(
    users: int = 2_000,
    items: int = 20_000,
    categories: int | None = None,
    *,
    examples: int = 100,
    history: int = 50,
    test_share: float = 0.2,
    shops: int = 0,
    shops_each: int = 1,
    seed: int = 0,
) -> ClientData:
    """A population; `examples` is the mean number of training examples of a user.

    Without `categories` there is one for every 30 items, as in the papers. With `shops` these are
    the clients, and every user goes to `shops_each` of them.
    """
    check(_NAME, history=history, test_share=test_share)
    categories = max(2, items // 30) if categories is None else categories
    many = users * examples > MOST_EXAMPLES or max(users, items) > MOST_IDS
    if users < 1 or examples < 1 or not 1 <= categories <= items or many:
        raise ConfigError(
            f"{_NAME}: {users} users with {examples} examples each, {items} items in {categories} "
            "categories",
            hint="at least one of each, no more categories than items, and all of it in memory",
        )
    rng = np.random.default_rng([seed, 0x7A0])
    topics = min(TOPICS, categories)
    shop = _Shop.stocked(items, categories, topics, rng)
    taste = rng.standard_normal((users, topics), dtype=np.float32)
    favourites = _favourites(shop, taste, max(4, round(FAVOURITES * examples)), rng)
    counts = _counts(users, examples / (1 - test_share), rng)
    tendency = rng.standard_normal(users, dtype=np.float32)

    user = np.repeat(np.arange(users), counts)
    item = np.empty(len(user), dtype=np.int64)
    odds = np.empty(len(user), dtype=np.float32)
    for begin in range(0, len(user), _AT_ONCE):
        piece = slice(begin, begin + _AT_ONCE)
        who = user[piece]
        shelf = _shown(shop, favourites, who, rng)
        item[piece] = shop.name[shelf]
        odds[piece] = (
            OFFSET
            + TENDENCY * tendency[who]
            + QUALITY * shop.quality[shelf]
            + TASTE * taste[who, shop.topic[shelf]]
        )
    clicked = rng.random(len(user), dtype=np.float32) < 1 / (1 + np.exp(-odds))
    category_of = np.empty(items, dtype=np.int64)
    category_of[shop.name] = rng.permutation(categories)[shop.category]
    pairs, pair, order = np.arange(users), user, np.arange(len(user))
    if shops:  # a user's history at one shop is what it clicked there
        shop_of = at_clients(user, clients=shops, each=shops_each, seed=seed)
        pairs, pair = np.unique(shop_of * users + user, return_inverse=True)
        pair = pair.reshape(-1).astype(np.int64)
        order = np.argsort(pair, kind="stable")
    data = click_data(
        _NAME,
        Log(user=pair[order], item=item[order], clicked=clicked[order]),
        users=len(pairs),
        items=items,
        history=history,
        test_share=test_share,
        category_of=category_of,
        categories=categories,
        extra={_ODDS: odds[order]},
    )
    if shops:
        of = np.concatenate([data.train["user"], data.test["user"]])
        moved = held_by(data, pairs[of] // users, pairs[of] % users, clients=shops, subjects=users)
        data = replace(data, **moved)
    holder = np.repeat(np.arange(data.clients), np.diff(data.offsets))
    held = _distinct(holder, data.train["item"], items)
    kinds = _distinct(holder, category_of[data.train["item"]], categories)
    return replace(
        data,
        train=_without_odds(data.train),
        test=_without_odds(data.test),
        facts={
            "source": "synthetic, after Niu et al. 2020, Table 2 and section 6",
            "click": "drawn with probability sigmoid(tendency + quality + taste)",
            "seed": seed,
            **data.facts,
            "categories": categories,
            "click share": round(float(clicked.mean()), 4),
            # A training history holds earlier targets of the same client: they are counted.
            "items per client": round(held / data.clients, 1),
            "categories per client": round(kinds / data.clients, 1),
            "examples per client": round(len(data.train) / data.clients, 1),
            "oracle AUC": round(_auc(data.test[_ODDS], data.test[LABEL]), 4),
        },
    )


def _counts(users: int, mean: float, rng: np.random.Generator) -> Ints:
    """Examples per user: some have four times as many as others, the mean is as given."""
    spread = np.clip(rng.gamma(UNEVEN, 1 / UNEVEN, size=users), 0.25, 4.0)
    whole: Ints = np.rint(mean * spread / spread.mean()).astype(np.int64)
    return np.maximum(whole, 1)


def _favourites(shop: _Shop, taste: Floats, each: int, rng: np.random.Generator) -> Ints:
    """(users, each) categories, by popularity and taste; one may come twice."""
    users, topics = taste.shape
    ends = np.searchsorted(shop.topic, np.arange(topics), side="right")
    mass = np.diff(shop.reach[ends - 1], prepend=0.0)
    weight = np.cumsum(mass * np.exp(KEENNESS * taste), axis=1)
    target = rng.random((users, each)) * weight[:, -1:]
    topic = np.zeros((users, each), dtype=np.int64)
    for edge in range(topics - 1):
        topic += target >= weight[:, edge : edge + 1]
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    uniform = rng.random((users, each))
    return np.asarray(shop.category[shop.pick(begins[topic], ends[topic], uniform)])


def _shown(shop: _Shop, favourites: Ints, user: Ints, rng: np.random.Generator) -> Ints:
    """Places on the shelf of the items that these users are shown, one each."""
    edges = np.searchsorted(shop.category, np.arange(int(shop.category[-1]) + 2))
    # The minimum of two draws: a user's first favourite is seen more often than the last.
    which = rng.integers(favourites.shape[1], size=(2, len(user))).min(axis=0)
    category = favourites[user, which]
    anywhere = rng.random(len(user)) < ANYWHERE
    low = np.where(anywhere, 0, edges[category])
    high = np.where(anywhere, len(shop.category), edges[category + 1])
    return shop.pick(low, high, rng.random(len(user)))


def _distinct(user: Ints, other: Ints, size: int) -> int:
    """How many different pairs there are."""
    pairs = np.sort(user * size + other)
    return 1 + int(np.count_nonzero(pairs[1:] != pairs[:-1]))


def _without_odds(part: Examples) -> Examples:
    return Examples({name: column for name, column in part.fields.items() if name != _ODDS})


def _auc(scores: Floats, labels: Floats) -> float:
    """The chance that a click scores above a non-click; ties of real numbers do not matter here."""
    ordered = labels[np.argsort(scores, kind="stable")]
    clicks = float(ordered.sum(dtype=np.float64))
    others = len(ordered) - clicks
    if not clicks or not others:
        return float("nan")
    below = np.cumsum(1 - ordered, dtype=np.float64)
    return float((below * ordered).sum() / (clicks * others))
