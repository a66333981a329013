"""The bound B: how likely a holder is identified, whatever an observer does, after any rounds.

    P(client u holds row r | the whole transcript) <= B = h e^(2L) / (h e^(2L) + g - h)

Before the run any h of the honest clients were equally likely to be the row's h holders. g counts
the honest clients that the plan *forces* to leave the same trace for r in every round, answers
aside. L is the level of the answers, added up over a client's rows, since its rows can be linked
(0 where all answer alike); 2L, since "u and not v" changes two clients' answers.

Why: put any of the g in u's place among the holders. Sums, counts, unions and lists stay the same
bit by bit, since all g leave the same trace; answers change in likelihood by at most e^(2L). So the
sets with u weigh at most e^(2L) h / (g - h) of those without. This takes members that are
exchangeable: nothing that is seen follows from who a client is
(`docs/decisions/0017-members-are-exchangeable.md`).

Exact sums hide a holder only among clients with the same trace in *every* round, and a plan forces
that in one case: fixed groups whose union and sums open over the whole group or not at all, and in
which everybody names the whole union. (Where answers differ a count is positive only if a holder
said yes, so that sums copy answers and nobody's trace is forced.) In every other case g = h and
B = 1: the word is "identified". B follows from the plan before a run, never from a run or from the
attack that tests it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from tessera.errors import MisuseError
from tessera.privacy.index.exposure import Holders

COMING_AND_GOING: Final = (
    "where clients come and go nothing exact hides a holder (a group that a member has left is "
    "retired, and without groups B = 1): only noise that no server holds would"
)
NAMED: Final = (
    "over many rounds the sums identify a row's holder (B = 1): nothing here makes two clients "
    'leave the same trace; level = "groups" of secure-submodel does'
)
KNOWN_ROW: Final = (
    "whoever knows one row of a member links others to it by their values "
    "(the known-row figure of `tessera audit`)"
)
CORRUPT_MEMBERS: Final = (0, 2, 5)
"""Members that work with the server for which B is always printed."""

ON_THE_OPERATORS_WORD: Final = "groups on the operator's word"
CONDITIONS: Final = (
    "one holder in the group, the other members honest, no known row, no second group over the "
    f"same rows, {ON_THE_OPERATORS_WORD}"
)
"""What B supposes, in short. For h holders it is h times as much; members that work with the
observer make the group smaller; who knows of one row whose it is links others to it by their
values; two groups are compared; and who holds both values of the beacon, or admits few clients at a
time, can choose who is in a group."""
BETWEEN_PERIODS: Final = "nobody knows who was active between two periods"
"""What B supposes beside, where a group takes new data."""
SMALL: Final = (
    "small = true: among few newcomers whoever admits them can choose who is in a group "
    f"({ON_THE_OPERATORS_WORD})"
)
ANY_ROUNDS: Final = (
    "for any number of rounds in one group (a second federation over the same rows is refused in "
    "deployments, and has B = 1 if accepted)"
)
"""How long B holds: what is said wherever it is not about the rounds of one run."""


def in_words(bound: float, *conditions: str) -> str:
    """B as a short sentence with its conditions: what every headline of fixed groups says."""
    if bound >= 1.0:
        return "a row's holder can be identified (B = 100%)"
    said = ", ".join((CONDITIONS, *conditions))
    return f"a row's holder is identified with at most {100.0 * bound:.3g}% probability ({said})"


def holder_bound(*, holders: int, alike: int, level: float = 0.0) -> float:
    """B for a row with `holders` honest holders among `alike` honest clients of equal trace.

    1 where the trace hides nobody (no more clients alike than holders) or where the level of the
    answers is infinite.
    """
    if holders < 1:
        raise MisuseError(
            f"a bound on holders is about a row that is held, not by {holders} clients"
        )
    if not level >= 0.0:  # also refuses nan
        raise MisuseError(f"the level of the answers is 0 or more, not {level}")
    if alike <= holders or math.isinf(level):
        return 1.0
    return 1.0 / (1.0 + (alike - holders) / holders * math.exp(-2.0 * level))


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a plan forces on every client's trace; all that B depends on.

    `group` is the size of a fixed group that opens whole or not at all and in which everybody names
    the whole union, so that L = 0; it is 0 where the plan has none.
    """

    group: int = 0
    corrupt: int = 0  # clients of a group that tell the observer all they know
    periods: bool = False  # whether a group takes new data, with a new union, from time to time

    def __post_init__(self) -> None:
        if min(self.group, self.corrupt) < 0:
            raise MisuseError(f"group {self.group} and corrupt {self.corrupt} are counts")

    def alike(self, *, curious_clients: int = 0) -> int:
        """Honest clients with one trace. A curious client in the group knows its own rows."""
        return max(0, self.group - self.corrupt - curious_clients)

    def bound(self, *, holders: int = 1, curious_clients: int = 0) -> float:
        """B against the server, or (`curious_clients` = 1) against one client of the group."""
        return holder_bound(holders=holders, alike=self.alike(curious_clients=curious_clients))

    def in_words(self) -> str:
        """B with its conditions."""
        return in_words(self.bound(), *((BETWEEN_PERIODS,) if self.periods else ()))

    def with_corrupt(self) -> dict[int, float]:
        """B by members that work with the server: the usual numbers, and the plan's own."""
        counts = sorted({*CORRUPT_MEMBERS, self.corrupt})
        return {each: replace(self, corrupt=each).bound() for each in counts}

    def corrupt_in_words(self) -> str:
        """The same as a sentence for pages."""
        found = self.with_corrupt()
        counts, bounds = map(str, found), (f"{100.0 * each:.3g}%" for each in found.values())
        return (
            f"With {', '.join(counts)} members that work with the server B is {', '.join(bounds)}."
        )

    def mean(self, holders: Holders, *, curious_clients: int = 0) -> float:
        """B averaged over all (row, holder) pairs: what the share of right best guesses keeps."""
        return math.fsum(
            share * self.bound(holders=count, curious_clients=curious_clients)
            for count, share in holders.by_holding
        )

    def largest(self, holders: Holders, *, curious_clients: int = 0) -> float:
        """The largest B of any row: what the most confident guesses keep."""
        return max(
            self.bound(holders=count, curious_clients=curious_clients)
            for count, _ in holders.by_row
        )
