"""The table of attacks: complete, and the same in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit import runs
from tessera.audit.record import shown
from tessera.audit.suite import ATTACKS
from tessera.plan import Scheme
from tessera.rounds.select import Shown

PAGE = Path(__file__).parents[2] / "docs/protocols/audit.md"


def test_the_page_has_the_table():
    lines = [f"| {a.name} | {a.needs.value} | {a.claim} |" for a in ATTACKS]
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")


def test_names_differ_and_whatever_a_run_shows_is_attacked():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert {attack.needs for attack in ATTACKS} == set(Shown)


@pytest.mark.parametrize("scheme", [s for s in Scheme if s is not Scheme.CENTRAL])
def test_something_is_tried_under_every_scheme_with_rounds(scheme: Scheme):
    level = {"level": "cpp3"} if scheme is Scheme.SECURE_SUBMODEL else {}
    plan = runs.plan_of(scheme=scheme, **level)
    assert any(attack.needs in shown(plan) for attack in ATTACKS)
