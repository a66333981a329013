"""Every message between a client and a server belongs to a part of the round."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import tessera.protocols
import tessera.rounds
from tessera.engines.stopwatch import CATEGORIES, CATEGORY_OF_ANSWER, CATEGORY_OF_MESSAGE, Stopwatch
from tessera.ids import ClientId
from tessera.protocols import wire


def declared(name: str) -> set[type[Any]]:
    """What modules and classes of protocols and rounds give this name: kinds of message."""
    return {kind for kinds in _declarations(name) for kind in kinds}


def _declarations(name: str) -> Iterator[tuple[type[Any], ...]]:
    for package in (tessera.protocols, tessera.rounds):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = import_module(found.name)
            for holder in (
                module,
                *(part for _, part in inspect.getmembers(module, inspect.isclass)),
            ):
                yield vars(holder).get(name, ())


def test_every_message_of_a_client_and_to_one_has_its_part_of_the_round() -> None:
    up, down = declared("FROM_CLIENT"), declared("FROM_SERVER")
    assert {"Advert", "PlainRows", "PlainInput", "Query", "WriteReport"} <= {
        kind.__name__ for kind in up
    }
    assert {"Roster", "UnionOpened", "Download", "QueryAnswers"} <= {kind.__name__ for kind in down}
    assert (up | down) <= set(wire.records().values())
    assert {kind.__name__ for kind in up | down} | {"start"} == CATEGORY_OF_MESSAGE.keys()
    assert {kind.__name__ for kind in down} <= CATEGORY_OF_ANSWER.keys()
    assert set(CATEGORY_OF_MESSAGE.values()) <= set(CATEGORIES)


def test_a_message_that_nobody_foresaw_is_counted_apart_and_stops_no_run() -> None:
    one, two = ClientId(1), ClientId(2)
    counted = {one: {"Advert": 10.0, "Unforeseen": 6.0}, two: {"Advert": 30.0}}
    found = Stopwatch().by_category(counted, "up", [one, two], CATEGORY_OF_MESSAGE)
    assert found.pop("other") == 3.0
    assert found == {category: 20.0 if category == "keys" else 0.0 for category in CATEGORIES}
    known = {one: {"Advert": 1.0}}
    assert "other" not in Stopwatch().by_category(known, "up", [one], CATEGORY_OF_MESSAGE)
