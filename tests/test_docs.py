"""The documents say what the code does: diagrams, byte counts, degrees, and every name in them."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest

import harness
from tessera import wire
from tessera.crypto.ring import Ring
from tessera.ids import SERVER
from tessera.protocols.secagg.messages import FROM_CLIENT, FROM_SERVER
from tessera.protocols.secagg.params import Threat, sparse_topology
from tessera.simulation.views import ViewEntry
from tessera.wire.index_set import IndexSet

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
SECAGG: Final = DOCS / "protocols" / "secagg.md"


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """(header, rows) of every table; cells without their spaces."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text + "\n", flags=re.MULTILINE):
        header, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        yield header, rows


def table_with(text: str, column: str) -> tuple[list[str], list[list[str]]]:
    return next((header, rows) for header, rows in tables(text) if column in header)


# -- the diagrams


@cache
def drawing(name: str = "draw_protocol") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagrams_on_the_page_are_those_of_the_transition_tables() -> None:
    assert drawing().main(["--check"]) == 0


def test_the_walks_of_a_round_are_those_of_the_table_of_schemes() -> None:
    assert drawing("draw_rounds").main(["--check"]) == 0


def test_a_walk_that_differs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = drawing("draw_rounds")
    drifted, text = tmp_path / "README.md", module.PAGE.read_text(encoding="utf-8")
    drifted.write_text(text.replace("clients->>server: MaskedInput\n", "", 1), encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", drifted)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.main(["--check"]) == 1
    assert module.main(["--write"]) == 0
    assert drifted.read_text(encoding="utf-8") == text


def test_every_message_of_a_walk_is_a_step_of_the_role_that_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = drawing("draw_rounds")
    plan = next(iter(module.plans().values()))
    assert not module.Walk(plan).unlisted()
    monkeypatch.setattr(module, "COORDINATORS", ())
    assert module.Walk(plan).unlisted()


def test_a_diagram_that_differs_from_the_tables_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drifted = tmp_path / "secagg.md"
    text = SECAGG.read_text(encoding="utf-8")
    drifted.write_text(text.replace("Resting --> Ready", "Resting --> Finished"), encoding="utf-8")
    tables = SECAGG.with_name("two-servers.md").read_text(encoding="utf-8")
    (tmp_path / "two-servers.md").write_text(tables, encoding="utf-8")
    groups = SECAGG.with_name("epochs.md").read_text(encoding="utf-8")
    (tmp_path / "epochs.md").write_text(groups, encoding="utf-8")
    monkeypatch.setattr(drawing(), "PAGES", tmp_path)
    monkeypatch.setattr(drawing(), "ROOT", tmp_path)
    assert drawing().main(["--check"]) == 1
    assert drawing().main(["--write"]) == 0
    assert drifted.read_text(encoding="utf-8") == text
    (tmp_path / "two-servers.md").write_text(tables.replace("`ListFixed`", "`Sent`"))
    assert drawing().main(["--check"]) == 1


# -- the table of messages


def size_of(codec: wire.Codec, value: Any) -> int:
    out = bytearray()
    codec.write(out, value)
    return len(out)


def quantities(message: Any) -> dict[str, Any]:
    """What the page's formulas call the parts of a message."""
    kind = type(message).__name__
    if kind in ("Advert", "Roster"):
        one = message.members[0] if kind == "Roster" else message
        members = len(message.members) if kind == "Roster" else 1
        return {"S": len(one.stages), "sig": len(one.signature), "n": members}
    if kind in ("ShareBoxes", "ForwardedShares"):
        boxes = message.boxes.values()
        sharers = getattr(message, "sharers", None)
        return {"S": len(next(iter(boxes))), "h": len(boxes), "sharers": sharers}
    if kind == "RevealedSet":
        return {"q": message.quorum}
    if kind == "MaskedInput":
        return {"D": len(message.dense)}
    if kind == "SurvivorList":
        return {"survivors": message.survivors}
    if kind == "ConsistencyProof":
        return {"m": len(message.endorsements)}
    if kind == "RevealedShares":
        keys = [len(part) for part in message.row_keys.values()]
        return {"a": len(message.self_masks), "g": len(message.mask_keys), "row_keys": keys}
    return {}


def table_quantities(part: Any) -> dict[str, Any]:
    if isinstance(part, bytes):
        return {"B": len(part)}
    if hasattr(part, "shared"):
        sets: list[list[int]] = []
        numbers = []
        for rows in (part.shared[c].tolist() for c in sorted(part.shared)):
            if rows not in sets:
                sets.append(rows)
            numbers.append(sets.index(rows))
        arrays = [np.array(rows, dtype=np.uint64) for rows in sets]
        return {"included": part.included, "numbers": numbers, "sets": arrays}
    return {"rows": part.rows}


def evaluated(formula: str, **names: Any) -> int:
    functions = {
        "v": lambda number: size_of(wire.VARINT, number),
        "I": lambda indices: size_of(IndexSet(1 << 20), indices),
        "len": len,
        "sum": sum,
    }
    # One dictionary for both scopes: a generator in a formula sees globals only.
    scope = {"__builtins__": {}, **functions, **names}
    return int(eval(formula, scope))


def messages_of_a_round(threat: Threat) -> dict[str, list[ViewEntry]]:
    """Every message of a round with dropouts, a dense and a row-wise stage, by kind."""
    stages = (harness.dense_stage(length=200), harness.row_stage(Ring(22), dense=9, tables=(0, 4)))
    cohort = harness.Cohort.of(harness.params(7, *stages, threat=threat), universe=300)
    last = cohort.clients[-1]
    ran = harness.run(cohort, harness.drops([last], "collect", stage=1))
    assert len(ran.sums) == len(stages)
    found: dict[str, list[ViewEntry]] = {}
    for seen in ran.views.by_party[SERVER]:
        found.setdefault(seen.kind, []).append(seen)
    return found


@pytest.mark.parametrize("threat", Threat)
def test_every_message_has_the_length_that_the_page_states(threat: Threat) -> None:
    _, rows = table_with(SECAGG.read_text(encoding="utf-8"), "message")
    stated = {kind.strip("`"): (a.strip("`"), b.strip("`")) for _, _, kind, a, b in rows}
    assert stated.keys() == {kind.__name__ for kind in (*FROM_CLIENT, *FROM_SERVER)}
    for kind, seen in messages_of_a_round(threat).items():
        whole, for_every_table = stated[kind]
        for one in seen:
            message = wire.decode(one.data)
            due = evaluated(whole, **quantities(message))
            for part in getattr(message, "tables", ()):
                due += evaluated(for_every_table, **table_quantities(part))
            assert len(one.data) == due, kind


# -- the table of degrees


def test_the_table_of_degrees_is_what_the_code_computes() -> None:
    header, rows = table_with(SECAGG.read_text(encoding="utf-8"), "γ = 0, δ = 0.05")
    shares = [tuple(map(float, re.findall(r"= ([0-9.]+)", cell))) for cell in header[1:]]
    assert len(rows) == 6
    for clients, *cells in rows:
        for (corrupt, dropout), cell in zip(shares, cells, strict=True):
            n = int(clients)
            found = sparse_topology(n, corrupt=ceil(corrupt * n), dropout_share=dropout)
            stated = "complete" if found is None else f"{found.degree}, {found.threshold}"
            assert stated == cell, (clients, corrupt, dropout)


# -- names in backticks

FOLDERS: Final = (ROOT, ROOT / "src", ROOT / "src" / "tessera")
OUR_TOP_FOLDERS: Final = frozenset(
    child.name for folder in FOLDERS for child in folder.iterdir() if child.is_dir()
)
PATH: Final = re.compile(r"(?P<top>[a-z_]+)/[\w/.-]*")
CLASS: Final = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
NAME: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(.*\))?")
FILE: Final = re.compile(r"\.(?:c|csv|dat|html|json|jsonl|md|toml|txt)$")
NOT_OURS: Final = frozenset({"None", "True", "False"})


