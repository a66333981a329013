"""`tessera init TASK --dp EPSILON`: the plan with noise per user that the forecast finds best.

Candidates differ in who adds the noise, in how often and with how many clients there are rounds,
and in whether noise is correlated over them; `rounds/forecast/utility.py` says what each leaves of
the model. A trusted server is not among them, unless the scheme asks for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tessera.cli.utility import utility_of
from tessera.errors import ConfigError
from tessera.plan import CohortsPlan, DPPlan, NoisyRows, Plan, TaskPlan, Trust
from tessera.plan.places import in_a_pass, rounds_of_a_pass
from tessera.plan.sections import DrawnBy
from tessera.privacy.dp.guarantee import Unit
from tessera.report.numbers import plural
from tessera.rounds import schemes
from tessera.rounds.forecast.utility import UtilityForecast
from tessera.rounds.schemes import SchemeEntry
from tessera.runs.held import HeldRows
from tessera.runs.training import complete
from tessera.tasks import Task
from tessera.tasks.task import PrivateSettings

DELTA: Final = 1e-5
ROUNDS: Final = (1, 2, 3, 5)
"""That everybody may be in; with a schedule it is one pass, which is what was measured."""


def trust_of(entry: SchemeEntry) -> Trust | None:
    """Who adds noise on sums under a scheme; None where rows are chosen by their holders."""
    if entry.two_servers:
        return Trust.EACH
    if not entry.federated or entry.by_rows:
        return None
    return Trust.SHARES if entry.masks else Trust.SERVER


NOISY: Final = {each.name: each for each in schemes.SCHEMES.values() if trust_of(each) is not None}


@dataclass(frozen=True, slots=True)
class NoisyChoice:
    """A plan, and what is expected of it."""

    plan: Plan
    forecast: UtilityForecast

    def in_words(self) -> str:
        plan, dp = self.plan, self.plan.dp
        assert dp is not None
        how = f"{plural(plan.simulation.rounds, 'round')} of {plan.cohort:,}"
        how += " by a schedule" if plan.cohorts.scheduled else " with everybody"
        mixed = ", correlated over rounds" if dp.correlated else ""
        return f"{plan.scheme.value}, {how}, noise of {dp.trust.value}{mixed}"


def best_plan(
    task: Task, private: PrivateSettings, epsilon: float, scheme: str, at_once: int
) -> NoisyChoice:
    """The candidate with the least expected error."""
    found: list[NoisyChoice] = []
    why = ""
    for plan in candidates(task, private, epsilon, scheme, at_once):
        try:
            whole = complete(plan, task)
            said = utility_of(
                whole,
                users=task.data.clients,
                rows=max((table.rows for table in whole.roots), default=0),
                held=HeldRows.of(task, whole).mean,
            )
        except ConfigError as error:  # such a plan is refused: another may not be
            why = str(error)
            continue
        if said is not None:
            found.append(NoisyChoice(plan, said))
    if not found:
        raise ConfigError(
            f"--dp {epsilon:g}: no plan for task {task.name!r}{f' ({why})' if why else ''}",
            hint="--dp user writes one to begin with",
        )
    return min(found, key=lambda each: each.forecast.error)


def candidates(
    task: Task, private: PrivateSettings, epsilon: float, scheme: str, at_once: int
) -> Iterator[Plan]:
    clients = task.data.clients
    if scheme and scheme not in NOISY:
        raise ConfigError(
            f"--dp {epsilon:g} with --scheme {scheme}, for which no noise is forecast",
            hint=f"one of {', '.join(NOISY)}, or --dp user",
        )
    chosen = [NOISY[scheme]] if scheme else [each for each in NOISY.values() if each.hides]
    for each in chosen:
        trust = trust_of(each)
        assert trust is not None
        dp = DPPlan(
            unit=Unit.USER,
            epsilon=epsilon,
            delta=min(DELTA, 0.1 / clients),
            trust=trust,
            clip=private.clip,
            rows=NoisyRows.SELECTED,
            selection=private.selection,
            threshold=private.threshold,
        )
        base = Plan(
            scheme=each.scheme,
            cohort=min(at_once, clients),
            task=TaskPlan(name=task.name, options={}),
            training=private.training,
            server=private.server,
            dp=dp,
        )
        if clients <= at_once:
            for rounds in ROUNDS:
                yield base.with_simulation(rounds=rounds)
            continue
        once = rounds_of_a_pass(clients, at_once)
        base = replace(base, cohort=-(-clients // once))  # rounds of a pass are equally full
        step = in_a_pass(private.server, clients, base.cohort)
        places = CohortsPlan(drawn=DrawnBy.SCHEDULE)
        plan = replace(base, cohorts=places, server=step).with_simulation(rounds=once)
        yield plan
        if dp.trust in (Trust.SERVER, Trust.EACH):
            yield replace(plan, dp=replace(dp, correlated=True))
