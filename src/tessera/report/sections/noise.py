"""Noise: utility against epsilon, what the budget is spent on, and epsilon by unit and observer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from tessera.privacy.dp.guarantee import Guarantee
from tessera.privacy.dp.noise_setting import MARKS_MOVE
from tessera.report import charts
from tessera.report.figures import RunFigures
from tessera.report.lineup import baselines
from tessera.report.markup import Content, Markup, table, tag
from tessera.report.numbers import epsilon, score, share
from tessera.rounds.no_noise import Figure
from tessera.rounds.noise import paper_notes

SETUP, SELECTION, ROUNDS, METRICS = "set-up sum", "popularity of rows", "rounds", "metrics"


SCRIPTED: Final = "Insecure test entropy: anybody can draw this noise again, and it has no epsilon."


def noise(runs: Sequence[RunFigures]) -> list[Content]:
    """Nothing where no run has noise."""
    noisy = [run for run in runs if run.noisy]
    if not noisy:
        return []
    content: list[Content] = [
        tag(
            "p",
            "ε (epsilon) here is about a unit of [dp] in the plan: a row of a client's data, an "
            "example, a client or a person. What is released about it changes anybody's odds by at "
            "most a factor of e to the ε, but for a probability of delta.",
        )
    ]
    drawn = [run for run in noisy if level(run) is not None and run.final is not None]
    if len({level(run) for run in drawn}) > 1:
        content.append(utility(drawn, runs))
    content.append(spending(noisy))
    for run in noisy:
        content += [tag("h3", f"By unit and observer, {run.label}"), *observers(run)]
    return content


def level(run: RunFigures) -> float | None:
    """The epsilon that a run has kept, by its ledger."""
    spent = run.noise_spent
    return spent[0] if spent is not None and math.isfinite(spent[0]) else None


def kept(run: RunFigures) -> str:
    if run.noise.setting.printed:
        return f"ε infinite, {run.noise.dp.epsilon:g} by the paper"
    return "ε not known" if level(run) is None else f"ε {epsilon(level(run))}"


def trust_of(run: RunFigures) -> str:
    rows = ", selected rows" if run.noise.selects_rows else ""
    cohorts = ", secret cohorts" if not run.noise.covers(Figure.COHORT) else ""
    return f"{run.scheme}, noise by {run.noise.by}{rows}{cohorts}"


def utility(drawn: Sequence[RunFigures], runs: Sequence[RunFigures]) -> Markup:
    """A curve for every scheme and trust; trivial predictors and runs without noise across."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for run in drawn:
        found, kept = run.final, level(run)
        assert found is not None and kept is not None
        curves.setdefault(trust_of(run), []).append((math.log10(max(kept, 1e-3)), found))
    series = [
        charts.Series(name, sorted(points), slot % 8)
        for slot, (name, points) in enumerate(curves.items())
    ]
    across = dict(baselines(runs))
    for run in runs:
        if not run.noisy and run.final is not None:
            across[f"{run.label}, no noise"] = run.final
    references = [charts.ReferenceLine(name, value) for name, value in across.items()]
    metric = drawn[0].metric
    words = "; ".join(
        f"{one.label}: " + ", ".join(f"{score(y)} at {epsilon(10**x)}" for x, y in one.points)
        for one in series
    )

    chart = partial(
        charts.lines,
        series,
        references,
        title=f"{metric} against epsilon",
        description=f"{metric} by epsilon. {words}.",
        x_label="ε",
        x_marks=charts.log_marks([x for one in series for x, _ in one.points]),
        y_label=metric,
    )
    caption = (
        f"{metric} after the last round against the ε that a run has kept. Lines across have no "
        "noise: trivial predictors, which look at everybody's data, and runs without [dp]."
    )
    return charts.figure("utility", chart, caption, heights=(380.0, 280.0))


def shares_of(run: RunFigures) -> dict[str, float]:
    """What part of the budget each kind of noisy release is, by the inverse of its variance."""
    setting = run.noise.setting
    rounds = max(1, run.finished + run.aborted)
    parts = {ROUNDS: rounds * setting.steps * ((setting.row_moves or 1.0) / setting.noise) ** 2}
    for name, ratio, times in (
        (SETUP, setting.setup, 1),
        (SELECTION, setting.selection, 1),
        (METRICS, setting.metrics, setting.tests),
    ):
        if ratio:
            moved = MARKS_MOVE if setting.row_moves else 1.0
            parts[name] = times * (moved / (setting.noise * ratio)) ** 2
    total = sum(parts.values())
    return {name: value / total for name, value in parts.items()}


def spending(runs: Sequence[RunFigures]) -> Markup:
    """Bars of what each budget went to; what is exact has no bar, and is listed."""
    bars = [
        charts.Bar(
            group=run.label,
            label="budget",
            parts=shares_of(run),
            total=kept(run),
        )
        for run in runs
    ]
    words = "; ".join(
        f"{run.label}: "
        + ", ".join(f"{name} {share(part)}" for name, part in shares_of(run).items())
        for run in runs
    )

    chart = partial(
        charts.bars,
        bars,
        (SETUP, SELECTION, ROUNDS, METRICS),
        title="What the budget was spent on",
        description=f"{words}.",
    )
    exact = list(dict.fromkeys(what for run in runs for what in released(run)))
    text = "Shares by the inverse of the noise's variance, in which Gaussian noise adds up. "
    text += (
        f"Released without noise, and so outside every number: {', '.join(exact)}."
        if exact
        else "Nothing beside it is released without noise."
    )
    return charts.figure("spending", chart, text, width=720.0)


def released(run: RunFigures) -> tuple[str, ...]:
    return run.noise.setting_with(setup="sum" in run.setup).sight.exact


def observers(run: RunFigures) -> list[Content]:
    """Epsilon at the plan's delta after the rounds that were, for every unit and observer."""
    if run.test_entropy:
        return [tag("p", SCRIPTED, class_="note")]
    section = run.noise.dp
    known = run.noise.setting_with(setup="sum" in run.setup)
    setting = replace(known, noise=section.noise or 1.0)
    ledger = setting.ledger(run.finished + run.aborted)  # an aborted round stays charged
    seen = setting.sight.observers
    body: list[list[Content]] = []
    given: dict[str, None] = {}
    assumed: dict[str, None] = {}
    for unit in setting.units:
        line: list[Content] = [unit.value]
        levels = ledger.guarantees(delta=section.delta, units=[unit], observers=seen)
        for observer, found in zip(seen, levels, strict=True):
            if not isinstance(found, Guarantee):
                line.append("no account")
                continue
            line.append(epsilon(found.epsilon))
            if found.condition:
                given[found.condition] = None
            if found.assumption and found.finite and unit is section.unit:
                assumed.setdefault(f"Against {observer.value} {found.assumption}. ")
        body.append(line)
    head = ["unit", *(observer.value for observer in seen)]
    note = f"At delta {section.delta:g}, for a client that was in every round that it may be in. "
    if setting.correlated:
        note += "Noise is correlated: all rounds of the training are charged with the first. "
    if not run.noise.covers(Figure.COHORT):
        note += "Whoever does not know the cohorts sees a sample of the clients in each. "
    note += "Infinite: sees it without noise. "
    if setting.row_moves:
        note += "Per index: a row in all of a client's examples, or taken out of every one. "
    note += f"All {'; '.join(given)}. " if given else ""
    note += "".join(assumed)
    printed = [tag("p", f"{line}.") for line in paper_notes(run.noise.paper_facts())]
    return [table("Epsilon", head, body, class_="cards"), tag("p", note, class_="note"), *printed]
