"""Two models of one run: what each costs, what each is worth, and what is opened of both."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.report.figures import RunFigures, mapping
from tessera.report.markup import Content, listing, table, tag
from tessera.report.numbers import count, score, size


def mixture(runs: Sequence[RunFigures]) -> list[Content]:
    """Nothing where no run has a second model."""
    return [content for run in runs if run.beside is not None for content in _of(run, run.beside)]


def _of(run: RunFigures, second: RunFigures) -> list[Content]:
    found = mapping(run.facts["mixture"])
    one, other = (str(name) for name in found["names"])
    curve = {float(weight): float(value) for weight, value in found["curve"]}
    weight, both = float(found["weight"]), f"{one}+{other}"
    tested = mapping(found["test"])
    held = {one: curve[0.0], other: curve[1.0], both: curve[weight]}
    measures = list(next(iter(tested.values()), {}))

    def row(name: str, parts: Sequence[RunFigures]) -> list[Content]:
        return [
            name,
            ", then ".join(f"{part.finished} of {count(part.cohort)}" for part in parts),
            *(size(_sent(parts, way)) for way in ("bytes_up", "bytes_down")),
            score(held[name]),
            *(score(tested[name][measure]) for measure in measures),
        ]

    head = ["model", "rounds of clients", "bytes up", "bytes down"]
    head += [f"{run.metric}, held out", *(f"{measure}, tested" for measure in measures)]
    body = [row(one, [run]), row(other, [second]), row(both, [run, second])]
    facts = mapping(second.task.get("facts"))
    alone = facts.get("pairs with one holder")
    notes = [
        f"A user's scores of both models are brought to mean 0 and deviation 1 over all items, and "
        f"{other} counts {weight:g} of 1. The weight is the best on an item of each of "
        f"{count(found['users'])} users that neither model was trained on (held out); the test "
        "part had no say in it.",
        "Bytes are of a client in the whole run: those of a round, times the rounds that it is in "
        "on average.",
        f"All else on this page is about {one}; its privacy section holds for both, as they have "
        "the same scheme, and in fixed groups the same groups.",
    ]
    if alone:
        notes.append(
            f"The sums of pairs are opened exactly (exact_pairs): {alone} of the pairs have one "
            "holder, and whoever opens the sums and knows an item of a history can follow it from "
            f"pair to pair. Published are {facts.get('published', 'the largest weights')}."
        )
    return [
        table(f"Both models, {run.label}", head, body, class_="cards"),
        listing(notes, "note"),
        *([] if tested else [tag("p", "The mixture was not tested in one place.")]),
    ]


def _sent(parts: Sequence[RunFigures], way: str) -> float | None:
    """What a client sends or fetches in the rounds of these runs; None if one was not measured."""
    total = 0.0
    for part in parts:
        each, clients = part.per_round(way), part.task.get("clients")
        if each is None or not isinstance(clients, int) or part.cohort is None:
            return None
        total += each * part.finished * part.cohort / clients
    return total
