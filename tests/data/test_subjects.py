"""People at several clients: who holds what, whose row is whose, and bounds that do not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data import interactions
from tessera.data.examples import SUBJECT, ClientData, Examples
from tessera.data.interactions import Interactions
from tessera.data.subjects import (
    UNNAMED,
    SubjectSpread,
    at_clients,
    check_local_rows,
    check_named,
    check_spread,
    held_by,
    one_unnamed,
)
from tessera.data.taobao_like import taobao_like
from tessera.errors import ConfigError


def read(source, **how):
    return interactions.read(source, Interactions(**how))


SHOPPING = """shop,who,what,hit
north,ann,tea,1
south,ann,pan,1
north,bob,pan,0
north,ann,pan,0
south,cid,tea,1
south,,tea,0
north,,salt,1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "own.csv"
    path.write_text(text)
    return path


def flat(count: int, people: list[int]) -> ClientData:
    """Examples of one client each, so that only the regrouping is at work."""
    user = np.array(people, np.int64)
    examples = Examples({"user": user, "item": np.arange(len(user))})
    return ClientData(
        name="flat",
        train=examples,
        offsets=np.array([0, len(user)]),
        test=examples.take(slice(0)),
        test_offsets=np.array([0, 0]),
        sizes={"user": count, "item": len(user)},
    )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 6))
def test_regrouping_loses_nothing_and_a_row_belongs_to_one_person_at_one_client(
    people: list[int], clients: int, each: int
) -> None:
    each = min(each, clients)
    data, who = flat(6, people), np.array(people, np.int64)
    where = at_clients(who, clients=clients, each=each, seed=1)
    moved = replace(data, **held_by(data, where, who, clients=clients, subjects=6))
    assert moved.clients == clients and moved.subjects == 6
    found = set()
    owner: dict[int, tuple[int, int]] = {}
    for client in range(clients):
        mine = moved.of(client)
        for item, subject, user in zip(mine["item"], mine[SUBJECT], mine["user"], strict=True):
            found.add((int(item), client, int(subject)))
            assert owner.setdefault(int(user), (client, int(subject))) == (client, int(subject))
        assert (np.diff(mine["user"]) >= 0).all()
    expected = zip(range(len(who)), where, who, strict=True)
    assert found == {(int(i), int(c), int(s)) for i, c, s in expected}
    check_local_rows(moved, ("user",))
    spread = SubjectSpread.of(moved.train, moved.offsets)
    pairs = list(zip(where.tolist(), people, strict=True))
    assert spread.records == max(pairs.count(pair) for pair in pairs)
    assert spread.clients == max(len({c for c, p in pairs if p == s}) for s in people) <= each


def test_people_go_to_as_many_clients_as_they_are_said_to() -> None:
    who = np.repeat(np.arange(200), 60)
    where = at_clients(who, clients=20, each=3, seed=0)
    counts = [len(np.unique(where[who == person])) for person in range(200)]
    assert set(counts) == {3}
    # 200 people at 3 of 20 shops: 30 expected, 5 the standard deviation; 6 of them either way.
    at_shop = np.array([len(np.unique(who[where == shop])) for shop in range(20)])
    assert (np.abs(at_shop - 30) < 30).all()
    with pytest.raises(ConfigError, match="4 clients each, of 3"):
        at_clients(who, clients=3, each=4, seed=0)


def test_a_file_may_say_who_holds_a_line_and_whom_it_is_about(tmp_path: Path) -> None:
    path = written(tmp_path, SHOPPING)
    names = {"user": "who", "item": "what", "client": "shop", "label": "hit"}
    data = read(path, **names, test_share=0.0)
    assert data.clients == 2 and data.subjects == 3
    north, south = data.of(0), data.of(1)
    assert north[SUBJECT].tolist() == [0, 0, 1, -1] and south[SUBJECT].tolist() == [0, 2, -1]
    assert not set(north["user"]) & set(south["user"])  # ann's rows in two shops never meet
    # Ann's history in the north knows nothing of what she clicked in the south.
    liked_by_ann = north["history"][1][north["history"][1] >= 0]
    assert liked_by_ann.tolist() == [north["item"][0]]
    assert data.facts[UNNAMED] == 2


