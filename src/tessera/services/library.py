"""A client as a library, for an app that is no process of ours.

    client = tessera.Client("bundle.npz", "keys", "state", leader="https://...", home="home")
    client.run_once("mine.csv")         # whatever is due, and back
    client.recommend("mine.csv", 10)

One object, one state directory; what `tessera join` keeps to is kept to here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.crypto.entropy import Entropy, ScriptedEntropy, SystemEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.services.bundle import Bundle
from tessera.services.charged_trainings import OwnBudget
from tessera.services.deployment import Account, open_clients
from tessera.services.group_client import GroupClientService
from tessera.services.http import is_loopback
from tessera.services.http.dialer import visit_once
from tessera.services.keyring import CA, Keyring
from tessera.services.logs import JsonLog
from tessera.services.packing import moment_of, task_function


@dataclass(frozen=True, slots=True)
class Visited:
    """What came of a visit: messages of rounds or epochs that were delivered, and whether this
    client is out of its group, and why."""

    delivered: int
    left: str = ""
    finished: bool = False


class DeployedClient:
    """One client of a deployment."""

    def __init__(
        self,
        bundle: Path | str,
        keys: Path | str,
        state: Path | str,
        *,
        leader: str,
        client: int | None = None,
        home: Path | str | None = None,
        task: str | None = None,
        budget: tuple[float, float] | None = None,
        insecure_test_entropy: str | None = None,
    ) -> None:
        """`keys` is its folder of keys, whose name has its number (`client-3`) if `client` does not
        say; `task` the code that it agrees to run, where the bundle names some; `budget` the most
        that it spends on all trainings of its account, as (epsilon, delta)."""
        self._bundle = Bundle.read(Path(bundle))
        self._keys, self._state, self._leader = Path(keys), Path(state), leader
        number = Path(keys).name.removeprefix("client-") if client is None else str(client)
        if not number.isdecimal():
            raise ConfigError(f"{keys}: which client is it?", hint="client=3")
        self.client = ClientId(int(number))
        own = None if budget is None else OwnBudget(*budget)
        self._account = Account(None if home is None else Path(home), budget=own)
        self._make = task_function(self._bundle, task)
        self._entropy: Entropy = SystemEntropy()
        if insecure_test_entropy is not None:
            if not is_loopback(leader.partition("//")[2].partition(":")[0]):
                raise ConfigError("insecure_test_entropy outside loopback", hint="leave it out")
            self._entropy = ScriptedEntropy(insecure_test_entropy.encode())

    def run_once(self, interactions: Any, *, as_of: str | None = None) -> Visited:
        """Whatever the leader has for this client now: fetch, train, deliver, until nothing is due.

        `interactions` are its own: a path, a folder, a frame, or a function that gives one.
        """
        from tessera.services.task_clients import OwnSource, own_maker

        bundle = self._bundle
        keyring = Keyring.read(self._keys, self.client, bundle.digest)
        moment = None if as_of is None else moment_of(as_of)
        source = Path(interactions) if isinstance(interactions, str) else interactions
        make = own_maker(
            bundle, self._make, lambda _: OwnSource(source=source, as_of=moment), self._entropy
        )
        (service,) = open_clients(
            bundle, [keyring], self._state, self._entropy, make, self._account
        )
        with service.journal:
            log = JsonLog("", quiet=True)
            delivered, finished = visit_once(
                self._leader, (service, keyring), bundle.plan.service, log
            )
            left = service.left if isinstance(service, GroupClientService) else ""
            return Visited(delivered, left, finished)

    def recommend(self, interactions: Any = None, k: int = 10) -> list[Any]:
        """The best items that are not among its own, from the leader's exported model."""
        from tessera.services.recommending import fetched, recommended

        cache = self._account.folder / "models"
        model = fetched(self._leader, self._bundle, cache, self._keys / CA)
        source = Path(interactions) if isinstance(interactions, str) else interactions
        state = self._state if (self._state / "journal.sqlite").exists() else None
        return list(recommended(self._bundle, model, self._make, source, top=k, state=state))


Client = DeployedClient
"""What a program calls it, as `tessera.Client`."""
