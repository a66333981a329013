"""Charts place what they are given in order, inside their box, and without one name on another."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.report import charts, document
from tessera.report.charts import FONT, LINE, Bar, LinearScale, ReferenceLine, Series, text_width

values = st.floats(-1e6, 1e6).map(lambda v: round(v, 4))
shares = st.floats(0.0, 1.0).map(lambda v: round(v, 4))
names = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=40)


def curve(points: list[float], label: str = "a", slot: int = 0) -> Series:
    return Series(label, [(float(i + 1), value) for i, value in enumerate(points)], slot)


curve_lists = st.lists(
    st.builds(
        lambda points, label, slot: curve(points, label, slot),
        st.lists(shares, min_size=1, max_size=30),
        names,
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=9,
)


def drawing(
    curves: list[Series], references: list[ReferenceLine], width: float = 720.0
) -> ElementTree.Element:
    text = charts.lines(
        curves,
        references,
        name="x",
        title="a title",
        description="what it shows",
        x_label="rounds",
        y_label="AUC",
        width=width,
    )
    return ElementTree.fromstring(text)


def bar_drawing(rows: list[Bar], order: list[str], width: float = 720.0) -> ElementTree.Element:
    text = charts.bars(rows, order, name="x", title="t", description="d", width=width)
    return ElementTree.fromstring(text)


def box_of(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a label, by the estimate that the chart itself uses."""
    kind = text.get("class", "").split()
    font = {"tick": FONT - 1, "axis-name": FONT - 1, "part-name": FONT - 2}.get(kind[0], FONT)
    wide = text_width(text.text or "", font)
    x, y = float(text.get("x", "nan")), float(text.get("y", "nan"))
    left = {"end": x - wide, "middle": x - wide / 2}.get(text.get("text-anchor", ""), x)
    return left, y - 0.75 * font, left + wide, y + 0.25 * font


def assert_labels_stand_apart(svg: ElementTree.Element, classes: set[str]) -> None:
    width, height = (float(v) for v in svg.get("viewBox", "").split()[2:])
    texts = [t for t in svg.iter("text") if classes & set(t.get("class", "").split())]
    assert texts
    boxes = [box_of(text) for text in texts]
    for left, top, right, bottom in boxes:
        # Half a tick label may stand out of the left edge of the axis, not out of the picture.
        assert left >= -1 and top >= 0 and right <= width + 1 and bottom <= height
    for a, b in combinations(boxes, 2):
        apart = a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 1 or b[3] <= a[1] + 1
        assert apart, (a, b)


# --- measuring ----------------------------------------------------------------------------------


@given(values, values, st.integers(1, 12))
def test_ticks_are_round_numbers_that_enclose_the_values(a: float, b: float, about: int) -> None:
    low, high = min(a, b), max(a, b)
    found = charts.ticks(low, high, about)
    steps = [y - x for x, y in pairwise(found)]
    step = steps[0]
    assert all(math.isclose(s, step, rel_tol=1e-6) for s in steps)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(math.isclose(mantissa, m, rel_tol=1e-6) for m in (1, 2, 5, 10))
    tolerance = 1e-6 * step
    assert found[0] <= low + tolerance and found[-1] >= high - tolerance
    assert len(found) <= about + 3


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0.5, 0.78, 5, ["0.5", "0.6", "0.7", "0.8"]),
        (0.0, 50.0, 5, ["0", "10", "20", "30", "40", "50"]),
        (0.0, 2650.0, 3, ["0", "1,000", "2,000", "3,000"]),
        (0.682, 0.769, 4, ["0.65", "0.70", "0.75", "0.80"]),
    ],
)
def test_ticks_as_a_person_would_set_them(
    low: float, high: float, about: int, expected: list[str]
) -> None:
    assert charts.tick_labels(charts.ticks(low, high, about)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 3.0, 10.0], ["1", "3", "10"]),
        ([0.4, 2.0], ["0.1", "0.3", "1", "3", "10"]),
        ([5.0], ["1", "3", "10"]),
        ([1.0], ["1", "3", "10"]),
        ([0.02, 1_500.0], ["0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30", "100", "300"]),
    ],
)
def test_marks_of_a_logarithmic_axis_enclose_the_values(
    values: list[float], expected: list[str]
) -> None:
    found = charts.log_marks([math.log10(value) for value in values])
    assert [label for _, label in found][: len(expected)] == expected
    assert all(math.isclose(10**at, float(label.replace(",", ""))) for at, label in found)
    assert found[0][0] <= math.log10(min(values)) <= math.log10(max(values)) <= found[-1][0]


@pytest.mark.parametrize("value", [0.0, 0.5, 1e5])
def test_a_single_value_has_an_axis_around_it(value: float) -> None:
    found = charts.ticks(value, value)
    assert found[0] < value < found[-1]
    assert max(len(label) for label in charts.tick_labels(found)) <= 8


