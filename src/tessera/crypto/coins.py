"""Words of one key stream in order, and coins made of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.prg import Stream

Words = npt.NDArray[np.uint64]


class WordReader:
    """The words of one stream, in order; none is read twice."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.block = 0

    def words(self, count: int) -> Words:
        """The next words; a block has two, and one that was begun is not gone on with."""
        words = _read(self._stream, self.block, count)
        self.block += -(-count // 2)
        return words

    def second_words(self, block: int, count: int) -> Words:
        """More words for those that were read at this block, from a stream of their own."""
        return _read(self._stream.redraw(1), block, count)


def _read(stream: Stream, block: int, count: int) -> Words:
    words = np.empty(count, dtype=np.uint64)
    kernel.active().keystream(stream.key, stream.nonce, block, words.view(np.uint8))
    return words


class CoinStream(WordReader):
    """Independent coins out of one stream; its words also serve to order or cut by chance."""

    def heads(self, count: int, probability: float) -> npt.NDArray[np.bool_]:
        """Which of `count` coins fall on a side of this probability, rounded down to 2^-64."""
        words = self.words(count)
        if probability >= 1.0:
            return np.ones(count, dtype=np.bool_)
        return words < np.uint64(int(probability * 2**64))

    def permutation(self, count: int) -> npt.NDArray[np.int64]:
        """The numbers below `count` in an order by chance: two equal words have 2^-64 each."""
        return np.argsort(self.words(count), kind="stable")

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Numbers from [0, 1), multiples of 2^-53."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
