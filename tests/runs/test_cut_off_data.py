"""Periods of a simulation over a task with times: each has the data up to its cut-off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera import tasks
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import LABEL
from tessera.errors import ConfigError
from tessera.plan import Crypto, GroupsPlan, Plan, Scheme, SimulationPlan, TaskPlan, UnionPlan
from tessera.runs.training import SimulatedData, Training, complete
from tessera.tasks import Task

USERS, ITEMS, EVENTS, FIRST = 12, 80, 20, 1_600_000_000


def rows(seed: int) -> list[str]:
    """Everybody's events, a minute apart; the items of the second half differ by seed."""
    first, later = np.random.default_rng(1), np.random.default_rng([seed, 2])
    draws = [first if at < EVENTS // 2 else later for at in range(EVENTS)]
    return [
        f"u{user},i{draw.integers(ITEMS)},{FIRST + 60 * at}"
        for at, draw in enumerate(draws)
        for user in range(USERS)
    ]


def load(folder: Path, seed: int) -> Task:
    file, known = folder / "events.csv", folder / "items.txt"
    file.write_text("\n".join(["user,item,when", *rows(seed)]) + "\n")
    known.write_text("".join(f"i{at}\n" for at in range(ITEMS)))
    return tasks.load(
        "interactions", path=str(file), item="item", time="when", dictionary=str(known), history=4
    )


def plan(**simulation: object) -> Plan:
    settings = {"cutoff": 0.4, "cutoff_step": 0.6, "rounds": 8, "evaluate_every": 8, **simulation}
    return Plan(
        scheme=Scheme.SECURE_SUBMODEL,
        cohort=USERS,
        task=TaskPlan(name="interactions", options={}),
        groups=GroupsPlan(size=4, small=True, period=2),
        union=UnionPlan(max_rows=80),
        simulation=SimulationPlan(**settings),
    )


def trained(task: Task, crypto: Crypto, rounds: int) -> Training:
    settings = complete(plan(crypto=crypto), task)
    run = Training(task, settings, entropy=ScriptedEntropy(b"cut off"))
    for _ in run.run(rounds):
        pass
    return run


def test_later_events_change_nothing_of_the_first_period(tmp_path: Path) -> None:
    models = []
    for seed in (1, 2):
        run = trained(load(tmp_path, seed), Crypto.NONE, 2)
        assert {group.at.period for group in run.federation.epochs.met} == {2}, "both updates"
        models.append(run.federation.model.digest)
    assert models[0] == models[1]
    assert trained(load(tmp_path, 2), Crypto.NONE, 3).federation.model.digest not in models


@pytest.mark.parametrize("crypto", [Crypto.EVERY, Crypto.NONE])
def test_a_period_has_the_examples_up_to_its_cut_off(tmp_path: Path, crypto: Crypto) -> None:
    task = load(tmp_path, 1)
    first, second = (trained(task, crypto, rounds) for rounds in (1, 4))
    assert task.data.timeline is not None
    for client in range(USERS):
        before, after = (run.clients.examples_of(client) for run in (first, second))
        assert 0 < len(before) < len(after) == len(second.task.data.of(client))
        held = before.fields.keys()
        assert all(np.array_equal(before[n], after[n][: len(before)]) for n in held)
        assert (before[LABEL] == 0.0).any(), "what was drawn beside them stays"
        data = second.clients[client].local.data
        assert isinstance(data, SimulatedData) and data.cutoff == task.data.timeline.moment(1.0)
    assert {group.at.period for group in second.federation.epochs.met} == {2}, "no third cut-off"


def test_messages_and_memory_come_to_the_same_model(tmp_path: Path) -> None:
    task = load(tmp_path, 1)
    runs = [trained(task, crypto, 4) for crypto in (Crypto.EVERY, Crypto.NONE)]
    assert runs[0].federation.model.digest == runs[1].federation.model.digest


def test_a_run_goes_on_with_the_data_of_its_periods(tmp_path: Path) -> None:
    task = load(tmp_path, 1)
    settings = complete(plan(crypto=Crypto.NONE), task)
    for rounds in (3, 5):
        folder, entropy = tmp_path / "run", ScriptedEntropy(b"cut off")
        with Training(task, settings, folder=folder, entropy=entropy) as run:
            for _ in run.run(rounds):
                pass
            found = run.federation.model.digest
    assert found == trained(task, Crypto.NONE, 5).federation.model.digest


def test_cut_offs_without_times_or_groups_are_refused(tmp_path: Path) -> None:
    untimed = tasks.load("taobao-like", users=20, items=50)
    with pytest.raises(ConfigError, match="have no times"):
        complete(plan(), untimed)
    with pytest.raises(ConfigError, match="without fixed groups"):
        complete(replace(plan(), scheme=Scheme.SUBMODEL), load(tmp_path, 1))
