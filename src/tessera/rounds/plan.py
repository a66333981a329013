"""Plan: everything a federation agrees on beforehand, frozen, complete, in one TOML file.

A client that holds the plan needs nothing else to know what it is asked to do, and its digest binds
every key and signature of a round to it. Unknown keys are refused: a misspelt privacy setting must
not fall back to a default in silence.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, InitVar, asdict, dataclass, field, fields, replace
from enum import Enum, StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from tessera.crypto.ring import Ring
from tessera.errors import ConfigError
from tessera.ids import RoundId, StageId, TableId
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.quantize import Quantizer
from tessera.learning.recipe import Recipe
from tessera.privacy.response import LEVELS, IndexPrivacy, Perturbation
from tessera.protocols.secagg.params import GraphKind, SecAggParams, StageSpec, TableSpec, Threat
from tessera.protocols.union.choice import EncodingChoice, choose
from tessera.protocols.union.encoding import UnionEncoding

T = TypeVar("T")

POINT_BITS: Final = 17
"""Point functions have no values of fewer bits."""

UNION: Final = StageId(0)
"""The stage of the private set union, in the scheme that has one."""


class Scheme(StrEnum):
    """Who is trusted with what; the same loop runs under each, but for central training."""

    CENTRAL = "central"
    FEDAVG = "fedavg"
    SUBMODEL = "submodel"
    SECURE_FEDAVG = "secure-fedavg"
    SECURE_SUBMODEL = "secure-submodel"
    TWO_SERVER = "two-server"

    @property
    def secure(self) -> bool:
        """Whether clients mask their inputs with each other."""
        return self in (Scheme.SECURE_FEDAVG, Scheme.SECURE_SUBMODEL)

    @property
    def hides(self) -> bool:
        """Whether no single server sees a client's update, by masks or by shares."""
        return self.secure or self is Scheme.TWO_SERVER

    @property
    def by_rows(self) -> bool:
        return self in (Scheme.SUBMODEL, Scheme.SECURE_SUBMODEL, Scheme.TWO_SERVER)

    @property
    def in_the_open(self) -> Scheme:
        """The same sums without masks."""
        plain = {Scheme.SECURE_FEDAVG: Scheme.FEDAVG, Scheme.SECURE_SUBMODEL: Scheme.SUBMODEL}
        return plain.get(self, self)


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
        _at_least("dense", self.dense, 0)


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
        _at_least("decoys", self.decoys, 0)
        _at_least("min_group", self.min_group, 0)
        _at_least("period_rounds", self.period_rounds, 1)
        _at_least("fixed_groups", self.fixed_groups, 0)
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
        _at_least("corrupt", self.corrupt, 0)
        _at_least("threshold", self.threshold, 0)
        _at_least("indicator", self.indicator, 0)
        _by_name(self, "threat", Threat)
        _by_name(self, "graph", GraphKind)
        _by_name(self, "sharing", Sharing)
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
        _at_least("max_rows", self.max_rows, 1)
        _at_least("expected", self.expected, 0)


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
        _by_name(self, "average", Average)


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
        _by_name(self, "write", Writing)
        _by_name(self, "domain", Domain)
        _at_least("row_limit", self.row_limit, 1)
        _at_least("stash", self.stash, 0)
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
    the others take the plain sum over the same quantised integers (`rounds/rehearsal.py`).
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
        _by_name(self, "crypto", Crypto)
        _by_name(self, "metrics", Metrics)
        for name in ("rounds", "crypto_every", "evaluate_every"):
            _at_least(name, getattr(self, name), 1)
        _at_least("min_examples", self.min_examples, 0)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"dropout = {self.dropout} is not a share of the cohort",
                hint="use 0 up to below 1",
            )

    def real(self, round_id: RoundId) -> bool:
        """Whether this round sends real messages, masked where the scheme masks them."""
        sampled = self.crypto is Crypto.SAMPLED and int(round_id) % self.crypto_every == 0
        return self.crypto is Crypto.EVERY or sampled


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A federation's agreement. Read from TOML, or made in Python with the same names."""

    scheme: Scheme
    cohort: int
    federation: str = "tessera"
    seed: int = 0
    tables: tuple[TablePlan, ...] = ()
    model: ModelPlan = field(default_factory=ModelPlan)
    privacy: PrivacyPlan = field(default_factory=PrivacyPlan)
    security: SecurityPlan = field(default_factory=SecurityPlan)
    union: UnionPlan = field(default_factory=UnionPlan)
    update: UpdatePlan = field(default_factory=UpdatePlan)
    two_server: TwoServerPlan = field(default_factory=TwoServerPlan)
    task: TaskPlan = field(default_factory=TaskPlan)
    training: Recipe | None = None  # None: the task's
    server: ServerStep | None = None
    simulation: SimulationPlan = field(default_factory=SimulationPlan)
    index_privacy: InitVar[str] = ""

    def __post_init__(self, index_privacy: str) -> None:
        _by_name(self, "scheme", Scheme)
        if index_privacy:
            object.__setattr__(self, "privacy", replace(self.privacy, level=index_privacy))
        _at_least("cohort", self.cohort, 2)
        _at_least("seed", self.seed, 0)
        if self.is_open:
            return  # to be completed by a task, and checked then
        if self.scheme is Scheme.SECURE_SUBMODEL and not self.tables:
            raise ConfigError(
                f"scheme = {self.scheme.value!r} without a table: there are no rows to choose",
                hint="add a [[table]], or use secure-fedavg",
            )
        if self.scheme.secure and self.security.threshold > self.cohort:
            raise ConfigError(
                f"cohort = {self.cohort} is below [security] threshold = {self.security.threshold}",
                hint="take a larger cohort, or leave the threshold out: it is computed",
            )
        names = [t.name for t in self.tables]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"plan: two tables have one name: {', '.join(names)}",
                hint="give each [[table]] a name of its own",
            )
        for table in self.tables:
            parent = table.derived_from
            if parent and (parent not in names or self.table(parent).derived_from):
                raise ConfigError(
                    f"plan: table {table.name!r} is derived from {parent!r}, which is no table "
                    "with rows of its own",
                    hint=f"the tables are {', '.join(names)}",
                )
        if self.privacy.strict_quorum and self.scheme is not Scheme.SECURE_SUBMODEL:
            raise ConfigError(
                f"plan: strict_quorum has no meaning with scheme {self.scheme}",
                hint="leave it out, or use secure-submodel",
            )
        if self.privacy.strict_quorum and self.simulation.crypto is not Crypto.EVERY:
            raise ConfigError(
                "plan: strict_quorum decides which rows are lost while a sum is unmasked, which "
                "cannot be rehearsed",
                hint='use [simulation] crypto = "every" with it',
            )
        if self.privacy.pseudonyms and self.security.threat is Threat.ACTIVE:
            raise ConfigError(
                "plan: pseudonyms with an active server: its clients sign under certified names",
                hint='use threat = "semi-honest", or no pseudonyms',
            )
        if self.scheme is Scheme.TWO_SERVER:
            self._check_two_servers()
        self.quantizer.ring(self.cohort)
        if self.scheme.secure:
            self.secagg(RoundId(0))  # whatever cannot work is refused here

    def _check_two_servers(self) -> None:
        if not self.tables:
            raise ConfigError(
                f"scheme = {self.scheme.value!r} without a table: there are no rows to fetch",
                hint="add a [[table]]",
            )
        largest = max(self.tables, key=lambda t: t.rows)
        if self.two_server.domain is Domain.WHOLE and largest.rows > self.two_server.row_limit:
            raise ConfigError(
                f"table {largest.name!r} has {largest.rows} rows, and both servers would look at "
                f"all of them for every client (row_limit = {self.two_server.row_limit})",
                hint='use domain = "union" or "auto" in [two_server], or raise row_limit',
            )
        if self.least_survivors < self.security.corrupt + 2:
            raise ConfigError(
                f"a sum over {self.least_survivors} clients of which {self.security.corrupt} are "
                "corrupt opens what one honest client wrote",
                hint="a larger cohort, or a larger min_cohort in [two_server]",
            )
        if self.least_survivors > self.cohort:
            raise ConfigError(
                f"min_cohort = {self.two_server.min_cohort} of a cohort of {self.cohort}",
                hint="a larger cohort, or a smaller min_cohort in [two_server]",
            )
        if self.narrows:
            self.union_sum(RoundId(0))  # whatever cannot work is refused here

    def with_simulation(self, **changes: Any) -> Plan:
        """The same agreement, simulated otherwise."""
        return replace(self, simulation=replace(self.simulation, **changes))

    @property
    def is_open(self) -> bool:
        """It has no model yet: that of its task is still to be written in."""
        return not self.tables and not self.model.dense

    def part(self, *, secure: bool, clients: int) -> Plan:
        """The agreement among some of a cohort: those who are masked, or those who are not."""
        scheme = self.scheme if secure else self.scheme.in_the_open
        privacy = self.privacy if secure else replace(self.privacy, strict_quorum=False)
        return replace(self, scheme=scheme, cohort=clients, privacy=privacy)

    # --- tables and their ids -------------------------------------------------------------------

    def table(self, name: str) -> TablePlan:
        return next(t for t in self.tables if t.name == name)

    def table_id(self, name: str) -> TableId:
        return TableId([t.name for t in self.tables].index(name))

    @property
    def roots(self) -> tuple[TablePlan, ...]:
        """The tables whose rows a client chooses; the others follow."""
        return tuple(t for t in self.tables if not t.derived_from)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each root table begins in the one id space of the union."""
        found, start = {}, 0
        for t in self.roots:
            found[t.name] = start
            start += t.rows
        return found

    @property
    def domain(self) -> int:
        return sum(t.rows for t in self.roots)

    @property
    def full_length(self) -> int:
        """Parameters of the whole model."""
        return self.model.dense + sum(t.rows * t.width for t in self.tables)

    @property
    def counts_rows(self) -> bool:
        """Whether a whole model carries a count for each of its rows."""
        return not self.scheme.by_rows and self.update.average is Average.ROWS

    # --- what follows from the plan ------------------------------------------------------------

    @cached_property
    def digest(self) -> bytes:
        """Binds keys and signatures to this very plan, but for what only a simulation does."""
        agreed = self._sections([name for name in SECTIONS if name != "simulation"])
        return hashlib.sha256(agreed.encode()).digest()

    @cached_property
    def quantizer(self) -> Quantizer:
        """Of rows."""
        return Quantizer(
            levels=self.update.levels,
            clip=self.update.clip or 1.0,
            max_count=self.update.max_count,
        )

    @cached_property
    def dense_quantizer(self) -> Quantizer:
        """Of the dense part, and of a whole model."""
        return replace(self.quantizer, clip=self.update.dense_clip or self.quantizer.clip)

    @cached_property
    def quorum(self) -> int:
        """The smallest group a row is opened for; 1 where rows need no group."""
        return self.secagg(RoundId(0)).quorum if self.scheme is Scheme.SECURE_SUBMODEL else 1

    @cached_property
    def least_survivors(self) -> int:
        """With fewer answers than this a round is given up."""
        if self.scheme.secure:
            return self.secagg(RoundId(0)).min_survivors
        if self.scheme is Scheme.TWO_SERVER and self.two_server.min_cohort:
            return self.two_server.min_cohort
        return self.cohort - int(self.security.dropout * self.cohort)

    @cached_property
    def ring(self) -> Ring:
        ring = self.quantizer.ring(self.cohort)
        if self.scheme is Scheme.TWO_SERVER and ring.bits < POINT_BITS:
            return Ring(POINT_BITS)
        return ring

    @cached_property
    def _encoding(self) -> UnionEncoding:
        return choose(
            self.domain,
            self.cohort,
            self.union.max_rows * len(self.roots),  # the cap is per table, the union one for all
            expected_union=self.union.expected or None,
            encoding=self.union.encoding,
            decoy_share=self.privacy.decoys,
        )

    def union_encoding(self, round_id: RoundId) -> UnionEncoding:
        """The union's encoding with this round's public hash seed."""
        seed = hashlib.sha256(self.digest + int(round_id).to_bytes(8, "little")).digest()
        return self._encoding.with_seed(int.from_bytes(seed[:8], "little"))

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """The sums of a round, in order."""
        if not self.scheme.by_rows:
            counts = sum(t.rows for t in self.tables) if self.counts_rows else 0
            length = self.full_length + counts + 1
            return (StageSpec(name="update", group=self.ring, dense=length),)
        rows = tuple(TableSpec(table=self.table_id(t.name), width=t.width + 1) for t in self.tables)
        update = StageSpec(name="update", group=self.ring, dense=self.model.dense + 1, tables=rows)
        if self.scheme is not Scheme.SECURE_SUBMODEL:
            return (update,)
        return (self._union_stage, update)

    @property
    def _union_stage(self) -> StageSpec:
        encoding = self._encoding
        return StageSpec(name="union", group=encoding.group, dense=encoding.length)

    @property
    def narrows(self) -> bool:
        """Whether two servers look at the cohort's union alone."""
        if self.scheme is not Scheme.TWO_SERVER or self.two_server.domain is Domain.WHOLE:
            return False
        large = any(t.rows > self.two_server.row_limit for t in self.tables)
        return large or self.two_server.domain is Domain.UNION

    @property
    def has_union(self) -> bool:
        """Whether a round begins with a private set union."""
        return self.scheme is Scheme.SECURE_SUBMODEL or self.narrows

    def union_sum(self, round_id: RoundId) -> SecAggParams:
        """The secure sum of a union that stands by itself, before two servers begin."""
        return self._secagg(round_id, (self._union_stage,))

    def secagg(self, round_id: RoundId) -> SecAggParams:
        """The secure sum's parameters in this round."""
        return self._secagg(round_id, self.stages)

    def _secagg(self, round_id: RoundId, stages: tuple[StageSpec, ...]) -> SecAggParams:
        return SecAggParams(
            federation=self.federation,
            round_id=round_id,
            plan_hash=self.digest,
            cohort=self.cohort,
            stages=stages,
            threat=self.security.threat,
            graph=self.security.graph,
            corrupt=self.security.corrupt,
            dropout=self.security.dropout,
            threshold=self.security.threshold,
            min_group=self.privacy.min_group,
            insecure_small_groups=self.privacy.insecure_small_groups,
            strict_quorum=self.privacy.strict_quorum,
        )

    def period(self, round_id: RoundId) -> int:
        """The period a round lies in."""
        return int(round_id) // self.privacy.period_rounds

    def split_ids(self, ids: npt.NDArray[np.uint64]) -> dict[str, npt.NDArray[np.uint64]]:
        """Ids of the union's one space, by root table."""
        found = {}
        for t in self.roots:
            start = self.offsets[t.name]
            low, high = np.searchsorted(ids, np.array([start, start + t.rows], dtype=np.uint64))
            found[t.name] = ids[low:high] - np.uint64(start)
        return found

    # --- TOML -----------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: Path) -> Plan:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not text", hint=EXAMPLE) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", hint=EXAMPLE) from error
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, *, source: str = "plan") -> Plan:
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source}: not TOML: {error}", hint=EXAMPLE) from error
        tables = raw.pop("table", [])
        if not isinstance(tables, list):
            raise ConfigError(
                f"{source}: table = {tables!r} is no list", hint="begin each with [[table]]"
            )
        parts: dict[str, Any] = {
            "tables": tuple(_build(TablePlan, t, source, "[[table]]") for t in tables)
        }
        for name, kind in SECTIONS.items():
            if name in raw:
                parts[name] = _build(kind, raw.pop(name), source, f"[{name}]")
        if "task" in raw:
            parts["task"] = _task(raw.pop("task"), source)
        hints = {f.name: f for f in fields(cls)}
        for name, value in raw.items():
            if name not in TOP_LEVEL:
                raise _unknown(source, "", name, [*TOP_LEVEL, *SECTIONS, "task", "table"])
            parts[name] = _checked(hints[name].name, TOP_LEVEL[name], value, source, "")
        for name in ("scheme", "cohort"):
            if name not in parts:
                raise ConfigError(f"{source}: {name} is missing", hint=EXAMPLE)
        try:
            plan = cls(**parts)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}", hint=error.hint or EXAMPLE) from error
        if plan.is_open and not plan.task.name:
            raise ConfigError(
                f"{source}: the model has neither tables nor a dense part, and there is no task",
                hint="add a [task], a [[table]], or dense = N in [model]",
            )
        return plan

    def to_toml(self) -> str:
        """The plan as a file that reads back to the same plan."""
        return self._sections(SECTIONS)

    def _sections(self, names: Iterable[str]) -> str:
        lines = [f"{name} = {_toml(getattr(self, name))}" for name in TOP_LEVEL]
        if self.task.name:
            options = sorted(self.task.options.items())
            lines += ["", "[task]", f"name = {_toml(self.task.name)}"]
            lines += [f"{name} = {_toml(value)}" for name, value in options]
        for name in names:
            part = getattr(self, name)
            if part is None:
                continue
            lines += ["", f"[{name}]"]
            lines += [
                f"{f.name} = {_toml(getattr(part, f.name))}"
                for f in fields(part)
                if not (name == "privacy" and part.level and f.name in ("p1", "p2", "p3", "p4"))
            ]
        for t in self.tables:
            lines += ["", "[[table]]", *(f"{k} = {_toml(v)}" for k, v in asdict(t).items())]
        return "\n".join(lines) + "\n"


