"""How a privacy statement looks: one sheet of A4, a screen of any width, or 80 columns of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from tessera.errors import __version__
from tessera.report.document import DARK, GENERATOR, LIGHT
from tessera.report.markup import Content, Markup, listing, tag
from tessera.report.statement import MEASURED, Statement, StatementLine, Words, text_of

BRAND: Final = "Privacy statement"
SIGNED: Final = ("Name and function", "Place and date", "Signature")
NOTHING_TYPED: Final = (
    "Every figure on this page was read from the plan, the ledger or an audit of the run"
)
NOT_COVERED: Final = "Not covered"
ATTACKED: Final = "Attacked"
HEAD: Final = ("attack", "measured", "claimed", "outcome")


def origin(found: Statement) -> str:
    """Where the figures of the page are from."""
    other = any(figure.source == MEASURED for figure in found.figures)
    return f"{NOTHING_TYPED}{', but for those that were measured elsewhere' if other else ''}."


# --- a page ---------------------------------------------------------------------------------------

STYLE: Final = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.5 -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 2.6rem 1.5rem 3rem; overflow-wrap: anywhere; }
p, ul, dl, dd, h1 { margin: 0; }
ul { padding-left: 1.05rem; }
.brand { color: var(--soft); font-size: .85rem; letter-spacing: .08em; text-transform: uppercase; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: .2rem 0 .3rem; }
.about { color: var(--soft); font-size: .92rem; margin-bottom: 1.2rem; }
.headline { border-left: .45rem solid var(--accent); background: var(--panel); border-radius: 4px;
  padding: .9rem 1.1rem; margin-bottom: 1.2rem; }
.headline b { display: block; font-size: 1.5rem; line-height: 1.25; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
.headline span { display: block; margin-top: .3rem; font-size: .95rem; color: var(--soft); }
.banner { border: 2px solid var(--alarm); border-left-width: .45rem; border-radius: 4px;
  background: var(--alarm-ground); color: var(--alarm); font-weight: 600; padding: .6rem 1rem;
  margin-bottom: 1rem; }
dl { display: grid; grid-template-columns: 11rem 1fr; }
dl > * { border-top: 1px solid var(--rule); padding: .5rem 0; }
dt { font-weight: 600; padding-right: 1rem; }
li { margin-bottom: .15rem; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); white-space: nowrap; font-size: .84rem;
  border-bottom: 1px solid var(--rule); }
tbody th { font-weight: 400; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
.broken { color: var(--alarm); font-weight: 600; }
.sign { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1.6rem; margin-top: 1rem;
  padding-top: 3.4rem; border-top: 1px solid var(--rule); break-inside: avoid; }
.sign p { border-top: 1px solid var(--ink); padding-top: .3rem; font-size: .85rem;
  color: var(--soft); }
.foot { color: var(--soft); font-size: .82rem; margin-top: 1.1rem; }
@media screen and (max-width: 40rem) {
  main { padding: 1.4rem 1rem 2rem; }
  h1 { font-size: 1.5rem; }
  .headline b { font-size: 1.25rem; }
  dl { grid-template-columns: 1fr; }
  dt { padding-bottom: 0; }
  dd { border-top: 0; padding-top: .15rem; }
  .sign { grid-template-columns: 1fr; gap: 3rem; }
  thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  table, tbody, tr, th, td { display: block; }
  tr { padding: .4rem 0; border-top: 1px solid var(--grid); }
  tbody th { font-weight: 600; padding: 0; }
  td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0;
    white-space: normal; text-align: right; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; flex: none; }
}
@page { size: A4; margin: 13mm 15mm; }
@media print {
  html { font-size: 9.2pt; }
  body { line-height: 1.38; }
  main { max-width: none; padding: 0; min-height: 268mm; display: flex; flex-direction: column; }
  h1 { font-size: 17pt; }
  .about { margin-bottom: .8rem; }
  .headline { margin-bottom: .8rem; padding: .6rem .9rem; }
  .headline b { font-size: 15pt; }
  dl > * { padding: .32rem 0; }
  th, td { padding-top: .1rem; padding-bottom: .1rem; }
  .sign { padding-top: 3rem; margin-top: auto; border-top: 0; }
  .foot { margin-top: .7rem; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def html(found: Statement) -> str:
    """The whole file, with nothing to fetch. Dark ground is for screens only."""
    style = (
        f":root {{ color-scheme: light dark; {LIGHT} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n{STYLE}"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{found.title}: {BRAND}"),
        tag("style", Markup(style)),
    )
    attacked = tag("dd", text_of(found.attacked), attacks_table(found))
    main = tag(
        "main",
        tag("p", BRAND, class_="brand"),
        tag("h1", found.title),
        tag("p", text_of(found.about), class_="about"),
        *(tag("p", text_of(each), class_="banner") for each in found.warnings),
        tag(
            "p",
            tag("b", text_of(found.headline)),
            tag("span", text_of(found.under)),
            class_="headline",
        ),
        tag(
            "dl",
            *(part for line in found.lines for part in described(line)),
            tag("dt", ATTACKED),
            attacked,
            tag("dt", NOT_COVERED),
            tag("dd", listing(text_of(each) for each in found.left_out)),
        ),
        tag("div", *(tag("p", what) for what in SIGNED), class_="sign"),
        tag("p", origin(found), class_="foot"),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', main), lang='en')}\n"


def described(line: StatementLine) -> tuple[Content, Content]:
    content: Content = capital(text_of(line.text))
    if line.points:
        content = listing(map(text_of, line.points))
    return tag("dt", line.label), tag("dd", content)


def attacks_table(found: Statement) -> Markup | None:
    if not found.attacks:
        return None
    rows = [
        tag(
            "tr",
            tag("th", text_of(each.name), scope="row"),
            tag("td", text_of(each.measured), data_label=HEAD[1]),
            tag("td", text_of(each.claimed), data_label=HEAD[2]),
            tag(
                "td",
                each.verdict,
                data_label=HEAD[3],
                class_="broken" if each.verdict == "broken" else None,
            ),
        )
        for each in found.attacks
    ]
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in HEAD)))
    return tag("table", head, tag("tbody", *rows))


def capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


# --- text -----------------------------------------------------------------------------------------

WIDTH: Final = 80
LABELS: Final = 20


def text(found: Statement) -> str:
    """The same for a terminal, at most 80 columns wide."""
    return "\n".join(line.rstrip() for line in lines(found)) + "\n"


def lines(found: Statement) -> Iterator[str]:
    yield f"{BRAND.upper()}: {found.title}"[:WIDTH]
    yield from wrapped(text_of(found.about))
    yield "=" * WIDTH
    for each in found.warnings:
        yield from wrapped(f"! {text_of(each)}")
    yield from wrapped(text_of(found.headline))
    yield from wrapped(text_of(found.under))
    yield "-" * WIDTH
    for line in found.lines:
        yield from labelled(line.label, line.points or (line.text,), points=bool(line.points))
    yield from labelled(ATTACKED, (found.attacked,))
    for attack in found.attacks:
        outcome = f"{text_of(attack.measured)}, claimed {text_of(attack.claimed)}: {attack.verdict}"
        yield from wrapped(f"{text_of(attack.name)}: {outcome}", first=" " * LABELS + "- ")
    yield from labelled(NOT_COVERED, found.left_out, points=True)
    yield "-" * WIDTH
    yield from wrapped(origin(found))
    for what in SIGNED:
        yield from ("", f"{what}:".ljust(LABELS) + "_" * (WIDTH - LABELS))


def labelled(label: str, texts: tuple[Words, ...], *, points: bool = False) -> Iterator[str]:
    """A label with its text beside it, or a list."""
    first = label.ljust(LABELS)
    for each in texts:
        said = text_of(each)
        yield from wrapped(said if points else capital(said), first + ("- " if points else ""))
        first = " " * LABELS


def wrapped(text: str, first: str = "") -> list[str]:
    """Lines of at most 80 columns; those after the first begin under its text."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )
