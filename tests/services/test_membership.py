"""What `tessera keys` writes about fixed groups, and what a client refuses to join."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rounds.population import plan as lab_plan
from tessera import wire
from tessera.cli.main import main
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import (
    ConfigError,
    ForkedSnapshot,
    GroupFault,
    SkippedSnapshot,
    TwoGroups,
    WrongBeacon,
    WrongMember,
    WrongSignature,
)
from tessera.ids import SERVER, ClientId
from tessera.plan import Plan
from tessera.protocols.membership.proof import GroupProof
from tessera.services.journal import Journal
from tessera.services.keyring import AUTHORITY, DIRECTORY, Keyring, folder_of, make_keys
from tessera.services.membership import BEACON, PROOF, groups_of, join_group, joined_group

BUNDLE, CLIENTS, SIZE = b"b" * 32, 13, 4


@pytest.fixture(scope="module")
def plan() -> Plan:
    return lab_plan("secure-submodel", cohort=8, groups={"size": SIZE, "small": True})


def written(folder: Path, plan: Plan, *, script: bytes = b"groups", size: int = SIZE) -> Path:
    clients = [ClientId(c) for c in range(CLIENTS)]
    entropy = ScriptedEntropy(script)
    make_keys(folder, BUNDLE, plan.federation, clients, entropy, ["localhost"], group=size)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> Path:
    return written(tmp_path_factory.mktemp("keys"), plan)


def ring(folder: Path, client: int) -> Keyring:
    here = folder if folder.name == "client" else folder / f"client-{client}"
    return Keyring.read(here, ClientId(client), BUNDLE)


def in_groups(made: Path) -> list[int]:
    return [c for c in range(CLIENTS) if (made / f"client-{c}" / PROOF).exists()]


def test_each_client_finds_the_group_that_the_leader_has(made: Path, plan: Plan) -> None:
    leader = Keyring.read(made / "leader", SERVER, BUNDLE)
    groups = groups_of(leader.draws(plan), plan)
    assert len(groups) == CLIENTS // SIZE
    for client in in_groups(made):
        found = ring(made, client).group(plan)
        (own,) = [group for group in groups if client in group.members]
        assert found.group == own and found.group.digest == own.digest
        assert found.on_the_operators_word
        assert "one operator holds both values of the beacon" in found.reasons


def test_a_folder_has_no_client_outside_its_group(made: Path, plan: Plan) -> None:
    everybody = Keyring.read(made / "leader", SERVER, BUNDLE).directory.clients
    for client in in_groups(made):
        keyring = ring(made, client)
        assert set(keyring.directory.clients) == {client}
        members = keyring.group(plan).group.members
        texts = [each.read_bytes() for each in (made / f"client-{client}").iterdir()]
        for other, key in everybody.items():
            there = any(key in text or key.hex().encode() in text for text in texts)
            assert there == (other in members), f"client {client} has the key of {other}"


def test_who_is_left_over_has_no_group_yet(made: Path, plan: Plan) -> None:
    (left,) = set(range(CLIENTS)) - set(in_groups(made))
    with pytest.raises(ConfigError, match=f"client {left} was left over when groups of 4"):
        ring(made, left).group(plan)


def test_both_chains_are_kept_by_their_parties_and_by_nobody_else(made: Path) -> None:
    secrets = {made / name / BEACON for name in ("leader", "authority")}
    assert set(made.rglob(BEACON)) == secrets
    assert len({each.read_bytes() for each in secrets}) == 2
    assert all(each.stat().st_mode & 0o077 == 0 for each in secrets)


def test_without_fixed_groups_everybody_has_the_directory(tmp_path: Path, plan: Plan) -> None:
    written(tmp_path, plan, size=0)
    assert len(ring(tmp_path, 3).directory.clients) == CLIENTS
    assert not list(tmp_path.rglob(PROOF)) and not list(tmp_path.rglob(BEACON))


# --- proofs that are not right --------------------------------------------------------------------


def other_leaf(proof: GroupProof) -> GroupProof:
    first, *rest = proof.members
    leaf = replace(first.leaf, client=ClientId(99))
    return replace(proof, members=(replace(first, leaf=leaf), *rest))


def other_order(proof: GroupProof) -> GroupProof:
    return replace(proof, members=tuple(reversed(proof.members)))


def other_number(proof: GroupProof) -> GroupProof:
    return replace(proof, number=(proof.number + 1) % CLIENTS)


def no_path(proof: GroupProof) -> GroupProof:
    first, *rest = proof.members
    return replace(proof, members=(replace(first, path=first.path[:-1]), *rest))


def one_value(proof: GroupProof) -> GroupProof:
    *before, last = proof.history
    return replace(proof, history=(*before, replace(last, reveals=last.reveals[:1])))


def other_value(proof: GroupProof) -> GroupProof:
    *before, last = proof.history
    first, second = last.reveals
    changed = replace(last, reveals=(first, replace(second, value=bytes(32))))
    return replace(proof, history=(*before, changed))


def no_end(proof: GroupProof) -> GroupProof:
    return replace(proof, history=proof.history[:1])


def other_root(proof: GroupProof) -> GroupProof:
    *before, last = proof.history
    changed = replace(last, snapshot=replace(last.snapshot, root=bytes(32)))
    return replace(proof, history=(*before, changed))


BAD: dict[Callable[[GroupProof], GroupProof], type[GroupFault]] = {
    other_leaf: WrongMember,
    other_order: WrongMember,
    other_number: GroupFault,  # another client's place, or that of one who is left over
    no_path: WrongMember,
    one_value: WrongBeacon,
    other_value: WrongSignature,
    no_end: SkippedSnapshot,
    other_root: WrongSignature,
}


@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_a_proof_that_was_changed_is_refused_by_name(
    made: Path, plan: Plan, tmp_path: Path, change: Callable[[GroupProof], GroupProof]
) -> None:
    client = in_groups(made)[0]
    folder = tmp_path / "client"
    shutil.copytree(made / f"client-{client}", folder)
    proof = wire.decode((folder / PROOF).read_bytes(), expect=[GroupProof])
    (folder / PROOF).write_bytes(wire.encode(change(proof)))
    with pytest.raises(BAD[change]) as refused:
        ring(folder, client).group(plan)
    assert refused.value.hint


def test_snapshots_of_another_beginning_are_a_fork(made: Path, plan: Plan, tmp_path: Path) -> None:
    """The same authority signs a second snapshot 0, with chains that suit it better."""
    other = written(tmp_path / "other", replace(plan, seed=4), script=b"better")
    client, folder = in_groups(made)[0], tmp_path / "client"
    shutil.copytree(made / f"client-{client}", folder)
    shutil.copy(other / f"client-{in_groups(other)[0]}" / PROOF, folder / PROOF)
    with pytest.raises(ForkedSnapshot, match="not the one that this client was told"):
        ring(folder, client).group(plan)


def test_bytes_that_are_no_proof(made: Path, plan: Plan, tmp_path: Path) -> None:
    client, folder = in_groups(made)[0], tmp_path / "client"
    shutil.copytree(made / f"client-{client}", folder)
    (folder / PROOF).write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"group-proof: not what `tessera keys` wrote"):
        ring(folder, client).group(plan)


def test_a_client_has_one_group_in_its_life(made: Path, plan: Plan, tmp_path: Path) -> None:
    """A leader makes keys once more, with the same client's: its journal has its first group."""
    client = in_groups(made)[0]
    first = ring(made, client).group(plan).group
    with Journal.open(tmp_path / "state", owner="client", plan=BUNDLE) as journal:
        assert joined_group(journal, "client") is None
        join_group(journal, "client", ring(made, client).group(plan))
        assert joined_group(journal, "client") == first
        again = ring(made, client).group(plan, joined_group(journal, "client"))
        assert again.group == first
        with pytest.raises(TwoGroups, match=f"client {client} has a group of snapshot 1"):
            ring(made, client).group(replace(plan, seed=5), first)


def test_the_command_says_on_whose_word_groups_are(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.toml"
    plan = (
        'scheme = "secure-submodel"\ncohort = 4\n[model]\ndense = 2\n'
        '[[table]]\nname = "goods"\nrows = 60\nwidth = 2\n[union]\nmax_rows = 12\n'
        "[groups]\nsize = 2\n"
    )
    bundle, keys = str(tmp_path / "bundle.npz"), str(tmp_path / "keys")
    path.write_text(plan)
    assert main(["pack", str(path), "--out", bundle, "--clients", "5"]) == 0
    assert main(["keys", bundle, "--out", keys]) == 2
    assert "groups of 2 are drawn among at least 20" in capsys.readouterr().err
    path.write_text(plan + "small = true\n")
    assert main(["pack", str(path), "--out", bundle, "--clients", "5"]) == 0
    assert main(["keys", bundle, "--out", keys]) == 0
    out = capsys.readouterr().out
    assert "2 groups of 2, 1 clients left over; groups on the operator's word" in out
    assert (tmp_path / "keys" / folder_of(SERVER) / DIRECTORY).exists()
    assert (tmp_path / "keys" / "authority" / AUTHORITY).exists()
