"""Folders of keys: what each party has, and what it has not."""

from __future__ import annotations

import json
import shutil
import ssl
from pathlib import Path
from typing import Final

import pytest

from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.keys import SigningKey
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.services.keyring import (
    AUTHORITY,
    BOX,
    CA,
    DIRECTORY,
    SIGN,
    TLS,
    TLS_KEY,
    Keyring,
    make_keys,
)

BUNDLE: Final = b"b" * 32
FOLDERS: Final[dict[str, Party]] = {
    "leader": SERVER,
    "helper": HELPER,
    "client-0": ClientId(0),
    "client-1": ClientId(1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, BUNDLE, "f", [ClientId(0), ClientId(1)], SystemEntropy(), ["127.0.0.1"])
    return folder


def test_each_has_its_own_and_only_the_leader_can_pass_for_the_leader(made: Path) -> None:
    """A helper with a certificate for the leader's host could take the leader's half, too."""
    public = {DIRECTORY, AUTHORITY, CA}
    own = {
        "leader": {SIGN, TLS, TLS_KEY},
        "helper": {SIGN, BOX},
        "client-0": {SIGN},
        "client-1": {SIGN},
        "authority": {SIGN, "ca.key"},
    }
    for name, files in own.items():
        assert {each.name for each in (made / name).iterdir()} == public | files
        for file in files:
            assert (made / name / file).stat().st_mode & 0o077 == 0
        assert (made / name).stat().st_mode & 0o077 == 0
    chain = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    chain.load_cert_chain(made / "leader" / TLS, made / "leader" / TLS_KEY)


def test_a_folder_is_read_by_its_own_party_only(made: Path) -> None:
    for name, party in FOLDERS.items():
        assert Keyring.read(made / name, party, BUNDLE).party == party
        with pytest.raises(ConfigError, match=r"keys for bundle 6262.*this is bundle 6363"):
            Keyring.read(made / name, party, b"c" * 32)
    with pytest.raises(ConfigError, match="not the key that the directory has"):
        Keyring.read(made / "client-0", ClientId(1), BUNDLE)


def test_another_directory_needs_the_authoritys_signature(made: Path, tmp_path: Path) -> None:
    """Somebody who can write there puts a key of its own in the place of client 1's."""
    folder = tmp_path / "client-0"
    shutil.copytree(made / "client-0", folder)
    signed = json.loads((folder / DIRECTORY).read_text())
    directory = json.loads(signed["directory"])
    stranger = SigningKey.from_secret(SystemEntropy().secret("test"))
    directory["clients"]["1"] = stranger.public.hex()
    signed["directory"] = json.dumps(directory)
    (folder / DIRECTORY).write_text(json.dumps(signed))
    with pytest.raises(ConfigError, match="not signed by the authority"):
        Keyring.read(folder, ClientId(0), BUNDLE)


def test_keys_are_not_written_over(made: Path) -> None:
    before = (made / "leader" / SIGN).read_bytes()
    with pytest.raises(ConfigError, match="there are keys already") as refused:
        make_keys(made, BUNDLE, "f", [ClientId(0)], SystemEntropy(), ["127.0.0.1"])
    assert (made / "leader" / SIGN).read_bytes() == before
    assert refused.value.hint == "another --out begins anew"
