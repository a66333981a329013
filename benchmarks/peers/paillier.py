"""Paillier encryption under federated factors, as homomorphic FedMF has it (Chai et al. 2020).

A whole round of it would take hours, so 200 values are really encrypted, added and decrypted with
the package `phe`, and the rest is multiplied out; whatever stands on it is labelled so. Every
client encrypts the gradient of every item it rated; the server adds ciphertexts; every client
decrypts the rows it needs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from benchmarks.peers import PeerFailed, PeerMissing

VALUES: Final = 200
KEY_BITS: Final = 2048
REPEATS: Final = 3


@dataclass(frozen=True, slots=True)
class Paillier:
    """CPU seconds for one value, and the bytes of its ciphertext."""

    encrypt: float
    add: float
    decrypt: float
    bytes: int
    bits: int = KEY_BITS

    def client(self, values: int) -> float:
        """A client's round: its gradient encrypted, the rows it got decrypted."""
        return values * (self.encrypt + self.decrypt)

    def server(self, values: int) -> float:
        """The server's: everybody's values added up."""
        return values * self.add


def measure() -> Paillier:
    """What a value costs here, by the median of a few rounds over 200 of them."""
    try:
        from phe import paillier
    except ImportError as error:
        raise PeerMissing("phe", error) from error
    public, private = paillier.generate_paillier_keypair(n_length=KEY_BITS)
    given = np.random.default_rng(0).normal(scale=0.1, size=(2, VALUES))
    taken = []
    for _ in range(REPEATS):
        marks = [time.process_time()]
        boxes = [public.encrypt(float(value)) for value in given[0]]
        marks.append(time.process_time())
        others = [public.encrypt(float(value)) for value in given[1]]
        begin = time.process_time()
        summed = [a + b for a, b in zip(boxes, others, strict=True)]
        marks.append(time.process_time() - begin)
        begin = time.process_time()
        opened = [private.decrypt(box) for box in summed]
        marks.append(time.process_time() - begin)
        if not np.allclose(opened, given.sum(axis=0)):
            raise PeerFailed("phe: the sum of ciphertexts does not open as the sum of values")
        taken.append(((marks[1] - marks[0]) / VALUES, marks[2] / VALUES, marks[3] / VALUES))
    encrypt, add, decrypt = (median(part) for part in zip(*taken, strict=True))
    return Paillier(encrypt, add, decrypt, bytes=2 * KEY_BITS // 8)
