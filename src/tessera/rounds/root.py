"""The root of a party's randomness in one round: drawn once, kept in its state.

Everything that a party draws in a round follows from it by label: keys, nonces, coins, answers,
rounding. A party that is woken says the same again, whatever its source of entropy is. What
outlives a round does not follow from it: a period's secret, a client's own.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.prg import Label
from tessera.ids import Party, RoundId
from tessera.protocols import wire
from tessera.protocols.stored import Context
from tessera.rounds.plan import Plan

NAME: Final = "root"
"""Under which a round that is woken may give a function that is told the root, for roles inside
the same state that are read after it."""


def draw_root(entropy: Entropy, plan: Plan, round_id: RoundId, party: Party) -> RootedEntropy:
    """A new root, from which this party draws for the rest of the round."""
    return RootedEntropy(entropy.secret(Label.PARTY_ROOT, plan.federation, int(round_id), party))


class RootCodec(wire.Codec):
    """The root itself."""

    least = wire.SECRET.least

    def write(self, out: bytearray, value: RootedEntropy) -> None:
        wire.SECRET.write(out, value.root)

    def read(self, source: wire.Reader) -> RootedEntropy:
        root = RootedEntropy(wire.SECRET.read(source))
        if isinstance(source.context, Context) and NAME in source.context.given:
            source.context.given[NAME](root)
        return root


StoredRoot: TypeAlias = Annotated[RootedEntropy, RootCodec()]
