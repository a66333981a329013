"""A party's state as its operator may see it, without the process: for a client what it has spent,
by its own ledger and over all trainings of its account, and in which rounds its update counted."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from tessera.errors import ConfigError
from tessera.privacy.dp.events import ExactRelease, NoisySum
from tessera.privacy.dp.guarantee import Guarantee, Unit
from tessera.privacy.dp.ledger import Entry, Ledger
from tessera.privacy.dp.mechanism import NoAccount
from tessera.services import charged_trainings
from tessera.services.charged_trainings import DELTA, ChargedTrainings, composed
from tessera.services.journal import NAME, state_of
from tessera.services.journal_stores import COUNTED, LEDGER, event_of

MOST_ROUNDS: Final = 20
"""That are listed, the latest ones."""


def party_status(folder: Path, home: Path) -> dict[str, Any]:
    """As `state_of`; of clients with what each has spent, here and over all trainings of the user
    account that keeps them in `home`."""
    found = state_of(folder)
    if "client" not in found["party"]:
        return found
    with closing(sqlite3.connect(f"file:{folder / NAME}?mode=ro", uri=True)) as database:
        charges: dict[str, list[Entry]] = {}
        for party, event, reason in database.execute(
            "SELECT party, event, reason FROM charge ORDER BY party, number"
        ):
            charges.setdefault(party, []).append(Entry(event=event_of(event), reason=reason))
        counted = {
            party: json.loads(text)
            for party, text in database.execute(
                "SELECT party, value FROM fact WHERE name = ?", (COUNTED,)
            )
        }
        ledgers = dict(
            database.execute("SELECT party, value FROM fact WHERE name = ?", (LEDGER,)).fetchall()
        )
    return {
        **found,
        "clients": {
            party: {
                **_rounds(counted.get(party, {})),
                **spent(Ledger(entries=charges.get(party, []))),
                **_over_all(home, ledgers.get(party)),
            }
            for party in sorted(charges.keys() | counted.keys(), key=_number)
        },
    }


def _over_all(home: Path, ledger: bytes | None) -> dict[str, Any]:
    """What all trainings have cost the person whose ledger this is; {} where none is kept."""
    if ledger is None or not (home / charged_trainings.NAME).exists():
        return {}
    charged = ChargedTrainings(home).spent_with(bytes(ledger))
    trainings = len({training.digest for training, _ in charged})
    return {"account": {"trainings": trainings, **spent(composed(charged))}} if charged else {}


def _number(party: str) -> tuple[int, str]:
    last = party.rpartition(" ")[2]
    return (int(last) if last.isdecimal() else -1), party


def _rounds(counted: dict[str, bool]) -> dict[str, Any]:
    rounds = sorted(int(each) for each, is_in in counted.items() if is_in)
    return {
        "counted": len(rounds),
        "not_counted": len(counted) - len(rounds),
        "counted_rounds": rounds[-MOST_ROUNDS:],
    }


def spent(ledger: Ledger) -> dict[str, Any]:
    """What its charges come to: each number with its unit, whom it is against, and conditions."""
    events, numbers = [each.event for each in ledger.entries], []
    if any(event.answers for event in events):
        numbers.append(ledger.guarantee())
    noisy = [event for event in events if isinstance(event, NoisySum)]
    unknown = ""
    for unit in sorted({event.unit for event in noisy}, key=lambda each: each.value):
        seen = {observer for event in noisy if event.unit is unit for observer, _ in event.seen}
        try:
            each = [ledger.guarantee(unit=unit, against=by, delta=DELTA) for by in seen]
        except (ConfigError, NoAccount, ModuleNotFoundError) as error:
            unknown = str(error)
            continue
        numbers.append(max(each, key=lambda one: one.epsilon))
    exact = dict.fromkeys(event.what for event in events if isinstance(event, ExactRelease))
    return {
        "charges": len(events),
        "spent": [_plain(each) for each in numbers],
        "exact": list(exact),
        **({"unknown": unknown} if unknown else {}),
    }


def _plain(found: Guarantee) -> dict[str, Any]:
    return {
        "epsilon": "inf" if math.isinf(found.epsilon) else found.epsilon,
        "delta": found.delta,
        "unit": Unit(found.unit).value,
        "against": found.against.value,
        "condition": found.condition,
    }


def client_lines(clients: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The same in words, a line for each client."""
    return {party: _in_words(each) for party, each in clients.items()}


def _in_words(found: dict[str, Any]) -> str:
    rounds = ", ".join(map(str, found["counted_rounds"]))
    words = [f"counted in {found['counted']} rounds" + (f" ({rounds})" if rounds else "")]
    if found["not_counted"]:
        words.append(f"{found['not_counted']} did not count")
    words += _spent_in_words(found)
    if "account" in found:
        count = found["account"]["trainings"]
        over_all = ", ".join(_spent_in_words(found["account"]))
        words.append(f"over all {count} trainings of this account: {over_all}")
    return "; ".join(words)


def _spent_in_words(found: dict[str, Any]) -> list[str]:
    words = [f"{found['charges']} charges"]
    for each in found["spent"]:
        level = each["epsilon"]
        number = level if isinstance(level, str) else f"{level:.3g}"
        at = f" at delta {each['delta']:g}" if each["delta"] else ""
        given = f", {each['condition']}" if each["condition"] else ""
        words.append(f"epsilon {number} per {each['unit']}{at} against {each['against']}{given}")
    if found["exact"]:
        words.append("released exactly: " + ", ".join(found["exact"]))
    if "unknown" in found:
        words.append(f"no number for its noise: {found['unknown']}")
    return words
