"""A client writes one row in a bin or is left out, at both servers; everybody else's sum is exact.

What the check rests on is in tests/crypto/test_verifiable.py; here clients cheat through the roles,
with keys that they sign themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import two_servers
from tessera import wire
from tessera.crypto.dpf import HEADER_BYTES, Forest
from tessera.crypto.field import Field
from tessera.crypto.kernel.trees import BLOCK
from tessera.crypto.ring import Ring
from tessera.errors import PeerError, RoundAborted
from tessera.ids import HELPER, SERVER
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.params import Write
from tessera.protocols.two_server.reports import layouts_of
from tessera.protocols.two_server.write.helper import CHECK_FAILED
from tessera.protocols.two_server.write.sums import coin_of

Cheat = Callable[[Forest, bytes, np.random.Generator], bytes]


def second_row(forest: Forest, public: bytes, rng: np.random.Generator) -> bytes:
    """A step that brings no two children together: the path's and its sibling's are both live."""
    at = HEADER_BYTES + int(rng.integers(BLOCK * forest.trees.total_steps))
    return public[:at] + bytes([public[at] ^ 1 << int(rng.integers(8))]) + public[at + 1 :]


def swapped(forest: Forest, public: bytes, rng: np.random.Generator) -> bytes:
    """The corrections of two bins, each in the other's place."""
    keys, tags = public[: forest.public_bytes], public[forest.public_bytes :]
    each = [tags[i : i + 32] for i in range(0, len(tags), 32)]
    i, j = rng.choice(len(each), 2, replace=False)
    each[i], each[j] = each[j], each[i]
    return keys + b"".join(each)


def uncorrected(forest: Forest, public: bytes, rng: np.random.Generator) -> bytes:
    return public[: forest.public_bytes] + bytes(len(public) - forest.public_bytes)


def any_keys(forest: Forest, public: bytes, rng: np.random.Generator) -> bytes:
    """Steps that nobody generated: about every leaf is live."""
    end = HEADER_BYTES + BLOCK * forest.trees.total_steps
    return public[:HEADER_BYTES] + rng.bytes(end - HEADER_BYTES) + public[end:]


CHEATS: dict[str, Cheat] = {
    each.__name__: each for each in (second_row, swapped, uncorrected, any_keys)
}


def begun(*tables: two_servers.TwoServerTable, **more) -> two_servers.Network:
    network = two_servers.Network.of(two_servers.params(*tables, **more))
    network.writing(network.handshake())
    return network


def submitted(network: two_servers.Network, client: int, update, cheat: Cheat | None, seed: int):
    """A client's report; one that cheats signs what it has made of its keys."""
    role = network.roles[client]
    if cheat is None:
        return role.submit(update)
    forests = layouts_of(network.params, network.roles[SERVER].header).writing
    at = list(forests).index(0)
    real, rng = reports.seal_box, np.random.default_rng(seed)

    def sealed(context, public, **given):
        public[at] = cheat(forests[0].forest, public[at], rng)
        return real(context, public, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "seal_box", sealed)
        return role.submit(update)


def written(network: two_servers.Network, cheats: dict[int, Cheat], seed: int = 0) -> dict:
    """Everybody writes the most rows of every table; some cheat."""
    rng = np.random.default_rng(seed)
    given = {}
    for c in network.clients:
        wanted = {
            t.table: t.named(np.sort(rng.choice(t.rows, t.max_rows, replace=False)))
            for t in network.params.written
        }
        given[c] = two_servers.update(network.params, wanted, seed + c)
        network.carry(c, submitted(network, c, given[c], cheats.get(c), seed + c))
    network.close()
    return given


