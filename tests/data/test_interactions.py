"""A user's own file: any ids, a dictionary or a keyed hash for them, and errors with a line."""

from __future__ import annotations

import gzip
import re
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from own_secrets import secret_of
from tessera.data import interactions
from tessera.data.examples import NONE, draw
from tessera.data.interactions import Interactions, bucket, read_dictionary
from tessera.errors import ConfigError


def read(source, **how):
    return interactions.read(source, Interactions(**how))


LINES = """who,what,when,stars,shelf
ann,tea,1700000300,5,drinks
bob,"salt, coarse",1700000100,2,kitchen
ann,pan,1700000100,4,kitchen
ann,tea,1700000200,1,drinks
bob,pan,1700000200,5,kitchen
"""
NAMES = {"user": "who", "item": "what"}


def written(folder: Path, text: str | bytes = LINES, name: str = "own.csv") -> Path:
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["own.csv", "own.csv.gz"])
def test_lines_become_examples_in_the_order_of_time(tmp_path, name):
    path = written(tmp_path, name=name)
    data = read(path, **NAMES, time="when", label="stars", threshold=4, category="shelf", history=2)
    assert data.sizes == {"user": 2, "item": 3, "category": 2}
    assert data.of(0)["item"].tolist() == [0, 2, 2]  # pan, tea, tea
    assert data.of(0)["label"].tolist() == [1, 0, 1]
    assert data.of(0)["history"].tolist() == [[-1, -1], [0, -1], [0, -1]]
    assert data.of(1)["item"].tolist() == [1, 0]
    assert data.category_of is not None
    assert data.category_of.tolist() == [1, 1, 0]
    assert data.facts["click"] == "stars of at least 4"


def test_without_times_the_lines_count_as_in_order(tmp_path):
    data = read(written(tmp_path), **NAMES, label="stars", threshold=4)
    assert data.of(0)["item"].tolist() == [2, 0, 2]
    assert data.facts["order"] == "as in the file"


@pytest.mark.parametrize(
    "whens",
    [
        ("2023-01-02", "2023-01-01 01:00:00.5", "2023-01-01T01:00"),
        ("2023-01-02T00:00:00Z", "2023-01-01T02:00:00.5+01:00", "2023-01-01T03:00:00+02:00"),
        ("1672617600", "1672534800.5", " 1.6725348e9 "),
    ],
)
def test_times_are_seconds_or_dates(tmp_path, whens):
    lines = "".join(f"ann,{what},{when},0\n" for what, when in zip("abc", whens, strict=True))
    path = written(tmp_path, "who,what,when,hit\n" + lines.replace(",0\n", ",1\n", 1))
    data = read(path, **NAMES, time="when", label="hit")
    assert data.of(0)["item"].tolist() == [2, 1, 0]


def in_order(tmp_path, *whens, **settings):
    """Items a, b, c ... at these times, in the order in which they are read."""
    lines = "".join(f"ann,{chr(97 + at)},{when},{at % 2}\n" for at, when in enumerate(whens))
    path = written(tmp_path, "who,what,when,hit\n" + lines)
    data = read(path, **NAMES, time="when", label="hit", test_share=0.0, **settings)
    return "".join(data.ids["item"].name(row) for row in data.train["item"])


@pytest.mark.parametrize(
    ("whens", "order"),
    [
        (("2023-01-02", "1672534800", "31/12/2022"), "cba"),
        (("23/08/2024", "01/09/2024", "22/08/2024 10:30"), "cab"),
        (("08/23/2024", "09/01/2024", "2024-08-22"), "cab"),
        (("1.2.2024", "2.1.2024", "3.1.2024 09:15"), "bca"),
    ],
)
def test_times_of_several_forms_are_read_each_by_its_own(tmp_path, whens, order):
    assert in_order(tmp_path, *whens) == order


def test_where_nothing_says_which_is_the_day_the_key_that_does_is_named(tmp_path):
    whens = ("01/02/2024", "02/01/2024")
    with pytest.raises(ConfigError, match="is the day or the month first") as caught:
        in_order(tmp_path, *whens)
    assert "time_format" in caught.value.hint
    assert in_order(tmp_path, *whens, time_format="%d/%m/%Y") == "ba"
    assert in_order(tmp_path, *whens, time_format="%m/%d/%Y") == "ab"
    with pytest.raises(ConfigError, match="not written as '%Y'"):
        in_order(tmp_path, *whens, time_format="%Y")
    with pytest.raises(ConfigError, match="is the day or the month first"):
        in_order(tmp_path, "23/08/2024", "08/23/2024")


