"""The arrows between the folders, read from the imports, so that nobody has to remember them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import tessera
from tessera.plan import Scheme

SOURCE: Final = Path(__file__).parents[1] / "src" / "tessera"

# From the top of the tree to the bottom. A layer imports itself and those before it.
LAYERS: Final = (
    "ids",
    "errors",
    "crypto",
    "wire",
    "protocols",
    "privacy",
    "data",
    "learning",
    "tasks",
    "plan",
    "rounds",
    "simulation",
    "runs",
    "services",
    "audit",
    "report",
    "api",
    "cli",
    "__main__",
)

# Where fewer arrows are allowed than the order gives.
ONLY: Final = {"protocols": {"ids", "errors", "crypto", "wire"}}
NEVER: Final = {"learning": {"protocols"}}

# Top-level modules outside the package that mark a clock, a socket or a process.
WORLDLY: Final = {
    "asyncio",
    "concurrent",
    "http",
    "multiprocessing",
    "sched",
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "urllib",
}
GUESSABLE: Final = {"random", "numpy.random", "torch.random"}
SERIALISERS: Final = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


@dataclass(frozen=True, slots=True)
class Import:
    """`target` is a dotted name as far as it can be read, and always absolute."""

    target: str
    line: int


def imports(code: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import in `code`, wherever it stands: at the top, in a function, for types only.

    Attributes of an imported module count too, so `np.random` is seen as `numpy.random`.
    """
    tree = ast.parse(code)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, module, is_package)
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{origin}.{alias.name}"
                yield Import(f"{origin}.{alias.name}", node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            first, _, rest = name.partition(".")
            if first in bound:
                yield Import(f"{bound[first]}.{rest}", node.lineno)
        elif isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            called = name.rpartition(".")[2]
            if called in {"import_module", "__import__"} and node.args:
                argument = node.args[0]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(argument.value, node.lineno)


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)) is not None:
        return f"{left}.{node.attr}"
    return None


