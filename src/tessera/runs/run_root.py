"""The root of a run: all secrets of a simulation are derived from it, and it is stored with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tessera.crypto.entropy import Entropy, RootedEntropy, ScriptedEntropy
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError
from tessera.runs.folder import CHECKPOINT, RunFolder

# --- owner only -----------------------------------------------------------------------------------
#
# Files that only their owner may read: secrets, and what only a simulation may know.


def write_owner_only(path: Path, content: bytes) -> None:
    """A new file, on disk when this returns; its mode is set before there is anything in it."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


# --- run root -------------------------------------------------------------------------------------

ROOT: Final = "root.key"


def owners_folder(folder: Path) -> None:
    """A folder that only its owner reads: it holds the root, and simulated clients' own rows."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def run_root(folder: Path | None) -> RootedEntropy:
    """The run's root: the stored one, or a fresh one, stored before anything follows from it."""
    if folder is None:
        return RootedEntropy.fresh()
    path = folder / ROOT
    if path.exists():
        return _stored_root(path)
    fresh = RootedEntropy.fresh()
    owners_folder(folder)
    write_owner_only(path, fresh.root.reveal())
    return fresh


def _stored_root(path: Path) -> RootedEntropy:
    root = path.read_bytes()
    if len(root) != 32:
        raise ConfigError(f"{path}: {len(root)} bytes where a root has 32", hint="start a new run")
    return RootedEntropy(Secret(root))


def entropy_of(log: RunFolder) -> Entropy:
    """What the secrets of a run's clients followed from, to find again what they drew for good."""
    script = log.facts.get("entropy_script")
    if script is not None:
        return ScriptedEntropy(str(script).encode())
    path = log.folder / CHECKPOINT / ROOT
    if not path.is_file():
        raise ConfigError(
            f"{path}: missing, and what the run's clients drew for themselves follows from it",
            hint="copy the whole folder of the run, or start a new run",
        )
    return _stored_root(path)
