"""What people would be shown: the ranking over the whole catalogue, and three users' lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.report.figures import RunFigures
from tessera.report.markup import Content, Markup, table, tag
from tessera.report.numbers import count, score
from tessera.runs.folder import RANKING


def ranking(runs: Sequence[RunFigures]) -> list[Content]:
    """Of each run that has one; the lists are those of the first."""
    content: list[Content] = []
    lists: list[Mapping[str, Any]] = []
    for run in runs:
        kept = run.run.kept(RANKING)
        if kept is None or run.withholds:
            continue
        content += measured(kept["ranking"], f", {run.label}" if len(runs) > 1 else "")
        lists = lists or kept["lists"]
    if not lists:
        return content
    note = "Held out of training and not known to the model: what came next. Scores order items; "
    note += "they are not probabilities."
    return [
        *content,
        tag("h3", "Three users' lists"),
        *(listed(each) for each in lists),
        tag("p", note, class_="note"),
    ]


def measured(found: Mapping[str, Any], whose: str) -> list[Content]:
    names = list(next(iter(found["figures"].values())))
    body: list[list[Content]] = [
        [predictor, *(score(figures[name]) for name in names)]
        for predictor, figures in found["figures"].items()
    ]
    about = f"{count(found['targets'])} users of the {found['part']} part, what came next among "
    about += f"about {count(found['candidates'])} items each{whose}"
    note = "Every item that a user does not have is ranked, none is sampled, and ties count "
    note += "against what came. The others need no model: they are counts of the training part."
    return [
        table(about, ["predictor", *names], body, class_="cards"),
        tag("p", note, class_="note"),
    ]


def listed(found: Mapping[str, Any]) -> Markup:
    """One user: what it had, what the model puts first, and what came."""
    came = found["came_next"]
    had = ", ".join(name(item) for item in found["past"])
    body: list[list[Content]] = [
        [
            str(place),
            tag("b", name(item), " (came next)") if item["item"] == came["item"] else name(item),
            item["id"],
            score(item["predicted"]),
        ]
        for place, item in enumerate(found["recommended"], start=1)
    ]
    after = f"User {found['user']}, {found['ratings']:,} items, the latest first: {had}. "
    after += f"What came next: {name(came)}, in place {found['place']:,}."
    head = ["place", "recommended", "id", "score"]
    return table(after, head, body, class_="cards", numeric=False)


def name(item: Mapping[str, Any]) -> str:
    return str(item["title"])
