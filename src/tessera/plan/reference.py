"""A plan as TOML with comments, for the commands that write one to be read and changed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from itertools import pairwise
from textwrap import wrap
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from tessera.plan.plan import Plan
from tessera.plan.scheme import Scheme
from tessera.plan.sections import (
    SECTIONS,
    GroupsPlan,
    ModelPlan,
    PrivacyPlan,
    SecurityPlan,
    TablePlan,
    TaskPlan,
    TwoServerPlan,
    UnionPlan,
    UpdatePlan,
)
from tessera.plan.toml import TOP_LEVEL, toml_value

# --- keys -----------------------------------------------------------------------------------------
#
# Keys of a plan, with the text that stands under each field in the source.
#
# That text is the only explanation of a key. Commented plans (`comments.py`) and the reference
# page (`reference.py`) are made from it.


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


# --- comments -------------------------------------------------------------------------------------

COLUMN: Final = 26
"""Where comments begin."""
WIDTH: Final = 100


def top_level(**values: Any) -> str:
    """The keys before the first section; above the scheme stands what there is to choose from."""
    texts = texts_of(Scheme)
    schemes = [f"# {s.value:<17} {texts[s.name].removesuffix('.')}" for s in Scheme]
    lines = []
    for name, value in values.items():
        if name == "scheme":
            lines += [*schemes, f"scheme = {toml_value(value)}"]
        else:
            lines += commented(name, value, keys_of("")[name].comment)
    return "\n".join(lines) + "\n"


def section(
    name: str,
    values: Any,
    keys: Iterable[str] | None = None,
    *,
    notes: Mapping[str, Iterable[str]] | None = None,
) -> str:
    """A section with the values of its record, all keys or some; `notes` are added to comments."""
    known, head = keys_of(name), "[[table]]" if name == "table" else f"[{name}]"
    lines = commented_head(head, comment_of(name))
    for key in known if keys is None else keys:
        lines += commented(
            key, getattr(values, key), known[key].comment, (notes or {}).get(key, ())
        )
    return "\n".join(lines) + "\n"


def task_section(name: str, options: Mapping[str, Any], explained: Mapping[str, str]) -> str:
    """[task] with its options, which the task explains."""
    lines = commented_head("[task]", comment_of("task"))
    lines += commented("name", name, keys_of("task")["name"].comment)
    for option, value in options.items():
        lines += commented(option, value, first_paragraph(explained[option]))
    return "\n".join(lines) + "\n"


def commented(key: str, value: Any, comment: str, notes: Iterable[str] = ()) -> list[str]:
    """A key and its value, with the comment beside it and, if it is long, below."""
    return commented_head(f"{key} = {toml_value(value)}", comment, notes)


def commented_head(text: str, comment: str, notes: Iterable[str] = ()) -> list[str]:
    beside = [*wrap(comment, WIDTH - COLUMN - 2), *notes]
    if not beside:
        return [text]
    head = text if len(text) < COLUMN else f"{text} "
    return [
        f"{head:<{COLUMN}}# {beside[0]}",
        *(f"{'':<{COLUMN}}# {line}" for line in beside[1:]),
    ]


# --- example --------------------------------------------------------------------------------------
#
# A small commented plan for each scheme, which can be run as it is.


EXAMPLE_HEAD: Final = """\
# A plan: everything a federation agrees on beforehand. A misspelt key is refused.
# `tessera plan THIS` checks it and says what its rounds cost; `tessera run THIS` runs them.
# All keys are explained in docs/plan.md.
"""

MESSAGES: Final = "everybody's messages are as long as this asks for:"
"""Why a cap that is too high costs bytes between two servers."""


def example_plan(scheme: Scheme) -> str:
    parts = [
        EXAMPLE_HEAD,
        top_level(federation="example", scheme=scheme, cohort=20, seed=1),
        section("model", ModelPlan(dense=500)),
        section("table", TablePlan(name="items", rows=5000, width=8), ("name", "rows", "width")),
        section("table", TablePlan(name="categories", rows=100, width=8, derived_from="items")),
        section("update", UpdatePlan(clip=1.0), ("clip", "levels", "max_count")),
    ]
    keys = ("threat", "graph", "corrupt", "dropout") if scheme.secure else ("dropout",)
    parts.append(section("security", SecurityPlan(), keys))
    if scheme is Scheme.SECURE_SUBMODEL:
        parts.append(section("privacy", PrivacyPlan(), ("level", "decoys", "period_rounds")))
        parts.append(section("groups", GroupsPlan(), ("size", "age_weight", "period")))
        parts.append(section("union", UnionPlan(max_rows=60), ("max_rows", "encoding")))
    if scheme is Scheme.TWO_SERVER:
        notes = {"max_rows": (MESSAGES, "no more than clients hold")}
        parts.append(section("union", UnionPlan(max_rows=60), ("max_rows",), notes=notes))
        parts.append(section("two_server", TwoServerPlan()))
    return "\n".join(parts)


# --- reference ------------------------------------------------------------------------------------
#
# The reference of all keys of a plan, as Markdown; `docs/plan.md` is this page.


HEAD: Final = """\
# The keys of a plan

