"""The top of the page: what was run, how it compares with the baselines, the curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera.privacy.index.bound import CONDITIONS
from tessera.privacy.index.exposure import epsilon_longitudinal, epsilon_per_round
from tessera.report import charts
from tessera.report.figures import TIE, RunFigures
from tessera.report.lineup import baselines
from tessera.report.markup import Content, Markup, join, listing, tag
from tessera.report.numbers import (
    count,
    enumeration,
    epsilon,
    percent,
    plural,
    predictor,
    score,
    share,
    signed,
    size,
    spelt,
)
from tessera.report.sections.safety import PRESETS, presets_named
from tessera.rounds import schemes
from tessera.rounds.events import NOT_CHARGED

SLOTS: Final = {entry.name: at for at, entry in enumerate(schemes.SCHEMES.values())}
"""A scheme's colour and dashes, the same on every page that shows it once."""

PREDICTORS: Final = {
    "user mean": "scores every item by this user's click rate",
    "item mean": "scores every item by its click rate over all users",
    "sum": "adds the two scores",
}
OF_RATINGS: Final = {
    "user mean": "predicts the mean of this user's ratings for every item",
    "item mean": "predicts the mean of the item's ratings for every user",
    "sum": "adds the two and subtracts the mean of all ratings",
}


def slots(runs: Sequence[RunFigures]) -> list[int]:
    """A slot per run: the scheme's own for the first that wants it, free ones for the others."""
    taken: list[int] = []
    for run in runs:
        wanted = SLOTS[run.scheme]
        free = [s for s in (wanted, 5, 6, 7, 4, 2, 1, 3, 0) if s not in taken]
        taken.append(free[0] if free else len(taken))
    return taken


# --- in words -----------------------------------------------------------------------------------


def heading(runs: Sequence[RunFigures]) -> str:
    return runs[0].title


def lede(runs: Sequence[RunFigures]) -> Markup:
    """Two sentences: what was run, and what came of it; a third if labels need an explanation."""
    sentences = tag("p", setting(runs), " ", outcome(runs), class_="lede")
    return join([sentences, tag("p", PRESETS, class_="note") if presets_named(runs) else None])


def setting(runs: Sequence[RunFigures]) -> Content:
    first = runs[0]
    if not any(run.finished for run in runs):
        names = join(commas([tag("b", run.label) for run in runs]))
        wanted = "" if first.planned is None else f" for {plural(first.planned, 'round')}"
        return join(["Training under ", names, f"{wanted} has begun."])
    if len(runs) == 1:
        who = join(["One model was trained under ", tag("b", first.label)])
    else:
        each = commas([tag("b", run.label) for run in runs])
        who = join([spelt(len(runs)), " models were trained side by side, under ", *each])
    return join([who, " for ", rounds_of(runs), cohort_of(runs), "."])


def commas(names: Sequence[Markup]) -> list[Content]:
    parts: list[Content] = []
    for at, name in enumerate(names):
        parts += ["" if at == 0 else " and " if at == len(names) - 1 else ", ", name]
    return parts


def rounds_of(runs: Sequence[RunFigures]) -> str:
    done = sorted({run.finished for run in runs})
    planned = {run.planned for run in runs}
    if len(done) > 1:
        return f"{done[0]} to {plural(done[-1], 'round')}"
    if len(planned) == 1 and (wanted := planned.pop()) is not None and wanted > done[0]:
        return f"{done[0]} of {plural(wanted, 'planned round')}"
    return plural(done[0], "round")


def cohort_of(runs: Sequence[RunFigures]) -> str:
    cohorts = sorted({run.cohort for run in runs if run.cohort})
    clients = runs[0].task.get("clients")
    if not cohorts:
        return ""
    each = f"{cohorts[0]:,}" if len(cohorts) == 1 else f"{cohorts[0]:,} to {cohorts[-1]:,}"
    of = f" of {clients:,}" if isinstance(clients, int) else ""
    return f", {each}{of} clients in each"


def outcome(runs: Sequence[RunFigures]) -> Content:
    scored = [run for run in runs if run.final is not None]
    if not any(run.finished for run in runs):
        return "No round has finished yet."
    if not scored and any(run.withholds for run in runs):
        return f"The {runs[0].metric} is not charged, and left out."
    if not scored:
        return f"The {runs[0].metric} has not been evaluated yet."
    return one_outcome(scored[0]) if len(runs) == 1 else several_outcomes(scored)


def one_outcome(run: RunFigures) -> Content:
    start = join(
        [
            f"Its {run.metric} on {run.tested_on} is ",
            tag("b", score(run.final)),
            f" after round {run.curve[-1][0]:.0f}{not_charged([run])}",
        ]
    )
    baseline = run.best_baseline
    if baseline is None:
        return join([start, "; no baseline was scored."])
    name, value = baseline
    ahead = run.margin_over(value) or 0.0
    exact = not_charged([run], "trivial")
    best = f"the best baseline ({predictor(name)}, {score(value)}){exact}"
    if abs(ahead) < TIE:
        return join([start, ", ", tag("b", "tied with", class_="bad"), f" {best}."])
    if ahead > 0:
        verdict = tag("b", f"{ahead:.3f} better than", class_="good")
        return join([start, ", ", verdict, f" {best}."])
    verdict = tag("b", f"{-ahead:.3f} worse than", class_="bad")
    return join([start, ", ", verdict, f" {best}: so far the baseline is the better recommender."])


