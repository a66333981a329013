"""Write docs/plan.md, the reference of all keys of a plan, from the source that explains them.

python scripts/write_plan_reference.py
"""

from __future__ import annotations

from pathlib import Path

from tessera import tasks
from tessera.plan.reference import page

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"


def text() -> str:
    return page({name: (task.options, task.kind.explained) for name, task in tasks.TASKS.items()})


if __name__ == "__main__":
    PAGE.write_text(text())
