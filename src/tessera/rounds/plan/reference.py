"""The reference of all keys of a plan, as Markdown; `docs/plan.md` is this page."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tessera.rounds.plan.keys import RECORDS, Key, keys_of, texts_of
from tessera.rounds.plan.scheme import Scheme
from tessera.rounds.plan.toml import toml_value

HEAD: Final = """\
# The keys of a plan

A plan is everything a federation agrees on beforehand: one TOML file, or the class `Plan` with the
same names. A key that is not listed here is refused. `tessera init TASK` writes a plan with
comments, `tessera plan --example` one without a task, and `tessera plan FILE` checks one and
predicts what its rounds cost.

This page is written by `scripts/write_plan_reference.py` from the text under each field in the
source: `src/tessera/rounds/plan/sections.py` and `dp.py`, for `[training]` and `[server]` in
`src/tessera/learning/`, for options of `[task]` in `src/tessera/tasks/options.py`. Change it there.
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
