"""Members of a group that waits are exchangeable as services, over journals and with kills."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from exchange import CarrierView, SwappedEntropy, difference
from rounds.population import holdings
from services import group_lab
from services.group_lab import GroupLab, grouped, trainer
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER, ClientId, Party

CLIENTS, SIZE, ROUNDS = 8, 4, 3
Pair = tuple[ClientId, ClientId]


class ViewLab(GroupLab):
    """What clients and leader say to each other is recorded."""

    view: CarrierView

    def ask(self, client: ClientId, data: bytes) -> bytes:
        self.view.message("sent", client, SERVER, data)
        answer = super().ask(client, data)
        self.view.message("answered", SERVER, client, answer)
        return answer


def view_of(
    folder: Path,
    swap: Pair | None,
    kills: Iterable[tuple[Party, int]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> CarrierView:
    whose = {c: c for c in map(ClientId, range(CLIENTS))}
    if swap is not None:
        whose[swap[0]], whose[swap[1]] = swap[1], swap[0]
    held = holdings(CLIENTS)
    with monkeypatch.context() as patched:
        patched.setattr(ViewLab, "view", CarrierView(), raising=False)
        patched.setattr(group_lab, "trainer", lambda c: trainer(whose[c]))
        patched.setattr(group_lab, "holdings", lambda _: {c: held[whose[c]] for c in whose})
        script = ScriptedEntropy(group_lab.SEED)
        lab = ViewLab(
            grouped(CLIENTS, SIZE), folder, CLIENTS, entropy=lambda: SwappedEntropy(script, swap)
        )
        lab.kill_at = set(kills)
        lab.run(ROUNDS, seed=seed, away=0.3)
        view = lab.view
    view.happened("model", content=lab.leader.model.digest)
    view.happened("order", content=[str(each) for each in lab.order()])
    lab.close()
    return view


@pytest.mark.parametrize("seed", range(2))
def test_members_are_exchangeable_as_services(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = group_lab.groups_of(grouped(CLIENTS, SIZE), CLIENTS)[seed].members
    kills = [(party, at) for party in (first, second, SERVER) for at in (3, 11, 24)]
    one, other = (
        view_of(tmp_path / str(swap), swap, kills, monkeypatch, seed)
        for swap in (None, (first, second))
    )
    assert one.count("sent") > 60
    found = difference(one, other)
    assert not found, found
