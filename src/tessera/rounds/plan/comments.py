"""A plan as TOML with comments, for the commands that write one to be read and changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any, Final

from tessera.rounds.plan.keys import comment_of, first_paragraph, keys_of, texts_of
from tessera.rounds.plan.scheme import Scheme
from tessera.rounds.plan.toml import toml_value

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