def assert_exact(network: two_servers.Network, given: dict, included: list[int]) -> None:
    due = two_servers.plain_sum(network.params, (given[c] for c in included))
    for role in (SERVER, HELPER):
        total = network.roles[role].total
        assert [int(c) for c in total.survivors] == sorted(included)
        assert two_servers.opened(network.params, total) == due


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
@pytest.mark.parametrize("group", [Ring(32), Ring(22), Ring(128), Field(61)], ids=lambda g: g.name)
def test_every_cheat_is_left_out_at_both_servers_and_the_others_sum_is_exact(cheat, group):
    tables = (
        two_servers.table(300, 6),
        two_servers.table(40, 3, name=1),
        two_servers.small_table(2),
    )
    network = begun(*tables, group=group, dense=3, clients=30)
    bad = network.clients[::3]
    given = written(network, dict.fromkeys(bad, cheat))
    assert not network.left and not network.refused
    assert network.roles[SERVER].excluded == dict.fromkeys(bad, CHECK_FAILED)
    assert_exact(network, given, [c for c in network.clients if c not in bad])


OTHER_LAYOUTS: dict[str, Cheat] = {
    "keys of another layout": lambda f, p, rng: bytes(HEADER_BYTES) + p[HEADER_BYTES:],
    "keys cut": lambda f, p, rng: p[HEADER_BYTES:],
    "no tags": lambda f, p, rng: p[: f.public_bytes],
    "tags cut": lambda f, p, rng: p[:-1],
    "tags of one bin more": lambda f, p, rng: p + bytes(32),
}


