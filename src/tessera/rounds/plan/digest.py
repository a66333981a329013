"""The digest of a plan, which binds keys and signatures of a round to it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from tessera.rounds.plan.renamed import former, implied
from tessera.rounds.plan.sections import AGREED_BY_NOBODY, SECTIONS
from tessera.rounds.plan.toml import write

if TYPE_CHECKING:
    from tessera.rounds.plan.plan import Plan


def digest(plan: Plan, without: Collection[str] = ()) -> bytes:
    """SHA-256 of the plan's text without the sections that clients have no part in."""
    names = [name for name in SECTIONS if name not in AGREED_BY_NOBODY]
    agreed = write(plan, names, spelling=former, implied=implied, without=without)
    return hashlib.sha256(agreed.encode()).digest()
