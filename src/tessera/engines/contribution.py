"""What a client sends of its update where a plan has [dp]: clipped, and with noise of its own.

At user level an update is clipped as a whole. Noise that belongs to every step of training is in
the update already; where noise is on the sum, the role clips and rounds.
"""

from __future__ import annotations

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, RoundId
from tessera.learning.noisy.user import clipped_update, noisy_update
from tessera.learning.submodel import ModelUpdate
from tessera.rounds.plan import Plan


def contribution(
    plan: Plan, round_id: RoundId, client: ClientId, update: ModelUpdate, entropy: Entropy
) -> ModelUpdate:
    """What leaves the client, before it is encoded."""
    section = plan.dp
    if section is None or section.by_batches or section.on_integers:
        return update  # as one vector when it is encoded, where noise is on the sum
    clipped = clipped_update(update, section.clip)
    secret = client_secret(entropy, plan, round_id, client)
    return noisy_update(clipped, section.clip, section.noise, secret)


def client_secret(entropy: Entropy, plan: Plan, round_id: RoundId, client: ClientId) -> Secret:
    """What a client's batches and noise of one round follow from."""
    return entropy.secret(Label.CLIENT_NOISE, plan.federation, int(round_id), int(client))
