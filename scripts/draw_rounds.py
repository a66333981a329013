"""Draw the walk of a round under every scheme into docs/protocols/README.md.

    python scripts/draw_rounds.py            print all walks as Mermaid text
    python scripts/draw_rounds.py --write    put them between the markers in the page
    python scripts/draw_rounds.py --check    exit status 1 if the page shows anything else

Phases are those of the table of schemes (`rounds/schemes.py`), in its order. Messages are those of
one round that is run for the drawing; each that a server takes is a step of the role that takes it,
or the drawing stops.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from tessera.crypto.entropy import ScriptedEntropy  # noqa: E402
from tessera.ids import HELPER, SERVER  # noqa: E402
from tessera.plan import (  # noqa: E402
    Domain,
    ModelPlan,
    Plan,
    PrivacyPlan,
    SecurityPlan,
    TablePlan,
    TwoServerPlan,
    UnionPlan,
)
from tessera.protocols.plain import PlainServer  # noqa: E402
from tessera.protocols.secagg.params import Threat  # noqa: E402
from tessera.protocols.secagg.server import Server  # noqa: E402
from tessera.protocols.two_server.handshake import LeaderHandshake  # noqa: E402
from tessera.protocols.two_server.read.server import RetrievalLeader  # noqa: E402
from tessera.protocols.two_server.write.leader import WriteLeader  # noqa: E402
from tessera.rounds import schemes  # noqa: E402
from tessera.rounds.schemes import SCHEMES  # noqa: E402
from tessera.simulation import population  # noqa: E402
from tessera.simulation.federation import Federation  # noqa: E402
from tessera.simulation.views import Views  # noqa: E402

PAGE: Final = ROOT / "docs" / "protocols" / "README.md"
BEGIN: Final = "<!-- walks: drawn by scripts/draw_rounds.py -->"
END: Final = "<!-- end of walks -->"
CLIENTS: Final = 6
COORDINATORS: Final = (Server, PlainServer, LeaderHandshake, RetrievalLeader, WriteLeader)
"""Whoever has phases, and takes messages in them."""
DONE: Final = ("done", 0)


class Message(NamedTuple):
    """Who sends which kind to whom; clients are one party here."""

    sender: str
    receiver: str
    kind: str


def plans() -> dict[str, Plan]:
    """Every walk that is drawn, by its heading: each scheme, and what a plan can add to it."""
    found: dict[str, Plan] = {}
    for entry in SCHEMES.values():
        if not entry.federated:
            continue
        plan = Plan(
            scheme=entry.scheme,
            cohort=CLIENTS,
            tables=(TablePlan(name="goods", rows=90, width=2),),
            model=ModelPlan(dense=3),
            privacy=PrivacyPlan(level="cpp2"),
            union=UnionPlan(max_rows=12),
        )
        found[f"`{entry.name}`"] = plan
        if entry.randomises:
            found[f"`{entry.name}`, active setting"] = replace(
                plan,
                security=SecurityPlan(threat=Threat.ACTIVE),
                privacy=PrivacyPlan(level="cpp5"),  # others are refused
            )
        if entry.two_servers:
            union = TwoServerPlan(domain=Domain.UNION)
            found[f"`{entry.name}`, tables narrowed to a union"] = replace(plan, two_server=union)
    return found


class Walk(Views):
    """What was sent in which phase of a round, each kind once, in order."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.sent: dict[tuple[str, int], list[Message]] = {}
        self._phases: list[str] = []
        self._federation = Federation(
            plan,
            population.participants(plan, CLIENTS, 5),
            dense=population.dense(plan),
            tables=population.tables(plan),
            trainer=population.cohort_trainer(plan, CLIENTS),
            entropy=ScriptedEntropy(b"walk"),
            views=self,
        )
        list(self._federation.round())

    def add(
        self, time: float, sender: Any, receiver: Any, kind: str, data: bytes, *, arrived: bool
    ) -> None:
        """To the leader: in the phase that takes it. From it: in the phase that it begins."""
        if arrived is not (receiver == SERVER):
            return
        assert self._federation.last is not None
        phase = self._federation.last.phase
        if self._phases[-1:] != [phase]:
            self._phases.append(phase)
        lines = self.sent.setdefault((phase, self._phases.count(phase) - 1), [])
        message = Message(*(_party(who) for who in (sender, receiver)), kind)
        if message not in lines:
            lines.append(message)

    def lines(self) -> Iterator[tuple[str, list[Message]]]:
        """Phase by phase, in the order of the table of schemes; then what ends the round."""
        places = [(p.name, p.visit) for p in schemes.of(self.plan).phases(self.plan)]
        strange = self.sent.keys() - {*places, DONE}
        assert not strange, f"phases that the table of schemes does not have: {strange}"
        for place in (*places, DONE):
            yield place[0], self.sent.get(place, [])

    def unlisted(self) -> list[Message]:
        """What a server took that is no step of any role in that phase."""
        return [
            message
            for (phase, _), lines in self.sent.items()
            for message in lines
            if message.receiver == SERVER and message.kind not in taken_in(phase)
        ]


def _party(who: Any) -> str:
    return who if who in (SERVER, HELPER) else "clients"


def taken_in(phase: str) -> set[str]:
    """Kinds of message that some role takes in a phase of this name, by their tables of steps."""
    return {
        kind.__name__
        for role in COORDINATORS
        for state, kind in role.STEPS
        if role.PHASES.get(state) == phase
    }


def diagram(plan: Plan) -> str:
    walk = Walk(plan)
    assert not (unlisted := walk.unlisted()), f"no step takes {unlisted}"
    leader = "leader" if schemes.of(plan).two_servers else "server"
    lines = ["participant clients", f"participant {SERVER} as {leader}"]
    if schemes.of(plan).two_servers:
        lines.append(f"participant {HELPER} as helper")
    over = f"clients,{HELPER if schemes.of(plan).two_servers else SERVER}"
    for phase, sent in walk.lines():
        if sent or phase != DONE[0]:
            lines.append(f"Note over {over}: {phase}")
        lines += [f"{m.sender}->>{m.receiver}: {m.kind}" for m in sent]
    body = "\n".join(f"    {line}" for line in lines)
    return f"```mermaid\nsequenceDiagram\n{body}\n```"


def drawn() -> str:
    return "\n\n".join(f"### {heading}\n\n{diagram(plan)}" for heading, plan in plans().items())


def redrawn(page: str) -> str:
    """The page with all walks as the code has them now."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"error: {PAGE.name} has no place for the walks")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{drawn()}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="put the walks into the page")
    choice.add_argument("--check", action="store_true", help="compare them with the page")
    chosen = parser.parse_args(arguments)
    if not chosen.write and not chosen.check:
        print(drawn())
        return 0
    page = PAGE.read_text(encoding="utf-8")
    if chosen.write:
        PAGE.write_text(redrawn(page), encoding="utf-8")
        return 0
    if redrawn(page) == page:
        return 0
    print(f"error: the walks in {PAGE.relative_to(ROOT)} are not the code's", file=sys.stderr)
    print("hint: `python scripts/draw_rounds.py --write` draws them again", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
