"""What the demo found: its runs, what the server knows of one person, traffic at other sizes.

Three sentences sum it up, and are computed from the figures: a run that loses says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tessera.audit.person import KnownRows
from tessera.privacy.bound import KNOWN_ROW, in_words
from tessera.report.figures import RunFigures
from tessera.report.numbers import count, score, share, size
from tessera.report.words import enumeration, plural
from tessera.rounds.forecast.by_size import SizePoint
from tessera.rounds.schemes import SchemeEntry

NEXT: Final = "tessera init purchases.csv"
"""What to do after the demo."""
SHOWN: Final = 8
"""Items that are named before "and so many more"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Runs in the order of the table. `stopped`: after how many rounds the full model was."""

    runs: Sequence[RunFigures] = field(repr=False)
    rounds: int
    group: int
    user: str
    items: Sequence[str]
    known: Sequence[KnownRows]
    names: Mapping[int, str] = field(repr=False)  # of her items, by row
    sizes: Mapping[str, Sequence[SizePoint]] = field(repr=False)
    stopped: int | None = None

    def _first(self, wanted: Callable[[SchemeEntry], bool]) -> RunFigures | None:
        return next((run for run in self.runs if wanted(run.entry)), None)

    @property
    def central(self) -> RunFigures | None:
        """All data in one place."""
        return self._first(lambda entry: not entry.federated)

    @property
    def full(self) -> RunFigures | None:
        """The full model in the clear: what the others are measured by."""
        return self._first(is_full)

    @property
    def clear(self) -> RunFigures | None:
        """Rows in the clear."""
        return self._first(lambda entry: entry.by_rows and not entry.hides)

    @property
    def secure(self) -> RunFigures | None:
        """Rows under secure sums."""
        return self._first(lambda entry: entry.randomises)

    @property
    def two(self) -> RunFigures | None:
        return self._first(lambda entry: entry.two_servers)

    @property
    def federated(self) -> list[RunFigures]:
        return [run for run in self.runs if not run.central]

    def named(self, known: KnownRows) -> list[str]:
        """The items that the server is sure of, by their ids."""
        return [self.names[int(row)] for row in known.sure]

    # --- in words -------------------------------------------------------------------------------

    def sentences(self) -> list[tuple[str, str]]:
        """What was gained, what is hidden, and the price: a word and a sentence each."""
        return [("Gained", self._gained()), ("Hidden", self._hidden()), ("Price", self._price())]

    def _gained(self) -> str:
        rows, whole = self.secure, self.full
        if rows is None or whole is None or not traffic(rows) or not traffic(whole):
            return "no traffic was measured."
        baseline = rows.best_baseline
        clear = self.clear
        beside = []
        if clear is not None:
            beside.append(f"{score(clear.final)} in the clear ({clear.label})")
        if self.central is not None:
            beside.append(
                f"{score(self.central.final)} with all data in one place ({self.central.label})"
            )
        if baseline is not None:
            beside.append(f"{score(baseline[1])} by the best baseline")
        return (
            f"under {rows.label} a client moves {size(traffic(rows))} a round, "
            f"{ratio(traffic(rows), traffic(whole))} of the full model's {size(traffic(whole))} "
            f"({whole.label}), and the {rows.metric} is {score(rows.final)}: {enumeration(beside)}."
        )

    def _hidden(self) -> str:
        of = plural(len(self.items), "item")
        read = [k.scheme for k in self.known if k.read and k.right == len(k.rows)]
        parts = (
            [f"of one user's {of} the server reads all under {enumeration(read)}"] if read else []
        )
        guesses = [known for known in self.known if not known.read]
        for known in guesses:
            guess = f"under {known.scheme} its best guess is right for {count(known.right)}"
            guess += f" ({count(known.by_chance)} by chance)"
            guess += f" and sure for {len(known.sure)}" if len(known.sure) else ", sure for none"
            parts.append(guess)
        told = "; ".join(parts) + (", each after all rounds." if guesses else ".")
        rows = self.secure
        if rows is not None and rows.plan.grouped:
            told += f" Under {rows.label} {in_words(rows.plan.promise.bound())}: {KNOWN_ROW}."
        return told

    def _price(self) -> str:
        parts = []
        rows, two = self.secure, self.two
        if rows is not None and rows.plan.grouped:
            parts.append(
                f"a group of {self.group} with a missing member contributes nothing to a round, "
                f"so {share(rows.dropouts)} of the clients' rounds are lost"
            )
        if two is not None and traffic(two):
            parts.append(
                f"{two.label} moves {size(traffic(two))}, needs two servers that do not collude, "
                "and its exact sums identify holders over the rounds"
            )
        return "; ".join(parts) + "."

    def stop_note(self) -> str | None:
        """Why the full model was not trained to the end."""
        if self.stopped is None or self.full is None:
            return None
        return (
            f"{self.full.label} was stopped after {plural(self.stopped, 'round')} of "
            f"{self.rounds}: by then a client had moved more than under any other scheme in all "
            "rounds."
        )

    def person_note(self) -> str:
        rest = len(self.items) - SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return (
            f"User {self.user} has {plural(len(self.items), 'item')}: "
            f"{', '.join(self.items[:SHOWN])}{more}. From all that it saw in all rounds the server "
            "guesses who holds each item, by the attacks of `tessera audit` and knowing none "
            "beforehand; counted are the items of this user for which the guess is right."
        )

    def summary(self) -> dict[str, Any]:
        """For machines."""
        return {
            "sentences": {word.lower(): text for word, text in self.sentences()},
            "stopped_after": self.stopped,
            "person": {
                "user": self.user,
                "items": list(self.items),
                "known": [
                    {
                        "scheme": known.scheme,
                        "rounds": known.rounds,
                        "read": known.read,
                        "right": known.right,
                        "sure": self.named(known),
                        "by_chance": known.by_chance,
                    }
                    for known in self.known
                ],
            },
            "by_size": {
                scheme: {str(point.rows): point.bytes_both_ways for point in points}
                for scheme, points in self.sizes.items()
            },
            "next": NEXT,
        }


def is_full(entry: SchemeEntry) -> bool:
    """Whether clients exchange the full model, in the clear."""
    return entry.federated and not entry.hides and not entry.by_rows


def traffic(run: RunFigures) -> float | None:
    """Bytes of one client in a round, both ways."""
    up, down = run.per_round("bytes_up"), run.per_round("bytes_down")
    return None if up is None or down is None else up + down


def ratio(part: float | None, whole: float | None) -> str:
    """ "1/35", or "2.1 times" where the part is the larger."""
    if not part or not whole:
        return "an unknown share"
    return f"1/{whole / part:.0f}" if part <= whole / 1.5 else f"{part / whole:.2g} times"


def known_in_words(known: KnownRows) -> tuple[str, str, str]:
    """Of one person's items: rightly taken for hers, for certain, and by chance."""
    of = len(known.rows)
    if known.read:
        return f"{count(known.right)} of {of} read", f"{len(known.sure)} of {of}", ""
    return (
        f"{count(known.right)} of {of} guessed",
        f"{len(known.sure)} of {of}",
        f"{count(known.by_chance)} of {of}",
    )
