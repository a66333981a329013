"""`prg.Label` is the one list: every derivation takes its label from it, and no label has two uses.

The syntax tree of `src/` is walked. A derivation is a call of `derive`, `secret`, `agree`,
`Stream.of` or `keyed_words`, a tagged hash is `encode_context`, `hashlib` or `hmac` over a text.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tessera.crypto.prg import Label

SRC: Final = Path(__file__).parents[2] / "src" / "tessera"

LABEL_AT: Final = {"derive": 0, "secret": 0, "agree": 1, "of": 1, "keyed_words": 1}
"""Where the label is among the arguments; of `of`, that of `Stream` only."""

HASHES: Final = {"hashlib", "hmac", "blake2b", "blake2s", "sha256", "encode_context"}

BELOW: Final = {"crypto/secret.py"}
"""Where `derive` and `encode_context` themselves are."""

TWO_SIDES: Final = {
    Label.PAIR_MASK: {"protocols/secagg/masking.py", "protocols/secagg/unmask.py"},
    Label.SELF_MASK: {"protocols/secagg/masking.py", "protocols/secagg/unmask.py"},
    # Sealed by the sender, unsealed by the receiver.
    Label.CHANNEL: {"protocols/secagg/states.py", "protocols/secagg/session.py"},
    Label.SERVER_NONCE: {"protocols/two_server/handshake.py"},  # the leader's and the helper's
    # One use in two steps: a secret under the label, then its expansion.
    Label.GRAPH: {"protocols/secagg/server.py", "protocols/secagg/params.py"},
    Label.SHARE_COEFFICIENTS: {"protocols/secagg/states.py", "crypto/shamir.py"},
    Label.RETRIEVAL_POINTS: {"protocols/two_server/read/client.py"},
    Label.ROUNDING: {
        "rounds/clipped_vector.py",
        "rounds/encode.py",
        "rounds/epochs/client.py",
        "rounds/training_client.py",
    },
    # Of a party's root: a client's, a server's; then the words of each part.
    Label.SUM_NOISE: {
        "protocols/two_server/write/sums.py",
        "rounds/clipped_vector.py",
        "rounds/epochs/server.py",
        "rounds/noise.py",
        "rounds/noise_chain.py",
    },
    Label.KEY_PERIOD_ROOT: {"protocols/two_server/write/client.py", "rounds/two_server/ideal.py"},
    Label.UNION_COINS: {
        "rounds/client.py",
        "rounds/epochs/client.py",
        "rounds/messages.py",
        "rounds/two_server/client.py",
    },
    Label.DECOYS: {"rounds/select.py", "rounds/two_server/client.py"},
    Label.MEASUREMENT: {"simulation/calibration.py"},  # keys that protect nothing
}
"""Labels that more than one function uses, because a derivation has two sides or two steps."""

REPLAYS: Final = ("audit/",)
"""Attacks repeat the derivations of the party whose part they play."""


class Walker(ast.NodeVisitor):
    """Uses of labels in one module, and derivations without one."""

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[tuple[str, str]] = []  # (member, where)
        self.faults: list[str] = []
        self._functions: list[ast.FunctionDef] = []
        self._class = ""
        self._texts = {
            target.id
            for node in tree.body
            for target in _targets(node)
            if isinstance(target, ast.Name) and any(_texts(getattr(node, "value", None)))
        }
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._class = node.name
        self.generic_visit(node)
        self._class = ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_label(node):
            self.uses.append((node.attr, self._where))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, owner = _called(node.func)
        at = LABEL_AT.get(name)
        if at is not None and (name != "of" or owner == "Stream") and len(node.args) > at:
            if owner is not None or name == "keyed_words":
                self._check_label(node, node.args[at])
        if name in HASHES or owner in HASHES:
            self._check_hashed(node, name)
        self.generic_visit(node)

    @property
    def _where(self) -> str:
        return ".".join([self._class, *(f.name for f in self._functions[:1])])

    def _check_label(self, node: ast.Call, label: ast.expr) -> None:
        if _is_label(label) or (isinstance(label, ast.Name) and label.id in self._parameters()):
            return
        self.faults.append(f"line {node.lineno}: {ast.unparse(label)} is not a Label")

    def _check_hashed(self, node: ast.Call, name: str) -> None:
        given = node.args[:1] if name == "encode_context" else node.args
        if name == "encode_context" and given and isinstance(given[0], ast.Starred):
            return
        for argument in given:
            for text in _texts(argument):
                self.faults.append(f"line {node.lineno}: {text!r} is hashed and is not a Label")
            if isinstance(argument, ast.Name) and argument.id in self._texts:
                self.faults.append(f"line {node.lineno}: {argument.id} is not a Label")

    def _parameters(self) -> set[str]:
        return {a.arg for f in self._functions for a in (*f.args.args, *f.args.kwonlyargs)}


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _is_label(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    return (isinstance(owner, ast.Name) and owner.id == "Label") or (
        isinstance(owner, ast.Attribute) and owner.attr == "Label"
    )


def _called(function: ast.expr) -> tuple[str, str | None]:
    """(name, what it is called on): ("of", "Stream") of `prg.Stream.of`."""
    if isinstance(function, ast.Name):
        return function.id, None
    if not isinstance(function, ast.Attribute):
        return "", None
    owner = function.value
    last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return function.attr, last


def _texts(node: ast.AST | None) -> Iterator[str]:
    """Words in an expression that are hashed with it; not those that a method takes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        if sum(c.isalpha() for c in text) > 3 and text != "sha256":
            yield text
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield from _texts(node.func.value)  # "text".encode(), but not x.astype("<u8")
    elif node is not None:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def modules() -> dict[str, Walker]:
    return {
        str(path.relative_to(SRC)): Walker(ast.parse(path.read_text()))
        for path in sorted(SRC.rglob("*.py"))
    }