def test_a_time_that_is_none_is_a_bad_line(tmp_path):
    text = "who,what,when,hit\nann,a,2023-01-02,1\nann,b,soon,0\nann,c,2023-01-01,0\n"
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match="line 3: 'when' is not a time: 'soon'"):
        read(path, **NAMES, time="when", label="hit")
    data = read(path, **NAMES, time="when", label="hit", on_bad="skip")
    assert data.of(0)["item"].tolist() == [1, 0]
    assert data.ids["item"].names == ["a", "c"]
    assert data.facts["bad lines, left out"] == 1


@pytest.mark.parametrize("when", ["17", "1672534800000000000000"])
def test_times_outside_1990_to_2100_are_refused(tmp_path, when):
    path = written(tmp_path, f"who,what,when,hit\nann,a,{when},1\nann,b,{when},0\n")
    with pytest.raises(ConfigError, match="not from 1990 to 2100") as caught:
        read(path, **NAMES, time="when", label="hit")
    assert "time_format" in caught.value.hint


@pytest.mark.parametrize("mixed", [True, False])
def test_numbers_since_1970_are_in_seconds_or_smaller_units_each_by_its_own(tmp_path, mixed):
    """So that files put together from several are read, whatever each counts in."""
    units = [1, 10**3, 10**6, 10**9]
    lines = [f"ann,i{k},{(1_700_000_000 + 60 * k) * units[k % 4]},1" for k in range(8)]
    lines += ["ann,i8,2023-11-14T22:21:20Z,1", "ann,i9,14/11/2023 22:22:20,1"] if mixed else []
    lines = [lines[at] for at in np.random.default_rng(1).permutation(len(lines))]
    path = written(tmp_path, "\n".join(["who,what,when,hit", *lines]) + "\n")
    data = read(path, **NAMES, time="when", label="hit", test_share=0.0)
    names = data.names_of("item")
    found = [names.name(row) for row in [*data.train["item"], *data.test["item"]]]
    assert found == [f"i{k}" for k in range(len(lines))]


def test_more_than_a_hundredth_of_a_file_is_never_left_out(tmp_path):
    def file(bad: int) -> Path:
        lines = [f"ann,i{k},2024-01-{1 + k % 28:02d},1" for k in range(2_000)]
        lines[:bad] = [line.replace("2024-01", "Jan 2024,") for line in lines[:bad]]
        lines[:bad] = [line.replace(",-", " ") for line in lines[:bad]]
        return written(tmp_path, "\n".join(["who,what,when,hit", *lines]) + "\n")

    kept = read(file(20), **NAMES, time="when", label="hit", on_bad="skip")
    assert kept.facts["bad lines, left out"] == 20
    with pytest.raises(ConfigError, match="21 of 2,000 lines are bad, the first 10") as caught:
        read(file(21), **NAMES, time="when", label="hit", on_bad="skip")
    assert "'when' is not a time: 'Jan 2024 01'" in str(caught.value)
    assert "time_format" in caught.value.hint and "1% of a file" in caught.value.hint


def test_with_no_negatives_every_example_is_a_click_for_a_softmax(tmp_path):
    path = written(tmp_path, "who,what\n" + "".join(f"ann,i{k}\n" for k in range(10)))
    data = read(path, **NAMES, negatives=0)
    assert data.undrawn is None and set(data.train["label"].tolist()) == {1.0}
    assert len(data.train) + len(data.test) == 10


def test_tabs_other_separators_and_other_encodings_are_read(tmp_path):
    text = "who\twhat\thit\nann\tth\u00e9\t1\nann\tpan\t0\n"
    one = read(written(tmp_path, text, "own.tsv"), **NAMES, label="hit")
    other = written(tmp_path, text.replace("\t", ";").encode("latin-1"))
    two = read(other, **NAMES, label="hit", separator=";", encoding="latin-1")
    three = read(other, **NAMES, label="hit")
    assert three.facts["read as"] == "separator semicolon, encoding cp1252 (found by looking)"
    for data in (one, two, three):
        assert data.train["item"].tolist() == [1, 0]
        assert data.ids["item"].names == ["pan", "th\u00e9"]
    marked = read(written(tmp_path, text.encode("utf-16"), "own.tsv"), **NAMES, label="hit")
    assert marked.ids["item"].names == ["pan", "th\u00e9"]


def test_truth_values_are_labels(tmp_path):
    text = "who,what,hit\nann,a,True\nann,b,false\n"
    assert read(written(tmp_path, text), **NAMES, label="hit").train["label"].tolist() == [1, 0]


