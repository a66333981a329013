"""What one server sees says nothing about rows and values; what both see together says all.

A distinguisher is trained on half of many rounds with two different inputs and tested on the other
half. Seeds are fixed. A true null hypothesis (the view is independent of the input) is refused with
probability ALARM at most, over the choice of the seed, made once: Hoeffding's bound on the share of
right answers. A distinguisher that is right more often than chance by the width of the interval,
twice its half, is noticed but with the same probability. The twins show that it would notice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import log, sqrt

import numpy as np
import pytest

import two_servers
from tessera import wire
from tessera.crypto import dpf
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.secret import Secret
from tessera.ids import SERVER, ClientId, RoundId
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.handshake import TwoServerClientSetup
from tessera.protocols.two_server.key_period import ClientKeys, MemoryStore
from tessera.protocols.two_server.messages import Purpose
from tessera.protocols.two_server.reports import layouts_of
from tessera.protocols.two_server.write.client import RowUpdate, Update

ALARM = 1e-6
RUNS = 5000  # rounds for each of the two inputs; half of them to learn from
FEW = 500  # where the difference is all there is
LEADER, HELPER = 0, 1
ME = ClientId(1)

ROWS = (two_servers.ids(0, 3, 5), two_servers.ids(6))
"""Two clients that differ in how many rows they hold and in which."""


class Watch:
    """One client's messages in many rounds, as either server sees them."""

    def __init__(self, purpose: Purpose, *, fresh: bool = True) -> None:
        self.purpose, self.fresh = purpose, fresh
        self.params = two_servers.params(two_servers.table(8, 3), dense=2)
        self.network = two_servers.Network.of(self.params)
        self.header = self.network.handshake()
        self.layouts = layouts_of(self.params, self.header)
        runs = RUNS if fresh else 1
        self.messages = [[self.message(world, run) for run in range(runs)] for world in (0, 1)]

    def message(self, world: int, run: int):
        """What the client sends with the input of this world."""
        kind = (
            two_servers.WriteClient
            if self.purpose is Purpose.WRITE
            else two_servers.RetrievalClient
        )
        coins = b"%d %d" % (world, run) if self.fresh else b"always the same"
        setup = TwoServerClientSetup(
            self.params,
            ME,
            entropy=ScriptedEntropy(coins),
            identity=self.network.identity(ME),
        )
        client = kind(setup)
        client.receive(SERVER, self.network.sent("SignedHeader")[0])
        if self.purpose is Purpose.RETRIEVE:
            return wire.decode(client.submit({0: ROWS[world]})[0].data)
        group, count = self.params.group, len(ROWS[world])
        words = group.from_ints([3 + 1000 * world] * 3 * count).reshape(count, 3, *group.limbs)
        dense = group.from_ints([world, 9])
        return wire.decode(client.submit(Update(dense, {0: RowUpdate(ROWS[world], words)}))[0].data)

    def view(self, message, party: int) -> tuple[np.ndarray, np.ndarray]:
        """(bits of what it was sent, bits of what it computes from them)."""
        context = reports.ReportContext(
            params=self.params,
            header=self.header,
            purpose=self.purpose,
            client=ME,
            report_id=message.report_id,
        )
        seeds, plain = message.seeds, getattr(message, "dense", b"")
        if party == HELPER:
            box = reports.unseal_box(context, message.box, two_servers.keys()[2])
            seeds, plain = box.seeds, box.dense_seed.reveal() if box.dense_seed else b""
        reading = self.purpose is Purpose.RETRIEVE
        layout = (self.layouts.reading if reading else self.layouts.writing)[0]
        keys = dpf.ServerKeys.of(
            dpf.PublicKeys.from_bytes(
                layout.forest, message.public[0][: layout.forest.public_bytes]
            ),
            Secret(seeds[0]),
            party=party,
            report_id=context.table_id(0),
        )
        sent = message.public[0][16:] + seeds[0] + plain  # the first 16 bytes name the layout
        computed = dpf.evaluate(layout.forest, [keys])
        return _bits(np.frombuffer(sent, np.uint8)), _bits(computed.reshape(-1))

    def views(self, party: int | None) -> np.ndarray:
        """(2, runs, features); without a party what the two compute is put together."""
        found: list[list[np.ndarray]] = [[], []]
        for world, messages in enumerate(self.messages):
            for message in messages:
                if party is not None:
                    found[world].append(np.concatenate(self.view(message, party)))
                else:
                    ours, theirs = (self.view(message, p)[1] for p in (LEADER, HELPER))
                    found[world].append(ours ^ theirs)
        return np.array(found).repeat(1 if self.fresh else FEW, axis=1)


