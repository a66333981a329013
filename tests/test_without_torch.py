"""What works without PyTorch: every command that does not train, and a deployment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from reproduce import films

ROOT: Final = Path(__file__).parents[1]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

HIDDEN: Final = "import sys\nsys.modules['torch'] = None\n"
COMMAND: Final = """
from importlib import import_module
module, _, name = sys.argv.pop(1).partition(":")
sys.exit(getattr(import_module(module), name)(sys.argv[1:]))
"""
PLAN: Final = """
scheme = "{scheme}"
cohort = 4
[model]
dense = 5
[[table]]
name = "goods"
rows = 60
width = 2
[union]
max_rows = 12
[groups]
size = 4
"""


def python(*arguments: object, hide: bool = True) -> list[str]:
    code, *others = map(str, arguments)
    return [sys.executable, "-c", (HIDDEN if hide else "import sys\n") + code, *others]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def tessera(
    folder: Path, *arguments: object, hide: bool = True
) -> subprocess.CompletedProcess[str]:
    """One command line in a process of its own, through the entry point that is installed."""
    entry = PROJECT["scripts"]["tessera"]
    return subprocess.run(
        python(COMMAND, entry, *arguments, hide=hide),
        cwd=folder,
        env=environment() | {"TESSERA_DATA": str(folder)},
        capture_output=True,
        text=True,
    )


def written(folder: Path, scheme: str = "secure-submodel") -> Path:
    path = folder / "plan.toml"
    path.write_text(PLAN.format(scheme=scheme))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--json"),
        ("plan", "plan.toml", "--json"),
        ("privacy", "--json"),
        ("privacy",),
    ],
    ids=" ".join,
)
def test_a_command_that_does_not_train(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    written(tmp_path)
    done = tessera(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("scheme", ["submodel", "secure-fedavg", "secure-submodel", "two-server"])
def test_a_run_without_a_task_and_its_audit(tmp_path: Path, scheme: str) -> None:
    path = written(tmp_path, scheme)
    done = tessera(tmp_path, "run", path, "--rounds", 2, "--record-views", "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] == 2
    if scheme in ("secure-submodel", "two-server"):
        done = tessera(tmp_path, "audit", "run", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["attacks"]


def test_an_audit_of_masked_ratings_tries_the_same_attacks(tmp_path: Path) -> None:
    films.write(tmp_path)
    plan = """
        scheme = "submodel"
        cohort = 10
        [task]
        name = "ratings-100k"
        mask = "linear"
        factors = 3
        [simulation]
        rounds = 2
    """
    (tmp_path / "plan.toml").write_text(plan)
    done = tessera(tmp_path, "run", "plan.toml", "--record-views", "--out", "run", hide=False)
    assert done.returncode == 0, done.stderr
    with_torch, without = (
        tessera(tmp_path, "audit", "run", "--json", hide=hide) for hide in (False, True)
    )
    assert without.returncode == 0, without.stderr
    assert json.loads(without.stdout) == json.loads(with_torch.stdout)
    assert "masks: taken off, ratings exact" in without.stdout


def test_what_trains_says_what_to_install(tmp_path: Path) -> None:
    plan = 'scheme = "submodel"\ncohort = 4\n[task]\nname = "taobao-like"\nusers = 20\n'
    (tmp_path / "plan.toml").write_text(plan)
    done = tessera(tmp_path, "run", "plan.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: training needs PyTorch")
    assert "hint:" in done.stderr


@contextmanager
def started(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        python(COMMAND, PROJECT["scripts"]["tessera"], *arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("starlette", "uvicorn", "h11", "prometheus_client")),
    reason="the extra `http` is not installed",
)
def test_a_deployment_between_two_servers(tmp_path: Path) -> None:
    written(tmp_path, "two-server")
    assert tessera(tmp_path, "pack", "plan.toml", "--rows-per-client", 6).returncode == 0
    assert tessera(tmp_path, "keys", "bundle.npz").returncode == 0
    line = ("bundle.npz", "--keys", "keys/leader", "--state", "leader", "--rounds", 1)
    with started(tmp_path, "serve", *line, "--port", 0) as leader:
        assert leader.stdout is not None and leader.stderr is not None
        first = leader.stdout.readline()
        assert first, leader.stderr.read()
        url = json.loads(first)["listening"]
        assert url.startswith("https://")
        helper = ("--keys", "keys/helper", "--state", "helper")
        clients = ("--keys", "keys", "--state", "clients", "--clients", "0-3")
        with (
            started(tmp_path, "help-serve", "bundle.npz", url, *helper) as second,
            started(tmp_path, "join", "bundle.npz", url, *clients) as joined,
        ):
            for process in (second, joined, leader):
                _, complaints = process.communicate(timeout=120)
                assert process.returncode == 0, complaints
    done = tessera(tmp_path, "status", "leader", "--json")
    assert json.loads(done.stdout)["rounds"][0]["survivors"] == 4
