"""What is in the repository and what must stay out of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
LARGEST: Final = 400_000

# Written with brackets so that this file does not match itself.
UNWANTED: Final = {
    "a path of one machine": r"(?<![\w.])/(?:wor[k]|far[m]|roo[t]|tm[p]|hom[e]|User[s])/",
    "a package index": r"pypi[.]or[g]|pythonhosted[.]or[g]|index-ur[l]|find-link[s]|file://[/]",
    "a folder outside the repository": r"[.][.]/share[d]\b|/[.]librar[y]\b",
    "a key": r"BEGIN [A-Z ]*PRIVATE KE[Y]",
}
EXCEPTIONS: Final = {(".ci/run", "a folder outside the repository")}  # where it looks for data

DATA_FILES: Final = re.compile(
    r"""(?x) (?: ^|/ ) (?:
        u\.(?:data|item|user|genre|occupation|info) | u[a-b1-5]\.(?:base|test)
      | (?:ratings|movies|users)\.(?:dat|csv) | (?:user_)?(?:tagged)?(?:artists|friends|tags)\.dat
      | UserBehavior\.csv | alimama_sampled_train\.txt | user_data_sample | amazon_train
      | train_5500\.label | TREC_10\.label | (?:train|t10k)-(?:images|labels)-idx[13]-ubyte
      | (?:data_batch_\d|test_batch)\.bin | batches\.meta\.txt
    ) (?:\.gz)? $"""
)


def tracked() -> list[Path]:
    """Every file of the repository: tracked, or new and not ignored."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = listing.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def unwanted(text: str, *, name: str) -> list[str]:
    return [
        f"{name}:{number}: {what}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in UNWANTED.items()
        if (name, what) not in EXCEPTIONS and re.search(pattern, line)
    ]


def readable(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def test_no_file_is_large() -> None:
    large = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked()}
    assert {name: size for name, size in large.items() if size > LARGEST} == {}


def test_no_published_data_set_is_in_the_tree() -> None:
    assert [path for path in tracked() if DATA_FILES.search(path.as_posix())] == []


@pytest.mark.parametrize(
    "name", ["tests/data/u.data", "ml-1m/ratings.dat.gz", "train-images-idx3-ubyte.gz"]
)
def test_a_data_file_would_be_seen(name: str) -> None:
    assert DATA_FILES.search(name)


def test_nothing_points_at_one_machine_or_at_a_package_index() -> None:
    found = [
        line
        for path in tracked()
        for line in unwanted(readable(path), name=path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "open('/" + "home/me/run.toml')",
        "pip install --index-" + "url https://example.org/simple",
        "see ../sh" + "ared/NOTES.md",
        "-----BEGIN PRIVATE " + "KEY-----",
    ],
)
def test_an_unwanted_line_would_be_seen(line: str) -> None:
    assert len(unwanted(line, name="planted")) == 1


STRANGERS = re.compile(
    r"(?:pip3?|uv|pipx)[\w ]* (?:install|add)\b[^\n]*?[ '\"]tessera(?![-\w/.])"
    r"|install tessera(?![-\w])"
)
"""A text that tells somebody to install `tessera`, which is another project on PyPI."""


def test_nothing_tells_anybody_to_install_somebody_elses_package() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked()
        for line in readable(path).splitlines()
        if STRANGERS.search(line) and path.name != "test_repository.py"
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "pip install tessera",
        "$ pip install 'tessera[http]'  # services",
        'hint="pip install tessera[dp]"',
        "uv add tessera",
        "first install tessera, then",
    ],
)
def test_a_text_that_tells_so_would_be_seen(line: str) -> None:
    assert STRANGERS.search(line)


@pytest.mark.parametrize("line", ["pip install 'tessera-fl[dp]'", "pip install '.[train]'"])
def test_our_own_name_is_no_strangers(line: str) -> None:
    assert not STRANGERS.search(line)


def test_decision_pages_are_numbered_once_each() -> None:
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert pages
    assert [name for name in pages if not re.fullmatch(r"\d{4}(-[a-z0-9]+)+\.md", name)] == []
    numbers = Counter(name[:4] for name in pages)
    assert [number for number, count in numbers.items() if count > 1] == []


def test_a_decision_says_what_it_costs() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        headings = re.findall(r"^## (\w+)", readable(page), flags=re.MULTILINE)
        assert {"Context", "Choice", "Cost"} <= set(headings), page.name


def test_the_changelog_has_a_place_for_the_next_change() -> None:
    text = readable(ROOT / "CHANGELOG.md")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"


def test_links_between_documents_resolve() -> None:
    broken = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in tracked()
        if page.suffix == ".md"
        for target in local_links(readable(page))
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def local_links(text: str) -> list[str]:
    """Targets of `[text](target)` that are files, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    return [name for name in files if name]


def test_a_local_link_is_told_from_a_remote_one() -> None:
    text = "[a](docs/a.md#part), [b](https://example.org/b), [c](#here)"
    assert local_links(text) == ["docs/a.md"]
