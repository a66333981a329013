"""Ratings as clients' examples: splits, order, and a rule for everything that can be wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data import published, values
from tessera.data.ratings import (
    CONSTANT,
    NO_ATTRIBUTES,
    NONE_LEFT,
    NOT_A_NUMBER,
    NOT_LISTED,
    OFF_STEP,
    OUT_OF_RANGE,
    REPEATED,
    TOO_FEW,
    Attributes,
    rating_data,
    standardised,
)
from tessera.errors import ConfigError, MisuseError

ITEMS = 60


def made(rows, *, users, items=ITEMS, times=True, **options):
    """Rows are (user, item, rating, time)."""
    user, item, rating, time = (np.array(column) for column in zip(*rows, strict=True))
    given = {
        "low": 1.0,
        "high": 5.0,
        "step": 1.0,
        "item_attributes": Attributes(("one",), np.ones((items, 1), dtype=np.float32)),
        "profiles": Attributes.of({}, rows=users),
        "titles": [f"item {one}" for one in range(items)],
        **options,
    }
    return rating_data(
        "made",
        user=user.astype(np.int64),
        item=item.astype(np.int64),
        rating=rating.astype(np.float64),
        time=time if times else None,
        users=users,
        items=items,
        **given,
    )


def regular(users=30, each=40, seed=5):
    """Each user rates `each` different items, in an order of time that is not the file's."""
    rng = np.random.default_rng(seed)
    rows = [
        (user, item, 1 + (user + item) % 5, int(rng.integers(10_000)))
        for user in range(users)
        for item in rng.permutation(ITEMS)[:each]
    ]
    return [rows[one] for one in rng.permutation(len(rows))]


def pairs(examples):
    return {
        (int(u), int(i), float(r))
        for u, i, r in zip(examples["user"], examples["item"], examples["label"], strict=True)
    }


# -- splits


def test_a_random_share_of_all_ratings_is_the_test_part():
    rows = regular()
    data = made(rows, users=30, test_share=0.25)
    assert (len(data.train), len(data.test)) == (900, 300)
    assert pairs(data.train) | pairs(data.test) == {(u, i, float(r)) for u, i, r, _ in rows}
    # Not a quarter of each user's: 300 ratings fall on 30 users as chance has it.
    assert len(set(np.diff(data.test_offsets).tolist())) > 3


def test_the_seed_and_nothing_else_decides_the_split():
    rows = regular()
    first, again = (made(rows, users=30, seed=3) for _ in range(2))
    assert pairs(first.test) == pairs(again.test)
    other = pairs(made(rows, users=30, seed=4).test)
    assert len(other & pairs(first.test)) < 0.35 * len(other)
    # Independent draws of a fifth share about a fifth.
    assert len(other & pairs(first.test)) > 0.08 * len(other)


@pytest.mark.parametrize("split", ["random", "published"])
def test_tuning_holds_out_a_tenth_of_the_training_part_and_never_sees_the_test_part(split):
    rows = regular()
    held = np.arange(len(rows)) % 7 == 0
    options = {"users": 30, "split": split, "held": held, "seed": 2}
    final, tuning = made(rows, **options), made(rows, part="validation", **options)
    assert pairs(tuning.train) | pairs(tuning.test) == pairs(final.train)
    assert not pairs(tuning.test) & pairs(final.test)
    assert len(tuning.test) == round(0.1 * len(final.train))
    assert "left out unread" in tuning.facts["split"]
    assert "left out" not in final.facts["split"]


