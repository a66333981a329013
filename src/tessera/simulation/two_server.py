"""Two servers in one process: their keys, and every client's, for a simulated federation.

In a deployment the servers are run by two parties that do not collude, and their public keys are
pinned in every client; here both sets of keys follow from the run's entropy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.keys import SealingKey, SigningKey
from tessera.crypto.prg import Label
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER
from tessera.protocols.two_server.collector import MemoryReplayGuard, ReplayGuard
from tessera.protocols.two_server.key_period import KeyStore, MemoryStore
from tessera.protocols.two_server.params import Servers
from tessera.protocols.two_server.read.client import RowTagCache
from tessera.protocols.two_server.reports import SingleWorker, Workers
from tessera.rounds.noise_chain import ChainStore
from tessera.rounds.party import HelperKeys, HelperParty, ServerParty


@dataclass(slots=True)
class TwoServerSetup:
    """Both servers' keys, what the helper remembers for ever, and what saves each some work."""

    leader: SigningKey = field(repr=False)
    helper: HelperKeys = field(repr=False)
    replay_guard: ReplayGuard = field(default_factory=MemoryReplayGuard)
    leader_row_tags: RowTagCache = field(default_factory=RowTagCache, repr=False)
    helper_row_tags: RowTagCache = field(default_factory=RowTagCache, repr=False)
    leader_keys: KeyStore = field(default_factory=MemoryStore, repr=False)
    helper_keys: KeyStore = field(default_factory=MemoryStore, repr=False)
    leader_chain: ChainStore = field(default_factory=MemoryStore, repr=False)
    helper_chain: ChainStore = field(default_factory=MemoryStore, repr=False)
    entropy: Entropy = field(default_factory=SystemEntropy, repr=False)
    workers: Workers = field(default_factory=SingleWorker)

    @classmethod
    def of(
        cls, entropy: Entropy, federation: str, workers: Workers | None = None
    ) -> TwoServerSetup:
        """With keys that follow from the entropy."""

        def secret(name: str, what: str) -> Any:
            return entropy.secret(Label.SERVER_KEY, federation, name, what)

        return cls(
            SigningKey.from_secret(secret(SERVER, "sign")),
            HelperKeys(
                SigningKey.from_secret(secret(HELPER, "sign")),
                SealingKey.from_secret(secret(HELPER, "box")),
            ),
            entropy=entropy,
            workers=workers or SingleWorker(),
        )

    @property
    def leader_party(self) -> ServerParty:
        return ServerParty(
            entropy=self.entropy,
            servers=self.servers,
            key=self.leader,
            workers=self.workers,
            row_tags=self.leader_row_tags,
            key_store=self.leader_keys,
            chain_store=self.leader_chain,
        )

    @property
    def helper_party(self) -> HelperParty:
        return HelperParty(
            entropy=self.entropy,
            servers=self.servers,
            keys=self.helper,
            replay_guard=self.replay_guard,
            workers=self.workers,
            row_tags=self.helper_row_tags,
            key_store=self.helper_keys,
            chain_store=self.helper_chain,
        )

    @property
    def servers(self) -> Servers:
        """What is pinned in every client."""
        return Servers(
            leader=self.leader.public, helper=self.helper.signing.public, box=self.helper.box.public
        )


# --- threads --------------------------------------------------------------------------------------
#
# Threads: a server's evaluations on all its processors.


class Threads:
    """Workers for a server that may use all its processors: the kernel lets other threads run.

    A simulated server has one worker, so that its seconds are those of one processor.
    """

    def __init__(self, count: int | None = None) -> None:
        """`count` threads; without it as many as there are processors."""
        self.count = (os.cpu_count() or 1) if count is None else count
        if self.count < 1:
            raise ConfigError(f"a server with {self.count} threads", hint="one or more")

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make these calls at once; what the first of them raises is raised when all are done."""
        with ThreadPoolExecutor(self.count) as pool:
            under_way = [pool.submit(call) for call in calls]
        for one in under_way:
            one.result()
