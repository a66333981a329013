"""NamingForecast: how likely a row's holder is named after k rounds, as a bound and an estimate.

The bound B follows from what the plan forces and holds for any attack; the estimate is the rate of
one, simulated. The audit measures the same rate on a recorded run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from tessera.privacy.bound import Promise, in_words
from tessera.privacy.naming import Rates
from tessera.privacy.naming_simulation import Setting, simulate

MOST_ROWS: Final = 400
"""Rows that are simulated; a rate then has a standard error of 2.5 points at most."""
FEW_ROWS: Final = 100
"""The same where rows have many holders, or clients and rounds are many."""
WORK: Final = 40_000_000
"""Rows times clients times rounds that are simulated at most, down to a few rows."""
CURIOUS: Final = 1
"""Clients of a group that look on, beside the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamingForecast:
    """One setting with nobody dropping out, and the same with late dropouts."""

    setting: Setting
    promise: Promise
    sampled: int
    estimate: Rates
    with_dropout: Rates | None
    dropout: float

    @classmethod
    def of(
        cls, setting: Setting, promise: Promise, *, dropout: float = 0.0, rows: int = 0
    ) -> NamingForecast:
        """`setting` has no dropouts; clients of `promise` that are corrupt hide nobody."""
        if setting.group:
            setting = replace(setting, group=max(1, promise.alike()))
        rows = rows or MOST_ROWS
        many = max(count for count, _ in setting.holders.by_row) > 3
        most = FEW_ROWS if many else WORK // (setting.clients * setting.rounds)
        sampled = min(rows, max(FEW_ROWS, most))
        with_dropout = None
        if dropout:
            with_dropout = simulate(replace(setting, dropout=dropout), rows=sampled)
        return cls(
            setting=setting,
            promise=promise,
            sampled=sampled,
            estimate=simulate(setting, rows=sampled),
            with_dropout=with_dropout,
            dropout=dropout,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; bounds are of a row with one holder, and averaged over (row, holder)."""
        setting, promise, holders = self.setting, self.promise, self.setting.looked_for
        late = self.with_dropout
        return {
            "bound": {
                "server": promise.bound(),
                "one_client": promise.bound(curious_clients=CURIOUS),
            },
            "bound_by_corrupt": {str(c): each for c, each in promise.with_corrupt().items()},
            "bound_in_words": in_words(promise.bound()),
            "bound_mean": {
                "server": promise.mean(holders),
                "one_client": promise.mean(holders, curious_clients=CURIOUS),
            },
            "estimate": rates_json(self.estimate),
            "with_dropout": None if late is None else rates_json(late),
            "settings": {
                "rounds": setting.rounds,
                "rounds_per_client": setting.rounds * min(1.0, setting.cohort / setting.clients),
                "cohort": setting.cohort,
                "population": setting.population or setting.cohort,
                "period_rounds": setting.period_rounds or setting.rounds,
                "group": promise.group,
                "corrupt": promise.corrupt,
                "dropout": self.dropout,
                "holders": {str(count): share for count, share in holders.by_row},
                "rows_sampled": self.sampled,
            },
        }


def rates_json(rates: Rates) -> dict[str, float | None]:
    """Shares of all (row, holder) pairs, but for the last two."""
    return {
        "best_guess": rates.best_guess,
        "named": rates.named_share,
        "right_among_named": rates.named_precision if rates.named else None,
        "most_confident": rates.most_confident,
    }
