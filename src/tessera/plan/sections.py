"""The sections of a plan, one record each; each checks its own values where it is made.

The text under a field is the one explanation of its key (`reference.py`): its first paragraph is
the comment in a plan that a command writes, all of it is in `docs/plan.md`. That of a class is
likewise about its section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Final

import numpy as np

from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.compression import LEVELS, TopBy, shapes_of
from tessera.learning.training.settings import LocalTraining
from tessera.plan.dp import DPPlan
from tessera.privacy.dp.events import THE_METRICS, THE_SHARING
from tessera.privacy.dp.mechanism import check_rate
from tessera.privacy.dp.participation import Participation
from tessera.privacy.index.response import IndexPrivacy, Perturbation
from tessera.protocols.secagg.params import GraphKind, Threat
from tessera.protocols.two_server.params import Read
from tessera.protocols.union.choice import EncodingChoice


class Sharing(StrEnum):
    """How a client's update reaches the sum: masked, in the clear, or as its own mask allows."""

    SECURE = "secure"
    PLAIN = "plain"
    AUTO = "auto"


class Writing(StrEnum):
    """How rows are written between two servers."""

    AUTO = "auto"
    DPF = "dpf"
    DENSE = "dense"


class Domain(StrEnum):
    """Which rows two servers process."""

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
    """A table of the model; with a task, the task's tables take their place."""

    name: str
    """What clients and servers call the table."""
    rows: int
    """Rows of the whole table, 1 to 2^40."""
    width: int
    """Columns: values in a row, 1 to 65,535."""
    derived_from: str = ""
    """The table whose rows decide the rows of this one, by a public map.

    Empty for a table whose rows a client chooses.
    """

    def __post_init__(self) -> None:
        if not self.name or not 1 <= self.rows < 2**40 or not 1 <= self.width < 2**16:
            raise ConfigError(
                f"table {self.name!r}: {self.rows} rows of {self.width} columns",
                hint="a table has a name, 1 to 2^40 rows and 1 to 65,535 columns",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The model outside its tables, and how it is sent to clients."""

    dense: int = 0
    """Parameters outside the tables; with a task, the task's."""
    precision: Precision = Precision.FLOAT32
    """Numbers sent to clients; "float16" halves the bytes."""
    largest: float = 65504.0
    """Largest size of a parameter; a client that is sent a larger one leaves.

    Such a model is not one that training has led to: whoever computes with it sends nothing of its
    own, so that a server could single out the others. The default is the largest float16.
    """

    shapes: str = ""
    """Tensors of the dense part in order, such as "8678x100 100"; with a task, the task's.

    Needed where large tensors are cut into rows ([update] top_by).
    """

    packed: str = ""
    """Digest of the first model, its maps and clients; written by `tessera pack`.

    So all that is bound to a plan is bound to the model that a deployment begins with.
    """

    def __post_init__(self) -> None:
        check_at_least("dense", self.dense, 0)
        shapes_of(self.shapes)
        if not 0.0 < self.largest < float("inf"):
            raise ConfigError(f"largest = {self.largest}", hint="largest is a finite number over 0")


GROUPS: Final = "groups"
"""The level of index privacy at which clients are in fixed groups."""

GROUP_SIZE: Final = 10
"""Clients in a fixed group, where a plan does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """Index privacy: randomised response over the rows of the union.

    It hides which of these rows a client has; the union itself is known. Outside of fixed groups a
    client may choose other probabilities for itself.
    """

    level: str = "groups"
    """"groups", or probabilities of the papers: cpp1 (exact) to cpp5 (all).

    With "groups" clients are in fixed groups ([groups]), in which everybody names the whole union,
    and union and sums open over the whole group or not at all: a holder is hidden among the group
    for any number of rounds of that one group, from whoever knows no row of a member
    (docs/threat-model.md). The others are the choices of Niu et al. 2020, Table 3; over many rounds
    the sums identify most holders in spite of them (docs/protocols/index-privacy.md). Empty if p1
    to p4 are given instead.
    """
    p1: float = 1.0
    """Probability of a permanent yes for a row that the client has."""
    p2: float = 1.0
    """Probability of a permanent yes for another row of the union."""
    p3: float = 1.0
    """Probability of an instantaneous yes after a permanent yes."""
    p4: float = 1.0
    """Probability of an instantaneous yes after a permanent no."""
    decoys: float = 0.1
    """Random ids that a client adds to the union, per real id."""
    min_group: int = 0
    """Fewest clients that a row is summed over; 0: two honest ones."""
    insecure_small_groups: bool = False
    """Allow a smaller min_group, as in the submodel papers."""
    strict_quorum: bool = False
    """A row whose group dropouts shrink below min_group is not summed."""
    period_rounds: int = 100
    """Rounds that share one set of permanent answers."""
    own_rounds: int = 0
    """Rounds of its own that a client has in a period before it takes the next.

    0: period_rounds. Periods follow from the leader's round ids, and a
    client refuses one that is early by its own count. Where cohorts are drawn, a client has fewer
    rounds than the federation.
    """
    budget: float = 0.0
    """Most epsilon of the answers that a client spends; 0: that of 20 periods.

    Over all periods; a client that has no budget of its own answers no more when it is spent.
    Exact answers (cpp1) cost infinitely much, so that 0 is no limit there.
    """
    keep: float = 1.0
    """Probability that a client keeps a real row, for a period.

    With `add`, the perturbed real set of Niu et al. 2019 (arXiv 1911.02254), Appendix D.
    """
    add: float = 0.0
    """Probability that a client takes another row for real, for a period."""
    pseudonyms: bool = False
    """Every client has a new name in every round; in simulations only.

    Over a network it would take one-time tokens and a relay.
    """

    def __post_init__(self) -> None:
        check_at_least("decoys", self.decoys, 0)
        check_at_least("min_group", self.min_group, 0)
        check_at_least("period_rounds", self.period_rounds, 1)
        check_at_least("own_rounds", self.own_rounds, 0)
        check_at_least("budget", self.budget, 0)
        if self.own_rounds > self.period_rounds:
            raise ConfigError(
                f"own_rounds = {self.own_rounds} of period_rounds = {self.period_rounds}",
                hint="no client has more rounds in a period than the federation",
            )
        self._check_groups()
        if self.level and {self.p1, self.p2, self.p3, self.p4} != {1.0}:
            raise ConfigError(
                f"level = {self.level!r} and probabilities",
                hint='give one, or level = "" for those',
            )
        _ = self.index, self.perturbation  # a value that is not a probability is refused here
        if self.pseudonyms and self.index.fingerprints:
            raise ConfigError(
                "pseudonyms with answers that never change (p3 = 1, p4 = 0): these are a "
                "fingerprint, and link all rounds of a period",
                hint="use a level with instantaneous answers (cpp2 to cpp4) or cpp5, or no "
                "pseudonyms",
            )

    def _check_groups(self) -> None:
        """Refuse what would make one member's trace differ from another's."""
        if not self.grouped:
            return
        for name, wrong in (
            ("pseudonyms", self.pseudonyms),
            ("insecure_small_groups", self.insecure_small_groups),
        ):
            if wrong:
                raise ConfigError(
                    f'level = "groups" with {name}: members of a group are always the same, and '
                    "its sums open over all of them",
                    hint=f"leave {name} out, or name another level",
                )

    @property
    def least_rounds(self) -> int:
        """Rounds of its own that a client has in a period before it takes the next."""
        return self.own_rounds or self.period_rounds

    @property
    def grouped(self) -> bool:
        """Whether the rows of clients are to be hidden in fixed groups."""
        return self.level == GROUPS

    @property
    def only_simulated(self) -> str:
        """Why services do not carry it; "" if they do."""
        return "pseudonyms need a relay, which is not built" if self.pseudonyms else ""

    def check_own(self, own: IndexPrivacy | None) -> None:
        """Refuse a client's own probabilities that would link its pseudonyms."""
        if self.pseudonyms and own is not None and own.fingerprints:
            raise ConfigError(
                "under pseudonyms answers that never change (p3 = 1, p4 = 0) are a fingerprint",
                hint="choose probabilities with instantaneous answers, or those of the plan",
            )

    def own_rounds_of(self, chosen: int | None, drawn: int) -> int | None:
        """Rounds that a client insists on: its own choice, or `drawn` where nobody has said."""
        said = self.own_rounds or chosen not in (None, self.least_rounds)
        return chosen if said else drawn

    @property
    def decoy_share(self) -> float:
        """Decoys per real id; none in a group, which opens whole or not at all."""
        return 0.0 if self.grouped else self.decoys

    @property
    def index(self) -> IndexPrivacy:
        if self.grouped:
            return IndexPrivacy.named("cpp5")
        if self.level:
            return IndexPrivacy.named(self.level)
        return IndexPrivacy(p1=self.p1, p2=self.p2, p3=self.p3, p4=self.p4)

    @property
    def perturbation(self) -> Perturbation | None:
        if (self.keep, self.add) == (1.0, 0.0):
            return None
        return Perturbation(keep=self.keep, add=self.add)


class DrawnBy(StrEnum):
    """What decides who is in which round."""

    SEED = "seed"
    SCHEDULE = "schedule"
    SECRET = "secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortsPlan:
    """Who is in which round, and how often: what noise has to be sized for.

    Clients keep it: each stores the rounds that it was in, and refuses one that is too early or one
    too many. Fixed groups have no cohorts.
    """

    drawn: DrawnBy = DrawnBy.SEED
    """By the plan's "seed", by a public "schedule", or by "secret" coins.

    "seed": a cohort is drawn at random in every round, and everybody can compute it. "schedule":
    every client has a place in a pass over all of them, in the same order in every pass; the order
    is drawn after registration has closed. "secret": a coin of the leader's for every client and
    round.
    """
    rounds_per_client: int = 0
    """Rounds of a training that a client is in, at most; 0: by rounds and separation.

    A training is the rounds of [simulation]. With a task it is computed: with "schedule" the passes
    there are; with "seed" and noise for a budget the most rounds that the seed gives to anybody.
    Not with "secret".
    """
    separation: int = 0
    """Rounds from one of a client's to its next, at least; 0: 1, or a whole pass.

    Two rounds in a row are 1 apart. With "schedule" only. A pass has as many rounds as clients fill
    cohorts, and with a task it is computed from its clients.
    """
    share: float = 0.0
    """Probability that a client is in a round, with "secret".

    With [dp] unit = "user" and trust = "server" or "each". Cohorts vary in size; `cohort` is to be
    the number that is expected, and is what sums are divided by. Against readers of the model, and
    against clients that are not shown who takes part, every round is charged as a sample; against
    all others every participation in full.
    """

    def __post_init__(self) -> None:
        choose_by_name(self, "drawn", DrawnBy)
        check_at_least("rounds_per_client", self.rounds_per_client, 0)
        check_at_least("separation", self.separation, 0)
        secret, said = self.drawn is DrawnBy.SECRET, f"drawn = {self.drawn.value!r}"
        if secret:
            check_rate(self.share)
        elif self.share:
            raise ConfigError(
                f"share = {self.share:g} with {said}: nothing is drawn by coins",
                hint='leave it out, or use drawn = "secret"',
            )
        if secret and self.rounds_per_client:
            raise ConfigError(
                f"rounds_per_client = {self.rounds_per_client} with {said}: who has had them would "
                "be in no other round, and coins would not be independent",
                hint='leave it out, or use drawn = "schedule"',
            )
        if self.separation and self.drawn is not DrawnBy.SCHEDULE:
            raise ConfigError(
                f"separation = {self.separation} with {said}, which keeps no distance",
                hint='leave it out, or use drawn = "schedule"',
            )

    @property
    def scheduled(self) -> bool:
        return self.drawn is DrawnBy.SCHEDULE

    def bound(self, rounds: int) -> Participation:
        """In which of so many rounds a client may be."""
        apart = self.separation or 1
        fit = -(-rounds // apart)
        most = min(self.rounds_per_client or fit, fit)
        return Participation(rounds=rounds, most=most, separation=apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsPlan:
    """Fixed groups: a sum waits until all members have delivered.

    With level = "groups" of scheme "secure-submodel", or of whole models with "secure-fedavg" if
    `size` is given. A group is never regrouped: one that cannot go on is retired, and its members
    stop (docs/protocols/epochs.md).
    """

    size: int = 0
    """Clients in a group; 0: 10, or no groups with "secure-fedavg"."""
    age_weight: float = 0.0
    """A sum that waited k rounds counts (1 + k)^-age_weight; 0: in full.

    From the round in which its base was fixed to the one in which it opens. Most wait a round or
    two, and lose more by counting less than by their age.
    """
    period: int = 0
    """Updates before a new period begins, with a new union; 0: never.

    Rows and examples of a period are those up to its cut-off. What a new period adds shows who was
    active in between to whoever knows it.
    """
    retire_after: int = 3
    """Failures in a row after which a group is retired.

    Sums that honest members cannot have reached, or unions that do not decode.
    """
    longest_wait: int = 100
    """Rounds that an epoch waits for its last member before its group is retired.

    A member that does not come so long has left. Nothing of the open epoch is used.
    """
    delay: float = 0.0
    """Seconds from a client's download to what it sends; in deployments.

    Longer than the slowest device needs for [training] examples: who is late because of its data is
    identified.
    """
    deadline: float = 2_592_000.0
    """Seconds after which a member that has not delivered erases its mask key; in deployments.

    From when the key was made, that is from its last delivery, by its own clock; 30 days. It is out
    of its group then, which is retired: whoever takes its device later opens nothing.
    """
    small: bool = False
    """Groups may be drawn among fewer newcomers than make ten groups.

    For tests, demos and small federations. Whoever admits clients may then choose who is in a
    group: its B is said to be on the operator's word.
    """

    def __post_init__(self) -> None:
        check_at_least("size", self.size or GROUP_SIZE, 2)
        check_at_least("period", self.period, 0)
        check_at_least("retire_after", self.retire_after, 1)
        check_at_least("longest_wait", self.longest_wait, 1)
        for name in ("age_weight", "delay"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} = {getattr(self, name)}", hint=f"{name} is 0 or more")
        if not self.delay < self.deadline < float("inf"):
            raise ConfigError(
                f"deadline = {self.deadline}: a member would be out before it may deliver",
                hint=f"above delay, which is {self.delay:g} seconds",
            )

    def is_over(self, updates: int) -> bool:
        """Whether a period with so many updates is."""
        return 0 < self.period <= updates

    def weight(self, age: int) -> float:
        """What a sum counts that opens so many rounds after its base was fixed."""
        return float((1.0 + age) ** -self.age_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPlan:
    """The secure sum: what it withstands."""

    threat: Threat = Threat.SEMI_HONEST
    """The server: "semi-honest", or "active", one that lies.

    Against an active server clients sign their keys. With cpp1 to cpp4 it is refused: clients that
    name different rows cannot check who shares them.
    """
    graph: GraphKind = GraphKind.COMPLETE
    """Who masks with whom: "complete", or "sparse" for large cohorts."""
    corrupt: int = 0
    """Clients that may collude with the server."""
    dropout: float = 0.2
    """Share of the cohort that may drop out; beyond it the round aborts."""
    threshold: int = 0
    """Shares that reconstruct a secret; 0: computed from dropout and corrupt."""
    sharing: Sharing = Sharing.SECURE
    """Updates that are masked: "secure" all, "plain" none, "auto" by indicator.

    The server sees which way a client went, and so learns that bit.
    """
    indicator: float = 0.05
    """With "auto", clients with a privacy indicator up to this do not mask.

    The indicator is the mean squared error of a client's private mask against its own ratings, as
    the client estimates it (Yang et al. 2021, Definition 3.1).
    """

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
                hint="use 0 up to below 1; 0.2 lets a fifth drop out",
            )
        if self.sharing is not Sharing.SECURE and (self.threat is Threat.ACTIVE or self.threshold):
            raise ConfigError(
                f"sharing = {self.sharing.value!r} with an active server or a threshold of one's "
                "own: how many are left to the secure sum differs from round to round",
                hint='use sharing = "secure", or threat = "semi-honest" and no threshold',
            )

    @property
    def signs(self) -> bool:
        """Whether clients sign their keys, since the server may lie."""
        return self.threat is Threat.ACTIVE

    @property
    def after_collect(self) -> tuple[str, ...]:
        """The phases of a masked sum once its inputs are collected."""
        return ("consistency", "unmask") if self.signs else ("unmask",)

    @property
    def released(self) -> tuple[str, ...]:
        """What the server learns of a client by the way its update takes."""
        return (THE_SHARING,) if self.sharing is Sharing.AUTO else ()

    def check_unsigned(self, what: str) -> None:
        """Refuse a second sum beside that of a round where clients sign their keys."""
        if self.signs:
            raise ConfigError(
                f"plan: {what} against an active server need signed keys for a second sum",
                hint='use threat = "semi-honest"; metrics = "central" needs no such sum',
            )

    def unmasked(self, sharing: Sharing | None, indicator: float | None) -> bool:
        """Whether a client with this choice (None: the plan's) and estimate does not mask."""
        found = sharing or self.sharing
        if found is not Sharing.AUTO:
            return found is Sharing.PLAIN
        # Without an estimate the update is masked; NaN compares as false.
        return indicator is not None and indicator <= self.indicator


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionPlan:
    """The private set union of the rows that a cohort needs."""

    encoding: EncodingChoice = EncodingChoice.AUTO
    """How ids are encoded: "bloom", "sum-table", or "auto": by expected bytes."""
    max_rows: int = 1000
    """Most rows of a table that a client uses; others are over the cap."""
    expected: int = 0
    """A public estimate of the union's size; 0: the worst case."""

    def __post_init__(self) -> None:
        check_at_least("max_rows", self.max_rows, 1)
        check_at_least("expected", self.expected, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How updates are clipped and rounded before they are summed."""

    levels: int = LEVELS
    """Values to which clipped numbers are rounded, unbiased."""
    clip: float = 0.0
    """Clips a row's delta times the examples that involve it to [-clip, clip].

    0: the task's, or 1 without a task.
    """
    dense_clip: float = 0.0
    """The same for the dense part, times all examples of the client.

    And for whole models. 0: the task's, or `clip` without a task.
    """
    max_count: int = 2**14 - 1
    """Most examples that count for one row."""
    average: Average = Average.AUTO
    """Weights of whole models: "examples", or "rows": a count for each row.

    By rows, a whole model is averaged as the rows of a submodel are. "auto": as the task says.
    """
    top: float = 1.0
    """Share of the dense part that a client sends: its largest changes; 1: all.

    Which these are is hidden between two servers, and shown in the schemes in the clear. Schemes
    that sum masked rows have no way to hide it.
    """
    top_by: TopBy = TopBy.ELEMENT
    """What is selected by size: "element", or "row": of tensors with 1,000 rows.

    By "row", tensors of fewer rows are sent whole. A row's size is the sum of its absolute values.
    """
    error_feedback: bool = False
    """Clients keep what they did not send, and add it to their next update."""

    def __post_init__(self) -> None:
        choose_by_name(self, "average", Average)
        choose_by_name(self, "top_by", TopBy)
        if not 0.0 < self.top <= 1.0:
            raise ConfigError(
                f"top = {self.top} is not a share of the dense part",
                hint="above 0 and up to 1; 0.01 sends the largest hundredth",
            )
        if self.error_feedback and self.top == 1.0:
            raise ConfigError(
                "error_feedback without top: where all is sent nothing is left to keep",
                hint="such as top = 0.01, or leave it out",
            )


class WhenAbsent(StrEnum):
    """What two servers do when somebody is missing whose keys last."""

    REFUSE = "refuse"
    ALLOW = "allow"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoServerPlan:
    """For scheme "two-server": a leader and a helper that do not collude."""

    write: Writing = Writing.AUTO
    """Point functions ("dpf"), plain shares ("dense"), or "auto": by bytes."""
    domain: Domain = Domain.AUTO
    """Rows that both servers process: "whole" tables, the "union", or "auto".

    A server processes all of them for every client. "auto" takes the cohort's union if a table has
    more than `row_limit` rows.
    """
    row_limit: int = 2**20
    """Most rows of a table that is processed whole."""
    min_cohort: int = 0
    """Fewest reports that are summed; 0: what [security] dropout leaves.

    Once their list is closed, no more are excluded than dropout allows, whatever this is.
    """
    stash: int = 0
    """Rows that may miss their bin, for small tables only."""
    check: bool = True
    """Clients check fetched rows; false takes fewer bytes.

    A row that one server has changed is noticed. Without it, a server that lies can learn which
    rows a client has.
    """
    verify: bool = True
    """Both servers check that a client writes one leaf in a bin at most; false takes fewer bytes.

    A leaf is one row, or up to four rows of few words. A client that fails is left out of the sum.
    How large its words are is not checked.
    """
    key_rounds: int = 1
    """Rounds that a client's keys last; it sends shorter reports in all but the first of them.

    The cohort stays the same so long, and new rows wait for the next keys.
    """
    absent: WhenAbsent = WhenAbsent.REFUSE
    """When a client whose keys last is missing: "refuse" to open a sum, or "allow" it.

    Its rows show in the difference of two sums.
    """

    def __post_init__(self) -> None:
        choose_by_name(self, "write", Writing)
        choose_by_name(self, "domain", Domain)
        check_at_least("row_limit", self.row_limit, 1)
        choose_by_name(self, "absent", WhenAbsent)
        check_at_least("key_rounds", self.key_rounds, 1)
        check_at_least("stash", self.stash, 0)
        if self.min_cohort == 1 or self.min_cohort < 0:
            raise ConfigError(
                f"min_cohort = {self.min_cohort}: a sum over one client is that client's own",
                hint="2 or more, or 0 for what [security] dropout leaves",
            )

    @property
    def reading(self) -> Read:
        """How rows are fetched."""
        return Read.CHECKED if self.check else Read.POINTS

    @property
    def after_collect(self) -> tuple[str, ...]:
        """What the servers do once reports are collected, phase by phase."""
        return ("check", "exclude", "open") if self.verify else ("exclude", "open")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """What is trained: data, model and metric by name, and their options.

    Without a task, rounds move synthetic vectors.
    """

    name: str = ""
    """One of the tasks that `tessera init` lists."""
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
    """What only a simulation decides; clients need not agree on it."""

    rounds: int = 50
    """Rounds of training."""
    crypto: Crypto = Crypto.EVERY
    """Rounds with real messages and masks: "every", "sampled" or "none".

    The others are ideal rounds: the plain sum over the same integers (`rounds/ideal.py`).
    """
    crypto_every: int = 10
    """With "sampled", rounds from one real round to the next."""
    dropout: float = 0.0
    """Share of a cohort that does drop out, at random phases."""
    cutoff: float = 1.0
    """Share of all events up to the cut-off of the first period of fixed groups.

    Of a task whose events have times. Below 1, a client's data of a period are those up to its
    cut-off; a new one begins ([groups] period) as long as there is a later one.
    """
    cutoff_step: float = 0.0
    """Share of all events between the cut-offs of two periods."""
    min_examples: int = 1
    """Clients with fewer examples are never sampled."""
    evaluate_every: int = 5
    """Rounds between tests of the model; the last round is tested, too."""
    patience: int = 0
    """Tests without a better figure after which training ends; 0: all rounds.

    Tests on a validation part, which is then held out: the last tenth of every client's training
    examples. With [dp] it takes metrics = "federated" and unit = "user": noisy figures decide, and
    the budget's share for metrics is for both parts.
    """
    metrics: Metrics = Metrics.CENTRAL
    """Where the model is tested: "central", or "federated": by clients.

    Of what clients test, only sums leave them.
    """

    def __post_init__(self) -> None:
        choose_by_name(self, "crypto", Crypto)
        choose_by_name(self, "metrics", Metrics)
        for name in ("rounds", "crypto_every", "evaluate_every"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("min_examples", self.min_examples, 0)
        check_at_least("patience", self.patience, 0)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"dropout = {self.dropout} is not a share of the cohort",
                hint="use 0 up to below 1",
            )
        if not (0.0 < self.cutoff <= 1.0 and 0.0 <= self.cutoff_step <= 1.0):
            raise ConfigError(
                f"cutoff = {self.cutoff}, cutoff_step = {self.cutoff_step}: not shares of events",
                hint="cutoff above 0, both up to 1",
            )

    @property
    def cuts_data(self) -> bool:
        """Whether periods of fixed groups have cut-offs, or all data from the beginning."""
        return self.cutoff < 1.0

    def share_of(self, period: int) -> float | None:
        """Of all events those up to a period's cut-off; None: there is no later one."""
        if period > 1 and (not self.cutoff_step or self.share_of(period - 1) in (None, 1.0)):
            return None
        return min(1.0, self.cutoff + (period - 1) * self.cutoff_step)

    @property
    def clients_test(self) -> bool:
        """Whether clients test the model, and not one place."""
        return self.metrics is Metrics.FEDERATED

    @property
    def released(self) -> tuple[str, ...]:
        """What the tests open of clients, where nobody adds noise to it."""
        return (THE_METRICS,) if self.clients_test else ()

    @property
    def tested_parts(self) -> int:
        """The test parts and, where training stops by them, the validation parts."""
        return 2 if self.patience else 1

    @property
    def only_simulated(self) -> str:
        """Why services do not do it; "" if they do."""
        return "federated metrics are not part of a deployment yet" if self.clients_test else ""

    def due(self, done: int, rounds: int) -> bool:
        """Whether the model is tested after so many of these rounds."""
        return done % self.evaluate_every == 0 or done == rounds

    def real(self, round_id: RoundId) -> bool:
        """Whether this round sends real messages, masked where the scheme masks them."""
        sampled = self.crypto is Crypto.SAMPLED and int(round_id) % self.crypto_every == 0
        return self.crypto is Crypto.EVERY or sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """What only a deployment decides: deadlines, in seconds, and how many it serves. No digest
    covers it, and every operator may change it at a restart."""

    join: float = 60.0
    """Until the first phase of a round closes without those who are missing."""
    phase: float = 60.0
    """The same for every later phase; training is in one of them."""
    pause: float = 0.0
    """From the end of a round to the beginning of the next."""
    poll: float = 20.0
    """The longest that a request waits for news."""
    request: float = 30.0
    """Until a request that does not end is closed, headers included."""
    handshake: float = 10.0
    """Until a connection to the leader is closed that has not ended its TLS handshake."""
    retry: float = 1.0
    """Until a party tries again when the leader cannot be reached; doubled up to `poll`."""
    connections: int = 2048
    """Connections that a leader serves at a time: one for each client, and the helper's."""

    def __post_init__(self) -> None:
        check_at_least("[service] connections", self.connections, 2)
        for name in ("join", "phase", "poll", "request", "handshake", "retry"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"[service] {name} = {getattr(self, name)}", hint="a deadline is above 0"
                )
        check_at_least("pause", self.pause, 0)


AGREED_BY_NOBODY: Final = frozenset({"simulation", "service"})
"""Sections that are no part of a plan's digest."""

SECTIONS: Final[dict[str, type[Any]]] = {
    "model": ModelPlan,
    "privacy": PrivacyPlan,
    "groups": GroupsPlan,
    "cohorts": CohortsPlan,
    "security": SecurityPlan,
    "union": UnionPlan,
    "update": UpdatePlan,
    "two_server": TwoServerPlan,
    "training": LocalTraining,
    "server": ServerStep,
    "dp": DPPlan,
    "simulation": SimulationPlan,
    "service": ServicePlan,
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
