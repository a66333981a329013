"""A secure sum with dropouts, step by step: `python examples/explain.py`.

The round is a real one: the roles, messages and cryptography are those of a deployment, only the
carrier is a simulator. The inputs are synthetic.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from tessera import wire
from tessera.crypto import kernel
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.keys import identities
from tessera.crypto.ring import Ring
from tessera.ids import SERVER, ClientId, RoundId, TableId
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.messages import MaskedInput
from tessera.protocols.secagg.params import RowSumSpec, SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.server import SecAggServerSetup
from tessera.protocols.secagg.standalone import Aggregator, Contribution, Contributor, RowInput
from tessera.report.numbers import seconds, size
from tessera.simulation.faults import Drop, Fault
from tessera.simulation.simulator import Outcome, PhaseEnd, Simulator
from tessera.simulation.views import Views

GENRES: Final = ("folk", "jazz", "metal", "opera", "pop", "rap")
SONGS: Final = 200
HEARTS: Final = 30
MOST: Final = 600
"""Most minutes a week that a client listens to one genre."""

GROUP: Final = Ring(20)
TABLE: Final = TableId(0)


@dataclass(frozen=True, slots=True)
class Listener:
    """One person's data: minutes per genre, and hearts for a few songs."""

    minutes: npt.NDArray[Any]
    songs: npt.NDArray[np.uint64]
    hearts: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Story:
    """A round that has run: what went in, what came out, what the server saw on the way."""

    params: SecAggParams
    listeners: dict[ClientId, Listener]
    phase_ends: list[PhaseEnd]
    outcome: Outcome
    server: Aggregator
    views: Views


def main(*, clients: int = 12, drop: int = 3, active: bool = False, seed: int = 1) -> Story:
    """Take a secure sum of 4 to 200 clients, of which `drop` drop out, and show each step.

    `active` withstands an active server, not only a semi-honest one. `seed` is for the synthetic
    data alone: keys are always fresh.
    """
    story = run(clients, drop, active, seed)
    show(story, Console(highlight=False))
    return story


def run(clients: int, drop: int, active: bool, seed: int) -> Story:
    listeners = invent(clients, np.random.default_rng(seed))
    params = SecAggParams(
        federation="explained",
        round_id=RoundId(1),
        plan_hash=bytes(32),
        cohort=clients,
        threat=Threat.ACTIVE if active else Threat.SEMI_HONEST,
        stages=(
            StageSpec(name="minutes", group=GROUP, dense=len(GENRES), max_value=MOST),
            StageSpec(name="hearts", group=GROUP, tables=(RowSumSpec(table=TABLE, width=2),)),
        ),
    )
    signers = identities(listeners, SystemEntropy(), params.federation) if active else {}
    joined = {
        c: Client.join(
            SecAggClientSetup(params, c, identity=signers.get(c)), entropy=SystemEntropy()
        )
        for c in listeners
    }
    server = Aggregator(
        SecAggServerSetup(params, listeners, identity=signers.get(ClientId(0))),
        entropy=SystemEntropy(),
    )
    phase_ends: list[PhaseEnd] = []
    views = Views()
    simulator = Simulator(
        server,
        {c: Contributor(member, contributions(listeners[c])) for c, (member, _) in joined.items()},
        {c: out for c, (_, out) in joined.items()},
        faults=dropouts(clients, drop),
        views=views,
        on_phase=phase_ends.append,
    )
    return Story(params, listeners, phase_ends, simulator.run(), server, views)


