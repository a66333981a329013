"""The report as a reader sees it: Chromium on a phone, a laptop and paper.

Without a Chromium on this machine these are skipped. Measurements are taken by a script that goes
into a copy of the page and leaves its findings in a title; the page itself has none.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from html import escape, unescape
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from papers import show
from papers.cells import Cell
from papers.fedmmf import GAINS, LAYOUT, PAPER, TABLE_2
from report import folders
from tessera.audit.ratings.plain_uploads import BINS
from tessera.plan import DPPlan, Plan, TablePlan
from tessera.report import page as report
from tessera.report import statement_page
from tessera.report.statement import Subject, statement_of
from tessera.rounds.noise import noise_of

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
SLOW: Final = pytest.mark.slow
PHONE: Final = (360, 800)
LAPTOP: Final = (1280, 800)
SHEET: Final = (680, 1000)  # what is left of A4 between its margins, in CSS pixels

MEASURE: Final = """<script>
const boxes = [...document.querySelectorAll("svg.chart")].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  if (!frame.width) return [];
  const texts = [...svg.querySelectorAll("text")].map(t => [t, t.getBoundingClientRect()]);
  const bad = texts.filter(([t, b]) => b.left < frame.left - 1 || b.right > frame.right + 1 ||
    b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => "outside: " + t.textContent);
  texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
    // Boxes of text include its line spacing: two pixels of that may touch.
    const w = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (w > 1 && h > 4) bad.push("overlap: " + a.textContent + " / " + b.textContent);
  }));
  return bad;
});
const shown = [...document.querySelectorAll("svg.chart")].filter(s => s.getClientRects().length);
const small = shown.flatMap(s => [...s.querySelectorAll("text")])
  .map(t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a);
