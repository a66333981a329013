"""A privacy statement: one page to sign, whose figures are the ledger's, the plan's or an audit's.

Nothing on it is typed by hand. Every figure is a `Quoted`, which knows its value and where it was
read; a test parses the numbers of a written page and looks each of them up. What is promised comes
from the plan (`noise_of`, `Plan.promise`), what it has cost from the ledger, and what was attacked
from audit.json in the folder of a run. How the page looks is in `statement_page.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tessera.plan import Plan
from tessera.privacy.dp.guarantee import OF_THE_ANSWERS, Guarantee, Observer, Unit, json_number
from tessera.privacy.dp.mechanism import NoAccount
from tessera.privacy.index import exposure, known_rows
from tessera.privacy.index.bound import BETWEEN_PERIODS, CONDITIONS
from tessera.report.numbers import enumeration, epsilon, in_unit, percent, share
from tessera.rounds import schemes
from tessera.rounds.noise import noise_of, paper_notes

# --- figures and lines ----------------------------------------------------------------------------

PLAN: Final = "plan"
LEDGER: Final = "ledger"
RUN: Final = "run"
AUDIT: Final = "audit"
MEASURED: Final = "measured for this model elsewhere"
"""Where figures are from."""
NUMBER: Final = re.compile(r"(?<![\w@.\-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?%?(?![\w\-])")
"""A figure in a text; digits that are part of a name (cpp5, NDCG@10) are none."""


@dataclass(frozen=True, slots=True)
class Quoted:
    """A figure as it is written, its value, and where it was read."""

    text: str
    value: float | str
    source: str
    what: str

    def __str__(self) -> str:
        return self.text


Words = tuple[str | Quoted, ...]


def words(*parts: str | Quoted | Words) -> Words:
    """One text of several."""
    return tuple(
        each for part in parts for each in (part if isinstance(part, tuple) else (part,)) if each
    )


def quoted(text: str, source: str, what: str) -> Words:
    """A sentence of the library's own: each number in it is a figure from there."""
    found: list[str | Quoted] = []
    at = 0
    for match in NUMBER.finditer(text):
        shown = match.group()
        plain = shown.rstrip("%").replace(",", "")
        found += [text[at : match.start()], Quoted(shown, float(plain), source, what)]
        at = match.end()
    return words(*found, text[at:])


def text_of(parts: Iterable[str | Quoted]) -> str:
    return "".join(map(str, parts))


@dataclass(frozen=True, slots=True)
class StatementLine:
    """One row of the page; a list where there are `points`."""

    label: str
    text: Words = ()
    points: tuple[Words, ...] = ()


@dataclass(frozen=True, slots=True)
class AttackLine:
    """An attack that was tried, with figures as the audit has them."""

    name: Words
    measured: Words
    claimed: Words
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a statement is of: a plan, a run of it, or a federation that is deployed."""

    name: str
    kind: str  # "plan", "run" or "federation"
    plan: Plan
    version: str
    rounds: int | None = None
    """Charged so far: finished and aborted; None: none yet, or not known."""
    people: int = 0
    """0: not known."""
    setup: bool = False
    """Whether its task sums up something before the first round."""
    test_entropy: bool = False
    model: str = ""
    audit: Mapping[str, Any] | None = None
    exact: bool = True
    """Whether figures may be on it that no budget paid for: not outside the folder of a run."""

    @property
    def planned(self) -> int:
        """Rounds that the number is for: the plan's, or those that there were."""
        return max(self.plan.simulation.rounds, self.rounds or 0)

    @property
    def findings(self) -> list[Mapping[str, Any]]:
        """Of the audit, as far as they may be on this page.

        Canaries are trained anew, and nobody's data are looked at for them. All else is counted
        against the truth of a simulation, which no budget has paid for.
        """
        found = [] if self.audit is None else list(self.audit["attacks"])
        if self.exact or self.plan.dp is None:
            return found
        return [each for each in found if each["unit"] == "epsilon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The page, before it is laid out."""

    title: str
    about: Words
    headline: Words
    under: Words
    warnings: tuple[Words, ...]
    lines: tuple[StatementLine, ...]
    attacks: tuple[AttackLine, ...]
    attacked: Words
    left_out: tuple[Words, ...] = field(repr=False)

    def texts(self) -> Iterator[Words]:
        yield from (self.about, self.headline, self.under, *self.warnings, self.attacked)
        for line in self.lines:
            yield from (line.text, *line.points)
        for attack in self.attacks:
            yield from (attack.name, attack.measured, attack.claimed)
        yield from self.left_out

    @property
    def figures(self) -> list[Quoted]:
        """Every figure on the page, once."""
        found = (each for text in self.texts() for each in text if isinstance(each, Quoted))
        return list(dict.fromkeys(found))

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "about": text_of(self.about),
            "headline": text_of(self.headline),
            "under": text_of(self.under),
            "warnings": [text_of(each) for each in self.warnings],
            "lines": {
                line.label: [text_of(each) for each in line.points] or text_of(line.text)
                for line in self.lines
            },
            "attacked": text_of(self.attacked),
            "attacks": [
                {
                    "name": text_of(each.name),
                    "measured": text_of(each.measured),
                    "claimed": text_of(each.claimed),
                    "verdict": each.verdict,
                }
                for each in self.attacks
            ],
            "not_covered": [text_of(each) for each in self.left_out],
            "figures": [
                {"text": f.text, "value": f.value, "source": f.source, "what": f.what}
                for f in self.figures
            ],
        }


