"""Entropy: where fresh secrets come from, handed in wherever one is made.

A plan's seed drives sampling and initialisation only. Keys, masks, shares and noise begin here: at
the system's generator, or in tests at a script whose answers anybody can recompute.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final, Protocol, final

from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, check_size, encode_context
from tessera.errors import MisuseError

_SCRIPT: Final = Label.SCRIPTED_ENTROPY.encode() + b"\0"


class Entropy(Protocol):
    """A source of secrets; each request names what the secret is for."""

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        """A secret of `size` bytes for this use; request each use once."""
        ...


@final
class SystemEntropy:
    """The operating system's generator. Every answer is fresh, whatever the label."""

    __slots__ = ()

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        encode_context(label, *context)  # what a test's script would refuse is refused here too
        check_size(size)
        return Secret(os.urandom(size))

    def __repr__(self) -> str:
        return "SystemEntropy()"


@final
class RootedEntropy:
    """Secrets derived from a root that the system's generator gave once and its owner stores.

    A role that restarts requests the same uses and gets the same secrets, so it never sends two
    different messages in the same place. The root gives everything that was ever derived from it:
    store it where only its owner can read, and only as long as messages may have to be repeated.
    """

    __slots__ = ("_root",)

    def __init__(self, root: Secret) -> None:
        self._root: Final = root

    @classmethod
    def fresh(cls) -> RootedEntropy:
        return cls(Secret(os.urandom(32)))

    @property
    def root(self) -> Secret:
        return self._root

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        return self._root.derive(label, *context, size=size)

    def __repr__(self) -> str:
        return "RootedEntropy()"


@final
class ScriptedEntropy:
    """INSECURE, for tests and simulations: every answer follows from (seed, label, context, size).

    Answers are addressed and not consumed in order, so that a test which adds a client, drops one
    or runs them in another order leaves everybody else's keys as they were. Asked twice for the
    same use it gives the same secret; a role that needs two names them apart.
    """

    __slots__ = ("_root",)

    def __init__(self, seed: bytes) -> None:
        if not isinstance(seed, bytes):
            raise MisuseError(f"scripted entropy starts from bytes, not {type(seed).__name__}")
        self._root: Final = Secret(hashlib.sha256(_SCRIPT + seed).digest())

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        return self._root.derive(label, *context, size=size)

    def __repr__(self) -> str:
        return "ScriptedEntropy(insecure)"