def invent(clients: int, rng: np.random.Generator) -> dict[ClientId, Listener]:
    """Synthetic listeners, who like a few popular songs and many obscure ones."""
    popularity = 1.0 / np.arange(1, SONGS + 1)
    popularity /= popularity.sum()
    found = {}
    for i in range(clients):
        minutes = rng.integers(0, MOST // 2, len(GENRES), endpoint=True)
        songs = np.sort(rng.choice(SONGS, HEARTS, replace=False, p=popularity)).astype(np.uint64)
        hearts = rng.integers(1, 5, HEARTS, endpoint=True)
        found[ClientId(i)] = Listener(
            minutes.astype(GROUP.dtype), songs, hearts.astype(GROUP.dtype)
        )
    return found


def contributions(listener: Listener) -> list[Contribution]:
    counted = np.stack([listener.hearts, np.ones_like(listener.hearts)], axis=1)
    rows = RowInput(rows=listener.songs, words=counted)
    return [Contribution(dense=listener.minutes), Contribution(tables={TABLE: rows})]


def dropouts(clients: int, drop: int) -> list[Fault]:
    """Who drops out when: at the worst moments first."""
    moments = [("collect", 0), ("collect", 1), ("unmask", 0), ("share", 0), ("reveal", 0)]
    step = max(1, clients // max(1, drop))
    return [
        Drop(ClientId((1 + i * step) % clients), phase, stage=stage)
        for i, (phase, stage) in enumerate(moments[j % len(moments)] for j in range(drop))
    ]


# --- the facts ------------------------------------------------------------------------------------


def plain_minutes(story: Story) -> list[int]:
    """What the sum has to be: the minutes of everybody in it, added in the clear."""
    survivors = [ClientId(int(c)) for c in story.server.sums[0].survivors]
    return [
        int(sum(int(story.listeners[c].minutes[g]) for c in survivors)) for g in range(len(GENRES))
    ]


def seen_of(story: Story, client: ClientId) -> list[int]:
    """The minutes of one client as they reached the server."""
    for seen in story.views.by_party[SERVER]:
        if seen.direction == "received" and seen.other == client and seen.kind == "MaskedInput":
            message = wire.decode(seen.data, expect=[MaskedInput])
            if message.stage == 0:
                return GROUP.to_ints(GROUP.unpack(message.dense, len(GENRES)))
    return []


def witness(story: Story) -> ClientId:
    """A survivor: the one whose masked minutes are shown."""
    return next(c for c in story.listeners if seen_of(story, c))


def costs(story: Story) -> dict[str, float]:
    client = witness(story)
    up, down = story.outcome.traffic.bytes_of(client)
    spent = sum(story.outcome.traffic.client_seconds[client].values())
    return {
        "bytes_up": up,
        "bytes_down": down,
        "client_seconds": spent,
        "server_seconds": sum(story.outcome.traffic.server_seconds.values()),
    }


def is_exact(story: Story) -> bool:
    """Whether the sum that was opened is the one in the clear."""
    return GROUP.to_ints(story.server.sums[0].dense) == plain_minutes(story)


# --- for people -----------------------------------------------------------------------------------

WHAT_THE_SERVER_HAS: Final = {
    "advertise": "public keys",
    "share": "sealed shares it cannot read",
    "reveal": "which songs each client names",
    "collect": "masked words, all of them uniform",
    "consistency": "signatures over one list",
    "unmask": "the sum, and no single input",
}


def stage_name(params: SecAggParams, h: PhaseEnd) -> str:
    """Keys and shares serve all stages; rows are revealed in those that have tables."""
    if h.phase in ("advertise", "share"):
        return ""
    if h.phase == "reveal":
        return [stage.name for stage in params.stages if stage.tables][h.visit]
    return params.stages[h.visit].name


def show(story: Story, console: Console) -> None:
    params, topology = story.params, story.params.topology
    against = "an active server" if params.threat is Threat.ACTIVE else "a semi-honest server"
    console.print(
        f"[bold]{params.cohort} clients, one server, two sums.[/] Every client has minutes per "
        f"genre and hearts for {HEARTS} of {SONGS} songs. Against {against}; any "
        f"{params.cohort - topology.threshold} may drop out at any time.\n"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stage", "phase", "answered", "gone", "what the server has now"):
        table.add_column(heading, overflow="fold")
    for h in story.phase_ends:
        answered = f"{h.answered}/{h.answered + len(h.missing)}"
        gone = ", ".join(f"client {c}" for c in h.missing)
        stage = stage_name(params, h)
        has = WHAT_THE_SERVER_HAS[h.phase]
        if story.outcome.aborted is not None and h is story.phase_ends[-1]:
            has = "[red]too few: nothing is opened[/]"
        table.add_row(stage, h.phase, answered, f"[red]{gone}[/]" if gone else "", has)
    console.print(table)
    if story.outcome.aborted is not None:
        return
    console.print()
    show_minutes(story, console)
    show_hearts(story, console)
    spent = costs(story)
    console.print(
        f"[bold]Cost[/] for one client: {size(spent['bytes_up'])} up, "
        f"{size(spent['bytes_down'])} down, {seconds(spent['client_seconds'])}; "
        f"for the server {seconds(spent['server_seconds'])} "
        f"(kernel: {kernel.describe().name})."
    )
    console.print(
        "Not hidden: the sums, who took part, which songs a client names, and a song's exact "
        "hearts where one member of its group gave them all. docs/threat-model.md has the list."
    )


def show_minutes(story: Story, console: Console) -> None:
    client = witness(story)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("minutes")
    for genre in GENRES:
        table.add_column(genre, justify="right")
    own = [int(m) for m in story.listeners[client].minutes]
    opened = GROUP.to_ints(story.server.sums[0].dense)
    expected = plain_minutes(story)
    table.add_row(f"client {client} has", *map(str, own))
    table.add_row("the server saw", *(f"[dim]{w}[/]" for w in seen_of(story, client)))
    table.add_row("the sum it opened", *(f"[bold]{w}[/]" for w in opened))
    table.add_row("added in the clear", *map(str, expected))
    console.print(table)
    count = len(story.server.sums[0].survivors)
    verdict = "[green]equal, to the last minute[/]" if is_exact(story) else "[red]NOT EQUAL[/]"
    console.print(f"{verdict}, over the {count} whose minutes arrived.\n")


def show_hearts(story: Story, console: Console) -> None:
    part = story.server.sums[1].tables[TABLE]
    best = np.argsort(part.words[:, 0])[::-1][:4]
    favourites = ", ".join(
        f"song {part.rows[i]} ({part.words[i, 0]} from {part.words[i, 1]})" for i in best
    )
    console.print(
        f"[bold]Hearts[/], summed row by row: {favourites}, and {len(part.rows) - len(best)} songs "
        f"more. {part.below_quorum} songs were named by fewer than {story.params.quorum} clients "
        "and are not opened.\n"
    )


if __name__ == "__main__":
    main()
