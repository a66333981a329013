"""Text becomes the words before a word and the word itself, speaker by speaker."""

from __future__ import annotations

import pytest

from tessera import tasks
from tessera.data.speech import plays, speeches, spoken, words_of
from tessera.errors import ConfigError

PLAY = """\tA PLAY

ANN\ta lady.

ACT I

SCENE I\tA street.

ANN\tGood morrow, good
\tsir! [Enter BEN]

BEN\tI'll not; 'tis late.

\t[Exeunt]
"""


def test_the_speeches_of_a_play():
    assert list(speeches(PLAY)) == [
        ("ANN", ["good", "morrow", "good", "sir"]),
        ("BEN", ["i'll", "not", "'tis", "late"]),
    ]
    assert words_of("Żółw, no. 3: it's") == ["żółw", "no", "it's"]


def texts(words: int = 20):
    return {"ann": [[f"w{at}" for at in range(words)]], "ben": [["w0", "w1"], ["w1", "only"]]}


def test_contexts_stay_within_a_speech_and_the_last_tenth_is_tested_on():
    data = spoken("x", texts(), length=2, facts={})
    names = data.names_of("word")
    first = data.of(0)
    assert [names.name(int(w)) for w in first["next"]] == [f"w{at}" for at in range(1, 18)]
    assert first["context"][0].tolist() == [names.row("w0"), -1]
    assert first["context"][1].tolist() == [names.row("w1"), names.row("w0")]
    assert data.test_of(0)["next"].tolist() == [-1, -1]  # not in the training part's dictionary
    assert data.of(1)["context"][:, 0].tolist() == [names.row("w0"), names.row("w1")]
    earlier = spoken("x", texts(), length=2, part="validation", facts={})
    assert len(earlier.of(0)) == 15 and len(earlier.test_of(0)) == 2


def test_rare_words_are_unknown_and_nothing_is_learnt_of_them():
    data = spoken("x", texts(), length=2, least=2, facts={})
    assert list(data.names_of("word").names) == ["w0", "w1"]
    assert (data.train["next"] >= 0).all()


def test_own_texts_and_what_is_refused():
    task = tasks.from_text({"a": ["Good morning to you", "good night"] * 6}, length=2, width=4)
    assert task.data.sizes["word"] == 5
    for wrong in ({"a": "one text"}, ["a"]):
        with pytest.raises(ConfigError, match="texts by speaker"):
            tasks.from_text(wrong)
    with pytest.raises(ConfigError, match="no argument 'widht'"):
        tasks.from_text({"a": ["b c"]}, widht=4)
    with pytest.raises(ConfigError, match="no word follows another"):
        spoken("x", {"a": [["alone"]]}, length=2, facts={})


def test_plays_from_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="no texts"):
        plays(tmp_path)
    (tmp_path / "short.txt").write_text(PLAY)
    with pytest.raises(ConfigError, match="no role has 200 words"):
        plays(tmp_path)
    (tmp_path / "long.txt").write_text("ACT I\n\nANN\t" + "good day " * 150 + "\n")
    assert plays(tmp_path).clients == 1
