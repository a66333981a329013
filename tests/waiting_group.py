"""A fixed group under test: its members and its server, stored and killed between any two calls.

`Waiting` plays carrier for everybody. It keeps what a disk would keep: a role's snapshot is stored
before what the role returned is sent, and a killed role is woken from what was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.group import Group
from tessera.crypto.keys import SigningKey
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.ids import SERVER, ClientId
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.protocols.epochs.member import GroupMember, MemberSetup
from tessera.protocols.epochs.messages import EpochHeader, EpochKind, Fetch
from tessera.protocols.epochs.server import EpochOpened, GroupServer, GroupServerSetup
from tessera.protocols.machine import Outbound
from tessera.rounds.epochs.group import EpochWork, PeriodRecord

FEDERATION = "waiting"
RING = Ring(32)

Words = npt.NDArray[Any]


def signing_key(client: int) -> SigningKey:
    entropy = ScriptedEntropy(b"waiting")
    return SigningKey.from_secret(entropy.secret(Label.IDENTITY, client))


def fixed_group(size: int = 4, **changed: Any) -> FixedGroup:
    """Ids that are not in the order of the leaves."""
    clients = [ClientId(5 + 7 * k % 11 + 11 * (k // 11)) for k in range(size)]
    leaves = tuple(
        Leaf(federation=FEDERATION, client=c, key=signing_key(c).public, serial=int(c))
        for c in clients
    )
    made = FixedGroup(
        federation=FEDERATION,
        plan=b"p" * 32,
        number=2,
        snapshot=1,
        snapshot_digest=b"s" * 32,
        values=(b"1" * 32, b"2" * 32),
        beacon=b"b" * 32,
        leaves=leaves,
    )
    return replace(made, **changed)


def header(epoch: int, *, ring: Group = RING, length: int = 5, **changed: Any) -> EpochHeader:
    """The union of period 1 and updates after it, over inputs that are the epoch's own."""
    made = EpochHeader(
        period=1,
        kind=EpochKind.UNION if epoch == 1 else EpochKind.UPDATE,
        epoch=epoch,
        ring=ring,
        length=length,
        inputs={"base": bytes([epoch % 256]) * 32, "record": b"r" * 32},
    )
    return replace(made, **changed)


def words_of(client: int, at: EpochHeader) -> Words:
    """What a member has to say in an epoch: small numbers, so that a sum out of bounds shows."""
    rng = np.random.default_rng([client, at.epoch])
    return at.ring.from_ints(rng.integers(0, 16, size=at.length))


def total_of(group: FixedGroup, at: EpochHeader) -> list[int]:
    """The oracle: the sum of everybody's words in the clear."""
    total = at.ring.zeros(at.length)
    for client in group.members:
        at.ring.iadd(total, words_of(client, at))
    return at.ring.to_ints(total)


class Waiting:
    """Everybody in one group, their disks, and the numbers of visits."""

    def __init__(self, group: FixedGroup | None = None, *, seed: int = 0) -> None:
        self.group = group or fixed_group()
        self.entropy = ScriptedEntropy(f"members {seed}".encode())
        self.setups = {
            c: MemberSetup(group=self.group, party=c, key=signing_key(c))
            for c in self.group.members
        }
        self.server_setup = GroupServerSetup(group=self.group, wait=60)
        self.server = GroupServer(self.server_setup)
        self.members: dict[ClientId, GroupMember] = {}
        self.stored: dict[Any, tuple[bytes, Mapping[bytes, bytes]]] = {}
        self.visits = 0
        self.store(SERVER)

    def store(self, party: Any) -> None:
        role = self.server if party == SERVER else self.members[party]
        self.stored[party] = (role.snapshot(), dict(role.messages))

    def kill(self, party: Any) -> None:
        """What was not stored is gone."""
        if party == SERVER:
            self.server = GroupServer.wake(*self.stored[SERVER], self.server_setup)
        else:
            self.members[party] = GroupMember.wake(*self.stored[party], self.setups[party])

    def say(self, client: ClientId, out: list[Outbound]) -> list[Outbound]:
        """A member's messages to the server; the answers."""
        answers = [a for message in out for a in self.server.receive(client, message.data)]
        self.store(SERVER)
        return answers

    def join(self, *clients: ClientId) -> None:
        for client in clients or self.group.members:
            member, out = GroupMember.join(self.setups[client], entropy=self.entropy)
            self.members[client] = member
            self.store(client)
            self.say(client, out)

    def fix(self, at: EpochHeader) -> None:
        self.server.fix(at)
        self.store(SERVER)

    @staticmethod
    def fetching(client: ClientId, delivered: int = 0, visit: int = 999) -> list[Outbound]:
        """A fetch that no role has made."""
        return [Outbound.of(SERVER, Fetch(sender=client, delivered=delivered, visit=visit))]

    def ask(self, client: ClientId) -> list[Outbound]:
        """The server's answer to a member that comes."""
        self.visits += 1
        return self.say(client, self.members[client].fetch(self.visits))

    def fetch(self, client: ClientId) -> list[Outbound]:
        """What a member says after it was answered: stored bytes, or nothing."""
        out: list[Outbound] = []
        for answer in self.ask(client):
            out += self.members[client].receive(SERVER, answer.data)
        self.store(client)
        return out

    def compute(self, client: ClientId) -> list[Outbound]:
        """A member's delivery, stored and not yet sent."""
        due = self.members[client].due
        assert due is not None
        out = self.members[client].deliver(words_of(client, due), entropy=self.entropy)
        self.store(client)
        return out

    def visit(self, client: ClientId) -> None:
        """A member comes, and delivers if something is due."""
        self.say(client, self.fetch(client))
        if self.members[client].due is not None:
            self.say(client, self.compute(client))

    def epoch(self, at: EpochHeader, order: list[ClientId] | None = None) -> EpochOpened:
        self.fix(at)
        for client in order or self.group.members:
            self.visit(client)
        opened = self.server.opened
        assert opened is not None
        return opened

    def sum(self) -> list[int]:
        opened = self.server.opened
        assert opened is not None
        return opened.link.header.ring.to_ints(opened.total)


def records() -> list[bytes]:
    """Every message and every state of a group's first epochs."""
    run, found = Waiting(fixed_group(2)), []

    def keep() -> None:
        found.append(wire.encode(run.server.state))
        found.extend(wire.encode(member.state) for member in run.members.values())

    keep()
    run.join()
    first, second = run.group.members
    found += [o.data for o in (*run.members[first].resend(), *run.ask(first))]
    run.fix(header(1))
    keep()
    found += [o.data for o in (*run.members[first].fetch(9), *run.ask(first))]
    run.fetch(first)
    keep()
    found += [o.data for o in run.compute(first)]
    run.say(first, run.members[first].resend())
    keep()
    run.visit(second)
    keep()
    opened = run.server.opened
    assert opened is not None
    found += [o.data for o in run.members[second].withdraw("its own deadline has passed")]
    record = PeriodRecord(period=1, cutoff=0)
    work = EpochWork(assignment=b"assignment", record=record, union=b"union", base=b"base")
    made = (run.group, *run.group.leaves, opened.certificate, record, work)
    found += [wire.encode(each) for each in made]
    return found
