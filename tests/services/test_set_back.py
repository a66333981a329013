"""A client whose folder was restored within an epoch asks before it trains, and leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

from services.group_lab import GroupLab, grouped
from tessera.crypto.entropy import SystemEntropy
from tessera.ids import ClientId


def test_a_client_set_back_within_an_epoch_sends_nothing_again(tmp_path: Path) -> None:
    """The copy is of the moment when it had the base, and had not delivered."""
    run = GroupLab(grouped(4, 4), tmp_path, 4, entropy=SystemEntropy)
    try:
        while run.leader.next_round < 1:
            for client in map(ClientId, range(4)):
                run.visit(client, once=True)
        victim = run.client(2)
        victim.take(run.leader.take(victim.me, victim.fetch()).message)
        assert victim.pending is not None
        run.kill(victim.me)
        here = run.folder / f"client {victim.me}"
        shutil.copytree(here, run.folder / "before")
        run.start(victim.me)
        run.visit(victim.me, once=True)
        run.kill(victim.me)
        shutil.rmtree(here)
        shutil.move(run.folder / "before", here)
        run.start(victim.me)
        run.visit(victim.me)  # the lab refuses other bytes of one epoch
        assert "state was set back" in run.client(victim.me).left
    finally:
        run.close()
