"""The last word of a round to its clients: whether what each of them sent has counted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tessera.ids import ClientId, RoundId
from tessera.protocols.machine import Outbound, RoundOutcome, RoundOver, to_all
from tessera.rounds.encode import RoundResult

OUT_OF_BOUNDS: Final = "the opened sum is not one of honest clients"
"""Why a sum is not merged."""


def farewells(
    round_id: RoundId, invited: Collection[ClientId], result: RoundResult
) -> list[Outbound]:
    """After a sum: done for those who are in it, and left out for the others.

    A sum that cannot be merged leaves everybody out: clients keep what they sent.
    """
    counted = frozenset() if result.out_of_bounds else frozenset(result.survivors)
    reason = OUT_OF_BOUNDS if result.out_of_bounds else "not in the sum"
    done = RoundOver.of(round_id, RoundOutcome.DONE)
    left_out = RoundOver.of(round_id, RoundOutcome.LEFT_OUT, reason)
    return [
        *to_all(counted & frozenset(invited), done),
        *to_all(frozenset(invited) - counted, left_out),
    ]
