"""The model out of a leader's state, and what is refused of it; a client as a library."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "h11", "torch", "pyarrow")):
    pytest.skip("an extra is not installed", allow_module_level=True)

from services import zygote
from services.processes import CONTEXT, free_port
from services.test_own_files import CLICKS, SEQUENCES, listed, own_file, plan_of
from tessera import Client
from tessera.cli.main import main
from tessera.errors import ConfigError
from tessera.learning.tables import safetensors
from tessera.services.bundle import Bundle
from tessera.services.journal import NAME
from tessera.services.model_export import exported, newest, write
from tessera.services.packing import deploy

CLIENTS = 4


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[str]:
    """A leader that waits for four clients; its address. The files are in the current folder."""
    monkeypatch.chdir(tmp_path)
    deploy(
        None,
        getattr(request, "param", plan_of()),
        items=listed(tmp_path),
        clients=4,
        out="bundle.npz",
    )
    assert main(["keys", "bundle.npz", "--insecure-test-entropy", "x"]) == 0
    line = [
        "serve",
        "bundle.npz",
        "--keys",
        "keys/leader",
        "--state",
        "state",
        "--export",
        "models",
    ]
    line += ["--port", str(port := free_port()), "--insecure-test-entropy", "x"]
    line += ["--service", "poll=1", "--service", "retry=0.05"]
    process = CONTEXT.Process(target=zygote.run, args=("leader.log", line), daemon=True)
    process.start()
    yield f"https://127.0.0.1:{port}"
    process.terminate()
    process.join()


def clients(url: str) -> list[Client]:
    found = []
    for client in range(CLIENTS):
        own_file(Path(), client)
        keys, state = f"keys/client-{client}", f"state-{client}"
        found.append(
            Client(
                "bundle.npz",
                keys,
                state,
                leader=url,
                home=f"home-{client}",
                insecure_test_entropy="x",
            )
        )
    return found


@pytest.mark.parametrize(
    "led", [plan_of(), plan_of("interactions", **CLICKS)], indirect=True, ids=["next", "DIN"]
)
def test_visits_of_a_library_train_a_model_that_is_exported_while_it_is_led(
    led: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, state, members = Bundle.read(Path("bundle.npz")), Path("state"), clients(led)
    end = time.monotonic() + 90.0
    done = 0
    while newest(Path("models")) is None:
        assert time.monotonic() < end, Path("leader.log").read_text()[-2000:]
        done += sum(each.run_once(f"client-{each.client}.csv").delivered for each in members)
    assert done >= 2 * CLIENTS, "a union and an update of each"
    # While the leader runs, by another process's hands: nobody is disturbed.
    assert main(["export", "state", "--out", "out", "--parquet", "--json"]) == 0
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    arrays, about = safetensors.unpacked(Path(written[0]["model"]).read_bytes())
    assert about["federation"] == "shop" and arrays["items.weight"].shape[0] == 60
    import pyarrow.parquet as pq

    vectors = pq.read_table("out/items.parquet").to_pylist()
    assert vectors[7]["id"] == "i7" and vectors[7]["title"] == "Title 7" and len(vectors) == 40
    assert np.array_equal(np.float32(vectors[7]["vector"]), arrays["items.weight"][7])
    # Somebody who never trained, and somebody who did; by a download that is the same for both.
    for more in (
        [],
        ["--interactions", "client-0.csv"],
        ["--interactions", "client-0.csv", "--state", "state-0"],
    ):
        line = ["recommend", "bundle.npz", "--model", led, "--ca", "keys/client-0/ca.pem"]
        assert main([*line, "--home", "home", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)["recommended"]
        assert len(found) == 10 and all(one["title"].startswith("Title ") for one in found)
        if more:
            had = {line.partition(",")[0] for line in Path("client-0.csv").read_text().splitlines()}
            assert not had & {one["id"] for one in found}
    assert len(list(Path("home/models").rglob("*.safetensors"))) == 1
    top = members[1].recommend("client-1.csv", 5)
    assert len(top) == 5
    small = write(exported(state, bundle, rows=12), Path("small"))
    line = ["recommend", "bundle.npz", "--model", str(small), "--interactions", "client-0.csv"]
    assert main([*line, "--json", "--top", "30"]) == 0
    some = {one["id"] for one in json.loads(capsys.readouterr().out)["recommended"]}
    assert (
        some <= {f"i{at}" for at in range(12)}
        and small.stat().st_size < newest(Path("models")).stat().st_size
    )  # type: ignore[union-attr]
    # A client's state has none, and another bundle is another model.
    for where, why in (("state-0", "which has no model"), ("nowhere", "")):
        assert main(["export", where, "--out", "out"]) == 2
        assert why in capsys.readouterr().err
    deploy(
        None,
        plan_of(**{**SEQUENCES, "history": 3}),
        items=Path("catalogue.csv"),
        clients=4,
        out="other.npz",
    )
    assert main(["export", "state", "--bundle", "other.npz"]) == 2
    assert "of bundle" in capsys.readouterr().err


def test_a_state_that_another_process_locks(tmp_path: Path) -> None:
    bundle = deploy(None, plan_of(), items=listed(tmp_path), clients=4)
    state = tmp_path / "state"
    state.mkdir()
    holder = sqlite3.connect(state / NAME, isolation_level=None)
    holder.execute("CREATE TABLE journal (owner TEXT, plan TEXT)")
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(ConfigError, match="another process holds it") as refused:
            exported(state, bundle)
        assert refused.value.hint
    finally:
        holder.close()


def test_what_is_no_file_of_safetensors_is_refused() -> None:
    good = safetensors.packed({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, {"x": "y"})
    arrays, about = safetensors.unpacked(good)
    assert arrays["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and about == {"x": "y"}
    assert len(good[: 8 + int.from_bytes(good[:8], "little")]) % 8 == 0
    for bad in (b"", good[:-1], good[:12], b"\xff" * 40, good.replace(b"[2, 3]", b"[2, 9]")):
        with pytest.raises(ConfigError, match="not a model"):
            safetensors.unpacked(bad)
