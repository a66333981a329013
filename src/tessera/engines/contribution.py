"""What a client sends of its update where a plan has [dp]: clipped, and with noise of its own.

At user level an update is clipped as a whole. Noise that belongs to every step of training is in
the update already; where noise is on the sum, the role clips and rounds.
"""

from __future__ import annotations

from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.learning.noisy.user import clipped_update, noisy_update
from tessera.learning.submodel import ModelUpdate
from tessera.rounds.plan import Plan


def contribution(plan: Plan, update: ModelUpdate, coins: Secret) -> ModelUpdate:
    """What leaves the client, before it is encoded; its noise follows from its coins."""
    section = plan.dp
    if section is None or section.by_batches or section.on_integers:
        return update  # as one vector when it is encoded, where noise is on the sum
    clipped = clipped_update(update, section.clip)
    noise = coins.derive(Label.CLIENT_NOISE)
    return noisy_update(clipped, section.clip, section.noise, noise)