def statement_of(subject: Subject) -> Statement:
    """The statement of a plan, a run or a federation."""
    promise = Noisy(subject) if subject.plan.dp is not None else Exact(subject)
    shown = schemes.of(subject.plan)
    attacks, attacked = attacks_of(subject)
    return Statement(
        title=subject.plan.federation,
        about=about(subject),
        headline=promise.headline(),
        under=promise.under(),
        warnings=tuple(warnings(subject)),
        lines=(
            StatementLine("Scheme", words(f"{shown.description.rstrip('.')} ({shown.name}).")),
            *promise.lines(),
        ),
        attacks=tuple(attacks),
        attacked=attacked,
        left_out=tuple(
            words(text) for text, applies in (*promise.left_out, *NOT_COVERED) if applies(subject)
        ),
    )


def about(subject: Subject) -> Words:
    """What it is of, in one line."""
    plan = subject.plan
    rounds = Quoted(f"{plan.simulation.rounds:,}", plan.simulation.rounds, PLAN, "rounds")
    where = words(f"{subject.kind}, ", rounds, " rounds planned")
    if subject.rounds is not None:
        done = Quoted(f"{subject.rounds:,}", subject.rounds, RUN, "rounds charged")
        where = words(f"{subject.kind} after ", done, " of ", rounds, " rounds")
    task = f", task {plan.task.name}" if plan.task.name else ""
    if subject.people:
        people = Quoted(f"{subject.people:,}", subject.people, RUN, "clients there are")
        where = words(where, ", ", people, " clients")
    return words(where, f"{task}, plan {plan.digest.hex()[:12]}, tessera {subject.version}")


def warnings(subject: Subject) -> Iterator[Words]:
    if subject.test_entropy:
        yield words("Insecure test entropy: every secret of this run is known. Do not sign.")
    plan, noise = subject.plan, noise_of(subject.plan)
    if plan.dp is not None and (said := noise.warning(subject.people)):
        yield quoted(f"Do not sign: {said}.", PLAN, "delta against the number of people")
    if broken := [str(each["name"]) for each in subject.findings if each["verdict"] == "broken"]:
        more = len(broken) - NAMED
        yield words(
            f"An attack went further than the plan claims: {enumeration(broken[:NAMED])}",
            (", and ", Quoted(f"{more:,}", more, AUDIT, "more of them"), " more")
            if more > 0
            else (),
            ". Do not sign.",
        )


NAMED: Final = 2
"""Attacks that a warning names."""

# --- with noise -----------------------------------------------------------------------------------

