"""What `tessera run` says at the end: the figures of a run, for machines and for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tessera.errors import RoundAborted
from tessera.ids import RoundId
from tessera.plan import Plan
from tessera.report.figures import RunFigures, abort_reasons, in_rounds, waited
from tessera.report.numbers import count, epsilon, predictor, score, seconds, share, size
from tessera.report.terminal import Page
from tessera.rounds import schemes
from tessera.rounds.events import NOT_CHARGED, RoundAbort, marked
from tessera.rounds.noise import noise_of
from tessera.runs.folder import VIEWS, RunFolder

FEW: Final = 5
"""Points of a curve below which nothing is said of where it goes."""
DAGGER: Final = "†"
SYNTHETIC: Final = "rows and updates are synthetic: nothing is learnt, costs and privacy are real"


# --- the facts ------------------------------------------------------------------------------------


def round_figures(log: RunFolder) -> dict[str, Any]:
    """Means and totals over a folder's finished rounds, and why others were aborted.

    Bytes and times are of the rounds that measured them.
    """
    rounds = list(log.rounds())
    measured = [r for r in rounds if r["measured"]]

    def average(name: str) -> float:
        found = [float(r[name]) for r in rounds if r[name] is not None]
        return sum(found) / len(found) if found else 0.0

    def means(name: str, over: list[dict[str, Any]]) -> dict[str, float]:
        kinds = list(dict.fromkeys(kind for r in over for kind in r[name]))
        return {kind: sum(r[name].get(kind, 0.0) for r in over) / len(over) for kind in kinds}

    averaged = ("survivors", "union_rows", "rows_opened", "rows_below_quorum", "rows_shrunk")
    between = [float(r["bytes_between"] or 0.0) for r in measured]
    return {
        **{name: average(name) for name in (*averaged, "rows_lost")},
        "rows_out_of_bounds": average("rows_out_of_bounds"),
        "not_finite": sum(r["not_finite"] for r in rounds),
        **in_rounds(rounds),
        **waited(rounds),
        "why_given_up": abort_reasons(log.events()),
        "clipped": average("clipped"),
        "rows_left_home": average("rows_over_cap"),
        "rows_exposed": sum(r.get("rows_exposed", 0) for r in rounds),
        "bytes_up": means("bytes_up", measured),
        "bytes_down": means("bytes_down", measured),
        "client_seconds": means("client_seconds", measured),
        "server_seconds": means("server_seconds", measured or rounds),
        "helper_seconds": means("helper_seconds", measured),
        "bytes_between": sum(between) / len(between) if between else 0.0,
        "writing": next((dict(r["writing"]) for r in reversed(measured)), {}),
    }


def summary(folder: Path) -> dict[str, Any]:
    """A training as one object for machines; means are over the rounds that measured them."""
    log = RunFolder.load(folder)
    log.check_described()
    facts, rounds = log.facts, list(log.rounds())
    curve = [[r["round_id"] + 1, r["metric"]] for r in rounds if r["metric"] is not None]
    best = min if log.fact("lower_is_better") else max
    last = rounds[-1] if rounds else {"condition": "", "noise_epsilon": None, "noise_scope": ""}
    found = {
        "folder": str(folder),
        "scheme": facts["scheme"],
        "task": facts["task"],
        "metric": facts["metric"],
        "final": curve[-1][1] if curve else None,
        "best": best((value for _, value in curve), default=None),
        "curve": curve,
        "mixture": facts.get("mixture"),
        "trivial": facts["trivial"],
        "learner": facts["learner"],
        "entropy": facts["entropy"],
        "crypto": facts["crypto"],
        "cohort": log.plan.cohort,
        "rounds": len(rounds),
        "measured_rounds": sum(bool(r["measured"]) for r in rounds),
        **round_figures(log),
        "naming_bound": log.plan.promise.bound(),
        "bound_in_words": log.plan.promise.in_words(),
        "epsilon": highest_epsilon(rounds) if RunFigures.load(folder).answers_differ else None,
        "condition": last["condition"],
        "noise_epsilon": last["noise_epsilon"],
        "noise_scope": last["noise_scope"],
        "groups_not_finite": sum(r["groups_not_finite"] for r in rounds),
        "ended": next((e["reason"] for e in log.events() if e["event"] == "TrainingEnded"), ""),
        "seconds": sum(r["seconds"] or 0.0 for r in rounds),
        "still_improving": not noise_of(log.plan).follows_from_rounds  # more rounds are another run
        and still_improving(curve, lower=bool(facts["lower_is_better"])),
    }
    return marked(log.plan, found)


def synthetic_summary(
    log: RunFolder, *, clients: int, rows: int, views: str, seconds: float
) -> dict[str, Any]:
    """A run over synthetic clients as one object for machines; `views`: whose were recorded."""
    plan, rounds = log.plan, list(log.rounds())
    found = round_figures(log)
    aborted = sum(found["why_given_up"].values())
    over = sum(max(0, min(rows, table.rows) - plan.union.max_rows) for table in plan.roots)
    residual = sum(float(r["union_residual"]) for r in rounds)
    return {
        "folder": str(log.folder),
        "scheme": plan.scheme.value,
        "data": "made up",
        "note": SYNTHETIC,
        "clients": clients,
        "rows_per_client": rows,
        "rows_left_out": schemes.of(plan).rows.left_out(over),
        "cohort": plan.cohort,
        "rounds": len(rounds) + aborted,
        "finished": len(rounds),
        "given_up": aborted,
        **found,
        "union_residual": residual / len(rounds) if rounds else 0.0,
        "epsilon": rounds[-1]["epsilon"] if rounds else 0.0,
        "condition": rounds[-1]["condition"] if rounds else "",
        "seconds": seconds,
        "views": str(log.folder / VIEWS) if views else None,
    }


def still_improving(curve: Sequence[Sequence[float]], *, lower: bool) -> bool:
    """Whether the last fifth of a curve gained a tenth of all that was gained, and more than noise.

    What counts is the best value before and in the last fifth: a curve that shakes does not rise.
    """
    if len(curve) < FEW:
        return False
    values = [-value if lower else value for _, value in curve]
    late = max(1, len(values) // 5)
    before, whole = max(values[:-late]), max(values) - values[0]
    steps = sorted(abs(b - a) for a, b in pairwise(values[len(values) // 2 :]))
    return max(values[-late:]) - before > max(whole / 10, steps[len(steps) // 2] / 4)


def highest_epsilon(rounds: list[dict[str, Any]]) -> float | str | None:
    """The highest epsilon that any client has spent on its answers."""
    spent = [r["epsilon"] for r in rounds if r["epsilon"] is not None]
    return "inf" if "inf" in spent else max(spent, default=None)


# --- for people -----------------------------------------------------------------------------------


def show(facts: Mapping[str, Any], report: Path, page: Page) -> None:
    """The outcome of a training."""
    each = f", {facts['cohort']} of {facts['task']['clients']:,} clients in each"
    if not schemes.named(facts["scheme"]).federated:
        each = " over all data in one place"
    page.say(f"on {facts['task']['title']}: {facts['rounds']} rounds{each}.", lead=facts["scheme"])
    page.figures(lines(facts))
    if NOT_CHARGED in facts:
        page.say(f"{DAGGER} {NOT_CHARGED}")
    if facts["naming_bound"] < 1.0:
        page.say(f"Over all rounds {facts['bound_in_words']}.")
    show_writing(facts, page)
    if facts["entropy"] != "system":
        page.say("Insecure test entropy: every secret of this run is known.", style="red")
    if facts["still_improving"]:
        total = 2 * facts["rounds"]
        again = f"tessera run {shlex.quote(facts['folder'])} --resume --rounds {total}"
        page.line(f"The {facts['metric']} is still improving; `{again}` goes on.")
    page.line(f"Report: {report}")


def show_writing(facts: Mapping[str, Any], page: Page) -> None:
    """How tables were written between two servers."""
    for name, reason in facts["writing"].items():
        page.say(f"{name}: written by {reason}", style="dim")


def lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is shown of them; exact figures that a budget should have paid for with a dagger."""
    exact = facts.get(NOT_CHARGED, "").split(", ")
    for names, caption, value in figures(facts):
        yield f"{caption}{f' {DAGGER}' if any(name in exact for name in names) else ''}", value


