"""Build the documentation as a site: `make docs`, or python scripts/build_docs.py [FOLDER].

The pages of docs/ are taken as they are; pages that would otherwise repeat the code are written
from it: the public names, the files and events of a run, and the fields that commands print with
`--json`, which is found out by calling them. Nothing is fetched, and a warning is an error.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_args

import tessera
from tessera.cli import main as cli
from tessera.rounds.events import Event
from tessera.runs import folder as runs
from tessera.simulation import views

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
SITE: Final = ROOT / "build" / "docs"
LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
RST: Final = """\
project = "tessera"
author = copyright = "the tessera authors"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "tessera"
html_copy_source = False
html_show_sphinx = False
"""
"""The site's conf.py."""

PLAN: Final = """\
scheme = "secure-submodel"
cohort = 4
[task]
name = "taobao-like"
users = 12
items = 60
examples = 6
history = 3
size = "tiny"
[groups]
size = 2
[union]
max_rows = 24
[simulation]
rounds = 1
dropout = 0.0
"""
COMMANDS: Final = (
    ("plan", "plan.toml"),
    ("plan", "plan.toml", "--all-schemes"),
    ("run", "plan.toml", "--out", "run", "--record-views"),
    ("compare", "run"),
    ("audit", "run"),
    ("recommend", "run", "--user", "3"),
    ("export", "run"),
    ("privacy",),
    ("doctor",),
)
"""Commands that print figures, each after what it needs."""


# --- from the code --------------------------------------------------------------------------------


def api() -> str:
    """The public names, each with its signature and what its docstring says."""
    parts = ["# The library", "", "All of `tessera`: other names may change at any time.", ""]
    for name in tessera.__all__:
        if name == "__version__":
            continue
        found = getattr(tessera, name)
        parts += [f"## `{name}`", "", *described(found)]
        if inspect.isclass(found) and not issubclass(found, BaseException):
            for inner, member in members(found):
                parts += [f"### `{name}.{inner}`", "", *described(member)]
        elif isinstance(found, ModuleType):
            for inner in found.__all__:
                member = getattr(found, inner)
                if inspect.isfunction(member):
                    parts += [f"### `{name}.{inner}`", "", *described(member)]
    return "\n".join(parts)


def described(found: Any) -> list[str]:
    lines: list[str] = []
    if callable(found) and not (inspect.isclass(found) and issubclass(found, BaseException)):
        with contextlib.suppress(ValueError, TypeError):
            signature = str(inspect.signature(found)).replace("'", "")
            lines += ["```python", f"{found.__name__}{signature}", "```", ""]
    return [*lines, inspect.getdoc(found) or "", ""]


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class itself explains."""
    for name, member in vars(kind).items():
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        if not name.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, property)
        ):
            if inspect.getdoc(member):
                yield name, member


def run_files() -> str:
    """The files of a run's folder, run.json and the events."""
    parts = ["# Files and events of a run", "", "```text", inspect.getdoc(runs) or "", "```", ""]
    parts += ["## run.json", "", "| field | type |", "|---|---|"]
    parts += [f"| `{name}` | {shape} |" for name, shape in leaves(views.FACTS)]
    parts += ["", "## Events", "", "One JSON object a line in `events.jsonl`, its kind in `event`."]
    for kind in get_args(Event):
        parts += ["", f"### {kind.__name__}", "", inspect.getdoc(kind) or "", ""]
        parts += ["| field | type |", "|---|---|"]
        parts += [f"| `{f.name}` | {cell(str(f.type))} |" for f in fields(kind)]
    return "\n".join(parts) + "\n"


def leaves(shape: Any, above: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(shape, Mapping):
        for name, inner in shape.items():
            yield from leaves(inner, f"{above}.{name}" if above else name)
    elif isinstance(shape, list):
        yield from leaves(shape[0], f"{above}[]")
    else:
        yield above, cell(shape.__name__ if isinstance(shape, type) else str(shape))


def cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def json_fields() -> str:
    """What each command prints with `--json`, found out by calling it on a small run."""
    parts = ["# Fields of `--json`", "", "One JSON object on stdout. Fields that are"]
    parts += ["null here have a value under another plan or scheme.", ""]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("plan.toml").write_text(PLAN)
        for command in COMMANDS:
            told = printed([*command, "--json"])
            parts += ["", f"## `tessera {' '.join(command)} --json`", ""]
            parts += ["| field | type |", "|---|---|"]
            parts += [f"| `{name}` | {kind} |" for name, kind in dict(paths(told)).items()]
    return "\n".join(parts) + "\n"


def printed(command: list[str]) -> Any:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = cli.main(command)
    if status:
        raise SystemExit(f"error: `tessera {' '.join(command)}` ended with status {status}")
    return json.loads(out.getvalue())


def paths(value: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of all values with their types; of a list its first entry stands for all."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from paths(inner, f"{above}.{name}" if above else str(name))
    elif isinstance(value, list) and value:
        yield from paths(value[0], f"{above}[]")
    else:
        kinds = {bool: "true or false", int: "whole number", float: "number", str: "text"}
        empty = {dict: "object", list: "list"}
        yield above, "null" if value is None else (kinds | empty)[type(value)]


# --- the site -------------------------------------------------------------------------------------


def assemble(source: Path) -> None:
    """All pages in one folder, with a table of contents."""
    for page in sorted(DOCS.rglob("*.md")):
        copy = source / page.relative_to(DOCS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(within(page.read_text(encoding="utf-8"), page), encoding="utf-8")
    for name, text in (("api", api()), ("run-files", run_files()), ("json-fields", json_fields())):
        (source / f"{name}.md").write_text(text, encoding="utf-8")
    (source / "conf.py").write_text(RST)
    (source / "index.md").write_text(index(source), encoding="utf-8")


def within(text: str, page: Path) -> str:
    """Links that lead out of docs/, to source and examples, become the names of those files."""

    def kept(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if ":" in target or DOCS in (page.parent / target).resolve().parents:
            return match[0]
        return words

    # A browser draws diagrams with a script from elsewhere: here they are shown as their source.
    return LINK.sub(kept, text).replace("```mermaid", "```text")


def index(source: Path) -> str:
    """The first paragraph of the README, and every page once."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = readme.split("\n\n")[1]
    groups = {
        "Use": ["choosing", "data", "training", "deploy", "results"],
        "Reference": ["api", "plan", "run-files", "json-fields", "glossary"],
        "Trust": ["threat-model"],
    }
    named = {page for pages in groups.values() for page in pages}
    rest = sorted(p.relative_to(source).with_suffix("").as_posix() for p in source.rglob("*.md"))
    groups["Protocols"] = [p for p in rest if p.startswith("protocols/")]
    groups["Decisions"] = [p for p in rest if p.startswith("decisions/")]
    groups["Trust"] += [p for p in rest if "/" not in p and p not in named and p != "index"]
    trees = (
        "\n".join(["```{toctree}", f":caption: {name}", ":maxdepth: 1", "", *pages, "```", ""])
        for name, pages in groups.items()
    )
    return "\n".join(["# tessera", "", first, "", *trees])


def build(site: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        assemble(source)
        shutil.rmtree(site, ignore_errors=True)
        command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
        doctrees = ["-d", str(Path(folder) / "doctrees")]
        found = subprocess.run(
            [sys.executable, *command, *doctrees, str(source), str(site)], env=os.environ
        )
        if found.returncode:
            raise SystemExit(found.returncode)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    build(target)
    print(f"The documentation: {target / 'index.html'}")
