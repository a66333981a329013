"""Small SVG charts: curves with their names beside them, and stacked bars.

Colours, dashes and fills come from the page's style by class (`c0`..., `f0`...), so that one chart
serves light, dark and print; dashes and hatching tell series apart without colour. Every chart has
a title and a description for those who do not see it. Sizes are in pixels of the view box: draw
one chart for wide and one for narrow screens instead of letting type shrink.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tessera.report.markup import Content, Markup, join, tag

FONT: Final = 13.0
LINE: Final = 16.0
"""The least distance between two lines of labels."""
SLOTS: Final = 8
FILLS: Final = 8
MOST_POINTS: Final = 300
"""A curve is thinned to about this many: more do not show."""
Point = tuple[float, float]
Mark = tuple[float, str]
"""A place on an axis, and what stands there."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series; `slot` picks its colour and dashes."""

    label: str
    points: Sequence[Point]
    slot: int


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A horizontal line to compare curves with."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts that add up. Bars with one `group` stand together under its name."""

    group: str
    label: str
    parts: Mapping[str, float]
    total: str
    """What is written at its end; where there are no parts, why."""


@dataclass(frozen=True, slots=True)
class LinearScale:
    """Values to pixels, straight."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


# --- measuring ----------------------------------------------------------------------------------


def text_width(text: str, font: float = FONT) -> float:
    """An estimate from above, for any sans-serif face: the real width depends on the reader's."""
    return font * sum(character_width(c) for c in text)


def character_width(character: str) -> float:
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    if character in "mwMW@%&":
        return 0.92
    return 0.74 if character.isupper() else 0.35 if character in " \u00a0.,:;|il'" else 0.58


