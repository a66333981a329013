"""The commands of docs/deploy.md, "Your first federation in ten minutes", one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "h11", "torch", "pyarrow")):
    pytest.skip("an extra is not installed", allow_module_level=True)

from services.processes import free_port

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    section = page.partition("## Your first federation in ten minutes")[2].partition("\n## ")[0]
    found = [line[6:] for line in section.splitlines() if line.startswith("    $ ")]
    return [line for line in found if not line.startswith("pip ")]


@pytest.mark.slow
def test_the_first_federation_as_the_page_has_it(tmp_path: Path) -> None:
    """In an empty folder; another port, as that of the page may be taken."""
    lines = [
        line.replace("examples/", f"{ROOT}/examples/").replace(":8400", f":{port}")
        for port in [free_port()]
        for line in commands()
    ]
    assert len(lines) >= 9 and lines[0].startswith("python ")
    port = next(line for line in lines if " join " in line).partition(":")[2].partition(":")[2]
    number = port.partition(" ")[0]
    script = "set -e\n" + "\n".join(lines).replace(
        "tessera serve bundle.npz", f"tessera serve bundle.npz --port {number}"
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "tessera").write_text(f'#!/bin/sh\nexec {sys.executable} -m tessera.cli.main "$@"\n')
    (tools / "tessera").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    done = subprocess.run(
        ["bash", "-c", script + "\nwait\n"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "room for 100 more" in done.stdout and "on the operator's word" in done.stdout
    assert "Product " in done.stdout and "items.parquet" in done.stdout
    assert list((tmp_path / "shop" / "out").glob("model-*.safetensors"))
