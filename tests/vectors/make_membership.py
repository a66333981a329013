"""Write membership.json beside this file.

    python tests/vectors/make_membership.py

Merkle trees by RFC 6962's recursive definition, hash chains and swap-or-not permutations one point
and one round at a time, in whole numbers and never by tessera's own code. A "path" vector proves a
leaf of a tree, a "value" vector a value of a chain; those to refuse are good ones changed in one
place. The format is in README.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

FILE = Path(__file__).parent / "membership.json"
ROUNDS = 256
Vector = dict[str, object]


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def item(value: int | bytes | str) -> bytes:
    """Type, length in 8 bytes, content; whole numbers as the shortest two's complement."""
    if isinstance(value, int):
        content, kind = value.to_bytes(value.bit_length() // 8 + 1, "big"), b"i"
    elif isinstance(value, str):
        content, kind = value.encode(), b"s"
    else:
        content, kind = value, b"b"
    return kind + len(content).to_bytes(8, "big") + content


def context(*items: int | bytes | str) -> bytes:
    return b"".join(map(item, items))


def digests(count: int) -> list[bytes]:
    return [sha(b"membership.json leaf %d" % i) for i in range(count)]


def top(leaves: list[bytes]) -> bytes:
    """RFC 6962, 2.1: split at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return sha(b"tessera tree leaf", leaves[0])
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return sha(b"tessera tree node", top(leaves[:split]), top(leaves[split:]))


def root(leaves: list[bytes]) -> bytes:
    return sha(context("tessera tree root", len(leaves), top(leaves) if leaves else b""))


def path(number: int, leaves: list[bytes]) -> list[bytes]:
    """RFC 6962, 2.1.1."""
    if len(leaves) == 1:
        return []
    split = 1 << (len(leaves) - 1).bit_length() - 1
    if number < split:
        return [*path(number, leaves[:split]), top(leaves[split:])]
    return [*path(number - split, leaves[split:]), top(leaves[:split])]


def chain(last: bytes, length: int, whose: bytes) -> list[bytes]:
    """Values 0 (the commitment) to `length`."""
    values = [last]
    for number in range(length, 0, -1):
        values.insert(0, sha(context("tessera hash chain", whose, number, values[0])))
    return values


def shuffled(key: bytes, size: int, point: int) -> int:
    """Hoang, Morris, Rogaway 2012, Figure 1."""
    named = context("tessera shuffle", key, size)
    words = hashlib.shake_256(named).digest(16 * (ROUNDS + 1))
    cipher = Cipher(algorithms.AES(words[:16]), modes.ECB()).encryptor()
    for number in range(ROUNDS):
        offset = int.from_bytes(words[16 * (number + 1) : 16 * (number + 2)], "little") % size
        partner = (offset - point) % size
        larger = max(point, partner)
        block = (larger // 128).to_bytes(8, "little") + number.to_bytes(8, "little")
        bits = int.from_bytes(cipher.update(block), "little")
        if bits >> larger % 128 & 1:
            point = partner
    return point


def main() -> None:
    vectors: list[Vector] = []
    for size in (0, 1, 2, 3, 5, 8, 13, 100):
        vectors.append(
            {
                "name": f"a tree of {size}",
                "kind": "tree",
                "expect": "ok",
                "size": size,
                "root": root(digests(size)).hex(),
            }
        )
    for size, number in ((1, 0), (5, 0), (5, 4), (13, 7), (13, 12), (100, 99)):
        leaves = digests(size)
        good: Vector = {
            "name": f"leaf {number} of {size}",
            "kind": "path",
            "expect": True,
            "size": size,
            "number": number,
            "leaf": leaves[number].hex(),
            "path": [each.hex() for each in path(number, leaves)],
            "root": root(leaves).hex(),
        }
        vectors.append(good)
        vectors += [
            {**good, "name": f"{good['name']}, {what}", "expect": False, **changed}
            for what, changed in changes(good).items()
        ]
    values = chain(sha(b"membership.json chain"), 12, b"authority")
    for number in (1, 7, 12):
        good = {
            "name": f"value {number}",
            "kind": "value",
            "expect": True,
            "number": number,
            "whose": b"authority".hex(),
            "last": values[-1].hex(),
            "length": 12,
            "value": values[number].hex(),
            "commitment": values[0].hex(),
        }
        vectors.append(good)
        others: dict[str, Vector] = {
            "of another number": {"number": number + 1},
            "of another party": {"whose": b"leader".hex()},
            "under another commitment": {"commitment": values[1].hex()},
            "cut": {"value": values[number][:-1].hex()},
        }
        vectors += [
            {**good, "name": f"value {number}, {what}", "expect": False, **changed}
            for what, changed in others.items()
        ]
    for size in (1, 2, 3, 20, 127, 1000, 10**6, 2**32 - 1):
        key = sha(b"membership.json key %d" % size)
        points = sorted({0, 1 % size, size // 2, size // 3, size - 1})
        vectors.append(
            {
                "name": f"a shuffle of {size}",
                "kind": "shuffle",
                "expect": "ok",
                "size": size,
                "key": key.hex(),
                "points": points,
                "images": [shuffled(key, size, point) for point in points],
            }
        )
    document = {
        "about": "Merkle trees, hash chains and keyed permutations of groups that can be checked",
        "hex": ["root", "leaf", "whose", "last", "value", "commitment", "key"],
        "vectors": vectors,
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n")


def changes(good: Vector) -> dict[str, Vector]:
    size, number, neighbours = good["size"], good["number"], good["path"]
    assert isinstance(size, int) and isinstance(number, int) and isinstance(neighbours, list)
    found: dict[str, Vector] = {
        "of another size": {"size": size + 1},
        "beyond the tree": {"number": size},
        "with a digest too many": {"path": [*neighbours, bytes(32).hex()]},
    }
    if neighbours:
        found |= {
            "with another number": {"number": number ^ 1},
            "with a digest missing": {"path": neighbours[:-1]},
            "with a digest changed": {"path": [bytes(32).hex(), *neighbours[1:]]},
        }
    return found


if __name__ == "__main__":
    main()