A plan is everything a federation agrees on beforehand: one TOML file, or the class `Plan` with the
same names. A key that is not listed here is refused. `tessera init TASK` writes a plan with
comments, `tessera plan --example` one without a task, and `tessera plan FILE` checks one and
predicts what its rounds cost.

This page is written by `scripts/write_plan_reference.py` from the text under each field in the
source: `src/tessera/plan/sections.py` and `dp.py`, for `[training]` and `[server]` in
`src/tessera/learning/`, for options of `[task]` in `src/tessera/tasks/kinds.py`. Change it there.
"""

KINDS: Final = {int: "whole number", float: "number", str: "text", bool: "true or false"}

TaskOptions = Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]]
"""For each task its options with their defaults, and what they mean."""


def page(tasks: TaskOptions) -> str:
    """The whole page."""
    return "\n".join([HEAD, *_top_level(), *_sections(), *_tasks(tasks)])


def _top_level() -> Iterator[str]:
    yield "## Before the first section\n"
    yield _table(keys_of("").values())
    texts = texts_of(Scheme)
    yield "| scheme | |\n|---|---|"
    yield from (f"| `{scheme.value}` | {texts[scheme.name]} |" for scheme in Scheme)
    yield ""


def _sections() -> Iterator[str]:
    for name, record in RECORDS.items():
        if not name:
            continue
        yield f"## [[{name}]]\n" if name == "table" else f"## [{name}]\n"
        yield _prose(inspect.getdoc(record) or "") + "\n"
        yield _table(keys_of(name).values())


def _tasks(tasks: TaskOptions) -> Iterator[str]:
    """One line for what an option means, with its default in each task that has it."""
    yield "## Options of the tasks\n"
    yield "They stand in `[task]` beside the name.\n"
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for task, (options, explained) in tasks.items():
        for option, value in options.items():
            defaults = found.setdefault((option, explained[option]), {})
            defaults.setdefault(toml_value(value), []).append(task)
    yield "| option | default, and tasks that have it | |\n|---|---|---|"
    for (option, text), by_default in found.items():
        cell = "; ".join(f"`{value}`: {', '.join(of)}" for value, of in by_default.items())
        yield f"| `{option}` | {cell} | {text} |"
    yield ""


def _table(keys: Iterable[Key]) -> str:
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    for key in keys:
        default = "" if key.default is None else f"`{toml_value(key.default)}`"
        lines.append(f"| `{key.name}` | {_values(key)} | {default} | {_prose(key.text)} |")
    return "\n".join(lines) + "\n"


def _values(key: Key) -> str:
    return ", ".join(f'`"{choice}"`' for choice in key.choices) or KINDS[key.kind]


def _prose(text: str) -> str:
    return " ".join(text.split())
