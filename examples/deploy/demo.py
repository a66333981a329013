"""A deployment on this machine: leader, helper and ten clients over TLS, with kills in between.

    python examples/deploy/demo.py [--rounds 5]

Two schemes one after the other. In each a client is killed and comes back, and the leader is killed
in the middle of a round and started again; all with SIGKILL. Everybody's secrets follow from a
test's script here, so that the model can be compared with the simulator's, to the bit.
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

from tessera.crypto.entropy import ScriptedEntropy
from tessera.rounds.events import RoundFinished
from tessera.services.bundle import Bundle
from tessera.services.loopback import LoopbackDeployment, simulation

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


@contextmanager
def deployed(scheme: str, rounds: int) -> Iterator[LoopbackDeployment]:
    """Packed, with keys, and everybody started."""
    with TemporaryDirectory(prefix="tessera-demo-") as folder:
        plan = PLAN.format(scheme=scheme, clients=CLIENTS)
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


def until_opened(parties: LoopbackDeployment, round_id: int, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not any(e["round"] == round_id for e in parties.events("round opened")):
        if time.monotonic() > end:
            raise SystemExit(f"round {round_id} did not open; logs are in {parties.folder}")
        time.sleep(0.02)


def simulated(bundle: Bundle, rounds: int) -> str:
    """The digest of the simulator's model: the same plan, clients, entropy and survivors."""
    federation = simulation(bundle, ScriptedEntropy(SCRIPT.encode()))
    ended = [e for e in federation.run(rounds) if isinstance(e, RoundFinished)]
    assert len(ended) == rounds
    return federation.model.digest.hex()


def demonstrate(scheme: str, rounds: int) -> bool:
    """One scheme; whether its model is the simulator's."""
    started = time.monotonic()
    with deployed(scheme, rounds) as parties:
        until_opened(parties, 1)
        parties.kill("client-3")
        print(f"{scheme}: client 3 is killed in round 1, and comes back")
        parties.start("client-3")
        until_opened(parties, 3)
        parties.kill("leader")
        print(f"{scheme}: the leader is killed in round 3, and comes back")
        parties.start("leader")
        for name, process in parties.running.items():
            if process.wait(120) != 0:
                print(parties.log(name).read_text(encoding="utf-8")[-2000:])
                raise SystemExit(f"{name} ended with status {process.returncode}")
        outcomes = [json.loads(str(e["outcome"])) for e in parties.events() if "outcome" in e]
        model = [e["model"] for e in parties.events("stopped")][-1]
    for each in outcomes:
        print(f"{scheme}: round {each['round_id']}: {each['survivors']} of {CLIENTS} in the sum")
    same = model == simulated(parties.bundle, rounds) and len(outcomes) == rounds
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