UNITS: Final = {
    Unit.USER: "one client: all that it sends, compared with zeros in its place. That it takes "
    "part is known",
    Unit.ITEM: "one training example of one client, there or not there",
    Unit.INDEX: "one row of one client: in its examples, or taken out of all of them",
    Unit.SUBJECT: "one person, there or not there, whose records may lie with several clients",
}
NAMES: Final = {
    Observer.LEADER: "the server",
    Observer.HELPER: "the helper, which is the second server",
    Observer.CLIENTS: "other clients",
    Observer.READERS: "readers of the model",
}
BOTH: Final = "each of the two servers"


def named(observers: Sequence[Observer]) -> list[str]:
    """Two servers for which the same holds are one name."""
    servers = {Observer.LEADER, Observer.HELPER}
    if not servers <= {*observers}:
        return [NAMES[each] for each in observers]
    return [BOTH, *(NAMES[each] for each in observers if each not in servers)]


MEANING: Final = (
    "Whatever is released changes nobody's odds of knowing whether the protected unit was there by "
    "more than a factor of e to the epsilon, but for a probability of delta."
)


class Noisy:
    """What a plan with [dp] promises: an epsilon for every observer."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.noise = subject, noise_of(subject.plan)
        self.dp = self.noise.dp
        self.setting = self.noise.setting_with(setup=subject.setup)
        self.found = self._guarantees(subject.planned)

    left_out: Final = (
        (
            "How this plan was chosen. Settings, tables, a cap on rows or a best round that "
            "somebody picked by looking at these people's data are outside epsilon.",
            lambda subject: True,
        ),
        (
            "Other runs over the same people: their epsilons add up.",
            lambda subject: True,
        ),
        (
            "Exact figures of a simulation (loss, metrics in one place, attacks against the "
            "truth): they stay in the folder of the run, and no budget has paid for them.",
            lambda subject: subject.kind != "federation",
        ),
    )

    def _guarantees(self, rounds: int) -> dict[Observer, Guarantee | None]:
        """Against each observer, for a client in every round; None: there is no account."""
        ledger = self.setting.ledger(rounds)
        found: dict[Observer, Guarantee | None] = {}
        for observer in self.setting.sight.observers:
            try:
                found[observer] = ledger.guarantee(
                    unit=self.dp.unit, against=observer, delta=self.dp.delta
                )
            except NoAccount:
                found[observer] = None
        return found

    @property
    def kept(self) -> list[Guarantee]:
        """Those that are finite, which the noise is for."""
        if self.subject.test_entropy:
            return []
        return [each for each in self.found.values() if each is not None and each.finite]

    def headline(self) -> Words:
        if not self.kept:
            return words("No finite epsilon")
        worst = max(self.kept, key=lambda each: each.epsilon)
        return words(
            "epsilon ",
            self._epsilon(worst),
            " at delta ",
            self._delta(),
            f", per {self.dp.unit.value}",
        )

    def under(self) -> Words:
        if not self.kept:
            why = self.noise.paper_facts()
            said = " ".join(f"{line}." for line in paper_notes(why))
            return quoted(said, LEDGER, "a paper's algorithm") if said else words()
        if isinstance(self.dp.epsilon, float) and self.dp.epsilon and not self.setting.printed:
            budget = Quoted(f"{self.dp.epsilon:g}", self.dp.epsilon, PLAN, "dp.epsilon")
            return words("Budget of the plan: epsilon ", budget, f". {MEANING}")
        return words(MEANING)

    def _epsilon(self, found: Guarantee) -> Quoted:
        what = f"epsilon per {found.unit.value} against {found.against.value}"
        return Quoted(epsilon(found.epsilon), json_number(found.epsilon), LEDGER, what)

    def _delta(self) -> Quoted:
        return Quoted(f"{self.dp.delta:g}", self.dp.delta, PLAN, "dp.delta")

    def lines(self) -> Iterator[StatementLine]:
        yield StatementLine("Unit", words(f"{UNITS[self.dp.unit]}."))
        against = tuple(self._against())
        alone = words(against[0], ".") if len(against) == 1 else ()
        yield StatementLine("Against whom", alone, () if alone else against)
        yield StatementLine("Who must be honest", self._honest())
        if self.subject.plan.bounds_rounds:
            yield StatementLine("Rounds of a client", self._kept_by_clients())
        yield StatementLine("Released with noise", self._released())
        yield StatementLine("Released exactly", self._exact())
        if self.subject.rounds is not None:
            yield StatementLine("Spent so far", self._spent(self.subject.rounds))

    def _against(self) -> Iterator[Words]:
        """Observers with the same number and conditions are one point."""
        alike: dict[tuple[str, str], list[Observer]] = {}
        for observer, found in self.found.items():
            if found is None or not found.finite or self.subject.test_entropy:
                alike.setdefault(("", ""), []).append(observer)
                continue
            said = ", ".join(filter(None, (found.condition, found.assumption)))
            alike.setdefault((epsilon(found.epsilon), said), []).append(observer)
        for (level, said), observers in alike.items():
            who = enumeration(named(observers))
            if not level:
                yield words(f"{who}: no number")
                continue
            one = self.found[observers[0]]
            assert one is not None
            conditions = quoted(f", {said}", LEDGER, "conditions of the guarantee") if said else ()
            yield words(f"{who}: epsilon ", self._epsilon(one), conditions)

    def _honest(self) -> Words:
        trusted = self.noise.honest
        who = "nobody but the client itself" if trusted == "nobody" else trusted
        return words(f"{who}. Noise is added by {self.noise.by}.")

    def _kept_by_clients(self) -> Words:
        """What the number supposes of everybody's rounds, and who sees to it."""
        bound = self.subject.plan.participation
        most = Quoted(f"{bound.most:,}", bound.most, PLAN, "rounds of a client")
        rounds = Quoted(f"{bound.rounds:,}", bound.rounds, PLAN, "rounds")
        parts: list[str | Quoted | Words] = ["at most ", most, " of ", rounds, " rounds"]
        if bound.most > 1 and bound.separation > 1:
            apart = Quoted(f"{bound.separation:,}", bound.separation, PLAN, "rounds apart")
            parts += [", any two at least ", apart, " apart"]
        return words(*parts, ". The client counts them itself, and refuses any other.")

    def _released(self) -> Words:
        rounds = self.subject.planned
        times = Quoted(f"{rounds:,}", rounds, PLAN, "rounds")
        clips = Quoted(
            f"{self.noise.in_the_sum:.3g}", self.noise.in_the_sum, PLAN, "noise of a sum"
        )
        parts: list[str | Quoted | Words] = [
            "the sum of every round's updates (",
            times,
            " rounds), with noise of ",
            clips,
            " clips on each number",
        ]
        if self.setting.selection:
            parts.append("; how many clients hold a row, once")
        if self.setting.setup:
            parts.append("; a sum before the first round")
        if self.setting.metrics:
            tests = Quoted(f"{self.setting.tests:,}", self.setting.tests, PLAN, "sums of tests")
            parts += ["; figures of tests, ", tests, " sums"]
        return words(*parts, ". The model follows from these alone.")

    def _exact(self) -> Words:
        exact = self.setting.sight.exact
        if not exact:
            return words("who takes part and when; nothing of what clients train or hold.")
        return words(
            f"{enumeration(list(exact))}. The number holds given these, and does not cover them."
        )

    def _spent(self, rounds: int) -> Words:
        done = Quoted(f"{rounds:,}", rounds, RUN, "rounds charged")
        now = [g for g in self._guarantees(rounds).values() if g is not None and g.finite]
        if self.subject.test_entropy or not now:
            return words("no finite epsilon, after ", done, " rounds.")
        worst = max(now, key=lambda each: each.epsilon)
        level = Quoted(epsilon(worst.epsilon), worst.epsilon, LEDGER, "epsilon spent so far")
        found: Words = (
            "epsilon ",
            level,
            " by a client in all rounds that it may be in, after ",
            done,
            " rounds",
        )
        if (lasts := self.noise.lasts) is not None:
            budget = Quoted(f"{lasts:,}", lasts, LEDGER, "rounds that the budget lasts")
            return words(found, "; the budget lasts ", budget, " rounds.")
        return words(found, ".")


