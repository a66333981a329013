"""A deployment on this machine: every party a process of its own, over TLS on loopback.

For demonstrations and benchmarks of synthetic clients; `simulation` is the same in one process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import identities
from tessera.errors import MisuseError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.protocols.epochs.group import FixedGroup
from tessera.protocols.epochs.messages import EpochKind
from tessera.rounds.epochs.group import GroupEpochs
from tessera.services.bundle import Bundle
from tessera.services.group_leader import EpochPlace, epochs_in
from tessera.services.keyring import Keyring
from tessera.services.membership import groups_of
from tessera.simulation import population
from tessera.simulation.epochs import EpochFederation
from tessera.simulation.faults import FaultScript
from tessera.simulation.federation import Federation


def command(*arguments: object) -> list[str]:
    """A command line of this tessera."""
    return [sys.executable, "-m", "tessera.cli.main", *map(str, arguments)]


@dataclass
class LoopbackDeployment:
    """Processes by name: `leader`, `helper`, `client-N`, `clients` for all in one process, or
    `clients A-B` for some.

    Each has its folder of keys and of state under `folder`, and writes its log there.
    """

    folder: Path
    bundle: Bundle
    script: str
    """What test entropy follows from."""
    rounds: int | None = None
    port: int = 0
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def packed(
        cls,
        folder: Path,
        plan: str,
        *,
        rows: int,
        script: str,
        rounds: int | None = None,
        clients: int | None = None,
    ) -> Self:
        """Packed and with keys for so many (default: a cohort); nobody is started yet."""
        (folder / "plan.toml").write_text(plan, encoding="utf-8")
        many = [] if clients is None else ["--clients", clients]
        pack = command("pack", "plan.toml", "--rows-per-client", rows, *many)
        keys = command("keys", "bundle.npz", "--insecure-test-entropy", script)
        for line in (pack, keys):
            subprocess.run(
                line,
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return cls(folder, Bundle.read(folder / "bundle.npz"), script, rounds, port)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _line(self, name: str) -> list[object]:
        if name == "leader":
            most = [] if self.rounds is None else ["--rounds", self.rounds]
            return ["serve", "bundle.npz", "--port", self.port, *most, "--keys", "keys/leader"]
        if name == "helper":
            return ["help-serve", "bundle.npz", self.url, "--keys", "keys/helper"]
        joined: list[object] = ["join", "bundle.npz", self.url]
        if name.startswith("clients"):
            some = name.removeprefix("clients").strip() or f"0-{self.bundle.clients - 1}"
            return [*joined, "--clients", some, "--keys", "keys"]
        return [*joined, "--client", name.removeprefix("client-"), "--keys", f"keys/{name}"]

    def start(self, name: str) -> subprocess.Popen[bytes]:
        line = [*self._line(name), "--state", f"state/{name}"]
        with self.log(name).open("ab") as log:
            started = subprocess.Popen(
                command(*line, "--insecure-test-entropy", self.script),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.running[name] = started
        return started

    def kill(self, name: str) -> None:
        """kill -9."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def events(self, event: str = "") -> Iterator[dict[str, Any]]:
        """The leader's log so far; with a name, the lines of that event."""
        for line in self.log("leader").read_text(encoding="utf-8").splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                if not event or found.get("event") == event:
                    yield found

    def epochs(self) -> list[EpochPlace]:
        """Of the leader's fixed groups, as its journal has them."""
        return epochs_in(self.folder / "state" / "leader")

    def groups(self) -> list[FixedGroup]:
        """As they were drawn."""
        plan = self.bundle.plan
        keyring = Keyring.read(self.folder / "keys" / "leader", SERVER, self.bundle.digest)
        return groups_of(keyring.draws(plan), plan)

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)


def simulation(
    bundle: Bundle,
    entropy: Entropy,
    *,
    faults: FaultScript | None = None,
    groups: Sequence[FixedGroup] = (),
) -> Federation:
    """The same plan, clients, model and secrets in one process; `groups` as they were drawn."""
    if bundle.synthetic is None:
        raise MisuseError("only synthetic clients are simulated from a bundle")
    plan = bundle.plan
    members = population.participants(plan, bundle.clients, bundle.synthetic.rows)
    for client, identity in identities(list(members), entropy, plan.federation).items():
        members[client].identity = identity
    made = (ReplayedGroups if groups else Federation)(
        plan,
        members,
        dense=population.dense(plan),
        tables=population.tables(plan),
        trainer=population.cohort_trainer(plan, bundle.clients),
        derived=population.derived_maps(plan),
        entropy=entropy,
        faults=faults,
    )
    if isinstance(made, ReplayedGroups):
        made.drawn = groups
    return made


# --- fixed groups, in the order in which clients came ---------------------------------------------


class ReplayedGroups(EpochFederation):
    """The simulator over groups that were drawn elsewhere."""

    drawn: Sequence[FixedGroup]

    @property
    def _formed(self) -> Sequence[tuple[ClientId, ...]]:
        return [group.members for group in self.drawn]

    def _fixed_group(self, number: int, members: Sequence[ClientId]) -> FixedGroup:
        return self.drawn[number]

    def _is_carried(self, number: int) -> bool:
        return False

    def replay(self, order: Iterable[EpochPlace], rounds: int) -> None:
        """So many rounds, with every epoch opened and merged in the round that it was in `order`.

        Each member's training follows from the base and from secrets: nothing else matters.
        """
        waiting = {at: [each for each in order if each.part == at] for at in range(len(self.drawn))}
        for number in range(rounds):
            for at, places in waiting.items():
                self._replay_group(self.epochs.group(at), places, number)
            self.epochs.conclude(RoundId(number), (), 0, measured=False)

    def _replay_group(self, group: GroupEpochs, places: list[EpochPlace], number: int) -> None:
        round_id, members = RoundId(number), group.group.members
        if group.at.retired:
            return
        while places and places[0].opened <= number and group.at.open is None:
            here = places[0]
            if here.kind is EpochKind.UPDATE:
                group.opened(self.model, round_id)
            elif here.closed is None:
                return
            else:
                places.pop(0)
                for client in members:
                    self._visit(client, round_id).offer_rows()
                self.epochs.take_unions()
        if places and group.at.open is not None and places[0].closed == number:
            places.pop(0)
            self._train({client: self._visit(client, round_id) for client in members})
