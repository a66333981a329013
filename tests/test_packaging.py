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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest

pytestmark = pytest.mark.slow

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
    assert_papers_are_elsewhere(programs / "tessera", env, folder)
    return report


def assert_papers_are_elsewhere(command: Path, env: dict[str, str], folder: Path) -> None:
    """The papers' tables need a checkout, and the installed command says so."""
    asked = [str(command), "reproduce", "fsl-tables", "--part", "table4"]
    done = subprocess.run(asked, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: reproduce: ") and hint.startswith("hint: clone the repository")


@pytest.mark.parametrize("compiler", COMPILERS)
def test_wheel_and_sdist_install_and_import_and_say_which_kernel_they_use(
    compiler: Compiler, tmp_path: Path
) -> None:
    built = build(tmp_path, compiler)
    assert_wheel_is_complete(built.wheel, compiler)
    assert_sdist_is_complete(built.sdist)
    for distribution in (built.wheel, built.sdist):
        report = install(distribution, compiler, tmp_path / f"fresh{distribution.suffix}")
        assert report["available"][-1] == "reference"
        if compiler == "without a compiler":
            assert report["available"] == ["reference"]
            assert report["name"] == "reference"
            assert report["reason"], "it says why there is no C kernel"
        else:
            assert report["name"] == report["available"][0]


def assert_wheel_is_complete(wheel: Path, compiler: Compiler) -> None:
    """Types and licence are in it, the kernel's source is not, the kernel if it could be built."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "tessera/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert [name for name in names if name.endswith(".c")] == []
    compiled = [name for name in names if "kernel/_native" in name]
    assert bool(compiled) == (compiler == "with a compiler")


def assert_sdist_is_complete(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("/src/tessera/crypto/kernel/kernel.c") for name in names)
    assert any(name.endswith("/src/tessera/py.typed") for name in names)
