"""What `tessera plan` says of two servers: how tables are written, what each of them looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.plan import NoiseFrom
from tessera.report.numbers import size


def facts(report: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Headed lists of (what, value)."""
    found, writing = report["two_server"], []
    for cost in found["tables"]:
        writing.append((cost["name"], cost["reason"]))
        if cost["keys"] is not None:
            up_to = report["break_even"][cost["name"]]
            limit = f"up to max_rows = {up_to:,}" if up_to else "for no max_rows"
            writing.append(("", f"keys take fewer bytes {limit}, of {cost['rows']:,} rows"))
    looked = f"{found['rows_looked_at']:,} rows, {found['aes_blocks']:,} AES blocks"
    domain = "whole tables" if found["domain"] == "whole" else "the cohort's union"
    return {
        "how a client writes a table": writing,
        "two servers": [
            ("evaluated over", f"{domain} (row_limit = {found['row_limit']:,})"),
            ("by each server for one client", looked),
            ("a sum is opened over at least", f"{found['min_cohort']} clients"),
            ("excluded once their list is closed", f"at most {found['most_excluded']} clients"),
        ],
    }


def notes(report: Mapping[str, Any]) -> list[str]:
    found, fewer = report["two_server"], report["fewer_rows"]
    lines = []
    if not opens_with_noise(report):
        lines.append(
            "a row that only one client writes is opened as that client's exact update, without "
            "its identity"
        )
    if fewer is not None:
        held = f"{report['assumed']['rows_per_client']:,} are assumed"
        if report["held"] is not None:
            held = "clients hold {mean:,} on average and {most:,} at most".format(**report["held"])
        lines.append(
            f"all messages are sized for max_rows = {found['max_rows']:,}, and "
            f"{held}: max_rows = {fewer['max_rows']:,} would take {size(fewer['total_up'])} up and "
            f"{size(fewer['total_down'])} down"
        )
    if not found["check"]:
        lines.append(
            "check = false: a server that alters the rows of one client goes unnoticed, and can "
            "read that client's rows in the next sum"
        )
    if not found["verify"]:
        lines.append(
            "verify = false: one client can write any number of rows, all of a table at once"
        )
    if found["key_rounds"] > 1:
        first, later = found["report_bytes"]
        lines.append(
            f"keys last {found['key_rounds']} rounds: a client's report takes {size(first)} in the "
            f"first of them and {size(later)} later, and the cohort stays the same; where the next "
            "keys are made over another list of clients, the rows of whoever came or went show"
        )
        if found["absent"] == "allow":
            lines.append(
                'absent = "allow": the rows of a client that is missing in a round of its keys '
                "show in the difference of two sums"
            )
    if found["domain"] == "union":
        lines.append(
            "the union is opened exactly, in a secure sum with signed keys and the active "
            "setting's threshold of clients"
        )
    return lines


def opens_with_noise(report: Mapping[str, Any]) -> bool:
    """Whether both servers add noise to every row before the sum opens."""
    noise = report["dp"]
    return noise is not None and noise["trust"] == NoiseFrom.EACH.value
