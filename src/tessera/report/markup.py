"""HTML and SVG as nested calls, in which plain text is always escaped.

`tag("p", "1 < 2", class_="note")` is `<p class="note">1 &lt; 2</p>`. Only what is `Markup` already
goes in as it is, so a federation's name cannot become a script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from tessera.report.numbers import NOT_APPLICABLE

NBSP: Final = "\u00a0"
UNITS: Final = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|ms|s|min|h)\b)")
"""A number and its unit belong on one line."""
VOID: Final = frozenset({"meta", "br", "hr"})
"""HTML elements without an end tag."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | Markup | None


def text(content: Content) -> Markup:
    if content is None:
        return Markup()
    if isinstance(content, Markup):
        return content
    # Control characters have no meaning on a page, and NUL is an error in HTML.
    shown = "".join(c for c in content if c >= " " or c in "\n\t")
    return Markup(escape(UNITS.sub(NBSP, shown)))


def join(parts: Iterable[Content], between: str = "") -> Markup:
    return Markup(text(between).join(text(part) for part in parts))


def tag(name: str, /, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """An element; `class_` is written as class and `data_label` as data-label, None is left out."""
    written = "".join(
        f" {key}" if value is True else f' {key}="{number(value)}"'
        for key, value in ((k.rstrip("_").replace("_", "-"), v) for k, v in attributes.items())
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def number(value: str | float) -> str:
    """An attribute's value; coordinates to a tenth of a pixel, which is finer than a screen."""
    if isinstance(value, str):
        return text(value)
    return f"{value:.1f}".removesuffix(".0")


def table(
    caption: str,
    head: Sequence[str],
    body: Iterable[Sequence[Content]],
    *,
    class_: str = "",
    numeric: bool = True,
) -> Markup:
    """A table with a caption; the first cell of a row is its heading.

    On a narrow screen the class "cards" shows each row as a card, without what is "n/a". Roles
    are spelt out because a browser forgets that a table is one when its `display` changes.
    """
    rows = [
        tag(
            "tr",
            tag("th", cells[0], scope="row", role="rowheader"),
            *(
                tag(
                    "td",
                    tag("span", cell),
                    role="cell",
                    data_label=name,
                    class_="none" if cell == NOT_APPLICABLE else None,
                )
                for name, cell in zip(head[1:], cells[1:], strict=True)
            ),
            role="row",
        )
        for cells in body
    ]
    return tag(
        "table",
        tag("caption", caption),
        tag(
            "thead",
            tag(
                "tr",
                *(tag("th", name, scope="col", role="columnheader") for name in head),
                role="row",
            ),
            role="rowgroup",
        ),
        tag("tbody", *rows, role="rowgroup"),
        class_=" ".join(filter(None, (class_, "numbers" if numeric else ""))) or None,
        role="table",
    )


def listing(items: Iterable[Content], class_: str | None = None) -> Markup:
    return tag("ul", *(tag("li", item) for item in items), class_=class_)