EXAMPLE: Final = "`tessera plan --example` prints a plan"
LIKE: Final = {int: "10", float: "0.1", bool: "true", str: '"text"'}

SECTIONS: Final[dict[str, type[Any]]] = {
    "model": ModelPlan,
    "privacy": PrivacyPlan,
    "security": SecurityPlan,
    "union": UnionPlan,
    "update": UpdatePlan,
    "two_server": TwoServerPlan,
    "training": Recipe,
    "server": ServerStep,
    "simulation": SimulationPlan,
}
TOP_LEVEL: Final[dict[str, type[Any]]] = {
    "federation": str,
    "scheme": Scheme,
    "cohort": int,
    "seed": int,
}


def _build(kind: type[T], raw: Any, source: str, where: str) -> T:
    """One section; refuses unknown keys and values of another type, naming file and field."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: {where} = {raw!r} is a section, not a value", hint=EXAMPLE)
    hints = get_type_hints(kind)
    values = {}
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name, value in raw.items():
        if name not in known:
            raise _unknown(source, where, name, known)
        values[name] = _checked(name, hints[name], value, source, where)
    for f in fields(kind):  # type: ignore[arg-type]
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{source}: {where} {f.name} is missing", hint=EXAMPLE)
    given = values.keys() & {"p1", "p2", "p3", "p4"} if kind is PrivacyPlan else set()
    if given and values.setdefault("level", ""):
        raise ConfigError(
            f"{source}: {where} has a level and probabilities", hint="give one or the other"
        )
    try:
        built = kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {where} {error}", hint=error.hint or EXAMPLE) from error
    if given and len(given) < 4:
        missing = ", ".join(sorted({"p1", "p2", "p3", "p4"} - given))
        raise ConfigError(
            f"{source}: {where} {missing} is missing", hint="give all four, or a level"
        )
    return built


def _task(raw: Any, source: str) -> TaskPlan:
    """Its options are the task's own business, and checked where it is loaded."""
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not raw["name"]:
        raise ConfigError(f"{source}: [task] has no name", hint='such as name = "taobao-like"')
    options = {name: value for name, value in raw.items() if name != "name"}
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(
                f"{source}: [task] {name} = {value!r}", hint="options are numbers, texts or flags"
            )
    return TaskPlan(name=raw["name"], options=options)