# --- without noise --------------------------------------------------------------------------------


class Exact:
    """What a plan without [dp] promises: B in fixed groups, and otherwise who is not shown what."""

    left_out: Final = (
        (
            "Whoever knows one row of a member, or how many examples it has: rows of one client "
            "are linked by their values.",
            lambda subject: subject.plan.grouped,
        ),
        (
            "What a sum over few clients reveals. No noise is added: there is no epsilon of the "
            "sums, and updates are not differentially private.",
            lambda subject: True,
        ),
        (
            "The trained model. Whoever gets it may learn from it about the training data.",
            lambda subject: True,
        ),
    )

    def __init__(self, subject: Subject) -> None:
        self.subject, self.plan = subject, subject.plan
        self.entry = schemes.of(subject.plan)
        self.bound = subject.plan.promise.bound() if self.entry.federated else 1.0

    def _quote(self, value: float, what: str) -> Quoted:
        return Quoted(share(value), value, PLAN, what)

    def headline(self) -> Words:
        if not self.entry.hides:
            return words("Nothing is hidden from the server")
        return words("B = ", self._quote(self.bound, "B"))

    def under(self) -> Words:
        if not self.entry.hides:
            return words("There is no number to quote.")
        if self.bound < 1.0:
            return words(
                "How likely a row's holder is identified, at most, over any number of rounds in "
                "one group."
            )
        return words(
            "Over several rounds a row's holder can be identified. What is hidden is hidden in one "
            "round, if those are honest who must be."
        )

    def lines(self) -> Iterator[StatementLine]:
        known = self.entry.knowledge
        if self.bound < 1.0:
            periods = f", {BETWEEN_PERIODS}" if self.plan.promise.periods else ""
            yield StatementLine("Unit", words("who of a fixed group holds a row of a table."))
            yield StatementLine("If", words(f"{CONDITIONS}{periods}."))
            yield StatementLine("Against whom", points=tuple(self._against()))
        elif self.entry.hides:
            yield StatementLine(
                "Unit", words("which update, and which rows, are whose in one round.")
            )
        yield StatementLine("Who must be honest", words(known.honest))
        yield StatementLine(
            "Released exactly",
            words(
                f"the {'servers learn' if self.entry.two_servers else 'server learns'} "
                f"{known.plan}."
            ),
        )
        if self._answers():
            yield StatementLine("Answers", self._answers())
        if self.bound < 1.0:
            yield StatementLine("One known row", self._known_row())

    def _against(self) -> Iterator[Words]:
        promise = self.plan.promise
        size = Quoted(f"{promise.group:,}", promise.group, PLAN, "groups.size")
        yield words("the server: B = ", self._quote(self.bound, "B"), " in groups of ", size)
        curious = promise.bound(curious_clients=1)
        yield words("another member, alone: ", self._quote(curious, "B against a member"))
        for corrupt, value in promise.with_corrupt().items():
            if corrupt and value < 1.0:
                many = Quoted(f"{corrupt:,}", corrupt, PLAN, "members that work with the server")
                found = self._quote(value, f"B with {corrupt} corrupt members")
                yield words("the server with ", many, " members: ", found)

    def _answers(self) -> Words:
        privacy = self.plan.privacy.index
        if not self.entry.randomises or privacy.names_all:
            return ()
        once, ever = exposure.epsilon_per_round(privacy), exposure.epsilon_longitudinal(privacy)
        return words(
            f"{OF_THE_ANSWERS}: epsilon ",
            Quoted(epsilon(once), json_number(once), PLAN, "epsilon of one round's answers"),
            " in a round, ",
            Quoted(epsilon(ever), json_number(ever), PLAN, "longitudinal epsilon of the answers"),
            " over a period.",
        )

    def _known_row(self) -> Words:
        """From the audit of this very run, or the nearest that was measured."""
        for finding in self.subject.findings:
            if str(finding["name"]).startswith(KNOWN_ROW) and finding["measured"] is not None:
                value = float(finding["measured"])
                found = Quoted(share(value), value, AUDIT, str(finding["name"]))
                return words(f"measured in this run: {finding['name']}: ", found, ".")
        said = known_rows.in_words(self.plan.task.name, self.subject.model)
        return words(quoted(said, MEASURED, "the known-row figure"), ". Not of this run.")


