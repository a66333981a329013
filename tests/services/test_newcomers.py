"""`tessera keys --add`: later snapshots of newcomers, void snapshots, and calls that are killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rounds.population import plan as lab_plan
from services.group_lab import Visits
from tessera import wire
from tessera.cli.main import main
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import (
    ConfigError,
    ForkedSnapshot,
    GroupFault,
    SkippedSnapshot,
    SmallSnapshot,
    TwoGroups,
    WrongBeacon,
    WrongMember,
)
from tessera.ids import SERVER, ClientId
from tessera.plan import Plan
from tessera.protocols.membership.draw import Draw, void_before
from tessera.protocols.membership.proof import GroupProof, SnapshotLink
from tessera.services import membership
from tessera.services.bundle import pack_synthetic
from tessera.services.deployment import open_clients, open_leader, synthetic_maker
from tessera.services.group_leader import epochs_in
from tessera.services.journal import state_of
from tessera.services.keyring import DIRECTORY, SIGN, KeyFolders, Keyring, folder_of, make_keys
from tessera.services.loopback import ReplayedGroups, simulation
from tessera.services.membership import BEACON, PROOF, groups_of, write_once

BUNDLE, FIRST, MORE, SIZE = b"b" * 32, 13, 7, 4
FEW = 3
"""With the one who was left over they are a group."""
SCRIPT = b"newcomers"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return lab_plan("secure-submodel", cohort=8, groups={"size": SIZE, "small": True})


def first_keys(folder: Path, plan: Plan) -> Path:
    clients = [ClientId(c) for c in range(FIRST)]
    entropy = ScriptedEntropy(SCRIPT)
    make_keys(folder, BUNDLE, plan.federation, clients, entropy, ["localhost"], group=SIZE)
    return folder


def folders(keys: Path) -> KeyFolders:
    return KeyFolders(keys, BUNDLE, SIZE)


def add(keys: Path, count: int = MORE) -> list[Draw]:
    return folders(keys).add(count, ScriptedEntropy(SCRIPT), small=True)


def void(keys: Path, count: int = MORE) -> list[Draw]:
    """A snapshot that the leader's value is withheld for, and that is given up."""
    path = keys / "leader" / BEACON
    hidden = path.rename(keys / "hidden")
    with pytest.raises(ConfigError, match=r"waits for a value of the beacon: .*beacon\.key"):
        add(keys, count)
    found = folders(keys).void()
    hidden.rename(path)
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file()
    }


def number_of(name: str) -> int | None:
    """Whose folder a file is in; None of servers."""
    folder = name.split("/")[0]
    return int(folder.removeprefix("client-")) if folder.startswith("client-") else None


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> Path:
    return first_keys(tmp_path_factory.mktemp("first") / "keys", plan)


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory, first: Path) -> Path:
    keys = tmp_path_factory.mktemp("added") / "keys"
    shutil.copytree(first, keys)
    add(keys)
    return keys


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory, added: Path) -> Path:
    """Two snapshots, then a void one of five clients, and one in which these have their groups."""
    keys = tmp_path_factory.mktemp("later") / "keys"
    shutil.copytree(added, keys)
    void(keys, 5)
    add(keys, 3)
    return keys


@pytest.fixture
def keys(tmp_path: Path, first: Path) -> Path:
    shutil.copytree(first, tmp_path / "keys")
    return tmp_path / "keys"


def ring(keys: Path, client: int) -> Keyring:
    here = keys if keys.name == "client" else keys / f"client-{client}"
    return Keyring.read(here, ClientId(client), BUNDLE)


def leaders_draws(keys: Path, plan: Plan) -> list[Draw]:
    return Keyring.read(keys / "leader", SERVER, BUNDLE).draws(plan)


# --- what is added --------------------------------------------------------------------------------


