"""The noise of a deployed leader and helper, killed on the way, is that of the mechanism claimed.

z are impulses by stream (`noise_map.py`), so that what a server adds shows which rounds' secrets it
had: one that was drawn again after a restart would be another stream.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from noise_map import impulses, worst
from rounds.population import plan
from services.service_lab import Lab
from tessera.crypto.correlated import BandedInverse
from tessera.crypto.entropy import SystemEntropy
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, Party
from tessera.plan import DPPlan, Plan, SimulationPlan, Trust
from tessera.privacy.dp.correlation import Correlation
from tessera.privacy.dp.participation import Participation
from tessera.rounds.noise_chain import NoiseChain
from tessera.services.bundle import pack_synthetic
from tessera.services.journal_stores import CHAIN, JournalKeys

ROUNDS, KILLED = 5, range(2, 200, 3)
BOUND = Participation(rounds=ROUNDS, most=2, separation=3)
INVERSE = BandedInverse((-8388608, -2097152))
CLAIM = Correlation(INVERSE, BOUND).sensitivity


def planned(scheme: str, trust: str, rounds: int = ROUNDS) -> Plan:
    section = DPPlan(
        unit="user",
        trust=Trust(trust),
        noise=2.0,
        clip=0.5,
        correlated=True,
        coefficients=", ".join(map(str, INVERSE.terms)),
    )
    return plan(scheme, cohort=3, dp=section, simulation=SimulationPlan(rounds=rounds))


def lab_of(settings: Plan, folder: Path) -> Lab:
    """With real entropy: nothing that is drawn twice is the same by chance."""
    lab = Lab(settings, folder, entropy=SystemEntropy)
    if lab.two is not None:
        lab.two.entropy = SystemEntropy()
        for party in (SERVER, HELPER):
            lab.kill(party)
            lab.start(party)
    return lab


def killed_on_the_way(settings: Plan, folder: Path, servers: tuple[Party, ...]) -> Lab:
    lab = lab_of(settings, folder)
    before = dict(lab.moments)
    for party in servers:
        lab.kill_at.update({(party, before.get(party, 0) + at): True for at in KILLED})
    many = len(lab.kill_at)
    lab.run(ROUNDS)
    assert many - len(lab.kill_at) > 5 * len(servers), "they were killed"
    return lab


CASES = {
    "a trusted server": (planned("secure-fedavg", "server"), (SERVER,)),
    "two servers": (planned("two-server", "each"), (SERVER, HELPER)),
}


@pytest.mark.parametrize("case", CASES)
def test_restarts_change_nothing_of_what_is_claimed(case, tmp_path, monkeypatch) -> None:
    settings, servers = CASES[case]
    with impulses(monkeypatch) as found:
        lab = killed_on_the_way(settings, tmp_path / "lab", servers)
    for server in servers:
        rows, places = found.matrix(server, killed=True)
        assert places == list(range(ROUNDS)), "one sum in every place"
        assert worst(rows, places, BOUND) <= CLAIM * 1.002
    lab.close()


def test_secrets_drawn_again_after_a_restart_would_show(tmp_path, monkeypatch) -> None:
    """The same with a store that forgets: earlier noise is not what it was."""
    settings, _ = CASES["two servers"]
    kept = JournalKeys.latest

    def forgetful(self):
        return None if self._name == CHAIN else kept(self)

    monkeypatch.setattr(JournalKeys, "latest", forgetful)
    with impulses(monkeypatch) as found:
        lab = lab_of(settings, tmp_path / "lab")
        lab.run(ROUNDS)
    rows, places = found.matrix(HELPER)
    assert places == list(range(ROUNDS))
    covariance = rows @ rows.T
    assert abs(covariance[2, 1]) < 1e-6, "noise that would have cancelled does not"
    lab.close()


@pytest.mark.parametrize("party", [SERVER, HELPER])
def test_old_secrets_are_not_on_disk(party, tmp_path) -> None:
    """Neither in the database nor in its log: p - 1 are left after a round, none after the last."""
    settings, _ = CASES["two servers"]
    lab = lab_of(settings, tmp_path / "lab")
    seen: dict[int, bytes] = {}
    for rounds in range(1, ROUNDS + 1):
        lab.run(rounds)
        chain = JournalKeys(lab.parties[party].journal, party, NoiseChain, CHAIN).latest()
        assert chain is not None and int(chain.round_id) == rounds - 1
        left = 0 if rounds == ROUNDS else min(rounds, INVERSE.draws - 1)
        assert chain.over and len(chain.secrets) == left
        seen |= {at: secret.reveal() for at, secret in chain.known.items()}
    folder = lab.parties[party].journal.path.parent
    data = b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
    there = [at for at, secret in sorted(seen.items()) if secret in data]
    assert len(seen) == ROUNDS - 1 and there == []
    lab.close()


def test_a_bundle_without_the_size_of_its_noise_is_refused() -> None:
    """Read as "the least for the budget" by the account, and as none by the servers."""
    settings, _ = CASES["two servers"]
    packed = pack_synthetic(settings, 6, 3)
    assert packed.plan.dp.noise and packed.plan.dp.coefficients
    for left_open in ({"noise": 0.0, "epsilon": 9.0}, {"coefficients": ""}):
        plan = replace(packed.plan, dp=replace(packed.plan.dp, **left_open))
        with pytest.raises(ConfigError, match="leaves this open"):
            replace(packed, plan=plan)
