"""What every test run shares: reproducible examples, and an honest closing line about skips."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import settings

# The same examples on every machine and in every run, however slow: a failure can be repeated.
settings.register_profile("tessera", derandomize=True, deadline=None)
settings.load_profile("tessera")


HOMES = count()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def own_home(homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees or writes what the user account, or another test, has offered to groups."""
    monkeypatch.setenv("XDG_STATE_HOME", str(homes / str(next(HOMES))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that says how many tests did not run, and why."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(skip_reason(report) for report in skipped)
    why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"skipped {len(skipped)} tests{f' ({why})' if why else ''}")


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    # pytest gives a skip as (file, line, "Skipped: reason").
    reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    return reason.removeprefix("Skipped: ")
