"""Numbers for people: the same value reads the same wherever it is printed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tessera.report.markup import NBSP, text
from tessera.report.numbers import (
    INFINITE,
    NOT_MEASURED,
    count,
    epsilon,
    figure,
    memory,
    percent,
    probability,
    score,
    seconds,
    share,
    signed,
    size,
)
from tessera.report.progress import sentence
from tessera.rounds.events import RoundFinished


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.5, "1.00 kB"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1.5e9, "1.50 GB"),
        (999.6e9, "1.00 TB"),
        (2e15, "2,000 TB"),
        (None, NOT_MEASURED),
    ],
)
def test_bytes_have_three_digits_on_both_sides_of_a_unit(value, written):
    assert size(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0 ms"),
        (4e-4, "<1 ms"),
        (1e-3, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (59.96, "60.0 s"),
        (119.0, "119 s"),
        (120.0, "2.00 min"),
        (7199.0, "120 min"),
        (7200.0, "2.00 h"),
        (None, NOT_MEASURED),
    ],
)
def test_durations_change_their_unit_where_the_number_grows_long(value, written):
    assert seconds(value) == written


def test_an_estimate_has_two_digits():
    assert [seconds(v, digits=2) for v in (0.0123, 0.147, 0.996, 3.14, 31.4)] == [
        "12 ms",
        "147 ms",
        "1.0 s",
        "3.1 s",
        "31 s",
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0%"),
        (4e-19, "<0.001%"),
        (9e-6, "<0.001%"),
        (1e-5, "0.001%"),
        (3e-4, "0.03%"),
        (4.9e-4, "0.05%"),
        (5e-4, "0.1%"),
        (0.073, "7.3%"),
        (0.9994, "99.9%"),
        (0.9996, ">99.9%"),
        (1.0, "100%"),
        (1.0 + 1e-15, "100%"),
        (None, NOT_MEASURED),
    ],
)
def test_a_share_is_none_or_all_only_if_it_is(value, written):
    assert share(value) == written


def test_a_share_that_was_set_has_no_more_digits_than_it_was_given():
    assert [percent(v) for v in (0.0, 0.2, 0.125, 0.07)] == ["0%", "20%", "12.5%", "7%"]


def test_probabilities_are_decimals():
    assert [probability(v) for v in (0.0, 1.0, 15 / 16, 1 / 3, 2e-5)] == [
        "0",
        "1",
        "0.9375",
        "0.3333",
        "2e-05",
    ]


def test_a_small_epsilon_is_not_zero_and_an_infinite_one_is_a_word():
    assert [epsilon(v) for v in (0.0, 0.004, 0.005, 2.708, math.inf, "inf", None)] == [
        "0.00",
        "<0.01",
        "0.01",
        "2.71",
        INFINITE,
        INFINITE,
        NOT_MEASURED,
    ]


def test_an_average_of_few_keeps_a_digit():
    assert [count(v) for v in (0, 0.4, 3, 9.94, 9.96, 1234.5, None)] == [
        "0",
        "0.4",
        "3",
        "9.9",
        "10",
        "1,234",
        NOT_MEASURED,
    ]


def test_scores_differences_and_other_figures():
    assert (score(0.68149), score(0.68149, digits=4), score(None)) == (
        "0.681",
        "0.6815",
        NOT_MEASURED,
    )
    assert (signed(-0.0254), signed(0.0254, digits=2)) == ("−0.025", "+0.03")
    assert [figure(v) for v in (0, 0.01234, 999.4, 999.6, 12345)] == [
        "0",
        "0.0123",
        "999",
        "1,000",
        "12,345",
    ]
    assert (memory(2**34), memory(None)) == ("16.0 GiB", "unknown")


def test_on_a_page_a_number_and_its_unit_stay_on_one_line():
    assert text("1.50 GB up in 2.00 min, 3 hours") == f"1.50{NBSP}GB up in 2.00{NBSP}min, 3 hours"


def test_a_round_of_groups_says_who_delivered_and_who_was_merged() -> None:
    """Some of those who are merged were invited earlier: more may be merged than invited."""
    event = RoundFinished(
        round_id=3,
        cohort=40,
        survivors=50,
        weight=1,
        delivered=31,
        groups_opened=5,
        waited=(0, 1, 1, 2, 3),
    )
    assert sentence(event).startswith("31/40 delivered  50 merged")
    assert sentence(replace(event, delivered=0, waited=())).startswith("50/40 survivors")
