"""A member's words of one epoch under the masks that it shares with every other member.

An epoch's root is drawn once. The mask key and all coins of the epoch (of training, rounding and
the union's words) follow from it, so that they are stored, restored and erased together: a member
that computed its words again under the same masks would show which of them changed.
"""

from __future__ import annotations

import numpy as np

from tessera.crypto import prg
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.group import Words
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.ids import ClientId
from tessera.protocols.epochs.chain import EpochLink
from tessera.protocols.epochs.group import FixedGroup


def fresh_root(entropy: Entropy, group: FixedGroup, me: ClientId, epoch: int) -> Secret:
    """Independent of every other epoch's."""
    return entropy.secret(Label.EPOCH_ROOT, group.federation, group.digest, me, epoch)


def mask_key(root: Secret) -> AgreementKey:
    return AgreementKey.from_secret(root.derive(Label.EPOCH_MASK_KEY))


def coins(root: Secret) -> RootedEntropy:
    """What a member draws from in this epoch; the mask key does not follow from it."""
    return RootedEntropy(root.derive(Label.EPOCH_COINS))


def masked(
    words: Words,
    link: EpochLink,
    group: FixedGroup,
    me: ClientId,
    root: Secret,
    keys: tuple[bytes, ...],
) -> Words:
    """The words plus the masks with peers of larger ids, minus those with peers of smaller ones.

    `keys` are all members' mask keys of this epoch, in the order of the leaves. A pair's mask
    follows from its agreement, both ids, both keys and h_e: it cancels between two members only if
    they received the same for this epoch, and in every epoch before.
    """
    own = mask_key(root)
    streams, signs = [], []
    for peer, key in zip(group.members, keys, strict=True):
        if peer == me:
            continue
        pair = [(me, own.public), (peer, key)]
        (low, low_key), (high, high_key) = sorted(pair)
        secret = own.agree(key, Label.EPOCH_PAIR, link.digest, low, high, low_key, high_key)
        streams.append(Stream.of(secret, Label.EPOCH_MASK))
        signs.append(1 if me == low else -1)
    total: Words = np.array(words, dtype=link.header.ring.dtype)
    prg.accumulate(link.header.ring, total, streams, signs)
    return total
