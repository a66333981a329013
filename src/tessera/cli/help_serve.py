"""`tessera help-serve`: the helper of a deployment between two servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tessera.cli.deployed import BundleFile, Keys, State, TestEntropy, entropy_of
from tessera.ids import HELPER
from tessera.runs.logs import JsonLog
from tessera.services.bundle import Bundle
from tessera.services.deployment import open_helper
from tessera.services.http.dialer import dial
from tessera.services.keyring import Keyring


def help_serve(
    bundle: BundleFile,
    leader: Annotated[str, typer.Argument(metavar="URL", help="The leader's address.")],
    keys: Keys,
    state: State,
    insecure_test_entropy: TestEntropy = None,
) -> int:
    """Be the second server: dial the leader, hold half of every report, keep an own model."""
    packed = Bundle.read(bundle)
    entropy = entropy_of(insecure_test_entropy, urlsplit(leader).hostname or "")
    keyring = Keyring.read(keys, HELPER, packed.digest)
    helper = open_helper(packed, keys, Path(state), entropy)
    with helper.journal:
        return dial(leader, [(helper, keyring)], packed.plan.service, JsonLog(HELPER))
