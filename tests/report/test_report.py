"""The report is one well-formed file that fetches nothing, escapes everything and hides nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from report import folders
from tessera.errors import ConfigError
from tessera.report import page as report
from tessera.report.figures import RunFigures
from tessera.report.markup import NBSP, VOID, tag
from tessera.report.numbers import NOT_MEASURED

REFERENCES = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Reads a page strictly: every tag closed in turn, ids once, text and references collected."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), f"an attribute twice in <{name}>"
        if name not in VOID:
            self.open.append(name)
        if name == "tr":
            self.cells.append([])
        if name in {"th", "td"}:
            self.cells[-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if {"th", "td"} & set(self.open):
            self.cells[-1][-1] += data

    @property
    def text(self) -> str:
        """What is to be read, without the charts."""
        return re.sub(r"\s+", " ", "".join(self.words).replace(NBSP, " "))

    def row(self, *first: str) -> list[str]:
        """The first row that begins so, with plain spaces."""
        found = next(row for row in self.cells if row[: len(first)] == list(first))
        return [cell.replace(NBSP, " ") for cell in found]


def page_of(found: Sequence[Path], out: Path) -> tuple[str, Page]:
    text = report.write(found, out).read_text(encoding="utf-8")
    return text, Page(text)


def one(tmp_path: Path, scheme: str = "secure-submodel", **settings: object) -> tuple[str, Page]:
    folder = folders.make(tmp_path / "run", scheme, **settings)  # type: ignore[arg-type]
    return page_of([folder], tmp_path / "report.html")


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
def test_the_page_is_well_formed_and_fetches_nothing(tmp_path: Path, many: bool) -> None:
    found = folders.five(tmp_path) if many else [folders.make(tmp_path / "run")]
    text, page = page_of(found, tmp_path / "page.html")
    assert text.startswith("<!DOCTYPE html>")
    names = {name for name, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for name, attributes in page.tags:
        assert not [key for key in attributes if key.startswith("on")], name
        for key in REFERENCES & attributes.keys():
            assert (attributes[key] or "").startswith("#"), (name, key)
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.startswith("#")
    assert "@import" not in text and "@font-face" not in text
    assert not re.search(r"(https?:)?//\w", text)


def test_ids_are_unique_and_references_lead_somewhere(tmp_path: Path) -> None:
    _, page = page_of(folders.five(tmp_path), tmp_path / "page.html")
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    links = [str(a["href"])[1:] for name, a in page.tags if name == "a"]
    labels = [i for _, a in page.tags for i in str(a.get("aria-labelledby") or "").split()]
    assert links and labels
    assert set(links) | set(labels) <= set(ids)


def test_tables_have_captions_and_charts_have_words(tmp_path: Path) -> None:
    _, page = page_of(folders.five(tmp_path), tmp_path / "page.html")
    names = [name for name, _ in page.tags]
    assert names.count("table") == names.count("caption") >= 6
    for at, (name, attributes) in enumerate(page.tags):
        if name == "svg" and attributes.get("class") != "fills":
            assert [n for n, _ in page.tags[at + 1 : at + 3]] == ["title", "desc"]
    assert {"lang": "en"} in [a for name, a in page.tags if name == "html"]


def test_writing_is_all_or_nothing_and_leaves_no_litter(tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    run = folders.make(tmp_path / "run")
    assert report.write([run], out) == out
    first = out.read_text()
    report.write([run], out)  # a page of ours may be written again
    assert out.read_text() == first
    (run / "run.json").write_text("{")
    with pytest.raises(ConfigError):
        report.write([run], out)
    assert out.read_text() == first
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]


def test_a_failed_rename_leaves_the_old_page_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = folders.make(tmp_path / "run"), tmp_path / "out" / "page.html"
    before = report.write([run], out).read_text()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        report.write([run], out)
    assert out.read_text() == before
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]


def test_what_is_not_a_page_of_ours_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "thesis.html"
    out.write_text("<p>three years of work</p>")
    with pytest.raises(ConfigError, match="not a page written by tessera") as error:
        report.write([folders.make(tmp_path / "run")], out)
    assert error.value.hint
    assert out.read_text() == "<p>three years of work</p>"
    with pytest.raises(ConfigError, match="is a folder"):
        report.write([tmp_path / "run"], tmp_path)


@pytest.mark.parametrize("gone", ["run.json", "rounds.jsonl"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, gone: str) -> None:
    run = folders.make(tmp_path / "run")
    (run / gone).unlink()
    with pytest.raises(ConfigError, match=f"no {gone}") as error:
        report.write([run], tmp_path / "page.html")
    assert error.value.hint
    assert not (tmp_path / "page.html").exists()


def test_a_line_still_being_written_is_left_out_and_a_broken_one_refused(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "run", finished=6, evaluate=1)
    lines = (run / "rounds.jsonl").read_text().splitlines()
    (run / "rounds.jsonl").write_text("\n".join([*lines[:5], lines[5][:40]]))
    _, page = page_of([run], tmp_path / "page.html")
    assert "5 of 50 planned rounds" in page.text
    (run / "rounds.jsonl").write_text("\n".join([lines[0][:40], lines[1], ""]))
    with pytest.raises(ConfigError, match="line 1 is cut off"):
        report.write([run], tmp_path / "page.html")


@pytest.mark.parametrize("bad", ["{", "[]", "{}", "\x00"])
def test_a_broken_run_json_is_an_error_with_a_hint(tmp_path: Path, bad: str) -> None:
    run = folders.make(tmp_path / "run")
    (run / "run.json").write_text(bad)
    with pytest.raises(ConfigError, match=r"run\.json") as error:
        report.write([run], tmp_path / "page.html")
    assert error.value.hint


EVIL = '"><script>alert(1)</script><img src="http://x/y">\'&'


def test_everything_from_a_run_is_escaped(tmp_path: Path) -> None:
    told = folders.facts("secure-submodel", 20)
    task = {**told["task"], "title": EVIL, "name": EVIL, "facts": {EVIL: EVIL}}
    table = {"name": EVIL, "rows": 3, "width": 2, "derived_from": EVIL, "local": False}
    changes = {
        "name": EVIL,
        "version": EVIL,
        "level": EVIL,
        "metric": EVIL,
        "task": task,
        "trivial": {EVIL: 0.6},
        "learner": {"name": EVIL, "reason": EVIL},
        "model": {"dense": 1, "tables": [table]},
    }
    runs = [
        folders.make(
            tmp_path / str(i),
            plan=folders.PLAN.replace('"movielens <b>demo</b>"', json.dumps(EVIL)),
            changes={**changes, "name": f"{EVIL}{i}"},
            in_rounds={"condition": EVIL, "bytes_up": {EVIL: 3.0}, "client_seconds": {EVIL: 1.0}},
        )
        for i in range(2)
    ]
    text, page = page_of(runs, tmp_path / "page.html")
    assert not {name for name, _ in page.tags} & {"script", "img"}
    assert "<script" not in text and page.text.count("<script>alert(1)</script>") > 10


def test_control_characters_do_not_reach_the_page() -> None:
    assert tag("p", "a\x00b\x1b[31mc", title="\x07") == '<p title="">ab[31mc</p>'


# --- what it says -------------------------------------------------------------------------------


def test_one_run_says_what_it_is_and_that_it_lost(tmp_path: Path) -> None:
    _, page = one(tmp_path)
    final = folders.a_round("secure-submodel", 49, secure=True, evaluated=True)["metric"]
    worse = 0.769 - final
    assert "secure-submodel for 50 rounds, 100 of 6,040 clients in each" in page.text
    assert f"Its AUC on the test part is {final:.3f} after round 50" in page.text
    assert f"{worse:.3f} worse than the best baseline (sum of means, 0.769)" in page.text


def test_a_figure_that_is_not_of_the_last_round_says_so(tmp_path: Path) -> None:
    """A model that is not finite has no figure: an earlier one is not the final one."""
    folder = folders.make(tmp_path / "run", rounds=12, evaluate=4)
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"metric": None}
    (folder / "rounds.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    _, page = page_of([folder], tmp_path / "page.html")
    assert "AUC, after round 9, none later" in page.text


def test_a_run_that_wins_is_told_so(tmp_path: Path) -> None:
    _, page = one(tmp_path, "central")
    assert "better than the best baseline (sum of means, 0.769)" in page.text
    assert "worse than the best" not in page.text


def test_a_tie_is_no_win(tmp_path: Path) -> None:
    _, page = one(tmp_path, in_rounds={"metric": 0.7692})
    assert "tied with the best baseline" in page.text


def test_where_less_is_better_the_smaller_score_wins(tmp_path: Path) -> None:
    trivial = {"user mean": 1.02, "item mean": 0.98}
    changes = {"metric": "RMSE", "lower_is_better": True, "trivial": trivial}
    _, page = one(tmp_path, changes=changes, in_rounds={"metric": 0.91})
    assert "0.070 better than the best baseline (item mean, 0.980)" in page.text


@pytest.mark.parametrize(("lower", "best"), [(True, 0), (False, -1)])
def test_a_metric_of_ones_own_says_which_way_is_better(
    tmp_path: Path, lower: bool, best: int
) -> None:
    changes = {"metric": "perplexity", "lower_is_better": lower}
    run = RunFigures.load(folders.make(tmp_path / "run", changes=changes))
    assert run.best is not None
    assert run.best[1] == sorted(value for _, value in run.curve)[best]


def test_several_runs_are_compared_with_the_baseline(tmp_path: Path) -> None:
    _, page = page_of(folders.five(tmp_path), tmp_path / "page.html")
    assert "Five models were trained side by side" in page.text
    assert "central beats the best baseline (sum of means, 0.769)" in page.text
    assert "fedavg, submodel, secure-fedavg and secure-submodel do not" in page.text


def test_the_table_of_schemes_has_the_figures(tmp_path: Path) -> None:
    _, page = page_of(folders.five(tmp_path), tmp_path / "page.html")
    row = page.row("secure-submodel", "0.744")
    assert row[4:8] == ["238 kB", "146 kB", "137 ms", "1.04 s"]
    assert row[8:] == ["yes", "2.02", "2.71", "11.0%", "6.0%"]
    row = page.row("fedavg", "0.687")
    assert row[4:10] == ["412 kB", "412 kB", "61.0 ms", "12.0 ms", "yes", "in clear"]
    assert page.row("central", "0.778")[4:8] == ["all data", "n/a", "n/a", "6.20 s"]


def test_figures_of_sampled_rounds_are_not_diluted_and_the_page_says_whence(tmp_path: Path) -> None:
    every, sampled = tmp_path / "a", tmp_path / "b"
    folders.make(every)
    folders.make(sampled, every=10)
    _, page = page_of([every], tmp_path / "every.html")
    whole = page.row("secure-submodel", "0.744")
    assert "Cryptography was sampled" not in page.text and "in every round" in page.text
    _, page = page_of([sampled], tmp_path / "sampled.html")
    assert page.row("secure-submodel", "0.744") == whole
    assert "and really masked" in page.text
    assert "Cryptography was sampled (5 of 50 rounds)" in page.text
    assert "sampled: 5 of 50 rounds" in page.text


def test_a_plain_scheme_may_be_sampled_too(tmp_path: Path) -> None:
    _, page = one(tmp_path, "fedavg", every=10)
    figures = ["412 kB", "412 kB", "61.0 ms", "12.0 ms"]
    assert page.row("fedavg", "0.687")[4:8] == figures
    assert (
        "sampled (5 of 50 rounds)" in page.text
        and "masked" not in page.text.split("Cost categories")[0]
    )


def test_a_federated_metric_is_not_called_one_of_the_test_part(tmp_path: Path) -> None:
    _, page = one(tmp_path, changes={"metrics": "federated"})
    assert "Its AUC on held-out examples of each round's own clients is" in page.text
    assert "on the test part" not in page.text


def test_what_was_not_measured_is_not_zero(tmp_path: Path) -> None:
    empty = {"bytes_up": {}, "bytes_down": {"update": 0.0}, "server_seconds": {}, "clipped": None}
    _, page = one(tmp_path, "submodel", in_rounds=empty)
    row = page.row("submodel", "0.748")
    assert row[4:6] == [NOT_MEASURED] * 2 and row[7] == NOT_MEASURED
    assert row[6] == "61.0 ms"
    assert page.row("submodel", "50 of 50")[4] == NOT_MEASURED


def test_a_run_never_evaluated_says_so(tmp_path: Path) -> None:
    _, page = one(tmp_path, in_rounds={"metric": None})
    assert "The AUC has not been evaluated" in page.text
    assert NOT_MEASURED in page.row("secure-submodel")[1]


def test_scores_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "run", finished=3, evaluate=1)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[1]["metric"], lines[2]["metric"] = float("nan"), float("inf")
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, page = page_of([run], tmp_path / "page.html")
    assert "after round 1," in page.text


def test_a_run_without_rounds_gives_a_page_that_says_so(tmp_path: Path) -> None:
    _, page = one(tmp_path, finished=0)
    assert "No round has finished" in page.text
    assert "Who learns what" in page.text and "797,758" in page.text
    assert "0.000" not in page.text


def test_one_run_of_several_may_still_be_empty(tmp_path: Path) -> None:
    runs = [folders.make(tmp_path / "a", "fedavg"), folders.make(tmp_path / "b", finished=0)]
    _, page = page_of(runs, tmp_path / "page.html")
    assert "secure-submodel: no round has finished" in page.text
    assert page.row("secure-submodel", NOT_MEASURED)


def test_an_infinite_level_is_a_word(tmp_path: Path) -> None:
    changes = {"level": "cpp1", "index_privacy": {"p1": 1.0, "p2": 0.0, "p3": 1.0, "p4": 0.0}}
    text, page = one(tmp_path, changes=changes, in_rounds={"epsilon": "inf"})
    assert page.row("secure-submodel", "cpp1")[5:8] == ["infinite"] * 3
    assert not re.search(r">\s*inf\s*<", text) and "∞" not in text


def test_levels_say_what_they_cover_and_what_not(tmp_path: Path) -> None:
    _, page = one(tmp_path)
    row = page.row("secure-submodel", "cpp2")
    assert row[2:5] == ["yes", "0.9375, 0.0625, 0.9375, 0.0625", "88.3%, 11.7%"]
    assert row[5:] == ["2.02", "2.71", "2.71", "given the union"]
    assert "What is not covered" in page.text
    assert "The union itself is released exactly" in page.text
    assert "A person has no finite ε" in page.text


@pytest.mark.parametrize("scheme", folders.SCHEMES)
def test_who_learns_what_is_told_for_every_scheme(tmp_path: Path, scheme: str) -> None:
    _, page = one(tmp_path, scheme)
    heads = ["scheme", "the server learns", "other clients learn", "who must be honest"]
    at = page.cells.index(heads)
    assert page.cells[at + 1][0] == scheme
    assert all(len(cell) > 10 for cell in page.cells[at + 1][1:])
    assert ("sees each client's contribution in the clear" in page.text) is (
        not scheme.startswith("secure-")
    )


def test_test_entropy_is_the_first_thing_said(tmp_path: Path) -> None:
    text, page = one(tmp_path, changes={"entropy": "insecure test entropy"})
    assert "Insecure test entropy." in page.text
    assert text.index("Insecure test entropy.") < text.index('class="lede"')
    assert "none of these holds" in page.text
    _, secure = page_of([folders.make(tmp_path / "b")], tmp_path / "secure.html")
    assert "nsecure test entropy" not in secure.text


def test_a_rule_switched_off_in_the_plan_is_said_at_the_top(tmp_path: Path) -> None:
    _, page = one(tmp_path, plan=folders.PLAN + "insecure_small_groups = true\n")
    assert "The plan sets insecure_small_groups" in page.text


def test_training_facts_name_the_learner_and_the_faults(tmp_path: Path) -> None:
    _, page = one(tmp_path, "fedavg")
    row = page.row("fedavg", "50 of 50")
    assert row[2:5] == ["vectorised: the module passed its self-check", "1", "0.1%"]
    assert row[5:] == ["none in this scheme", "2.10 s", "system", "0.4.0"]


def test_aborted_rounds_are_counted(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "run", rounds=4)
    aborted = {"event": "RoundAbort", "round_id": 4, "phase": "collect"}
    (run / "events.jsonl").write_text(json.dumps(aborted) + "\n")
    _, page = page_of([run], tmp_path / "page.html")
    assert page.row("secure-submodel", "4 of 4, and 1 aborted")


def test_rows_are_shown_where_a_union_was_taken(tmp_path: Path) -> None:
    _, page = one(tmp_path)
    assert page.row("secure-submodel", "2,650")[1:6] == ["2,650", "2,358", "292", "0.8", "0"]
    assert "None in any round: lost and not merged." in page.text
    only = {"rows_opened": 2_600, "rows_below_quorum": 0, "rows_shrunk": 0}
    text, _ = page_of([folders.make(tmp_path / "c", in_rounds=only)], tmp_path / "c.html")
    assert text.count(">1,000</text>") == 2  # its axis begins at zero, wide and narrow
    _, other = page_of([folders.make(tmp_path / "b", "fedavg")], tmp_path / "b.html")
    assert "No union of rows was taken" in other.text


def test_data_and_settings_are_kept_with_the_results(tmp_path: Path) -> None:
    _, page = one(tmp_path)
    assert page.row("liked means")[1] == "rated 4 or more"
    assert page.row("test examples")[1] == "202,451"
    assert page.row("items")[1:] == ["3,706", "18", "66,708", "fetched by rows"]
    assert page.row("users", "6,040", "18")[4] == "never leaves the client"
    assert 'federation = "movielens <b>demo</b>"' in page.text


# --- several ------------------------------------------------------------------------------------


def test_runs_of_one_scheme_are_told_apart(tmp_path: Path) -> None:
    levels = {"cpp2": folders.CPP2, "cpp4": {"p1": 0.75, "p2": 0.25, "p3": 0.75, "p4": 0.25}}
    runs = [
        folders.make(tmp_path / name, changes={"level": name, "index_privacy": values})
        for name, values in levels.items()
    ]
    _, page = page_of(runs, tmp_path / "a.html")
    assert "secure-submodel cpp2 and secure-submodel cpp4" in page.text
    assert page.text.count("cpp1 to cpp5 are presets") == 1
    assert page.text.index("cpp1 to cpp5 are presets") < page.text.index("AUC, final")
    seeds = [folders.make(tmp_path / f"seed{i}", changes={"name": "same"}) for i in (1, 2)]
    _, page = page_of(seeds, tmp_path / "b.html")
    assert "seed1 and seed2" in page.text
    _, page = page_of([seeds[0], seeds[0]], tmp_path / "c.html")
    assert f"{seeds[0]} (1)" in page.text


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("data", {"task": {"name": "amazon", "clients": 6_040}}),
        ("metrics", {"metric": "RMSE"}),
        ("data", {"task": {**folders.facts("fedavg", 1)["task"], "test_examples": 7}}),
    ],
)
def test_what_does_not_compare_is_refused(
    tmp_path: Path, what: str, changes: dict[str, object]
) -> None:
    runs = [folders.make(tmp_path / "a"), folders.make(tmp_path / "b", changes=changes)]
    with pytest.raises(ConfigError, match=f"different {what}: ") as error:
        report.write(runs, tmp_path / "page.html")
    assert error.value.hint
    assert not (tmp_path / "page.html").exists()


def test_lines_of_differing_test_parts_are_called_means(tmp_path: Path) -> None:
    other = {"trivial": {"user mean": 0.680, "item mean": 0.731, "sum": 0.767}}
    runs = [folders.make(tmp_path / "a", "fedavg"), folders.make(tmp_path / "b", changes=other)]
    _, page = page_of(runs, tmp_path / "page.html")
    assert "the lines are means over the runs" in page.text
    assert "sum of means (0.768)" in page.text


def test_many_runs_still_have_a_colour_each_in_turn(tmp_path: Path) -> None:
    runs = [folders.make(tmp_path / f"run{i}", finished=4, evaluate=1) for i in range(12)]
    text, _ = page_of(runs, tmp_path / "page.html")
    for slot in range(8):
        assert f'class="curve c{slot}"' in text


def test_no_run_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run was named"):
        report.write([], tmp_path / "page.html")


# --- ratings --------------------------------------------------------------------------------------

RATED = {
    "metric": "RMSE",
    "lower_is_better": True,
    "trivial": {"user mean": 1.038, "item mean": 1.027, "sum": 0.958},
    "setup": {
        "mean": 3.529,
        "ratings": 80_000,
        "mask": {
            "order": "linear",
            "penalty": 0.0,
            "clients with a mask": 940,
            "clients without a mask: too few ratings": 3,
            "rated items without attributes": 1,
        },
        "sum": {"clients": 943, "groups": 9, "masked": 1},
    },
}
AUTO = folders.PLAN + '[security]\nsharing = "auto"\nindicator = 0.05\n'


def rated(tmp_path: Path, **changes: Any) -> str:
    """The page of a run of ratings that ends at an RMSE of .95, half of its clients unmasked."""
    in_rounds = {"metric": 0.95, "unmasked": 50, **changes}
    made = folders.make(
        tmp_path / "rated", "secure-fedavg", plan=AUTO, changes=RATED, in_rounds=in_rounds
    )
    return plain(report.write([made], tmp_path / "rated.html").read_text())


def plain(page: str) -> str:
    """What a reader reads."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_of_ratings_less_is_better(tmp_path):
    text = rated(tmp_path)
    assert "0.008 better than the best baseline (sum of means, 0.958)" in text
    assert "lower is better" in text
    assert "A curve above them is worse than no model" in text
    assert "predicts the mean of the item's ratings" in text
    assert "how often" not in text


