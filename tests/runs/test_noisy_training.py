"""Whole runs with noise: budgets, resuming, what leaves a client, and what a server adds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runs import toy
from tessera.api import Run, simulate
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.plan import DPPlan, Plan, Trust, UpdatePlan
from tessera.privacy.dp.ledger import BudgetExceeded
from tessera.rounds.events import RoundFinished, TrainingEnded
from tessera.rounds.noise import noise_of
from tessera.runs.folder import RunFolder
from tessera.runs.training import Training, complete

ITEM = DPPlan(unit="item", noise=0.7, sampling=0.3, steps=3)
USER = DPPlan(unit="user", noise=0.9, trust=Trust.SERVER)
LOCAL = replace(USER, trust=Trust.LOCAL)
SUBJECT = DPPlan(unit="subject", noise=0.7, sampling=0.5, steps=2, cap=4)
SCHEMES = ["fedavg", "submodel", "secure-fedavg", "secure-submodel"]


def planned(scheme: str, section: DPPlan) -> Plan:
    plan = toy.plan(scheme)
    return replace(plan, dp=section, training=None, update=UpdatePlan())


def go(folder: Path, plan: Plan, rounds: int, **more) -> Run:
    more.setdefault("insecure_test_entropy", None if more.get("resume") else "a test")
    return simulate(toy.task(), plan, rounds, out=folder, **more)


def lines(folder: Path) -> list[dict]:
    clocks = ("client_seconds", "server_seconds", "helper_seconds", "seconds", "metric")
    return [
        {k: v for k, v in line.items() if k not in clocks}
        for line in RunFolder.load(folder).rounds()
    ]


@pytest.mark.parametrize("scheme", [*SCHEMES, "two-server"])
def test_an_items_noise_runs_under_every_scheme(tmp_path: Path, scheme: str) -> None:
    go(tmp_path / "run", planned(scheme, ITEM), 2, insecure_test_entropy=None)
    found = lines(tmp_path / "run")
    assert len(found) == 2
    assert 0.0 < found[0]["noise_epsilon"] <= found[1]["noise_epsilon"]
    assert "per item" in found[1]["noise_scope"]
    by_rows = scheme in ("submodel", "secure-submodel", "two-server")
    assert ("given" in found[1]["noise_scope"]) is by_rows


@pytest.mark.parametrize("section", [USER, LOCAL, SUBJECT])
@pytest.mark.parametrize("scheme", ["fedavg", "secure-submodel"])
def test_users_and_subjects_have_numbers_too(tmp_path: Path, scheme: str, section: DPPlan) -> None:
    go(tmp_path / "run", planned(scheme, section), 2, insecure_test_entropy=None)
    (_, last) = lines(tmp_path / "run")
    assert last["noise_epsilon"] > 0.0 and f"per {section.unit}" in last["noise_scope"]
    page = tmp_path / "run" / "report.html"
    Run(tmp_path / "run").report()
    assert "with its noise each unit has an" in page.read_text()


@pytest.mark.parametrize("section", [ITEM, USER, LOCAL])
def test_a_run_with_noise_that_was_stopped_ends_with_the_same_model(
    tmp_path: Path, section: DPPlan
) -> None:
    plan = planned("secure-submodel", section)
    go(tmp_path / "whole", plan, 3)
    go(tmp_path / "parts", plan, 1)
    go(tmp_path / "parts", plan, 3, resume=True)
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    models = []
    for name in ("whole", "parts"):
        folder = tmp_path / name
        with Training(
            toy.task(),
            RunFolder.load(folder).plan,
            folder=folder / "checkpoint",
            entropy=ScriptedEntropy(b"not asked"),
        ) as training:
            models.append({k: v.tobytes() for k, v in training.parameters(local=True).items()})
    assert models[0] == models[1]


def test_a_run_with_noise_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    plan = planned("fedavg", ITEM)
    go(tmp_path / "run", plan, 1)
    other = toy.task()
    labels = other.data.train["label"].copy()
    labels[0] = 1.0 - labels[0]
    data = replace(other.data, train=other.data.train.with_field("label", labels))
    with pytest.raises(ConfigError, match="other data"):
        simulate(replace(other, data=data), plan, 2, out=tmp_path / "run", resume=True)


def test_training_ends_before_the_round_that_would_pass_the_budget(tmp_path: Path) -> None:
    section = replace(ITEM, epsilon=6.0, noise=1.2)
    plan = replace(planned("fedavg", section), cohort=toy.USERS)  # everybody, in every round
    lasts = noise_of(plan).lasts
    assert lasts is not None and 1 <= lasts < 30
    events = []
    go(tmp_path / "run", plan, lasts + 5, on_event=events.append, insecure_test_entropy=None)
    finished = [e for e in events if isinstance(e, RoundFinished)]
    assert len(finished) == lasts
    assert finished[-1].noise_epsilon is not None and finished[-1].noise_epsilon <= 6.0
    (ended,) = (e for e in events if isinstance(e, TrainingEnded))
    assert ended.round_id == lasts and "budget of epsilon 6" in ended.reason
    stored = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert stored[-1]["event"] == "TrainingEnded"
    with pytest.raises(BudgetExceeded, match="is spent"):
        go(tmp_path / "run", plan, lasts + 5, resume=True)


def test_a_budget_is_charged_before_a_word_leaves() -> None:
    """In `prepare`, by the roles of both kinds of rounds, and refused there when it is spent."""
    for scheme in ("fedavg", "secure-fedavg", "two-server"):
        section = replace(ITEM, epsilon=6.0, noise=1.2)
        plan = complete(planned(scheme, section), toy.task())
        with Training(toy.task(), plan, entropy=ScriptedEntropy(b"x")) as training:
            federation = training.federation
            for at in range(noise_of(plan).lasts or 0):
                drawn = replace(federation.course.draw(), round_id=RoundId(at))
                (first, *_) = drawn.parts
                name = next(iter(first.named))
                role = federation._client(drawn, first, name, federation._signers(first))
                role.prepare()
                spent = federation.participants[first.named[name]].local.ledger.entries
                assert any("noisy" in entry.reason for entry in spent)


def test_a_clients_weight_and_counts_say_nothing(tmp_path: Path) -> None:
    plan = complete(planned("fedavg", ITEM), toy.task())
    with Training(toy.task(), plan, entropy=ScriptedEntropy(b"x")) as training:
        submodels = {c: training._whole(c) for c in training.clients.eligible[:3]}
        outcome = training._train_cohort(RoundId(0), submodels)
        for update in outcome.updates.values():
            assert update.weight == 1
            assert all((part.counts == 1).all() for part in update.tables.values())


def test_examples_are_not_protected_where_clients_keep_state_of_their_own() -> None:
    """Factors and masks: they would carry one example into all later updates."""
    own = replace(toy.task(), learner=lambda bound, training: None)
    with pytest.raises(ConfigError, match="carry one example"):
        complete(planned("fedavg", ITEM), own)
    assert complete(planned("fedavg", USER), own).dp == USER


def test_a_trainer_of_ones_own_does_not_take_a_plan_with_noise() -> None:
    from tessera.simulation.federation import Federation

    plan = complete(planned("fedavg", ITEM), toy.task())
    with pytest.raises(ConfigError, match="adds no noise"):
        Federation(plan, {}, dense=np.zeros(1, np.float32), tables={}, trainer=lambda *_: None)


SHARES = replace(USER, trust=Trust.SHARES)
LISTED = replace(SHARES, rows="list", row_list="items 0-39, 60")


@pytest.mark.parametrize(
    ("scheme", "section"),
    [
        ("secure-fedavg", SHARES),
        ("secure-submodel", replace(SHARES, rows="all")),
        ("secure-submodel", replace(LISTED, counts=0.01)),
        ("secure-submodel", replace(LISTED, unit="subject", clients_per_subject=2)),
        ("secure-submodel", replace(LISTED, trust=Trust.LOCAL)),
    ],
)
def test_noise_in_shares_trains_and_has_a_number_given_nothing(
    tmp_path: Path, scheme: str, section: DPPlan
) -> None:
    go(tmp_path / "run", planned(scheme, section), 2, insecure_test_entropy=None)
    (_, last) = lines(tmp_path / "run")
    assert last["noise_epsilon"] > 0.0 and f"per {section.unit}" in last["noise_scope"]
    assert "given" not in last["noise_scope"]
    Run(tmp_path / "run").report()


def test_noise_from_test_entropy_has_no_number(tmp_path: Path) -> None:
    go(tmp_path / "run", planned("secure-fedavg", SHARES), 1)
    (only,) = lines(tmp_path / "run")
    assert only["noise_epsilon"] is None and only["noise_scope"] == "no number: test entropy"
