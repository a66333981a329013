"""Alimama display advertising as a click task: was the ad that was shown clicked?

Two layouts of one published set:

- `alimama`: the tables as published, of which we use two. `raw_sample.csv` has an impression per
  line (user, time, ad, place, not clicked, clicked), `ad_feature.csv` the category of each ad. The
  behaviour log (723 million lines on categories and brands, not ads) and the user profiles are left
  aside; the history holds the ads the user clicked before.
- `alimama_sample`: the form prepared for the DMR model, 267 fields per impression, which carries 50
  categories of earlier behaviour. They become the field `category_history` beside the usual ones.

Tianchi terms: academic, non-commercial use with attribution.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from tessera.data import published
from tessera.data.clicks import Log, check, click_data, numbered
from tessera.data.examples import NONE, ClientData, Timeline
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError

_TITLE: Final = "Ad Display/Click Data on Taobao.com"
_PAGE: Final = "tianchi.aliyun.com, data set 56"

SOURCE: Final = published.Source(
    title=_TITLE,
    publisher="Alimama",
    page=_PAGE,
    folders=("taobao-alimama",),
    files=("raw_sample.csv", "ad_feature.csv"),
)
SAMPLE: Final = published.Source(
    title=f"{_TITLE}, as prepared for DMR",
    publisher="Alimama, shipped as an example with PaddleRec",
    page="the PaddleRec repository on GitHub, models/rank/dmr",
    folders=("taobao-alimama-sample",),
    files=("alimama_sampled_train.txt",),
)

_TABLES: Final = published.written(",")

# Of the columns of the prepared form, by their numbers.
_FIELDS: Final = tuple(f"column {place}" for place in range(1, 268))
_CATEGORY_HISTORY: Final = _FIELDS[50:100]
_USER, _AD, _CATEGORY, _CLICK = (_FIELDS[place] for place in (250, 259, 260, 266))


def alimama(
    folder: Path | str | None = None,
    *,
    users: int | None = None,
    history: int = 20,
    seed: int = 0,
) -> ClientData:
    """26.6 million impressions, or those of that many `users`, drawn at random."""
    return _read(folder, users, history, seed)


def _read(
    folder: Path | str | None,
    users: int | None,
    history: int,
    seed: int,
    until: int | None = None,
) -> ClientData:
    name = "alimama"
    check(name, history=history)
    if users is not None and users < 1:
        raise ConfigError(f"{name}: {users} users", hint="at least 1, or none for all")
    ads = SOURCE.find("ad_feature.csv", folder)
    path = SOURCE.find("raw_sample.csv", folder)
    listed, category = published.integers(ads, _TABLES, ("adgroup_id", "cate_id"))
    user, time, ad, clicked = published.integers(
        path,
        _TABLES,
        ("user", "time_stamp", "adgroup_id", "clk"),
        words={"clk": ("0", "1")},
    )
    facts: dict[str, object] = {"source": f"{_TITLE}, Alimama", "click": "the ad was clicked"}
    if users is not None:
        everyone = np.unique(user)
        few = min(users, len(everyone))
        chosen = np.random.default_rng(seed).choice(everyone, size=few, replace=False)
        keep = np.isin(user, chosen)
        user, time, ad, clicked = (column[keep] for column in (user, time, ad, clicked))
        facts["sample"] = f"{few} users drawn at random, seed {seed}"
    catalogue, first = np.unique(listed, return_index=True)
    row = np.minimum(np.searchsorted(catalogue, ad), len(catalogue) - 1)
    known = catalogue[row] == ad
    facts["impressions of ads that are not listed, left out"] = int((~known).sum())
    if not known.any():
        raise ConfigError(f"{path}: no impression of an ad that ad_feature.csv lists")
    client, clients = numbered(user[known])
    row, clicked, time = row[known], clicked[known] == 1, time[known]
    kept = slice(None) if until is None else time <= until
    data = click_data(
        name,
        Log.sorted(client[kept], row[kept], clicked[kept], time[kept]),
        users=len(clients),
        items=len(catalogue),
        history=history,
        category_of=numbered(category[first])[0],
        facts=facts,
        ids={"user": RowNames.of(clients), "item": RowNames.of(catalogue)},
    )
    again = partial(_read, folder, users, history, seed)
    return replace(data, timeline=Timeline.of(time, again))


def alimama_sample(folder: Path | str | None = None, *, history: int = 20) -> ClientData:
    """500 impressions of 230 users, for trying the reader: the click share is not the real one."""
    name = "alimama-sample"
    check(name, history=history)
    path = SAMPLE.find("alimama_sampled_train.txt", folder)
    kept = (_USER, _AD, _CATEGORY, _CLICK, *_CATEGORY_HISTORY)
    user, ad, category, clicked, *before = published.integers(
        path,
        published.written(",", *_FIELDS),
        kept,
        optional=(_CATEGORY, *_CATEGORY_HISTORY),
        words={_CLICK: ("0", "1")},
    )
    client, clients = numbered(user)
    ad_row, ads = numbered(ad)
    earlier = np.stack(before, axis=1)
    # 0 stands for "nothing" in the histories of this form.
    earlier[earlier <= 0] = NONE
    kinds = np.unique(np.concatenate([category, earlier[earlier >= 0]]))
    category_of = np.empty(len(ads), dtype=np.int64)
    category_of[ad_row[::-1]] = np.searchsorted(kinds, category)[::-1]
    rows = np.where(earlier >= 0, np.searchsorted(kinds, earlier), NONE)
    order = np.argsort(client, kind="stable")
    return click_data(
        name,
        Log(user=client[order], item=ad_row[order], clicked=clicked[order] == 1),
        users=len(clients),
        items=len(ads),
        history=history,
        category_of=category_of,
        categories=len(kinds),
        extra={"category_history": rows[order]},
        facts={
            "source": f"{SAMPLE.title}: a sample of 500 impressions, for parsers only",
            "click": "the ad was clicked",
            "order": "as in the file: the prepared form has no times",
        },
        ids={"user": RowNames.of(clients), "item": RowNames.of(ads)},
    )
