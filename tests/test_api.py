"""The front door of the library: what a program or a notebook calls, and what it shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tessera
from tessera import tasks
from tessera.cli import main as cli
from tessera.errors import ConfigError, as_python
from tessera.plan import Plan, SimulationPlan
from tessera.report import progress

OPTIONS = {"users": 20, "items": 60, "examples": 6, "history": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    top, task, found = tmp_path_factory.mktemp("runs"), tasks.load("taobao-like", **OPTIONS), []
    for scheme, cohort in (("submodel", 5), ("fedavg", 6)):
        plan = Plan(scheme=scheme, cohort=cohort, simulation=SimulationPlan(evaluate_every=1))
        found.append(tessera.simulate(task, plan, 3, out=str(top / scheme), trainer="sequential"))
    return found


def test_dir_shows_the_public_names_and_each_is_there():
    assert dir(tessera) == sorted(tessera.__all__)
    for name in dir(tessera):
        assert getattr(tessera, name) is not None


def test_runs_compare_by_data_and_name_the_settings_that_differ(runs, tmp_path):
    both = tessera.compare([runs[0], str(runs[1].folder)])
    assert both.differing["cohort"] == [5, 6]
    assert "Differs: cohort = 5, 6" in str(both)
    assert both.to_csv().splitlines()[0].startswith("folder,label,scheme")
    assert both.report(str(tmp_path / "page.html")).exists()
    assert "<svg xmlns" in both._repr_html_()
    other = tasks.load("taobao-like", **{**OPTIONS, "seed": 1})
    plan = Plan(scheme="submodel", cohort=5)
    run = tessera.simulate(other, plan, 1, out=tmp_path / "other", trainer="sequential")
    with pytest.raises(ConfigError, match="on different data"):  # under the same name
        tessera.compare([runs[0], run])


def test_in_a_notebook_a_comparison_as_text_is_text(runs, monkeypatch):
    """There rich shows what it prints by itself, and what it wrote was lost."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "Differs: cohort = 5, 6" in str(tessera.compare(runs))


def test_frames_have_a_row_per_round_and_per_run(runs):
    pandas = pytest.importorskip("pandas")
    frame = runs[0].to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["round_id"].tolist() == [0, 1, 2]
    assert frame["bytes_up"].iloc[0] == sum(runs[0].rounds[0]["bytes_up"].values())
    assert tessera.compare(runs).to_frame()["scheme"].tolist() == ["submodel", "fedavg"]


def test_a_notebook_gets_html(runs):
    shown = runs[0]._repr_html_()
    assert "submodel" in shown and "<svg xmlns" in shown and "AUC" in shown
    assert "items.weight" in runs[0].task._repr_html_()
    assert "scheme = &quot;submodel&quot;" in runs[0].plan._repr_html_()


def test_progress_is_shown_where_somebody_looks(runs, capsys, monkeypatch, tmp_path):
    task, plan = runs[0].task, Plan(scheme="submodel", cohort=5)

    def run(name, **how):
        tessera.simulate(task, plan, 2, out=tmp_path / name, trainer="sequential", **how)
        return capsys.readouterr().err

    assert run("silent") == ""  # a pipe
    assert "round 2/2" in run("wanted", progress=True)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    assert "round 1/2" in run("notebook")
    assert run("off", progress=False) == ""
    assert run("own", on_event=lambda event: None) == ""


def test_hints_are_in_tracebacks_and_speak_python():
    assert as_python("name another with --out, or --min-rows 3") == (
        "name another with out=, or min_rows= 3"
    )
    error = ConfigError("no", hint="leave --trainer out")
    assert error.__notes__ == ["hint: leave trainer= out"]
    assert error.hint == "leave --trainer out"


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "tessera", "-h"], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    listed = [line[0] for line in lines if line and line[0] in ("init", "plan", "run", "compare")]
    assert listed == ["init", "plan", "run", "compare"]
    assert "..." not in done.stdout.split("Commands:")[1]


def test_the_folder_of_a_run_may_be_a_string(runs, tmp_path):
    again = tessera.Run(str(runs[0].folder))
    assert again == runs[0]
    again.report(str(tmp_path / "report.html"))
    assert "<html" in (tmp_path / "report.html").read_text()


def test_figures_go_into_files_that_are_not_there_yet(runs, tmp_path, capsys):
    folders = [str(run.folder) for run in runs]
    files = ["--csv", str(tmp_path / "a.csv"), "--svg", str(tmp_path / "a.svg")]
    command = ["compare", *folders, "--out", str(tmp_path / "page.html"), *files]
    assert cli.main(command) == 0
    assert (tmp_path / "a.csv").read_text().count("\n") == 3
    assert (tmp_path / "a.svg").read_text().startswith("<svg xmlns")
    assert cli.main(command) == 2
    assert "a.csv is there already" in capsys.readouterr().err


def test_seeds_give_a_mean_and_a_deviation(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = "".join(f"{name} = {value}\n" for name, value in OPTIONS.items())
    (tmp_path / "p.toml").write_text(
        f'scheme = "submodel"\ncohort = 5\n[task]\nname = "taobao-like"\n{options}'
    )
    command = ["run", "p.toml", "--rounds", "1", "--out", "all", "--trainer", "sequential"]
    assert cli.main([*command, "--seeds", "0,1"]) == 0
    out = capsys.readouterr().out
    assert "AUC, seed 1" in out and "standard deviation" in out
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"seed-0", "seed-1"}
    assert cli.main([*command, "--seeds", "0,x"]) == 2
    assert "each once" in capsys.readouterr().err
