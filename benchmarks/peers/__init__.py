"""Other people's software, measured the way ours is: each peer from its installed package.

A peer is optional. Where it is not installed its figures are absent (`ok: null` in a benchmark's
JSON), never guessed.
"""

from __future__ import annotations


class PeerMissing(Exception):
    """The peer's package is not installed here, or not in a version that has what we measure."""

    def __init__(self, package: str, reason: object) -> None:
        super().__init__(
            f"{package} cannot be measured here ({reason}); "
            "`pip install -c constraints-bench.txt -e '.[bench]'` installs it"
        )
        self.package = package


class PeerFailed(Exception):
    """The peer is installed but did not finish, or its answer was wrong: no figure to compare."""