def not_charged(runs: Sequence[RunFigures], name: str = "metric") -> str:
    """The mark behind a figure that is exact where a budget should have paid for it."""
    return f" ({NOT_CHARGED})" if any(run.uncharged(name) for run in runs) else ""


def several_outcomes(runs: Sequence[RunFigures]) -> Content:
    metric, scores = runs[0].metric, baselines(runs)
    leader = max(runs, key=lambda run: run.margin_over(0.0) or 0.0)
    start = join(
        [
            f"The best final {metric} is ",
            tag("b", score(leader.final)),
            f" ({leader.label}){not_charged(runs)}",
        ]
    )
    if not scores:
        return join([start, "; no baseline was scored."])
    name, value = max(scores.items(), key=lambda item: -(leader.margin_over(item[1]) or 0.0))
    exact = not_charged(runs, "trivial")
    best = f"the best baseline ({predictor(name)}, {score(value)}){exact}"
    ahead = [run.label for run in runs if (run.margin_over(value) or 0.0) >= TIE]
    behind = [run.label for run in runs if run.label not in ahead]
    if not behind:
        return join([start, "; ", tag("b", "all of them beat", class_="good"), f" {best}."])
    if not ahead:
        return join([start, "; ", tag("b", "none of them beats", class_="bad"), f" {best}."])
    verb = "beats" if len(ahead) == 1 else "beat"
    fall = "does not" if len(behind) == 1 else "do not"
    return join(
        [
            start,
            f"; {enumeration(ahead)} ",
            tag("b", verb, class_="good"),
            f" {best}; {enumeration(behind)} ",
            tag("b", fall, class_="bad"),
            ".",
        ]
    )


def banners(runs: Sequence[RunFigures]) -> Markup:
    """Warnings that come before any figure."""
    return join(
        tag("p", tag("strong", title), " ", text, class_="banner", role="note")
        for title, text in banners_in_words(runs)
    )


def banners_in_words(runs: Sequence[RunFigures]) -> list[tuple[str, str]]:
    """Each with a loud beginning."""
    found: list[tuple[str, str]] = []
    many = len(runs) > 1
    entropy = [run.label for run in runs if run.test_entropy]
    if entropy:
        whose = enumeration(entropy) if many else "this run"
        found.append(
            (
                "Insecure test entropy.",
                f"Every key, mask and randomised answer of {whose} can be computed from its seed. "
                "Accuracy and costs are valid; there is no privacy.",
            )
        )
    for run in runs:
        if run.switched_off:
            plan = f"The plan of {run.label}" if many else "The plan"
            switches = enumeration(run.switched_off)
            found.append(
                (
                    "A safety rule is switched off.",
                    f"{plan} sets {switches}: for experiments, not for deployment.",
                )
            )
    for run in runs:
        bare = run.unmasked
        if bare:
            which = f"Under {run.label}, on" if many else "On"
            found.append(
                (
                    "Unmasked updates.",
                    f"{which} average {count(bare)} of {count(run.cohort)} clients in a round sent "
                    "their updates unmasked, as the plan allows. The server sees each of these "
                    "updates, and with it which items the client rated, and how.",
                )
            )
    withheld = [run.label for run in runs if run.withholds]
    if withheld:
        whose = f"Of {enumeration(withheld)}, " if many else ""
        text = (
            f"{whose}figures without noise are left out here, since no budget paid for them. Each "
            "run's own report has them, marked; so has `tessera compare --exact`."
        )
        exact = [run.label for run in runs if not run.withholds]
        if exact:
            text += (
                f" {enumeration(exact)} {'has' if len(exact) == 1 else 'have'} no noise: exact "
                "figures about the same people, which no ε here covers."
            )
        found.append(("Charged figures only.", text[:1].upper() + text[1:]))
    waiting = [run.label for run in runs if not run.finished]
    if waiting:
        which = f"{enumeration(waiting)}: no round" if many else "No round"
        text = f"{which} has finished. Write the page again when some have."
        found.append(("Nothing to show yet.", text))
    return found


def tiles(run: RunFigures) -> Markup | None:
    """The figures of a single run that people ask for first."""
    if run.final is None:
        return None
    cells: list[tuple[str, str, str]] = []
    baseline = run.best_baseline
    against = (
        ""
        if baseline is None
        else f"{signed(run.margin_over(baseline[1]) or 0.0)} against the best baseline"
        f"{not_charged([run], 'trivial')}"
    )
    at = run.curve[-1][0]
    when = "final" if at >= run.finished else f"after round {at:g}, none later"
    cells.append((f"{run.metric}, {when}{not_charged([run])}", score(run.final), against))
    if not run.central:
        up, down = run.per_round("bytes_up"), run.per_round("bytes_down")
        cells.append(("upload per client and round", size(up), f"download {size(down)}"))
        survivors = None if run.dropouts is None else 1.0 - run.dropouts
        cells.append(("survivors", share(survivors), "clients whose updates are in the sum"))
    cells.append(protection(run))
    return tag(
        "dl",
        *(
            tag("div", tag("dt", a), tag("dd", b, tag("small", c) if c else None))
            for a, b, c in cells
        ),
        class_="tiles",
    )


