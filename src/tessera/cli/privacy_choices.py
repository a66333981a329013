"""The same budget per user by who adds the noise: noise in a sum, bytes, and who must be honest.

Which rows will be learnt is said by what a row needs: a sum rises over its noise where enough
clients of a round hold the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.table import Table

from tessera.errors import ConfigError
from tessera.plan import (
    DPPlan,
    NoisyRows,
    Plan,
    Scheme,
    SecurityPlan,
    TablePlan,
    Trust,
    TwoServerPlan,
    Unit,
    UpdatePlan,
)
from tessera.protocols.secagg.params import GraphKind, fewest_members
from tessera.report.numbers import rounded, share, size
from tessera.report.terminal import table
from tessera.rounds import schemes
from tessera.rounds.forecast import Forecast
from tessera.rounds.noise import noise_of

COMPLETE: Final = 1_000
"""Clients of a secure sum up to which all mask with all."""
FEWER: Final = (1.0, 0.5, 0.0)
"""Of the clients that may be missing: what a higher threshold is compared by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """One budget, and a federation to spend it in.

    `noise` is what the budget takes in full; `drawn_noise` what it takes where a trusted server
    draws cohorts in secret, and tells neither clients nor readers.
    """

    noise: float
    drawn_noise: float
    delta: float
    cohort: int
    dropout: float
    corrupt: int
    catalogue: int
    rows: int
    width: int

    def described(self) -> list[dict[str, Any]]:
        """A record per trust; one that cannot be had says why."""
        return [
            self._one(Trust.SERVER, Plan(scheme=Scheme.FEDAVG, **self._common)),
            self._one(Trust.SHARES, Plan(scheme=Scheme.SECURE_FEDAVG, **self._common)),
            self._one(Trust.EACH, Plan(scheme=Scheme.TWO_SERVER, **self._common)),
            self._one(Trust.LOCAL, Plan(scheme=Scheme.FEDAVG, **self._common)),
        ]

    @property
    def _common(self) -> dict[str, Any]:
        graph = GraphKind.SPARSE if self.cohort > COMPLETE else GraphKind.COMPLETE
        limit = max(self.catalogue, TwoServerPlan().row_limit)
        return {
            "cohort": self.cohort,
            "tables": (TablePlan(name="rows", rows=self.catalogue, width=self.width),),
            "security": SecurityPlan(dropout=self.dropout, graph=graph),
            "update": UpdatePlan(average="examples"),  # type: ignore[arg-type]
            "two_server": TwoServerPlan(row_limit=limit),
        }

    def _one(self, trust: Trust, plan: Plan) -> dict[str, Any]:
        entry = schemes.of(plan)
        record: dict[str, Any] = {
            "trust": trust.value,
            "scheme": entry.name,
            "honest": "",
            "noise_in_sum": None,
            "clients_for_a_row": None,
            "bytes_up": None,
            "refused": None,
        }
        section = DPPlan(
            unit=Unit.USER,
            noise=self.drawn_noise if trust is Trust.SERVER else self.noise,
            delta=self.delta,
            trust=trust,
            corrupt=self.corrupt if trust is Trust.SHARES else 0,
            rows=NoisyRows.ALL,
            row_limit=self.catalogue,
        )
        try:
            noisy = replace(plan, dp=section)
            deviation = noise_of(noisy).in_the_sum
            record["honest"] = noise_of(noisy).honest
            record["noise_in_sum"] = deviation
            record["clients_for_a_row"] = deviation * math.sqrt(self.rows * self.width)
            up = Forecast(noisy, rows_per_client=min(self.rows, self.catalogue)).bytes_up()
            record["bytes_up"] = sum(up.values())
            if trust is Trust.SHARES:
                record["higher_thresholds"] = self._higher_thresholds(noisy)
                record["honest"] = f"{noisy.least_survivors - noisy.corrupt_shares} clients"
        except ConfigError as error:
            record["refused"] = str(error)
        return record

    def _higher_thresholds(self, plan: Plan) -> list[dict[str, Any]]:
        """Noise in a sum if fewer clients of a round may be missing; those with less noise only."""
        found, before = [], noise_of(plan).in_the_sum
        for part in FEWER:
            dropout = plan.security.dropout * part
            security = replace(plan.security, dropout=dropout)
            key = f"dropout = {dropout:g}"
            if security.graph is GraphKind.COMPLETE:
                least = fewest_members(self.cohort, dropout)
                security, key = replace(security, threshold=least), f"threshold = {least}"
            stricter = replace(plan, security=security)
            noise = noise_of(stricter).in_the_sum
            if noise < before:
                record = {"key": key, "survivors": stricter.least_survivors}
                found.append(record | {"noise_in_sum": noise, "saved": 1.0 - noise / before})
        return found


def choices_table(records: Sequence[Mapping[str, Any]], cohort: int) -> Table:
    rows = []
    for one in records:
        if one["refused"] is not None:
            rows.append([one["trust"], one["scheme"], "refused", "", "", "", ""])
            continue
        needed = one["clients_for_a_row"]
        rows.append(
            [
                one["trust"],
                one["scheme"],
                one["honest"],
                f"{one['noise_in_sum']:.3g}",
                rounded(needed),
                share(needed / cohort) if needed <= cohort else "none",
                size(one["bytes_up"]),
            ]
        )
    figures = ("noise in\na sum", "clients\nfor a row", "of a\nround", "up per\nclient")
    return table(
        ("trust", "scheme", "who must be honest", *figures),
        rows,
        left=3,
        title="The same budget per user, by who adds the noise",
    )


def choices_in_words(records: Sequence[Mapping[str, Any]], cohort: int) -> list[str]:
    """Which part of the catalogue will be learnt, and what is refused."""
    found = [
        "Noise is in clips. A row rises over it where the clients of the last columns hold it: "
        "rows that fewer hold are noise, and popular ones are learnt."
    ]
    for one in records:
        for higher in one.get("higher_thresholds", ()):
            found.append(
                f"{one['trust']}: with {higher['key']} in [security] the noise in a sum is "
                f"{higher['noise_in_sum']:.3g} ({share(higher['saved'])} less); a round with fewer "
                f"than {higher['survivors']} answers is aborted, and stays charged"
            )
    best = [one for one in records if one["refused"] is None]
    if best and all(one["clients_for_a_row"] > cohort for one in best):
        found.append(
            "No row will rise over the noise: fewer rows or values for each client, a larger "
            "cohort, fewer rounds, or a larger budget."
        )
    found += [f"{one['trust']}: refused: {one['refused']}" for one in records if one["refused"]]
    return found
