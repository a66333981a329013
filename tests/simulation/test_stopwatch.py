"""Every message between a client and a server belongs to a part of the round."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

import tessera.protocols
import tessera.rounds
from tessera import wire
from tessera.errors import MisuseError
from tessera.ids import ClientId
from tessera.plan import (
    Domain,
    ModelPlan,
    Plan,
    PrivacyPlan,
    Scheme,
    SecurityPlan,
    TablePlan,
    TwoServerPlan,
    UnionPlan,
)
from tessera.protocols.machine import RoundOver
from tessera.protocols.secagg.params import Threat
from tessera.rounds import schemes
from tessera.rounds.events import PhaseClosed, RoundFinished
from tessera.rounds.schemes import CATEGORIES, SCHEMES
from tessera.simulation import population
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import Counted, Stopwatch


def declared(name: str) -> set[type[Any]]:
    """What modules and classes of protocols and rounds give this name: kinds of message.

    Those of a helper are left out: it hears the leader, and no client is charged for that.
    """
    return {kind for kinds in _declarations(name) for kind in kinds}


def _declarations(name: str) -> Iterator[tuple[type[Any], ...]]:
    for package in (tessera.protocols, tessera.rounds):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = import_module(found.name)
            for holder in (
                module,
                *(part for _, part in inspect.getmembers(module, inspect.isclass)),
            ):
                if not getattr(holder, "ROLE", "").startswith("helper"):
                    yield vars(holder).get(name, ())


def test_every_message_of_a_client_and_to_one_has_its_part_of_the_round() -> None:
    up, down = declared("FROM_CLIENT"), declared("FROM_SERVER") | {RoundOver}
    assert {"Advert", "PlainRows", "PlainInput", "Query", "WriteReport"} <= {
        kind.__name__ for kind in up
    }
    assert {"Roster", "UnionOpened", "Download", "QueryAnswers"} <= {kind.__name__ for kind in down}
    assert (up | down) <= set(wire.records().values())
    every = [entry.costs for entry in SCHEMES.values()]
    assert {kind.__name__ for kind in up | down} == {
        kind for costs in every for kind in costs.messages
    }
    answered = {kind for costs in every for kind in costs.answers}
    assert {kind.__name__ for kind in down} <= answered
    for costs in every:
        assert {*costs.messages.values(), *costs.answers.values()} <= set(CATEGORIES)


@pytest.mark.parametrize("scheme", [e.scheme for e in SCHEMES.values() if e.federated])
@pytest.mark.parametrize("threat", ["semi-honest", "active"])
@pytest.mark.parametrize("domain", ["whole", "union"])
def test_a_round_has_the_phases_and_messages_of_its_scheme(
    scheme: Scheme, threat: str, domain: str
) -> None:
    plan = Plan(
        scheme=scheme,
        cohort=6,
        tables=(TablePlan(name="goods", rows=60, width=2),),
        model=ModelPlan(dense=3),
        privacy=PrivacyPlan(level="cpp5" if threat == "active" else "cpp2"),
        union=UnionPlan(max_rows=10),
        security=SecurityPlan(threat=Threat(threat)),
        two_server=TwoServerPlan(domain=Domain(domain)),
    )
    federation = Federation(
        plan,
        population.participants(plan, 6, 5),
        dense=population.dense(plan),
        tables=population.tables(plan),
        trainer=population.cohort_trainer(plan, 6),
    )
    events = list(federation.round())
    closed = [(e.phase, e.visit) for e in events if isinstance(e, PhaseClosed)]
    planned = [(p.name, p.visit) for p in schemes.of(plan).phases(plan)]
    assert [phase for phase in planned if phase in closed] == closed
    answered = {(p.name, p.visit) for p in schemes.of(plan).phases(plan) if p.dropouts}
    assert answered <= set(closed)
    (finished,) = (e for e in events if isinstance(e, RoundFinished))
    for measured in (finished.bytes_up, finished.bytes_down, finished.client_seconds):
        assert "other" not in measured


def test_a_phase_that_a_scheme_does_not_have_is_an_error() -> None:
    plan = Plan(scheme="fedavg", cohort=6, model=ModelPlan(dense=3))
    with pytest.raises(MisuseError, match="fedavg: a round has no phase 'unmask'"):
        schemes.of(plan).phase(plan, "unmask", 0)


def test_a_message_that_nobody_foresaw_is_counted_apart_and_stops_no_run() -> None:
    one, two = ClientId(1), ClientId(2)
    watch = Stopwatch(Plan(scheme="secure-fedavg", cohort=6, model=ModelPlan(dense=3)))
    counted = {one: {"Advert": 10.0, "Unforeseen": 6.0}, two: {"Advert": 30.0}}
    found = watch.by_category(Counted.UP, [one, two], counted)
    assert found.pop("other") == 3.0
    assert found == {category: 20.0 if category == "keys" else 0.0 for category in CATEGORIES}
    assert "other" not in watch.by_category(Counted.UP, [one], {one: {"Advert": 1.0}})
