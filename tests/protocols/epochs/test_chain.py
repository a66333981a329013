"""What h_e binds, and what a pair's mask binds beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.ids import ClientId
from tessera.protocols.epochs import messages
from tessera.protocols.epochs.messages import EpochKind, follows, link
from waiting_group import Waiting, fixed_group, header

GROUP, AT = fixed_group(2), header(2)
BEFORE, CERTIFICATE = b"h" * 32, b"c" * 32


@pytest.mark.parametrize(
    "changed",
    [
        {"period": 2},
        {"kind": EpochKind.UNION},
        {"epoch": 3},
        {"ring": Ring(33)},
        {"length": 6},
        {"inputs": {}},
        {"inputs": {**AT.inputs, "base": b"x" * 32}},
        {"inputs": {**AT.inputs, "more": b"x" * 32}},
        {"inputs": {"bas": AT.inputs["base"], "record": AT.inputs["record"]}},
    ],
    ids=lambda changed: "-".join(map(str, changed)),
)
def test_a_link_binds_every_field_of_the_header(changed: dict[str, Any]) -> None:
    other = link(BEFORE, GROUP, replace(AT, **changed), CERTIFICATE)
    assert other.digest != link(BEFORE, GROUP, AT, CERTIFICATE).digest


def test_a_link_binds_the_past_the_group_and_the_certificate() -> None:
    digests = {
        link(BEFORE, GROUP, AT, CERTIFICATE).digest,
        link(CERTIFICATE, GROUP, AT, CERTIFICATE).digest,
        link(BEFORE, GROUP, AT, BEFORE).digest,
        link(BEFORE, fixed_group(3), AT, CERTIFICATE).digest,
        link(BEFORE, fixed_group(2, plan=b"q" * 32), AT, CERTIFICATE).digest,
    }
    assert len(digests) == 5


def test_the_order_of_inputs_does_not_matter() -> None:
    turned = replace(AT, inputs=dict(reversed(AT.inputs.items())))
    assert link(BEFORE, GROUP, turned, CERTIFICATE) == link(BEFORE, GROUP, AT, CERTIFICATE)


def test_an_epoch_follows_with_the_next_number_in_its_period_or_the_next() -> None:
    assert follows(None, header(1)) and follows(header(1), header(2))
    assert follows(header(1), header(2, period=2))
    assert not follows(None, header(2)) and not follows(None, header(1, period=2))
    assert not follows(header(2, period=2), header(3))
    assert not any(follows(header(2), header(e)) for e in (1, 2, 4))


def test_a_mask_binds_both_ids_and_the_link() -> None:
    """The same two roots: other ids, or another link, and the masks are unrelated."""
    roots = [Secret(bytes([k]) * 32) for k in (1, 2)]
    keys = tuple(messages.mask_key(root).public for root in roots)
    at = link(BEFORE, GROUP, AT, CERTIFICATE)

    def mask(group: Any, bound: Any) -> Any:
        zeros = AT.ring.zeros(AT.length)
        first, second = (
            messages.masked(zeros, bound, group, me, root, keys)
            for me, root in zip(group.members, roots, strict=True)
        )
        assert not AT.ring.add(first, second).any()  # they cancel
        return first

    first, last = GROUP.leaves
    assert first.client < last.client
    lower = replace(GROUP, leaves=(replace(first, client=ClientId(1)), last))
    higher = replace(GROUP, leaves=(first, replace(last, client=ClientId(4_000))))
    found = [mask(group, at) for group in (GROUP, lower, higher)]
    found.append(mask(GROUP, replace(at, digest=BEFORE)))
    for k, one in enumerate(found):
        for other in found[:k]:
            assert np.count_nonzero(AT.ring.sub(one, other)) == AT.length
            assert np.count_nonzero(AT.ring.add(one, other)) == AT.length


def test_what_a_role_remembers_of_messages_does_not_grow_with_epochs() -> None:
    run = Waiting()
    run.join()
    sizes = set()
    for epoch in range(1, 6):
        run.epoch(header(epoch))
        roles = (run.server, *run.members.values())
        sizes.add(tuple(len(role._handled) for role in roles))
    assert len(sizes) == 1
