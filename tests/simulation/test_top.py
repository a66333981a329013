"""Runs in which clients send their largest changes only: nothing is lost, nothing counts twice."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tessera import Plan, simulate
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import ClientData, Examples
from tessera.learning.compression import signed
from tessera.learning.metrics import ClassMetric
from tessera.learning.module_tables import Tables
from tessera.learning.training.jobs import class_loss
from tessera.learning.training.settings import LocalTraining
from tessera.plan import SimulationPlan, UpdatePlan
from tessera.rounds import encode
from tessera.runs.training import Training, complete
from tessera.simulation.faults import Drop, random_dropouts
from tessera.tasks import Recommended, Task

CLIENTS, CLASSES, COLUMNS = 8, 3, 5


class Net(nn.Module):
    """A hidden layer of seven units; 69 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classes = nn.Linear(COLUMNS, 7), nn.Linear(7, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.classes(torch.tanh(self.hidden(batch["x"])))


def task() -> Task:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40 * CLIENTS, COLUMNS)).astype(np.float32)
    label = (x @ rng.normal(size=(COLUMNS, CLASSES))).argmax(axis=1)
    some = Examples({"x": x, "label": label.astype(np.int64)})
    train, test = some.take(slice(0, 30 * CLIENTS)), some.take(slice(30 * CLIENTS, None))
    data = ClientData(
        name="classes",
        train=train,
        offsets=np.arange(CLIENTS + 1) * 30,
        test=test,
        test_offsets=np.arange(CLIENTS + 1) * 10,
        sizes={"class": CLASSES},
    )
    return Task(
        name="classes",
        data=data,
        module=Net,
        tables=Tables({}),
        loss=class_loss,
        metric=ClassMetric(CLASSES),
        recommended=Recommended(training=LocalTraining(batch=5, rate=0.3), cohort=4, rounds=6),
    )


def plan(*, top: float = 0.1, error_feedback: bool = True, **more) -> Plan:
    return Plan(
        scheme=more.pop("scheme", "fedavg"),
        cohort=4,
        seed=1,
        update=UpdatePlan(top=top, error_feedback=error_feedback, **more.pop("update", {})),
        simulation=SimulationPlan(rounds=6, **more.pop("simulation", {})),
        **more,
    )


def scripted() -> ScriptedEntropy:
    return ScriptedEntropy(b"top")


def finished(folder: Path, settings: Plan, rounds: int = 6, **more) -> tuple[bytes, list]:
    run = simulate(
        task(), settings, rounds, out=folder, trainer="sequential",
        insecure_test_entropy="top", **more,
    )  # fmt: skip
    with Training(task(), run.plan, folder=folder / "checkpoint") as training:
        kept = [(c, k.tolist()) for c, k in training.clients.residuals()]
        return training.dense.tobytes(), sorted(kept)


@pytest.mark.parametrize("crypto", ["every", "none"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_all_that_was_trained_was_merged_or_waits(monkeypatch, crypto, dropout):
    """The integers of all updates are those of the merged sums and of what clients kept."""
    settings = complete(plan(simulation={"crypto": crypto}), task())
    trained, merged = defaultdict(int), np.zeros(settings.model.dense, dtype=np.int64)
    length, whole = settings.model.dense, encode.selected_words
    means, abort = encode.means, {1, 3}

    def recorded(plan, words, round_id, residual):
        trained[int(round_id), id(residual)] = signed(words[:length], plan.ring)
        return whole(plan, words, round_id, residual)

    def opened(plan, total, **more):
        nonlocal merged
        merged = merged + signed(total.dense[:length], plan.ring)
        return means(plan, total, **more)

    monkeypatch.setattr(encode, "selected_words", recorded)
    monkeypatch.setattr(encode, "means", opened)
    some = random_dropouts(dropout, 1, settings) if dropout else lambda round_id, cohort: []
    with Training(task(), settings) as training:
        training.federation._faults = lambda round_id, cohort: (
            [Drop(c, "collect") for c in cohort] if int(round_id) in abort
            else some(round_id, cohort)
        )  # fmt: skip
        for _ in training.run(8):
            continue
        kept = sum(k.astype(np.int64) for _, k in training.clients.residuals())
    assert len({round_id for round_id, _ in trained}) >= 6 and merged.any() and kept.any()
    assert np.array_equal(merged + kept, sum(trained.values()))


@pytest.mark.parametrize("stopped", [1, 4])
def test_what_clients_keep_is_part_of_the_checkpoint(tmp_path, stopped):
    settings = plan(simulation={"dropout": 0.2})
    whole = finished(tmp_path / "whole", settings)
    finished(tmp_path / "parts", settings, stopped)
    again = finished(tmp_path / "parts", settings, 6, resume=True)
    assert whole == again and any(any(kept) for _, kept in whole[1])
    without = finished(tmp_path / "without", replace(settings, update=UpdatePlan(top=0.1)))
    assert without[0] != whole[0] and without[1] == []


def test_a_round_with_messages_is_the_one_without(tmp_path):
    models = {
        crypto: finished(tmp_path / crypto, plan(simulation={"crypto": crypto}))
        for crypto in ("every", "none")
    }
    assert models["every"] == models["none"]


def test_few_changes_are_few_bytes_and_learn(tmp_path):
    found = {}
    for top in (0.05, 1.0):
        settings = plan(top=top, error_feedback=top < 1.0)
        found[top] = simulate(task(), settings, 6, out=tmp_path / str(top), trainer="sequential")
    sent = {top: run.rounds[-1]["bytes_up"]["update"] for top, run in found.items()}
    assert sent[0.05] < 0.4 * sent[1.0]
    for run in found.values():
        assert run.metric > run.facts["trivial"]["largest class"] + 0.1
