"""Keys of a plan, with the text that stands under each field in the source.

That text is the only explanation of a key. Commented plans (`comments.py`) and the reference page
(`reference.py`) are made from it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tessera.rounds.plan.plan import Plan
from tessera.rounds.plan.sections import SECTIONS, TablePlan, TaskPlan
from tessera.rounds.plan.toml import TOP_LEVEL

RECORDS: Mapping[str, type[Any]] = {"": Plan, "task": TaskPlan, "table": TablePlan, **SECTIONS}
"""The records behind the sections of a file; the keys before the first section are the plan's."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a section: its type, its default (None if it must be given) and what it means."""

    name: str
    kind: type[Any]
    default: Any
    text: str

    @property
    def comment(self) -> str:
        """The first paragraph of the text, on one line and without the period at its end."""
        return first_paragraph(self.text)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have, if they are named."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        if issubclass(self.kind, Enum):
            return tuple(str(choice.value) for choice in self.kind)
        return ()


@cache
def keys_of(section: str) -> Mapping[str, Key]:
    """The keys of a section, in the order of a file; "" has those before the first section."""
    record = RECORDS[section]
    texts, hints = texts_of(record), get_type_hints(record)
    named: Mapping[str, Field[Any]] = {f.name: f for f in fields(record)}
    if not section:
        named = {name: named[name] for name in TOP_LEVEL}
    if record is TaskPlan:
        named = {"name": named["name"]}  # the options are the task's own
    return {name: Key(name, hints[name], _default(f), texts[name]) for name, f in named.items()}


def comment_of(section: str) -> str:
    """What a section is about, on one line."""
    return first_paragraph(inspect.getdoc(RECORDS[section]) or "")


def texts_of(record: type[Any]) -> Mapping[str, str]:
    """The string under each field of a class, or under each member of an enumeration."""
    (tree,) = ast.parse(inspect.getsource(record)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, after in pairwise(tree.body):
        match line, after:
            case (
                ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]),
                ast.Expr(ast.Constant(str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


def first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


def _default(of: Field[Any]) -> Any:
    return None if of.default is MISSING else of.default