class WatchedPeriod(Watch):
    """One client's reports in all rounds of a key period, as either server sees them together."""

    EPOCHS = 5

    def __init__(self, runs: int = RUNS // 10) -> None:
        self.networks = [
            two_servers.Network.of(
                two_servers.params(
                    two_servers.table(8, 3),
                    dense=2,
                    round_id=RoundId(10),
                    key_rounds=self.EPOCHS,
                )
            )
        ]
        for epoch in range(self.EPOCHS):
            network = self.networks[-1]
            network.writing(network.handshake())
            network.write(dict.fromkeys(network.clients))
            assert network.roles[SERVER].header.epoch == epoch
            self.networks.append(network.later())
        del self.networks[-1]
        self.purpose, self.fresh = Purpose.WRITE, True
        self.messages = [[self.period(world, run) for run in range(runs)] for world in (0, 1)]

    def period(self, world: int, run: int):
        """What a client sends in five rounds: same rows, other words."""
        store: MemoryStore = MemoryStore()
        sent = []
        for epoch, network in enumerate(self.networks):
            setup = TwoServerClientSetup(
                network.params,
                ME,
                entropy=ScriptedEntropy(b"%d %d %d" % (world, run, epoch)),
                identity=network.identity(ME),
                own_keys=store,
            )
            client = two_servers.WriteClient(setup)
            client.receive(SERVER, network.sent("SignedHeader")[0])
            group, count = network.params.group, len(ROWS[world])
            value = 3 + 1000 * world + epoch
            words = group.from_ints([value] * 3 * count).reshape(count, 3, *group.limbs)
            update = Update(group.from_ints([world, 9]), {0: RowUpdate(ROWS[world], words)})
            sent.append(wire.decode(client.submit(update, {0: ROWS[world]})[0].data))
        return sent

    def view(self, message, party: int) -> tuple[np.ndarray, np.ndarray]:
        sent, computed, keys = [], [], None
        for network, report in zip(self.networks, message, strict=True):
            header = network.roles[SERVER].header
            context = reports.ReportContext(
                params=network.params,
                header=header,
                purpose=Purpose.WRITE,
                client=ME,
                report_id=report.report_id,
            )
            seeds, plain = report.seeds, report.dense
            if party == HELPER:
                box = reports.unseal_box(context, report.box, two_servers.keys()[2])
                seeds, plain = box.seeds, box.dense_seed.reveal()
            forest = layouts_of(network.params, header).writing[0].forest
            sent.append(report.public[0] + b"".join(seeds) + plain)
            if keys is None:
                keys = ClientKeys(report_id=report.report_id, public=report.public, seeds=seeds)
                public = report.public[0][: forest.public_bytes]
            else:
                (public,) = keys.with_hints((forest,), report.public)
            own = dpf.ServerKeys.of(
                dpf.PublicKeys.from_bytes(forest, public),
                Secret(keys.seeds[0]),
                party=party,
                report_id=replace(context, report_id=keys.report_id).table_id(0),
            )
            computed.append(dpf.evaluate(forest, [own], epoch=header.epoch).reshape(-1))
        together = np.frombuffer(b"".join(sent)[16:], np.uint8)
        return _bits(together), _bits(np.concatenate(computed))


@lru_cache
def watched_period() -> WatchedPeriod:
    return WatchedPeriod()


@lru_cache
def watched(purpose: Purpose) -> Watch:
    return Watch(purpose)


def _bits(octets: np.ndarray) -> np.ndarray:
    return np.unpackbits(octets, bitorder="little")


def advantage(views: np.ndarray) -> tuple[float, float]:
    """(how much better than guessing, the confidence interval's half width).

    Naive Bayes over the view's bits and over the XOR of bits that are next to each other: over all
    of these, which would see a little in many places, and over those alone that were striking in
    the rounds to learn from, which sees much in few. The better of the two counts, and the interval
    is for both.
    """
    features = np.concatenate([views, views[:, :, 1:] ^ views[:, :, :-1]], axis=2)
    known, asked = np.split(features, 2, axis=1)
    ones = (known.sum(axis=1) + 1.0) / (known.shape[1] + 2.0)
    set_, clear = np.log(ones[1] / ones[0]), np.log((1 - ones[1]) / (1 - ones[0]))
    noise = np.sqrt((ones * (1 - ones)).sum(axis=0) / known.shape[1])
    counted = np.stack([np.ones_like(noise), np.abs(ones[1] - ones[0]) > 4 * noise], axis=1)
    weights = (set_ - clear)[:, np.newaxis] * counted
    # Bits become floats on the way, so only some rounds at a time.
    parts = [some @ weights for some in np.array_split(asked, 10, axis=1)]
    score = np.concatenate(parts, axis=1) + clear @ counted  # over 0: the second world
    guess = np.sign(score).mean(axis=1)
    found = (guess[1] - guess[0]) / 2
    tests = asked.shape[0] * asked.shape[1]
    return float(found[np.argmax(np.abs(found))]), 2 * sqrt(log(4 / ALARM) / (2 * tests))


@pytest.mark.slow
@pytest.mark.parametrize("party", [LEADER, HELPER], ids=["leader", "helper"])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_one_servers_view_says_nothing_about_rows_and_values(purpose, party):
    found, interval = advantage(watched(purpose).views(party))
    assert abs(found) < interval < 0.08


@pytest.mark.slow
def test_if_one_bit_of_a_view_were_right_three_times_in_five_it_would_be_noticed():
    """The least that the test above has to see: its alarm goes off at what one bit gives away."""
    views = watched(Purpose.WRITE).views(LEADER)
    worlds = np.arange(2, dtype=np.uint8)[:, np.newaxis]
    wrong = np.random.default_rng(1).random(views.shape[:2]) < 0.4
    views[:, :, 100] = worlds ^ wrong
    found, interval = advantage(views)
    assert found > interval


@pytest.mark.slow
def test_both_servers_together_would_read_the_rows():
    found, interval = advantage(watched(Purpose.RETRIEVE).views(None))
    assert found > 0.9 > interval


@pytest.mark.slow
@pytest.mark.parametrize("party", [LEADER, HELPER], ids=["leader", "helper"])
def test_one_servers_view_of_five_epochs_says_nothing_about_rows_and_values(party):
    """Fewer rounds than above, each with five reports: the interval is wider."""
    found, interval = advantage(watched_period().views(party))
    assert abs(found) < interval < 0.25


@pytest.mark.slow
def test_both_servers_together_would_read_the_rows_of_five_epochs():
    found, interval = advantage(watched_period().views(None))
    assert found > 0.9 > interval


def test_two_hints_for_one_epoch_would_show_the_rows(monkeypatch):
    """The rule switched off: a client that converts under one epoch in all rounds.

    The difference of two last corrections is that of two updates, in the bins of its rows alone.
    """
    real = dpf.gen

    def without_epochs(*given, epoch=0, **more):
        return real(*given, **more)

    def moved(world: int) -> list[bool]:
        first, second = (m.public[0] for m in WatchedPeriod(runs=1).messages[world][0][1:3])
        words = np.frombuffer(first, "<u4") - np.frombuffer(second, "<u4")
        return (np.abs(words.view(np.int32)).reshape(-1, 3) <= 1).all(axis=1).tolist()

    assert not any(moved(1)), "all bins alike: random"
    monkeypatch.setattr(dpf, "gen", without_epochs)
    assert all(moved(1)), "values differ by one epoch, and by nothing elsewhere"


@pytest.mark.parametrize("purpose", list(Purpose))
def test_if_a_client_used_its_coins_twice_one_server_would_tell(purpose):
    """The rule switched off: the same randomness in every round."""
    found, interval = advantage(Watch(purpose, fresh=False).views(LEADER))
    assert found > 0.9 > interval
