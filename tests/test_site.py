"""The documentation builds as a site, without a warning and with nothing to fetch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_what_is_written_from_the_code(
    tmp_path: Path,
) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    script = ROOT / "scripts" / "build_docs.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "site"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr

    def text(page: str) -> str:
        return re.sub(r"<[^>]+>", "", (tmp_path / "site" / page).read_text(encoding="utf-8"))

    for page in (ROOT / "docs").rglob("*.md"):
        relative = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (tmp_path / "site" / relative).exists()
    assert "simulate(" in text("api.html") and "recommend" in text("api.html")
    assert "rows_below_quorum" in text("run-files.html")
    assert "attacks[].verdict" in text("json-fields.html")
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert not fetched, page
