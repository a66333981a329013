"""One member is given something else than the others, and its rows move otherwise.

Everything that is received for an epoch is in its link, and masks name the link: members that were
given different things do not cancel. With inputs in no digest the sum opens, and shows who was
given the other one. A member that comes last, however late, trains on what the others had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pytest

from lying_server import (
    COUNTS,
    INPUTS,
    KINDS,
    MAPS,
    ROWS,
    TABLE,
    Attack,
    B,
    Floats,
    LyingServer,
    attacked,
    kinds_by,
    moved_least,
    moved_most,
    off,
)
from tessera.ids import ClientId
from tessera.rounds.party import ServerModel

FEW, ALL = 2, 30  # groups of ten


def scaled(model: ServerModel, by: float) -> ServerModel:
    """The same model with other rows."""
    other, every = model.copy(), np.arange(ROWS, dtype=np.uint64)
    rows = other.tables[TABLE].values(every)
    other.tables[TABLE].put(every, (by * rows).astype(np.float32), np.ones(ROWS, np.int64))
    return other


def told(server: LyingServer, victim: ClientId, by: float) -> Floats | None:
    """The victim, who comes last, is given a model with other rows."""
    others = [c for c in server.group.members if c != victim]
    honest, other = server.fixed(), server.fixed(scaled(server.model, by))
    return server.collect({**dict.fromkeys(others, honest), victim: other})


def two_bases(server: LyingServer, victim: ClientId) -> Floats | None:
    """Rows so long that the victim has nothing left to learn."""
    return told(server, victim, 40.0)


def newest_base(server: LyingServer, victim: ClientId) -> Floats | None:
    """What a server that means well might do: who comes late is given what there is by then."""
    return told(server, victim, 2.0)


ATTACKS: Final[Mapping[str, Attack]] = {
    "two bases": two_bases,
    "the newest base for a member kept waiting": newest_base,
}


def other_kinds(server: LyingServer, victim: ClientId) -> Floats | None:
    """The victim has another map from things to kinds; whose kinds are missing is its thing."""
    images = np.random.default_rng(int(victim)).permutation(ROWS)
    server.devices[victim].setup.local.derived = kinds_by(images)
    if server.epoch() is None:
        return None
    missing = server.opened[KINDS].counts[:, None] == 0
    return missing.astype(np.float32)


def other_counts(server: LyingServer, victim: ClientId) -> Floats | None:
    """The victim is told counts by which every row but one stands for so many that it has nothing
    to learn of any: whose rows stay where they are is the victim."""
    counts = np.full(ROWS, 1e-12)
    counts[0] = 1.0
    server.devices[victim].given_counts(counts)
    return server.epoch()


STEERING: Final = {
    "another map to kinds": (other_kinds, MAPS, moved_most),
    "other counts for negatives": (other_counts, COUNTS, moved_least),
}


def in_no_digest(name: str, groups: int, patch: pytest.MonkeyPatch) -> None:
    attack, line, reading = STEERING[name]
    with patch.context() as patched:
        off(patched, [line])
        found = attacked(attack, groups=groups, epochs=2, reading=reading)
    found.shown(name, "in no digest")
    assert found.above > 0.5 and not found.closed
    found = attacked(attack, groups=groups, epochs=2, reading=reading)
    found.shown(name, "as shipped")
    assert len(found.refused) == 10 * groups and found.above <= B
    assert "other inputs than the epoch's header has digests of" in found.refused[0]


@pytest.mark.parametrize("name", STEERING)
def test_a_member_with_other_public_data_leaves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_no_digest(name, FEW, monkeypatch)


@pytest.mark.campaign
@pytest.mark.parametrize("name", STEERING)
def test_300_members_with_other_public_data_leave(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_no_digest(name, ALL, monkeypatch)


def test_counts_are_compared_before_a_union_is_offered() -> None:
    """They steer which negatives are drawn, and these are in the union."""
    found = attacked(other_counts, groups=1, epochs=0)
    assert len(found.refused) == 10


def compared(name: str, groups: int, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as patched:
        off(patched, [INPUTS])
        found = attacked(ATTACKS[name], groups=groups, epochs=3)
    found.shown(name, "with inputs in no digest")
    assert found.above > 0.5 and not found.closed
    found = attacked(ATTACKS[name], groups=groups, epochs=3)
    found.shown(name, "as shipped")
    assert found.closed == 10 * groups and found.above <= B


@pytest.mark.parametrize("name", ATTACKS)
def test_members_with_other_inputs_do_not_cancel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(name, FEW, monkeypatch)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ATTACKS)
def test_300_members_with_other_inputs_do_not_cancel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(name, ALL, monkeypatch)


def late(server: LyingServer, victim: ClientId) -> Floats | None:
    """The victim comes when the model has long moved on, and is given what the others were."""
    others = [c for c in server.group.members if c != victim]
    epoch = server.fixed()
    deliveries = [server.ask(client, epoch) for client in others]
    server.model = scaled(server.model, 2.0)
    return server.sum([*deliveries, server.ask(victim, epoch)], epoch)


def test_who_comes_last_moves_rows_like_the_others() -> None:
    found = attacked(late, groups=FEW, epochs=3)
    assert not found.closed and not found.refused and found.above <= B


@pytest.mark.campaign
def test_who_comes_last_of_300_moves_rows_like_the_others() -> None:
    found = attacked(late, groups=ALL, epochs=3)
    found.shown("a member kept waiting", "from the base that the others had")
    assert not found.closed and not found.refused and found.above <= B
