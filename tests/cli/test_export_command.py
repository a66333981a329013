"""`tessera export` turns a run's checkpoint into a model that predicts as the run's own did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from tessera import tasks
from tessera.api import simulate
from tessera.cli.export import export
from tessera.data.examples import LABEL
from tessera.errors import ConfigError
from tessera.learning.architecture import build
from tessera.learning.bound_model import Local, Table
from tessera.learning.module_tables import Tables
from tessera.learning.saved import ABOUT, STATE, load
from tessera.learning.scores import auc, evaluate
from tessera.plan import Plan, Scheme, SimulationPlan, TaskPlan
from tessera.runs import export as exports
from tessera.runs.central import CentralTraining
from tessera.runs.export import export_run
from tessera.runs.folder import CHECKPOINT, MODEL, PLAN, ROUNDS, RUN, RunFolder, entropy_of
from tessera.runs.training import Training, complete
from tessera.tasks import Task

OPTIONS = {"users": 30, "items": 120, "examples": 12, "history": 5, "width": 4}

app = typer.Typer()
app.command()(export)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result


@cache
def shop() -> Task:
    return tasks.load("taobao-like", **OPTIONS)


def plan_of(scheme: str, **changes: Any) -> Plan:
    return Plan(
        federation="shop",
        scheme=Scheme(scheme),
        cohort=6,
        task=TaskPlan(name="taobao-like", options=OPTIONS),
        simulation=SimulationPlan(rounds=2),
        **changes,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A federated and a central run, and nobody to change them."""
    base = tmp_path_factory.mktemp("runs")
    return {
        scheme: simulate(shop(), plan_of(scheme), out=base / scheme, trainer="sequential").folder
        for scheme in ("submodel", "central")
    }


