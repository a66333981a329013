"""The frame of a page: one HTML file with nothing to fetch, a head, sections with links, a foot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera.errors import __version__
from tessera.report import charts
from tessera.report.markup import Content, Markup, listing, tag

# --- style ----------------------------------------------------------------------------------------
#
# The page's style sheet: one column that fits a phone, a laptop and a sheet of paper.
#
# Colours are after Okabe and Ito's set for colour-blind readers, darkened (or, on dark ground,
# lightened) until curves have a contrast of 3 to 1 with the page and text has 4.5 to 1. Nothing
# is told by colour alone: curves have dashes and names, parts of bars have hatching.


LIGHT: Final = """
--page: #ffffff; --ink: #1b1f24; --soft: #565d66; --rule: #d9dde2; --grid: #e9ecef;
--panel: #f5f6f8; --accent: #0a5a96; --alarm: #a31515; --alarm-ground: #fdf0ef;
--good: #1d6b3a; --bad: #a8330b;
--c0: #1b1f24; --c1: #b8540a; --c2: #007a5a; --c3: #9c3f7c; --c4: #0063b1; --c5: #806000;
--c6: #4b57a8; --c7: #6b6b6b;
--g0: #5f6670; --g1: #a8568b; --g2: #a67c00; --g3: #007a5a; --g4: #c25a10; --g5: #0063b1;
--g6: #7a4fb0; --g7: #303840; --hatch: rgba(255, 255, 255, .62);
"""

DARK: Final = """
--page: #14171b; --ink: #e8eaed; --soft: #a9b0b9; --rule: #3a4049; --grid: #262b31;
--panel: #1d2126; --accent: #7cc0ff; --alarm: #ff9d94; --alarm-ground: #3a1a18;
--good: #7fd6a0; --bad: #ffab84;
--c0: #e8eaed; --c1: #ff9d5c; --c2: #45cfa3; --c3: #ee9fd2; --c4: #6bb8ff; --c5: #e2c04c;
--c6: #aab4ff; --c7: #b3b3b3;
--g0: #9aa2ad; --g1: #dc8fc2; --g2: #dab545; --g3: #3fc79b; --g4: #f5985a; --g5: #63b1fa;
--g6: #b795ea; --g7: #d4d8dd; --hatch: rgba(0, 0, 0, .5);
"""

DASHES: Final = ("", "9 4", "2 3", "10 3 2 3", "", "5 3", "14 4", "1 4")
"""Of the curves c0, c1, ...; the two that are solid differ in width."""

BASE: Final = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.6 -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 3rem; }
p, ul, dl { max-width: 44rem; }
p, ul { margin: 0 0 1rem; }
ul { padding-left: 1.2rem; }
li { margin-bottom: .35rem; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: .3rem 0 1.2rem; letter-spacing: -.015em;
  max-width: 44rem; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .8rem; letter-spacing: -.01em; }
h3 { font-size: 1.02rem; margin: 1.8rem 0 .5rem; }
summary, caption, figcaption { overflow-wrap: anywhere; }
h1, h2, h3, p, li, dd, dt { overflow-wrap: anywhere; }
td, th { overflow-wrap: break-word; }
tbody th, .facts td, .free { overflow-wrap: anywhere; }
.free { display: inline-block; min-width: 9rem; }
.left { text-align: left; }
section { padding: 2.4rem 0 .8rem; border-top: 1px solid var(--rule); margin-top: 1.6rem; }
a { color: var(--accent); }
code { font: .88em ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
.brand { color: var(--soft); font-size: .85rem; letter-spacing: .08em; text-transform: uppercase;
  margin: 0; }
.lede { font-size: 1.2rem; line-height: 1.55; }
.note { color: var(--soft); font-size: .92rem; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.banner { max-width: none; border: 2px solid var(--alarm); border-left-width: .6rem;
  background: var(--alarm-ground); padding: .8rem 1rem; margin: 0 0 1.2rem; border-radius: 4px; }
.banner strong { color: var(--alarm); }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem;
  font-size: .92rem; margin: 1.4rem 0 0; max-width: none; }
nav li { margin: 0; }
nav a { display: inline-block; padding: .2rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem;
  margin: 1.6rem 0 0; max-width: none; }
.tiles div { background: var(--panel); border-radius: 6px; padding: .8rem 1rem; }
.tiles dt { color: var(--soft); font-size: .85rem; line-height: 1.35; }
.tiles dd { margin: .15rem 0 0; font-size: 1.45rem; font-weight: 600; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; font-size: .85rem; font-weight: 400; color: var(--soft);
  line-height: 1.4; }
figure { margin: 1.2rem 0 1.6rem; }
figcaption { color: var(--soft); font-size: .92rem; max-width: 44rem; margin-top: .6rem; }
.categories { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem;
  margin: 0 0 1rem; font-size: .92rem; }
.categories dt { font-weight: 600; }
.categories dd { margin: 0; color: var(--soft); }
details { margin: 0 0 1rem; }
summary { cursor: pointer; color: var(--accent); padding: .25rem 0; }
pre { background: var(--panel); padding: 1rem; border-radius: 6px; overflow-x: auto;
  font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: .9rem; padding-top: 1.6rem; padding-bottom: 3rem; }
"""