# --- what was attacked ----------------------------------------------------------------------------

KNOWN_ROW: Final = "one known row"
MOST: Final = 8
"""Attacks on the page; what breaks a claim, and what a claim is about, come first."""
OUTCOMES: Final = {
    "broken": "that broke a claim",
    "within bound": "within what is claimed",
    "no claim": "against which nothing is claimed",
    "untested": "that could not be tried",
}
ORDER: Final = tuple(OUTCOMES)


def attacks_of(subject: Subject) -> tuple[list[AttackLine], Words]:
    """What the audit in the folder found, and a sentence about it."""
    if subject.audit is None:
        where = "in the folder" if subject.kind == "run" else "here"
        how = "`tessera audit` attacks a simulated run that has recorded what its servers saw"
        return [], words(f"No audit is {where}: nothing was attacked. {how}.")
    found = subject.findings
    parts: list[str | Quoted] = [
        Quoted(f"{len(found):,}", len(found), AUDIT, "attacks"),
        " attacks of tessera audit: ",
    ]
    for verdict in OUTCOMES:
        if many := sum(each["verdict"] == verdict for each in found):
            if len(parts) > 2:
                parts.append(", ")
            parts += [Quoted(f"{many:,}", many, AUDIT, verdict), f" {OUTCOMES[verdict]}"]
    level = [f["level"] for f in found if f.get("level")]
    parts.append(".")
    if level:
        sure = Quoted(percent(max(level)), max(level), AUDIT, "confidence level")
        parts += [" In brackets: confidence intervals, the widest at ", sure, "."]
    if len(found) < len(subject.audit["attacks"]):
        parts.append(
            " Attacks against the truth of a simulation are exact, outside epsilon, and not on a "
            "page that leaves the folder of the run."
        )
    shown = sorted(found, key=_rank)[:MOST]
    if len(shown) < len(found):
        rest = len(found) - len(shown)
        parts += [" ", Quoted(f"{rest:,}", rest, AUDIT, "attacks not listed"), " are not listed."]
    return [_attack(each) for each in shown], words(*parts)