def test_whoever_has_a_group_keeps_it_to_the_byte(first: Path, added: Path, plan: Plan) -> None:
    before, after = content(first), content(added)
    changed = {name for name, data in before.items() if after[name] != data}
    assert changed == {f"{party}/{DIRECTORY}" for party in ("leader", "helper", "authority")}
    (waited,) = leaders_draws(first, plan)[1].left_over
    new = after.keys() - before.keys()
    old = {name for name in new if (at := number_of(name)) is not None and at < FIRST}
    assert old == {f"client-{waited.client}/{PROOF}"}
    kept = groups_of(leaders_draws(first, plan), plan)
    assert groups_of(leaders_draws(added, plan), plan)[: len(kept)] == kept


@pytest.mark.parametrize("state", ["added", "later"])
def test_each_client_finds_the_group_that_the_leader_has(
    state: str, plan: Plan, request: pytest.FixtureRequest
) -> None:
    keys: Path = request.getfixturevalue(state)
    draws = leaders_draws(keys, plan)
    void_of = void_before(draws)
    groups = groups_of(draws, plan)
    assert len({group.digest for group in groups}) == len(groups) == {"added": 5, "later": 7}[state]
    members = [client for group in groups for client in group.members]
    assert len(set(members)) == len(members) == SIZE * len(groups)
    for group in groups:
        for client in group.members:
            found = ring(keys, client).group(plan)
            assert found.group == group and found.void == void_of[client]


def test_a_newcomer_is_told_the_snapshot_before_its_own(added: Path, plan: Plan) -> None:
    draws = leaders_draws(added, plan)
    for client in range(FIRST + MORE):
        directory = ring(added, client).directory
        at = 0 if client < FIRST else 1
        assert (directory.anchor, directory.anchor_number) == (draws[at].snapshot.digest, at)
        assert set(directory.clients) == {client}


def test_values_belong_to_their_numbers_used_or_not(later: Path, plan: Plan) -> None:
    draws = leaders_draws(later, plan)
    assert [draw.void for draw in draws] == [True, False, False, True, False]
    assert [draw.snapshot.number for draw in draws] == [0, 1, 2, 3, 4]
    assert [reveal.number for reveal in draws[4].reveals] == [4, 4]
    again = {leaf.client for leaf in draws[3].leaves}
    assert again < {leaf.client for leaf in draws[4].leaves} and len(draws[4].leaves) == 8
    assert sorted(void_before(draws).values()) == [0] * 23 + [1] * 5


def test_the_next_snapshot_may_be_of_those_who_wait_only(keys: Path) -> None:
    void(keys, MORE)
    draws = add(keys, 0)
    assert [draw.void for draw in draws] == [True, False, True, False]
    assert set(draws[3].leaves) == set(draws[2].leaves)
    assert {void_before(draws)[client] for client in draws[3].members} == {1}


# --- proofs that are not right --------------------------------------------------------------------


def twice_waited(later: Path, plan: Plan) -> int:
    """A client whose group was drawn after a void snapshot."""
    counts = void_before(leaders_draws(later, plan))
    return next(int(client) for client, void in counts.items() if void)


def hidden_void(proof: GroupProof, _: Path) -> GroupProof:
    return replace(proof, history=(proof.history[0], *proof.history[2:]))


def void_with_other_clients(proof: GroupProof, _: Path) -> GroupProof:
    link = proof.history[1]
    other = replace(link, snapshot=replace(link.snapshot, leaves=4))
    return replace(proof, history=(proof.history[0], other, *proof.history[2:]))


def forked(proof: GroupProof, keys: Path) -> GroupProof:
    """A second snapshot of that number, rightly signed, from another root."""
    link = proof.history[1]
    other = replace(link.snapshot, root=bytes(32)).signed(folders(keys)._key)
    history = (proof.history[0], replace(link, snapshot=other), *proof.history[2:])
    return replace(proof, history=history)


def values_of_the_void_one(proof: GroupProof, keys: Path) -> GroupProof:
    *before, last = proof.history
    old = wire.decode((keys / "leader" / "drawn-2").read_bytes(), expect=[SnapshotLink]).reveals
    return replace(proof, history=(*before, replace(last, reveals=old)))