# -- rows


def test_a_dictionary_gives_the_rows_and_cold_ids_are_left_out_or_share_one(tmp_path):
    path = written(tmp_path)
    known = written(tmp_path, "tea\nrum\npan\n", "ids.txt")
    dropped = read(path, **NAMES, label="stars", threshold=4, dictionary=known)
    assert dropped.sizes["item"] == 3
    assert dropped.of(0)["item"].tolist() == [0, 2, 0]
    assert dropped.of(1)["item"].tolist() == [2]
    assert dropped.facts["ids not in the dictionary"] == 1
    assert dropped.facts["interactions with them, left out"] == 1
    kept = read(
        path,
        **NAMES,
        label="stars",
        threshold=4,
        category="shelf",
        dictionary=known,
        unknown="row",
    )
    assert kept.sizes["item"] == 4
    assert kept.of(1)["item"].tolist() == [3, 2]
    assert kept.facts["interactions with them, share the last row"] == 1
    assert kept.category_of is not None
    assert kept.category_of.tolist() == [0, 2, 1, 1]  # rum is on no shelf of this file
    assert kept.sizes["category"] == 3


def test_two_clients_with_one_dictionary_agree_on_rows(tmp_path):
    known = written(tmp_path, "tea\nrum\npan\n", "ids.txt")
    one = written(tmp_path, "who,what,hit\nann,pan,1\n", "a.csv")
    two = written(tmp_path, "who,what,hit\nbob,rum,1\nbob,pan,0\n", "b.csv")
    rows = [
        read(p, **NAMES, label="hit", dictionary=known).train["item"].tolist() for p in (one, two)
    ]
    assert rows == [[2], [1, 2]]


def test_a_client_whose_items_are_all_cold_is_kept_without_examples(tmp_path):
    known = written(tmp_path, "tea\n", "ids.txt")
    data = read(written(tmp_path), **NAMES, label="stars", threshold=4, dictionary=known)
    assert data.clients == 2
    assert len(data.of(1)) == 0
    with pytest.raises(ConfigError, match="no item of it is in the dictionary"):
        read(
            written(tmp_path),
            **NAMES,
            label="stars",
            threshold=4,
            dictionary=written(tmp_path, "x\n", "other.txt"),
        )


def test_a_hash_gives_every_client_the_same_rows_and_counts_what_fell_together(tmp_path):
    path = written(tmp_path)
    data = read(path, **NAMES, label="stars", threshold=4, ids="hash", buckets=1_000)
    assert data.sizes["item"] == 1_000
    assert data.of(0)["item"].tolist() == [
        bucket(one, buckets=1_000) for one in ("tea", "pan", "tea")
    ]
    assert data.facts["ids that share a row with another, beyond the first"] == 0
    tight = read(path, **NAMES, label="stars", threshold=4, ids="hash", buckets=1)
    assert set(tight.train["item"].tolist()) == {0}
    assert tight.facts["ids that share a row with another, beyond the first"] == 2
    other = read(path, **NAMES, label="stars", threshold=4, ids="hash", buckets=1_000, key=b"other")
    assert (other.train["item"] != data.train["item"]).any()


def test_the_hash_is_the_one_that_was_published():
    # BLAKE2b with a key and eight bytes, as any other language has it: rows must not move.
    digest = blake2b("th\u00e9".encode(), digest_size=8, key=b"tessera interactions").digest()
    assert bucket("th\u00e9", buckets=2**20) == int.from_bytes(digest, "big") % 2**20
    assert bucket("tea", buckets=2**32) == 2_862_267_726


@given(st.lists(st.text(max_size=8), min_size=1, max_size=50, unique=True), st.integers(1, 500))
def test_buckets_are_in_range(ids, buckets):
    assert all(0 <= bucket(one, buckets=buckets) < buckets for one in ids)


def test_a_bucket_is_as_likely_as_another():
    counts = np.bincount([bucket(f"id {k}", buckets=16) for k in range(16_000)], minlength=16)
    assert (abs(counts - 1_000) < 160).all()  # five standard deviations


# -- without labels