def quoted(text: str) -> list[str]:
    """What stands between single backticks, outside code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


NAMED: Final = ("id", "arg", "name")  # where a node of the syntax tree keeps its name


@cache
def defined() -> dict[str, set[str]]:
    """Every class of ours with its attributes; every module with its names; under "": all names."""
    found: dict[str, set[str]] = {"": set()}
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own, is_package = set(names_in(tree.body)), path.stem == "__init__"
        if is_package:  # what it has from its modules is its own
            own |= {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
        found.setdefault(path.parent.name if is_package else path.stem, set()).update(own)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(names_in(node.body))
                found[node.name] |= {
                    name
                    for base in node.bases
                    if isinstance(base, ast.Name)
                    for name in found.get(base.id, ())
                }
            if isinstance(node, ast.Name | ast.arg | ast.keyword | ast.FunctionDef | ast.ClassDef):
                found[""].add(next(str(v) for k, v in ast.iter_fields(node) if k in NAMED))
            elif isinstance(node, ast.Attribute):
                found[""].add(node.attr)
    return found


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def is_known(token: str) -> bool:
    """Whether a quoted token is none of ours, or one that exists."""
    path = PATH.fullmatch(token)
    if path is not None and path["top"] in OUR_TOP_FOLDERS:
        return any((folder / token).exists() for folder in FOLDERS)
    if re.fullmatch(r"\w+\.py", token):
        return any((ROOT / "src").rglob(token)) or any((ROOT / "tests").rglob(token))
    if not NAME.fullmatch(token) or token in NOT_OURS or FILE.search(token):
        return True
    name = token.partition("(")[0]
    if name.startswith("tessera."):
        return module_exists(name)
    owner, dot, attribute = name.partition(".")
    if dot:
        ours = defined()
        return owner not in ours or attribute.partition(".")[0] in ours[owner]
    if CLASS.fullmatch(name) or "_" in name:
        return name in defined()[""]
    return True


def module_exists(name: str) -> bool:
    """`tessera.a.b`, or `tessera.a.b.thing` for a name in that module or package."""
    *parents, last = name.split(".")
    folder = (ROOT / "src").joinpath(*parents)
    if (folder / last).is_dir() or (folder / f"{last}.py").is_file():
        return True
    is_module = folder.is_dir() or folder.with_suffix(".py").is_file()
    return is_module and last in defined().get(parents[-1], ())


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_names_of_ours_in_backticks_exist(page: Path) -> None:
    unknown = [token for token in quoted(page.read_text(encoding="utf-8")) if not is_known(token)]
    assert not unknown


@pytest.mark.parametrize(
    "token",
    [
        "protocols/secagg/clients.py",
        "tests/protocols/secagg/test_nothing.py",
        "tessera.protocols.secagg.clients",
        "tessera.wire.decoded",
        "AwaitingRoster",
        "Session.mask_keys(stage)",
        "wire.decoded",
        "clients.py",
        "min_groups",
    ],
)
def test_a_name_that_does_not_exist_would_be_seen(token: str) -> None:
    assert not is_known(token)


@pytest.mark.parametrize(
    "token",
    [
        "protocols/secagg/",
        "src/tessera/errors.py",
        "tessera.wire.decode",
        "AwaitingShares",
        "Session.mask_key(stage)",
        "wire.decode",
        "errors.py",
        "min_group",
        "make demo",
        "None",
    ],
)
def test_a_name_that_exists_is_known(token: str) -> None:
    assert is_known(token)


# -- the glossary


def test_every_place_that_the_glossary_names_is_there() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    places = {
        place
        for header, rows in tables(text)
        if header[-1] == "in the code"
        for row in rows
        for place in re.findall(r"`([^`]+)`", row[-1])
    }
    assert len(places) > 30
    package = ROOT / "src" / "tessera"
    missing = sorted(
        place
        for place in places
        if not ((ROOT if place.startswith("papers/") else package) / place).exists()
    )
    assert not missing


def test_every_term_of_the_glossary_stands_once() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = [row[0] for header, rows in tables(text) if header[0] == "term" for row in rows]
    assert len(terms) == len(set(terms))
