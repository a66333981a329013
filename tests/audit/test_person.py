"""What the server knows of one person: everything in the clear, a guess within a fixed group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera import tasks
from tessera.api import simulate
from tessera.audit.in_the_clear import READ
from tessera.audit.person import KnownRows, PersonWatch
from tessera.audit.suite import audited
from tessera.ids import SERVER, ClientId, RoundId
from tessera.plan import GroupsPlan, Plan, Scheme, SimulationPlan, UnionPlan
from tessera.rounds.events import Event, RoundAbort, RoundFinished
from tessera.runs.held import rows_of_clients
from tessera.runs.training import complete
from tessera.simulation.views import RoundViews

ROUNDS = 8
TASK = tasks.load("taobao-like", users=40, items=900, examples=12, history=4, size="tiny", width=2)
PLAN = Plan(
    scheme=Scheme.SUBMODEL,
    cohort=10,
    groups=GroupsPlan(size=5),
    union=UnionPlan(max_rows=64),
    simulation=SimulationPlan(rounds=ROUNDS, dropout=0.0, evaluate_every=ROUNDS),
)


def followed(tmp_path: Path, scheme: Scheme, plan: Plan = PLAN) -> dict[ClientId, KnownRows]:
    """What the server has of everybody who took part, after a run under a scheme."""
    plan = complete(replace(plan, scheme=scheme), TASK)
    truth = rows_of_clients(TASK, plan)
    views, watch = RoundViews({SERVER}), PersonWatch(plan, truth, truth)

    def take(event: Event) -> None:
        if isinstance(event, RoundFinished | RoundAbort):
            watch.take(RoundId(event.round_id), views.taken(SERVER))

    # Scripted: with fresh secrets a delta is now and then rounded to zeros, and its row unread.
    out, script = tmp_path / scheme.value, "one person"
    simulate(TASK, plan, out=out, views=views, on_event=take, insecure_test_entropy=script)
    assert not views.taken(SERVER)
    return {c: watch.known(c) for c in truth if watch.rounds_of(c)}


@pytest.mark.parametrize("scheme", [Scheme.FEDAVG, Scheme.SUBMODEL])
def test_in_the_clear_every_row_of_whoever_takes_part_is_read(
    tmp_path: Path, scheme: Scheme
) -> None:
    found = followed(tmp_path, scheme)
    assert len(found) > 20
    for known in found.values():
        assert known.read and known.rounds
        assert known.right == len(known.rows)
        np.testing.assert_array_equal(known.sure, known.rows)


def test_in_a_fixed_group_a_guess_is_as_good_as_by_chance_and_nobody_is_sure(
    tmp_path: Path,
) -> None:
    found = followed(tmp_path, Scheme.SECURE_SUBMODEL)
    assert not any(len(known.sure) for known in found.values())
    for known in found.values():
        # A group opens whole or not at all: the attack cannot tell its members apart.
        assert known.right == pytest.approx(known.by_chance)
        assert 0.0 < known.right < 0.6 * len(known.rows)


def test_where_cohorts_are_drawn_anew_rows_are_named_over_the_rounds(tmp_path: Path) -> None:
    """The protection switched off: the same attack, without groups that stay together."""
    found = followed(tmp_path, Scheme.TWO_SERVER)
    often = [known for known in found.values() if known.rounds >= 3]
    sure = sum(len(known.sure) for known in often)
    assert sure > 0.3 * sum(len(known.rows) for known in often)


def test_an_audit_of_a_scheme_in_the_clear_says_that_everything_is_read(tmp_path: Path) -> None:
    run = simulate(
        TASK, replace(PLAN, scheme=Scheme.FEDAVG), 2, out=tmp_path / "r", record_views=True
    )
    (finding,) = audited(run.folder).findings
    assert finding.name == READ and finding.measured == 1.0 and not finding.claims
    assert "reads everything" in finding.meaning