def test_the_published_test_part_is_used_as_it_is():
    rows = regular()
    held = np.arange(len(rows)) % 7 == 0
    data = made(rows, users=30, split="published", held=held)
    expected = {(u, i, float(r)) for (u, i, r, _), out in zip(rows, held, strict=True) if out}
    assert pairs(data.test) == expected
    # It is used only on request.
    assert pairs(made(rows, users=30, held=held).test) != expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split": "published"}, "no test part was published"),
        ({"split": "by time"}, "no split is called 'by time'"),
        ({"part": "train"}, "'train' cannot be held out"),
        ({"test_share": 1.0}, "test share of 1"),
        ({"test_share": math.nan}, "test share of nan"),
        ({"seed": -1}, "seed of -1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        made(regular(), users=30, **options)


# -- order and clients


def test_clients_are_users_and_their_ratings_stand_oldest_first():
    rows = regular()
    data = made(rows, users=30)
    when = {(user, item): time for user, item, _, time in rows}
    for client in range(data.clients):
        for own in (data.of(client), data.test_of(client)):
            assert (own["user"] == client).all()
            times = [when[client, int(item)] for item in own["item"]]
            assert times == sorted(times)


def test_equal_times_stay_in_the_order_of_the_file():
    rows = [(0, item, 3, 7) for item in (5, 2, 9, 1)] + [(0, 30, 3, 6)]
    data = made(rows, users=1, split="published", held=np.zeros(5, dtype=bool))
    assert data.train["item"].tolist() == [30, 5, 2, 9, 1]


def test_without_times_the_order_is_random_but_fixed():
    rows = [(0, item, 1 + item // 12, 0) for item in range(ITEMS)]  # sorted by the rating
    first, again = (made(rows, users=1, times=False) for _ in range(2))
    assert first.train["item"].tolist() == again.train["item"].tolist()
    label = first.train["label"]
    assert abs(np.corrcoef(np.arange(len(label)), label)[0, 1]) < 0.5
    assert made(rows, users=1, times=False, seed=1).train["item"].tolist() != (
        first.train["item"].tolist()
    )


def test_a_user_without_training_ratings_is_still_a_client():
    rows = [(0, item, 1 + item % 5, item) for item in range(20)]
    rows += [(1, 3, 4, 0), (3, 4, 9, 0)]  # user 2 has none, user 3's is out of range
    held = np.array([False] * 20 + [True, False])
    data = made(rows, users=4, split="published", held=held)
    assert data.clients == 4
    assert np.diff(data.offsets).tolist() == [20, 0, 0, 0]
    assert np.diff(data.test_offsets).tolist() == [0, 1, 0, 0]
    assert len(data.of(3)) == 0
    assert data.facts[NONE_LEFT] == 3


# -- what can be wrong


def test_everything_wrong_has_its_rule_and_is_counted():
    good = [(0, item, 1 + item % 5, item) for item in range(12)]
    bad = [
        (0, 20, math.nan, 0),
        (0, 21, 0.5, 0),
        (0, 22, 5.5, 0),
        (0, 23, math.inf, 0),
        (0, 24, -math.inf, 0),
        (0, -1, 3, 0),
        (0, -1, math.nan, 0),  # counted once, under the first of its faults
    ]
    repeated = [(0, 3, 2, 50), (0, 3, 5, 40)]  # later than the good one, and not in order
    between = [(0, 40, 3.5, 0)]
    constant = [(1, item, 4, item) for item in range(11)]
    few = [(2, item, 1 + item % 2, 0) for item in range(9)]
    enough = [(3, item, 1 + item % 2, 0) for item in range(10)]
    rows = [*good, *bad, *repeated, *between, *constant, *few, *enough]
    data = made(rows, users=4, split="published", held=np.zeros(len(rows), dtype=bool))
    expected = {
        NOT_A_NUMBER: 2,
        OUT_OF_RANGE: 4,
        NOT_LISTED: 1,
        REPEATED: 2,
        OFF_STEP: 1,
        CONSTANT: 1,
        TOO_FEW: 1,
        NONE_LEFT: 0,
        NO_ATTRIBUTES: 0,
    }
    assert {name: data.facts[name] for name in expected} == expected
    own = {int(i): float(r) for i, r in zip(data.of(0)["item"], data.of(0)["label"], strict=True)}
    assert own == {**{i: float(r) for _, i, r, _ in good}, 3: 2.0, 40: 3.5}
    assert data.facts["ratings"] == len(data.train) == 43
    assert data.train["label"].dtype == np.float32


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(-1, 4),
            st.sampled_from([1.0, 2.0, 2.5, 5.0, 0.0, 6.0, math.nan]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=40,
    ),
    times=st.booleans(),
)
@settings(max_examples=150)
def test_of_ratings_of_the_same_item_the_last_counts(rows, times):
    last: dict[tuple[int, int], tuple[int, float]] = {}
    for user, item, rating, time in rows:
        if item >= 0 and 1 <= rating <= 5:
            when = time if times else 0
            if (user, item) not in last or when >= last[user, item][0]:
                last[user, item] = (when, rating)
    held = np.zeros(len(rows), dtype=bool)
    options = {"users": 4, "items": 5, "split": "published", "held": held, "times": times}
    if not last:
        with pytest.raises(ConfigError, match=f"none of {len(rows)} ratings"):
            made(rows, **options)
        return
    data = made(rows, **options)
    assert pairs(data.train) == {(u, i, r) for (u, i), (_, r) in last.items()}
    assert len(data.train) == len(last)
    dropped = sum(data.facts[name] for name in (NOT_A_NUMBER, OUT_OF_RANGE, NOT_LISTED, REPEATED))
    assert dropped == len(rows) - len(last)


def test_a_scale_in_half_steps_has_no_rating_between_steps():
    rows = [(0, item, 0.5 * (1 + item % 10), item) for item in range(20)]
    data = made(rows, users=1, low=0.5, step=0.5)
    assert data.facts[OFF_STEP] == 0
    assert data.facts["scale"] == "0.5 to 5 in steps of 0.5"


def test_an_item_without_attributes_is_at_the_mean():
    values = np.full((ITEMS, 2), np.nan, dtype=np.float32)
    values[:50] = [1.0, np.nan]
    data = made(regular(), users=30, item_attributes=Attributes(("a", "b"), values))
    assert data.items.values[:50].tolist() == [[1.0, 0.0]] * 50
    assert not data.items.values[50:].any()
    assert data.facts[NO_ATTRIBUTES] == 10


def test_attributes_of_the_wrong_shape_are_a_mistake_of_the_caller():
    with pytest.raises(MisuseError, match="for 1 columns"):
        Attributes(("one",), np.ones((3, 2), dtype=np.float32))
    with pytest.raises(MisuseError, match="one row of attributes per client"):
        made(regular(), users=30, profiles=Attributes.of({}, rows=29))
    with pytest.raises(MisuseError, match="one title per item"):
        made(regular(), users=30, titles=["only one"])


# -- columns


def test_standardising_leaves_out_what_is_not_known():
    values = standardised(np.array([1.0, np.nan, 3.0, 5.0]))
    assert np.isnan(values[1])
    assert np.nanmean(values) == pytest.approx(0)
    assert np.nanstd(values) == pytest.approx(1)
    assert standardised(np.array([7.0, 7.0])).tolist() == [0.0, 0.0]
    assert np.isnan(standardised(np.array([np.nan]))).all()


def test_a_column_of_decimals_takes_what_is_no_number_as_nan(tmp_path):
    words = [
        "4",
        "3.5",
        "",
        "nan",
        "abc",
        "-1",
        "1e1",
        "0.123456789",
        "12345678",
        "four stars",
        "5",
    ]
    (tmp_path / "file").write_text("".join(f"7\t{word}\t9\n" for word in words))
    table, bad = published.table(tmp_path / "file", published.written("\t", "a", "b", "c"), ("b",))
    read = values.numbers(table, "b", bad)
    nan = math.nan
    expected = [4, 3.5, nan, nan, nan, -1, 10, 0.123456789, 12345678, nan, 5]
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("times", [True, False])
@pytest.mark.parametrize("part", ["test", "validation"])
@given(order=st.permutations(range(12)))
@settings(max_examples=10)
def test_what_is_held_out_goes_with_the_ratings_and_not_with_the_user(times, part, order):
    """Users under other numbers, and so elsewhere among all ratings, have the same parts."""
    rows = regular(users=12, each=20)
    moved = [(order[user], *rest) for user, *rest in rows]
    here = made(rows, users=12, times=times, part=part)
    there = made(moved, users=12, times=times, part=part)
    for user in range(12):
        for one, other in (
            (here.of(user), there.of(order[user])),
            (here.test_of(user), there.test_of(order[user])),
        ):
            assert one["item"].tolist() == other["item"].tolist()
            assert one["label"].tolist() == other["label"].tolist()


def test_the_seed_gives_other_parts():
    rows = regular(users=12, each=20)
    one, again, other = (made(rows, users=12, seed=seed) for seed in (1, 1, 2))
    assert pairs(one.test) == pairs(again.test) != pairs(other.test)