parent.document.title = JSON.stringify({
  inner: innerWidth, scroll: document.documentElement.scrollWidth, bad: boxes,
  charts: shown.length, all: document.querySelectorAll("svg.chart").length,
  smallest: Math.min(...small),
  wide: [...document.querySelectorAll("main *, header *")].filter(e => !e.closest("svg") &&
    e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + " " + e.textContent.slice(0, 40)),
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run, five schemes, and a page that has everything long or loud."""
    top = tmp_path_factory.mktemp("pages")
    long = "a_federation_name_without_any_space_that_goes_on_and_on_and_on_and_on"
    told = folders.facts("secure-submodel", 50)["task"]
    task = {**told, "title": f"{long} 界面 {long}", "facts": {long: long, "nested": {long: [1, 2]}}}
    loud = {"entropy": "insecure test entropy", "task": task}
    hard = [
        folders.make(
            top / f"hard{i}", every=10, finished=7 + i, changes={**loud, "name": f"{long} {i}"}
        )
        for i in range(3)
    ]
    found = {
        "one": [folders.make(top / "one")],
        "five": folders.five(top / "five"),
        "hard": hard,
    }
    made = {name: report.write(runs, top / f"{name}.html") for name, runs in found.items()}
    return {**made, "paper": show.write(invented(), LAYOUT, top / "paper.html", quick=True)}


def invented() -> list[Cell]:
    """Cells of every kind that the page of a paper has, the paper's own figures as ours."""
    cells: list[Cell] = []

    def add(table: str, row: str, column: str, ours: float, paper: float | None, unit: str) -> None:
        note = "secure-fedavg, 60 rounds of 943 of 943 clients; target <= 0.905: met; 5 seeds"
        cells.append(
            Cell(table=table, row=row, column=column, paper=paper, ours=ours, unit=unit, note=note)
        )

    for name, models in PAPER.items():
        for model, (rmse, off, mae, off_mae) in models.items():
            row = f"FedMMF, {model}"
            for column, value in (("RMSE", rmse), ("RMSE, sd", off), ("MAE", mae)):
                add(f"Table 4, {name}", row, column, value, value, "stars")
            add(f"Table 4, {name}", row, "MAE, sd", off_mae, off_mae, "stars")
        add(GAINS, f"{name}: one order", "RMSE", -0.005, -0.015, "stars")
    for column in ("correlation with the rating", "recovered to half a star"):
        add("What masked ratings give away, films", "two order", column, 0.98, None, "")
    for row, values in enumerate(TABLE_2):
        for at, value in enumerate(values):
            table = "Table 2, recovery: films, two order"
            add(table, f"g = {row}, off by less than 0.5", BINS[at], 100 - value, value, "%")
    for penalty in (1, 30, 10_000):
        for column in ("J, ratings shared", "J, held-back ratings", "RMSE"):
            add("Figure 4, films", f"{penalty}", column, 0.04 + 1e-6 * penalty, None, "")
    for row in ("secure", "plain", "auto"):
        for column in ("RMSE", "largest difference of an item's factor"):
            add("Paths: films, one order, 10 rounds of 100 clients", row, column, 0.95, None, "")
    return cells


def start(browser: str, scratch: Path, page: Path, size: tuple[int, int], *flags: str) -> str:
    ran = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={scratch / 'profile'}",
            f"--window-size={size[0]},{size[1]}",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout


def measure(browser: str, scratch: Path, page: Path, size: tuple[int, int]) -> dict[str, Any]:
    text = page.read_text()
    if size == SHEET:  # the rules for paper, on a screen that can be measured
        text = text.replace("@media print", "@media all").replace("@media screen", "@media not all")
    # A window has a least width, which is over a phone's; a frame in it has none.
    inner = escape(text.replace("</body>", f"{MEASURE}</body>"))
    frame = f'<iframe srcdoc="{inner}" width="{size[0]}" height="{size[1]}" style="border: 0">'
    copy = scratch / "copy.html"
    copy.write_text(f"<!DOCTYPE html><meta charset=utf-8><title>.</title>{frame}</iframe>")
    shown = start(browser, scratch, copy, (1400, 1100), "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", shown, re.DOTALL)
    assert title is not None
    found: dict[str, Any] = json.loads(unescape(title.group(1)))
    return found


def screenshot(browser: str, scratch: Path, page: Path, size: tuple[int, int]) -> Any:
    out = scratch / "shot.png"
    start(browser, scratch, page, size, f"--screenshot={out}")
    return decode(out.read_bytes())


def decode(png: bytes) -> npt.NDArray[np.int64]:
    """Height x width x 3; 8-bit RGB or RGBA without interlacing, as browsers write it."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    width = height = channels = 0
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert depth == 8 and not interlaced
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    data, stride = zlib.decompress(packed), width * channels
    above, image = bytearray(stride), bytearray()
    for y in range(height):
        start_of = y * (stride + 1)
        row = unfiltered(
            data[start_of], data[start_of + 1 : start_of + 1 + stride], above, channels
        )
        image += row
        above = row
    return np.frombuffer(image, np.uint8).reshape(height, width, channels)[:, :, :3].astype(int)


def unfiltered(kind: int, row: bytes, above: bytearray, step: int) -> bytearray:
    """One line of pixels; PNG specification, section 9."""
    line = bytearray(row)
    for x in range(len(line)) if kind else ():
        left = line[x - step] if x >= step else 0
        up = above[x]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        else:
            corner = above[x - step] if x >= step else 0
            a, b, c = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
            guess = left if a <= b and a <= c else up if b <= c else corner
        line[x] = (line[x] + guess) & 0xFF
    return line


EVERYWHERE: Final = [
    pytest.param(
        name, size, id=f"{name}-{where}", marks=() if (name, size) == ("five", PHONE) else SLOW
    )
    for name in ("one", "five", "hard", "paper")
    for where, size in {"phone": PHONE, "laptop": LAPTOP, "paper": SHEET}.items()
]


@pytest.mark.parametrize(("name", "size"), EVERYWHERE)
def test_nothing_overflows_or_overlaps(
    browser: str, tmp_path: Path, pages: dict[str, Path], name: str, size: tuple[int, int]
) -> None:
    found = measure(browser, tmp_path, pages[name], size)
    assert found["inner"] == size[0]
    assert found["wide"] == []
    assert found["scroll"] <= found["inner"]
    assert found["bad"] == []
    assert found["charts"] >= (2 if name == "paper" else 4)
    assert found["all"] == 2 * found["charts"]  # one for wide screens, one for narrow
    assert found["smallest"] >= 9.5  # pixels; names under bars are the smallest type


@pytest.mark.parametrize(
    "size", [pytest.param(PHONE, id="phone"), pytest.param(LAPTOP, id="laptop", marks=SLOW)]
)
def test_a_screenshot_shows_ink_on_paper(
    browser: str, tmp_path: Path, pages: dict[str, Path], size: tuple[int, int]
) -> None:
    image = screenshot(browser, tmp_path, pages["five"], size)
    assert image.shape == (size[1], size[0], 3)
    light = image.mean(axis=2)
    assert 0.01 < (light < 128).mean() < 0.3
    assert (light > 240).mean() > 0.6
    # Ink from top to bottom, within margins.
    assert all((band < 128).any() for band in np.array_split(light, 4))
    assert (light[:, :8] > 240).all() and (light[:, -8:] > 240).all()


@SLOW
def test_test_entropy_is_loud_on_a_phone(
    browser: str, tmp_path: Path, pages: dict[str, Path]
) -> None:
    image = screenshot(browser, tmp_path, pages["hard"], PHONE)
    red = (np.abs(image - np.array([0xA3, 0x15, 0x15])).max(axis=2) < 12).sum()
    assert red > 800
    clean = screenshot(browser, tmp_path, pages["five"], PHONE)
    assert (np.abs(clean - np.array([0xA3, 0x15, 0x15])).max(axis=2) < 12).sum() == 0


def test_print_is_a4_and_a_few_pages(browser: str, tmp_path: Path, pages: dict[str, Path]) -> None:
    out = tmp_path / "page.pdf"
    start(
        browser, tmp_path, pages["one"], LAPTOP, "--no-pdf-header-footer", f"--print-to-pdf={out}"
    )
    pdf = out.read_bytes()
    assert pdf.startswith(b"%PDF-")
    sizes = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)\s*\]", pdf)
    assert 3 <= len(sizes) <= 7
    # 210 mm x 297 mm in points.
    assert all(abs(float(w) - 595.3) < 1 and abs(float(h) - 841.9) < 1 for w, h in sizes)


def test_a_statement_is_one_sheet_and_fits_a_phone(browser: str, tmp_path: Path) -> None:
    """As long as it gets: noise with conditions, warnings, and as many attacks as are listed."""
    plan = Plan(
        federation="a_federation_name_without_any_space_that_goes_on_and_on_and_on",
        scheme="secure-fedavg",
        cohort=100,
        tables=(TablePlan(name="items", rows=500, width=8),),
        dp=DPPlan(unit="user", epsilon=3.0, delta=1e-5, trust="shares"),
    ).with_simulation(rounds=3)
    finding = {"unit": "share", "measured": 0.5, "low": 0.4, "high": 0.6, "claimed": 0.5}
    finding |= {"level": 0.999, "verdict": "broken"}
    names = [f"an attack with a long name that says what was tried, number {n}" for n in range(20)]
    subject = Subject(
        name="run",
        kind="run",
        plan=noise_of(plan).calibrated(),
        version="1.0",
        rounds=2,
        people=200_000,
        test_entropy=True,
        audit={"attacks": [finding | {"name": name} for name in names]},
    )
    page = tmp_path / "statement.html"
    page.write_text(statement_page.html(statement_of(subject)))
    for size in (PHONE, LAPTOP):
        found = measure(browser, tmp_path, page, size)
        assert found["scroll"] <= found["inner"] and not found["wide"]
    out = tmp_path / "statement.pdf"
    start(browser, tmp_path, page, LAPTOP, "--no-pdf-header-footer", f"--print-to-pdf={out}")
    sizes = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)\s*\]", out.read_bytes())
    assert len(sizes) == 1
    assert all(abs(float(w) - 595.3) < 1 and abs(float(h) - 841.9) < 1 for w, h in sizes)
