"""Participation: in which rounds of a training one client may be, at most.

Choquette-Choo et al. 2023 ("Multi-epoch matrix factorization mechanisms", section 2): what noise
has to be sized for is the worst of all participation patterns that are allowed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """At most `most` of `rounds` rounds, any two of them at least `separation` rounds apart."""

    rounds: int
    most: int
    separation: int