def test_records_without_a_subject_are_an_error_or_all_of_one_person(tmp_path: Path) -> None:
    names = {"user": "who", "item": "what", "client": "shop", "label": "hit", "test_share": 0.0}
    data = read(written(tmp_path, SHOPPING), **names)
    with pytest.raises(ConfigError, match="2 records name no subject, the first at client 0") as no:
        check_named(data)
    assert no.value.hint is not None and "one-subject" in no.value.hint
    whole = one_unnamed(data)
    assert whole.subjects == 4 and whole.of(0)[SUBJECT].tolist() == [0, 0, 1, 3]
    assert whole.of(1)[SUBJECT].tolist() == [0, 2, 3]
    check_named(whole)
    assert one_unnamed(whole) is whole
    assert (
        SubjectSpread.of(data.train, data.offsets).clients == 2
    )  # ann; the unnamed are nobody yet


def test_where_neither_is_named_a_user_is_both(tmp_path: Path) -> None:
    lines = "".join(line + "\n" for line in SHOPPING.splitlines() if ",," not in line)
    path = written(tmp_path, lines)
    data = read(path, user="who", item="what", label="hit")
    assert data.clients == data.subjects == 3 and data.train.subjects is None
    by_subject = read(path, user="shop", subject="who", item="what", label="hit")
    assert by_subject.clients == 2 and by_subject.subjects == 3


def test_a_synthetic_retail_has_the_people_of_the_shop_it_is_made_of() -> None:
    small = {"users": 60, "items": 120, "examples": 12, "history": 4, "seed": 3}
    alone, retail = taobao_like(**small), taobao_like(**small, shops=7, shops_each=3)
    assert retail.clients == 7 and retail.subjects == 60 and retail.facts["clients"] == 7
    assert SubjectSpread.of(retail.train, retail.offsets).clients == 3
    check_local_rows(retail, ("user",))

    def seen(data: ClientData, subject: str) -> list[tuple[int, int]]:
        parts = (data.train, data.test)
        whom = np.concatenate([part[subject] for part in parts])
        item = np.concatenate([part["item"] for part in parts])
        return sorted(zip(whom.tolist(), item.tolist(), strict=True))

    assert seen(alone, "user") == seen(retail, SUBJECT)


def test_bounds_that_an_account_takes_for_granted_are_counted() -> None:
    data = flat(3, [0, 0, 0, 1, 1, 2])
    where, who = np.array([0, 0, 1, 0, 1, 1]), data.train["user"]
    moved = replace(data, **held_by(data, where, who, clients=2, subjects=3))
    check_spread(moved, records=2, clients=2)
    check_spread(moved, records=0, clients=2)
    with pytest.raises(ConfigError, match="1 times a person has more than the 1 records"):
        check_spread(moved, records=1, clients=2)
    with pytest.raises(ConfigError, match="2 people are at more than the 1 clients"):
        check_spread(moved, records=2, clients=1)


def test_a_local_row_of_two_people_is_refused() -> None:
    data = flat(3, [0, 0, 0, 1, 1, 2])
    who = data.train["user"]
    moved = replace(data, **held_by(data, np.zeros_like(who), who, clients=1, subjects=3))
    with pytest.raises(ConfigError, match="'shelf' are of several people, 2 times"):
        check_local_rows(
            replace(moved, train=moved.train.with_field("shelf", np.zeros(6, np.int64))), ("shelf",)
        )
    histories = np.array([[0, -1]] * 3 + [[1, -1]] * 2 + [[2, 1]])
    with pytest.raises(ConfigError, match="1 times"):
        check_local_rows(
            replace(moved, train=moved.train.with_field("shelf", histories)), ("shelf",)
        )
    check_local_rows(data, ("user",))  # every client is one person
