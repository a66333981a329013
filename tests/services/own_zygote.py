"""What a client's process of a test has loaded when it is forked, and how it is shut into a folder.

In a mount namespace of its own a process sees its own folder and none of the others': those are
under an empty file system. Without the right to make one (`alone` is False then) it is not.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import tessera.cli.deployment
import tessera.services.task_clients  # noqa: F401
from tessera.cli.main import main
from tessera.crypto import kernel

kernel.active()

NEW_NAMESPACE, PRIVATE, BIND = 0x00020000, (1 << 18) | (1 << 14), 4096


def alone(folder: Path) -> bool:
    """Hide what is beside this folder; whether that was possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = folder.parent.with_name("own")
    own.mkdir(exist_ok=True)

    def mount(source: str, target: str, kind: str | None, flags: int) -> bool:
        there = None if kind is None else kind.encode()
        return libc.mount(source.encode(), target.encode(), there, flags, None) == 0

    return (
        libc.unshare(NEW_NAMESPACE) == 0
        and mount("none", "/", None, PRIVATE)
        and mount(str(folder), str(own), None, BIND)
        and mount("tmpfs", str(folder.parent), "tmpfs", 0)
    )


def run(folder: str, log: str, arguments: list[str]) -> None:
    """One command line in this folder, in a process of its own."""
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    here = Path(folder)
    if here.parent.name == "clients" and alone(here):
        assert not list(here.parent.iterdir()), "nobody else's folder is there"
        here = here.parent.with_name("own")
        print('{"event": "alone"}', flush=True)
    os.chdir(here)
    sys.exit(main(arguments))
