"""`tessera reproduce`: real rounds, cells beside the papers' figures, and a run that can go on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from papers import runs as caches
from papers import sfsl as sfsl_cells
from papers import sfsl_round as sfsl
from papers import show
from papers.cells import Cell
from papers.runs import Cache
from papers.sfsl import measured_round
from papers.sfsl_round import Footprint, Measured, RoundSetting
from tessera.cli import main as cli
from tessera.cli import reproduce
from tessera.rounds.schemes import CATEGORIES

SMALL = RoundSetting(clients=8, per_client=12, dense=30)


def invented(setting: RoundSetting) -> Measured:
    """Figures of the right shape, so that the tables can be tested without hours of rounds."""
    size = 1000.0 * (1 + len(setting.level)) * setting.clients
    stages = dict.fromkeys(CATEGORIES, size)
    seconds = dict.fromkeys(CATEGORIES, 0.001 * setting.clients)
    return Measured(stages, stages, {}, seconds, seconds, 100, setting.clients, "SumTable")


@pytest.fixture
def rounds(monkeypatch):
    """The settings that were really measured, in order."""
    asked = []

    def measure(setting):
        asked.append(setting)
        return invented(setting)

    def footprints(setting):
        asked.append(setting)
        return dict.fromkeys(("client", "server"), Footprint(2**26, 2**25, 40_000, 20_000))

    monkeypatch.setattr(sfsl, "measure", measure)
    monkeypatch.setattr(sfsl, "footprints", footprints)
    return asked


def run(*arguments, cache):
    return cli.main(["reproduce", "sfsl", *arguments, "--cache", str(cache)])


# --- the measured round ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["secure-submodel", "submodel"])
def test_stages_add_up_to_all_that_was_sent(scheme):
    found = sfsl.measure(replace(SMALL, scheme=scheme))
    assert found.bytes == pytest.approx(sum(found.kinds.values()))
    assert found.survivors == 8
    assert set(found.up) == set(found.down) == set(CATEGORIES)
    assert (found.union_bytes() > 0) == (scheme == "secure-submodel")


def test_the_two_sums_of_a_round_are_told_apart():
    found = sfsl.measure(SMALL)
    plan = SMALL.plan
    words = plan.union_encoding(sfsl.ROUND)
    assert 0 <= found.up["union"] - words.expected_bytes < 1000
    least = plan.ring.bits / 8 * plan.model.dense
    assert found.up["update"] > least
    assert found.up["update"] + found.up["union"] == pytest.approx(
        found.kinds["MaskedInput"] + found.kinds["RevealedShares"] - found.up["unmask"]
    )


def test_the_bytes_of_a_setting_are_the_same_every_time():
    first, second = sfsl.measure(SMALL), sfsl.measure(SMALL)
    assert first.kinds == second.kinds
    assert first.union_rows == second.union_rows


def test_single_precision_takes_two_bytes_more_for_every_parameter_sent_down():
    half, single = (sfsl.measure(replace(SMALL, precision=p)) for p in ("float16", "float32"))
    assert single.down["rows down"] > 1.8 * half.down["rows down"]
    assert single.up == half.up


def test_the_setting_decides_on_decoys_and_quorum():
    ours = replace(SMALL, papers=False).plan
    assert (ours.privacy.decoys, ours.secagg(sfsl.ROUND).quorum) == (0.1, 2)
    theirs = SMALL.plan
    assert (theirs.privacy.decoys, theirs.secagg(sfsl.ROUND).quorum) == (0.0, 1)
    assert RoundSetting(scheme="fedavg").plan.full_length == 3_617_023


def test_dropouts_are_as_many_as_stated_and_the_round_is_opened_without_them():
    found = sfsl.measure(replace(SMALL, clients=20, dropout=0.2))
    assert 16 <= found.survivors < 20
    assert found.server_seconds.keys() >= {"keys", "union", "choice", "update", "unmask"}


def test_each_party_is_measured_in_a_process_of_its_own():
    taken = sfsl.footprints(SMALL)
    for party in ("client", "server"):
        assert 5 * 2**20 < taken[party].before <= taken[party].peak
    assert taken["client"].snapshot > 100
    assert taken["client"].period > 100
    assert taken["server"].snapshot == 0


# --- the cache ------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_where_it_was(tmp_path, rounds, monkeypatch, capsys):
    real = sfsl.measure

    def stopped(setting):
        if setting.level == "cpp3":
            raise KeyboardInterrupt
        return real(setting)

    monkeypatch.setattr(sfsl, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce("sfsl", part="bytes", cache=tmp_path)
    assert len(list(tmp_path.glob("round-*.json"))) == 2
    monkeypatch.setattr(sfsl, "measure", real)
    rounds.clear()
    assert run("--part", "bytes", "--quick", "--json", cache=tmp_path) == 0
    assert {s.level for s in rounds if s.papers and s.scheme == "secure-submodel"} == {
        "cpp3",
        "cpp4",
        "cpp5",
    }
    rounds.clear()
    capsys.readouterr()
    assert run("--part", "bytes", "--quick", "--json", cache=tmp_path) == 0
    assert rounds == []
    assert capsys.readouterr().err == ""


def test_other_code_or_another_setting_is_measured_again(tmp_path, rounds, monkeypatch):
    measured_round(Cache(tmp_path), SMALL)
    measured_round(Cache(tmp_path), SMALL)
    assert rounds == [SMALL]
    measured_round(Cache(tmp_path), SMALL, repeat=1)
    measured_round(Cache(tmp_path), replace(SMALL, dropout=0.1))
    assert len(rounds) == 3
    monkeypatch.setattr(caches, "code_version", lambda: "another")
    measured_round(Cache(tmp_path), SMALL)
    assert len(rounds) == 4


def test_what_comes_from_the_cache_is_what_was_measured(tmp_path):
    fresh = measured_round(Cache(tmp_path), SMALL)
    assert measured_round(Cache(tmp_path), SMALL) == fresh


# --- the cells ------------------------------------------------------------------------------------


def test_for_machines_every_cell_has_the_same_fields(tmp_path, rounds, capsys):
    assert run("--json", cache=tmp_path) == 0
    told = json.loads(capsys.readouterr().out)
    assert {tuple(cell) for cell in told["cells"]} == {
        ("table", "row", "column", "paper", "ours", "unit", "note")
    }
    assert all(isinstance(cell["ours"], float) for cell in told["cells"])


def test_every_figure_the_papers_print_is_there(tmp_path, rounds, capsys):
    assert run("--quick", "--json", cache=tmp_path) == 0
    papers = {cell["paper"] for cell in json.loads(capsys.readouterr().out)["cells"]}
    printed = {1.76, 2.33, 2.78, 3.40, 5.57, 27.94, 0.41, 20.70, 0.91}
    printed |= {71.80, 11.31, 37.66, 209.0, 281.0, 1.58 * 1024, 3.15 * 1024, 280.0}
    assert papers - {None} == printed


def test_a_missed_target_is_said():
    found = invented(RoundSetting())
    much = sfsl_cells.megabytes("t", "CPP1", "c", found.bytes / 2**20 / 0.7, found, 0.5)
    assert much.note == "0.70x; target <= 0.5: MISSED"
    little = sfsl_cells.megabytes("t", "CPP1", "c", found.bytes / 2**20 / 0.4, found, 0.5)
    assert little.note == "0.40x; target <= 0.5: met"


def test_the_middle_run_is_taken(tmp_path, monkeypatch):
    spent = iter([3.0, 1.0, 2.0])

    def measure(setting):
        return replace(invented(setting), server_seconds={"union": next(spent)})

    monkeypatch.setattr(sfsl, "measure", measure)
    found = sfsl_cells.middle(Cache(tmp_path), 20, 0.0)
    assert found.server_seconds == {"union": 2.0}


@pytest.mark.parametrize("width", [80, 140])
def test_for_people_no_figure_is_cut(width, tmp_path, rounds):
    found = sfsl_cells.sfsl_cells(["bytes", "time", "memory"], Cache(tmp_path), quick=True)
    console = Console(width=width, record=True, highlight=False)
    with console.capture() as captured:
        show.terminal(found, console, sfsl_cells.LAYOUT)
    out = captured.get()
    assert all(len(line) <= width for line in out.splitlines())
    assert "…" not in out
    for cell in found:
        assert show.figure(cell.ours) in out
        if cell.paper is not None:
            assert show.figure(cell.paper) in out


def test_a_table_without_paper_figures_is_spread_out():
    found = [
        Cell(table="t", row=r, column=c, paper=None, ours=2.5, unit="kB")
        for r in "ab"
        for c in "xy"
    ]
    (table,) = show.grids(found, show.Layout())
    assert [name for name, _ in table.head] == ["", "x", "y"]
    assert table.body == [["a", "2.5", "2.5"], ["b", "2.5", "2.5"]]


def test_the_papers_figure_has_a_column_if_a_row_has_one_and_stands_in_brackets_if_it_has_more():
    def grid(*papers):
        found = [
            Cell(table="t", row="r", column=f"c{at}", paper=paper, ours=1.5, unit="MB")
            for at, paper in enumerate(papers)
        ]
        (table,) = show.grids(found, show.Layout(styles=(show.Style(lines=False),)))
        return [name for name, _ in table.head], table.body[0], table.about

    assert grid(3.0, 3.0) == (["", "paper", "c0", "c1"], ["r", "3", *["1.5 (0.50x)"] * 2], "")
    assert grid(3.0, None) == (["", "paper", "c0", "c1"], ["r", "3", "1.5 (0.50x)", "1.5"], "")
    in_brackets = ["r", "1.5 (3)", "1.5 (6)"], "In brackets the paper's."
    assert grid(3.0, 6.0) == (["", "c0", "c1"], *in_brackets)


def test_a_page_has_negative_figures_and_says_where_there_are_none():
    found = [Cell(table="t", row="r", column=c, ours=v) for c, v in (("a", -4.0), ("b", None))]
    about = show.Page(title="T", paper="P", lede=lambda cells: ["first"], quick="few")
    text = show.page(found, show.Layout(page=about), quick=True)
    assert ">-4<" in text and ">n/a<" in text and "A quick run." in text


def test_deviations_stand_beside_their_figures():
    found = [
        Cell(table="t", row="r", column="RMSE", paper=0.9, ours=0.95, unit="stars"),
        Cell(table="t", row="r", column="RMSE, sd", paper=0.004, ours=0.01, unit="stars"),
        Cell(table="t", row="r", column="MAE", ours=0.7, unit="stars", deviation=0.02),
        Cell(table="t", row="r", column="seconds", ours=None, unit="s", note="target <= 1: MISSED"),
    ]
    (table,) = show.grids(found, show.Layout(styles=(show.Style(lines=False),)))
    assert table.body == [["r", "0.9000", "0.9500±.0100", "0.7000±.0200", "-"]]


def test_without_a_checkout_the_command_says_where_the_papers_are(tmp_path, monkeypatch, capsys):
    """As it is where only the package is installed."""
    monkeypatch.setattr(reproduce, "CHECKOUT", tmp_path)
    assert cli.main(["reproduce", "sfsl", "--part", "bytes"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: reproduce: ") and "not part of the package" in error
    assert hint.startswith("hint: clone the repository")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "alchemy"], "unknown name 'alchemy'"),
        (["reproduce", "sfsl", "--part", "bytes,accuracy"], "unknown part 'accuracy'"),
        (["reproduce", "sfsl", "--part", ","], "no part was named"),
    ],
)
def test_bad_input_is_an_error_a_hint_and_status_two(arguments, message, capsys):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: reproduce: ") and message in err
    assert "\nhint: " in err
