"""Where a client's draws come from: secrets of its own, never its number or a public seed.

What lasts (the first values of its own rows, its negatives) follows from one secret for the whole
federation, stored before anything is drawn from it. What is drawn in a round (examples, order of
batches, dropout masks, noise) follows from that round's root. A root is drawn anew for every round
and never computed from a number that a server can hold still: a round that is said not to have
counted, run again with the same noise over another model, would cancel it.
"""

from __future__ import annotations

from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, RoundId
from tessera.rounds.plan import Plan
from tessera.rounds.root import draw_root


def lasting_secret(entropy: Entropy, federation: str, client: int) -> Secret:
    """A client's secret in a federation: drawn once, and kept as long as the client takes part."""
    return entropy.secret(Label.CLIENT_SECRET, federation, int(client))


def coins_of(root: RootedEntropy) -> Secret:
    """What a client draws while it trains, from the root of the round."""
    return root.secret(Label.TRAINING_COINS)


def simulated_coins(entropy: Entropy, plan: Plan, round_id: RoundId, client: ClientId) -> Secret:
    """The same of a simulated client, whose round roots follow from the run's."""
    return coins_of(draw_root(entropy, plan, round_id, client))
