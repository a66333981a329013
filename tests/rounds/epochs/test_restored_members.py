"""A member is set back to an earlier state and sends a second vector of one epoch.

Under the same masks the difference of both vectors is that of the words: whatever differs is the
member's. With an honest server it does not come to that: it shows the member its own delivery, and
a member that does not remember it leaves. Mask key and coins follow from one root: what is computed
again is the same but for the order of additions in training, which is all that a lying server sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from audit import shop
from lying_server import (
    COINS,
    EACH,
    MEMORY,
    SIZE,
    TABLE,
    Device,
    Line,
    LyingServer,
    Tally,
    off,
)
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ServerFault
from tessera.ids import ClientId, RoundId
from tessera.rounds import encode
from tessera.rounds.epochs.group import OpenEpoch
from tessera.runs.client_training import Trainer
from tessera.runs.training import Training

FEW, ALL = 2, 30  # groups of ten
UNION, UPDATE = 0, 2  # honest epochs before


def rows_in(server: LyingServer, epoch: OpenEpoch, difference: np.ndarray) -> np.ndarray:
    """The rows that two vectors of one member differ in."""
    plan = server.plan.group_plan
    if epoch.base is None:
        return plan.union_encoding(RoundId(epoch.header.epoch)).decode(difference).ids
    summed = server.epochs._layout(server.model).summed(difference, server.group.members)
    return np.flatnonzero(summed.tables[plan.table_id(TABLE)].words.any(axis=1))


def twice(server: LyingServer, victim: ClientId, *, honest: bool) -> np.ndarray:
    """A member delivers, is set back to before the epoch, and is asked again."""
    epoch = server.fixed()
    before: Device = server.devices[victim].restored()
    first = server.ask(victim, epoch)
    server.devices[victim] = before
    second = server.ask(victim, epoch, own=first.statement if honest else None)
    ring, length = epoch.header.ring, epoch.header.length
    vectors = [ring.unpack(each.vector, length) for each in (second, first)]
    return rows_in(server, epoch, ring.sub(*vectors))


def attacked(groups: int, epochs: int, *, honest: bool) -> Tally:
    """Rows that show in the difference are taken for the victim's."""
    tally = Tally()
    for seed in range(groups):
        before = LyingServer.after(seed, epochs)
        for victim in before.group.members:
            server = before.copy()
            try:
                tally.add(twice(server, victim, honest=honest), server.rows[victim])
            except ServerFault as fault:
                tally.refused.append(fault.reason)
    return tally


def shown(tally: Tally, what: str, rule: str) -> None:
    if tally.refused:
        print(f"{what}, {rule}: refused {len(tally.refused)} times: {tally.refused[0]}")
        return
    members = len(tally.rows)
    print(
        f"{what}, {rule}: {sum(tally.rows)} of {EACH * members} rows of {members} members show, "
        f"{sum(tally.right)} of them are the member's"
    )


def with_off(
    patch: pytest.MonkeyPatch, lines: Sequence[Line], groups: int, epochs: int, *, honest: bool
) -> Tally:
    with patch.context() as patched:
        off(patched, lines)
        return attacked(groups, epochs, honest=honest)


def compared(groups: int, epochs: int, patch: pytest.MonkeyPatch) -> None:
    what = f"set back in {'a union' if epochs == UNION else 'an update'}"
    members = SIZE * groups
    for lines, rule, least in (
        ([MEMORY, COINS], "without memory, and coins apart from the mask key", 0.7),
        ([MEMORY], "without memory", 0.0),
    ):
        found = with_off(patch, lines, groups, epochs, honest=True)
        shown(found, what, rule)
        assert len(found.rows) == members and sum(found.right) == sum(found.rows)
        assert sum(found.rows) >= least * EACH * members
    found = attacked(groups, epochs, honest=True)
    shown(found, what, "as shipped, honest server")
    assert len(found.refused) == members and not found.rows
    assert all("this member's state was set back" in reason for reason in found.refused)
    found = attacked(groups, epochs, honest=False)  # docs/threat-model.md
    shown(found, what, "as shipped, lying server")
    if epochs == UNION:
        assert not sum(found.rows)
    else:
        assert sum(found.rows) < 0.05 * EACH * members


@pytest.mark.parametrize("epochs", [UNION, UPDATE], ids=["union", "update"])
def test_a_member_that_was_set_back_leaves(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(FEW, epochs, monkeypatch)


@pytest.mark.campaign
@pytest.mark.parametrize("epochs", [UNION, UPDATE], ids=["union", "update"])
def test_300_members_that_were_set_back_leave(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(ALL, epochs, monkeypatch)


@pytest.mark.parametrize("epochs", [UNION, UPDATE], ids=["union", "update"])
def test_a_member_set_back_by_a_whole_epoch_leaves(epochs: int) -> None:
    """It has lost its mask key of the epoch that is open, and shows so by what it does not know."""
    server = LyingServer.after(0, epochs)
    for victim in server.group.members:
        after = server.copy()
        back = after.devices[victim].restored()
        after.epoch()
        after.devices[victim] = back
        with pytest.raises(ServerFault, match="this member's state was set back"):
            after.ask(victim, after.fixed())


# --- what training again gives --------------------------------------------------------------------


def trained_again(users: int) -> tuple[int, int]:
    """(rows that differ, rows) of words that a member sends, trained alone and among ten others.

    The same examples in the same order, from the same coins: only additions are in another order.
    """
    task = shop.shop(users)
    plan = shop.plan_for(task, SIZE)
    clients, words = [ClientId(c) for c in range(users)], []
    for trainer in (Trainer.SEQUENTIAL, Trainer.VECTORISED):
        with Training(task, plan, entropy=ScriptedEntropy(b"again"), trainer=trainer) as run:
            words.append({})
            for at in range(0, users, SIZE):
                some = clients[at : at + SIZE]
                jobs = [run.job(c, run._whole(c), RoundId(0)) for c in some]
                trained = run._client_training.train(jobs, RoundId(0))
                for client, job, result in zip(some, jobs, trained, strict=True):
                    rows = job.submodel.trained
                    words[-1][client] = encode.update_words(
                        run.plan.group_plan, result.update, rows, job.coins
                    )
    differ = rows = 0
    for alone, among in zip(words[0].values(), words[1].values(), strict=True):
        for name, part in alone.tables.items():
            differ += int((part.words != among.tables[name].words).any(axis=1).sum())
            rows += len(part.ids)
    return differ, rows


@pytest.mark.campaign
def test_training_again_shows_few_rows() -> None:
    """What a lying server sees of a member that is set back; in the threat model."""
    differ, rows = trained_again(300)
    print(f"trained again under the same masks: {differ} of {rows} rows of 300 members show")
    assert differ < 0.001 * rows
