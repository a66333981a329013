"""Secrets put together from shares, checked, and the authors of bad shares named.

A recombined mask key must have the public key its owner advertised, a self-mask seed the
commitment. Where they differ some share is wrong. As long as a threshold of right ones is among
those that came, they are found, and whoever gave another one is named; when no choice of holders
gives the right secret, it was shared wrongly by its owner, who is named instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tessera.crypto import shamir
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError
from tessera.ids import ClientId


@dataclass(frozen=True, slots=True)
class Wanted:
    """A client's secret to be put together: its shares by holder, and how to tell a right one."""

    owner: ClientId
    points: Mapping[ClientId, int]
    shares: Mapping[ClientId, bytes] = field(repr=False)
    is_right: Callable[[Secret], bool] = field(repr=False)


@dataclass(slots=True)
class Recovered:
    """The secrets by owner, the holders that gave wrong shares, the owners that shared wrongly."""

    secrets: dict[ClientId, Secret] = field(default_factory=dict, repr=False)
    bad_holders: set[ClientId] = field(default_factory=set)
    bad_owners: set[ClientId] = field(default_factory=set)


def recover(wanted: list[Wanted], *, threshold: int) -> Recovered:
    """Every secret from the first threshold of its holders, or from others where that fails."""
    found = Recovered()
    doubtful: list[Wanted] = []
    together: dict[tuple[int, ...], list[tuple[Wanted, list[bytes]]]] = defaultdict(list)
    for one in wanted:
        chosen = sorted(one.shares, key=one.points.__getitem__)[:threshold]
        points = tuple(one.points[c] for c in chosen)
        together[points].append((one, [one.shares[c] for c in chosen]))
    for points, batch in together.items():
        # Secrets with the same holders cost one interpolation.
        try:
            secrets = shamir.combine_many(
                points, [shares for _, shares in batch], threshold=threshold
            )
        except CryptoError:
            doubtful += [one for one, _ in batch]
            continue
        for (one, _), secret in zip(batch, secrets, strict=True):
            if one.is_right(secret):
                found.secrets[one.owner] = secret
            else:
                doubtful.append(one)
    for one in doubtful:
        _search(one, threshold, found)
    return found


def _search(one: Wanted, threshold: int, found: Recovered) -> None:
    """Try other choices of holders: first without the known bad, then every run around the ring."""
    trusted = sorted(c for c in one.shares if c not in found.bad_holders)
    everybody = sorted(one.shares)
    runs = [
        [ring[(start + i) % len(ring)] for i in range(threshold)]
        for ring in (trusted, everybody)
        if len(ring) >= threshold
        for start in range(len(ring))
    ]
    for holders in runs:
        shares = {one.points[c]: one.shares[c] for c in holders}
        secret = _combined(shares, threshold)
        if secret is None or not one.is_right(secret):
            continue
        found.secrets[one.owner] = secret
        for candidate in set(everybody) - set(holders):
            # A right share may stand in for any other one; a wrong one spoils the outcome.
            swapped = dict(shares)
            del swapped[one.points[holders[0]]]
            swapped[one.points[candidate]] = one.shares[candidate]
            if _combined(swapped, threshold) != secret:
                found.bad_holders.add(candidate)
        return
    found.bad_owners.add(one.owner)


def _combined(shares: Mapping[int, bytes], threshold: int) -> Secret | None:
    try:
        return shamir.combine(shares, threshold=threshold)
    except CryptoError:
        return None