def test_what_was_set_up_before_the_first_round_is_told(tmp_path):
    text = rated(tmp_path)
    assert "mean of all ratings 3.529" in text
    assert "sum really masked 1 of 9 groups" in text
    assert "its penalty each client's own choice" in text
    assert "clients without a mask: too few ratings 3" in text
    assert "rated items without attributes 1" in text


def test_unmasked_updates_are_a_warning_and_so_is_the_bit_they_reveal(tmp_path):
    text = rated(tmp_path)
    assert "Unmasked updates. On average 50 of 100 clients in a round" in text
    assert "its own estimate of the privacy indicator" in text and "is at most 0.05" in text
    nobody = rated(tmp_path / "other", unmasked=0)
    assert "Unmasked updates." not in nobody


def test_singleton_rows_are_shown_where_they_were_counted(tmp_path):
    opened = {"rows_opened": 200, "singleton_rows": 30}
    told = "15.0% of the opened rows are singleton rows, written by exactly one client"
    assert told in rated(tmp_path, **opened)
    assert "by exactly one client" not in rated(tmp_path / "other")


def test_what_went_wrong_is_told_by_reason(tmp_path):
    """Nothing is said of it where nothing did."""
    wrong = {
        "excluded": {"sent invalid keys": 2},
        "broken": {"training raised ValueError": 1},
        "rows_over_cap": 7,
    }
    made = folders.make(tmp_path / "two", "two-server", rounds=10, in_rounds=wrong)
    lost = {"event": "RoundAbort", "round_id": 3, "phase": "handshake", "answered": 0, "needed": 1}
    lines = [lost, lost | {"reason": "the helper left"}]
    (made / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = plain(report.write([made], tmp_path / "p.html").read_text())
    assert "client not in a sum: sent invalid keys 20" in page
    assert "client that sent zeros: training raised ValueError 10" in page
    assert "round aborted: the helper left 1" in page
    assert "round aborted: too few answered 1" in page and "and 2 aborted" in page
    assert "rows over the cap, per round: more than max_rows, outside the union or without" in page
    fine = folders.make(tmp_path / "fine", "two-server", rounds=10)
    assert "What went wrong" not in plain(report.write([fine], tmp_path / "f.html").read_text())
    (made / "events.jsonl").write_text(json.dumps(lost)[:-5])  # still being written
    assert RunFigures.load(made).aborted == 0


@pytest.mark.parametrize("check", [True, False])
def test_rows_that_nobody_checks_are_told_of(tmp_path, check):
    plan = folders.PLAN + f"[two_server]\ncheck = {str(check).lower()}\n"
    made = folders.make(tmp_path / "two", "two-server", rounds=4, plan=plan)
    page = plain(report.write([made], tmp_path / "p.html").read_text())
    assert ("read that client's rows off the next sum" in page) is not check


@pytest.mark.parametrize("verify", [True, False])
def test_keys_that_nobody_checks_are_told_of(tmp_path, verify):
    plan = folders.PLAN + f"[two_server]\nverify = {str(verify).lower()}\n"
    made = folders.make(tmp_path / "two", "two-server", rounds=4, plan=plan)
    page = plain(report.write([made], tmp_path / "p.html").read_text())
    assert ("every row of a table at once" in page) is not verify


def test_clicks_are_told_as_before(tmp_path):
    text = plain(report.write([folders.make(tmp_path / "one")], tmp_path / "p.html").read_text())
    assert "A curve below them is worse than no model" in text
    assert "lower is better" not in text and "Before the first round" not in text
