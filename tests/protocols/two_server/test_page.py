"""The page says what the code does: every message has the length that its table states."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import two_servers
from tessera import wire
from tessera.ids import SERVER
from tessera.wire.index_set import IndexSet

PAGE = Path(__file__).parents[3] / "docs" / "protocols" / "two-servers.md"


def stated() -> dict[tuple[str, str], str]:
    """(part, message) -> formula, from the page's table of messages."""
    found, part = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2].startswith("`"):
            part = cells[0] or part
            found[part, cells[2].strip("`")] = cells[3].strip("`")
    return found


def size_of(codec: wire.Codec, value) -> int:
    out = bytearray()
    codec.write(out, value)
    return len(out)


def v(number: int) -> int:
    return size_of(wire.VARINT, number)


def counted(sizes) -> int:
    return v(len(sizes)) + sum(v(x) + x for x in sizes)


def quantities(network: two_servers.Network, message) -> dict[str, object]:
    """What the page's formulas call the parts of a message."""
    sizes = [len(part) for part in getattr(message, "public", ())]
    lists = (getattr(message, name, {}) for name in ("reports", "queries", "sums"))
    reports = next(filter(None, lists), {})
    reasons = [len(text.encode()) for text in getattr(message, "reasons", {}).values()]
    specs = network.params.tables
    halves = [t.half_bytes for t in specs if t.reads_points]
    found: dict[str, object] = {
        "T": len(network.params.read),
        "K": sizes,
        "P": len(sizes),
        "n": len(reports),
        "e": len(reasons),
        "reasons": reasons,
        "A": halves,
        "W": [t.rows * t.row_bytes for t in specs if t.reads_whole],
        "D": network.params.dense_bytes,
    }
    dense = len(getattr(message, "dense", b""))
    found["X"] = found["S"] = dense
    tables = getattr(message, "tables", ())
    found["M"] = [len(part) for part in tables if isinstance(part, bytes)]
    found["O"] = [(part.rows, len(part.words)) for part in tables if hasattr(part, "rows")]
    return found


def test_every_message_has_the_length_that_the_page_states():
    spec = two_servers.table(300, 6, stash=1)
    settings = two_servers.params(
        spec, two_servers.small_table(2), dense=70, dense_bytes=200, clients=3
    )
    network = two_servers.Network.of(settings)
    header = network.handshake()
    network.reading(header)
    network.read({c: {0: two_servers.ids(1, 2, 250)} for c in network.clients})
    read = len(network.log)
    network.writing(header)
    rows = {0: np.arange(5, dtype=np.uint64), 9: two_servers.ids(1)}
    late = network.clients[-1]
    network.meddle = lambda source, m: (
        [] if m.kind == "Forwarded" and wire.decode(m.data).sender == late else [m.data]
    )
    network.write({c: two_servers.update(settings, rows, c) for c in network.clients})
    assert network.roles[SERVER].excluded.keys() == {late}
    formulas, seen = stated(), set()
    for at, (_, sent) in enumerate(network.log):
        message = wire.decode(sent.data)
        part = "handshake" if sent.kind.startswith(("Handshake", "SignedHeader")) else "reading"
        part = "writing" if at >= read else part
        scope = {
            "__builtins__": {},
            "v": v,
            "L": lambda size: v(size) + size,
            "B": counted,
            "I": lambda indices: size_of(IndexSet(1 << 20), indices),
            "len": len,
            "sum": sum,
            **quantities(network, message),
        }
        assert eval(formulas[part, sent.kind], scope) == len(sent.data), sent.kind
        seen.add((part, sent.kind))
    assert seen == formulas.keys()
