"""A run's folder: what is written is read back; what is old or damaged gets an error and a hint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rounds.population import federation, plan
from runs import toy
from tessera import api
from tessera.errors import ConfigError
from tessera.rounds.events import PhaseClosed
from tessera.runs.folder import (
    CHECKPOINT,
    EVENTS,
    LAYOUT,
    PLAN,
    ROUNDS,
    RUN,
    RunFolder,
    never_began,
)
from tessera.runs.truth import write_truth


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> dict[str, str]:
    """The files of a run of two rounds, as text by name."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run = RunFolder.create(folder, plan("submodel"))
    run.describe({"scheme": "submodel", "setup": {"mean": 3.5, "never": float("nan")}})
    for event in federation(plan("submodel")).run(2):
        run.append(event)
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path, recorded) -> Path:
    for name, text in recorded.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def read_all(folder: Path) -> tuple[list[dict], list[dict]]:
    run = RunFolder.load(folder)
    assert run.plan and run.plan_text
    return list(run.rounds()), list(run.events())


def refused(folder: Path, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read_all(folder)
    assert caught.value.hint


def test_a_run_folder_holds_the_plan_and_every_event(tmp_path):
    settings = plan()
    fed = federation(settings, clients=10)
    log = RunFolder.create(tmp_path / "run", settings)
    events = list(fed.run(2))
    for event in events:
        log.append(event)
    write_truth(tmp_path / "run" / "truth.json", fed.participants)

    back = RunFolder.load(tmp_path / "run")
    assert back.plan == settings
    assert back.plan.digest == settings.digest
    assert back.plan_text == settings.to_toml()
    assert len(list(back.events())) == len(events)
    rounds = list(back.rounds())
    assert [r["round_id"] for r in rounds] == [0, 1]
    assert all(rounds[0]["bytes_up"][part] > 100 for part in ("keys", "union", "update"))
    assert rounds[0]["bytes_up"]["rows down"] == 0 < rounds[0]["bytes_down"]["rows down"]
    assert rounds[0]["condition"] == "given the union, the sums and counts"
    phases = [e.phase for e in events if isinstance(e, PhaseClosed) and e.round_id == 0]
    assert phases == ["advertise", "share", "collect", "unmask", "reveal", "collect", "unmask"]
    truth = json.loads((tmp_path / "run" / "truth.json").read_text())
    assert len(truth["3"]["goods"]) == 20
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder.create(tmp_path / "run", settings)


def test_an_infinite_level_is_a_string_in_the_log(tmp_path):
    settings = plan(privacy={"level": "cpp1"})
    log = RunFolder.create(tmp_path / "run", settings)
    for event in federation(settings).run(1):
        log.append(event)
    assert next(log.rounds())["epsilon"] == "inf"


def test_facts_are_read_back_with_the_layout(folder):
    run = RunFolder.load(folder)
    assert run.described
    assert run.facts == {
        "scheme": "submodel",
        "setup": {"mean": 3.5, "never": None},
        "layout": LAYOUT,
    }
    assert run.fact("setup", "mean") == 3.5
    for names in (("task",), ("setup", "mask"), ("scheme", "name")):
        with pytest.raises(ConfigError, match=rf"does not have {'.'.join(names)}") as caught:
            run.fact(*names)
        assert caught.value.hint


def test_a_run_without_a_task_has_a_layout_and_no_facts(tmp_path):
    run = RunFolder.load(RunFolder.create(tmp_path / "run", plan()).folder)
    assert not run.described and run.facts == {"layout": LAYOUT}
    with pytest.raises(ConfigError, match="does not have task"):
        run.fact("task", "name")


@pytest.mark.parametrize("name", [PLAN, RUN, ROUNDS, EVENTS])
def test_a_folder_that_lacks_a_file_is_refused(folder, name):
    (folder / name).unlink()
    refused(folder, f"not a run's folder: it has no {name}")


@pytest.mark.parametrize("name", [PLAN, RUN, ROUNDS, EVENTS])
def test_what_is_not_text_is_refused(folder, name):
    (folder / name).write_bytes(b"\xff\xfe\x00")
    refused(folder, name)


@pytest.mark.parametrize("layout", [None, 1, LAYOUT + 1, "2"])
def test_another_layout_is_refused(folder, layout):
    facts = {"scheme": "submodel"} | ({} if layout is None else {"layout": layout})
    (folder / RUN).write_text(json.dumps(facts))
    refused(folder, rf"has layout {layout or 1}, this version of tessera reads {LAYOUT}")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_a_damaged_run_json_is_refused(folder, text):
    (folder / RUN).write_text(text)
    refused(folder, r"run\.json is not")


@pytest.mark.parametrize("name", [ROUNDS, EVENTS])
def test_a_line_that_is_still_being_written_is_left_out(folder, name, recorded):
    before = read_all(folder)
    (folder / name).write_text(recorded[name] + '{"event": "Rou')
    assert read_all(folder) == before


@pytest.mark.parametrize("name", [ROUNDS, EVENTS])
def test_a_cut_line_before_another_is_refused(folder, name, recorded):
    (folder / name).write_text('{"event": "Rou\n' + recorded[name])
    refused(folder, f"{name}: line 1 is cut off")


@pytest.mark.parametrize("line", ["[]", "{}", '{"event": "RoundStarted"}', "7"])
@pytest.mark.parametrize("name", [ROUNDS, EVENTS])
def test_a_line_of_something_else_is_refused(folder, name, line, recorded):
    (folder / name).write_text(line + "\n" + recorded[name])
    refused(folder, f"{name}: line 1 does not have .*round_id")


def test_a_finished_round_without_one_of_its_fields_is_refused(folder, recorded):
    lines = [json.loads(line) for line in recorded[ROUNDS].splitlines()]
    del lines[1]["weight"]
    (folder / ROUNDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(folder, "line 2 does not have weight")
    lines[1] |= {"weight": 3, "round_id": "1"}
    (folder / ROUNDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(folder, "line 2 has an invalid round_id")


@pytest.mark.parametrize("tail", ["", '{"round_id": 1', "{}\n", "7\n"])
def test_rounds_that_will_happen_again_are_forgotten(folder, tail, recorded):
    for name in (ROUNDS, EVENTS):
        (folder / name).write_text(recorded[name] + tail)
    run = RunFolder.load(folder)
    run.forget_after(0)
    rounds, events = read_all(folder)
    assert [r["round_id"] for r in rounds] == [0]
    assert {e["round_id"] for e in events} == {0}
    run.forget_after(None)
    assert read_all(folder) == ([], [])


# --- nothing of the user's is deleted -------------------------------------------------------------


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(ConfigError, match="not a run of tessera"):
        RunFolder.create(tmp_path, plan("submodel"))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="not a run of tessera"):
        RunFolder.create(tmp_path / "thesis.tex", plan("submodel"))


@pytest.mark.parametrize("stop", [ConfigError("a wrong option"), KeyboardInterrupt()])
def test_whatever_fails_before_the_first_round_the_users_files_stay(tmp_path, monkeypatch, stop):
    """A folder that existed, with a file put into it while the run is set up."""
    task, out = toy.task(), tmp_path / "out"
    out.mkdir()

    def fail(*_, **__):
        (out / "notes.txt").write_text("mine")
        raise stop

    monkeypatch.setattr(api, "Training", fail)
    with pytest.raises(type(stop)):
        api.simulate(task, toy.plan(), 1, out=out)
    assert [p.name for p in out.iterdir()] == ["notes.txt"]


def test_a_run_that_did_not_begin_takes_away_what_it_wrote_and_no_more(tmp_path):
    there, new = tmp_path / "there", tmp_path / "new"
    there.mkdir()
    for folder in (there, new):
        run = RunFolder.create(folder, plan("submodel"))
        (folder / CHECKPOINT).mkdir()
        (folder / CHECKPOINT / "root").write_bytes(bytes(32))
        if folder is there:
            (folder / "note.txt").write_text("put here meanwhile")
        run.discard()
    assert not new.exists()
    assert [p.name for p in there.iterdir()] == ["note.txt"]


@pytest.mark.parametrize("mode", ["0", "77"])
def test_what_only_a_simulation_may_know_is_for_its_owner_only(tmp_path, mode):
    before = os.umask(int(mode, 8))
    try:
        write_truth(tmp_path / "truth.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "truth.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("last", ["events.jsonl", "rounds.jsonl", "plan.toml", "run.json", "root"])
def test_a_run_that_was_killed_before_it_began_is_begun_again(tmp_path, last):
    """Killed after each step of making its folder, up to the root secret of its set-up."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in (
        ("events.jsonl", ""),
        ("rounds.jsonl", ""),
        ("plan.toml", plan("submodel").to_toml()),
        ("run.json", '{"layout": 2}'),
        ("root", None),
    ):
        if text is None:
            (folder / "checkpoint").mkdir()
            (folder / "checkpoint" / "root.key").write_bytes(bytes(32))
        else:
            (folder / name).write_text(text)
        if name == last:
            break
    assert never_began(folder)
    again = RunFolder.create(folder, plan("submodel"))
    assert not again.described and not (folder / "checkpoint").exists()


def test_what_is_not_ours_or_began_is_not_begun_again(tmp_path):
    (tmp_path / "plan.toml").write_text(plan("submodel").to_toml())  # its user's
    assert not never_began(tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder.create(tmp_path, plan("submodel"))
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "notes.txt").write_text("mine")
    assert not never_began(tmp_path)
    (tmp_path / "notes.txt").unlink()
    assert never_began(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": "RoundStarted"}')
    assert not never_began(tmp_path)
