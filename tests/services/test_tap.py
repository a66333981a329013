"""The tap sees what it is there to see."""

from __future__ import annotations

import pytest

from services.tap import Tap
from tessera import wire
from tessera.ids import ClientId, RoundId, StageId
from tessera.protocols.secagg.messages import SHARE_BYTES, RevealedShares
from tessera.protocols.two_server.messages import SumShare
from tessera.services.link import Numbered


def shares(self_masks: list[int], mask_keys: list[int], stage: int = 1) -> bytes:
    return wire.encode(
        RevealedShares(
            round_id=RoundId(0),
            stage=StageId(stage),
            sender=ClientId(1),
            self_masks={ClientId(c): bytes(SHARE_BYTES) for c in self_masks},
            mask_keys={ClientId(c): bytes(SHARE_BYTES) for c in mask_keys},
        )
    )


def test_two_contents_under_one_number_are_seen() -> None:
    tap = Tap()
    tap.saw(0, "client 1", "server", Numbered(1, b"one"))
    tap.saw(0, "client 1", "server", Numbered(1, b"one"))
    tap.check()
    tap.saw(0, "client 1", "server", Numbered(1, b"two"))
    with pytest.raises(AssertionError, match="one content"):
        tap.check()


def test_a_holder_that_gave_both_shares_of_a_peer_is_seen() -> None:
    tap = Tap()
    tap.saw(0, "client 1", "server", Numbered(4, shares([2, 3], [4])))
    tap.saw(0, "client 2", "server", Numbered(4, shares([4], [2])))
    tap.saw(0, "client 1", "server", Numbered(5, shares([4], [], 0)))
    tap.saw(1, "client 1", "server", Numbered(4, shares([4], [])))
    tap.check()
    tap.saw(0, "client 1", "server", Numbered(6, shares([4], [])))
    with pytest.raises(AssertionError, match="both shares"):
        tap.check()


def test_a_second_sum_share_in_a_round_is_seen() -> None:
    tap = Tap()
    tap.kinds[0, SumShare.__name__] = tap.kinds[1, SumShare.__name__] = 1
    tap.check()
    tap.kinds[1, SumShare.__name__] = 2
    with pytest.raises(AssertionError, match="one sum share"):
        tap.check()
