"""The root of a party's randomness in one round: drawn once, kept in its state.

Everything that a party draws in a round follows from it by label: keys, nonces, coins, answers,
rounding. A party that is woken says the same again, whatever its source of entropy is. What
outlives a round does not follow from it: a period's secret, a client's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.prg import CoinStream, Label, Stream
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, Party, RoundId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.union import decoys
from tessera.wire.stored import Context

if TYPE_CHECKING:
    from tessera.learning.bound_model import Candidates

ROOT: Final = "root"
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
        if isinstance(source.context, Context) and ROOT in source.context.given:
            source.context.given[ROOT](root)
        return root


StoredRoot: TypeAlias = Annotated[RootedEntropy, RootCodec()]


class ClientEntropy:
    """Entropy of one of many clients: scripted entropy is addressed by client, too."""

    def __init__(self, entropy: Entropy, me: ClientId) -> None:
        self._entropy, self._me = entropy, me

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        return self._entropy.secret(label, int(self._me), *context, size=size)


# --- coins ----------------------------------------------------------------------------------------
#
# Where a client's draws come from: secrets of its own, never its number or a public seed.
#
# What lasts (the first values of its own rows, its negatives) follows from one secret for the
# whole federation, stored before anything is drawn from it. What is drawn in a round (examples,
# order of batches, dropout masks, noise) follows from that round's root. A root is drawn anew for
# every round and never computed from a number that a server can hold still: a round that is said
# not to have counted, run again with the same noise over another model, would cancel it.


def lasting_secret(entropy: Entropy, federation: str, client: int) -> Secret:
    """A client's secret in a federation: drawn once, and kept as long as the client takes part."""
    return entropy.secret(Label.CLIENT_SECRET, federation, int(client))


def coins_of(root: RootedEntropy) -> Secret:
    """What a client draws while it trains, from the root of the round."""
    return root.secret(Label.TRAINING_COINS)


def simulated_coins(entropy: Entropy, plan: Plan, round_id: RoundId, client: ClientId) -> Secret:
    """The same of a simulated client, whose round roots follow from the run's."""
    return coins_of(draw_root(entropy, plan, round_id, client))


# --- negatives ------------------------------------------------------------------------------------
#
# Negatives: rows that a client takes beside its own, so that a softmax has more than its targets.
#
# They are drawn from the client's lasting secret, once and for good: negatives drawn anew leave
# the client's own rows in the intersection of what it asked for before and after. They count as
# the client's rows everywhere: under `max_rows`, in unions, answers, downloads and updates. What
# they hide and what not: docs/threat-model.md.


def with_negatives(real: Mapping[str, Ids], softmax: Candidates, secret: Secret) -> dict[str, Ids]:
    """A client's rows by table, with negatives of the table that a softmax is over.

    Uniform among the rows that are not its own; all of them, if there are no more. With weights, so
    many draws from all rows: what is drawn does not depend on what the client has.
    """
    own = real[softmax.root]
    stream = Stream.of(secret, Label.NEGATIVES, softmax.root)
    if softmax.weights is None:
        every = decoys.WholeTable(softmax.rows)
        drawn = decoys.draw_others(own, every, stream, softmax.negatives)
    else:
        shares = np.cumsum(softmax.weights)
        words = CoinStream(stream).words(softmax.negatives)
        at = np.searchsorted(shares, (words >> np.uint64(11)) * (shares[-1] * 2.0**-53), "right")
        drawn = np.minimum(at, softmax.rows - 1).astype(np.uint64)
    return {**real, softmax.root: np.union1d(own, drawn)}
