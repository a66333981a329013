"""Last.fm 2K (HetRec 2011): how often a user has listened to an artist.

As sequences every artist of a user counts, whatever the plays. There are no times: the order, and
with it which artist is held out, is a public draw.

As ratings plays are in five bins.

A play count becomes 1 to 5 by the quintiles of all play counts of the set, so more plays never
give a lower rating and equal counts get the same one. The paper on FedMMF (section 4.1) also rates
from 1 to 5 and does not say by which bins, so figures cannot be compared with it. Quintiles over
all pairs use every user's counts, those of the test part among them: in a deployment they would
come out of a secure sum, or be fixed in advance.

Rows of the item table are the listed artists in the order of their ids. Artists have their tags,
as `tags` makes numbers of them; of users nothing is known. Non-commercial use; cite Last.fm and
HetRec 2011 (Cantador, Brusilovsky and Kuflik).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from tessera.data import published, values
from tessera.data.clicks import numbered
from tessera.data.movielens import ratings_1m, ratings_10m, ratings_100k
from tessera.data.ratings import (
    TEST_SHARE,
    Attributes,
    Floats,
    Ints,
    RatingData,
    rating_data,
)
from tessera.data.row_names import RowNames
from tessera.data.sequences import LENGTH, SequenceData, Sequences, sequence_data
from tessera.data.split import TEST
from tessera.data.tags import Tagging, tag_attributes
from tessera.errors import ConfigError

SOURCE: Final = published.Source(
    title="HetRec 2011 Last.fm 2K",
    publisher="the Information Retrieval Group, Universidad Autónoma de Madrid, and GroupLens",
    page="grouplens.org, Datasets, HetRec 2011, hetrec2011-lastfm-2k.zip",
    folders=("hetrec2011-lastfm-2k",),
    files=("user_artists.dat", "artists.dat", "user_taggedartists.dat"),
)

_NAME: Final = "ratings-lastfm"
_BINS: Final = 5
_TABLES: Final = published.written("\t")


def ratings_lastfm(
    folder: Path | str | None = None,
    columns: int = 20,
    split: str = "random",
    test_share: float = TEST_SHARE,
    seed: int = 0,
    part: str = "test",
) -> RatingData:
    """92,834 pairs of 1,892 users and 17,632 artists; tags as `columns` numbers per artist.

    A play count below 1 is out of range. No split and no times were published.
    """
    ids, names = _artists(folder)
    user, artist, plays = _plays(folder)
    rating, bounds = binned(plays)
    rows, clients = numbered(user)
    tagging = _tagging(ids, folder)
    return rating_data(
        _NAME,
        user=rows,
        item=_rows(ids, artist),
        rating=rating,
        users=len(clients),
        items=len(ids),
        low=1.0,
        high=float(_BINS),
        step=1.0,
        item_attributes=tag_attributes(tagging, items=len(ids), columns=columns),
        profiles=Attributes.of({}, rows=len(clients)),
        ids={"user": RowNames.of(clients), "item": RowNames.of(ids)},
        titles=names,
        split=split,
        test_share=test_share,
        seed=seed,
        part=part,
        facts={
            "source": f"{SOURCE.title}, {SOURCE.publisher}",
            "binning": _binning_in_words(bounds),
            "binning, beside the paper": "the bins of the paper are not known",
            "binning, in a deployment": "quintiles use every user's counts: take them through a "
            "secure sum, or fix them in advance",
            **tagging.facts(),
        },
    )


def sequences_lastfm(
    folder: Path | str | None = None,
    *,
    least: int = 5,
    history: int = LENGTH,
    part: str = TEST,
    seed: int = 0,
) -> SequenceData:
    """What users listened to, in an order drawn by `seed`; artists with `least` listeners or more.

    The file has a user's artists by plays: in its order the least played would be held out.
    """
    if least < 1:
        raise ConfigError(f"sequences-lastfm: least = {least}", hint="1 or more")
    ids, names = _artists(folder)
    user, artist, _ = _plays(folder)
    item = _rows(ids, artist)
    pairs = np.unique(np.stack([user, item], 1)[item >= 0], axis=0)
    listeners = np.bincount(pairs[:, 1], minlength=len(ids))
    known = np.flatnonzero(listeners >= least)
    pairs = pairs[np.isin(pairs[:, 1], known)]
    if not len(pairs):
        raise ConfigError(
            f"sequences-lastfm: no artist has {least} listeners", hint="a lower least"
        )
    rows, clients = numbered(pairs[:, 0])
    order = np.random.default_rng([seed, 2011]).permutation(len(pairs))
    return sequence_data(
        "sequences-lastfm",
        Sequences.sorted(
            rows,
            np.searchsorted(known, pairs[:, 1]),
            order,
            users=len(clients),
            items=len(known),
        ),
        items=len(known),
        length=history,
        part=part,
        ordered=False,
        ids={"user": RowNames.of(clients), "item": RowNames.of(ids[known])},
        titles=tuple(names[at] for at in known),
        facts={
            "source": f"{SOURCE.title}, {SOURCE.publisher}",
            "event": "a user listened to an artist, however often",
            "order": f"none was published: drawn by seed {seed}, so that any artist is held out",
            "artists with fewer listeners, left out": int((listeners < least).sum()),
        },
    )


def binned(plays: Floats) -> tuple[Floats, Floats]:
    """Play counts as 1 to 5, and the largest counts of the first four bins.

    The bounds are counts that occur: the smallest at which a fifth (two fifths, ...) of the pairs
    are at or below. A count under 1 becomes 0 and NaN stays, for `rating_data` to leave out.
    """
    usable = plays[plays >= 1]
    if not len(usable):
        return np.where(np.isnan(plays), plays, 0.0), np.ones(_BINS - 1)
    shares = np.arange(1, _BINS) / _BINS
    bounds = np.quantile(usable, shares, method="inverted_cdf")
    rating = 1.0 + np.searchsorted(bounds, plays, side="left")
    return np.where(np.isnan(plays), plays, np.where(plays >= 1, rating, 0.0)), bounds


def _binning_in_words(bounds: Floats) -> str:
    bins = ", ".join(f"{place + 1} up to {bound:g}" for place, bound in enumerate(bounds))
    return f"plays to ratings by quintiles of all play counts: {bins}, {_BINS} above"


def _plays(folder: Path | str | None) -> tuple[Ints, Ints, Floats]:
    """User, artist and play count, which is NaN where it is not a number."""
    path = SOURCE.find("user_artists.dat", folder)
    table, bad = published.table(path, _TABLES, ("userID", "artistID", "weight"))
    user, artist = (values.whole(table, name, bad) for name in ("userID", "artistID"))
    published.refuse(bad)
    return user, artist, values.numbers(table, "weight", bad)


def _artists(folder: Path | str | None) -> tuple[Ints, tuple[str, ...]]:
    """The listed artists: ids ascending, and their names."""
    path = SOURCE.find("artists.dat", folder)
    names: dict[int, str] = {}
    for line, text in published.lines(path):
        fields = text.split("\t")
        if line == 1 and fields[:2] == ["id", "name"]:
            continue
        if len(fields) < 2 or not fields[0].isdecimal():
            raise ConfigError(
                f"{path}, line {line}: not an artist: an id and a name are due, between tabs"
            )
        names[int(fields[0])] = fields[1]
    if not names:
        raise ConfigError(f"{path}: empty", hint=SOURCE.hint)
    ids = sorted(names)
    return np.array(ids, dtype=np.int64), tuple(names[one] for one in ids)


def _tagging(ids: Ints, folder: Path | str | None) -> Tagging:
    """Tags by their ids: what they say is not needed."""
    artist, tag = published.integers(
        SOURCE.find("user_taggedartists.dat", folder), _TABLES, ("artistID", "tagID")
    )
    return Tagging.of(_rows(ids, artist), tag.astype(np.str_))


def _rows(ids: Ints, wanted: Ints) -> Ints:
    """Rows of the table; -1 for what is not listed."""
    row = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[row] == wanted, row, -1)


# --- named ----------------------------------------------------------------------------------------
#
# Rating data by the name of its task: a task reads it, and so does an audit of the task's runs.


RATINGS: Final[Mapping[str, Callable[..., RatingData]]] = {
    "ratings-100k": ratings_100k,
    "ratings-1m": ratings_1m,
    "ratings-10m": ratings_10m,
    "ratings-lastfm": ratings_lastfm,
}
