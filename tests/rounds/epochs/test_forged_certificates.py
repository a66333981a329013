"""A certificate with mask keys of the server's: it would read the victim's vector alone.

A mask key is signed by its owner together with what it has delivered. Without that signature the
server is the other end of every pair, takes the masks off one vector, and sees which rows it has.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lying_server import SIGNATURE, B, Floats, LyingServer, attacked, moved, off
from tessera import wire
from tessera.crypto import prg
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label, Stream
from tessera.ids import ClientId
from tessera.protocols.epochs.messages import DeliveryCertificate, link

FEW, ALL = 2, 30  # groups of ten


def forged(server: LyingServer, victim: ClientId) -> Floats | None:
    draws, epoch = ScriptedEntropy(b"server"), server.fixed()
    mine = {
        c: AgreementKey.from_secret(draws.secret(Label.EPOCH_MASK_KEY, c))
        for c in server.group.members
        if c != victim
    }
    said = server.said[victim]
    entries = tuple(
        said if c == victim else replace(server.said[c], mask_key=mine[c].public)
        for c in server.group.members
    )
    keys = DeliveryCertificate(entries=entries)
    delivery = server.ask(victim, epoch, keys)
    ring, at = epoch.header.ring, link(said.link, server.group, epoch.header, wire.digest(keys))
    total = ring.zeros(epoch.header.length)
    ring.add_packed(total, delivery.vector)
    for peer, key in mine.items():
        (low, low_key), (high, high_key) = sorted([(victim, said.mask_key), (peer, key.public)])
        named = (at.digest, low, high, low_key, high_key)
        pair = key.agree(said.mask_key, Label.EPOCH_PAIR, *named)
        sign = 1 if peer == low else -1
        prg.accumulate(ring, total, [Stream.of(pair, Label.EPOCH_MASK)], [sign])
    return server.moves(total, epoch)


def compared(groups: int, patch: pytest.MonkeyPatch) -> None:
    name = "a forged certificate"
    with patch.context() as patched:
        off(patched, [SIGNATURE])
        found = attacked(forged, groups=groups, epochs=2, reading=moved)
    found.shown(name, "without signatures over mask keys")
    assert found.rate == 1.0 and not found.closed
    found = attacked(forged, groups=groups, epochs=2, reading=moved)
    found.shown(name, "as shipped")
    assert len(found.refused) == 10 * groups and found.above <= B
    assert "an invalid signature" in found.refused[0]


def test_a_forged_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compared(FEW, monkeypatch)


@pytest.mark.campaign
def test_forged_certificates_are_refused_by_300_members(monkeypatch: pytest.MonkeyPatch) -> None:
    compared(ALL, monkeypatch)
