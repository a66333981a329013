"""`tessera plan --all-schemes`: what one task would cost and give away under every scheme."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tessera.cli.format import figures_table
from tessera.errors import ConfigError
from tessera.plan import Plan, PrivacyPlan, Scheme
from tessera.privacy.index.bound import CONDITIONS
from tessera.report.numbers import seconds, share, size
from tessera.rounds import schemes
from tessera.rounds.forecast import Forecast
from tessera.simulation.calibration import round_seconds

READS_ALL = "reads everything"


def described(plan: Plan, rows_per_client: int) -> list[dict[str, Any]]:
    """A record per scheme; one that this plan cannot be run under says why."""
    return [_one(plan, entry, rows_per_client) for entry in schemes.SCHEMES.values()]


def _one(plan: Plan, entry: schemes.SchemeEntry, rows: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "scheme": entry.name,
        "server_learns": entry.knowledge.server,
        "honest": entry.knowledge.honest,
        "bytes_up": None,
        "bytes_down": None,
        "bytes_between": None,
        "server_seconds": None,
        "holder_named": 1.0,
        "refused": None,
    }
    if not entry.federated:
        return record
    try:
        changed = _under(plan, entry.scheme)
        forecast = Forecast(changed, rows_per_client=rows)
        record |= {
            "bytes_up": sum(forecast.bytes_up().values()),
            "bytes_down": sum(forecast.bytes_down().values()),
            "bytes_between": forecast.bytes_between() if entry.two_servers else None,
            "holder_named": changed.promise.bound(),
        }
        if forecast.work is not None or entry.two_servers:
            record["server_seconds"] = round_seconds(forecast).get("server")
    except ConfigError as error:
        record["refused"] = str(error)
    return record


def _under(plan: Plan, scheme: Scheme) -> Plan:
    """The plan under another scheme; what only its own understands is as it is by default."""
    try:
        return replace(plan, scheme=scheme)
    except ConfigError:
        return replace(plan, scheme=scheme, privacy=PrivacyPlan(), dp=None)


def show(records: list[dict[str, Any]], title: str, console: Console) -> None:
    width = min(console.width, 100)
    console.print(f"[bold]{escape(title)}[/], per client and round", soft_wrap=True)
    console.print(table_of(records))
    for record in records:
        for line in sentences(record):
            console.print(line, width=width)
    if any(record["holder_named"] < 1.0 for record in records):
        console.print(f"Holder identified, at most: {CONDITIONS}.", width=width)
    console.print(
        "docs/choosing.md says which scheme is for whom; `tessera init TASK --scheme NAME` writes "
        "its plan.",
        style="dim",
        soft_wrap=True,
    )


def table_of(records: list[dict[str, Any]]) -> Table:
    table = figures_table()
    table.add_column("scheme", no_wrap=True)
    for name in ("up", "down", "between\nservers", "server\ntime", "holder identi-\nfied, at most"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in records:
        entry = schemes.named(one["scheme"])
        if one["refused"] is not None:
            table.add_row(one["scheme"], "refused", *[""] * 4)
            continue
        table.add_row(
            one["scheme"],
            "all data" if not entry.federated else size(one["bytes_up"]),
            "" if not entry.federated else size(one["bytes_down"]),
            "" if one["bytes_between"] is None else size(one["bytes_between"]),
            "" if one["server_seconds"] is None else seconds(one["server_seconds"]),
            share(one["holder_named"]) if entry.hides else READS_ALL,
        )
    return table


def sentences(record: dict[str, Any]) -> Iterator[str]:
    name = f"[bold]{record['scheme']}[/]"
    if record["refused"] is not None:
        yield f"{name}: not with this plan: {escape(record['refused'])}"
    else:
        yield f"{name}, learnt by the server: {escape(record['server_learns'])}"
