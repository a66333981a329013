"""Commands and code as the documents have them, taken out of the pages and run."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np

from tessera.cli import main as cli
from tessera.data.speech import speakers_like

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: str, word: str) -> list[list[str]]:
    """The arguments of the commands in the block that has this word."""
    block = next(block for block in blocks(page, "console") if word in block)
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line)[1:] for line in lines if line.startswith("tessera ")]


def follow(page: str, word: str) -> None:
    for arguments in commands(page, word):
        assert cli.main(arguments) == 0, arguments


def program(page: str, word: str) -> str:
    return next(block for block in blocks(page, "python") if word in block)


def cells(notebook: str) -> list[str]:
    found = json.loads((ROOT / notebook).read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in found["cells"] if c["cell_type"] == "code"]


def purchases(path: Path, lines: int = 100_000, bad: int = 60, users: int = 1_500) -> None:
    """A shop's export, in the dialect of a spreadsheet, with some lines that cannot be read."""
    rng = np.random.default_rng(19)
    user = rng.integers(users, size=lines)
    item = (800 * rng.random(lines) ** 2).astype(int)
    wrong = set(rng.choice(np.arange(1, lines), bad, replace=False).tolist())
    with path.open("w", newline="", encoding="cp1252") as out:
        rows = csv.writer(out, delimiter=";")
        rows.writerow(["order", "customer_id", "sku", "purchased_at", "café"])
        for at in range(lines):
            when = f"2024-{1 + at * 12 // lines:02d}-{1 + at % 28:02d} 10:{at % 60:02d}:00"
            row = [at, f"C{user[at]:05d}", f"SKU-{item[at]}", when, "crème"]
            if at in wrong:
                row[1 + at % 3] = ("", "", "yesterday")[at % 3]
            rows.writerow(row)


def messages(path: Path, senders: int = 40) -> None:
    """What people wrote to each other: words that follow each other by a pattern."""
    said = speakers_like(senders, 400, spoken_each=240, seed=3)
    context, following = said.train["context"], said.train["next"]
    letters = "abcdefghijklmnopqrst"
    names = [letters[n // 400] + letters[n // 20 % 20] + letters[n % 20] for n in range(400)]
    often = np.argsort(-np.bincount(following, minlength=400))
    names[often[0]], names[often[1]] = "good", "morning"
    with path.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(["sender", "text"])
        for client in range(said.clients):
            text: list[str] = []
            for at in range(*said.offsets[client : client + 2]):
                if context[at, 1] < 0:  # the second word of a message
                    if text:
                        rows.writerow([f"sender {client}", " ".join(text).capitalize() + "."])
                    text = [names[context[at, 0]]]
                text.append(names[following[at]])
            rows.writerow([f"sender {client}", " ".join(text)])
