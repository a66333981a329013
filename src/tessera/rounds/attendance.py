"""Attendance: in which rounds of a training a client has been, kept by the client itself.

Noise is sized for a bound on that (`privacy/dp/participation.py`), and nobody else can keep it: a
server that invites whom it likes could put a client into every round. Before anything of a round
leaves it, a client stores which training it is in, by a digest of all that its noise is sized by,
the last round that it was in and how many there were. A round counts once it has begun, however it
ends.

Between two servers the digest is in what clients seal for the helper, whose place in the chain of
noise is the round that they have sealed (`rounds/two_server/domain.py`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import RoundRefused
from tessera.ids import RoundId
from tessera.plan import Plan
from tessera.protocols.two_server.params import Servers


def training_digest(plan: Plan, servers: Servers | None) -> bytes:
    """All that the noise of a training is sized by, and whose it is.

    One in which rounds are not bounded has no digest of its own: b"".
    """
    if not plan.bounds_rounds:
        return b""
    bound, dp = plan.participation, plan.dp
    parts: list[int | bytes | str] = [plan.federation]
    parts += [bound.rounds, bound.most, bound.separation]
    if dp is not None:
        parts += [dp.trust.value, repr(dp.clip), repr(dp.noise)]
        parts += [str(plan.correlation.inverse.terms)]
    if servers is not None:
        parts += [servers.leader, servers.helper, servers.box]
    return hashlib.sha256(encode_context(Label.TRAINING, *parts)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a client's rounds are in a schedule: in round `first` of every pass of `rounds`."""

    first: int
    rounds: int

    def has(self, round_id: RoundId) -> bool:
        return int(round_id) % self.rounds == self.first

    def before(self, round_id: RoundId) -> int:
        """How many of its rounds lie before this one."""
        return max(0, -(-(int(round_id) - self.first) // self.rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """What a client remembers of a training."""

    training: bytes = field(repr=False)
    last: int = -1
    """The last round that it has begun; -1: none since it was registered."""
    count: int = 0
    """Of rounds that it has begun, or has to take for begun."""


def registered(plan: Plan, servers: Servers | None) -> dict[str, Attendance]:
    """What a client stores when it is registered, before it is in any round."""
    if not plan.bounds_rounds:
        return {}
    return {plan.federation: Attendance(training=training_digest(plan, servers))}


def attended(
    plan: Plan,
    servers: Servers | None,
    round_id: RoundId,
    stored: Attendance | None,
    place: Place | None,
) -> Attendance:
    """What to remember with this round; `RoundRefused` if it would be one too early or too many.

    `place` is the client's own in the schedule, where there is one. A client that has nothing
    stored, not even that it was registered, has lost it: it takes all places that it has had for
    used, this one too, and waits for the next pass. Without a schedule nobody can tell it which
    rounds it was in: it waits for another training.
    """
    bound, number = plan.participation, int(round_id)
    training = training_digest(plan, servers)
    if number >= bound.rounds:
        raise RoundRefused(
            f"round {number} of a training of {bound.rounds} rounds",
            hint="a longer training is another one: another federation, with noise of its own",
        )
    if stored is not None and stored.training != training:
        raise RoundRefused(
            f"round {number} of {plan.federation!r} with other rounds, noise or servers than this "
            "client has begun the training with",
            hint="another training has another name of its federation, and its own charge",
        )
    if stored is not None and number <= stored.last:
        raise RoundRefused(
            f"round {number} after round {stored.last}: rounds of a training rise",
            hint="the leader is set back, or lies",
        )
    if plan.cohorts.scheduled and place is None:
        raise RoundRefused(
            f"round {number}: this client has no place in the schedule",
            hint="it waits for another training",
        )
    if place is not None and not place.has(round_id):
        raise RoundRefused(
            f"round {number}, in which this client has no place: its first is {place.first}, and a "
            f"pass has {place.rounds} rounds",
            hint="the leader has another schedule than was told, or lies",
        )
    if stored is None:
        known = bound.most if place is None else place.before(round_id) + 1
        raise RoundRefused(
            f"round {number}: this client has lost what it remembered of the training, and takes "
            "all rounds that it may have been in for used, this one too",
            hint="it waits for another training"
            if place is None
            else f"its next is round {number + place.rounds}",
            record=Attendance(training=training, last=number, count=known),
        )
    if stored.count and number - stored.last < bound.separation:
        raise RoundRefused(
            f"round {number} after round {stored.last}: less than {bound.separation} rounds apart",
            hint="the leader has another schedule than was told, or lies",
        )
    if stored.count >= bound.most:
        raise RoundRefused(
            f"round {number}: this client has had all of its {bound.most} rounds of the training",
            hint="noise is for no more; another training is another charge",
        )
    return Attendance(training=training, last=number, count=stored.count + 1)
