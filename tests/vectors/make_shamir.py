"""Write shamir.json beside this file.

    python tests/vectors/make_shamir.py

Whole numbers and a plain AES counter, never tessera's own code, so that the vectors are a second
opinion on it. A "split" vector goes from secrets to shares, a "combine" one back; each vector to
refuse is a good one changed in one place. The format is in README.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from make_keys import derived

FILE = Path(__file__).parent / "shamir.json"
P = 2**17 - 1
Vector = dict[str, object]


def seeded(name: str) -> bytes:
    return hashlib.sha256(f"shamir.json {name}".encode()).digest()


def elements(coefficients: bytes, threshold: int, secrets: int, count: int) -> list[int]:
    """Uniform elements of F_p: 17 bits of every 4-byte word of an AES-128 counter stream."""
    name = derived(coefficients, 24, "share coefficients", threshold, secrets)
    counter = modes.CTR(name[16:] + bytes(8))
    stream = Cipher(algorithms.AES(name[:16]), counter).encryptor().update(bytes(4 * count))
    words = [int.from_bytes(stream[i : i + 4], "little") & P for i in range(0, 4 * count, 4)]
    assert P not in words, "a word to redraw: choose another seed, the generator has its own test"
    return words


def packed(limbs: list[int]) -> bytes:
    return sum(limb << 17 * i for i, limb in enumerate(limbs)).to_bytes(34, "little")


def split(secrets: list[bytes], threshold: int, points: list[int], coefficients: bytes) -> Vector:
    columns = 16 * len(secrets)
    drawn = elements(coefficients, threshold, len(secrets), (threshold - 1) * columns)
    joined = b"".join(secrets)
    limbs = [int.from_bytes(joined[i : i + 2], "little") for i in range(0, len(joined), 2)]

    def value(column: int, x: int) -> int:
        others = drawn[column::columns]  # of x, x^2, ...
        return (limbs[column] + sum(a * x**k for k, a in enumerate(others, 1))) % P

    shares = [
        [packed([value(16 * s + i, x) for i in range(16)]).hex() for x in points]
        for s in range(len(secrets))
    ]
    return {
        "kind": "split",
        "expect": "ok",
        "secrets": [secret.hex() for secret in secrets],
        "threshold": threshold,
        "points": points,
        "coefficients": coefficients.hex(),
        "shares": shares,
    }


def vectors() -> list[Vector]:
    ones, low = b"\xff" * 32, bytes(32)
    pair = [seeded("first"), seeded("second")]
    splits = [
        {"name": "1 of 1", **split([seeded("one")], 1, [1], seeded("a"))},
        {"name": "2 of 3", **split([seeded("one")], 2, [1, 2, 3], seeded("b"))},
        {"name": "3 of 5, two secrets", **split(pair, 3, [1, 2, 3, 4, 5], seeded("c"))},
        {"name": "all ones and all zeros", **split([ones, low], 4, [1, 2, 3, 4, 5], seeded("d"))},
        {"name": "points far apart", **split(pair, 2, [P - 1, 7, 65536], seeded("e"))},
    ]
    good = splits[2]
    points, shares = good["points"], good["shares"]
    assert isinstance(points, list) and isinstance(shares, list)

    def combine(name: str, at: list[int], threshold: int = 3) -> Vector:
        """The first of the two secrets, from its shares at some points."""
        return {
            "kind": "combine",
            "name": name,
            "expect": "ok",
            "threshold": threshold,
            "points": at,
            "shares": [[shares[0][points.index(x)] for x in at]],
            "secrets": [pair[0].hex()],
        }

    def changed(name: str, says: str, position: int, share: str) -> Vector:
        vector = combine(name, [1, 3, 5])
        row = [share if i == position else old for i, old in enumerate(vector["shares"][0])]  # type: ignore[index]
        return {**vector, "expect": "CryptoError", "says": says, "shares": [row]}

    base = combine("", [1, 3, 5])
    row: list[str] = base["shares"][0]  # type: ignore[index]
    number = int.from_bytes(bytes.fromhex(row[1]), "little")
    all_ones = (number | P << 17 * 15).to_bytes(34, "little").hex()
    refused = {"expect": "CryptoError"}
    return [
        *splits,
        combine("three of five", [1, 3, 5]),
        combine("three others, in any order", [4, 2, 5]),
        combine("one more than needed", [5, 1, 3, 2]),
        {**combine("too few", [1, 3]), **refused, "says": "2 shares, 3 are needed"},
        {
            **base,
            **refused,
            "name": "a point twice",
            "points": [1, 1, 5],
            "says": "1 occurs twice",
        },
        {**base, **refused, "name": "point zero", "points": [1, 0, 5], "says": "point 0 is not"},
        {**base, **refused, "name": "point p", "points": [1, P, 5], "says": f"point {P} is not"},
        {**base, **refused, "name": "point below", "points": [1, -3, 5], "says": "point -3 is not"},
        changed("a share of 33 bytes", "point 3: a share has 34 bytes", 1, row[1][:-2]),
        changed("a share of 35 bytes", "point 3: a share has 34 bytes", 1, row[1] + "00"),
        changed("no share", "point 3: a share has 34 bytes", 1, ""),
        changed("a limb of all ones", f"point 3: a limb is not below {P}", 1, all_ones),
        changed("a share of another secret", "over 16 bits", 1, shares[1][2]),
        {**base, **refused, "name": "another's point", "points": [1, 4, 5], "says": "over 16 bits"},
        {**base, "name": "threshold 0", "expect": "ConfigError", "threshold": 0},
        {**base, "name": "threshold 1001", "expect": "ConfigError", "threshold": 1001},
    ]


if __name__ == "__main__":
    about = "Shamir sharing of 32-byte secrets over F_p, p = 2^17 - 1, limb by limb"
    document = {"about": about, "hex": ["coefficients"], "vectors": vectors()}
    FILE.write_text(json.dumps(document, indent=1) + "\n")
