"""What a process of a test deployment has loaded when it is forked: it starts in milliseconds."""

from __future__ import annotations

import os
import sys

import tessera.cli.deployment  # noqa: F401
from tessera.cli.main import main
from tessera.crypto import kernel

kernel.active()


def run(log: str, arguments: list[str]) -> None:
    """One command line, in a process of its own."""
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(main(arguments))