def test_without_labels_negatives_come_from_the_dictionary_or_the_items_seen(tmp_path):
    lines = "".join(f"u{k % 7},i{k % 11},{1_700_000_000 + k}\n" for k in range(200))
    path = written(tmp_path, "who,what,when\n" + lines)
    known = written(tmp_path, "".join(f"i{k}\n" for k in range(40)), "ids.txt")
    seen = read(path, user="who", item="what", time="when")
    assert "the items of the same part" in seen.facts["click"]
    public = read(path, user="who", item="what", time="when", dictionary=known, negatives=3)
    assert "3 drawn evenly from the dictionary" in public.facts["click"]
    assert (public.train["item"][public.train["label"] == 0] == NONE).all()  # nobody drew yet
    drawn = draw(public, secret_of)
    assert drawn.train["item"][public.train["label"] == 0].min() > 10  # everybody had the eleven
    assert "rate" not in public.train.fields
    hashed = read(path, user="who", item="what", time="when", ids="hash", buckets=64)
    assert set(hashed.train["item"].tolist()) <= {bucket(f"i{k}", buckets=64) for k in range(11)}


# -- what is wrong


@pytest.mark.parametrize(
    ("text", "match", "hint"),
    [
        ("", "empty", "names the columns"),
        ("who,what,when,hit\n", "a header and no line", ""),
        ("1,2,3,1\n4,5,6,0\n", "line 1: numbers where the names", "header line"),
        ("whom,what,when,hit\na,b,1,1\n", "no column 'who'", "did you mean 'whom'?"),
        ("x,y,when,hit\na,b,1700000001,1\n", "no column 'who'", "there are: x, y, when, hit"),
        ("who,what,when,hit\na,b,1700000001,1\na,b,1\n", "line 3: 3 fields where", "quotes"),
        (
            "who,what,when,hit\na,b,1700000001,1\n,b,1700000001,1\n",
            "line 3: no 'who'",
            "a user and an item",
        ),
        ("who,what,when,hit\na,b,1700000001,1\na,NaN,1700000001,1\n", "line 3: no 'what'", "item"),
        (
            "who,what,when,hit\na,b,1700000001,1\na,b,nan,1\n",
            "line 3: 'when' is not a time: 'nan'",
            "",
        ),
        ("who,what,when,hit\na,b,1700000001,1\na,b,inf,1\n", "line 3: 'when' is not a time", ""),
        (
            "who,what,when,hit\na,b,1700000001,1\na,b,-5,1\n",
            "line 3: 'when' is not from 1990",
            "there is no order",
        ),
        (
            "who,what,when,hit\na,b,1700000001,1\na,b,noon,1\n",
            "line 3: 'when' is not a time: 'noon'",
            "",
        ),
        (
            "who,what,when,hit\na,b,1700000001,1\na,b,1700000001,\n",
            "line 3: 'hit' is not a label: ''",
            "",
        ),
        (
            "who,what,when,hit\na,b,1700000001,1\na,b,1700000001,nan\n",
            "line 3: 'hit' is not a label",
            "",
        ),
        (
            "who,what,when,hit\na,b,1700000001,1\na,b,1700000001,4\n",
            "line 3: 'hit' is '4', neither",
            "threshold = 4",
        ),
        ('who,what,when,hit\na,b,1700000001,1\na,"b,1,1\n', "line 3: 2 fields where", "quotes"),
        (
            "who,what,when,hit\na,\u00e9,1700000001,1\n".encode() + b"a,b\xff,1700000001,1\n",
            "line 3: 'what' is not utf-8 text",
            "",
        ),
        (
            'who,what,when,hit\na,"b\nc",1700000001,1\na,b,1700000001,x\n',
            "line 4: 'hit' is not",
            "",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, match, hint):
    with pytest.raises(ConfigError, match=match) as caught:
        read(written(tmp_path, text), **NAMES, time="when", label="hit")
    assert "own.csv" in str(caught.value)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "bad",
    [
        {"ids": "guess"},
        {"unknown": "keep"},
        {"ids": "hash", "buckets": 0},
        {"ids": "hash", "buckets": 2**50},
        {"ids": "hash", "key": b""},
        {"ids": "hash", "dictionary": "ids.txt"},
        {"ids": "hash", "buckets": 2**30, "category": "shelf"},
        {"label": None, "threshold": 3.0},
        {"threshold": float("nan")},
        {"history": 0},
        {"separator": "::"},
        {"encoding": "no such"},
        {"dictionary": "nowhere.txt"},
        {"label": None, "threshold": None, "negatives": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, bad):
    with pytest.raises(ConfigError):
        read(written(tmp_path), **{**NAMES, "label": "stars", "threshold": 4.0, **bad})


def test_a_missing_file_is_named(tmp_path):
    for name in ("none.csv", "none.parquet"):
        with pytest.raises(ConfigError, match=rf"{name}: no such file"):
            read(tmp_path / name, **NAMES)


@pytest.mark.parametrize(
    ("text", "match"),
    [("a\nb\na\n", "line 3: 'a' a second time"), ("a\n\nb\n", "line 2: empty"), ("", "empty")],
)
def test_a_dictionary_that_cannot_be_is_named(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match):
        read_dictionary(written(tmp_path, text, "ids.txt"))


# -- Parquet, frames


@pytest.mark.parametrize("name", ["own.csv", "own.parquet"])
def test_without_pyarrow_the_error_says_how_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="needs pyarrow") as caught:
        read(written(tmp_path, LINES, name), **NAMES)
    assert "extra `train`" in caught.value.hint


def test_parquet_gives_what_csv_gives(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    columns = {
        "who": ["ann", "bob", "ann", "ann", "bob"],
        "what": ["tea", "salt, coarse", "pan", "tea", "pan"],
        "when": arrow.array(
            [1_700_000_000 + k for k in (300, 100, 100, 200, 200)], arrow.timestamp("s")
        ),
        "stars": [5.0, 2.0, 4.0, 1.0, 5.0],
        "shelf": ["drinks", "kitchen", "kitchen", "drinks", None],
    }
    path = tmp_path / "own.parquet"
    parquet.write_table(arrow.table(columns), path)
    settings = {**NAMES, "time": "when", "label": "stars", "threshold": 4, "category": "shelf"}
    ours, theirs = read(path, **settings), read(written(tmp_path), **settings)
    for name, column in theirs.train.fields.items():
        assert (ours.train[name] == column).all()
    with pytest.raises(ConfigError, match="no column 'whos'") as caught:
        read(path, **{**settings, "user": "whos"})
    assert caught.value.hint == "did you mean 'who'?"
    columns["who"][3] = None
    parquet.write_table(arrow.table(columns), path)
    with pytest.raises(ConfigError, match="row 4: no 'who'"):
        read(path, **settings)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="not readable as Parquet"):
        read(path, **settings)


def own_lines(n: int = 3_000) -> dict[str, list[object]]:
    rng = np.random.default_rng(5)
    return {
        "who": [f"u{k}" for k in rng.integers(0, 90, n)],
        "what": rng.integers(0, 400, n).tolist(),
        "when": [1_600_000_000 + int(k) for k in rng.integers(0, 10**8, n)],
        "stars": rng.integers(1, 6, n).tolist(),
        "price": [float(k) / 8 for k in rng.integers(1, 100, n)],
        "shelf": [["low", "mid", "high"][k] for k in rng.integers(0, 3, n)],
    }


def as_csv(columns, folder):
    lines = [",".join(columns)] + [
        ",".join(map(str, row)) for row in zip(*columns.values(), strict=True)
    ]
    return written(folder, "\n".join(lines) + "\n")


def as_parquet(columns, folder):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), folder / "own.parquet", row_group_size=700)
    return folder / "own.parquet"