def test_an_axis_to_infinity_is_refused() -> None:
    with pytest.raises(ValueError, match="no axis"):
        charts.ticks(0.0, math.inf)


@given(values, values, st.floats(1.0, 1e4))
def test_a_scale_keeps_the_order(a: float, b: float, span: float) -> None:
    scale = LinearScale(-1e6, -1e6 + 2e6 + span, 10.0, 700.0)
    assert (a < b) <= (scale(a) <= scale(b))
    assert scale(scale.low) == 10.0
    assert math.isclose(scale(scale.high), 700.0)


places = st.lists(st.floats(0.0, 300.0), min_size=1, max_size=12)


@given(places)
def test_spread_labels_keep_their_order_their_distance_and_their_range(wanted: list[float]) -> None:
    found = charts.spread(wanted, LINE, 0.0, 300.0)
    assert len(found) == len(wanted)
    assert all(-1e-9 <= place <= 300.0 + 1e-9 for place in found)
    ranked = sorted(range(len(wanted)), key=lambda i: found[i])
    assert all(found[j] - found[i] >= LINE - 1e-9 for i, j in pairwise(ranked))
    assert [wanted[i] for i in ranked] == sorted(wanted)


@given(places, st.data())
def test_no_other_places_are_nearer_to_the_wanted_ones(
    wanted: list[float], data: st.DataObject
) -> None:
    """The problem is convex: any feasible placement is a witness against a wrong optimum."""
    wanted = sorted(wanted)
    ours = charts.spread(wanted, LINE, 0.0, 300.0)
    slack = 300.0 - LINE * (len(wanted) - 1)
    offsets = sorted(data.draw(st.floats(0.0, slack)) for _ in wanted)
    other = [offset + LINE * i for i, offset in enumerate(offsets)]

    def cost(at: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(at, wanted, strict=True))

    mixed = [0.9 * a + 0.1 * b for a, b in zip(ours, other, strict=True)]
    assert cost(ours) <= cost(other) + 1e-6
    assert cost(ours) <= cost(mixed) + 1e-6


def test_labels_that_are_apart_already_stay_where_they_are() -> None:
    assert charts.spread([10.0, 90.0, 40.0], 16.0, 0.0, 100.0) == [10.0, 90.0, 40.0]


@given(names, st.floats(30.0, 200.0))
def test_a_shortened_name_fits_and_keeps_head_and_tail(name: str, room: float) -> None:
    short = charts.shortened(name, room)
    assert text_width(short) <= room
    if short != name and len(short) > 3:
        head, tail = short.split("…")[0], short.split("…")[-1]
        assert name.startswith(head) and name.endswith(tail)


@given(st.integers(1, 2_000))
def test_thinning_keeps_both_ends_and_the_order(length: int) -> None:
    points = [(float(i), 0.0) for i in range(length)]
    found = charts.thinned(points)
    assert found[0] == points[0] and found[-1] == points[-1]
    assert found == sorted(found) and len(set(found)) == len(found) <= charts.MOST_POINTS + 1


# --- curves -------------------------------------------------------------------------------------


@given(curve_lists)
def test_points_map_monotonically_to_pixels(curves: list[Series]) -> None:
    svg = drawing(curves, [])
    shown = list(svg.iter("polyline"))
    assert len(shown) == len(curves)
    pairs: list[tuple[float, float]] = []
    for given_curve, element in zip(curves, shown, strict=True):
        points = [tuple(map(float, p.split(","))) for p in element.get("points", "").split()]
        assert len(points) == len(given_curve.points)
        assert all(a[0] < b[0] for a, b in pairwise(points))
        pairs += [(v, p[1]) for (_, v), p in zip(given_curve.points, points, strict=True)]
    pairs.sort()
    # Rounded to a tenth of a pixel, a higher value is never drawn lower.
    assert all(b[1] <= a[1] + 0.1001 for a, b in pairwise(pairs))


@given(
    curve_lists,
    st.lists(st.builds(ReferenceLine, names, shares), max_size=3),
    st.sampled_from([328, 736]),
)
def test_names_beside_curves_do_not_overlap_and_stay_inside(
    curves: list[Series], references: list[ReferenceLine], width: int
) -> None:
    svg = drawing(curves, references, float(width))
    assert_labels_stand_apart(svg, {"label"})
    assert_labels_stand_apart(svg, {"label", "tick", "axis-name"})
    assert len(svg.findall("text[@class='label']")) == len(curves)
    assert len(svg.findall("text[@class='label faint']")) == len(references)


def test_a_name_too_long_for_the_margin_is_shortened() -> None:
    label = "a run with a name that nobody thought of on a phone, seed 3"
    svg = drawing([curve([0.5, 0.6], label)], [], 328.0)
    assert_labels_stand_apart(svg, {"label"})
    shown = svg.findtext("text[@class='label']") or ""
    assert shown.startswith("a run") and "…" in shown and shown.endswith("3")
    assert svg.findtext("polyline/title") == label


