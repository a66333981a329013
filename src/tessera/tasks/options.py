"""What the options of tasks mean: the one explanation of the keys of [task] in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CLICKS: Final[Mapping[str, str]] = {
    "users": "Users of the data; 0: all of them.",
    "items": "Items of the synthetic shop.",
    "categories": "Categories of items; 0: in proportion to the items.",
    "examples": "Training examples of a client, on average.",
    "history": "Most items in the history of an example.",
    "shops": "Shops, which are the clients.",
    "shops_each": "Shops that one person goes to.",
    "seed": "Seed of the synthetic data, or of which users are taken.",
    "genres": "Whether a movie's set of genres is its category.",
    "label": 'A click is an item "opened", or one "wanted": bought, in the cart, a favourite.',
    "negatives": "Items per click that a client draws from its own secret as not clicked.",
    "width": "Columns of the embedding tables.",
    "size": 'Size of the dense part: "tiny", "small" or "papers".',
    "model": '"din", "biased" (adds biases) or "personal" (adds rates and matches too).',
    "share_users": "Whether the user table is part of the shared model, as in the papers; refused "
    "in fixed groups, where a row of that table says whose it is.",
}
"""Options of click tasks."""

INTERACTIONS: Final[Mapping[str, str]] = {
    **CLICKS,
    "path": "The file: CSV or Parquet.",
    "user": "Its column of users.",
    "client": "Its column of clients; empty: every user is one.",
    "subject": "Its column of people; empty: every user is one.",
    "item": "Its column of items.",
    "time": "Its column of times; empty: the lines are in order.",
    "label": "Its column of labels; empty: every line is a click.",
    "threshold": "Smallest label that is a click; 0: labels are 0 and 1.",
    "category": "Its column of categories; empty: none.",
    "ids": 'How an item becomes a row: by "dictionary" or by "hash".',
    "dictionary": "A public file with one item per line; empty: made of this file.",
    "unknown": 'Items outside the dictionary: "drop" them, or share one "row".',
    "buckets": "Rows of the table, with hashes.",
    "features": "Further columns for a model of one's own, with commas between; empty: none.",
    "separator": "Between the fields of a CSV; empty: found by looking.",
    "encoding": 'Of a CSV, such as "utf-8"; empty: found by looking.',
    "on_bad": 'Lines that cannot be read: "stop" there, or "skip" and count them.',
}
"""Options of a user's own file."""

RATINGS: Final[Mapping[str, str]] = {
    "shops": "Shops, which are the clients.",
    "shops_each": "Shops that one person goes to.",
    "columns": "Numbers per item that its tags are reduced to.",
    "split": 'The test part: "random", or as "published".',
    "test_share": "Share of the ratings in a random test part.",
    "seed": "Seed of the random split.",
    "part": 'What the model is tested on: "test", or "validation" to tune settings.',
    "model": 'Matrix "factors", or from attributes: "linear", "fm" or "network".',
    "mask": 'The private mask of a client: "none", "linear", "fm" or "network".',
    "penalty": "The mask's L2 penalty; 0: every client finds its own.",
    "factors": "Columns of the factors; 0: biases alone.",
    "refit": "Whether clients fit their linear masks again in each round.",
}
"""Options of rating tasks."""

CLASSES: Final[Mapping[str, str]] = {
    "clients": "Clients that the training examples are dealt out to.",
    "words": "Most words of a question.",
    "seed": "Seed of who gets which example.",
    "part": 'What the model is tested on: "test", or "validation" to tune settings.',
    "width": "Columns of a word's vector.",
    "filters": "Filters of each span.",
    "channels": "Channels of the first convolution; the second has twice as many.",
    "hidden": "Units of the hidden layer.",
}
"""Options of class tasks."""

WORDS: Final[Mapping[str, str]] = {
    "length": "Words before a word that the model looks at.",
    "least": "Times that a word occurs in the training part to be in the dictionary.",
    "speakers": "Speakers, which are the clients; 0: all of them.",
    "words": "Words of the synthetic language.",
    "spoken_each": "Words that a synthetic speaker says.",
    "seed": "Seed of the synthetic speech.",
    "part": 'What the model is tested on: "test", or "validation" to tune settings.',
    "width": "Columns of a word's vectors.",
    "hidden": "Units of the hidden layer.",
    "negatives": "Words that a client takes beside its own, drawn from its own secret.",
    "top": "A word counts as found among the first so many.",
}
"""Options of next-word tasks."""
