"""A guarantee says what its number is about."""

from __future__ import annotations

import json
import math

import pytest

from tessera.errors import MisuseError
from tessera.privacy.dp.guarantee import (
    GIVEN_THE_UNION,
    Adjacency,
    Guarantee,
    Observer,
    Trust,
    Unit,
)


def index_level(epsilon: float, delta: float = 0.0, condition: str = GIVEN_THE_UNION) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=Unit.INDEX,
        adjacency=Adjacency.ADD_OR_REMOVE,
        trust=Trust.LOCAL,
        against=Observer.LEADER,
        condition=condition,
    )


def test_a_guarantee_prints_its_unit_condition_adjacency_trust_and_observer() -> None:
    text = str(index_level(2.0193))
    assert text == (
        "epsilon 2.019 per index, given the union (add or remove, trust: local, against: leader)"
    )
    assert "delta 1e-06" in str(index_level(1.0, 1e-6))
    assert index_level(1.0, condition="").scope == "per index"


def test_what_nobody_checks_is_named_wherever_the_number_is() -> None:
    person = Guarantee(
        epsilon=4.0,
        delta=1e-5,
        unit=Unit.SUBJECT,
        adjacency=Adjacency.ADD_OR_REMOVE,
        trust=Trust.SERVER,
        against=Observer.READERS,
        assumption="if at most 3 clients hold a person",
    )
    assert str(person) == (
        "epsilon 4, delta 1e-05 per subject, if at most 3 clients hold a person "
        "(add or remove, trust: central, against: readers of the model)"
    )
    values = person.to_json()
    assert values["against"] == "readers of the model"
    assert values["assumption"] == "if at most 3 clients hold a person"


def test_an_infinite_level_is_the_string_inf_in_json() -> None:
    values = index_level(math.inf).to_json()
    assert json.loads(json.dumps(values, allow_nan=False))["epsilon"] == "inf"
    assert values["condition"] == "given the union"
    assert not index_level(math.inf).finite
    assert index_level(2.0).to_json()["epsilon"] == 2.0


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(-1.0, 0.0), (math.nan, 0.0), (1.0, 1.0), (1.0, -0.1)]
)
def test_a_number_that_promises_nothing_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(MisuseError):
        index_level(epsilon, delta)
