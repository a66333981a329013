"""CentralSubDP and LocalSubDP as printed: they train, and have no number that looks sound."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runs.test_noise_per_person import PERSON, planned, task
from tessera.api import Run, simulate
from tessera.audit.canary_findings import canary_findings
from tessera.cli.main import main
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.prg import Label
from tessera.data.examples import SUBJECT, Examples
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import TableMean
from tessera.learning.bound_model import Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.noisy import NoisyVectorised
from tessera.plan import DPPlan, Plan, TaskPlan, Trust
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.dp.subjects import Printed
from tessera.rounds.messages import RoundResult
from tessera.rounds.noise import noise_of
from tessera.runs.client_training import noisy_steps
from tessera.runs.folder import RunFolder
from tessera.runs.training import Training, complete
from tessera.services.bundle import pack_task

TARGET = replace(PERSON, noise=0.0, epsilon=4.0, delta=1e-5, sampling=0.1)
LOCAL = replace(TARGET, printed=Printed.LOCAL, steps=2)
CENTRAL = replace(TARGET, printed=Printed.CENTRAL, trust=Trust.SERVER)
BOTH = pytest.mark.parametrize("section", [CENTRAL, LOCAL], ids=["central", "local"])


@BOTH
def test_a_plan_trains_by_them_and_its_number_is_infinite(tmp_path: Path, section: DPPlan) -> None:
    simulate(task(), planned(section), 2, out=tmp_path / "run")
    (_, last) = RunFolder.load(tmp_path / "run").rounds()
    assert last["noise_epsilon"] in ("inf", math.inf)
    assert (
        f"{section.printed.value}, whose epsilon 4 is as printed by the paper"
        in (last["noise_scope"])
    )
    Run(tmp_path / "run").report()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "infinite, 4 by the paper" in page and "no finite epsilon" in page


@BOTH
def test_the_ledger_has_no_finite_number_against_anybody_who_observes(section: DPPlan) -> None:
    plan = complete(planned(section), task())
    ledger = Ledger()
    for event in noise_of(plan).events(RoundId(0)):
        ledger.spend(event, reason="a test", limits=noise_of(plan).limits)
    for observer in (Observer.LEADER, Observer.CLIENTS, Observer.READERS):
        found = ledger.guarantee(unit=Unit.SUBJECT, against=observer, delta=1e-5)
        assert not found.finite and "as printed by the paper" in found.scope
    assert noise_of(plan).lasts is None


def moved_by(section: DPPlan, subjects: list[int], secret: int, rows: int = 4_000) -> np.ndarray:
    """One step of the trainer over examples of these people, all on one of so many rows."""
    from tessera.audit.canary_training import FIELD, TABLE, Canaries, steep_loss

    plan = replace(planned(section), training=LocalTraining(batch=len(subjects), rate=1.0))
    module = Canaries(rows)
    bound = Tables({f"{TABLE}.weight": Table(FIELD)}).bind(module)
    every = np.arange(rows, dtype=np.uint64)
    values = np.zeros((rows, 1), np.float32)
    noisy = replace(noisy_steps(plan), steps=1)
    learner = NoisyVectorised(Trainable(module, bound, steep_loss, plan.training), noisy)
    job = Job(
        0,
        Submodel(np.zeros(0, np.float32), {TABLE: TablePart(every, values)}, {TABLE: every}),
        Examples({FIELD: np.zeros(len(subjects), np.int64), SUBJECT: np.array(subjects)}),
        {},
        coins=ScriptedEntropy(b"printed").secret(Label.CANARIES, secret),
    )
    (found,) = learner.train([job], round_id=0)
    assert found.most == np.bincount(subjects).max()
    return found.update.tables[TABLE].values[:, 0].astype(np.float64)


def test_the_clients_noise_is_on_the_sum_and_goes_by_the_most_of_one_person() -> None:
    """4,000 values: their deviation is within 6 % (5 standard errors); sigma_Z is 1 % more at most.

    Records are clipped one by one: five of them move the row by five clips, over the batch.
    """
    noise = noise_of(planned(LOCAL)).paper
    for subjects in ([0, 1, 2, 3, 4], [0, 1, 0, 3, 4], [0, 0, 0, 0, 4]):
        found = moved_by(LOCAL, subjects, 1)
        sigma = noise.sigma(np.bincount(subjects).max()) * LOCAL.clip / len(subjects)
        assert found[1:].std() == pytest.approx(sigma, rel=0.06)
        assert found[0] == pytest.approx(LOCAL.clip, abs=6 * sigma)


def test_the_length_of_the_noise_tells_z() -> None:
    """As the account does not say: 100 values through the trainer, 40 batches of either kind."""
    lengths = {
        z: [
            np.linalg.norm(moved_by(LOCAL, subjects, 100 * z + at, rows=101)[1:])
            for at in range(40)
        ]
        for z, subjects in ((1, [0, 1, 2, 3]), (2, [0, 0, 2, 3]))
    }
    above = np.greater.outer(lengths[2], lengths[1]).mean()
    assert above > 0.99


def test_a_client_of_the_central_one_sends_its_mean_without_noise() -> None:
    found = moved_by(CENTRAL, [0, 1, 0, 3], 1)
    assert found[0] == pytest.approx(CENTRAL.clip, rel=1e-3) and not found[1:].any()


def test_the_servers_noise_is_on_the_mean_and_goes_by_what_clients_say() -> None:
    plan = replace(planned(CENTRAL), training=LocalTraining(batch=7, rate=0.5, table_rate=3.0))
    every, values = np.arange(4_000, dtype=np.uint64), np.zeros((4_000, 1))
    survivors = (ClientId(0), ClientId(1), ClientId(2))
    result = RoundResult(
        survivors, 3, np.zeros(4_000),
        {"items": TableMean(every, values, np.full(4_000, 3))}, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    largest = {ClientId(0): 1, ClientId(1): 4, ClientId(2): 2}
    found = noise_of(plan).on_means(result, ScriptedEntropy(b"server"), RoundId(0), largest)
    noise = noise_of(plan).paper
    total = math.sqrt(sum(noise.sigma(z) ** 2 for z in largest.values())) * CENTRAL.clip * 0.5 / 3
    assert found.dense.std() == pytest.approx(total, rel=0.06)
    assert found.tables["items"].mean.std() == pytest.approx(3.0 * total, rel=0.06)
    with pytest.raises(MisuseError, match="client 2 has not said its Z"):
        del largest[ClientId(2)]
        noise_of(plan).on_means(result, ScriptedEntropy(b"server"), RoundId(0), largest)


def test_every_rounds_z_reaches_the_server() -> None:
    whole = task()
    plan = complete(planned(CENTRAL), whole)
    with Training(whole, plan) as run:
        before = run.tables["items"].values(np.arange(100, dtype=np.uint64)).copy()
        list(run.run(1))
        after = run.tables["items"].values(np.arange(100, dtype=np.uint64))
    assert (before != after).all()  # noise on every row, touched or not


def test_what_a_person_has_whose_records_fall_into_many_batches() -> None:
    """The page's figure: 16 records under sigma_1 for (4, 1e-5), rate 1 %, 1,000 steps."""
    section = replace(
        LOCAL, sampling=0.01, steps=1_000, records_per_subject=16, clients_per_subject=1
    )
    plan = planned(section)
    plan = replace(plan, simulation=replace(plan.simulation, rounds=1))
    facts = noise_of(plan).paper_facts()
    assert facts["epsilon_one_record_in_a_batch"] == pytest.approx(78.6, abs=0.1)
    facts = noise_of(plan).paper_facts()
    assert facts is not None and facts["epsilon"] == "inf"
    assert [round(s, 3) for s in facts["noise_by_most_of_a_person"].values()] == [
        0.735,
        1.04,
        1.688,
        3.116,
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trust": Trust.LOCAL}, "trust = 'local'"),
        ({"unit": "user", "clients_per_subject": 1, "sampling": 1.0}, "unit = 'user'"),
        ({"noise": 1.0}, "noise = 1"),
        ({"epsilon": 0.0, "noise": 1.0}, "epsilon = 0"),
        ({"cap": 3}, "cap = 3"),
        ({"steps": 2}, "steps = 2"),
    ],
)
def test_what_it_cannot_be_with_is_refused(change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as found:
        replace(CENTRAL, **change)
    assert found.value.hint


@pytest.mark.parametrize("scheme", ["secure-fedavg", "secure-submodel", "two-server"])
def test_gradients_that_are_hidden_cannot_be_the_servers(scheme: str) -> None:
    with pytest.raises(ConfigError, match="CentralSubDP needs every client's gradient") as found:
        planned(CENTRAL, scheme=scheme)
    assert found.value.hint
    planned(LOCAL, scheme="secure-fedavg")


def test_services_do_not_carry_z(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.tasks.load", lambda *_, **__: replace(task(), setup=None))
    with pytest.raises(ConfigError, match="services do not carry") as found:
        pack_task(planned(CENTRAL), None)
    assert found.value.hint


@BOTH
def test_commands_print_the_papers_epsilon_as_printed_and_beside_it_what_holds(
    tmp_path: Path, section: DPPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: Plan = replace(planned(replace(section, records_per_subject=16)), task=TaskPlan())
    path = tmp_path / "plan.toml"
    path.write_text(complete(plan, task()).to_toml())
    assert main(["privacy", "dp", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{section.printed.label} by the paper: epsilon 4" in said
    assert "what holds: no finite epsilon" in said and "a person with 16 records" in said
    assert main(["privacy", "dp", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["epsilon"] for cell in found["guarantees"]} <= {"inf", None}
    assert found["printed"]["epsilon_as_printed"] == 4.0 and found["budget"] is None


@BOTH
def test_an_audit_holds_them_to_what_they_claim(section: DPPlan) -> None:
    """Gradients in the clear refute a small target; persons like each other hide behind one Z."""
    section = replace(section, epsilon=0.5, sampling=0.2, steps=1)
    plan = complete(
        replace(planned(section), simulation=replace(planned(section).simulation, rounds=40)),
        task(),
    )
    (found,) = canary_findings(plan, ScriptedEntropy(b"audit"))
    assert "as printed" in found.name and found.claimed == 0.5
    assert (found.low > found.claimed) is (section.printed is Printed.CENTRAL)