@pytest.fixture
def folder(trained: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(trained["submodel"], tmp_path / "run")


@pytest.fixture(autouse=True)
def no_learner(monkeypatch: pytest.MonkeyPatch, trained: dict[str, Path]) -> Iterator[None]:
    """Reading a model must not start what trains one."""

    def started(*_: object) -> None:
        pytest.fail("the learner was started")

    monkeypatch.setattr(Training, "learner", property(started))
    yield


def columns() -> dict[str, Any]:
    return {name: c for name, c in shop().data.test.fields.items() if name != LABEL}


@pytest.mark.parametrize("scheme", ["submodel", "central"])
def test_an_exported_model_scores_as_the_run_did_to_the_bit(
    trained: dict[str, Path], tmp_path: Path, scheme: str
) -> None:
    source = trained[scheme]
    log = RunFolder.load(source)
    kind = CentralTraining if scheme == "central" else Training
    entropy = entropy_of(log)
    with kind(shop(), log.plan, folder=source / CHECKPOINT, entropy=entropy) as stood:
        parameters = stood.parameters(local=True)
        expected = evaluate(stood.module, stood.bound, parameters, shop().data.test)
    model = load(export_run(source, shop(), tmp_path / "model", with_local=True))
    np.testing.assert_array_equal(model.scores(columns()), expected)
    measured = list(log.rounds())[-1]["metric"]
    assert auc(model.predict(columns()), shop().data.test[LABEL]) == pytest.approx(measured)
    assert model.about["metric"] == {"name": "AUC", "value": measured, "after_rounds": 2}
    assert (model.about["scheme"], model.about["rounds"]) == (scheme, 2)


def test_local_rows_are_as_they_began_unless_asked_for(folder: Path, tmp_path: Path) -> None:
    first = shop().build(0).get_parameter("users.weight")
    without = load(export_run(folder, shop()))
    assert torch.equal(without.module.get_parameter("users.weight"), first)
    assert without.about["local_rows"] == "as they began"
    full = load(export_run(folder, shop(), tmp_path / "full", with_local=True))
    assert not torch.equal(full.module.get_parameter("users.weight"), first)
    assert full.about["local_rows"] == "as the simulated clients trained them"
    same = [name for name in full.module.state_dict() if name != "users.weight"]
    for name in same:
        assert torch.equal(full.module.state_dict()[name], without.module.state_dict()[name])
    assert not torch.equal(
        without.module.get_parameter("items.weight"), shop().build(0).get_parameter("items.weight")
    )


def test_the_state_loads_into_the_tasks_module_in_ordinary_torch_code(folder: Path) -> None:
    path = export_run(folder)
    assert shop().architecture is not None
    plain = build(shop().architecture)
    plain.load_state_dict(torch.load(path / STATE, weights_only=True), strict=True)


def test_a_task_of_ones_own_is_exported_with_its_own_module(tmp_path: Path) -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(120, 4)
            self.users = nn.Embedding(30, 4)
            self.out = nn.Linear(4, 1)
            self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            both = self.items(batch["item"]) * self.users(batch["user"]) * self.fixed
            found: Tensor = self.out(both).squeeze(-1)
            return found

    mine = Task(
        name="mine",
        data=shop().data,
        module=Mine,
        tables=Tables({"items.weight": Table("item"), "users.weight": Local("user")}),
    )
    plan = complete(Plan(federation="mine", scheme=Scheme.SUBMODEL, cohort=4), mine)
    source = tmp_path / "run"
    RunFolder.create(source, plan)
    with Training(mine, plan, folder=source / CHECKPOINT) as stood:
        stood.federation.go_on_at(1)
        stood.save()
        expected = stood.parameters(local=True)["out.weight"]
    with pytest.raises(ConfigError, match="names no task") as caught:
        run(source)
    assert "export_run(folder, task)" in (caught.value.hint or "")
    path = export_run(source, mine)
    with pytest.raises(ConfigError, match="not one of tessera's"):
        load(path)
    model = load(path, Mine())
    np.testing.assert_array_equal(model.module.get_parameter("out.weight").detach(), expected)
    assert model.predict({"user": [1, 2], "item": [3, 119]}).shape == (2,)
    with pytest.raises(ConfigError, match="its tables and dense part are not those"):
        export_run(source, shop())


# --- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_was_written_and_how_to_use_it(folder: Path) -> None:
    result = run(folder)
    text = result.stdout
    assert str(folder / MODEL) in text and "submodel, 2 rounds, AUC 0." in text
    assert "local rows (users.weight): as they began" in text
    assert "warning" not in result.stderr
    lines = [line.strip() for line in text.splitlines()][-3:]
    assert lines[0] == "import tessera"
    assert lines[1] == f'model = tessera.load("{folder / MODEL}")'
    assert lines[2].startswith("model.predict({")
    found = eval(lines[2], {"model": load(folder / MODEL)})  # the very line that people paste
    assert found.shape == (1,) and 0.0 < found[0] < 1.0


def test_json_is_one_object(folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--json", "--out", tmp_path / "elsewhere", "--with-local")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["model"] == str(tmp_path / "elsewhere") and not (folder / MODEL).exists()
    assert found["files"].keys() == {"state_dict.pt", "about.json", "maps.npz"}
    assert (found["scheme"], found["rounds"]) == ("submodel", 2)
    assert found["values"] == sum(p.numel() for p in shop().build(0).parameters())
    assert "never leave their client" in result.stderr


def test_a_runs_own_model_is_renewed_and_another_is_not(folder: Path, tmp_path: Path) -> None:
    run(folder)
    run(folder)
    run(folder, "--out", tmp_path / "model")
    with pytest.raises(ConfigError, match="holds a model already"):
        run(folder, "--out", tmp_path / "model")
    run(folder, "--out", tmp_path / "model", "--overwrite")


def test_exporting_leaves_the_run_as_it_was(folder: Path) -> None:
    def files() -> dict[str, bytes]:
        inner = [p for p in folder.rglob("*") if p.is_file() and MODEL not in p.parts]
        return {str(p): p.read_bytes() for p in inner}

    (folder / CHECKPOINT / "root.key").unlink()  # as in a run under test entropy
    before = files()
    run(folder)
    assert files() == before


def test_a_run_that_was_killed_in_the_middle_of_a_line_is_exported(folder: Path) -> None:
    with (folder / ROUNDS).open("a") as out:
        out.write('{"round_id": 2, "met')
    run(folder)
    assert json.loads((folder / MODEL / ABOUT).read_text())["metric"]["after_rounds"] == 2


# --- what cannot be exported ----------------------------------------------------------------------


def refused(match: str, *arguments: object) -> ConfigError:
    with pytest.raises(ConfigError, match=match) as caught:
        run(*arguments)
    assert caught.value.hint
    return caught.value


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    refused("not a run's folder", tmp_path)


@pytest.mark.parametrize("scheme", ["submodel", "central"])
def test_a_run_without_a_checkpoint_is_refused_and_gets_none(tmp_path: Path, scheme: str) -> None:
    RunFolder.create(tmp_path / "run", complete(plan_of(scheme), shop()))
    refused("no round of this run is checkpointed", tmp_path / "run")
    assert not (tmp_path / "run" / CHECKPOINT).exists()


def test_a_checkpoint_before_the_first_round_is_refused(tmp_path: Path) -> None:
    plan = complete(plan_of("submodel"), shop())
    RunFolder.create(tmp_path / "run", plan)
    Training(shop(), plan, folder=tmp_path / "run" / CHECKPOINT).close()
    refused("no round of this run is checkpointed", tmp_path / "run")
    assert not (tmp_path / "run" / MODEL).exists()


def test_a_checkpoint_of_another_plan_is_refused(folder: Path) -> None:
    other = complete(plan_of("submodel", seed=9), shop())
    (folder / PLAN).write_text(other.to_toml())
    refused("plan", folder)


def test_a_run_of_another_version_is_refused(folder: Path) -> None:
    facts = json.loads((folder / RUN).read_text()) | {"version": "0.0.1"}
    (folder / RUN).write_text(json.dumps(facts))
    refused("was made by tessera 0.0.1", folder)


def test_tables_that_no_memory_holds_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "physical_memory", lambda: 1000)
    refused("this machine has 1,000", folder)


def test_a_folder_of_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to anna").write_text("x")
    refused("not a model", folder, "--out", tmp_path / "letters", "--overwrite")
    assert [p.name for p in (tmp_path / "letters").iterdir()] == ["to anna"]
