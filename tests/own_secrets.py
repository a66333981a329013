"""Clients' lasting secrets for tests: everybody's own, and the same in every run."""

from __future__ import annotations

from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.secret import Secret


def secret_of(client: int, script: bytes = b"lasting") -> Secret:
    return ScriptedEntropy(script).secret("a client's own", client)
