"""Files are found plain or packed, numbers are read exactly, and what is broken is named."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data import delimited, published, values
from tessera.errors import ConfigError

SOURCE = published.Source(
    title="Synthetic Ratings",
    publisher="Nobody in particular",
    page="example page",
    folders=("synthetic", "synthetic-sample"),
    files=("numbers.dat",),
)


def written(folder: Path, text: str | bytes, name: str = "numbers.dat") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def read(path: Path, columns: int = 3, separator: str = ",", **options) -> list[list[int]]:
    names = "abc"[:columns]
    kept = published.integers(path, published.written(separator, *names), names, **options)
    return np.stack(kept, axis=1).tolist()


# -- where files lie


@pytest.mark.parametrize("name", ["numbers.dat", "numbers.dat.gz"])
@pytest.mark.parametrize("own", ["synthetic", "synthetic-sample", "."])
def test_a_file_is_found_plain_or_packed_in_its_folder_or_the_one_given(tmp_path, name, own):
    path = written(tmp_path / own, "1,2,3\n", name)
    found = SOURCE.find("numbers.dat", tmp_path)
    assert found.resolve() == path.resolve()
    assert read(found) == [[1, 2, 3]]


def test_a_plain_file_goes_before_a_packed_one(tmp_path):
    written(tmp_path / "synthetic", "1,1,1\n", "numbers.dat.gz")
    plain = written(tmp_path / "synthetic", "2,2,2\n")
    assert SOURCE.find("numbers.dat", tmp_path) == plain


def test_the_variable_names_the_folder_and_the_argument_goes_before_it(tmp_path, monkeypatch):
    there = written(tmp_path / "a" / "synthetic", "1,1,1\n")
    here = written(tmp_path / "b" / "synthetic", "1,1,1\n")
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "a"))
    assert SOURCE.find("numbers.dat") == there
    assert SOURCE.find("numbers.dat", tmp_path / "b") == here


def test_a_missing_set_says_what_to_fetch_from_whom_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    for folder, match in [
        (None, "no data folder given"),
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, "no synthetic/numbers.dat"),
    ]:
        with pytest.raises(ConfigError, match=match) as caught:
            SOURCE.find("numbers.dat", folder)
        hint = caught.value.hint or ""
        for part in ("Synthetic Ratings", "Nobody", "example page", "numbers.dat", "synthetic/"):
            assert part in hint
        assert "TESSERA_DATA" in hint


# -- numbers


@given(
    st.lists(st.lists(st.integers(-(10**18) + 1, 10**18 - 1), min_size=2, max_size=2), min_size=1),
    st.sampled_from([",", "\t", "::", "|"]),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(60, 200),
    st.booleans(),
)
def test_numbers_come_back_as_written(tmp_path_factory, rows, separator, end, size, closed):
    text = end.join(separator.join(map(str, row)) for row in rows) + (end if closed else "")
    path = written(tmp_path_factory.mktemp("f"), text)
    assert read(path, 2, separator) == rows
    assert read(path, 2, separator, distinct=("b",)) == rows
    # And in batches of any size, which are no shorter than a line.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(delimited, "_BLOCK", size)
        assert read(path, 2, separator) == rows


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("1,2,3\n4,5\n", "line 2: 2 fields where 3 are due"),
        ("1,2,3\n4,5,6,7\n", "line 2: 4 fields where 3 are due"),
        ("1,2,3\n\n4,5\n", "line 3: 2 fields where 3 are due"),
        ("1,2,3\n\n4,5,x\n", "line 3: 'c' is not a whole number: 'x'"),
        ("1,2,3\n4,x,6\n", "line 2: 'b' is not a whole number: 'x'"),
        ("1,2,3\n4,,6\n", "line 2: 'b' is not a whole number: ''"),
        ("1,2,3\n4,-,6\n", "line 2: 'b' is not a whole number: '-'"),
        ("1,2,3\n4,5-6,6\n", "line 2: 'b' is not a whole number: '5-6'"),
        ("1,2,3\n4,5.0,6\n", "line 2: 'b' is not a whole number: '5.0'"),
        ("1,2,3\n4, 5,6\n", "line 2: 'b' is not a whole number: ' 5'"),
        ("1,2,3\n4,1000000000000000000000,6\n", "line 2: 'b' is not a whole number: '100000000000"),
        ("1,2,3\n4,nan,6", "line 2: 'b' is not a whole number: 'nan'"),
        ("", "empty"),
        ("\n\n", "empty"),
        (b"1,2,3\n4,\xff\xfe,6\n", "line 2: 'b' is not"),
    ],
)
def test_a_broken_line_is_named(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match) as caught:
        read(written(tmp_path, text))
    assert "numbers.dat" in str(caught.value)


def test_the_line_is_counted_from_the_top_of_the_file_whatever_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK", 16)
    good = "".join(f"{n},{n},{n}\n" for n in range(100))
    with pytest.raises(ConfigError, match="line 101: 'c'"):
        read(written(tmp_path, good + "1,2,oh\n"))


def test_a_single_separator_is_not_taken_for_a_double_one(tmp_path):
    with pytest.raises(ConfigError, match="line 1"):
        read(written(tmp_path, "1:2:3\n"), 3, "::")
    with pytest.raises(ConfigError, match="line 1: 'b' is not a whole number: '2:3'"):
        read(written(tmp_path, "1::2:3\n"), 2, "::")


def test_a_truncated_or_false_gzip_is_named(tmp_path):
    whole = gzip.compress(b"1,2,3\n" * 10_000)
    for broken in (whole[:-9], whole[: len(whole) // 2], b"no gzip at all"):
        path = tmp_path / "numbers.dat.gz"
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"numbers\.dat\.gz: not a whole gzip file"):
            read(path)
    damaged = bytearray(whole)
    damaged[20] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(ConfigError, match=r"numbers\.dat\.gz"):
        read(path)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)  # a folder


def test_words_become_their_places_and_others_are_refused(tmp_path):
    path = written(tmp_path, "1,look,2\n1,buy,2\n1,look,2\n")
    words = {"b": ("look", "buy")}
    assert read(path, words=words) == [[1, 0, 2], [1, 1, 2], [1, 0, 2]]
    written(tmp_path, "1,look,2\n1,loo,2\n")
    with pytest.raises(ConfigError, match="line 2: 'b' is 'loo', not one of look, buy"):
        read(path, words=words)


def test_an_optional_column_may_be_empty_or_null_and_a_column_left_aside_anything(tmp_path):
    path = written(tmp_path, "1,,a\n2,NULL,b\n3,7,\n")
    kept = published.integers(path, published.written(",", *"abc"), "ab", optional="b")
    assert [column.tolist() for column in kept] == [[1, 2, 3], [-1, -1, 7]]


def test_joined_lists_are_split(tmp_path):
    how = published.written("\t", "a", "b")
    table, bad = published.table(written(tmp_path, "1\t5,6,7\n2\t0\n3\t8,9\n"), how, ("b",))
    found, counts = values.lists(table, "b", bad)
    assert found.tolist() == [5, 6, 7, 0, 8, 9]
    assert counts.tolist() == [3, 1, 2]
    table, bad = published.table(written(tmp_path, "1\t5\n1\t5,,6\n"), how, ("b",))
    values.lists(table, "b", bad)
    with pytest.raises(ConfigError, match="line 2: 'b' are not whole numbers: '5,,6'"):
        published.refuse(bad)


def test_a_header_is_read_wherever_its_columns_stand(tmp_path):
    path = written(tmp_path, "\ufeffa,b\n1,2\nx,4\n")  # with the mark some editors write first
    how = published.written(",")
    assert published.integers(path, how, ("b",))[0].tolist() == [2, 4]
    with pytest.raises(ConfigError, match="line 3: 'a'"):
        published.integers(path, how, ("a",))
    with pytest.raises(ConfigError, match="no column 'c'"):
        published.integers(path, how, ("c",))
    with pytest.raises(ConfigError, match="a header and no line below it"):
        published.integers(written(tmp_path, "a,b\n"), how, ("a",))


def test_reading_ends_where_there_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK", 40)
    path = written(tmp_path, "".join(f"{n},x\n" for n in range(100)) + "oh\n")
    seen = []

    def enough(batch):
        seen.extend(batch.column("a").to_pylist())
        return len(seen) >= 50

    table, bad = published.table(path, published.written(",", "a", "b"), ("a",), enough=enough)
    assert 50 <= len(table) < 100
    assert bad.count == 0


def test_text_of_another_encoding_is_named_with_its_line(tmp_path):
    path = written(tmp_path, "one\ntwo\nthr\u00e9e\n".encode("latin-1"))
    assert [text for _, text in published.lines(path, encoding="latin-1")][2] == "thr\u00e9e"
    with pytest.raises(ConfigError, match="line 3: not utf-8 text"):
        list(published.lines(path))
