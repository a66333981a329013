"""Every key of a plan is explained once, and what is generated from that is up to date."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tessera import tasks
from tessera.errors import ConfigError
from tessera.learning.averaging import ServerStep
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan, Scheme, TaskPlan
from tessera.plan.reference import (
    COLUMN,
    RECORDS,
    WIDTH,
    comment_of,
    example_plan,
    keys_of,
    section,
    texts_of,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", RECORDS)
def test_every_key_and_every_section_is_explained(name: str) -> None:
    assert comment_of(name)
    for key in keys_of(name).values():
        assert key.text.endswith(".") and key.comment
    if name and RECORDS[name] is not TaskPlan:
        assert list(keys_of(name)) == [f.name for f in fields(RECORDS[name])]


def test_every_scheme_and_every_option_of_a_task_is_explained() -> None:
    assert texts_of(Scheme).keys() == {s.name for s in Scheme}
    for known in tasks.TASKS.values():
        assert known.options.keys() <= known.kind.explained.keys()


def test_the_reference_page_is_the_one_that_is_written() -> None:
    path = ROOT / "scripts" / "write_plan_reference.py"
    spec = importlib.util.spec_from_file_location("write_plan_reference", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.text(), "run scripts/write_plan_reference.py"


@pytest.mark.parametrize("scheme", Scheme)
def test_comments_fit_the_page_and_change_nothing(scheme: Scheme) -> None:
    text = example_plan(scheme)
    assert max(map(len, text.splitlines())) <= WIDTH
    bare = "\n".join(line.partition("#")[0] for line in text.splitlines())
    assert Plan.parse(text) == Plan.parse(bare)


def test_a_long_comment_goes_on_below() -> None:
    lines = section("task", TaskPlan(name="mine"), notes={"name": ["second line"]}).splitlines()
    assert lines[1].index("#") == lines[2].index("#") == COLUMN
    assert lines[2].strip() == "# second line"


@pytest.mark.parametrize("kind", [LocalTraining, ServerStep])
def test_learning_rate_is_another_name_for_rate_in_python_too(kind):
    one = kind(learning_rate=0.25)
    assert one == kind(rate=0.25)
    assert one.learning_rate == one.rate == 0.25
    assert replace(one, rate=0.5).learning_rate == 0.5
    assert "learning_rate" in inspect.signature(kind).parameters
    with pytest.raises(ConfigError, match="two names"):
        kind(learning_rate=0.1, rate=0.1)
    with pytest.raises(ConfigError, match="rate = -1"):
        kind(learning_rate=-1.0)
