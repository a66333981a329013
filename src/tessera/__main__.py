"""`python -m tessera` is the command `tessera`."""

from __future__ import annotations

import sys

from tessera.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