def within(target: str, names: set[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in names)


def violations(code: str, module: str, *, is_package: bool = False) -> list[str]:
    """What `module` (dotted, under tessera) imports against the rules, one sentence each."""
    found: dict[str, None] = {}  # in order, without repeats
    layer = module.split(".")[1]
    depth = LAYERS.index(layer)
    for item in imports(code, module, is_package=is_package):
        if item.target.startswith("tessera."):
            other = item.target.split(".")[1]
            broken = other in LAYERS and not allowed(layer, other)
            unknown = other not in LAYERS and other != "__version__"
        else:
            outside = item.target
            broken = (
                within(outside, SERIALISERS)
                or (depth < LAYERS.index("simulation") and within(outside, WORLDLY))
                or (depth < LAYERS.index("learning") and within(outside, {"torch"}))
                or (layer in {"crypto", "protocols"} and within(outside, GUESSABLE))
                or (
                    layer in {"crypto", "protocols"}
                    and within(outside, {"os.urandom", "secrets"})
                    and module != "tessera.crypto.entropy"
                )
            )
            unknown = outside == "tessera"
        if broken or unknown:
            found[f"{module}:{item.line} may not import {item.target}"] = None
    return list(found)


def allowed(layer: str, other: str) -> bool:
    if layer == other:
        return True
    if other in NEVER.get(layer, set()):
        return False
    return other in ONLY.get(layer, LAYERS[: LAYERS.index(layer)])


def modules() -> Iterator[tuple[Path, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["tessera", *path.relative_to(SOURCE).with_suffix("").parts]
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_folder_and_file_has_its_place_in_the_tree() -> None:
    strangers = {name.split(".")[1] for _, name in modules() if "." in name} - set(LAYERS)
    assert not strangers, f"say in LAYERS where {sorted(strangers)} stand"


def test_imports_follow_the_arrows() -> None:
    broken = [
        sentence
        for path, name in modules()
        if name != "tessera"
        for sentence in violations(
            path.read_text(encoding="utf-8"), name, is_package=path.name == "__init__.py"
        )
    ]
    assert not broken, "\n".join(broken)


def test_the_package_itself_loads_only_names_and_errors() -> None:
    """Its other names are fetched when they are used."""
    code = "import sys, tessera; print(*(m for m in sys.modules if m.startswith('tessera.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"tessera.ids", "tessera.errors"}
    assert "torch" not in done.stdout


def test_every_public_name_is_there() -> None:
    for name in tessera.__all__:
        assert getattr(tessera, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Plans'"):
        _ = tessera.Plans


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tessera.crypto.ring", "from tessera.protocols import wire"),
        ("tessera.crypto.ring", "import tessera.simulation.simulator"),
        ("tessera.crypto.ring", "from tessera import protocols"),
        ("tessera.crypto.ring", "from ..protocols import wire"),
        ("tessera.crypto.ring", "def late():\n    from tessera.privacy import ledger"),
        ("tessera.crypto.ring", "if TYPE_CHECKING:\n    import tessera.plan"),
        ("tessera.crypto.ring", "import importlib\nimportlib.import_module('tessera.rounds')"),
        ("tessera.protocols.secagg.client", "from tessera.learning import submodel"),
        ("tessera.protocols.secagg.client", "from tessera.privacy import ledger"),
        ("tessera.protocols.secagg.client", "import time"),
        ("tessera.protocols.secagg.client", "from concurrent.futures import Executor"),
        ("tessera.protocols.secagg.client", "import random"),
        ("tessera.protocols.secagg.client", "import os\nkey = os.urandom(32)"),
        ("tessera.crypto.shamir", "import numpy as np\nrng = np.random.default_rng(0)"),
        ("tessera.crypto.shamir", "from numpy.random import default_rng"),
        ("tessera.crypto.shamir", "from numpy import random as r"),
        ("tessera.crypto.shamir", "import secrets"),
        ("tessera.privacy.dp.ledger", "import torch"),
        ("tessera.data.movielens", "from torch.utils import data"),
        ("tessera.rounds.client", "import asyncio"),
        ("tessera.learning.training.local", "from tessera.protocols import secagg"),
        ("tessera.runs.folder", "import pickle"),
        ("tessera.cli.main", "from pickle import loads"),
        ("tessera.simulation.simulator", "from tessera.cli import main"),
        ("tessera.report.page", "from tessera.api import Run"),
        ("tessera.api", "from tessera.cli.export import export"),
        ("tessera.crypto.ring", "from tessera import ConfigError"),
    ],
)
def test_a_planted_violation_is_caught(module: str, line: str) -> None:
    assert violations(line, module)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tessera.protocols.secagg.client", "from tessera.crypto.keys import AgreementKey"),
        ("tessera.protocols.secagg.client", "from tessera.protocols.machine import Outbound"),
        ("tessera.protocols.secagg.client", "from tessera.ids import ClientId"),
        ("tessera.crypto.entropy", "import os\nkey = os.urandom(32)"),
        ("tessera.crypto.ring", "import numpy as np\nzero = np.zeros(3)"),
        ("tessera.learning.training.local", "import torch"),
        ("tessera.rounds.client", "from tessera.learning import local\nimport tessera.protocols"),
        ("tessera.simulation.simulator", "import time"),
        ("tessera.cli.main", "from tessera import __version__"),
    ],
)
def test_what_the_tree_allows_is_not_reported(module: str, line: str) -> None:
    assert violations(line, module) == []


# --- papers ---------------------------------------------------------------------------------------

PAPERS: Final = SOURCE.parents[1] / "papers"
READS_PAPERS: Final = "tessera.cli.reproduce"


def of_papers(code: str, module: str) -> list[str]:
    """What `module` may not import between the package and the papers, which are not installed."""
    if module == READS_PAPERS:
        return []
    barred = {"tessera.cli"} if module.startswith("papers") else {"papers"}
    return [item.target for item in imports(code, module) if within(item.target, barred)]


def test_papers_use_the_package_without_its_commands_and_one_command_uses_them() -> None:
    papers = [(path, f"papers.{path.stem}") for path in sorted(PAPERS.rglob("*.py"))]
    assert len(papers) > 5
    found = {
        name: broken
        for path, name in (*modules(), *papers)
        if (broken := of_papers(path.read_text(encoding="utf-8"), name))
    }
    assert not found


def test_the_command_finds_papers_by_name_only_when_they_are_asked_for() -> None:
    code = (SOURCE / "cli" / "reproduce.py").read_text(encoding="utf-8")
    assert "papers" not in {item.target.partition(".")[0] for item in imports(code, READS_PAPERS)}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("papers.sfsl", "from tessera.cli.format import AsJson"),
        ("papers.sfsl", "def late():\n    import tessera.cli"),
        ("tessera.audit.claims", "from papers.cells import Cell"),
        ("tessera.cli.demo", "import importlib\nimportlib.import_module('papers.show')"),
    ],
)
def test_a_planted_import_of_or_by_papers_is_caught(module: str, line: str) -> None:
    assert of_papers(line, module)
    assert not of_papers("from tessera.report import charts", module)


# --- schemes --------------------------------------------------------------------------------------

ASKED_IN: Final = ("plan/", "rounds/schemes.py")
"""The only places that ask which scheme a plan has."""
NO_SCHEME: Final = {
    "privacy/dp/guarantee.py": {"central"},  # who has to be trusted with an epsilon
}
"""Strings that are spelt like a scheme and mean something else."""