def protection(run: RunFigures) -> tuple[str, str, str]:
    """The number that the plan is chosen for: an ε only where there is noise."""
    spent, privacy = run.noise_spent, run.index_privacy
    if spent is not None:
        return "ε spent", epsilon(spent[0]), spent[1]
    if run.naming_bound < 1.0:
        return "a row's holder identified", f"≤ {percent(run.naming_bound)}", CONDITIONS
    if privacy is not None and run.answers_differ:
        ever = epsilon(epsilon_longitudinal(privacy))
        meaning = f"longitudinal ε {ever}; of one row of a client, given the union"
        return "ε per round", epsilon(epsilon_per_round(privacy)), meaning
    return "test examples", count_of(run, "test_examples"), "not used in training"


def count_of(run: RunFigures, name: str) -> str:
    value = run.task.get(name)
    return count(value) if isinstance(value, int) else count(None)


# --- curves -------------------------------------------------------------------------------------


def curves(runs: Sequence[RunFigures]) -> list[Content]:
    """The learning curves with the baselines as lines, and what these are."""
    metric, scores = runs[0].metric, baselines(runs)
    drawn = [run for run in runs if run.curve]
    if not drawn:
        gone = "is not charged" if any(run.withholds for run in runs) else "has not been evaluated"
        return [tag("p", f"The {metric} {gone} in any finished round.")]

    lower = runs[0].lower_is_better
    predictors = OF_RATINGS if metric in ("RMSE", "MAE") else PREDICTORS
    known = [
        join(
            [
                tag("b", predictor(name)),
                f" ({score(value)}) {predictors.get(name, 'uses no model')}",
            ]
        )
        for name, value in scores.items()
    ]
    note = (
        "Dotted lines are baselines: predictors without a model, computed on the training part "
        f"and smoothed. A curve {'above' if lower else 'below'} them is worse than no model. "
        "Those far from the curves are only listed."
    )
    varies = any(run.baselines != runs[0].baselines for run in runs if run.baselines)
    mean = " Test parts differ by run: the lines are means over the runs." if varies else ""
    where = enumeration(list(dict.fromkeys(run.tested_on for run in runs)))
    better = ": lower is better" if lower else ""
    note = f"{metric} on {where}{not_charged(runs)}{better}. {note}"
    return [
        tag(
            "figure",
            curve_chart(runs),
            curve_chart(runs, narrow=True),
            tag("figcaption", note + mean if known else None),
        ),
        listing(known, "note") if known else tag("p", "No baseline was scored."),
    ]


def curve_chart(runs: Sequence[RunFigures], *, narrow: bool = False) -> Markup:
    """The curves alone; on a phone the names fill the margin, and the figures are in the table."""
    metric, scores = runs[0].metric, baselines(runs)

    def named(label: str, value: float) -> str:
        return label if narrow else f"{label} {score(value)}"

    return charts.lines(
        [
            charts.Series(named(run.label, run.final or 0.0), run.curve, slot)
            for run, slot in zip(runs, slots(runs), strict=True)
            if run.curve
        ],
        [
            charts.ReferenceLine(named(predictor(name), value), value)
            for name, value in near(runs, scores).items()
        ],
        name="curves-narrow" if narrow else "curves",
        title=f"{metric} on {runs[0].tested_on}, by round{not_charged(runs)}",
        description=curve_words([run for run in runs if run.curve], scores),
        x_label="rounds",
        y_label=f"{metric}{not_charged(runs)}",
        width=328.0 if narrow else 736.0,
        height=300.0 if narrow else 400.0,
        class_="narrow" if narrow else "wide",
    )


def near(runs: Sequence[RunFigures], scores: dict[str, float]) -> dict[str, float]:
    """The best baseline, and those no further from the curves than these are high.

    The axis starts where the curves are: a baseline far off would press them flat. All of them are
    listed below the chart.
    """
    values = [value for run in runs for _, value in run.curve]
    if not values or not scores:
        return scores
    choose = min if runs[0].lower_is_better else max
    best = choose(scores, key=scores.__getitem__)
    room = max(values) - min(values)
    return {
        name: value
        for name, value in scores.items()
        if name == best or min(values) - room <= value <= max(values) + room
    }


def curve_words(runs: Sequence[RunFigures], scores: dict[str, float]) -> str:
    """The chart for those who do not see it."""
    ends = (
        f"{run.label} goes from {score(run.curve[0][1])} in round {run.curve[0][0]:.0f} to "
        f"{score(run.curve[-1][1])} in round {run.curve[-1][0]:.0f}"
        for run in runs
    )
    lines = (f"{predictor(name)} is at {score(value)}" for name, value in scores.items())
    return ". ".join((*ends, *lines)) + "."
