"""A role takes the schemes that are its own, and refuses every other by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from rounds import population
from rounds.shops import Roles
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan, Scheme
from tessera.rounds.client import ClientRound
from tessera.rounds.party import ClientRoundSetup, ServerParty, ServerRoundSetup
from tessera.rounds.server import ServerRound
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound

ONE_SERVER: Final = {"fedavg", "submodel", "secure-fedavg", "secure-submodel"}
TWO_SERVERS: Final = {"two-server"}
ENTROPY: Final = ScriptedEntropy(b"roles")
COHORT: Final = tuple(map(ClientId, range(8)))


def model() -> dict[str, Any]:
    return {
        "dense": np.zeros(population.DENSE, dtype=np.float32),
        "tables": {name: LazyTable(spec) for name, spec in population.specs().items()},
        "derived": population.derived(),
    }


def client(plan: Plan) -> ClientRound:
    local = population.members(1)[ClientId(0)].local
    return ClientRound(
        ClientRoundSetup(
            plan=plan, round_id=RoundId(0), party=ClientId(0), local=local, entropy=ENTROPY
        )
    )


def server(plan: Plan) -> ServerRound:
    own = ServerParty(entropy=ENTROPY)
    return ServerRound(
        ServerRoundSetup(plan=plan, round_id=RoundId(0), invited=COHORT, own=own, **model())
    )


def client_of_two(plan: Plan) -> TwoServerClientRound:
    return Roles(plan).client()


def leader(plan: Plan) -> LeaderRound:
    return Roles(plan).leader()


def helper(plan: Plan) -> HelperRound:
    return Roles(plan).helper()


ROLES: Final[dict[Callable[[Plan], Any], set[str]]] = {
    client: ONE_SERVER,
    server: ONE_SERVER,
    client_of_two: TWO_SERVERS,
    leader: TWO_SERVERS,
    helper: TWO_SERVERS,
}
CASES: Final = [(role, scheme) for role in ROLES for scheme in Scheme]


@pytest.mark.parametrize(
    ("role", "scheme"), CASES, ids=[f"{role.__name__} {scheme}" for role, scheme in CASES]
)
def test_a_role_refuses_a_scheme_that_is_not_its_own(
    role: Callable[[Plan], Any], scheme: Scheme
) -> None:
    plan = population.plan(scheme)
    if scheme in ROLES[role]:
        assert role(plan).plan is plan
        return
    with pytest.raises(ConfigError) as caught:
        role(plan)
    name = {
        client: "ClientRound",
        server: "ServerRound",
        client_of_two: "TwoServerClientRound",
        leader: "LeaderRound",
        helper: "HelperRound",
    }[role]
    assert name in str(caught.value) and repr(str(scheme)) in str(caught.value)
    assert caught.value.hint is not None
    assert all(own in caught.value.hint for own in ROLES[role])
