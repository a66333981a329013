"""The frame of a page: one HTML file with nothing to fetch, a head, sections with links, a foot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera import __version__
from tessera.report import charts, style
from tessera.report.markup import Content, Markup, listing, tag

GENERATOR: Final = "tessera report"

Section = tuple[str, str, Sequence[Content]]
"""Its key in links, its heading, and what is in it."""


def document(
    title: str, *, brand: str, top: Sequence[Content], sections: Sequence[Section], foot: str
) -> str:
    """The whole file; `top` stands between the heading and the links to the sections."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title}: {brand}"),
        tag("style", Markup(style.sheet())),
    )
    links = (tag("a", name, href=f"#{key}") for key, name, _ in sections)
    header = tag(
        "header",
        tag("p", brand, class_="brand"),
        tag("h1", title),
        *top,
        tag("nav", listing(links), aria_label="On this page"),
    )
    main = tag(
        "main",
        *(
            tag(
                "section",
                tag("h2", name, id=f"{key}-heading"),
                *content,
                id=key,
                aria_labelledby=f"{key}-heading",
            )
            for key, name, content in sections
        ),
    )
    body = tag("body", charts.fills(), header, main, tag("footer", tag("p", foot)))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
