"""What a client may not choose for itself: whatever would tell one member of a group from others.

With the refusal switched off the choice is in the server's view: a member's data would follow from
it, if the choice followed from them.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from rounds.population import federation, members, plan
from tessera import wire
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.plan import Sharing
from tessera.privacy.index.response import LEVELS
from tessera.rounds.party import LocalState, check_rows

CHOICES = {
    "sharing": Sharing.PLAIN,
    "privacy": LEVELS["cpp4"],
    "quorum": 5,
    "own_rounds": 7,
}


def grouped():
    return plan(cohort=8, privacy={"period_rounds": 20}, groups={"size": 4})


class Sent:
    """Everything that anybody sent in a round."""

    def __init__(self) -> None:
        self.messages: list[tuple[object, object]] = []

    def add(self, time, sender, receiver, kind, data, *, arrived) -> None:
        self.messages.append((sender, wire.decode(data)))


@pytest.mark.parametrize("name", CHOICES)
def test_a_member_of_a_fixed_group_chooses_nothing_for_itself(name):
    views = Sent()
    fed = federation(grouped(), views=views)
    fed.participants[ClientId(1)].local = changed(fed.participants[ClientId(1)].local, name)
    with pytest.raises(ConfigError, match=f"its own {name}") as refused:
        list(fed.round())
    assert refused.value.hint and ClientId(1) not in {sender for sender, _ in views.messages}


@pytest.mark.parametrize("name", CHOICES)
def test_elsewhere_choices_are_free(name):
    local = next(iter(members(1).values())).local
    check_rows(plan(), changed(local, name))


def test_what_the_plan_says_is_no_choice():
    settings = grouped()
    local = next(iter(members(1).values())).local
    local.sharing, local.privacy = settings.security.sharing, settings.privacy.index
    local.quorum = settings.group_plan.quorum
    for own in (None, 1, settings.privacy.least_rounds):
        local.own_rounds = own
        check_rows(settings.group_plan, local)


def changed(local: LocalState, name: str) -> LocalState:
    assert name in {f.name for f in fields(LocalState)}
    setattr(local, name, CHOICES[name])
    return local
