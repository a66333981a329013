"""How many clients are in a cohort that is drawn in secret, by a coin for each.

Their number varies and nobody but the leader is to know it: sums are divided by the number that is
expected, `cohort` in the plan. A round is held with `fewest_drawn` to `most_drawn` of them. Else it
is given up, which everybody sees, and which tells somebody who knows all other coins the last one:
`boundary` is how likely it is that they leave it so, and must be at most `GIVEN_UP`, which is in
the account.
"""

from __future__ import annotations

import math
from typing import Final

GIVEN_UP: Final = 1e-10
"""Most probability that a round is given up, or not, by one client's coin; charged to delta."""
LONGER: Final = 2.0**-40
"""Probability that more come than there is room for."""


def most_drawn(expected: int) -> int:
    """More come with probability `LONGER` at most, by Bernstein's inequality."""
    logs = -math.log(LONGER)
    return math.ceil(expected + logs / 3.0 + math.sqrt(logs**2 / 9.0 + 2.0 * expected * logs))


def fewest_drawn(expected: int, *, floor: int, dropout: float) -> int:
    """With fewer than this a round is not begun.

    So few that they hardly ever come, by Chernoff's bound; but of those who come `dropout` may
    leave, and `floor` have to stay.
    """
    rare = math.floor(expected - math.sqrt(-2.0 * expected * math.log(GIVEN_UP)))
    fewest = max(2, floor, rare)
    while fewest - int(dropout * fewest) < floor:
        fewest += 1
    return fewest


def boundary(fewest: int, *, expected: int, share: float) -> float:
    """Probability that fewer than `fewest` come of all but one client, each by a coin of `share`.

    There are as many as make `expected` the nearest number, or fewer by what rounding hides.
    """
    if share >= 1.0:
        return 0.0  # everybody is in, which is no secret
    others = math.ceil((expected - 0.5) / share) - 1
    log_odds = math.log(share) - math.log1p(-share)
    log_p, total = others * math.log1p(-share), 0.0
    for k in range(min(fewest, others + 1)):
        total += math.exp(log_p)
        log_p += log_odds + (math.log((others - k) / (k + 1)) if k < others else 0.0)
    return min(1.0, total)
