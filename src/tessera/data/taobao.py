"""Taobao user behaviour as a click task: 25 November to 3 December 2017, Chinese time.

The file lists what users did with items: looked (pv), put into the cart, marked as favourite,
bought. Nobody wrote down what was shown and left alone, so a click has to be defined:

- `opened` (the default): the first thing a user does with an item is a click; beside it stand
  items that this user does not have, drawn evenly from those of the same part (training or
  test), which are not. The list of items and their categories is public, and every client draws
  them itself (`data/examples.py`). The history tells them apart: users come back to categories.
- `wanted`: every event is an example; cart, favourite and buy are clicks, a look is not. The
  history holds the items wanted before. Nothing is drawn, but nine events in ten are looks.

Tianchi terms: academic, non-commercial use with attribution.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.data import published, values
from tessera.data.clicks import Ints, Log, check, click_data, numbered, with_negatives
from tessera.data.examples import ClientData, Timeline
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError

SOURCE: Final = published.Source(
    title="User Behavior Data from Taobao for Recommendation",
    publisher="Alibaba",
    page="tianchi.aliyun.com, data set 649",
    folders=("taobao-userbehavior", "taobao-userbehavior-sample"),
    files=("UserBehavior.csv",),
)

BEHAVIOURS: Final = ("pv", "buy", "cart", "fav")
FIRST: Final = 1_511_539_200  # 25 November 2017, 0:00 in China
END: Final = 1_512_316_800  # 4 December 2017, 0:00

_NAME: Final = "taobao"
_WRITTEN: Final = published.written(",", "user", "item", "category", "behaviour", "time")


def taobao(
    folder: Path | str | None = None,
    *,
    label: str = "opened",
    negatives: int = 1,
    users: int | None = None,
    history: int = 50,
) -> ClientData:
    """Behaviour of the first `users` of the file, or of all: 100 million events.

    Events outside the nine days are left out and counted.
    """
    return _read(folder, label, negatives, users, history)


def _read(
    folder: Path | str | None,
    label: str,
    negatives: int,
    users: int | None,
    history: int,
    until: int | None = None,
) -> ClientData:
    check(_NAME, history=history)
    if label not in ("opened", "wanted"):
        raise ConfigError(f"{_NAME}: label = {label!r}", hint='"opened" or "wanted"')
    if users is not None and users < 1:
        raise ConfigError(f"{_NAME}: {users} users", hint="at least 1, or none for all")
    path = SOURCE.find("UserBehavior.csv", folder)
    user, item, category, behaviour, time = _events(path, users)
    inside = (time >= FIRST) & (time < END)
    outside = int((~inside).sum())
    user, item, category, behaviour, time = (
        column[inside] for column in (user, item, category, behaviour, time)
    )
    if not len(user):
        raise ConfigError(f"{path}: no event from 25 November to 3 December 2017")
    client, clients = numbered(user)
    row, items = numbered(item)
    kind, kinds = numbered(category)
    category_of = np.empty(len(items), dtype=np.int64)
    category_of[row[::-1]] = kind[::-1]  # the first category an item is listed with
    facts = {
        "source": f"{SOURCE.title}, {SOURCE.publisher}: {_extent(path, users)}",
        "events": len(user),
        "events outside the nine days, left out": outside,
        "categories": len(kinds),
    }
    kept = slice(None) if until is None else time <= until
    log = Log.sorted(client[kept], row[kept], behaviour[kept] > 0, time[kept])
    held = pools = None
    if label == "wanted":
        facts["click"] = "an item put into the cart, marked as favourite or bought"
    else:
        sampled = with_negatives(
            _first_times(log, len(items)),
            users=len(clients),
            items=len(items),
            each=negatives,
        )
        log, held, pools = sampled.log, sampled.held, sampled.pools
        facts["click"] = (
            "the first event of a user with an item; each beside "
            f"{negatives} drawn evenly from items of the same part that the user does not have"
        )
    data = click_data(
        _NAME,
        log,
        users=len(clients),
        items=len(items),
        history=history,
        held=held,
        pools=pools,
        category_of=category_of,
        rate=label == "wanted",
        facts=facts,
        ids={"user": RowNames.of(clients), "item": RowNames.of(items)},
    )
    again = partial(_read, folder, label, negatives, users, history)
    return replace(data, timeline=Timeline.of(time, again))


def _events(path: Path, users: int | None) -> tuple[Ints, ...]:
    """The columns, up to the first event of one user too many: the file is in order of users."""
    seen: dict[str, None] = {}

    def enough(batch: Any) -> bool:
        seen.update(dict.fromkeys(batch.column("user").dictionary_decode().unique().to_pylist()))
        return users is not None and len(seen) > users

    table, bad = published.table(
        path, _WRITTEN, _WRITTEN.names, enough=None if users is None else enough
    )
    user, item, category = (values.whole(table, n, bad) for n in ("user", "item", "category"))
    behaviour = values.places(table, "behaviour", BEHAVIOURS, bad)
    time = values.whole(table, "time", bad)
    published.refuse(bad)
    found = user, item, category, behaviour, time
    if users is None:
        return found
    few = np.isin(user, np.array(list(seen)[:users], dtype=np.int64))
    return tuple(column[few] for column in found)


def _extent(path: Path, users: int | None) -> str:
    if users is not None:
        return f"the first {users} users of the file"
    return "a sample" if path.parent.name == SOURCE.folders[1] else "the whole file"


def _first_times(log: Log, items: int) -> Log:
    """The first event of each user with each item, all as clicks."""
    _, first = np.unique(log.user * items + log.item, return_index=True)
    first.sort()
    return Log(
        user=log.user[first], item=log.item[first], clicked=np.ones(len(first), dtype=np.bool_)
    )
