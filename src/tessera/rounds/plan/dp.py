"""The section [dp]: noise that keeps a budget per item, user or subject.

A section of its own and no default: a plan without it trains without noise, and has the digest that
it always had. What the whole plan has to be like for it is checked in `rounds/dp.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal, TypeAlias, get_args

from tessera.errors import ConfigError
from tessera.learning.local_training import LocalTraining
from tessera.privacy.accounting import check_delta
from tessera.privacy.guarantee import Trust, Unit
from tessera.privacy.mechanism import check_noise, check_rate
from tessera.privacy.noise_setting import Drawn

BATCH: Final = 32
"""Examples that a batch is to have, where a task takes all of a client's at once."""

Protected: TypeAlias = Literal["item", "user", "subject"]


class NoiseFrom(StrEnum):
    """Who adds the noise, and so who has to be honest."""

    SERVER = "server"
    LOCAL = "local"

    @property
    def trust(self) -> Trust:
        return {NoiseFrom.SERVER: Trust.CENTRAL, NoiseFrom.LOCAL: Trust.LOCAL}[self]


class Unknown(StrEnum):
    """What becomes of records that name no subject."""

    ERROR = "error"
    ONE_SUBJECT = "one-subject"


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPlan:
    """Differential privacy of examples, clients or persons, by clipping and noise.

    A plan without this section has none. What a number says, and against whom, is in
    docs/threat-model.md.
    """

    unit: Protected
    """What is protected: an "item", a "user" or a "subject".

    One training example; all that a client sends; or a person, whose records may sit with several
    clients.
    """
    epsilon: float = 0.0
    """The budget per unit, over all rounds; 0: none, and `noise` is given.

    Training ends before the round that would pass it.
    """
    delta: float = 1e-6
    """Probability that the budget does not cover; below one over the people."""
    noise: float = 0.0
    """Standard deviation of the noise over `clip`; 0: the least for the budget.

    The least is for all rounds of [simulation], every one of them with this client. It is written
    into the plan when a run begins.
    """
    clip: float = 1.0
    """Longest contribution of a unit: dense part, rows and local rows together."""
    sampling: float = 1.0
    """Probability that an example, person or record is in a step's batch.

    By the client's own coins. What comes of a batch is divided by [training] batch, which is to be
    the expected number of examples. At user level it is 1: clients of a round are drawn publicly,
    which protects nobody.
    """
    steps: int = 1
    """Noisy steps of a client in a round, whatever data it has."""
    trust: NoiseFrom = NoiseFrom.LOCAL
    """Who adds the noise: "local", each client to its own; "server", to the sum."""
    drawn: Drawn = Drawn.SUBJECTS
    """Unit subject: whether "subjects" are drawn or "records".

    Where subjects are drawn, a person's gradients are added and clipped once; records are clipped
    one by one.
    """
    cap: int = 0
    """Unit subject: records of a person in a batch, at most; 0: all.

    More are cut and not refilled. Drawing records takes a cap.
    """
    records_per_subject: int = 0
    """Records of a person at one client, at most; 0: not stated.

    Drawing records takes one. Nobody checks it: every number per subject names it.
    """
    clients_per_subject: int = 1
    """Clients that hold one person, at most; nobody checks it."""
    unknown: Unknown = Unknown.ERROR
    """Records without a subject: "error", or "one-subject": all are one person's."""

    def __post_init__(self) -> None:
        if self.unit not in get_args(Protected):
            raise ConfigError(
                f"unit = {self.unit!r}", hint=f"one of {', '.join(get_args(Protected))}"
            )
        for name, kind in (("trust", NoiseFrom), ("drawn", Drawn), ("unknown", Unknown)):
            value = getattr(self, name)
            if value not in list(kind):
                raise ConfigError(f"{name} = {value!r}", hint=f"one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))
        check_delta(self.delta)
        check_rate(self.sampling)
        if self.noise:
            check_noise(self.noise)
        if not 0.0 <= self.epsilon < math.inf:
            raise ConfigError(f"epsilon = {self.epsilon}", hint="epsilon is 0 or more")
        if not (self.epsilon or self.noise):
            raise ConfigError(
                "neither epsilon nor noise is given", hint="such as epsilon = 3, or noise = 1"
            )
        if not 0.0 < self.clip < math.inf:
            raise ConfigError(f"clip = {self.clip}", hint="clip is above 0")
        for name, least in (
            ("steps", 1),
            ("cap", 0),
            ("records_per_subject", 0),
            ("clients_per_subject", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}", hint=f"{name} is {least} or more"
                )
        self._check_unit()

    def _check_unit(self) -> None:
        if self.unit == "item" and self.trust is NoiseFrom.SERVER:
            raise ConfigError(
                'unit = "item" with trust = "server": a server that adds noise to a sum of local '
                "steps protects none of their examples",
                hint='use trust = "local", or unit = "user"',
            )
        if self.unit == "user" and (self.sampling, self.steps) != (1.0, 1):
            raise ConfigError(
                f'unit = "user" with sampling = {self.sampling:g} and steps = {self.steps}: a '
                "client sends one update a round, and that it takes part is known",
                hint="leave both out: its own training is that of [training]",
            )
        if self.unit != "subject":
            for name, value in (("cap", 0), ("records_per_subject", 0), ("clients_per_subject", 1)):
                if getattr(self, name) != value:
                    raise ConfigError(
                        f"{name} = {getattr(self, name)} with unit = {self.unit!r}",
                        hint='leave it out, or use unit = "subject"',
                    )
        elif self.drawn is Drawn.RECORDS and not (self.records_per_subject and self.cap):
            raise ConfigError(
                "drawing records claims nothing without a bound on a person's records",
                hint="state records_per_subject and cap, or draw subjects",
            )

    @property
    def protects(self) -> Unit:
        return Unit(self.unit)

    @property
    def by_batches(self) -> bool:
        """Whether noise is in every step of a client's training, and not only in what it sends."""
        return self.unit != "user"


def trained_with(dp: DPPlan | None, good: LocalTraining) -> LocalTraining:
    """A recommended training, less what does not go with this section."""
    if dp is None:
        return good
    if not dp.by_batches:
        return replace(good, clip=0.0)
    return replace(good, clip=0.0, weight_decay=0.0, epochs=1, batch=good.batch or BATCH)
