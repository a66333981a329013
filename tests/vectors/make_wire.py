"""Write wire.json beside this file.

    python tests/vectors/make_wire.py

The encoding written out by hand, with `struct` and whole numbers and never tessera's own code. A
"good" vector is a message and its fields; a "bad" one is a good one (`like`) changed in one place,
with its checksum made anew unless the checksum is that place. The format is in README.md; in
`fields` bytes are hexadecimal.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

FILE = Path(__file__).parent / "wire.json"
Vector = dict[str, object]

U8, U16, U32, U64, F64 = (struct.Struct(f"<{kind}").pack for kind in "BHIQd")


def number(value: int) -> bytes:
    """Seven bits a byte, lowest first; all but the last have the top bit set."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + number(rest) if rest else bytes([low])


def counted(data: bytes) -> bytes:
    return number(len(data)) + data


def bits(places: list[int], size: int) -> bytes:
    """A bit string of `size` bits with ones at these places, lowest bit first."""
    return sum(1 << place for place in places).to_bytes((size + 7) // 8, "little")


def index_set(rows: list[int]) -> bytes:
    """Elias-Fano, or a bitmap where that is no longer; zeros up to four bits of an index."""
    if not rows:
        return number(0)
    count, top = len(rows), rows[-1]
    low = max(0, (top // count).bit_length() - 1)
    unary = (top >> low) + count
    head = number(count) + number(top)
    least = (4 * count + 7) // 8
    if top + 1 <= count * low + unary:
        return head + bits(rows, top + 1).ljust(least, b"\0")
    lows = sum((row & ((1 << low) - 1)) << low * i for i, row in enumerate(rows))
    ones = [(row >> low) + i for i, row in enumerate(rows)]
    body = lows.to_bytes((count * low + 7) // 8, "little") + bits(ones, unary)
    return head + body.ljust(least, b"\0")


def framed(tag: int, body: bytes, version: int = 1, parts: tuple[bytes, ...] = ()) -> bytes:
    """`parts` are byte strings of the body, in order, that the checksum sees as their SHA-256."""
    frame = U8(version) + U16(tag) + body
    hashed, rest = b"", frame
    for part in parts:
        before, rest = rest.split(counted(part), 1)
        hashed += before + number(len(part)) + hashlib.sha256(part).digest()
    return frame + hashlib.sha256(hashed + rest).digest()[:8]


def letters(letter: str, size: int) -> bytes:
    return letter.encode() * size


def good(name: str, record: str, data: bytes, fields: Vector) -> Vector:
    return {
        "name": name,
        "kind": "good",
        "expect": "ok",
        "record": record,
        "data": data.hex(),
        "fields": fields,
    }


def survivors(rows: list[int]) -> tuple[bytes, Vector]:
    body = U64(12) + U8(1) + index_set(rows)
    return framed(0x0108, body), {"round_id": 12, "stage": 1, "survivors": rows}


def sets() -> list[Vector]:
    cases = {
        "no survivors": [],
        "survivor zero": [0],
        "the last index there is": [2**64 - 1],
        "survivors as a bitmap": [0, 1, 2, 4, 5, 7],
        "survivors as Elias-Fano": [3, 70, 71, 500, 1023],
        "first and last": [0, 2**64 - 1],
    }
    return [good(name, "SurvivorList", *survivors(rows)) for name, rows in cases.items()]


def messages() -> list[Vector]:
    share, other = letters("s", 34), letters("t", 34)
    shares = U64(2**64 - 1) + U8(15) + U32(7)
    shares += number(2) + U32(1) + share + U32(300) + other + number(0)
    shares += number(1) + U16(4) + counted(letters("r", 16))
    masked = U64(12) + U8(0) + U32(7) + counted(letters("d", 5))
    masked += number(2) + counted(b"") + counted(letters("x", 130))
    keys = [letters(letter, 32) for letter in "cknmo"]
    advert = U64(12) + U32(7) + b"".join(keys[:3]) + number(1) + keys[3] + keys[4] + counted(b"")
    revealed = U64(12) + U8(0) + U32(7) + number(300)
    revealed += number(2) + U16(0) + index_set([5]) + U16(65535) + index_set([])
    return [
        good(
            "the next stage",
            "NextStage",
            framed(0x010C, U64(12) + U8(1)),
            {"round_id": 12, "stage": 1},
        ),
        good(
            "shares by client",
            "RevealedShares",
            framed(0x010B, shares),
            {
                "round_id": 2**64 - 1,
                "stage": 15,
                "sender": 7,
                "self_masks": {"1": share.hex(), "300": other.hex()},
                "mask_keys": {},
                "row_keys": {"4": letters("r", 16).hex()},
            },
        ),
        good(
            "a masked input",
            "MaskedInput",
            framed(0x0107, masked),
            {
                "round_id": 12,
                "stage": 0,
                "sender": 7,
                "dense": letters("d", 5).hex(),
                "tables": ["", letters("x", 130).hex()],
            },
        ),
        good(
            "an unsigned advert",
            "Advert",
            framed(0x0101, advert),
            {
                "round_id": 12,
                "sender": 7,
                "context": keys[0].hex(),
                "channel_key": keys[1].hex(),
                "nonce": keys[2].hex(),
                "stages": [{"mask_key": keys[3].hex(), "commitment": keys[4].hex()}],
                "signature": "",
            },
        ),
        good(
            "revealed rows of two tables",
            "RevealedSet",
            framed(0x0105, revealed),
            {
                "round_id": 12,
                "stage": 0,
                "sender": 7,
                "quorum": 300,
                "tables": [{"table": 0, "rows": [5]}, {"table": 65535, "rows": []}],
            },
        ),
    ]


def two_servers() -> list[Vector]:
    """Between leader and helper: a nonce, a report that is carried, the list, and a report."""
    nonce, report = letters("n", 32), letters("i", 32)
    digest, signature = letters("d", 32), letters("g", 64)
    carried = counted(b"write") + U64(12) + U32(7) + report
    carried += number(2) + counted(letters("k", 130)) + counted(b"") + counted(letters("b", 5))
    listed = U64(12) + number(2) + U32(7) + digest + U32(300) + nonce + signature
    written = U64(12) + U32(7) + report + number(1) + counted(b"keys")
    written += number(1) + letters("s", 24) + counted(b"share") + counted(b"box")
    return [
        good(
            "a helper's nonce",
            "HandshakeNonce",
            framed(0x0403, U64(12) + nonce + U64(10)),
            {"round_id": 12, "nonce": nonce.hex(), "period": 10},
        ),
        good(
            "a report that the leader carries",
            "Forwarded",
            framed(0x0411, carried, parts=(letters("k", 130), b"")),
            {
                "purpose": "write",
                "round_id": 12,
                "sender": 7,
                "report_id": report.hex(),
                "public": [letters("k", 130).hex(), ""],
                "box": letters("b", 5).hex(),
            },
        ),
        good(
            "a list of two reports",
            "IncludedList",
            framed(0x0604, listed),
            {
                "round_id": 12,
                "reports": {"7": digest.hex(), "300": nonce.hex()},
                "signature": signature.hex(),
            },
        ),
        good(
            "a report",
            "WriteReport",
            framed(0x0601, written, parts=(b"keys", b"share")),
            {
                "round_id": 12,
                "sender": 7,
                "report_id": report.hex(),
                "public": [b"keys".hex()],
                "seeds": [letters("s", 24).hex()],
                "dense": b"share".hex(),
                "box": b"box".hex(),
            },
        ),
    ]


def params(
    *,
    graph: bytes = b"complete",
    group: bytes = b"z2^32",
    dropout: bytes = F64(0.25),
    flag: int = 0,
) -> bytes:
    stage = counted("é".encode()) + counted(group) + number(9) + number(1) + U16(4) + number(3)
    stage += U8(1) + number(1000)
    body = counted(b"test") + U64(12) + letters("p", 32) + number(5) + number(1) + stage
    body += counted(b"semi-honest") + counted(graph) + number(1) + dropout
    return framed(0x0100, body + number(0) + number(0) + number(3) + U8(flag) + U8(0))


def states() -> list[Vector]:
    stage = {"name": "é", "group": "z2^32", "dense": 9, "max_value": 1000}
    stage["tables"] = [{"table": 4, "width": 3}]
    words = U8(1) + U8(1) + number(3) + U16(1) + U16(2) + U16(65535)
    collecting = words + number(0) + number(0) + number(2) + U32(1) + U8(1) + U32(7) + U8(1)
    return [
        good(
            "a round's parameters",
            "SecAggParams",
            params(),
            {
                "federation": "test",
                "round_id": 12,
                "plan_hash": letters("p", 32).hex(),
                "cohort": 5,
                "stages": [stage],
                "threat": "semi-honest",
                "graph": "complete",
                "corrupt": 1,
                "dropout": 0.25,
                "threshold": 0,
                "degree": 0,
                "min_group": 3,
                "insecure_small_groups": False,
                "strict_quorum": False,
            },
        ),
        good(
            "a sum of 16-bit words",
            "InputSum",
            framed(0x01A3, collecting),
            {
                "dense": [1, 2, 65535],
                "tables": {},
                "quorums": {},
                "answers": {"1": True, "7": True},
            },
        ),
        good(
            "a client that has left",
            "Left",
            framed(0x0013, counted(b"lied")),
            {"reason": "lied"},
        ),
    ]


def bad(known: list[Vector]) -> list[Vector]:
    by_name = {str(vector["name"]): bytes.fromhex(str(vector["data"])) for vector in known}

    def refused(like: str, name: str, expect: str, says: str, data: bytes) -> Vector:
        assert data != by_name[like]
        return {
            "name": name,
            "kind": "bad",
            "like": by_name[like].hex(),
            "expect": expect,
            "says": says,
            "data": data.hex(),
        }

    def changed(like: str, at: int, old: bytes, new: bytes) -> bytes:
        """The message with `old` at this offset of its body replaced, and a right checksum."""
        body = by_name[like][3:-8]
        assert body[at : at + len(old)] == old
        tag = int.from_bytes(by_name[like][1:3], "little")
        return framed(tag, body[:at] + new + body[at + len(old) :])

    step, few, sparse = "the next stage", "survivors as a bitmap", "survivors as Elias-Fano"
    shares, total, plan = "shares by client", "a sum of 16-bit words", "a round's parameters"
    carried, listed = "a report that the leader carries", "a list of two reports"
    first, second = U32(1) + letters("s", 34), U32(300) + letters("t", 34)
    body = U64(12) + U8(1)
    whole = by_name[step]
    return [
        refused(step, "version 2", "UnknownVersion", "version 2", framed(0x010C, body, 2)),
        refused(step, "tag 0x01ff", "UnknownTag", "0x01ff", framed(0x01FF, body)),
        refused(step, "a byte short", "Truncated", "1 bytes are due", framed(0x010C, body[:-1])),
        refused(step, "a byte long", "TrailingBytes", "1 bytes", framed(0x010C, body + b"\0")),
        refused(
            step,
            "a bit of the checksum",
            "Malformed",
            "checksum",
            whole[:-1] + bytes([whole[-1] ^ 1]),
        ),
        refused(
            few,
            "100,001 survivors",
            "Oversized",
            "100001 indices where the cap is 100000",
            changed(few, 9, number(6), number(100_001)),
        ),
        refused(
            few,
            "a count in two bytes where one will do",
            "Malformed",
            "shortest form",
            changed(few, 9, b"\x06", b"\x86\x00"),
        ),
        refused(
            few,
            "a mark too few",
            "Malformed",
            "length it states",
            changed(few, 11, b"\xb7", b"\xb3"),
        ),
        refused(
            "survivor zero",
            "a padding bit",
            "Malformed",
            "padding",
            changed("survivor zero", 11, b"\x01", b"\x81"),
        ),
        refused(
            sparse,
            "another last index",
            "Malformed",
            "end where it says",
            changed(sparse, 10, number(1023), number(1022)),
        ),
        refused(
            sparse,
            "two indices in the wrong order",
            "Malformed",
            "not sorted",
            survivors([3, 71, 70, 500, 1023])[0],
        ),
        refused(
            sparse,
            "an index twice",
            "Malformed",
            "not sorted",
            survivors([3, 70, 70, 500, 1023])[0],
        ),
        refused(
            shares,
            "keys in the wrong order",
            "Malformed",
            "ascending",
            changed(shares, 14, first + second, second + first),
        ),
        refused(
            shares,
            "a client twice",
            "Malformed",
            "ascending",
            changed(shares, 14 + 38, U32(300), U32(1)),
        ),
        refused(
            total,
            "an answer that is neither yes nor no",
            "Malformed",
            "neither 0 nor 1",
            changed(total, 16, U8(1), U8(2)),
        ),
        refused(
            total,
            "words of an unknown kind",
            "Malformed",
            "unknown kind",
            changed(total, 0, U8(1), U8(4)),
        ),
        refused(
            total,
            "an empty array beyond all bounds",
            "Oversized",
            "cap is 68719476736",
            changed(total, 1, U8(1) + number(3), U8(2) + number(2**64 - 1) + number(0)),
        ),
        refused(plan, "no such graph", "Malformed", "does not decode", params(graph=b"Complete")),
        refused(plan, "no such group", "Malformed", "does not decode", params(group=b"z2^032")),
        refused(
            plan, "text that is no UTF-8", "Malformed", "does not decode", params(graph=b"\xff")
        ),
        refused(
            plan, "a dropout of minus zero", "Malformed", "minus zero", params(dropout=F64(-0.0))
        ),
        refused(
            plan, "a dropout of 1", "Malformed", "cannot be together", params(dropout=F64(1.0))
        ),
        refused(plan, "a flag of 2", "Malformed", "neither 0 nor 1", params(flag=2)),
        refused(
            carried,
            "keys for no purpose there is",
            "Malformed",
            "does not decode",
            changed(carried, 0, counted(b"write"), counted(b"erase")),
        ),
        refused(
            listed,
            "a client on the list twice",
            "Malformed",
            "ascending",
            changed(listed, 8 + 1 + 36, U32(300), U32(7)),
        ),
    ]


if __name__ == "__main__":
    known = [*sets(), *messages(), *states(), *two_servers()]
    about = "Messages and stored states as bytes: frame, fields in order, checksum"
    document = {"about": about, "hex": ["data"], "vectors": [*known, *bad(known)]}
    FILE.write_text(json.dumps(document, indent=1) + "\n")
