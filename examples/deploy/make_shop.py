"""A made-up shop to try a deployment with: a catalogue, a plan, and a file for each of ten clients.

python make_shop.py FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Final

CLIENTS, ITEMS, PURCHASES = 10, 200, 30
FIRST, DAY = 1_700_000_000, 86_400
PLAN: Final = """\
scheme = "secure-submodel"
cohort = 10
federation = "first-shop"

[task]
name = "sequences"
item = "sku"
time = "when"
model = "next"
width = 16
negatives = 30
history = 10

[groups]
size = 5
small = true    # ten groups at least, or it is said that groups are on the operator's word
period = 10     # rounds after which new purchases come in
delay = 0.0     # seconds from a download to what is sent: more than training takes

[service]
poll = 5
"""


def main(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "plan.toml").write_text(PLAN)
    lines = [f"SKU-{at},Product {at}" for at in range(ITEMS)]
    (folder / "catalogue.csv").write_text("\n".join(["sku,title", *lines]) + "\n")
    for client in range(CLIENTS):
        drawn = random.Random(client)
        item, bought = drawn.randrange(ITEMS), []
        for at in range(PURCHASES):
            item = (item + drawn.choice((1, 1, 1, 2, 7))) % ITEMS
            bought.append(f"SKU-{item},{FIRST + DAY * at}")
        (folder / "data" / f"client-{client}.csv").write_text(
            "\n".join(["sku,when", *bought]) + "\n"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
