"""The secrets of noise that is correlated over rounds: those of a round and of the few before it.

y_t has a part of the noise of the last p - 1 rounds (`crypto/correlated.py`), which is drawn again
from their secrets. Round ids are the places of the chain:

- every id has one secret, which is stored before anything leaves that has its noise. An id that was
  skipped, or given up before it had a role, gets one with the next round: a round that released
  nothing still has its place;
- an id is opened once, for one list of clients. A role that is woken finds the secrets it had; the
  same id again, or an earlier one, is refused: with the same noise two sums could be subtracted,
  and with noise drawn anew a client in both would be in one round too many;
- once a round is over, however it ended, all but the last p - 1 secrets are erased, which the next
  round needs, and after the last round of a training all of them (`settle`). There is no root of a
  training, from which the noise of all its sums would follow later.

The store is `RisingStore`, as for keys that last: durable when `keep` returns, or with the step of
a journal that is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from tessera import wire
from tessera.crypto.correlated import BandedInverse
from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import Party, RoundId
from tessera.plan import Plan
from tessera.protocols.two_server.key_period import RisingStore
from tessera.protocols.two_server.write.sums import NoiseSecrets
from tessera.rounds.root import draw_root


@wire.record(tag=0x0220)
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseChain:
    """The secrets of round `round_id` and of those before it, newest first.

    `over`: the round is, and only what later rounds need is left.
    """

    round_id: Annotated[RoundId, wire.U64]
    secrets: NoiseSecrets = field(repr=False)
    over: Annotated[bool, wire.FLAG] = False

    @property
    def mark(self) -> tuple[int, int]:
        return int(self.round_id), int(self.over)

    @property
    def ideal(self) -> bool:
        return False

    @property
    def known(self) -> dict[int, Secret]:
        return {int(self.round_id) - back: secret for back, secret in enumerate(self.secrets)}


@wire.record(tag=0x0221)
@dataclass(frozen=True, slots=True, kw_only=True)
class ChainsAtRest:
    """Those of the servers of a simulation, in its checkpoint."""

    chains: Annotated[dict[str, NoiseChain], wire.ByKey(wire.TEXT, wire.Nested(NoiseChain), 16)]


ChainStore = RisingStore[NoiseChain]


def round_secrets(
    inverse: BandedInverse,
    store: ChainStore | None,
    own: Secret,
    round_id: RoundId,
    fresh: Callable[[int], Secret],
    *,
    replayed: bool = False,
) -> tuple[Secret, ...]:
    """What a round's noise follows from: its own secret, and those before it that it has a part of.

    `fresh` draws one for an id that has none. Stored when this returns. `replayed`: whoever asks
    may have asked before, with the same secret, and has one list for it.
    """
    if inverse.draws == 1:
        return (own,)
    if store is None:
        raise MisuseError("correlated noise needs a store of the secrets of earlier rounds")
    at, before = int(round_id), store.latest()
    known = {} if before is None else before.known
    if before is not None and at <= int(before.round_id):
        if replayed and not before.over and at == int(before.round_id) and known[at] == own:
            return before.secrets
        raise MisuseError(
            f"correlated noise: round {at} is opened again, after round {int(before.round_id)}"
        )
    past = range(at - 1, max(-1, at - inverse.draws), -1)
    secrets = (own, *(known.get(each) or fresh(each) for each in past))
    store.keep(NoiseChain(round_id=round_id, secrets=secrets))
    return secrets


def settle(store: ChainStore, plan: Plan) -> None:
    """Erase what no later round needs, once the last one is over."""
    stored = store.latest()
    if stored is None or stored.over:
        return
    last = int(stored.round_id) >= plan.participation.rounds - 1
    left = () if last else stored.secrets[: plan.correlation.inverse.draws - 1]
    store.keep(NoiseChain(round_id=stored.round_id, secrets=left, over=True))


def own_secret(entropy: Entropy) -> Secret:
    """What a party's noise of a round follows from, by the root of that round."""
    return entropy.secret(Label.SUM_NOISE)


def drawn_again(entropy: Entropy, plan: Plan, party: Party) -> Callable[[int], Secret]:
    """For ids without a role: a root of their own, of which only the noise's secret is kept."""
    return lambda each: own_secret(draw_root(entropy, plan, RoundId(each), party))


def check_same(stored: NoiseChain, entropy: Entropy, plan: Plan, party: Party) -> None:
    """A simulation that goes on has the secrets with which it began, or it is refused."""
    made = drawn_again(entropy, plan, party)
    if any(made(each) != secret for each, secret in stored.known.items()):
        raise ConfigError(
            f"the checkpoint after round {int(stored.round_id)} has other secrets of correlated "
            "noise than this run: sums would not have the noise that is accounted for",
            hint="resume with the entropy that the run was begun with, or begin a new run",
        )
