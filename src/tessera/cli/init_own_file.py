"""A user's own file, looked at before a plan is written: columns, bad lines, what fits its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from tessera.data.examples import ClientData
from tessera.errors import ConfigError

if TYPE_CHECKING:
    from tessera.tasks import Known

OWN_FILES: Final = (".csv", ".tsv", ".txt", ".gz", ".parquet", ".pq")

VISITS: Final = 5
"""Rounds that a client takes part in, on average, by default."""


@dataclass(frozen=True, slots=True)
class OwnFile:
    """The options of its task, what is worth saying about it, and how many clients it has."""

    TASK: ClassVar[str] = "interactions"
    options: dict[str, Any]
    lines: tuple[str, ...]
    clients: int

    @classmethod
    def of(cls, path: Path, given: Mapping[str, str]) -> OwnFile:
        from tessera.data import interactions
        from tessera.data.bad_lines import SKIP
        from tessera.data.guess import guess

        if not path.is_file():
            raise ConfigError(f"{path}: no such file", hint="`tessera init` lists the tasks")
        found = guess(path, given)
        options = {"path": str(path), **found.options()}
        read: dict[str, Any] = {name: value or None for name, value in found.options().items()}
        data = interactions.read(path, **read, on_bad=SKIP)
        bad = next((n for fact, n in data.facts.items() if fact.endswith("s, left out")), 0)
        if bad:
            options["on_bad"] = SKIP
        return cls(options, tuple(_said(path, options, data, int(bad))), data.clients)

    def fitted(self, known: Known) -> Known:
        """The task with a cohort and rounds that fit this many clients."""
        cohort = next((n for n in (100, 50, 20) if self.clients >= 10 * n), 10)
        cohort = max(2, min(cohort, self.clients))
        rounds = min(300, max(30, -(-VISITS * self.clients // cohort)))
        good = replace(known.recommended, cohort=cohort, rounds=rounds)
        return replace(known, recommended=good)


def _said(path: Path, options: Mapping[str, Any], data: ClientData, bad: int) -> list[str]:
    chosen = [
        f"{part} = {options[part]}"
        for part in ("user", "item", "time", "label", "category")
        if options[part]
    ]
    if options["threshold"]:
        chosen.append(f"a click from {options['threshold']:g} on")
    facts = data.facts
    lines = [
        f"{path}: {facts['interactions']:,} interactions of {data.clients:,} users with "
        f"{data.sizes['item']:,} items",
        f"columns: {', '.join(chosen)}",
    ]
    if "read as" in facts:
        lines.append(f"read with {facts['read as']}")
    if bad:
        unit = "lines" if "the first bad lines" in facts else "rows"
        listed = facts[f"the first bad {unit}"]
        lines.append(f'{bad:,} bad {unit}, left out by on_bad = "skip"; the first {len(listed)}:')
        lines += [f"  {line}" for line in listed]
    return lines
