"""Write dpf.json beside this file.

    python tests/vectors/make_dpf.py

Point functions by the definition, one tree and one node at a time, with plain integers and AES of
`cryptography`: never tessera's own code. A "gen" vector goes from points, values and seeds to the
public part and to both servers' shares at every position; a "read" vector has only the public part
to be read. Each vector to refuse is a good one changed in one place. The format is in README.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from make_keys import derived

FILE = Path(__file__).parent / "dpf.json"
HALF = 1 << 64
TOPS = 1 << 127 | 1 << 63  # the control bits of a node
SIDE_BY_SIDE = 512
P61 = 2**61 - 1
Vector = dict[str, object]


def seeded(name: str, size: int = 32) -> bytes:
    return hashlib.shake_256(f"dpf.json {name}".encode()).digest(size)


class Type:
    """Values of one kind: a row of words; or, without a group, one bit or 64 that XOR."""

    def __init__(self, group: str | None, words: int, bits: int = 1) -> None:
        self.group, self.words = group, words
        self.name = (
            ("bit" if bits == 1 else f"{bits} bits") if group is None else f"{words} of {group}"
        )
        if group is None:
            self.order, self.word, self.bits = 2**bits, 0, bits
        elif group == "f2^61-1":
            self.order, self.word, self.bits = P61, 8, 61
        else:
            self.bits = int(group[3:])
            self.order = 2**self.bits
            self.word = next(w for w in (4, 8, 16) if self.bits <= 8 * w)
        row = self.word * words
        self.per_leaf = (
            128 // bits if group is None else max(p for p in (1, 2, 4) if p * row <= max(16, row))
        )
        self.blocks = max(1, -(-row // 16))
        self.short = self.word == 4 and self.bits <= 24 and self.blocks > 3

    def elements(self, leaf: bytes) -> list[list[int]]:
        """The rows of a leaf."""
        if self.group is None:
            whole = int.from_bytes(leaf, "little")
            return [[whole >> self.bits * i & self.order - 1] for i in range(self.per_leaf)]
        stride = len(leaf) // self.per_leaf
        rows = []
        for r in range(self.per_leaf):
            words = []
            for w in range(self.words):
                at = r * stride + w * self.word
                raw = int.from_bytes(leaf[at : at + self.word], "little")
                words.append((raw & P61) % P61 if self.order == P61 else raw % self.order)
            rows.append(words)
        return rows

    def signed(self, word: int, negative: int) -> int:
        return word if self.group is None or not negative else -word % self.order

    def add(self, a: int, b: int) -> int:
        return a ^ b if self.group is None else (a + b) % self.order


def sigma(node: int) -> int:
    low, high = node % HALF, node // HALF
    return high | (low ^ high) << 64


def hashed(key: bytes, node: int, tweak: int = 0) -> int:
    data = (node ^ tweak).to_bytes(16, "little")
    out = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(data)
    return int.from_bytes(out, "little") ^ node


def switched(node: int, correction: int) -> int:
    """The halves of a correction whose control bit is set."""
    low = correction % HALF if node >> 63 & 1 else 0
    high = correction >> 64 if node >> 127 else 0
    return low | high << 64


def children(key: bytes, node: int, step: int) -> tuple[int, int]:
    left = sigma(hashed(key, node)) ^ switched(node, step)
    return left, left ^ node


def leaf_of(key: bytes, node: int, kind: Type) -> list[list[int]]:
    blocks: list[bytes] = []
    calls = 0
    while len(blocks) < kind.blocks:
        if kind.short and len(blocks) % 4 == 3:  # of every word's last byte, in three blocks
            three = blocks[-3:]
            words = (bytes([one[at] for one in three]) + b"\0" for at in (3, 7, 11, 15))
            blocks.append(b"".join(words))
        else:
            blocks.append(hashed(key, node, 1 << 120 | calls << 32).to_bytes(16, "little"))
            calls += 1
    return kind.elements(b"".join(blocks))


def controls(node: int, kind: Type) -> list[list[int]]:
    """For every word of a leaf the control bit that switches its correction."""
    low, high = node >> 63 & 1, node >> 127
    each = []
    for r in range(kind.per_leaf):
        row = []
        for w in range(kind.words):
            at = r * (16 * kind.blocks // kind.per_leaf) + w * kind.word  # bytes
            if kind.group is None:
                at = r * kind.bits // 8
            row.append(high if kind.word == 16 or at % 16 >= 8 else low)
        each.append(row)
    return each


def roots(seed: bytes, count: int, party: int) -> list[int]:
    counter = modes.CTR(seed[16:] + bytes(8))
    stream = Cipher(algorithms.AES(seed[:16]), counter).encryptor().update(bytes(16 * count))
    nodes = [int.from_bytes(stream[16 * i : 16 * i + 16], "little") for i in range(count)]
    return [node & ~TOPS | TOPS * party for node in nodes]


def widths(leaves: int) -> list[int]:
    """Nodes of every level, from the root to the leaves."""
    out = [leaves]
    while out[0] > 1:
        out.insert(0, -(-out[0] // 2))
    return out


def path_to(leaf: int, leaves: int) -> list[int]:
    """The sides to take, from the root on, in fold order: lefts first, then rights."""
    sides: list[int] = []
    for width in reversed(widths(leaves)[:-1]):
        sides.insert(0, int(leaf >= width))
        leaf -= width * sides[0]
    return sides


def order_of(sizes: list[int], kind: Type) -> list[int]:
    some = [b for b, size in enumerate(sizes) if size]
    return sorted(some, key=lambda b: -(-sizes[b] // kind.per_leaf))


def sets_of(leaves: list[int]) -> list[list[int]]:
    """Trees that stand side by side: with equally many leaves, about SIDE_BY_SIDE of these."""
    sets: list[list[int]] = []
    for tree, count in enumerate(leaves):
        most = max(SIDE_BY_SIDE // count, 1)
        most -= most % 32 if most > 32 else 0
        if sets and leaves[sets[-1][0]] == count and len(sets[-1]) < most:
            sets[-1].append(tree)
        else:
            sets.append([tree])
    return sets


def vector(
    name: str,
    group: str | None,
    words: int,
    sizes: list[int],
    points: list[int],
    betas: list[list[int]],
    bits: int = 1,
) -> Vector:
    kind = Type(group, words, bits)
    if group is None and bits == 1:
        betas = [[1] for _ in sizes]
    report, seeds = seeded(f"{name} report"), seeded(f"{name} seeds", 48)
    key = derived(report, 16, "point function cipher", kind.name)
    order = order_of(sizes, kind)
    first = roots(seeds[:24], len(order), 0), roots(seeds[24:], len(order), 1)
    steps: list[list[int]] = []  # tree by tree
    finals: list[list[list[int]]] = []
    shares: list[list[list[list[int]]]] = [[[] for _ in sizes], [[] for _ in sizes]]
    for tree, b in enumerate(order):
        leaves = -(-sizes[b] // kind.per_leaf)
        leaf, inside = divmod(max(points[b], 0), kind.per_leaf)
        y = [first[0][tree], first[1][tree]]
        offset = y[0] ^ y[1]
        mine: list[int] = []
        for side in path_to(leaf, leaves):
            step = sigma(hashed(key, y[0])) ^ sigma(hashed(key, y[1])) ^ (0 if side else offset)
            mine.append(step)
            y = [children(key, node, step)[side] for node in y]
            assert y[0] ^ y[1] == offset
        beta = [[0] * words for _ in range(kind.per_leaf)]
        if points[b] >= 0:
            beta[inside] = [v % kind.order for v in betas[b]]
        ours, theirs = (leaf_of(key, node, kind) for node in y)
        negative = controls(y[1], kind)
        final = [
            [
                kind.signed(
                    kind.add(kind.add(beta[r][w], kind.signed(ours[r][w], 1)), theirs[r][w]),
                    negative[r][w],
                )
                for w in range(words)
            ]
            for r in range(kind.per_leaf)
        ]
        steps.append(mine)
        finals.append(final)
        for party in (0, 1):
            for position in range(sizes[b]):
                at, place = divmod(position, kind.per_leaf)
                node = first[party][tree]
                for side, step in zip(path_to(at, leaves), mine, strict=True):
                    node = children(key, node, step)[side]
                row = [
                    kind.add(x, y) if on else x
                    for x, y, on in zip(
                        leaf_of(key, node, kind)[place],
                        final[place],
                        controls(node, kind)[place],
                        strict=True,
                    )
                ]
                shares[party][b].append([kind.signed(x, party) for x in row])
    for b, size in enumerate(sizes):  # the vectors are right, or the script stops
        for position in range(size):
            total = [
                kind.add(x, y)
                for x, y in zip(shares[0][b][position], shares[1][b][position], strict=True)
            ]
            due = [0] * words
            if position == points[b]:
                due = [v % kind.order for v in betas[b]]
            assert total == due, (name, b, position)
    drawn = "half trees, spare bytes" if kind.short else "half trees"
    text = f"tessera-1 forest, {drawn}, {kind.name}, {len(sizes)} bins:".encode()
    packed_sizes = b"".join(size.to_bytes(4, "little") for size in sizes)
    digest = hashlib.sha256(text + packed_sizes).digest()[:16]
    blocks = b""  # set by set; in a set level by level; in a level tree by tree
    for some in sets_of([-(-sizes[b] // kind.per_leaf) for b in order]):
        for level in range(len(steps[some[0]])):
            blocks += b"".join(steps[tree][level].to_bytes(16, "little") for tree in some)
    flat = [word for final in finals for row in final for word in row]
    stream = sum(word << kind.bits * i for i, word in enumerate(flat))
    last = stream.to_bytes(-(-len(flat) * kind.bits // 8), "little")
    return {
        "kind": "gen",
        "name": name,
        "expect": "ok",
        "group": group,
        "words": words,
        "bits": bits,
        "sizes": sizes,
        "points": points,
        "betas": [[str(v % kind.order) for v in row] for row in betas],
        "report_id": report.hex(),
        "seeds": seeds.hex(),
        "public": (digest + blocks + last).hex(),
        "shares": [[[[str(v) for v in row] for row in bin_] for bin_ in party] for party in shares],
    }


def vectors() -> list[Vector]:
    good = vector(
        "32 bits, two bins and an empty one", "z2^32", 1, [9, 0, 3], [7, -1, 2], [[5], [0], [-1]]
    )
    public = bytes.fromhex(str(good["public"]))
    field = vector("field", "f2^61-1", 1, [5, 2], [4, -1], [[P61 - 1], [0]])

    def changed(
        base: Vector, name: str, error: str, says: str, data: bytes, **rest: object
    ) -> Vector:
        return {
            **base,
            "kind": "read",
            "name": name,
            "expect": error,
            "says": says,
            "public": data.hex(),
            **rest,
        }

    narrow = vector("22 bits, three words", "z2^22", 3, [4, 7], [0, 6], [[1, 2, 3], [-1, 0, 2**21]])
    padded = bytearray.fromhex(str(narrow["public"]))
    padded[-1] |= 1 << 7  # two trees of three words are 132 bits
    spare = vector("22 bits, 19 words", "z2^22", 19, [3, 5], [2, -1], [[*range(19)], [0] * 19])
    of_spare = b"tessera-1 forest, half trees, 19 of z2^22, 2 bins:" + bytes(
        [3, 0, 0, 0, 5, 0, 0, 0]
    )
    before = hashlib.sha256(of_spare).digest()[:16] + bytes.fromhex(str(spare["public"]))[16:]
    return [
        good,
        vector("64 bits", "z2^64", 1, [17, 1, 2], [16, 0, -1], [[2**63], [1], [0]]),
        vector("128 bits", "z2^128", 1, [6, 1], [5, 0], [[2**127 + 3], [2**64]]),
        narrow,
        spare,
        vector("24 bits, 34 words", "z2^24", 34, [2, 3], [0, 1], [[2**24 - 1] * 34, [*range(34)]]),
        vector("24 bits, 13 words", "z2^24", 13, [3], [2], [[*range(2**23, 2**23 + 13)]]),
        vector("25 bits, 13 words", "z2^25", 13, [3], [2], [[*range(2**24, 2**24 + 13)]]),
        vector("sets", "z2^128", 1, [20] * 26 + [3], [19] * 26 + [-1], [[b] for b in range(27)]),
        vector("19 words", "z2^32", 19, [3, 5], [2, -1], [[*range(19)], [0] * 19]),
        field,
        vector("field, three words", "f2^61-1", 3, [3], [1], [[1, 2, P61 - 2]]),
        vector("bits", None, 1, [130, 3], [129, 1], []),
        vector("selectors", None, 1, [5, 0, 3], [4, -1, 0], [[2**63 + 5], [1], [1]], bits=64),
        changed(good, "a byte short", "Truncated", "bytes", public[:-1]),
        changed(good, "a byte more", "TrailingBytes", "bytes", public + b"\0"),
        changed(
            good, "the layout of before half trees", "Malformed", "another domain", _before(good)
        ),
        changed(
            spare, "words of before spare bytes were used", "Malformed", "another domain", before
        ),
        changed(good, "another domain", "Malformed", "another domain", public, sizes=[10, 0, 3]),
        changed(good, "another value type", "Malformed", "another domain", public, words=2),
        changed(narrow, "padding set", "Malformed", "padding", bytes(padded)),
        changed(
            field,
            "a word that is the order",
            "Malformed",
            "order",
            _with_order(bytes.fromhex(str(field["public"]))),
        ),
    ]


def _before(base: Vector) -> bytes:
    """As keys were when a step was 129 bits: another digest, and a bit for every step."""
    public = bytes.fromhex(str(base["public"]))
    text = b"tessera-1 forest, 1 of z2^32, 3 bins:" + bytes.fromhex("090000000000000003000000")
    return hashlib.sha256(text).digest()[:16] + public[16:48] + b"\x02" + public[48:]


def _with_order(public: bytes) -> bytes:
    """The first packed word of the last corrections becomes 2^61 - 1."""
    size = -(-4 * 61 // 8)  # two trees of two rows
    stream = int.from_bytes(public[-size:], "little") | P61
    return public[:-size] + stream.to_bytes(size, "little")


if __name__ == "__main__":
    about = "Point functions: keys from points, values and seeds, and both servers' shares"
    document = {"about": about, "hex": ["report_id", "seeds", "public"], "vectors": vectors()}
    FILE.write_text(json.dumps(document, indent=1) + "\n")
