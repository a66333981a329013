"""How likely a plan lets a holder be identified: the setting in which that is estimated."""

from __future__ import annotations

from typing import Final

from tessera.plan import Plan
from tessera.privacy.index.exposure import Holders
from tessera.privacy.index.identification_forecast import MOST_ROWS, IdentificationForecast, Setting
from tessera.privacy.index.response import LEVELS, IndexPrivacy
from tessera.rounds import schemes
from tessera.rounds.forecast.forecast import Forecast
from tessera.rounds.forecast.rows import even_holders

MOST_ROUNDS: Final = 200
"""Rounds of a federation that are simulated; after so many hardly anything is left to learn."""
LEAST_SHARE: Final = 1e-3
"""Numbers of holders that fewer rows have are left out of the simulation."""


def answers(plan: Plan) -> IndexPrivacy:
    """Where a scheme asks for no answers, a client's trace is that of one who names every row."""
    if schemes.of(plan).randomises:
        return plan.privacy.index
    return LEVELS["cpp5"]


def identification_forecast(
    forecast: Forecast, *, rounds: int, population: int = 0
) -> IdentificationForecast:
    """For the first table whose rows a client chooses, after `rounds` rounds of each client.

    Where clients meet in fixed groups it is about one of them, as the forecast is.
    """
    plan = forecast.plan
    clients = plan.cohort if plan.grouped else max(population, plan.cohort)
    table = plan.roots[0]
    held = min(forecast.rows_per_client, table.rows)
    randomised = schemes.of(plan).randomises
    setting = Setting(
        privacy=answers(plan),
        cohort=plan.cohort,
        population=clients,
        rounds=min(MOST_ROUNDS, max(1, round(rounds * clients / plan.cohort))),
        holders=forecast.given_holders or _common(even_holders(table.rows, clients, held)),
        period_rounds=plan.privacy.period_rounds if randomised else 0,
        perturbation=plan.privacy.perturbation if randomised else None,
        min_group=plan.quorum,
        group=plan.promise.group,
    )
    return IdentificationForecast.of(
        setting, plan.promise, dropout=forecast.dropout, rows=MOST_ROWS // 2
    )


def _common(holders: Holders) -> Holders:
    shares = {count: share for count, share in holders.by_row if share >= LEAST_SHARE}
    total = sum(shares.values())
    return Holders.of({count: share / total for count, share in shares.items()})
