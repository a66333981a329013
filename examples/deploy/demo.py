"""A deployment on this machine: leader, helper and ten clients over TLS, with kills in between.

    python examples/deploy/demo.py [--rounds 5]

Two schemes one after the other. In each a client is killed and comes back, and the leader is killed
in the middle of a round and started again; all with SIGKILL. Everybody's secrets follow from a
test's script here, so that the model can be compared with the simulator's, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tessera.crypto.entropy import ScriptedEntropy
from tessera.engines import population
from tessera.engines.bundle import Bundle
from tessera.engines.federation import Federation
from tessera.protocols.secagg.identity import identities
from tessera.rounds.events import RoundFinished

CLIENTS = 10
ROWS = 40
SCRIPT = "make deploy-demo"
PLAN = """
scheme = "{scheme}"
cohort = {clients}
federation = "deploy-demo"
seed = 1
[model]
dense = 64
[[table]]
name = "items"
rows = 2000
width = 8
[union]
max_rows = 64
[privacy]
level = "cpp4"
[service]
join = 120
phase = 120
poll = 10
retry = 0.1
"""


@dataclass
class Parties:
    """The processes of one deployment, each over a folder of its own."""

    folder: Path
    rounds: int
    port: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self, name: str) -> None:
        arguments = {
            "leader": ["serve", "bundle.npz", "--port", self.port, "--rounds", self.rounds],
            "helper": ["help-serve", "bundle.npz", self.url],
        }.get(name) or ["join", "bundle.npz", self.url, "--client", name.removeprefix("client-")]
        line = [*arguments, "--keys", f"keys/{name}", "--state", f"state/{name}"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                tessera(*line, "--insecure-test-entropy", SCRIPT),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def events(self) -> Iterator[dict[str, object]]:
        """The leader's log so far."""
        for line in (self.folder / "leader.log").read_text(encoding="utf-8").splitlines():
            if line.startswith("{"):
                yield json.loads(line)

    def opened(self, round_id: int) -> bool:
        return any(
            e.get("event") == "round opened" and e["round"] == round_id for e in self.events()
        )

    def until_opened(self, round_id: int, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not self.opened(round_id):
            if time.monotonic() > end:
                raise SystemExit(f"round {round_id} did not open; logs are in {self.folder}")
            time.sleep(0.02)


def tessera(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tessera.cli.main", *map(str, arguments)]


@contextmanager
def deployed(scheme: str, rounds: int) -> Iterator[Parties]:
    """Packed, with keys, and everybody started."""
    with TemporaryDirectory(prefix="tessera-demo-") as made:
        folder = Path(made)
        plan = PLAN.format(scheme=scheme, clients=CLIENTS)
        (folder / "plan.toml").write_text(plan, encoding="utf-8")
        pack = tessera("pack", "plan.toml", "--rows-per-client", ROWS)
        keys = tessera("keys", "bundle.npz", "--insecure-test-entropy", SCRIPT)
        for line in (pack, keys):
            subprocess.run(line, cwd=folder, check=True, stderr=subprocess.DEVNULL)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        parties = Parties(folder, rounds, port)
        names = ["leader", *(["helper"] if scheme == "two-server" else [])]
        try:
            for name in [*names, *(f"client-{c}" for c in range(CLIENTS))]:
                parties.start(name)
            yield parties
        finally:
            for process in parties.running.values():
                process.kill()
                process.wait()


def simulated(bundle: Bundle, rounds: int) -> str:
    """The digest of the simulator's model: the same plan, clients, entropy and survivors."""
    plan, entropy = bundle.plan, ScriptedEntropy(SCRIPT.encode())
    members = population.participants(plan, bundle.clients, ROWS)
    for client, identity in identities(list(members), entropy, plan.federation).items():
        members[client].identity = identity
    federation = Federation(
        plan,
        members,
        dense=population.dense(plan),
        tables=population.tables(plan),
        trainer=population.cohort_trainer(plan, bundle.clients),
        derived=population.derived_maps(plan),
        entropy=entropy,
    )
    ended = [e for e in federation.run(rounds) if isinstance(e, RoundFinished)]
    assert len(ended) == rounds
    return federation.model.digest.hex()


def demonstrate(scheme: str, rounds: int) -> bool:
    """One scheme; whether its model is the simulator's."""
    started = time.monotonic()
    with deployed(scheme, rounds) as parties:
        parties.until_opened(1)
        parties.kill("client-3")
        print(f"{scheme}: client 3 is killed in round 1, and comes back")
        parties.start("client-3")
        parties.until_opened(3)
        parties.kill("leader")
        print(f"{scheme}: the leader is killed in round 3, and comes back")
        parties.start("leader")
        for name, process in parties.running.items():
            if process.wait(120) != 0:
                print((parties.folder / f"{name}.log").read_text(encoding="utf-8")[-2000:])
                raise SystemExit(f"{name} ended with status {process.returncode}")
        outcomes = [json.loads(str(e["outcome"])) for e in parties.events() if "outcome" in e]
        model = [e["model"] for e in parties.events() if e.get("event") == "stopped"][-1]
        bundle = Bundle.read(parties.folder / "bundle.npz")
    for each in outcomes:
        print(f"{scheme}: round {each['round_id']}: {each['survivors']} of {CLIENTS} in the sum")
    same = model == simulated(bundle, rounds) and len(outcomes) == rounds
    seconds = time.monotonic() - started
    verdict = "the simulator's" if same else "NOT the simulator's"
    print(f"{scheme}: model {str(model)[:16]} is {verdict}; {seconds:.0f} s")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scheme", action="append")
    options = parser.parse_args()
    found = [
        demonstrate(scheme, options.rounds)
        for scheme in options.scheme or ("secure-submodel", "two-server")
    ]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
