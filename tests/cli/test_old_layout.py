"""The folder of an older version is refused with error: and hint: by whoever reads a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from report import folders
from tessera.api import Run, simulate
from tessera.cli.main import main
from tessera.errors import ConfigError
from tessera.plan import Plan

WHY = "run.json: the folder has layout 1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As it was before folders had a layout's number."""
    made = folders.make(tmp_path / "old", rounds=3)
    facts = json.loads((made / "run.json").read_text())
    del facts["layout"]
    (made / "run.json").write_text(json.dumps(facts))
    return made


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("compare", ()),
        ("audit", ()),
        ("export", ()),
        ("recommend", ("--client", "0")),
        ("run", ("--resume",)),
    ],
)
def test_a_command_gives_an_error_and_a_hint(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, options: tuple[str, ...]
) -> None:
    before = sorted(p.name for p in folder.iterdir())
    assert main([command, str(folder), *options]) == 2
    out, err = capsys.readouterr()
    error, hint = err.splitlines()
    assert error.startswith("error: ") and WHY in error
    assert hint.startswith("hint: ") and out == ""
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.parametrize(
    "read",
    [
        lambda run: run.plan,
        lambda run: run.facts,
        lambda run: run.rounds,
        lambda run: run.curve,
        lambda run: run.metric,
        lambda run: run.report(),
        lambda run: run.export(),
    ],
    ids=["plan", "facts", "rounds", "curve", "metric", "report", "export"],
)
def test_a_program_gets_an_error_with_a_hint(folder: Path, read: Callable[[Run], object]) -> None:
    with pytest.raises(ConfigError, match=WHY) as error:
        read(Run(folder))
    assert error.value.hint


def test_it_is_not_resumed(folder: Path) -> None:
    from tessera import tasks

    task = tasks.load("taobao-like", users=40, items=60, examples=4)
    with pytest.raises(ConfigError, match=WHY) as error:
        simulate(task, Plan.read(folder / "plan.toml"), out=folder, resume=True)
    assert error.value.hint