def as_pandas(columns, folder):
    frame = pytest.importorskip("pandas").DataFrame(columns)
    frame["shelf"] = frame["shelf"].astype("category")
    frame["what"] = frame["what"].astype(float)  # as pandas has whole numbers where one is missing
    return frame.set_index(frame.index[::-1])


def as_polars(columns, folder):
    return pytest.importorskip("polars").DataFrame(columns)


def as_dataset(columns, folder):
    both = {name: [*column, *column] for name, column in columns.items()}
    made = pytest.importorskip("datasets").Dataset.from_dict(both)
    return made.select(range(len(columns["who"])))


@pytest.mark.parametrize("label", ["stars", None])
@pytest.mark.parametrize("form", [as_parquet, as_pandas, as_polars, as_dataset])
def test_every_form_of_a_table_gives_the_same_data_to_the_bit(tmp_path, form, label):
    columns = own_lines()
    settings = {"time": "when", "label": label, "features": ["price", "shelf"], "category": "shelf"}
    if label:
        settings["threshold"] = 4
    expected = read(as_csv(columns, tmp_path), **NAMES, **settings)
    found = read(form(columns, tmp_path), **NAMES, **settings)
    assert found.sizes == expected.sizes
    assert (found.offsets == expected.offsets).all()
    for kind in ("user", "item"):
        assert found.ids[kind].names == expected.ids[kind].names
    for part in ("train", "test"):
        ours, theirs = getattr(found, part).fields, getattr(expected, part).fields
        assert ours.keys() == theirs.keys()
        for name, column in theirs.items():
            assert ours[name].dtype == column.dtype
            assert ours[name].tobytes() == column.tobytes()
    assert (found.category_of == expected.category_of).all()


