"""What the helper checks of a report that the leader carries, and what it remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import harness
import two_servers
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import SealingKey, seal_to
from tessera.crypto.secret import Secret
from tessera.errors import PeerError
from tessera.ids import HELPER, SERVER, ClientId
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.collector import ReportInbox
from tessera.protocols.two_server.messages import Forwarded, HelperBox, Purpose
from tessera.protocols.two_server.reports import ReportContext
from tessera.wire.stored import Kept


class Desk:
    """A helper's inbox, and one client's true report for it."""

    def __init__(self, purpose: Purpose = Purpose.WRITE) -> None:
        self.network = network = two_servers.Network.of(two_servers.params(dense=2))
        header = network.handshake()
        begin = network.writing if purpose is Purpose.WRITE else network.reading
        begin(header)
        self.client = network.clients[0]
        role = network.roles[self.client]
        out = role.submit(None if purpose is Purpose.WRITE else {0: two_servers.ids(1)})
        self.forwarded: Forwarded = wire.decode(
            network.roles[SERVER].receive(self.client, out[0].data)[0].data
        )
        self.inbox: ReportInbox = network.roles[HELPER].inbox
        self.context = self.inbox.report_context(self.client, self.forwarded.report_id)
        self.box: HelperBox = reports.unseal_box(
            self.context, self.forwarded.box, two_servers.keys()[2]
        )

    def sealed(self, box: HelperBox, *, sign: bool = True, **more) -> Forwarded:
        """The report with this box in place of its own."""
        if sign:
            key = self.network.identity(self.client).key
            box = replace(box, signature=key.sign(reports.statement(box)))
        decoded = replace(self.forwarded, **more)
        context = replace(self.context, report_id=decoded.report_id)
        return replace(
            decoded, box=seal_to(two_servers.servers().box, wire.encode(box), context.box_info)
        )

    def refuses(self, message: Forwarded, says: str) -> None:
        before = dict(self.inbox.held)
        with pytest.raises(PeerError, match=says) as caught:
            self.inbox.take(Kept.of(message))
        assert caught.value.peer == message.sender
        assert self.inbox.held == before


def test_a_true_report_is_held_once_and_its_repetition_ignored():
    desk = Desk()
    desk.inbox.take(Kept.of(desk.forwarded))
    desk.inbox.take(Kept.of(desk.forwarded))
    assert desk.inbox.held.keys() == {desk.client} and not desk.inbox.excluded
    again = desk.sealed(desk.box)
    desk.refuses(again, "a second report")


def test_a_public_part_is_hashed_once_while_it_is_taken(monkeypatch):
    """And every one of them: none is taken for another."""
    real, seen = ReportContext.public_digest, []

    def counting(self, public):
        seen.append(self.client)
        return real(self, public)

    desk = Desk()
    monkeypatch.setattr(ReportContext, "public_digest", counting)
    desk.inbox.take(Kept.of(desk.forwarded))
    assert seen == [desk.client]
    other = replace(desk.forwarded, public=(bytes(len(desk.forwarded.public[0])),))
    desk.refuses(other, "a second report")


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"purpose": None}, "another round, client or report"),
        ({"round_id": 13}, "another round, client or report"),
        ({"plan_hash": bytes(32)}, "another round, client or report"),
        ({"header": bytes(32)}, "another round, client or report"),
        ({"sender": ClientId(4)}, "another round, client or report"),
        ({"report_id": bytes(32)}, "another round, client or report"),
        ({"public": bytes(32)}, "does not match its box"),
        ({"seeds": ()}, "missing or unexpected parts"),
        ({"dense_seed": "other"}, "missing or unexpected parts"),
        ({"answer_key": "other"}, "missing or unexpected parts"),
    ],
)
def test_a_box_that_names_something_else_is_refused(purpose, change, says):
    desk = Desk(purpose)
    if "purpose" in change:
        change = {"purpose": next(p for p in Purpose if p is not purpose)}
    if "dense_seed" in change:
        change = {"dense_seed": None if desk.box.dense_seed else Secret(bytes(32))}
    if "answer_key" in change:
        change = {"answer_key": None if desk.box.answer_key else two_servers.servers().box}
    desk.refuses(desk.sealed(replace(desk.box, **change)), says)
    assert desk.client in desk.inbox.excluded
    desk.refuses(desk.forwarded, "was refused before")


def test_an_answer_key_that_is_invalid_is_refused():
    desk = Desk(Purpose.RETRIEVE)
    desk.refuses(
        desk.sealed(replace(desk.box, answer_key=bytes(32))), "missing or unexpected parts"
    )


def test_a_box_is_bound_to_its_sender_and_report_from_outside_too():
    desk = Desk()
    other = desk.network.clients[1]
    desk.refuses(replace(desk.forwarded, sender=other), "cannot be unsealed")
    desk.refuses(replace(desk.forwarded, report_id=bytes(32)), "cannot be unsealed")


def test_a_box_sealed_to_another_key_or_of_other_content_is_refused():
    desk = Desk()
    stranger = SealingKey.from_secret(ScriptedEntropy(b"x").secret("box")).public
    elsewhere = seal_to(stranger, wire.encode(desk.box), desk.context.box_info)
    desk.refuses(replace(desk.forwarded, box=elsewhere), "cannot be unsealed")
    desk = Desk()
    noise = seal_to(two_servers.servers().box, b"no record", desk.context.box_info)
    desk.refuses(replace(desk.forwarded, box=noise), "cannot be unsealed")


def test_only_the_clients_certified_key_signs_its_box():
    desk = Desk()
    thief = harness.signing_key(ClientId(99))
    forged = replace(desk.box, signature=thief.sign(reports.statement(desk.box)))
    desk.refuses(desk.sealed(forged, sign=False), "bad signature")


@pytest.mark.parametrize(
    "change",
    [{"seeds": (bytes(24),)}, {"dense_seed": Secret(bytes(32))}, {"public": bytes(32)}],
    ids=lambda change: next(iter(change)),
)
def test_the_signature_is_on_everything_in_the_box(change):
    desk = Desk()
    desk.refuses(desk.sealed(replace(desk.box, **change), sign=False), "bad signature")


def test_strangers_and_a_cohort_that_is_full_are_refused():
    desk = Desk()
    desk.refuses(replace(desk.forwarded, sender=ClientId(77)), "no certified key")
    assert ClientId(77) not in desk.inbox.excluded
    full = Desk()
    full.inbox.held.update({ClientId(c): None for c in (50, 51, 52)})  # type: ignore[misc]
    full.refuses(full.forwarded, "exceed the size of the cohort")


def test_a_report_id_is_taken_once_for_ever():
    desk = Desk()
    desk.inbox.take(Kept.of(desk.forwarded))
    fresh = ReportInbox(desk.inbox.setup, Purpose.WRITE)
    with pytest.raises(PeerError, match="used before"):
        fresh.take(Kept.of(desk.forwarded))
    assert not fresh.held


def test_a_forged_box_does_not_spend_a_clients_report_id():
    """Or the leader could burn reports before their clients send them."""
    desk = Desk()
    replay_guard = desk.network.replay_guard
    forged = replace(desk.box, signature=bytes(64))
    desk.refuses(desk.sealed(forged, sign=False), "bad signature")
    assert replay_guard.accept(desk.forwarded.report_id)


def test_everything_in_a_subject_is_in_its_digests():
    desk = Desk()
    one = desk.context
    others = [
        replace(one, purpose=Purpose.RETRIEVE),
        replace(one, client=ClientId(4)),
        replace(one, report_id=bytes(32)),
        replace(one, header=replace(one.header, dense=bytes(32))),
    ]
    public = desk.forwarded.public

    def digests(context: ReportContext) -> tuple[bytes, ...]:
        return (
            context.public_digest(public),
            context.report_digest(public, b"box"),
            context.box_info,
            context.answer_info(b""),
            context.answer_statement(b"", public),
        )

    for column in zip(*map(digests, [one, *others]), strict=True):
        assert len(set(column)) == 1 + len(others)
    assert one.public_digest((b"ab", b"c")) != one.public_digest((b"a", b"bc"))
    assert one.table_id(0) != one.table_id(1) != replace(others[0]).table_id(1)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_what_is_signed_is_read_from_the_bytes_that_came(purpose: Purpose) -> None:
    desk = Desk(purpose)
    _, signed = reports.unsealed(desk.context, desk.forwarded.box, two_servers.keys()[2])
    assert signed == reports.statement(desk.box)
    other = replace(desk.box, seeds=(bytes(24), *desk.box.seeds[1:]))
    assert signed != reports.statement(other)


def test_a_report_for_another_place_would_count_if_nobody_compared_it(monkeypatch) -> None:
    """The helper's place in a chain of noise is the round that clients have sealed for it."""
    desk = Desk()
    other = desk.sealed(replace(desk.box, round_id=13))
    desk.refuses(other, "another round, client or report")
    careless = Desk()
    monkeypatch.setattr(reports, "matches", lambda *_: True)
    careless.inbox.take(Kept.of(careless.sealed(replace(careless.box, round_id=13))))
    assert careless.client in careless.inbox.held