def other_peer(proof: GroupProof, _: Path) -> GroupProof:
    return replace(proof, members=(*proof.members[1:], proof.members[0]))


def other_number(proof: GroupProof, _: Path) -> GroupProof:
    return replace(proof, number=(proof.number + 1) % 8)


BAD: dict[Callable[[GroupProof, Path], GroupProof], type[GroupFault]] = {
    hidden_void: SkippedSnapshot,
    void_with_other_clients: GroupFault,
    forked: ForkedSnapshot,
    values_of_the_void_one: WrongBeacon,
    other_peer: WrongMember,
    other_number: WrongMember,
}


@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_a_proof_that_was_changed_is_refused_by_name(
    later: Path,
    plan: Plan,
    tmp_path: Path,
    change: Callable[[GroupProof, Path], GroupProof],
) -> None:
    client, folder = twice_waited(later, plan), tmp_path / "client"
    shutil.copytree(later / f"client-{client}", folder)
    proof = wire.decode((folder / PROOF).read_bytes(), expect=[GroupProof])
    assert ring(folder, client).group(plan).void == 1
    (folder / PROOF).write_bytes(wire.encode(change(proof, later)))
    with pytest.raises(BAD[change]) as refused:
        ring(folder, client).group(plan)
    assert refused.value.hint


def test_a_group_of_the_first_snapshot_and_one_of_the_next(added: Path, plan: Plan) -> None:
    """Its journal has a group, and its folder the proof of another one."""
    draws = leaders_draws(added, plan)
    (waited,) = draws[1].left_over
    with pytest.raises(TwoGroups, match=f"client {waited.client} has a group of snapshot 1"):
        ring(added, waited.client).group(plan, draws[1].group(0, plan.lasting_digest))


def test_few_newcomers_are_refused_by_client_and_command(added: Path, keys: Path) -> None:
    strict = lab_plan("secure-submodel", cohort=8, groups={"size": SIZE})
    with pytest.raises(SmallSnapshot, match="7 newcomers, fewer than 10 groups of 4"):
        ring(added, FIRST).group(strict)
    with pytest.raises(ConfigError, match="--add 7: groups of 4 are drawn among at least 40"):
        folders(keys).add(7, ScriptedEntropy(SCRIPT), small=False)
    with pytest.raises(ConfigError, match="--add 2: with 1 who wait there is no group of 4"):
        add(keys, 2)
    assert not (keys / f"client-{FIRST}").exists()
    draws = folders(keys).add(40, ScriptedEntropy(SCRIPT), small=False)
    assert draws[2].groups == 10
    newcomer = next(client for client in draws[2].members if client >= FIRST)
    assert ring(keys, newcomer).group(strict).reasons == (
        "one operator holds both values of the beacon",
    )


# --- calls that are killed ------------------------------------------------------------------------


class Killed(BaseException):
    """As good as SIGKILL: nothing here catches it."""


class Watched:
    """Stops before or after the k-th write, and remembers what values were revealed for."""

    def __init__(self) -> None:
        self.writes = 0
        self.kill_at = (-1, "")
        self.revealed: dict[tuple[int, int], set[bytes]] = {}

    def __call__(self, path: Path, content: bytes) -> None:
        here, self.writes = self.writes, self.writes + 1
        if self.kill_at == (here, "before"):
            raise Killed
        write_once(path, content)
        if path.name.startswith(("value-", "drawn-")):
            found = wire.decode(content)
            for reveal in getattr(found, "reveals", (found,)):
                seen = self.revealed.setdefault((reveal.party, reveal.number), set())
                seen.add(reveal.snapshot)
        if self.kill_at == (here, "after"):
            raise Killed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr("os.fsync", lambda _: None)  # hundreds of calls of it
    for module in ("membership", "keyring"):
        monkeypatch.setattr(f"tessera.services.{module}.write_once", found)
    return found


