"""KeyedDraws: noise and coins of one run from a key stream, as the trainer takes them.

The key follows from the run's seed, so that a run can be repeated: this measures utility, and
protects nobody.
"""

from __future__ import annotations

from tessera.crypto.coins import CoinStream
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.noise import DEVIATION, dense_noise
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.reproduce.subject_dp.market import Values


class KeyedDraws:
    """Standard normal values, in integers over their deviation, and numbers from [0, 1)."""

    def __init__(self, secret: Secret) -> None:
        self._noise = dense_noise(secret)
        self._coins = CoinStream(Stream.of(secret, Label.BATCH_COINS))

    @classmethod
    def of(cls, *run: int) -> KeyedDraws:
        """The draws of one run, named by numbers."""
        return cls(ScriptedEntropy(b"subject-dp").secret(Label.CLIENT_NOISE, *run))

    def standard_normal(self, count: int) -> Values:
        return self._noise.draw(count) / DEVIATION

    def random(self, count: int) -> Values:
        return self._coins.uniform(count)
