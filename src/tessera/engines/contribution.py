"""What a client sends of its update where a plan has [dp]: clipped, and with noise of its own.

At user level an update is clipped as a whole. Noise that belongs to every step of training is in
the update already; noise inside the sum is the role's.
"""

from __future__ import annotations

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, RoundId
from tessera.learning.noisy.user import clipped_update, noisy_update
from tessera.learning.submodel import ModelUpdate
from tessera.rounds.plan import NoiseFrom, Plan


def contribution(
    plan: Plan, round_id: RoundId, client: ClientId, update: ModelUpdate, entropy: Entropy
) -> ModelUpdate:
    """What leaves the client, before it is encoded."""
    section = plan.dp
    if section is None or section.by_batches or section.trust.in_the_sum:
        return update  # as one vector when it is encoded, where noise is inside the sum
    clipped = clipped_update(update, section.clip)
    if section.trust is NoiseFrom.SERVER:
        return clipped
    secret = client_secret(entropy, plan, round_id, client)
    return noisy_update(clipped, section.clip, section.noise, secret)


def client_secret(entropy: Entropy, plan: Plan, round_id: RoundId, client: ClientId) -> Secret:
    """What a client's batches and noise of one round follow from."""
    return entropy.secret(Label.CLIENT_NOISE, plan.federation, int(round_id), int(client))