def _rank(finding: Mapping[str, Any]) -> tuple[int, bool]:
    """Broken claims first; then one known row, and the canaries before other attacks."""
    if str(finding["name"]).startswith(KNOWN_ROW):
        return 1, False
    return ORDER.index(finding["verdict"]), finding["unit"] != "epsilon"


def _attack(finding: Mapping[str, Any]) -> AttackLine:
    name, unit = str(finding["name"]), str(finding["unit"])
    called = quoted(name, AUDIT, "an attack's name")

    def figure(key: str) -> Quoted:
        value = finding[key]
        number = float(value)
        return Quoted(in_unit(number, unit), json_number(number), AUDIT, f"{name}: {key}")

    claimed = words("nothing") if finding["claimed"] in (None, "inf") else words(figure("claimed"))
    if finding["verdict"] == "no claim":
        claimed = words("nothing")
    if finding["verdict"] == "untested" or finding["measured"] is None:
        return AttackLine(called, words("-"), claimed, finding["verdict"])
    measured = words(figure("measured"), " (", figure("low"), " to ", figure("high"), ")")
    return AttackLine(called, measured, claimed, finding["verdict"])


# --- what is not covered --------------------------------------------------------------------------

NOT_COVERED: Final[Sequence[tuple[str, Callable[[Subject], bool]]]] = (
    (
        "Two servers that collude: nothing technical prevents it.",
        lambda subject: schemes.of(subject.plan).two_servers,
    ),
    (
        "The server itself: it sees each client's update, and has to be trusted with it.",
        lambda subject: not schemes.of(subject.plan).hides and subject.plan.dp is not None,
    ),
    (
        "Presence, timing and sizes of messages: who took part, and when.",
        lambda subject: schemes.of(subject.plan).federated,
    ),
    (
        "Correct results: a client can send anything within its bounds.",
        lambda subject: schemes.of(subject.plan).hides,
    ),
    (
        "The software: research code, tested against vectors and by attack, without external "
        "review.",
        lambda subject: True,
    ),
)
