"""Inputs as an accident or an enemy leaves them: plans, run folders, models, data files, mutated.

Every mutation follows from a seed. What reads them has to end with `error:` and status 2, or work.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

NUMBERS: Final = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "4294967296",
        "1000000000",
        "9223372036854775807",
        "-9223372036854775808",
    ),
    *(
        "10000000000000000000",
        "100000000000000000000000000",
        "0.5",
        "-0.0",
        "1e19",
        "1e308",
        "1e-320",
    ),
    *("nan", "inf", "-inf", "true", "false", '""', '"groups"', '"\\u0000"', "[]", "[1, 2]", "{}"),
    *("1979-05-27", '"' + "x" * 300 + '"', "null", "0x10"),
)
"""What stands in the place of a value, in TOML or JSON; some of it is no value there."""

OBJECTS: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, 1e308, "", "x", "\x00", [], [None], {}),
    *({"a": 1}, float("nan"), float("inf"), "inf", [[]], "9" * 400),
)
"""What stands in the place of a JSON value."""


def spoilt_bytes(content: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut off, doubled or put in."""
    if not content:
        return rng.randbytes(8)
    at = rng.randrange(len(content))
    size = rng.choice((1, 1, 2, 8, 64, 1000))
    kind = rng.randrange(5)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + rng.randbytes(size) + content[at + size :]
    if kind == 2:
        return content[:at] + content[at + size :]
    if kind == 3:
        return content[:at] + content[at : at + size] * 2 + content[at + size :]
    return content[:at] + rng.randbytes(size) + content[at:]


def spoilt_plan(text: str, rng: random.Random) -> bytes:
    """A plan with another value, a line less or more, or spoilt bytes."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 1, 2))):
        kind, at = rng.random(), rng.randrange(len(lines))
        found = re.match(r"(\w+ = )", lines[at])
        if kind < 0.8:
            while found is None:
                at = rng.randrange(len(lines))
                found = re.match(r"(\w+ = )", lines[at])
            lines[at] = found[1] + rng.choice(NUMBERS)
        elif kind < 0.9:
            lines[at] = rng.choice(("", lines[at] + "\n" + lines[at], "[task]", "[[table]]", "= 3"))
        else:
            return spoilt_bytes(text.encode(), rng)
    return "\n".join(lines).encode()


def spoilt_json(value: Any, rng: random.Random) -> Any:
    """The same with one value, somewhere in it, in another form; or without it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: spoilt_json(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], spoilt_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(OBJECTS)


def spoil_file(path: Path, rng: random.Random) -> None:
    """A file of a folder, by what it is."""
    if path.suffix == ".json" and rng.random() < 0.8:
        path.write_text(json.dumps(spoilt_json(json.loads(path.read_text()), rng)))
    elif path.suffix == ".jsonl" and rng.random() < 0.8 and path.stat().st_size:
        lines = path.read_text().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(spoilt_json(json.loads(lines[at]), rng))
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".toml" and rng.random() < 0.8:
        path.write_bytes(spoilt_plan(path.read_text(), rng))
    elif rng.random() < 0.1:
        path.unlink()
    elif rng.random() < 0.1:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(spoilt_bytes(path.read_bytes(), rng))


def spoil_folder(folder: Path, rng: random.Random, *, weight: Callable[[Path], int]) -> str:
    """One or two files of a folder; which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and weight(path))
    chosen = rng.choices(files, [weight(path) for path in files], k=rng.choice((1, 1, 2)))
    for path in set(chosen):
        spoil_file(path, rng)
    return ", ".join(sorted({path.relative_to(folder).as_posix() for path in chosen}))


def spoilt_lines(content: bytes, rng: random.Random) -> bytes:
    """A CSV with another field, line or separator, or spoilt bytes."""
    lines = content.decode().splitlines()
    at = rng.randrange(len(lines))
    fields = lines[at].split(",")
    kind = rng.random()
    if kind < 0.4:
        fields[rng.randrange(len(fields))] = rng.choice(
            ("", "nan", "-1", "1e400", "9" * 400, '"', '"a', "\x00", "2024-13-45", "é", "x,y", "\r")
        )
        lines[at] = ",".join(fields)
    elif kind < 0.5:
        lines[at] = ",".join(fields[:-1])
    elif kind < 0.6:
        lines = [line.replace(",", rng.choice(";\t|:")) for line in lines]
    elif kind < 0.65:
        return "\n".join(lines).encode(rng.choice(("utf-16", "utf-32", "latin-1")))
    elif kind < 0.7:
        lines = lines[: rng.choice((0, 1))]
    else:
        return spoilt_bytes(content, rng)
    return "\n".join(lines).encode()