def test_a_killed_call_is_gone_on_with_to_the_same_bytes(
    first: Path, tmp_path: Path, watched: Watched
) -> None:
    """Wherever it was killed: between snapshot, first value, last value and what follows."""
    shutil.copytree(first, tmp_path / "whole")
    add(tmp_path / "whole", FEW)
    stops = 0
    for number in range(10_000):
        keys = tmp_path / str(number)
        shutil.copytree(first, keys)
        watched.writes, watched.kill_at = 0, (number // 2, ("before", "after")[number % 2])
        try:
            add(keys, FEW)
        except Killed:
            stops += 1
        else:
            break
        watched.kill_at = (-1, "")
        if not (keys / "leader" / "drawn-2").exists():  # else it had ended
            add(keys, FEW)
        assert content(keys) == content(tmp_path / "whole")
        shutil.rmtree(keys)
    assert stops > 2 * (FEW + 8)
    assert watched.revealed and all(len(each) == 1 for each in watched.revealed.values())


def test_no_number_is_drawn_twice_whatever_is_tried_after_a_kill(
    first: Path, tmp_path: Path, watched: Watched
) -> None:
    """Who dislikes a draw: others in the same number, or giving up what was decided."""
    outcomes = set()
    for number in range(10_000):
        keys = tmp_path / str(number)
        shutil.copytree(first, keys)
        watched.writes, watched.kill_at = 0, (number // 2, ("before", "after")[number % 2])
        try:
            add(keys, FEW)
        except Killed:
            pass
        else:
            break
        watched.kill_at = (-1, "")
        begun = (keys / "authority" / "newcomers-2").exists()
        decided = (keys / "authority" / "drawn-2").exists()
        ended = (keys / "leader" / "drawn-2").exists()
        if begun and not ended:
            with pytest.raises(ConfigError, match="3 newcomers was begun") as refused:
                add(keys, MORE)
            assert "--void gives it up" in refused.value.hint
        try:
            folders(keys).void()
        except ConfigError as error:
            assert not begun or decided, error
            draws = folders(keys).snapshots.draws if ended else add(keys, FEW)
            assert [draw.void for draw in draws] == [True, False, False]
        else:
            assert begun and not decided
            draws = add(keys, MORE)
            assert [draw.void for draw in draws] == [True, False, True, False]
        outcomes.add((begun, decided, len(draws)))
        shutil.rmtree(keys)
    assert outcomes == {(False, False, 3), (True, False, 4), (True, True, 3)}
    for (party, value), seen in watched.revealed.items():
        most = 1 if value < 3 else 2  # value 3 of two histories: with and without a value 2
        assert len(seen) <= most, (party, value)


@pytest.mark.parametrize("last", ["snapshot-2", "value-2", "drawn-2"])
def test_a_party_that_has_revealed_refuses_another_snapshot(
    keys: Path, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the leader's file of this name; then the authority's folder is put back to
    before the snapshot, and others are admitted."""
    shutil.copytree(keys / "authority", keys.parent / "backup")

    def until(path: Path, data: bytes) -> None:
        write_once(path, data)
        if path == keys / "leader" / last:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(membership, "write_once", until)
        add(keys)
    (keys / "leader" / "drawn-2").unlink(missing_ok=True)
    shutil.rmtree(keys / "authority")
    shutil.copytree(keys.parent / "backup", keys / "authority")
    with pytest.raises(ForkedSnapshot, match="snapshot 2: does not follow"):
        add(keys, 11)


def test_two_calls_at_once_make_one_snapshot(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(path: Path, data: bytes) -> None:
        monkeypatch.setattr(membership, "write_once", write_once)
        if path.name == "newcomers-2":
            add(keys, 11)
        write_once(path, data)

    monkeypatch.setattr(membership, "write_once", beside)
    with pytest.raises(ConfigError, match="was written before, with other content"):
        add(keys)
    assert len(folders(keys).snapshots.draws[2].leaves) == 12


# --- commands -------------------------------------------------------------------------------------

TOML = """
scheme = "secure-submodel"
cohort = 4
federation = "walked"
[model]
dense = 2
[[table]]
name = "goods"
rows = 60
width = 2
[union]
max_rows = 12
[groups]
size = {size}
small = true
"""


def packed(folder: Path, text: str = TOML.format(size=2)) -> list[str]:
    (folder / "plan.toml").write_text(text)
    bundle = str(folder / "bundle.npz")
    assert main(["pack", str(folder / "plan.toml"), "--out", bundle, "--clients", "5"]) == 0
    return ["keys", bundle, "--out", str(folder / "keys")]


def test_the_command_adds_clients_and_says_what_came_of_it(tmp_path: Path, capsys: Any) -> None:
    line = packed(tmp_path)
    assert main([*line, "--add", "3"]) == 2
    assert "sign.key: there is no key" in capsys.readouterr().err
    assert main(line) == 0
    assert main(line) == 2
    told = capsys.readouterr().err
    assert "error: " in told and "there are keys already" in told
    assert "hint: --add N adds clients to these; another --out begins anew" in told
    assert main([*line, "--void"]) == 2
    assert "no snapshot waits for a value" in capsys.readouterr().err
    assert main([*line, "--add", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 more clients, client-5 to client-8" in out
    assert "snapshot 2: 2 new groups of 2, 1 clients left over; groups on the operator's" in out
    beacon = tmp_path / "keys" / "leader" / BEACON
    beacon.rename(tmp_path / "aside")
    assert main([*line, "--add", "4"]) == 2
    told = capsys.readouterr().err
    assert "snapshot 3 waits for a value of the beacon" in told and "--void gives this" in told
    assert main([*line, "--void"]) == 0
    assert "snapshot 3 is void: its 5 clients are in the next one" in capsys.readouterr().out
    (tmp_path / "aside").rename(beacon)
    assert main([*line, "--add", "1"]) == 0
    out = capsys.readouterr().out
    assert "snapshot 4: 3 new groups of 2, 0 clients left over" in out
    assert "5 who had waited have a group now" in out
    assert "B is 0.600 on average" in out and "after 1 void snapshot" in out


def test_what_does_not_go_together_is_refused(tmp_path: Path, capsys: Any) -> None:
    line = packed(tmp_path)
    assert main(line) == 0
    for more in (["--add", "3", "--clients", "5"], ["--add", "3", "--void"]):
        assert main([*line, *more]) == 2
        assert "do not go together" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    text = TOML.split("[groups]")[0].replace("secure-submodel", "secure-fedavg")
    line = packed(other, text)
    assert main(line) == 0
    assert main([*line, "--add", "3"]) == 2
    assert "clients are added in fixed groups, and this plan has none" in capsys.readouterr().err


# --- a federation that goes on --------------------------------------------------------------------


class Deployed(Visits):
    """A leader and synthetic clients over their folders of keys and states."""

    def __init__(self, folder: Path, clients: list[int]) -> None:
        plan = Plan.parse(TOML.format(size=4).replace("cohort = 4", "cohort = 8"))
        self.folder, self.bundle, self.sent = folder, pack_synthetic(plan, 24, 5), {}
        self.plan, self.keys = self.bundle.plan, folder / "keys"
        if not self.keys.exists():
            names, entropy = ["localhost"], ScriptedEntropy(SCRIPT)
            everybody = [ClientId(c) for c in clients]
            digest, name = self.bundle.digest, plan.federation
            make_keys(self.keys, digest, name, everybody, entropy, names, group=4)
        self.parties = {}
        for client in map(ClientId, clients):
            own = Keyring.read(self.keys / folder_of(client), client, self.bundle.digest)
            (self.parties[client],) = open_clients(
                self.bundle,
                [own],
                folder / folder_of(client),
                ScriptedEntropy(SCRIPT),
                synthetic_maker(self.bundle),
            )
        self.parties[SERVER] = self.opened_leader()

    def opened_leader(self) -> Any:
        entropy = ScriptedEntropy(SCRIPT)
        return open_leader(self.bundle, self.keys / "leader", self.folder / "leader", entropy)

    def run(self, rounds: int) -> None:
        rng = np.random.default_rng(rounds)
        clients = [party for party in self.parties if not isinstance(party, str)]
        for _ in range(100):
            for at in rng.permutation(len(clients)):
                if self.leader.next_round >= rounds:
                    return
                self.visit(clients[at], once=True)
        raise AssertionError(f"{self.leader.next_round} of {rounds} rounds")

    def close(self) -> None:
        for party in self.parties.values():
            party.journal.close()


def test_newcomers_train_beside_the_groups_that_there_are(tmp_path: Path) -> None:
    """Each snapshot has a group 0, and both count. The model is the simulator's, to the bit."""
    lab = Deployed(tmp_path, list(range(8)))
    lab.run(2)
    lab.close()
    folders = KeyFolders(lab.keys, lab.bundle.digest, 4)
    draws = folders.add(16, ScriptedEntropy(SCRIPT), small=True)
    again = Deployed(tmp_path, list(range(24)))
    again.run(6)
    groups = groups_of(draws, lab.plan)
    assert again.leader.groups == tuple(groups) and len(groups) == 6
    assert [group.number for group in groups] == [0, 1, 0, 1, 2, 3]
    places = epochs_in(tmp_path / "leader")
    merged = {each.part for each in places if each.closed is not None and each.opened >= 2}
    assert len(merged & {0, 1}) and len(merged & {2, 3, 4, 5})
    same = simulation(lab.bundle, ScriptedEntropy(SCRIPT), groups=groups)
    assert isinstance(same, ReplayedGroups)
    same.replay(places, 6)
    assert again.leader.model.digest == same.model.digest
    again.close()


def test_void_snapshots_are_in_the_state_of_leader_and_client(tmp_path: Path) -> None:
    lab = Deployed(tmp_path, list(range(8)))
    lab.close()
    beacon = lab.keys / "leader" / BEACON
    hidden = beacon.rename(tmp_path / "hidden")
    folders = KeyFolders(lab.keys, lab.bundle.digest, 4)
    with pytest.raises(ConfigError, match="snapshot 2 waits"):
        folders.add(8, ScriptedEntropy(SCRIPT), small=True)
    folders.void()
    void = lab.opened_leader()  # goes on with the groups that there are
    assert len(void.groups) == 2 and void.drawn.void == 0
    void.journal.close()
    hidden.rename(beacon)
    folders = KeyFolders(lab.keys, lab.bundle.digest, 4)
    folders.add(0, ScriptedEntropy(SCRIPT), small=True)
    again = Deployed(tmp_path, list(range(16)))
    assert len(again.leader.groups) == 4 and again.leader.drawn.void == 1
    assert "100% of clients, after 1 void snapshot" in again.leader.drawn.in_words(0.2)
    assert again.parties[ClientId(9)].group.void == 1
    again.close()
    assert state_of(tmp_path / "client-9")["void"] == 1
    assert state_of(tmp_path / "client-3")["void"] == 0


def test_a_directory_of_other_clients_is_refused(added: Path, first: Path, plan: Plan) -> None:
    folder = added.parent / "mixed"
    shutil.copytree(added / "leader", folder)
    shutil.copy(first / "leader" / DIRECTORY, folder / DIRECTORY)
    with pytest.raises(ConfigError, match="other clients than those of the directory"):
        Keyring.read(folder, SERVER, BUNDLE).draws(plan)
    (folder / "newcomers-2").unlink()
    with pytest.raises(ConfigError, match="newcomers-2: not what `tessera keys` wrote"):
        Keyring.read(folder, SERVER, BUNDLE).draws(plan)


def test_keys_of_newcomers_are_their_own(added: Path) -> None:
    signs = {(added / f"client-{c}" / SIGN).read_bytes() for c in range(FIRST + MORE)}
    assert len(signs) == FIRST + MORE
    whole = json.loads(json.loads((added / "leader" / DIRECTORY).read_text())["directory"])
    assert len(whole["clients"]) == FIRST + MORE