def figures(facts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    entry = schemes.named(facts["scheme"])
    if facts["final"] is not None:
        at = facts["curve"][-1][0]  # a later test had no figure: the model was not finite any more
        when = "" if at >= facts["rounds"] else f", after round {at}: none later"
        yield ("final",), f"{facts['metric']}{when}", score(facts["final"])
    if (two := facts.get("mixture")) is not None:
        name = "+".join(two["names"])
        if two["test"]:
            yield ("final",), f"{facts['metric']} of {name}", score(two["test"][name]["NDCG@10"])
        yield ("final",), f"  weight of {two['names'][1]}, of 1", f"{two['weight']:g}"
    for name, value in facts["trivial"].items():
        yield ("trivial",), f"  baseline: {predictor(name)}", score(value)
    if entry.randomises:
        yield ("union_rows",), "rows in the union", count(facts["union_rows"])
        yield (
            ("rows_below_quorum",),
            "  below the quorum, not updated",
            count(facts["rows_below_quorum"]),
        )
    for caption, value in waiting_lines(facts):
        yield ("counted", "waited"), caption, value
    if entry.two_servers:
        yield ("rows_opened",), "rows written by any client, opened", count(facts["rows_opened"])
    if facts["rows_out_of_bounds"]:
        yield (
            ("rows_out_of_bounds",),
            "  opened, not merged: out of bounds",
            count(facts["rows_out_of_bounds"]),
        )
    if facts["rows_exposed"]:
        why = "of clients missing in a round of their keys"
        yield ("rows_exposed",), f"  rows exposed ({why})", count(facts["rows_exposed"])
    if facts["rows_left_home"]:
        why = "max_rows, union, bins" if entry.two_servers else "max_rows"
        yield ("rows_left_home",), f"  rows over the cap ({why})", count(facts["rows_left_home"])
    if facts["measured_rounds"]:
        for way in ("up", "down"):
            sent = size(sum(facts[f"bytes_{way}"].values()))
            yield (f"bytes_{way}",), f"bytes {way}, per client and round", sent
        spent = dict(facts["client_seconds"])
        training = spent.pop("train", 0.0)
        yield ("client_seconds",), "CPU per round, one client", seconds(sum(spent.values()))
        yield ("client_seconds",), "  and its training", seconds(training)
        server = seconds(sum(facts["server_seconds"].values()))
        yield ("server_seconds",), "CPU per round, the server", server
        if entry.two_servers:
            helper = seconds(sum(facts["helper_seconds"].values()))
            yield ("helper_seconds",), "CPU per round, the helper", helper
            between = size(facts["bytes_between"])
            yield ("bytes_between",), "bytes between servers, per client", between
    if facts["epsilon"] is not None:
        about = f"epsilon spent, per index, {facts['condition']}"
        yield ("epsilon",), about, epsilon(facts["epsilon"])
    if facts["noise_epsilon"] is not None:
        about = f"epsilon spent, {facts['noise_scope']}"
        yield ("noise_epsilon",), about, epsilon(facts["noise_epsilon"])
    if facts["groups_not_finite"]:
        left = count(facts["groups_not_finite"])
        yield ("groups_not_finite",), "  left out, a gradient not finite", left
    if facts["ended"]:
        yield ("ended",), "ended early", facts["ended"]
    if facts["crypto"]["mode"] != "every" and entry.federated:
        real = f"{facts['measured_rounds']} of {facts['rounds']}"
        yield ("measured_rounds",), "rounds with real messages", real
    for caption, value in fault_lines(facts):
        yield ("excluded",), caption, value
    yield ("seconds",), "time", seconds(facts["seconds"])


def waiting_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What came of the invitations of groups that wait."""
    if not facts["groups_opened"]:
        return
    yield "invitations that counted", share(facts["counted"])
    waits = facts["waited"]
    yield "rounds that a sum waited: mean, 95%", f"{waits['mean']:.1f}, {waits['p95']:g}"
    if facts["groups_retired"]:
        yield "groups retired", count(facts["groups_retired"])


def show_synthetic(plan: Plan, facts: Mapping[str, Any], views: str, page: Page) -> None:
    """The outcome of a run over synthetic clients."""
    page.say(
        f"{facts['finished']} of {facts['rounds']} rounds finished, {facts['cohort']} of "
        f"{facts['clients']} clients in each; {SYNTHETIC}.",
        lead=f"{facts['scheme']},",
    )
    page.figures(synthetic_lines(plan, facts))
    show_writing(facts, page)
    if facts["rows_left_out"]:
        page.say(
            f"{facts['rows_left_out']} rows of each client are over the cap and were left out: "
            f"max_rows = {plan.union.max_rows}."
        )
    also = f", views of {views}, true rows" if views else ""
    page.line(f"Written to {facts['folder']}: plan, events, rounds{also}.")
    if views:
        who = schemes.of(plan).sum.servers
        page.line(f"`tessera audit {facts['folder']}` attacks what {who} saw.")


def synthetic_lines(plan: Plan, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not facts["finished"]:
        return
    entry = schemes.of(plan)
    yield "survivors", count(facts["survivors"])
    yield from waiting_lines(facts)
    if entry.randomises:
        yield entry.rows.union_rows, count(facts["union_rows"])
        yield f"  {entry.rows.opened_rows}", count(facts["rows_opened"])
        yield "  below the quorum, not updated", count(facts["rows_below_quorum"])
        yield "  below it after dropouts", count(facts["rows_shrunk"])
        if plan.privacy.strict_quorum:
            yield "  and therefore not opened", count(facts["rows_lost"])
    for way in ("up", "down"):
        by_kind = facts[f"bytes_{way}"]
        yield f"bytes {way}, per client", size(sum(by_kind.values()))
        for kind, amount in sorted(by_kind.items(), key=lambda item: -item[1])[:3]:
            if amount:
                yield f"  {kind}", size(amount)
    yield "CPU per round, one client", seconds(sum(facts["client_seconds"].values()))
    yield "CPU per round, the server", seconds(sum(facts["server_seconds"].values()))
    if entry.two_servers:
        yield "CPU per round, the helper", seconds(sum(facts["helper_seconds"].values()))
        yield "bytes between servers, per client", size(facts["bytes_between"])
        yield "rows written by any client, opened", count(facts["rows_opened"])
    if entry.randomises:
        yield f"epsilon spent, per index, {facts['condition']}", epsilon(facts["epsilon"])
    yield from fault_lines(facts)


def aborted_error(last: RoundAbort) -> RoundAborted:
    """The error of a run in which every round was aborted."""
    return RoundAborted(
        round_id=RoundId(last.round_id),
        phase=last.phase,
        answered=last.answered,
        needed=last.needed,
    )


def fault_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, how many) of all that went wrong, for a terminal."""
    for caption, many, reasons in (
        ("clients not in a sum, in all", sum(facts["excluded"].values()), facts["excluded"]),
        ("clients that sent zeros, in all", facts["not_finite"], facts["broken"]),
        ("rounds aborted", sum(facts["why_given_up"].values()), facts["why_given_up"]),
    ):
        if many:
            yield caption, f"{many:,}"
            yield from ((f"  {why}", f"{count:,}") for why, count in reasons.items())