@pytest.mark.parametrize("cheat", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_keys_or_tags_of_another_layout_are_refused_at_both_servers_and_the_round_goes_on(cheat):
    """Signed by their client; a leader passes them on to the helper all the same."""
    network = begun(two_servers.table(300, 6), dense=3, clients=8)
    bad = network.clients[0]
    good = {
        c: two_servers.update(network.params, {0: np.array([c, 99], np.uint64)}, c)
        for c in network.clients
    }
    for c in network.clients[1:]:
        network.carry(c, submitted(network, c, good[c], None, 0))
    out = submitted(network, bad, good[bad], cheat, 0)
    network.carry(bad, out)
    report = wire.decode(out[0].data)
    forwarded = replace(
        wire.decode(network.sent("Forwarded")[0]),
        sender=bad,
        report_id=report.report_id,
        public=report.public,
        box=report.box,
    )
    network.arrive(SERVER, HELPER, wire.encode(forwarded))
    assert [(type(e), e.peer) for e in network.refused] == [(PeerError, bad)] * 2
    assert all("invalid keys" in e.reason for e in network.refused)
    network.close()
    assert_exact(network, good, network.clients[1:])


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_a_thousand_of_a_thousand_cheats_are_caught_and_as_many_honest_clients_pass(cheat):
    caught = passed = 0
    for run in range(5):
        network = begun(two_servers.table(300, 6), clients=400)
        bad = network.clients[::2]
        written(network, dict.fromkeys(bad, cheat), seed=1000 * run)
        assert set(network.roles[SERVER].excluded) <= set(bad)
        caught += len(network.roles[SERVER].excluded)
        passed += len(network.total.survivors)
    assert (caught, passed) == (1000, 1000)


def test_without_the_check_one_client_spoils_every_row_it_likes():
    network = begun(two_servers.table(300, 6), clients=5, verify=False)
    layouts = layouts_of(network.params, network.roles[SERVER].header).writing
    bad = network.clients[0]

    def everywhere(forest, public, rng):
        assert len(public) == layouts[0].forest.public_bytes, "no corrections are sent"
        return any_keys(forest, public, rng)

    given = written(network, {bad: everywhere})
    assert not network.sent("CheckCoin") and not network.sent("CheckSums")
    honest = {row for c in network.clients[1:] for row in given[c].tables[0].ids.tolist()}
    found = set(network.total.tables[0].rows.tolist())
    assert bad in network.total.survivors and len(found - honest) > 200


def test_a_sum_over_too_few_that_passed_is_not_opened():
    network = begun(clients=4, min_cohort=3)
    written(network, dict.fromkeys(network.clients[:2], second_row))
    assert isinstance(network.aborted, RoundAborted)
    assert (network.aborted.answered, network.aborted.needed) == (2, 3)
    assert not network.sent("IncludedList") and network.total is None


def test_a_client_that_failed_has_no_second_try_in_the_round():
    network = begun(clients=4)
    bad = network.clients[1]
    network.meddle = lambda s, m: [] if m.kind == "IncludedList" else [m.data]
    written(network, {bad: second_row})
    again = network.woken(HELPER)
    other = replace(wire.decode(network.sent("Forwarded")[1]), box=b"another")
    with pytest.raises(PeerError, match="after collection"):
        again.receive(SERVER, wire.encode(other))


def test_a_table_that_is_written_densely_has_nothing_to_check():
    network = begun(two_servers.table(30, 3, write=Write.DENSE), dense=2)
    given = written(network, {})
    assert not network.sent("CheckCoin")
    assert_exact(network, given, network.clients)


# The coin.


def test_a_coin_is_the_same_after_a_restart_and_another_for_another_list():
    network = begun()
    seed = network.roles[HELPER].state.coin_seed
    network.meddle = lambda s, m: [] if m.kind == "CheckCoin" else [m.data]
    written(network, {})
    [said] = network.sent("CheckCoin")
    woken = network.woken(HELPER)
    assert [m.data for m in woken.resend()] == [said]
    assert [m.data for m in woken.receive(SERVER, network.sent("Closing")[0])] == [said]
    assert coin_of(seed, bytes(32)).reveal() != coin_of(seed, b"\1" * 32).reveal()
    assert coin_of(seed, bytes(32)).reveal() != wire.decode(said).coin


def test_a_helper_restored_from_before_the_closing_tosses_another_coin_for_another_list():
    """Reports made in the knowledge of a coin meet a new one, and those it has seen are refused."""
    network = begun(clients=3)
    first = network.clients[0]
    late = network.roles[first].submit(None)
    earlier = network.woken(HELPER)
    written(replace(network, clients=network.clients[1:]), {})
    said = wire.decode(network.sent("CheckCoin")[0]).coin
    network.roles[HELPER] = earlier
    before = len(network.refused)
    for data in network.sent("Forwarded"):
        network.arrive(SERVER, HELPER, data)
    assert len(network.refused) == before + 2, "their ids are used up"
    report = wire.decode(late[0].data)
    forwarded = wire.decode(network.sent("Forwarded")[0])
    forwarded = replace(
        forwarded,
        sender=first,
        report_id=report.report_id,
        public=report.public,
        box=report.box,
    )
    assert network.arrive(SERVER, HELPER, wire.encode(forwarded)) == []
    digest = earlier.inbox.held[first].digest
    closing = wire.decode(network.sent("Closing")[0])
    [coin] = network.arrive(
        SERVER, HELPER, wire.encode(replace(closing, reports=closing.reports | {first: digest}))
    )
    assert coin.kind == "CheckCoin" and wire.decode(coin.data).coin != said


# A leader that lies.


@pytest.mark.parametrize("seed", range(3))
def test_a_leader_that_shifts_its_state_at_a_guessed_row_is_told_the_same_either_way(seed):
    """A shift at a leaf changes the sums by something that is not zero, and that is what it hears,
    whether the client's row is there or not."""
    heard = []
    for own in (5, 6):  # guessed right, guessed wrong
        network = begun(two_servers.table(40, 1), clients=3)
        target = network.clients[0]
        shift = np.random.default_rng(seed).bytes(32)

        def lies(source, message, shift=shift, target=target):
            if message.kind != "CheckSums":
                return [message.data]
            said = wire.decode(message.data)
            wrong = bytes(a ^ b for a, b in zip(said.sums[target], shift, strict=True))
            return [wire.encode(replace(said, sums=said.sums | {target: wrong}))]

        network.meddle = lies
        rows = {target: own, network.clients[1]: 7, network.clients[2]: 8}
        network.write(
            {
                c: two_servers.update(network.params, {0: two_servers.ids(row)}, c)
                for c, row in rows.items()
            }
        )
        [verdict] = network.sent("Exclusions")
        heard.append(verdict)
        assert target not in network.total.survivors
        assert not {5, 6} & set(network.total.tables[0].rows.tolist())
    assert heard[0] == heard[1]
