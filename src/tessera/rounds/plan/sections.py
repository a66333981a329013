"""The sections of a plan, one record each; each checks its own values where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Final

import numpy as np

from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.local_training import LocalTraining
from tessera.privacy.response import IndexPrivacy, Perturbation
from tessera.protocols.secagg.params import GraphKind, Threat
from tessera.protocols.union.choice import EncodingChoice


class Sharing(StrEnum):
    """How a client's update reaches the sum: masked, in the open, or as its own mask allows."""

    SECURE = "secure"
    PLAIN = "plain"
    AUTO = "auto"


class Writing(StrEnum):
    """How rows are written between two servers."""

    AUTO = "auto"
    DPF = "dpf"
    DENSE = "dense"


class Domain(StrEnum):
    """Which rows two servers look at."""

    AUTO = "auto"
    WHOLE = "whole"
    UNION = "union"


class Precision(StrEnum):
    """How parameters travel to the clients."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<f2" if self is Precision.FLOAT16 else "<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """A table of the model. `derived_from` names the table whose rows decide its own."""

    name: str
    rows: int
    width: int
    derived_from: str = ""

    def __post_init__(self) -> None:
        if not self.name or not 1 <= self.rows < 2**40 or not 1 <= self.width < 2**16:
            raise ConfigError(
                f"table {self.name!r}: {self.rows} rows of {self.width} columns",
                hint="a table has a name, 1 to 2^40 rows and 1 to 65,535 columns",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The dense part, in parameters, and how rows and dense part are sent down."""

    dense: int = 0
    precision: Precision = Precision.FLOAT32

    def __post_init__(self) -> None:
        check_at_least("dense", self.dense, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """Which rows a client admits to: a named level, or four probabilities; and what covers them.

    A client may choose other probabilities for itself. `period_rounds` is how many rounds share one
    set of permanent answers; with `one_participation` a client takes part once in each.
    `fixed_groups` splits the clients into that many groups that always meet together. `keep` and
    `add` perturb the real set for a period (Niu et al., long version, App. D). `pseudonyms` gives
    every client a new name in every round; only a simulation can, for it takes one-time tokens and
    a relay to do it over a network.
    """

    level: str = "cpp2"  # "" where the four probabilities stand in its place
    p1: float = 1.0
    p2: float = 1.0
    p3: float = 1.0
    p4: float = 1.0
    decoys: float = 0.1
    min_group: int = 0
    insecure_small_groups: bool = False
    strict_quorum: bool = False
    period_rounds: int = 100
    one_participation: bool = False
    fixed_groups: int = 0
    keep: float = 1.0
    add: float = 0.0
    pseudonyms: bool = False

    def __post_init__(self) -> None:
        check_at_least("decoys", self.decoys, 0)
        check_at_least("min_group", self.min_group, 0)
        check_at_least("period_rounds", self.period_rounds, 1)
        check_at_least("fixed_groups", self.fixed_groups, 0)
        if self.level and {self.p1, self.p2, self.p3, self.p4} != {1.0}:
            raise ConfigError(
                f"level = {self.level!r} and probabilities",
                hint='give one, or level = "" for those',
            )
        _ = self.index, self.perturbation  # whatever is no probability is refused here

    @property
    def index(self) -> IndexPrivacy:
        if self.level:
            return IndexPrivacy.named(self.level)
        return IndexPrivacy(p1=self.p1, p2=self.p2, p3=self.p3, p4=self.p4)

    @property
    def perturbation(self) -> Perturbation | None:
        if (self.keep, self.add) == (1.0, 0.0):
            return None
        return Perturbation(keep=self.keep, add=self.add)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPlan:
    """The secure sum: against whom, with how many corrupt clients, and how many may vanish.

    `sharing` other than "secure" lets clients of a secure scheme send their updates in the open:
    all of them, or with "auto" those whose own estimate of the privacy indicator (002, Definition
    3.1) is at most `indicator`. Which way a client went is seen, and tells that bit.
    """

    threat: Threat = Threat.SEMI_HONEST
    graph: GraphKind = GraphKind.COMPLETE
    corrupt: int = 0
    dropout: float = 0.2
    threshold: int = 0
    sharing: Sharing = Sharing.SECURE
    indicator: float = 0.05

    def __post_init__(self) -> None:
        check_at_least("corrupt", self.corrupt, 0)
        check_at_least("threshold", self.threshold, 0)
        check_at_least("indicator", self.indicator, 0)
        choose_by_name(self, "threat", Threat)
        choose_by_name(self, "graph", GraphKind)
        choose_by_name(self, "sharing", Sharing)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"dropout = {self.dropout} is not a share of the cohort",
                hint="use 0 up to below 1; 0.2 lets a fifth vanish",
            )
        if self.sharing is not Sharing.SECURE and (self.threat is Threat.ACTIVE or self.threshold):
            raise ConfigError(
                f"sharing = {self.sharing.value!r} with an active server or a threshold of one's "
                "own: how many are left to the secure sum differs from round to round",
                hint='use sharing = "secure", or threat = "semi-honest" and no threshold',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionPlan:
    """The private set union: how many rows a client may name, and by which encoding."""

    encoding: EncodingChoice = EncodingChoice.AUTO
    max_rows: int = 1000
    expected: int = 0  # a public estimate of the union's size; 0: the worst case

    def __post_init__(self) -> None:
        check_at_least("max_rows", self.max_rows, 1)
        check_at_least("expected", self.expected, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How values are cut and rounded before they are summed.

    What is cut is a move times what it weighs: a row's by the examples that involve it (`clip`; 0:
    the task's, or 1 without one), the dense part's and a whole model's by the size of the training
    set (`dense_clip`; 0: the task's, or as rows). With `average = "rows"` a whole model carries the
    count of every row and is averaged as rows are.
    """

    levels: int = 2**15
    clip: float = 0.0
    dense_clip: float = 0.0
    max_count: int = 2**14 - 1
    average: Average = Average.AUTO

    def __post_init__(self) -> None:
        choose_by_name(self, "average", Average)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoServerPlan:
    """Two servers: how rows are written, how large a table may be, and how few are ever summed.

    `write` is "dpf" (keys of point functions), "dense" (all rows as two plain shares) or "auto",
    which takes the fewer bytes for each table. Every server looks at all rows of a table for every
    client: one of over `row_limit` rows is narrowed to the cohort's union first (`domain` = "auto",
    "union" always, "whole" never). A sum is opened over `min_cohort` clients at least (0: what
    [security] dropout leaves). With `check` a client finds out if one server has changed a row on
    its way down; without it keys and answers are shorter, and a server that lies can learn rows.
    """

    write: Writing = Writing.AUTO
    domain: Domain = Domain.AUTO
    row_limit: int = 2**20
    min_cohort: int = 0
    stash: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        choose_by_name(self, "write", Writing)
        choose_by_name(self, "domain", Domain)
        check_at_least("row_limit", self.row_limit, 1)
        check_at_least("stash", self.stash, 0)
        if self.min_cohort == 1 or self.min_cohort < 0:
            raise ConfigError(
                f"min_cohort = {self.min_cohort}: a sum over one client is that client's own",
                hint="2 or more, or 0 for what [security] dropout leaves",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """What is trained, by name, with the options that `tessera.tasks` knows for it.

    Without a name nothing is: rounds then move made-up vectors.
    """

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Crypto(StrEnum):
    """Which rounds of a simulation really mask their sums."""

    EVERY = "every"
    SAMPLED = "sampled"
    NONE = "none"


class Metrics(StrEnum):
    """Where held-out examples are scored: in one place, or by their clients, under a secure sum."""

    CENTRAL = "central"
    FEDERATED = "federated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """What only a simulation has a say in; it is no part of what clients agree on.

    With `crypto = "sampled"` every `crypto_every`-th round is a real one, with "none" no round is;
    the others take the plain sum over the same quantised integers (`rounds/ideal.py`).
    `dropout` is the share of a cohort that vanishes, each at a phase of its own; clients with fewer
    than `min_examples` are never sampled. The model is tested after every `evaluate_every`-th round
    and the last.
    """

    rounds: int = 50
    crypto: Crypto = Crypto.EVERY
    crypto_every: int = 10
    dropout: float = 0.0
    min_examples: int = 1
    evaluate_every: int = 5
    metrics: Metrics = Metrics.CENTRAL

    def __post_init__(self) -> None:
        choose_by_name(self, "crypto", Crypto)
        choose_by_name(self, "metrics", Metrics)
        for name in ("rounds", "crypto_every", "evaluate_every"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("min_examples", self.min_examples, 0)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"dropout = {self.dropout} is not a share of the cohort",
                hint="use 0 up to below 1",
            )

    def real(self, round_id: RoundId) -> bool:
        """Whether this round sends real messages, masked where the scheme masks them."""
        sampled = self.crypto is Crypto.SAMPLED and int(round_id) % self.crypto_every == 0
        return self.crypto is Crypto.EVERY or sampled


SECTIONS: Final[dict[str, type[Any]]] = {
    "model": ModelPlan,
    "privacy": PrivacyPlan,
    "security": SecurityPlan,
    "union": UnionPlan,
    "update": UpdatePlan,
    "two_server": TwoServerPlan,
    "training": LocalTraining,
    "server": ServerStep,
    "simulation": SimulationPlan,
}
"""By the names they have in a file; the tables and the task are read by themselves."""


def choose_by_name(plan: Any, name: str, kind: type[Enum]) -> None:
    """In Python the name of a choice will do for the choice."""
    value = getattr(plan, name)
    try:
        object.__setattr__(plan, name, kind(value))
    except ValueError:
        known = ", ".join(str(choice.value) for choice in kind)
        raise ConfigError(f"{name} = {value!r}", hint=f"one of {known}") from None


def check_at_least(name: str, value: float, least: int) -> None:
    if not value >= least:  # also refuses nan
        raise ConfigError(f"{name} = {value}", hint=f"{name} is {least} or more")