def test_feature_columns_reach_the_batch_and_negatives_have_those_of_their_line(tmp_path):
    columns = own_lines(300)
    data = read(as_csv(columns, tmp_path), **NAMES, time="when", features=["price", "shelf"])
    assert data.train["price"].dtype == np.float32
    assert data.sizes["shelf"] == 3
    clicked = data.train["label"] == 1
    lines = set(zip(columns["what"], columns["price"], strict=True))
    pairs = zip(data.train["item"][clicked], data.train["price"][clicked], strict=True)
    assert {(int(data.ids["item"].name(i)), float(p)) for i, p in pairs} <= lines
    place = np.flatnonzero(~clicked)  # each just before its positive
    assert (data.train["price"][place] == data.train["price"][place + 1]).all()


def test_bad_lines_are_listed_or_skipped_and_counted(tmp_path):
    columns = own_lines(2_000)
    path = as_csv(columns, tmp_path)
    lines = path.read_text().splitlines()
    rng = np.random.default_rng(7)
    places = sorted(rng.choice(np.arange(1, 2_000), 20, replace=False).tolist())
    spoilt = list(lines)
    for k, at in enumerate(places):
        fields = lines[at].split(",")
        faults = (
            fields[:3],
            ["", *fields[1:]],
            [*fields[:2], "noon", *fields[3:]],
            [*fields[:3], "many", *fields[4:]],
        )
        spoilt[at] = ",".join(faults[k % 4])
    settings = {**NAMES, "time": "when", "label": "stars", "threshold": 4}
    broken = written(tmp_path, "\n".join(spoilt) + "\n", "broken.csv")
    with pytest.raises(ConfigError, match=r"20 of 2,000 lines are bad, the first 10:") as caught:
        read(broken, **settings)
    assert [int(n) for n in re.findall(r"\n  line (\d+): ", str(caught.value))] == [
        at + 1 for at in places[:10]
    ]
    assert 'on_bad = "skip"' in caught.value.hint
    skipped = read(broken, **settings, on_bad="skip")
    assert skipped.facts["bad lines, left out"] == 20
    whole = [line for at, line in enumerate(lines) if at not in set(places)]
    clean = read(written(tmp_path, "\n".join(whole) + "\n", "clean.csv"), **settings)
    assert skipped.ids["item"].names == clean.ids["item"].names
    for name, column in clean.train.fields.items():
        assert skipped.train[name].tobytes() == column.tobytes()


def test_what_is_no_table_is_refused():
    for thing in (3, object(), [1, 2], {"who": 3}):
        with pytest.raises(ConfigError, match="is not a table"):
            read(thing, **NAMES)
    with pytest.raises(ConfigError, match="no column 'what'"):
        read({"who": [1]}, **NAMES)


def test_data_up_to_a_moment_are_the_beginning_of_all(tmp_path):
    """Whatever came later moves no split, no history and no number of a client or an item."""
    rng = np.random.default_rng(4)
    lines = [
        f"u{rng.integers(9)},i{rng.integers(30)},{1_600_000_000 + 50 * at}" for at in range(300)
    ]
    (tmp_path / "items.txt").write_text("".join(f"i{at}\n" for at in range(30)))
    path = tmp_path / "log.csv"
    how = Interactions(item="item", time="when", dictionary=tmp_path / "items.txt")
    for reader in (interactions.read, interactions.read_sequences):
        path.write_text("\n".join(["user,item,when", *lines]) + "\n")
        whole = reader(path, how)
        moment = whole.timeline.moment(0.5)
        assert moment == 1_600_000_000 + 50 * 150
        early = whole.timeline.up_to(moment)
        assert whole.sizes == early.sizes and len(early.train) < len(whole.train)
        for client in range(whole.clients):
            mine, all_of_it = early.of(client), whole.of(client)
            for name in mine.fields:
                assert np.array_equal(mine[name], all_of_it[name][: len(mine)])
        path.write_text("\n".join(["user,item,when", *lines[:151]]) + "\n")
        alone = reader(path, how)  # as if nothing had come afterwards
        assert all(np.array_equal(alone.train[n], early.train[n]) for n in early.train.fields)


def test_a_log_without_times_has_no_timeline(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("user,item\na,x\na,y\nb,x\nb,y\n")
    assert interactions.read(path, Interactions(item="item")).timeline is None
