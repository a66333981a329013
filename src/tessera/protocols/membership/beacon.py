"""The beacon of a snapshot: H(x_1, x_2, its digest), with a value of each of two parties.

Value n of a party's hash chain belongs to snapshot n, used or not. It was committed to in snapshot
0, so nobody has a choice; it is revealed after the snapshot is signed, so whoever put the clients
in order did not know it. That takes one party that does not work with whoever makes the snapshots;
the same party sees to it that no client is in a snapshot twice.
The party that reveals last sees the beacon before anybody else and can only withhold its value: the
snapshot is then void, which everybody sees, and each void one is one more draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.hash_chain import HashChain, follows
from tessera.crypto.keys import SigningKey, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError, MisuseError, WrongBeacon, WrongSignature
from tessera.protocols.epochs.group import Leaf
from tessera.protocols.membership.snapshot import PARTIES, ClientSnapshot, check_leaves, check_next


@wire.record(tag=0x0802)
@dataclass(frozen=True, slots=True, kw_only=True)
class BeaconValue:
    """One party's value, for one snapshot: public, and signed by that party."""

    party: Annotated[int, wire.U8]
    number: Annotated[int, wire.U64]
    snapshot: Annotated[bytes, wire.KEY] = field(repr=False)
    """The digest of the snapshot."""
    value: Annotated[bytes, wire.KEY] = field(repr=False)
    signature: Annotated[bytes, wire.SIGNATURE] = field(repr=False)


def _statement(party: int, snapshot: ClientSnapshot, value: bytes) -> bytes:
    return encode_context(Label.BEACON_VALUE, party, snapshot.number, snapshot.digest, value)


def chain_context(federation: str, party: int) -> bytes:
    """What a party's hash chain is for: nobody can commit to the chain of another one."""
    return encode_context(Label.BEACON_CHAIN, federation, party)


def fresh_chain(federation: str, party: int, length: int, entropy: Entropy) -> HashChain:
    """A new hash chain of a party, with a value for each of `length` snapshots."""
    if party not in range(PARTIES):
        raise ConfigError(f"party {party} of a beacon with {PARTIES}")
    last = entropy.secret(Label.BEACON_SECRET, federation, party)
    return HashChain(last, length, chain_context(federation, party))


def check_reveal(
    reveal: BeaconValue,
    snapshot: ClientSnapshot,
    *,
    party: int,
    key: bytes,
    since: tuple[int, bytes] | None = None,
) -> None:
    """Refuse all but the one value that this party committed to for this snapshot.

    `since` is the number and value of one revealed before, to begin with instead of the commitment.
    """
    number = snapshot.number
    if (reveal.party, reveal.number, reveal.snapshot) != (party, number, snapshot.digest):
        raise WrongBeacon(
            f"a value of party {reveal.party} for another snapshot, or of another party",
            snapshot=number,
        )
    if not verify(key, reveal.signature, _statement(party, snapshot, reveal.value)):
        raise WrongSignature(f"party {party} did not sign this value", snapshot=number)
    at, known = since or (0, snapshot.commitments[party])
    context = chain_context(snapshot.federation, party)
    if not follows(reveal.value, number, known, context, since=at):
        raise WrongBeacon(f"party {party} has not committed to this value", snapshot=number)


def beacon(values: Sequence[bytes], snapshot: bytes) -> bytes:
    """The key of the permutation, from both values and the snapshot's digest."""
    return hashlib.sha256(encode_context(Label.BEACON, *values, snapshot)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeaconParty:
    """Whoever reveals values: one for each number, for the one snapshot of that number.

    `latest` is what has to be on disk before a value goes out. Snapshots come one after the other,
    void ones too: a value gives all those before it, whose snapshots are fixed by then.
    """

    party: int
    chain: HashChain = field(repr=False)
    key: SigningKey = field(repr=False)
    authority: bytes = field(repr=False)
    """The key that snapshots are signed with."""
    first_key: bytes = field(repr=False)
    """That of party 0, without whose value party 1 reveals nothing."""
    latest: ClientSnapshot

    def __post_init__(self) -> None:
        if self.latest.commitments[self.party] != self.chain.commitment:
            raise MisuseError(f"party {self.party}: the snapshot commits to another hash chain")

    def reveal(
        self, snapshot: ClientSnapshot, leaves: Sequence[Leaf], first: BeaconValue | None = None
    ) -> tuple[BeaconParty, BeaconValue]:
        """(This party with the snapshot as its latest, to be stored first; what to send then).

        The latest one again gets the same answer; any other snapshot but the next is refused, and
        one that has a client twice. `first` is the value of party 0, which party 1 waits for.
        """
        if snapshot.digest != self.latest.digest:
            check_next(self.latest, snapshot, self.authority)
        if snapshot.number < 1:
            raise MisuseError("no value belongs to snapshot 0")
        check_leaves(snapshot, leaves)
        if self.party > 0:
            if first is None:
                raise WrongBeacon("the first party has not revealed", snapshot=snapshot.number)
            check_reveal(first, snapshot, party=0, key=self.first_key)
        value = self.chain.value(snapshot.number)
        revealed = BeaconValue(
            party=self.party,
            number=snapshot.number,
            snapshot=snapshot.digest,
            value=value,
            signature=self.key.sign(_statement(self.party, snapshot, value)),
        )
        return replace(self, latest=snapshot), revealed

    def follow(self, snapshot: ClientSnapshot) -> BeaconParty:
        """This party after a snapshot that it reveals nothing for: a void one."""
        check_next(self.latest, snapshot, self.authority)
        return replace(self, latest=snapshot)
