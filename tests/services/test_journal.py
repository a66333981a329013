"""The journal refuses what is not its own, and a step that is not on disk has not happened."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rounds.population import plan
from services.service_lab import Lab, outgoing, standing_of
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, ClientId, RoundId, TableId
from tessera.learning.compression import Residual
from tessera.learning.tables.submodel import TablePart
from tessera.privacy.dp.events import EVERYBODY, ExactRelease, IndexAnswers, NoisySum, seen, views
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.mechanism import FixedSizeNoise, GaussianNoise, PureLevel, Unseen
from tessera.privacy.index.period import MemoryPeriods, freeze
from tessera.privacy.index.response import IndexPrivacy
from tessera.rounds.party import LocalState
from tessera.services.journal import NAME, Journal, JournalFailed
from tessera.services.journal_stores import (
    JournalPeriods,
    JournalReplayGuard,
    JournalRows,
    event_of,
    event_text,
    load_local,
    save_local,
)
from tessera.services.leader import MOST_MESSAGES, MessageRequest
from tessera.services.link import Link, Links, LinkStanding, NumberConflict, Numbered, OldCopy

PLAN = b"p" * 32


def journal(folder: Path, owner: str = "client 1", plan: bytes = PLAN) -> Journal:
    return Journal.open(folder, owner=owner, plan=plan)


def the_link(here: Journal, party: str, peer: str) -> Link:
    return Links(here, party, [peer])[peer]


def test_it_belongs_to_one_party_and_one_plan(tmp_path: Path) -> None:
    journal(tmp_path).close()
    with pytest.raises(ConfigError, match="the state of client 1, not of client 2"):
        journal(tmp_path, owner="client 2")
    with pytest.raises(ConfigError, match="belongs to plan 7070707070707070, this is plan 7171"):
        journal(tmp_path, plan=b"q" * 32)
    with journal(tmp_path) as again:
        assert again.starts == 2, "refused openings do not count"


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with journal(tmp_path), pytest.raises(ConfigError, match="another process has this state"):
        journal(tmp_path)
    journal(tmp_path).close()


def test_a_damaged_file_and_one_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="cannot open it"):
        journal(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    database = sqlite3.connect(other / NAME)
    database.execute("CREATE TABLE recipes (name)")
    database.close()
    with pytest.raises(ConfigError, match="a database of something else"):
        journal(other)
    found = sqlite3.connect(other / NAME).execute("SELECT name FROM sqlite_master").fetchall()
    assert found == [("recipes",)], "it was not changed"


def test_damaged_pages_are_found_when_it_is_opened(tmp_path: Path) -> None:
    """Not only a header that is none: any page with entries in it."""
    lab = Lab(plan("submodel", cohort=3), tmp_path / "lab")
    lab.run(1)
    lab.kill(SERVER)
    path = tmp_path / "lab" / SERVER / NAME
    whole, found = path.read_bytes(), 0
    for at in range(1, len(whole) // 4096):
        if not any(whole[at * 4096 + 8 : (at + 1) * 4096]):
            continue  # an empty one
        path.write_bytes(whole[: at * 4096] + b"\xa5" * 4096 + whole[(at + 1) * 4096 :])
        with pytest.raises(JournalFailed, match=NAME):
            lab.start(SERVER)
        found += 1
    assert found > 10
    path.write_bytes(whole)
    lab.start(SERVER)


def test_a_step_is_all_or_nothing(tmp_path: Path) -> None:
    with journal(tmp_path) as open_journal:
        with pytest.raises(KeyError), open_journal.step():
            open_journal.set_fact("me", "name", b"one")
            raise KeyError
        assert open_journal.fact("me", "name") is None
        with open_journal.step():
            open_journal.set_fact("me", "name", b"two")
            with pytest.raises(MisuseError), open_journal.step():
                pass
        assert open_journal.fact("me", "name") == b"two"


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5000])
def test_a_fact_of_a_step_that_failed_is_forgotten_in_memory_too(tmp_path: Path, size: int) -> None:
    with journal(tmp_path) as here:
        with here.step():
            here.set_fact("client 1", "name", b"a" * size)
        with pytest.raises(RuntimeError), here.step():
            here.set_fact("client 1", "name", b"b" * size)
            assert here.fact("client 1", "name") == b"b" * size
            raise RuntimeError("killed")
        assert here.fact("client 1", "name") == b"a" * size
        with here.step():
            here.set_fact("client 1", "name", b"b" * size)
    with journal(tmp_path) as again:
        assert again.fact("client 1", "name") == b"b" * size


def test_what_a_group_has_changed_is_written_once_at_its_end(tmp_path: Path) -> None:
    written: list[str] = []
    with journal(tmp_path) as here:
        with here.group():
            for _ in range(3):
                with here.step():
                    here.before_commit("a", lambda: written.append("a"))
                    here.before_commit("b", lambda: written.append("b"))
            assert written == []
        assert written == ["a", "b"]
        with pytest.raises(RuntimeError), here.step():
            here.before_commit("c", lambda: written.append("c"))
            raise RuntimeError("killed")
        with here.step():
            here.set_fact("client 1", "name", b"later")
        assert written == ["a", "b"], "of a step that failed nothing is written with the next"


def test_a_number_has_one_content(tmp_path: Path) -> None:
    with journal(tmp_path) as here:
        link = the_link(here, "server", "client 1")
        with here.step():
            link.begin(RoundId(4))
            assert link.repeated(1, b"first") is None
            link.take(1, b"first", "refused for a reason")
        assert link.repeated(1, b"first") == "refused for a reason", "the stored answer"
        with pytest.raises(NumberConflict, match="other bytes"):
            link.repeated(1, b"second")
        with pytest.raises(NumberConflict, match="2 is the next"):
            link.repeated(3, b"third")


def test_messages_are_repeated_until_they_are_acknowledged(tmp_path: Path) -> None:
    with journal(tmp_path) as here:
        link = the_link(here, "client 1", "server")
        with here.step():
            link.begin(RoundId(0))
            link.put(b"one")
            link.put(b"two")
            link.put(b"three", held=True)
    with journal(tmp_path) as here:
        link = the_link(here, "client 1", "server")
        assert link.on_its_way == (Numbered(1, b"one"), Numbered(2, b"two"))
        with here.step():
            link.acknowledge(1)
            link.release()
        assert link.on_its_way == (Numbered(2, b"two"), Numbered(3, b"three"))
        with pytest.raises(OldCopy), here.step():
            link.acknowledge(9)


def test_an_old_copy_is_recognised(tmp_path: Path) -> None:
    with journal(tmp_path) as here:
        link = the_link(here, "client 1", "server")
        with here.step():
            link.begin(RoundId(3))
            link.put(b"one")
        link.must_be_no_old_copy(LinkStanding(RoundId(3), sent=5, received=1, acknowledged=0))
        for old in (
            LinkStanding(RoundId(3), sent=0, received=2, acknowledged=0),
            LinkStanding(RoundId(3), sent=4, received=1, acknowledged=1),
            LinkStanding(RoundId(4), sent=0, received=1, acknowledged=0),
        ):
            with pytest.raises(OldCopy, match="old copy"):
                link.must_be_no_old_copy(old)


def test_a_full_disk_is_no_step(tmp_path: Path) -> None:
    lab = Lab(plan("submodel", cohort=3), tmp_path / "lab")
    leader, client = lab.leader, lab.parties[ClientId(0)]
    leader.open_round()
    client.begin(standing_of(leader, ClientId(0)))
    message = outgoing(client)
    assert message is not None
    request = MessageRequest(ClientId(0), RoundId(0), message)
    database = leader.journal.database
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalFailed, match="full"), leader.journal.step():
        leader.journal.set_fact("somebody", "large", bytes(1_000_000))
    before = standing_of(leader, ClientId(0))
    database.execute(f"PRAGMA max_page_count = {1 << 30}")
    leader.load()
    assert standing_of(leader, ClientId(0)) == before
    (answer,) = leader.handle([request])
    assert answer.taken and not answer.refused, "once there is room it goes on"


# --- what outlives a round ------------------------------------------------------------------------


def test_a_period_is_one_clients_own(tmp_path: Path) -> None:
    asked = {
        "federation": "f",
        "period": 0,
        "privacy": IndexPrivacy.named("cpp4"),
        "real": {TableId(0): np.array([3, 5], dtype=np.uint64)},
    }
    with journal(tmp_path) as here:
        with here.step():
            one = freeze(JournalPeriods(here, "client 1"), entropy=ScriptedEntropy(b"1"), **asked)
            two = freeze(JournalPeriods(here, "client 2"), entropy=ScriptedEntropy(b"2"), **asked)
            JournalPeriods(here, "client 1").count_round("f")
        assert one.secret != two.secret
        assert JournalPeriods(here, "client 1").latest("f").secret == one.secret  # type: ignore[union-attr]
        assert JournalPeriods(here, "client 2").latest("f").secret == two.secret  # type: ignore[union-attr]
        assert JournalPeriods(here, "client 3").latest("f") is None
        assert JournalPeriods(here, "client 1").rounds("f") == 1
        assert JournalPeriods(here, "client 2").rounds("f") == 0


def test_a_helper_remembers_rounds_and_reports_for_ever(tmp_path: Path) -> None:
    with journal(tmp_path) as here:
        guard = JournalReplayGuard(here)
        with here.step():
            assert guard.begin_round(RoundId(9)) and guard.accept(b"report")
            assert not guard.accept(b"report")
            assert not guard.begin_round(RoundId(9)) and not guard.begin_round(RoundId(8))
        guard.replaying = True
        assert guard.begin_round(RoundId(9)) and guard.accept(b"report"), "since the snapshot"
        guard.settle()
        assert not guard.accept(b"report")
    with journal(tmp_path) as here:
        guard = JournalReplayGuard(here)
        assert not guard.accept(b"report") and not guard.begin_round(RoundId(7))
        assert guard.begin_round(RoundId(10))


def test_a_helper_releases_one_share_a_round_for_ever(tmp_path: Path) -> None:
    one, other = bytes(32), bytes(31) + b"x"
    with journal(tmp_path) as here, here.step():
        guard = JournalReplayGuard(here)
        assert guard.release(RoundId(9), one) and guard.release(RoundId(9), one)
        assert not guard.release(RoundId(9), other)
        assert guard.release(RoundId(90), other)
    with journal(tmp_path) as here:
        guard = JournalReplayGuard(here)
        for guard.replaying in (True, False):
            assert guard.release(RoundId(9), one) and not guard.release(RoundId(9), other)


probabilities = st.floats(0.0, 1.0)
noises = st.floats(0.1, 10.0)
mechanisms = st.one_of(
    st.builds(GaussianNoise, noises),
    st.builds(GaussianNoise.poisson, noises, st.floats(0.01, 0.99)),
    st.builds(FixedSizeNoise, noises, st.floats(0.01, 1.0)),
    st.builds(PureLevel, st.floats(0.0, 5.0)),
    st.just(Unseen()),
)
texts, rounds = st.text(max_size=20), st.integers(0, 2**40).map(RoundId)
events = st.one_of(
    st.builds(
        ExactRelease,
        federation=texts,
        round_id=rounds,
        what=texts,
        against=st.frozensets(st.sampled_from(Observer)),
    ),
    st.builds(
        IndexAnswers,
        federation=texts,
        period=st.integers(0, 100),
        round_id=rounds,
        privacy=st.sampled_from(["cpp1", "cpp2", "cpp3", "cpp4", "cpp5"]).map(IndexPrivacy.named),
    ),
    st.builds(
        NoisySum,
        federation=texts,
        round_id=rounds,
        what=texts,
        unit=st.sampled_from([Unit.ITEM, Unit.USER]),
        adjacency=st.sampled_from(Adjacency),
        trust=st.sampled_from(Trust),
        seen=mechanisms.map(lambda m: seen(views(m, EVERYBODY))),
        times=st.integers(1, 5),
    ),
)


@given(events)
def test_a_charge_comes_back_as_it_was(event: ExactRelease | IndexAnswers | NoisySum) -> None:
    assert event_of(event_text(event)) == event


def test_all_of_a_clients_state_is_given_or_stored() -> None:
    """A new field of `LocalState` is one of both; what is neither would be lost in a restart."""
    given_again = {"real", "privacy", "quorum", "derived", "catalogue", "pool"} | {
        "own_rounds",
        "sharing",
        "indicator",
        "names",
        "counts",
        "candidates",
        "place",
        "data",  # what is frozen of it is stored by itself (`JournalExamples`)
    }
    stored = {"periods", "ledger", "last_round", "secret", "agreement", "residual", "own_keys"} | {
        "rows",
        "broken",
        "counted",
        "attendance",
    }
    assert {f.name for f in dataclasses.fields(LocalState)} == given_again | stored


@pytest.mark.parametrize("open_offer", [False, True])
def test_a_residual_comes_back_with_its_open_offer(tmp_path: Path, open_offer: bool) -> None:
    residual = Residual(np.array([1, -2, 3], dtype=np.int32), dropped=4)
    if open_offer:
        residual.offered(7, np.array([5, 6, 7]), np.array([5, 0, 0]))
    with journal(tmp_path) as here:
        mine, again = (LocalState(real={}, periods=MemoryPeriods()) for _ in range(2))
        mine.residual = residual
        with here.step():
            save_local(here, "client 1", mine)
        load_local(here, "client 1", again)
        assert again.residual is not None and again.residual.dropped == 4
        for each in (residual, again.residual):
            each.settle(7, counted=True)
        assert (again.residual.kept == residual.kept).all()


def test_local_rows_are_stored_by_client(tmp_path: Path) -> None:
    part = TablePart(
        np.array([2, 7], dtype=np.uint64), np.arange(6, dtype=np.float32).reshape(2, 3)
    )
    with journal(tmp_path) as here:
        rows = JournalRows(here, "client 1")
        with here.step():
            rows.offer(RoundId(4), {"users": part})
        assert rows.pending == 4 and not len(rows.of("users", 3).ids)
        with here.step():
            rows.settle(counted=True)
        found = rows.of("users", 3)
        assert rows.pending is None
        assert (found.ids == part.ids).all() and (found.values == part.values).all()
        assert not len(JournalRows(here, "client 2").of("users", 3).ids)


def test_local_rows_of_a_round_that_did_not_count_are_forgotten(tmp_path: Path) -> None:
    ids = np.array([2], dtype=np.uint64)
    with journal(tmp_path) as here:
        rows = JournalRows(here, "client 1")
        for value, counted in ((1.0, True), (2.0, False)):
            with here.step():
                rows.offer(RoundId(int(value)), {"users": TablePart(ids, np.full((1, 1), value))})
            with here.step():
                rows.settle(counted=counted)
    with journal(tmp_path) as here:
        assert JournalRows(here, "client 1").of("users", 1).values.tolist() == [[1.0]]


def test_the_leader_answers_a_repeated_number_and_refuses_other_bytes(tmp_path: Path) -> None:
    lab = Lab(plan("submodel", cohort=3), tmp_path / "lab")
    client = lab.parties[ClientId(0)]
    lab.leader.open_round()
    client.begin(standing_of(lab.leader, ClientId(0)))
    message = outgoing(client)
    request = MessageRequest(ClientId(0), RoundId(0), message)
    first, second = lab.leader.handle([request, request])
    assert first == second and first.taken
    other = MessageRequest(ClientId(0), RoundId(0), Numbered(1, b"something else"))
    (answer,) = lab.leader.handle([other])
    assert answer.conflict and not answer.taken
    (answer,) = lab.leader.handle([MessageRequest(ClientId(0), RoundId(3), message)])
    assert answer.conflict == "there is no such round"
    assert SERVER not in lab.leader.links


def test_a_client_has_so_many_messages_in_a_round(tmp_path: Path) -> None:
    """Those that are refused take a row, too: here a client that sends nonsense for ever."""
    lab = Lab(plan("submodel", cohort=3), tmp_path / "lab")
    lab.leader.open_round()
    sent = [MessageRequest(ClientId(0), RoundId(0), Numbered(n, b"no")) for n in range(1, 80)]
    answers = lab.leader.handle(sent)
    assert all(each.refused for each in answers[:MOST_MESSAGES])
    assert "at most" in answers[MOST_MESSAGES].conflict
    assert all(each.conflict for each in answers[MOST_MESSAGES:])
    assert lab.leader.links[ClientId(0)].received == MOST_MESSAGES


@pytest.mark.parametrize("left", [0.0, 0.3, 0.6, 0.9, 0.999])
def test_a_log_that_was_cut_gives_a_whole_step_or_an_old_copy(tmp_path: Path, left: float) -> None:
    """A disk that lost the end of the log: never half a step; what was said is recognised."""
    lab = Lab(plan("submodel", cohort=3), tmp_path / "lab")
    client, folder = ClientId(1), tmp_path / "lab" / "client 1"
    lab.leader.open_round()
    lab._exchange(client)
    before = lab.parties[client].link.standing
    # A copy, as it is while the process runs: closing would bring the log into the file.
    shutil.copytree(folder, tmp_path / "copy")
    lab.kill(client)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    log = folder / f"{NAME}-wal"
    size = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(int(left * size))
    try:
        lab.start(client)
    except ConfigError:
        return  # not even the schema is there, and it says so
    found = lab.parties[client]
    standing = standing_of(lab.leader, client)
    assert standing is not None
    if found.round_id is not None and found.link.sent >= standing.received:
        assert found.link.sent <= before.sent
        found.meets(standing)
        return
    with pytest.raises(OldCopy):
        found.meets(standing) if found.round_id is not None else found.begin(standing)


def test_what_was_erased_is_in_neither_file_after_a_fold(tmp_path: Path) -> None:
    secret = b"a secret of the last round, erased"
    with journal(tmp_path) as here:
        with here.step():
            here.set_fact("client 1", "secret", secret)
        with here.step():
            here.set_fact("client 1", "secret", bytes(len(secret)))
        files = [tmp_path / NAME, tmp_path / f"{NAME}-wal"]
        assert any(secret in file.read_bytes() for file in files), "the log keeps what was erased"
        here.fold()
        assert not any(secret in file.read_bytes() for file in files)


@pytest.mark.parametrize("erase", [True, False])
def test_only_a_journal_that_erases_overwrites_what_it_deletes(tmp_path: Path, erase: bool) -> None:
    """A leader's does not: what it was sent is no secret from it, and zeros would cost a write."""
    secret = b"what a client has said" * 500
    with Journal.open(tmp_path, owner="leader", plan=PLAN, erase=erase) as here:
        with here.step():
            here.set_fact("leader", "name", secret)
        with here.step():
            here.database.execute("DELETE FROM fact")
        here.fold()
        assert (secret[4200:8000] in (tmp_path / NAME).read_bytes()) is not erase