def _by_name(plan: Any, name: str, kind: type[Enum]) -> None:
    """In Python the name of a choice will do for the choice."""
    value = getattr(plan, name)
    try:
        object.__setattr__(plan, name, kind(value))
    except ValueError:
        known = ", ".join(str(choice.value) for choice in kind)
        raise ConfigError(f"{name} = {value!r}", hint=f"one of {known}") from None


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:  # also refuses nan
        raise ConfigError(f"{name} = {value}", hint=f"{name} is {least} or more")


def _checked(name: str, kind: type[Any], value: Any, source: str, where: str) -> Any:
    label = f"{where} {name}".strip()
    if get_origin(kind) is Literal:
        kind = str  # its class knows which
    if issubclass(kind, (StrEnum, Threat, GraphKind)):
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(str(member.value) for member in kind)
            raise ConfigError(
                f"{source}: {label} = {value!r}", hint=f"it is one of {names}"
            ) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(
            f"{source}: {label} = {value!r} is not of type {kind.__name__}",
            hint=f"write {name} = {LIKE[kind]}",
        )
    if name == "level" and value not in ("", *LEVELS):
        raise ConfigError(f"{source}: {label} = {value!r}", hint=f"levels: {', '.join(LEVELS)}")
    return value


def _unknown(source: str, where: str, name: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    return ConfigError(f"{source}: unknown key {f'{where} {name}'.strip()}", hint=hint)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (StrEnum, Threat, GraphKind)):
        return json.dumps(str(value.value))
    if isinstance(value, str):
        # TOML knows no surrogate pairs, and wants DEL escaped, which JSON does not
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