def shortened(text: str, room: float, font: float = FONT) -> str:
    """The text, or its head and tail: names of runs often differ at their ends."""
    if text_width(text, font) <= room:
        return text
    for kept in range(len(text) - 1, 1, -1):
        tail = kept // 2
        short = f"{text[: kept - tail].rstrip()}…{text[len(text) - tail :].lstrip()}"
        if text_width(short, font) <= room:
            return short
    return "…"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten; the first and last enclose low and high."""
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"no axis from {low} to {high}")
    around = max(abs(low), abs(high))
    if high - low <= 1e-6 * around or not around:  # one value, which still needs an axis
        pad = 0.05 * around or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [round(i * step, decimals + 1) for i in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """All with the decimals that the finest needs."""
    step = min((b - a for a, b in pairwise(values)), default=1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


def log_marks(exponents: Sequence[float]) -> list[Mark]:
    """Marks at 1 and 3 times powers of ten that enclose values given by their logarithms."""
    low, high = math.floor(min(exponents) + 1e-9), math.ceil(max(exponents) - 1e-9)
    values = [
        digit * 10.0**power
        for power in range(low, max(high, low + 1) + 1)
        for digit in (1, 3)
        if digit == 1 or power < max(high, low + 1)
    ]
    return [(math.log10(value), f"{value:,.12g}") for value in values]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, in the same order, `gap` apart, between low and high.

    The least squared displacement: after taking i * gap off the i-th of the sorted places this
    is isotonic regression, solved by pooling neighbours that are in the wrong order.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, size = wanted[index] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    top = high - (len(order) - 1) * gap
    flat = [min(max(mean, low), max(low, top)) for mean, size in pools for _ in range(size)]
    places = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        places[index] = flat[rank] + rank * gap
    return places


def thinned(points: Sequence[Point]) -> list[Point]:
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    kept = list(points[::stride])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


# --- curves -------------------------------------------------------------------------------------


def figure(
    name: str,
    draw: Callable[..., Markup],
    caption: Content = None,
    *,
    width: float = 736.0,
    heights: tuple[float, float] | None = None,
) -> Markup:
    """A chart in two sizes, of which a screen shows one, with a caption.

    `draw` is `lines` or `bars` with all but name, size and class; `heights` are on a wide screen
    and on a phone.
    """
    sizes = [{}, {}] if heights is None else [{"height": each} for each in heights]
    return tag(
        "figure",
        draw(name=name, width=width, class_="wide", **sizes[0]),
        draw(name=f"{name}-narrow", width=328.0, class_="narrow", **sizes[1]),
        tag("figcaption", caption) if caption else None,
    )


def lines(
    curves: Sequence[Series],
    references: Sequence[ReferenceLine] = (),
    *,
    name: str,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    width: float = 720.0,
    height: float = 380.0,
    from_zero: bool = False,
    x_marks: Sequence[Mark] = (),
    y_marks: Sequence[Mark] = (),
    class_: str = "wide",
) -> Markup:
    """Series and reference lines over one pair of axes, each with its name at its right end.

    An axis with marks of its own, such as powers of ten, spans these.
    `name` makes ids on the page unique. Names are in the order of the curves' ends, moved apart
    where they would touch, and joined to their ends by a thin line.
    """
    drawn = [curve for curve in curves if curve.points]
    values = [y for curve in drawn for _, y in curve.points] + [r.value for r in references]
    ends = [x for curve in drawn for x, _ in curve.points]
    if not values:
        raise ValueError("a chart without values")
    y_ticks = ticks(min([0.0, *values] if from_zero else values), max(values), 5)
    y_names = tick_labels(y_ticks)
    if y_marks:
        y_ticks, y_names = [at for at, _ in y_marks], [label for _, label in y_marks]

    names = [curve.label for curve in drawn] + [r.label for r in references]
    room = min(max(text_width(label) for label in names), 0.4 * width)
    left = max(text_width(label, FONT - 1) for label in y_names) + 8
    right = width - room - 26  # a connector, and a little air
    top, bottom = 30.0, max(height, 80.0 + LINE * len(names)) - 44
    first = 0.0 if not x_marks else x_marks[0][0]
    x = LinearScale(first, max([first + 1.0, *ends]), left, right)
    # Rounds are whole: an axis to 2 has no tick at 0.5.
    fitting = int((right - left) / (text_width(f"{x.high:,.0f}", FONT - 1) + 14))
    x_ticks = [value for value in ticks(0.0, x.high, fitting) if value == int(value)]
    y = LinearScale(y_ticks[0], y_ticks[-1], bottom, top)

    parts: list[Markup] = []
    for value, label in zip(y_ticks, y_names, strict=True):
        parts.append(line(left, y(value), right, y(value), "grid"))
        parts.append(words(label, left - 6, y(value) + 4, "tick", anchor="end"))
    marks = x_marks or list(zip(x_ticks, tick_labels(x_ticks), strict=True))
    for value, label in ((v, t) for v, t in marks if v <= x.high):
        parts.append(line(x(value), bottom, x(value), bottom + 4, "axis"))
        parts.append(words(label, x(value), bottom + 18, "tick", anchor="middle"))
    parts.append(line(left, bottom, right, bottom, "axis"))
    parts.append(words(y_label, 0.0, 14.0, "axis-name"))
    parts.append(words(x_label, right, bottom + 36, "axis-name", anchor="end"))

    heights = [y(curve.points[-1][1]) for curve in drawn] + [y(r.value) for r in references]
    places = spread(heights, LINE, top, bottom)
    for reference, place in zip(references, places[len(drawn) :], strict=True):
        at = y(reference.value)
        parts.append(tag("path", d=f"M{left:.1f} {at:.1f}H{right:.1f}", class_="reference"))
        parts.append(connector(right, at, right + 16, place, "reference"))
        parts.append(words(shortened(reference.label, room), right + 21, place + 4, "label faint"))
    for curve, place in zip(drawn, places, strict=False):
        slot = f"c{curve.slot % SLOTS}"
        end_x, end_y = curve.points[-1]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in thinned(curve.points))
        shown = tag("polyline", tag("title", curve.label), points=path, class_=f"curve {slot}")
        parts.append(shown)
        parts.append(tag("circle", cx=x(end_x), cy=y(end_y), r=3.5, class_=f"end {slot}"))
        if x(end_x) < right - 1:  # a run that is not as far as the others
            parts.append(line(x(end_x) + 4, y(end_y), right, y(end_y), f"reach {slot}"))
        parts.append(connector(right, y(end_y), right + 16, place, f"join {slot}"))
        parts.append(words(shortened(curve.label, room), right + 21, place + 4, "label"))
    return svg(parts, width, bottom + 44, name=name, title=title, text=description, class_=class_)


# --- bars ---------------------------------------------------------------------------------------


def bars(
    rows: Sequence[Bar],
    order: Sequence[str],
    *,
    name: str,
    title: str,
    description: str,
    width: float = 720.0,
    class_: str = "wide",
) -> Markup:
    """Stacked bars on one scale; `order` fixes each part's place and fill on the whole page.

    A part's name stands under it where there is room, and a key of all parts is on top. There
    is no axis: each bar ends in its total. On a wide chart a group's name is left of its bars.
    """
    longest = max((sum(row.parts.values()) for row in rows), default=0.0)
    beside = width >= 500
    indent = max(text_width(row.group) for row in rows) * 1.08 + 14 if beside and rows else 0.0
    indent = min(indent, 0.3 * width)
    left = indent + max((text_width(row.label) for row in rows), default=0.0) + 10
    ending = max((text_width(row.total) for row in rows if row.parts), default=0.0) + 8
    scale = LinearScale(0.0, longest or 1.0, left, width - ending)
    used = [part for part in order if any(row.parts.get(part, 0.0) > 0.0 for row in rows)]
    parts, at = key(used, order, width)
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            at += 10
            named_at = at + 13
            if not beside:
                at += 10 + FONT
                named_at = at - 8
            short = shortened(group, (indent - 14 if beside else width) / 1.08)
            parts.append(words(short, 0.0, named_at, "label strong"))
        parts.append(words(row.label, indent, at + 13, "label"))
        if not row.parts:
            parts.append(words(row.total, left, at + 13, "label faint"))
            at += 22
            continue
        begin, occupied, named = 0.0, left - 1.0, False
        for part in used:
            amount = row.parts.get(part, 0.0)
            if amount <= 0.0:
                continue
            start, stop = scale(begin), scale(begin + amount)
            fill = f"f{order.index(part) % FILLS}"
            shape = tag(
                "rect",
                tag("title", part),
                x=start,
                y=at,
                width=max(stop - start, 0.5),
                height=17.0,
                class_=f"part {fill}",
            )
            parts.append(shape)
            wide = text_width(part, FONT - 2)
            if stop - start >= wide + 4 and start >= occupied:
                parts.append(words(part, start + 1, at + 29, "part-name"))
                occupied, named = start + 1 + wide + 4, True
            begin += amount
        parts.append(words(row.total, scale(begin) + 6, at + 13, "label"))
        at += 34 if named else 22
    return svg(parts, width, at + 6, name=name, title=title, text=description, class_=class_)


def key(used: Sequence[str], order: Sequence[str], width: float) -> tuple[list[Markup], float]:
    """Swatches with names, in as many lines as they need; and where the last line ends."""
    parts: list[Markup] = []
    x, y = 0.0, 0.0
    for part in used:
        wide = 20 + text_width(part) + 14
        if x and x + wide - 14 > width:
            x, y = 0.0, y + 20
        fill = f"f{order.index(part) % FILLS}"
        parts.append(tag("rect", x=x, y=y + 1, width=14.0, height=13.0, class_=f"part {fill}"))
        parts.append(words(part, x + 20, y + 12, "label"))
        x += wide
    return parts, y + 20 if used else 0.0


PATTERNS: Final = (
    "M0 4H8M4 0V8",
    "M0 8L8 0M-2 2L2 -2M6 10L10 6",
    "M0 2H8M0 6H8",
    "M4 0V8",
    "M0 0L8 8M-2 6L2 10M6 -2L10 2",
    "",
    "M0 0L8 8M0 8L8 0",
    "M0 4H8",
)
"""Hatching of the fills f0, f1, ..., so that a black and white print tells them apart."""


def fills() -> Markup:
    """The fills, once per page: `.f1` is painted with url(#fill1)."""
    patterns = (
        tag(
            "pattern",
            tag("rect", width=8.0, height=8.0, class_=f"ground{i}"),
            tag("path", d=hatch, class_="hatch") if hatch else None,
            id=f"fill{i}",
            width=8.0,
            height=8.0,
            patternUnits="userSpaceOnUse",
        )
        for i, hatch in enumerate(PATTERNS)
    )
    return tag(
        "svg", tag("defs", *patterns), width=0.0, height=0.0, class_="fills", aria_hidden="true"
    )


# --- elements -----------------------------------------------------------------------------------


def svg(
    parts: Sequence[Markup],
    width: float,
    height: float,
    *,
    name: str,
    title: str,
    text: str,
    class_: str,
) -> Markup:
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", text, id=f"{name}-desc"),
        join(parts),
        viewBox=f"0 0 {width:g} {math.ceil(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_=f"chart {class_}",
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def connector(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    middle = x1 + 5
    path = f"M{x1:.1f} {y1:.1f}H{middle:.1f}L{x2 - 3:.1f} {y2:.1f}H{x2:.1f}"
    return tag("path", d=path, class_=class_)


def words(text: str, x: float, y: float, class_: str, *, anchor: str | None = None) -> Markup:
    return tag("text", text, x=x, y=y, class_=class_, text_anchor=anchor)
