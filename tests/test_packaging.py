"""Wheel and sdist, each installed into a fresh environment, with and without a C compiler.

Nothing is downloaded: a fresh environment holds tessera alone and reads its dependencies from the
environment that runs the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest

# One worker for the whole file, so that each distribution is built once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]

ROOT: Final = Path(__file__).parents[1]
SITE: Final = Path(sysconfig.get_path("purelib"))
NO_COMPILER: Final = "no-such-compiler"
IN_CHECKOUT: Final = shutil.ignore_patterns("*.so", "*.pyd", "*.egg-info", "__pycache__")

Compiler = Literal["with a compiler", "without a compiler"]
COMPILERS: Final[tuple[Compiler, ...]] = ("with a compiler", "without a compiler")

REPORT = """
import json, tessera
from tessera.crypto import kernel
found = kernel.describe()
print(json.dumps({"file": tessera.__file__, "version": tessera.__version__, "name": found.name,
                  "available": found.available, "reason": found.reason}))
"""


@dataclass(frozen=True, slots=True)
class Distributions:
    wheel: Path
    sdist: Path


def environment(compiler: Compiler, *, search: Path | None = None) -> dict[str, str]:
    """This process's environment, without the checkout and, if asked, without a compiler."""
    hidden = {"PYTHONPATH", "CC", "CXX", "TESSERA_KERNEL"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    if compiler == "without a compiler":
        kept |= {"CC": NO_COMPILER, "CXX": NO_COMPILER, "PATH": str(search or "")}
    elif not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("no C compiler on this machine")
    return kept


def run(*command: str | Path, env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], env=env, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(target: Path, compiler: Compiler) -> Distributions:
    """What `python -m build` makes of a clean copy: an sdist, and a wheel from that sdist."""
    source = target / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=IN_CHECKOUT)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", target),
        env=environment(compiler),
        cwd=source,
    )
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return Distributions(wheel, sdist)


@pytest.fixture(scope="module", params=COMPILERS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Compiler, Distributions]]:
    compiler: Compiler = request.param
    yield compiler, build(tmp_path_factory.mktemp("dist"), compiler)


def install(distribution: Path, compiler: Compiler, folder: Path) -> dict[str, Any]:
    """Install into a fresh environment, import there, and return what the kernel says of itself."""
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    python = programs / "python"
    site = run(
        *(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"),
        env=environment(compiler),
        cwd=folder,
    ).strip()
    Path(site, "dependencies.pth").write_text(f"{SITE}\n")
    env = environment(compiler, search=programs)
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"),
        # The outer environment's own tessera is visible through the .pth file, and not meant.
        *("--ignore-installed", "--no-build-isolation", distribution),
        env=env,
        cwd=folder,
    )
    report: dict[str, Any] = json.loads(run(python, "-c", REPORT, env=env, cwd=folder))
    assert Path(report["file"]).is_relative_to(folder), "not the installed package"
    assert report["version"] in run(programs / "tessera", "--version", env=env, cwd=folder)
    doctor = json.loads(run(programs / "tessera", "doctor", "--json", env=env, cwd=folder))
    assert doctor["masks"]["kernel"] == report["name"]
    return report


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_and_imports_and_says_which_kernel_it_uses(
    built: tuple[Compiler, Distributions], kind: str, tmp_path: Path
) -> None:
    compiler, distributions = built
    report = install(getattr(distributions, kind), compiler, tmp_path / "fresh")
    assert report["available"][-1] == "reference"
    if compiler == "without a compiler":
        assert report["available"] == ["reference"]
        assert report["name"] == "reference"
        assert report["reason"], "it says why there is no C kernel"
    else:
        assert report["name"] == report["available"][0]


def test_the_wheel_holds_types_and_licence_and_no_source_of_the_kernel(
    built: tuple[Compiler, Distributions],
) -> None:
    compiler, distributions = built
    names = zipfile.ZipFile(distributions.wheel).namelist()
    assert "tessera/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert [name for name in names if name.endswith(".c")] == []
    compiled = [name for name in names if "kernel/_native" in name]
    assert bool(compiled) == (compiler == "with a compiler")


def test_the_sdist_holds_the_source_of_the_kernel(built: tuple[Compiler, Distributions]) -> None:
    _, distributions = built
    with tarfile.open(distributions.sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("src/tessera/crypto/kernel/kernel.c") for name in names)
    assert any(name.endswith("/src/tessera/py.typed") for name in names)
