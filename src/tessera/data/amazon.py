"""Amazon electronics as a click task, as prepared by the authors of Federated Submodel Averaging.

A line has click (1: five stars, 0: fewer), user, item and the items the user clicked before, joined
by commas ("0": none); lines of a user stand together in the order of time. Only the authors'
training part is public in this form, so we hold out each user's last 20 % ourselves. The histories
are used as published. Research use with citation (McAuley et al. 2015; Niu et al.).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from tessera.data import published, values
from tessera.data.clicks import Ints, Log, check, click_data, numbered, offsets, windows
from tessera.data.examples import ClientData
from tessera.data.row_names import RowNames
from tessera.data.sequences import LENGTH, SequenceData, Sequences, sequence_data
from tessera.data.split import TEST
from tessera.errors import ConfigError

SOURCE: Final = published.Source(
    title="Amazon electronics as prepared for FedSubAvg",
    publisher="the authors of Federated Submodel Averaging, from the reviews of McAuley et al., "
    "UC San Diego",
    page="the FedSubAvg repository on GitHub, Amazon data, file amazon_train",
    folders=("amazon-electronics",),
    files=("amazon_train",),
)

_NAME: Final = "amazon"
_WRITTEN: Final = published.written("\t", "click", "user", "item", "history")
_NOTHING: Final = 0  # the id that stands for an empty history


def amazon(folder: Path | str | None = None, *, history: int = 20) -> ClientData:
    """99,710 rows of 1,859 users, 55,363 of them clicks."""
    check(_NAME, history=history)
    path = SOURCE.find("amazon_train", folder)
    clicked, user, item, before, counts = _columns(path)
    client_rows, clients = numbered(user)
    # Histories may name items that are nobody's target: they have rows too.
    item_rows, known = numbered(np.concatenate([item, before]))
    bounds = offsets(counts)
    stop = bounds[1:]
    empty = before[bounds[:-1]] == _NOTHING
    begin = np.where(empty, stop, np.maximum(bounds[:-1], stop - history))
    histories = windows(item_rows[len(item) :], begin, stop, history)
    # Id 0 has no row of its own: it is padding, and sorts first.
    shift = int(known[0] == _NOTHING)
    histories[histories >= 0] -= shift
    order = np.argsort(client_rows, kind="stable")
    return click_data(
        _NAME,
        Log(
            user=client_rows[order],
            item=item_rows[: len(item)][order] - shift,
            clicked=clicked[order] == 1,
        ),
        users=len(clients),
        items=len(known) - shift,
        history=history,
        given=histories[order],
        facts={
            "source": f"{SOURCE.title}: training part only",
            "click": "a rating of five stars",
            "target items": len(np.unique(item)),
        },
        ids={"user": RowNames.of(clients), "item": RowNames.of(known[shift:])},
    )


def sequences_amazon(
    folder: Path | str | None = None, *, least: int = 5, history: int = LENGTH, part: str = TEST
) -> SequenceData:
    """What users reviewed, in the order of the file; items with `least` reviews or more."""
    if least < 1:
        raise ConfigError(f"sequences-amazon: least = {least}", hint="1 or more")
    _, user, item, _, _ = _columns(SOURCE.find("amazon_train", folder))
    ids, times = np.unique(item, return_counts=True)
    known = ids[times >= least]
    kept = np.isin(item, known)
    if not kept.any():
        raise ConfigError(f"sequences-amazon: no item has {least} reviews", hint="a lower least")
    rows, clients = numbered(user[kept])
    return sequence_data(
        "sequences-amazon",
        Sequences.sorted(
            rows, np.searchsorted(known, item[kept]), None, users=len(clients), items=len(known)
        ),
        items=len(known),
        length=history,
        part=part,
        ids={"user": RowNames.of(clients), "item": RowNames.of(known)},
        facts={
            "source": f"{SOURCE.title}: training part only",
            "event": "a review, whatever its stars",
            "order": "as in the file, which is that of time",
            "items with fewer reviews, left out": int((times < least).sum()),
        },
    )


def _columns(path: Path) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Click, user and item; then the items of all histories in a row, and how many each has."""
    table, bad = published.table(path, _WRITTEN, _WRITTEN.names, distinct=("history",))
    clicked = values.places(table, "click", ("0", "1"), bad)
    user, item = (values.whole(table, name, bad) for name in ("user", "item"))
    before, counts = values.lists(table, "history", bad)
    # An id below 1 has no row; 0 alone stands for an empty history.
    line = np.repeat(np.arange(len(counts)), counts)
    wrong = (item < 1) | (user < 0)
    wrong[line[(before < 0) | ((before == _NOTHING) & (counts[line] > 1))]] = True
    bad.add(wrong, lambda row: "ids start at 1")
    published.refuse(bad)
    return clicked, user, item, before, counts