def test_every_derivation_has_a_label_of_the_list() -> None:
    faults = [
        f"{name}, {fault}"
        for name, found in modules().items()
        for fault in found.faults
        if name not in BELOW
    ]
    assert not faults, "\n".join(faults)


def test_no_label_has_two_uses() -> None:
    places: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, found in modules().items():
        for member, where in found.uses:
            if not name.startswith(REPLAYS):
                places[member][name].add(where)
    used = {member for found in modules().values() for member, _ in found.uses}
    unused = [label.name for label in Label if label.name not in used]
    assert not unused, f"labels that nothing uses: {unused}"
    for member, by_module in places.items():
        assert member in Label.__members__, member
        listed = TWO_SIDES.get(Label[member])
        if listed is not None:
            assert by_module.keys() == listed, f"{member}: {dict(by_module)}"
        else:
            assert sum(map(len, by_module.values())) == 1, f"{member}: {dict(by_module)}"


def test_labels_are_distinct() -> None:
    assert len(Label) == len(Label.__members__), "two members with one text"


@pytest.mark.parametrize(
    "code",
    [
        'def f(s): return s.derive("mine", 1)',
        'def f(e): return e.secret("mine")',
        'def f(k, p): return k.agree(p, "mine")',
        'def f(s): return Stream.of(s, "mine")',
        'OWN = "mine"\ndef f(s): return Stream.of(s, OWN)',
        'def f(x): return hashlib.sha256(b"mine" + x)',
        'OWN = b"mine"\ndef f(x): return hmac.digest(OWN, x, "sha256")',
        'def f(x): return encode_context("mine", x)',
    ],
)
def test_a_label_outside_the_list_is_found(code: str) -> None:
    assert Walker(ast.parse(code)).faults


@pytest.mark.parametrize(
    "code",
    [
        "def f(s): return s.derive(Label.NONCE, 'dense')",
        "def f(s, label): return Stream.of(s, label, 'rows')",
        "def f(x): return hashlib.sha256(x.astype('<u8').tobytes())",
        "def f(x): return encode_context(Label.NONCE, 'all', x)",
        "def f(x): return hmac.digest(x, Label.NONCE.encode(), 'sha256')",
    ],
)
def test_what_is_labelled_passes(code: str) -> None:
    assert not Walker(ast.parse(code)).faults