TABLES: Final = """
table { border-collapse: collapse; width: 100%; margin: .6rem 0 1.4rem; font-size: .92rem;
  line-height: 1.45; }
caption { text-align: left; color: var(--soft); padding: 0 0 .5rem; caption-side: top;
  font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .5rem .8rem .5rem 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--rule);
  vertical-align: bottom; font-size: .86rem; line-height: 1.35; }
tbody th { font-weight: 600; min-width: 8.8rem; }
tbody tr + tr > * { border-top: 1px solid var(--grid); }
.numbers td, .numbers thead th:not(:first-child) { text-align: right;
  font-variant-numeric: tabular-nums; }
.facts th { width: 17rem; font-weight: 400; color: var(--soft); }
.facts thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px;
  overflow: hidden; }
.facts td { text-align: left; }
@media print, (min-width: 52.01rem) {
  .listed td:not(:last-child) { white-space: nowrap; }
  .numbers.listed thead th:last-child, .numbers.listed td:last-child { text-align: left; }
}
@media screen and (max-width: 52rem) {
  .cards thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px;
    overflow: hidden; }
  .cards, .cards tbody, .cards tr, .cards th, .cards td, .cards caption { display: block; }
  .cards tr { background: var(--panel); border-radius: 6px; padding: .7rem 1rem;
    margin: 0 0 .8rem; }
  .cards tbody th { padding: 0 0 .3rem; border: 0; font-size: 1rem; }
  .cards tbody tr > td { display: flex; justify-content: space-between; gap: 1rem; padding: .3rem 0;
    border: 0; border-top: 1px solid var(--rule); text-align: right; }
  .cards td::before { content: attr(data-label); color: var(--soft); text-align: left;
    flex: none; max-width: 55%; }
  .cards tbody tr > td.none { display: none; }
  .cards th, .cards td > span { flex: 0 1 auto; min-width: 0;
    overflow-wrap: anywhere; }
  .cards.prose tbody tr > td { display: block; text-align: left; }
  .cards.prose td::before { display: block; max-width: none; font-size: .86rem; }
}
"""

CHARTS: Final = """
.chart { display: block; width: 100%; height: auto; }
.chart.wide { max-width: 46rem; }
.chart.wide.full { max-width: none; }
ul.lede { max-width: none; }
.narrow { display: none !important; }
.fills { position: absolute; }
.chart text { font-family: -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-size: 13px; fill: var(--ink); }
.chart .tick { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart .axis-name { font-size: 12px; fill: var(--soft); }
.chart .part-name { font-size: 11px; fill: var(--soft); }
.chart .faint { fill: var(--soft); }
.chart .strong { font-weight: 600; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--soft); }
.reference { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 1 3; fill: none; }
.curve { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.join { fill: none; stroke-width: 1; }
.reach { stroke-width: 1; stroke-dasharray: 1 3; }
.part { stroke: var(--page); stroke-width: 1; }
.hatch { stroke: var(--hatch); stroke-width: 1.3; fill: none; }
@media screen and (max-width: 36rem) {
  .wide { display: none !important; }
  .narrow { display: block !important; }
}
"""

PHONE: Final = """
@media screen and (max-width: 36rem) {
  main, header, footer { padding-left: 1rem; padding-right: 1rem; }
  header { padding-top: 1.6rem; }
  h1 { font-size: 1.6rem; }
  .lede { font-size: 1.08rem; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tiles div { padding: .7rem .8rem; }
  .tiles dd { font-size: 1.2rem; }
  .categories { grid-template-columns: 1fr; gap: 0; }
  .categories dd { margin-bottom: .4rem; }
  .facts th { width: 45%; }
  tbody th { min-width: 0; }
  th, td { padding-right: .6rem; }
}
"""

PRINT: Final = """
@page { size: A4; margin: 16mm 15mm; }
@media print {
  html { font-size: 10pt; }
  body { line-height: 1.45; }
  main, header, footer { max-width: none; padding: 0; }
  h1, p, ul, dl, figcaption { max-width: none; }
  h1 { font-size: 20pt; }
  h2 { font-size: 14pt; }
  .lede { font-size: 12pt; }
  nav, #settings { display: none; } /* plans are files of their own */
  section { padding: 1.2rem 0 0; margin-top: 1rem; }
  h2, h3, caption, summary { break-after: avoid; }
  section > table, figure, tr, .tiles, .banner, li { break-inside: avoid; }
  table { font-size: 8.5pt; }
  thead th { font-size: 8pt; }
  th, td { padding-right: .5rem; }
  .tiles div, .cards tr, pre { background: none; border: 1px solid var(--rule); }
  .cards tr { border: 0; }
  details::details-content { content-visibility: visible; block-size: auto; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def curve_rules() -> str:
    rules = []
    for slot, dash in enumerate(DASHES):
        rules.append(
            f".c{slot} {{ stroke: var(--c{slot}); }} .end.c{slot} {{ fill: var(--c{slot}); }}"
        )
        if dash:
            rules.append(f".curve.c{slot} {{ stroke-dasharray: {dash}; }}")
        rules.append(
            f".f{slot} {{ fill: url(#fill{slot}); }} .ground{slot} {{ fill: var(--g{slot}); }}"
        )
    rules.append(".curve.c4 { stroke-width: 3.2; }")
    return "\n".join(rules)


def sheet() -> str:
    """The whole sheet. Dark ground is for screens only: paper is white."""
    return "\n".join(
        (
            f":root {{ color-scheme: light dark; {LIGHT} }}",
            f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}",
            BASE,
            TABLES,
            CHARTS,
            curve_rules(),
            PHONE,
            PRINT,
        )
    )


# --- document -------------------------------------------------------------------------------------

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
        tag("style", Markup(sheet())),
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