def test_a_chart_speaks_to_those_who_do_not_see_it() -> None:
    svg = drawing([curve([0.5, 0.7])], [])
    assert svg.get("role") == "img"
    assert svg.get("aria-labelledby") == "x-title x-desc"
    assert svg.findtext("title") == "a title"
    assert svg.findtext("desc") == "what it shows"


def test_a_run_that_is_behind_is_joined_to_its_name() -> None:
    svg = drawing([curve([0.5, 0.6, 0.7]), curve([0.4], "short", 1)], [])
    assert len([e for e in svg.iter("line") if "reach" in e.get("class", "")]) == 1


def test_rounds_have_whole_ticks() -> None:
    svg = drawing([curve([0.5, 0.6])], [])
    ticks = [t.text for t in svg.iter("text") if t.get("text-anchor") == "middle"]
    assert ticks == ["0", "1", "2"]


def test_a_chart_of_counts_can_begin_at_zero() -> None:
    text = charts.lines(
        [curve([2600.0, 2650.0])],
        name="x",
        title="t",
        description="d",
        x_label="rounds",
        y_label="rows",
        from_zero=True,
    )
    ticks = [t.text for t in ElementTree.fromstring(text).iter("text") if t.get("class") == "tick"]
    assert ticks[0] == "0"


def test_a_name_cannot_become_markup() -> None:
    svg = drawing([curve([0.5, 0.6], "<b>&")], [])  # would not parse otherwise
    assert svg.findtext("text[@class='label']") == "<b>&"


# --- bars ---------------------------------------------------------------------------------------

PARTS = ["keys", "union", "choice", "rows down", "train", "update", "unmask"]
bar_lists = st.lists(
    st.builds(
        lambda group, parts: Bar(group, "up", parts, f"{sum(parts.values()):.0f} B"),
        st.sampled_from(["fedavg", "secure-submodel cpp2 of the long name", "b"]),
        st.dictionaries(st.sampled_from(PARTS), st.floats(1.0, 1e6), min_size=1),
    ),
    min_size=1,
    max_size=8,
)


@given(bar_lists)
def test_parts_are_as_long_as_their_share(rows: list[Bar]) -> None:
    svg = bar_drawing(rows, PARTS)
    parts = [r for r in svg.iter("rect") if r.get("height") == "17"]
    amounts = [row.parts[p] for row in rows for p in PARTS if p in row.parts]
    assert len(parts) == len(amounts)
    widths = [float(r.get("width", "nan")) for r in parts]
    longest = max(range(len(amounts)), key=amounts.__getitem__)
    for amount, width in zip(amounts, widths, strict=True):
        # To a tenth of a pixel; slivers are drawn half a pixel wide.
        expected = amount / amounts[longest] * widths[longest]
        assert width == pytest.approx(max(expected, 0.5), abs=0.15)


@given(bar_lists, st.sampled_from([328, 736]))
def test_names_and_totals_of_bars_stand_apart(rows: list[Bar], width: int) -> None:
    svg = bar_drawing(rows, PARTS, float(width))
    assert_labels_stand_apart(svg, {"label", "part-name"})


def test_a_bar_that_was_not_measured_says_so() -> None:
    svg = bar_drawing([Bar("a", "up", {}, "not measured")], PARTS)
    assert "not measured" in [t.text for t in svg.iter("text")]
    assert not list(svg.iter("rect"))


# --- colours ------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def palette(sheet: str) -> dict[str, str]:
    pairs = (part.split(":") for part in sheet.replace("\n", " ").split(";") if ":" in part)
    return {name.strip(): value.strip() for name, value in pairs}


@pytest.mark.parametrize("sheet", [document.LIGHT, document.DARK])
def test_text_and_curves_have_enough_contrast(sheet: str) -> None:
    colours = palette(sheet)
    for ground in ("--page", "--panel"):
        for text in ("--ink", "--soft", "--accent", "--good", "--bad"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["--alarm"], colours["--alarm-ground"]) >= 4.5
    assert contrast(colours["--ink"], colours["--alarm-ground"]) >= 4.5
    for slot in range(charts.SLOTS):
        assert contrast(colours[f"--c{slot}"], colours["--page"]) >= 3.0
        assert contrast(colours[f"--g{slot}"], colours["--page"]) >= 3.0


def test_series_differ_without_colour() -> None:
    assert len(charts.PATTERNS) == charts.FILLS == len(set(charts.PATTERNS))
    dashes = [dash for dash in document.DASHES if dash]
    assert len(document.DASHES) == charts.SLOTS
    assert len(set(dashes)) == len(dashes) == charts.SLOTS - 2  # two are solid, thin and thick
    assert ".curve.c4 { stroke-width" in document.sheet()