def asked(code: str, meaning_else: Collection[str] = ()) -> list[str]:
    """Where code asks which scheme it is: by a member, by its name, by a property of `Scheme`.

    To write one into a plan is no question: what `scheme=` is given may be named.
    """
    tree = ast.parse(code)
    written = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "scheme"
    }
    members, names = Scheme.__members__, {scheme.value for scheme in Scheme} - set(meaning_else)
    properties = {name for name, value in vars(Scheme).items() if isinstance(value, property)}
    found = []
    for node in ast.walk(tree):
        if id(node) in written:
            continue
        if isinstance(node, ast.Attribute):
            held = (dotted(node.value) or "").rpartition(".")[2]
            of_class = held == "Scheme" and node.attr in members
            if of_class or (held == "scheme" and node.attr in properties):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
            found.append(f"{node.lineno}: {node.value!r}")
    return found


def test_which_scheme_is_asked_in_one_place() -> None:
    found = {
        place: questions
        for path, _ in modules()
        if not (place := path.relative_to(SOURCE).as_posix()).startswith(ASKED_IN)
        if (questions := asked(path.read_text(encoding="utf-8"), NO_SCHEME.get(place, ())))
    }
    assert not found, "ask `rounds/schemes.py` instead"


def test_exceptions_to_that_are_needed() -> None:
    for place in ASKED_IN:
        paths = [
            path for path, _ in modules() if path.relative_to(SOURCE).as_posix().startswith(place)
        ]
        assert any(asked(path.read_text(encoding="utf-8")) for path in paths), place
    for place, words in NO_SCHEME.items():
        assert len(asked((SOURCE / place).read_text(encoding="utf-8"))) == len(words)


@pytest.mark.parametrize(
    "line",
    [
        "if plan.scheme is Scheme.FEDAVG: ...",
        "kinds = (plan.Scheme.CENTRAL,)",
        'if facts["scheme"] == "two-server": ...',
        "if plan.scheme.secure: ...",
        "rows = scheme.by_rows",
        'def privacy(scheme: str = "secure-submodel"): ...',
        'Plan(scheme="fedavg" if central else Scheme.SUBMODEL)',
    ],
)
def test_a_question_about_the_scheme_is_found(line: str) -> None:
    assert asked(line)


@pytest.mark.parametrize(
    "line",
    [
        'Plan(scheme="fedavg", cohort=3)',
        "Plan(scheme=Scheme.FEDAVG, cohort=3)",
        "schemes.of(plan).by_rows",
        "print(plan.scheme.value)",
        'word = "a submodel"',
    ],
)
def test_what_is_no_question_is_not(line: str) -> None:
    assert not asked(line)


# --- commands -------------------------------------------------------------------------------------

SHARED: Final = {"main", "format", "progress", "deployed", "utility"}


def borrowed(code: str, module: str) -> list[str]:
    """Modules of other commands that a command imports; `plan_x` is `plan`'s own."""
    own = module.rpartition(".")[2].partition("_")[0]
    found = {
        item.target.split(".")[2]
        for item in imports(code, module)
        if item.target.startswith("tessera.cli.")
    }
    return sorted(other for other in found - SHARED if not other.startswith(f"{own}_"))


def test_commands_do_not_import_each_other() -> None:
    found = {
        name: others
        for path, name in modules()
        if name.startswith("tessera.cli.") and name != "tessera.cli.main"
        if (others := borrowed(path.read_text(encoding="utf-8"), name))
    }
    assert not found


def test_a_command_has_its_own_submodules_and_what_all_share() -> None:
    assert borrowed("from tessera.cli.plan import share", "tessera.cli.run") == ["plan"]
    assert borrowed("from tessera.cli import compare", "tessera.cli.demo") == ["compare"]
    assert not borrowed("from tessera.cli import run_summary, progress", "tessera.cli.run")


# --- class names ----------------------------------------------------------------------------------

TWICE: Final[dict[str, str]] = {}
"""Class names that exist more than once, each with its reason."""


def class_names(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef):
            yield node.name


def test_a_class_name_exists_once_in_the_whole_tree() -> None:
    places: dict[str, list[str]] = {}
    for path, module in modules():
        for name in class_names(path.read_text(encoding="utf-8")):
            places.setdefault(name, []).append(module)
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert several.keys() == TWICE.keys(), several


def test_classes_are_found_wherever_they_stand() -> None:
    code = "class A:\n    class B: ...\ndef f():\n    class A: ...\n"
    assert sorted(class_names(code)) == ["A", "A", "B"]
