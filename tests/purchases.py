"""A shop's purchases as a CSV file: customers have a taste, the order of purchases says nothing.

    python tests/purchases.py purchases.csv [--items products.csv]

Every product is in one of a few departments, every customer has one of its own, and three of four
purchases are from there. How often a product is bought falls with its rank to the power .8. Dates
are written in several ways, as a file has them that was put together from others.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

DEPARTMENTS = (
    *("Tea", "Lamps", "Garden", "Toys", "Paper", "Wool"),
    *("Knives", "Soap", "Bicycles", "Records", "Shoes", "Cheese"),
)
FORMS = (
    "%d/%m/%Y %H:%M:%S",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%SZ",
    "%Y-%m-%dT%H:%M:%S+02:00",
    "seconds",
    "milliseconds",
)
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Shop:
    """How many of what, and how far a customer keeps to its own department."""

    customers: int = 6_000
    products: int = 4_000
    departments: int = 12
    own: float = 0.75
    power: float = 0.8
    each: float = 18.0  # purchases of a customer, on average
    seed: int = 7

    def drawn(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """The department of every product and of every customer, and who bought what, in order."""
        rng = np.random.default_rng(self.seed)
        weight = (np.arange(1, self.products + 1) ** -self.power)[rng.permutation(self.products)]
        department = rng.integers(self.departments, size=self.products)
        taste = rng.integers(self.departments, size=self.customers)
        chances = [
            (1.0 - self.own) * weight / weight.sum()
            + self.own * weight * (department == one) / weight[department == one].sum()
            for one in range(self.departments)
        ]
        times = 3 + rng.gamma(3.0, (self.each - 3.0) / 3.0, self.customers).astype(int)
        bought = [
            rng.choice(self.products, size=times[who], p=chances[taste[who]])
            for who in range(self.customers)
        ]
        return department, taste, bought

    def lines(self, *, times: bool = True) -> Iterator[list[str]]:
        """A header, then the purchases of all customers in a mixed order."""
        _, _, bought = self.drawn()
        rng = np.random.default_rng([self.seed, 1])
        rows = []
        for who, products in enumerate(bought):
            seconds = np.sort(rng.integers(0, 366 * 86_400, len(products)))
            form = rng.integers(len(FORMS), size=len(products))
            rows += [
                [f"C{who:05d}", f"P-{what:04d}", *([written(int(s), FORMS[f])] if times else [])]
                for what, s, f in zip(products, seconds, form, strict=True)
            ]
        yield ["customer", "product", *(["bought_at"] if times else [])]
        yield from (rows[at] for at in rng.permutation(len(rows)))

    def catalogue(self) -> Iterator[list[str]]:
        department, _, _ = self.drawn()
        yield ["product", "title", "department"]
        for what, where in enumerate(department.tolist()):
            yield [
                f"P-{what:04d}",
                f"{DEPARTMENTS[where % 12]} no. {what}",
                DEPARTMENTS[where % 12],
            ]


def written(seconds: int, form: str) -> str:
    """A moment of the year in one of the forms."""
    moment = BEGIN + timedelta(seconds=seconds)
    if form in ("seconds", "milliseconds"):
        return str(int(moment.timestamp() * (1_000 if form == "milliseconds" else 1)))
    if form.endswith("+02:00"):
        moment += timedelta(hours=2)
    return moment.strftime(form)


def write(path: Path, lines: Iterator[list[str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--items", type=Path)
    parser.add_argument("--without-times", action="store_true")
    given = parser.parse_args()
    write(given.out, Shop().lines(times=not given.without_times))
    if given.items:
        write(given.items, Shop().catalogue())
