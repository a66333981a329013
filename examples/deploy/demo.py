"""A deployment on this machine: leader, helper and ten clients over TLS, with kills in between.

    python examples/deploy/demo.py [--rounds 5]

Fixed groups that wait, then two servers. In each a client is killed and comes back, and the leader
is killed in the middle of a round and started again; all with SIGKILL. Everybody's secrets follow
from a test's script here, so that the model can be compared with the simulator's, to the bit: of
groups for the order in which clients came, which is in the leader's state.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tessera.crypto.entropy import ScriptedEntropy
from tessera.rounds.events import RoundFinished
from tessera.services.loopback import LoopbackDeployment, ReplayedGroups, simulation

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
{more}
[service]
join = 120
phase = 120
poll = 10
retry = 0.1
"""

MORE = {"secure-submodel": "[groups]\nsize = 5\nsmall = true"}
"""Ten clients are fewer than ten groups: two groups on the operator's word."""


@contextmanager
def deployed(scheme: str, rounds: int) -> Iterator[LoopbackDeployment]:
    """Packed, with keys, and everybody started."""
    with TemporaryDirectory(prefix="tessera-demo-") as folder:
        plan = PLAN.format(scheme=scheme, clients=CLIENTS, more=MORE.get(scheme, ""))
        parties = LoopbackDeployment.packed(
            Path(folder), plan, rows=ROWS, script=SCRIPT, rounds=rounds
        )
        names = ["leader", *(["helper"] if scheme == "two-server" else [])]
        try:
            for name in [*names, *(f"client-{c}" for c in range(CLIENTS))]:
                parties.start(name)
            yield parties
        finally:
            parties.close()


def ended(parties: LoopbackDeployment) -> list[dict[str, Any]]:
    """How rounds have ended so far."""
    return [json.loads(e["outcome"]) for e in parties.events("round ended")]


def until_in_round(parties: LoopbackDeployment, round_id: int, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while len(ended(parties)) < round_id:
        if time.monotonic() > end:
            raise SystemExit(f"round {round_id} did not begin; logs are in {parties.folder}")
        time.sleep(0.02)


def simulated(parties: LoopbackDeployment, rounds: int) -> str:
    """The digest of the simulator's model: the same plan, clients, entropy and order."""
    bundle, entropy = parties.bundle, ScriptedEntropy(SCRIPT.encode())
    if bundle.plan.grouped:
        federation = simulation(bundle, entropy, groups=parties.groups())
        assert isinstance(federation, ReplayedGroups)
        federation.replay(parties.epochs(), rounds)
        return federation.model.digest.hex()
    federation = simulation(bundle, entropy)
    finished = [e for e in federation.run(rounds) if isinstance(e, RoundFinished)]
    assert len(finished) == rounds
    return federation.model.digest.hex()


def demonstrate(scheme: str, rounds: int) -> bool:
    """One scheme; whether its model is the simulator's."""
    started = time.monotonic()
    with deployed(scheme, rounds) as parties:
        until_in_round(parties, 1)
        parties.kill("client-3")
        print(f"{scheme}: client 3 is killed in round 1, and comes back")
        parties.start("client-3")
        until_in_round(parties, 3)
        parties.kill("leader")
        print(f"{scheme}: the leader is killed in round 3, and comes back")
        parties.start("leader")
        for name, process in parties.running.items():
            if process.wait(120) != 0:
                print(parties.log(name).read_text(encoding="utf-8")[-2000:])
                raise SystemExit(f"{name} ended with status {process.returncode}")
        outcomes = ended(parties)
        model = [e["model"] for e in parties.events("stopped")][-1]
        same = model == simulated(parties, rounds) and len(outcomes) == rounds
    for each in outcomes:
        print(f"{scheme}: round {each['round_id']}: {each['survivors']} of {CLIENTS} in the sum")
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
