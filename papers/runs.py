"""Finished measurements, one file each, named by what was measured and by which code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from papers.cells import say
from tessera import __version__
from tessera.crypto import kernel


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of measurements; another version of the code, or of the kernel, measures anew."""

    folder: Path
    version: str = field(default_factory=lambda: code_version())

    def get(
        self,
        kind: str,
        setting: Mapping[str, Any],
        work: Callable[[], dict[str, Any]],
        *,
        title: str,
        repeat: int = 0,
    ) -> dict[str, Any]:
        """What was measured under this setting, or what `work` measures now."""
        key = {
            "kind": kind,
            "setting": setting,
            "repeat": repeat,
            "code": self.version,
            "kernel": kernel.describe().name,
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
        path = self.folder / f"{kind}-{digest}.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())["found"]
            return found
        say(f"{kind}: {title}")
        found = work()
        self.folder.mkdir(parents=True, exist_ok=True)
        finished = path.with_suffix(".part")  # whoever is stopped while writing leaves no half file
        finished.write_text(json.dumps({"key": key, "found": found}))
        finished.replace(path)
        return found


def code_version() -> str:
    """A digest of the package's own sources: other code, other figures."""
    digest = hashlib.sha256(__version__.encode())
    digest.update(_sources(".py", ".c"))
    return digest.hexdigest()[:20]


def training_version() -> str:
    """A digest of what a model's bits depend on: other code, other curves."""
    return hashlib.sha256(_sources(".py", without=("audit", "report", "cli"))).hexdigest()


def _sources(*suffixes: str, without: tuple[str, ...] = ()) -> bytes:
    root = Path(__file__).parents[1]
    found = sorted(p for p in root.rglob("*") if p.suffix in suffixes)
    names = ((path, path.relative_to(root)) for path in found)
    return b"".join(
        name.as_posix().encode() + b"\0" + path.read_bytes()
        for path, name in names
        if name.parts[0] not in without
    )
