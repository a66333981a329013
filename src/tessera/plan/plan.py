"""Plan: everything a federation agrees on beforehand, frozen and complete.

A client that holds the plan needs nothing else to take part, and its digest binds
every key and signature of a round to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cached_property
from html import escape
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.correlated import BandedInverse
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError
from tessera.ids import RoundId, StageId, TableId
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.compression import Cut, Quantizer, TopBy, cuts, shapes_of
from tessera.learning.training.settings import LocalTraining
from tessera.plan import toml
from tessera.plan.checks import (
    check_cohort,
    check_drawn,
    check_liars,
    check_noise,
    check_noise_in_sums,
    check_selection,
    check_tables,
    check_two_servers,
)
from tessera.plan.dp import DPPlan, fewest_drawn, listed_rows, most_drawn
from tessera.plan.noisy_vector import NoisyVector
from tessera.plan.scheme import Scheme
from tessera.plan.sections import (
    GROUP_SIZE,
    SECTIONS,
    CohortsPlan,
    Domain,
    DrawnBy,
    GroupsPlan,
    ModelPlan,
    PrivacyPlan,
    SecurityPlan,
    ServicePlan,
    Sharing,
    SimulationPlan,
    TablePlan,
    TaskPlan,
    TwoServerPlan,
    UnionPlan,
    UpdatePlan,
    check_at_least,
    choose_by_name,
)
from tessera.plan.toml import digest
from tessera.privacy.dp.correlation import Correlation, optimised
from tessera.privacy.dp.guarantee import Trust
from tessera.privacy.dp.noise_setting import Coins
from tessera.privacy.dp.participation import Participation
from tessera.privacy.index.bound import Promise
from tessera.protocols.secagg.params import GraphKind, RowSumSpec, SecAggParams, StageSpec, Threat
from tessera.protocols.union.choice import choose
from tessera.protocols.union.decoys import decoy_count
from tessera.protocols.union.encoding import UnionEncoding
from tessera.protocols.union.sizing import union_bound

POINT_BITS: Final = 17
"""Point functions have no values of fewer bits."""

UNION: Final = StageId(0)
"""The stage of the private set union, in the scheme that has one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A federation's agreement. Read from TOML, or made in Python with the same names."""

    scheme: Scheme
    """Who is trusted with what."""
    cohort: int
    """Clients in a round; drawn in secret, the number that is expected."""
    federation: str = "tessera"
    """A name that keys and signatures are bound to."""
    seed: int = 0
    """Seed of sampling and initial values; keys never depend on it."""
    tables: tuple[TablePlan, ...] = ()
    model: ModelPlan = field(default_factory=ModelPlan)
    privacy: PrivacyPlan = field(default_factory=PrivacyPlan)
    groups: GroupsPlan = field(default_factory=GroupsPlan)
    cohorts: CohortsPlan = field(default_factory=CohortsPlan)
    security: SecurityPlan = field(default_factory=SecurityPlan)
    union: UnionPlan = field(default_factory=UnionPlan)
    update: UpdatePlan = field(default_factory=UpdatePlan)
    two_server: TwoServerPlan = field(default_factory=TwoServerPlan)
    task: TaskPlan = field(default_factory=TaskPlan)
    training: LocalTraining | None = None  # None: the task's
    server: ServerStep | None = None
    dp: DPPlan | None = None  # None: no noise
    simulation: SimulationPlan = field(default_factory=SimulationPlan)
    service: ServicePlan = field(default_factory=ServicePlan)
    partial: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The keys given of [training] and [server], where the task is to give the others.

    The section itself is None until then. A dictionary with some of a section's keys comes here.
    """
    index_privacy: InitVar[str] = ""

    def __post_init__(self, index_privacy: str) -> None:
        for name, kind in SECTIONS.items():
            if isinstance(given := getattr(self, name), Mapping):
                section = toml.build_section(kind, given, "plan", f"[{name}]")
                left_out = len(given) < len(fields(kind))
                if name in toml.BY_TASK and left_out and not self.is_complete:
                    keys = toml.given_keys(section, given, f"[{name}]")
                    object.__setattr__(self, "partial", {**self.partial, name: keys})
                    section = None
                object.__setattr__(self, name, section)
        self._read_tables()
        choose_by_name(self, "scheme", Scheme)
        if index_privacy:
            object.__setattr__(self, "privacy", replace(self.privacy, level=index_privacy))
        check_at_least("cohort", self.cohort, 2)
        check_at_least("seed", self.seed, 0)
        check_drawn(self)
        if self.dp is not None:
            check_noise(self, self.dp)
        if self.selects:
            check_selection(self)
        if not self.is_complete:
            return  # to be completed by a task, and checked then
        check_tables(self)
        check_cohort(self)
        check_liars(self)
        if self.scheme is Scheme.TWO_SERVER:
            check_two_servers(self)
        if self.dp is not None:
            check_noise_in_sums(self, self.dp)
        self.quantizer.ring(self.most_clients)
        if self.noisy_vector is not None:
            self.ring  # noqa: B018 (noise that does not fit is refused here)
        if self.scheme.secure:
            self.secagg(RoundId(0))  # what cannot work is refused here

    def _read_tables(self) -> None:
        """Dictionaries for the task and for tables, as a file has them."""
        if isinstance(self.task, Mapping):
            object.__setattr__(self, "task", toml.build_task(self.task, "plan"))
        tables: tuple[Any, ...] = tuple(self.tables)
        if any(isinstance(t, Mapping) for t in tables):
            built = (
                toml.build_section(TablePlan, t, "plan", "[[table]]")
                if isinstance(t, Mapping)
                else t
                for t in tables
            )
            object.__setattr__(self, "tables", tuple(built))

    @property
    def selects(self) -> bool:
        """Whether clients send a part of the dense vector only."""
        return self.update.top < 1.0

    @property
    def kept_back(self) -> int:
        """Parameters of which a client keeps what it does not send; 0: it forgets that."""
        return self.model.dense if self.update.error_feedback else 0

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """The parts of the dense vector in which clients select."""
        update, model = self.update, self.model
        return cuts(model.dense, shapes_of(model.shapes), update.top, TopBy(update.top_by))

    def under(self, scheme: Scheme) -> Plan:
        """Under another scheme; what only its own understands is as it is by default."""
        groups = self.groups if scheme is self.scheme else GroupsPlan()
        try:
            return replace(self, scheme=scheme, groups=groups)
        except ConfigError:
            bare = replace(self, privacy=PrivacyPlan(), cohorts=CohortsPlan(), dp=None)
            return replace(bare, scheme=scheme, groups=groups)

    def with_simulation(self, **changes: Any) -> Plan:
        """The same agreement, simulated otherwise."""
        return replace(self, simulation=replace(self.simulation, **changes))

    def same_rounds(self, other: Plan) -> bool:
        """Whether both are simulated for as many rounds."""
        return self.simulation.rounds == other.simulation.rounds

    def other_than(self, begun: Plan) -> str:
        """What is another than in the plan of a run that was begun, but for rounds; or ""."""
        if self.digest != begun.digest:
            return "plan"
        if replace(self.simulation, rounds=1) != replace(begun.simulation, rounds=1):
            return "[simulation]"
        return ""

    @property
    def is_complete(self) -> bool:
        """Whether it has a model; one without takes that of its task."""
        return bool(self.tables or self.model.dense)

    @property
    def grouped(self) -> bool:
        """Whether clients are in fixed groups, each with sums of its own."""
        if self.scheme is Scheme.SECURE_FEDAVG:
            return self.groups.size > 0
        return self.scheme is Scheme.SECURE_SUBMODEL and self.privacy.grouped and not self.listed

    @property
    def group_size(self) -> int:
        """Clients in a fixed group; asked for only where there are such."""
        return self.groups.size or GROUP_SIZE

    @cached_property
    def listed(self) -> dict[str, npt.NDArray[np.uint64]]:
        """The rows of each table that everybody fetches and writes; none where clients choose."""
        if self.dp is None or not self.dp.listed or self.scheme is not Scheme.SECURE_SUBMODEL:
            return {}
        named = listed_rows(self.dp.row_list)
        return {t.name: named.get(t.name, np.arange(t.rows, dtype=np.uint64)) for t in self.tables}

    @property
    def corrupt_shares(self) -> int:
        """Clients whose shares of noise an observer may know, where clients add it."""
        return max(1, self.security.corrupt, 0 if self.dp is None else self.dp.corrupt)

    @cached_property
    def group_plan(self) -> Plan:
        """The agreement within one fixed group: everybody takes part, or nothing is opened.

        With as many shares needed as there are members, no list of fewer survivors can be unmasked,
        and no client answers for one.
        """
        if not self.grouped:
            return self
        size = self.group_size
        security = replace(self.security, threshold=size, dropout=0.0, graph=GraphKind.COMPLETE)
        return replace(self, cohort=size, security=security)

    @property
    def promise(self) -> Promise:
        """What the plan forces on every client's trace, for any number of rounds."""
        size = self.group_size if self.grouped else 0
        periods = self.grouped and self.groups.period > 0
        return Promise(group=size, corrupt=self.security.corrupt, periods=periods)

    @property
    def participation(self) -> Participation:
        """In which rounds of the training a client may be: what it keeps, and noise is for."""
        return self.cohorts.bound(self.simulation.rounds)

    @property
    def bounds_rounds(self) -> bool:
        """Whether noise relies on how often clients are in rounds, which they keep."""
        correlated = self.dp is not None and self.dp.correlated
        return correlated or self.cohorts.scheduled or self.cohorts.rounds_per_client > 0

    @property
    def drawn_in_secret(self) -> bool:
        """Whether cohorts follow from the leader's coins, and not from the seed."""
        return self.cohorts.drawn is DrawnBy.SECRET

    @property
    def coins(self) -> tuple[float, Coins]:
        """How likely it is that a unit is in what noise is added to, and whose coins draw it."""
        if self.drawn_in_secret:
            return self.cohorts.share, Coins.LEADER
        if self.dp is None:
            return 1.0, Coins.PUBLIC
        return self.dp.sampling, Coins.CLIENT if self.dp.by_batches else Coins.PUBLIC

    @property
    def once_a_period(self) -> bool:
        """Whether no client is in two rounds of one period of its answers."""
        return self.cohorts.separation >= self.privacy.period_rounds

    def links_rounds(self, *, whole_run: bool) -> bool:
        """Whether rounds of one client in a period (in the whole run) can be told to be its."""
        return not (self.privacy.grouped or (self.once_a_period and not whole_run))

    @property
    def noisy_counts(self) -> bool:
        """Whether counts are summed under noise, beside what they are counts of."""
        return self.dp is not None and self.dp.counts > 0.0

    @property
    def most_clients(self) -> int:
        """The most that a round is held with: the cohort, or what coins may make of it."""
        return most_drawn(self.cohort) if self.drawn_in_secret else self.cohort

    def check_population(self, clients: int, *, hint: str) -> None:
        """Refuse fewer clients than a cohort has."""
        if clients < self.cohort:
            raise ConfigError(f"{clients} clients for a cohort of {self.cohort}", hint=hint)

    @property
    def fewest_clients(self) -> int:
        """The fewest that a round is begun with."""
        if not self.drawn_in_secret:
            return self.cohort
        floor = self.security.corrupt + 2
        if self.scheme is Scheme.TWO_SERVER:
            floor = max(floor, self.two_server.min_cohort)
        elif self.scheme.secure:
            floor = max(floor, self.security.threshold)
        return fewest_drawn(self.cohort, floor=floor, dropout=self.security.dropout)

    def part(self, *, secure: bool, clients: int) -> Plan:
        """The agreement among some of a cohort: those who are masked, or those who are not."""
        scheme = self.scheme if secure else self.scheme.unmasked
        privacy = self.privacy if secure else replace(self.privacy, strict_quorum=False)
        return replace(self, scheme=scheme, cohort=clients, privacy=privacy)

    # --- sections that a task completes -------------------------------------------------------

    @property
    def local_training(self) -> LocalTraining:
        """[training] as it stands: of a plan that its task has not completed, its defaults."""
        return self.training or LocalTraining()

    @property
    def server_step(self) -> ServerStep:
        """[server], likewise."""
        return self.server or ServerStep()

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
    def table_ids(self) -> dict[TableId, TablePlan]:
        """All tables, by id."""
        return {TableId(number): t for number, t in enumerate(self.tables)}

    @cached_property
    def root_ids(self) -> dict[TableId, TablePlan]:
        """The tables whose rows a client chooses, by id."""
        return {table: t for table, t in self.table_ids.items() if not t.derived_from}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each root table begins in the one id space of the union."""
        found, start = {}, 0
        for t in self.roots:
            found[t.name] = start
            start += t.rows
        return found

    @property
    def key_rounds(self) -> int:
        """Rounds for which a client's keys last, and with them the cohort."""
        return self.two_server.key_rounds if self.scheme is Scheme.TWO_SERVER else 1

    @property
    def domain(self) -> int:
        return sum(t.rows for t in self.roots)

    @property
    def full_length(self) -> int:
        """Parameters of the whole model."""
        return self.model.dense + sum(t.rows * t.width for t in self.tables)

    @property
    def counts_rows(self) -> bool:
        """Whether a whole model, or a list of rows, carries a count for each of its rows."""
        if self.dp is not None and self.dp.on_integers:
            return not self.by_rows and self.dp.counts > 0.0
        return not self.by_rows and self.update.average is Average.ROWS

    @property
    def by_rows(self) -> bool:
        """Whether clients fetch and write rows of their own choice."""
        return self.scheme.by_rows and not self.listed

    @cached_property
    def sent_rows(self) -> dict[str, npt.NDArray[np.uint64]]:
        """The rows of each table that everybody is sent, where nobody chooses."""
        return self.listed or {t.name: np.arange(t.rows, dtype=np.uint64) for t in self.tables}

    # --- what follows from the plan ------------------------------------------------------------

    @cached_property
    def digest(self) -> bytes:
        """Binds keys and signatures to this very plan, but for what only a simulation does."""
        return digest(self)

    @cached_property
    def lasting_digest(self) -> bytes:
        """What a client holds the plans of later rounds against.

        Where clients decide whether to mask, the number of those who do differs from round to
        round, and is left out.
        """
        return self.digest if self.security.sharing is Sharing.SECURE else digest(self, {"cohort"})

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
        """The smallest group that a row is summed over; 1 if rows need no group."""
        masked_rows = self.scheme is Scheme.SECURE_SUBMODEL and not self.listed
        return self.secagg(RoundId(0)).quorum if masked_rows else 1

    @cached_property
    def least_survivors(self) -> int:
        """With fewer answers than this a round is aborted."""
        if self.grouped:
            return self.group_size
        if self.scheme.secure:
            # The stages follow from this number, where noise does; it does not follow from them.
            one = StageSpec(name="update", group=Ring(8), dense=1)
            return self._secagg(RoundId(0), (one,)).min_survivors
        if self.scheme is Scheme.TWO_SERVER and self.two_server.min_cohort:
            return self.two_server.min_cohort
        return self.fewest_clients - self.most_missing

    @property
    def most_missing(self) -> int:
        """Clients of a round that may be missing by [security] dropout."""
        return int(self.security.dropout * self.fewest_clients)

    @cached_property
    def noisy_vector(self) -> NoisyVector | None:
        """The integers that a client sends; None where their sum has no integer noise."""
        dp = self.dp
        if dp is None or not dp.on_integers:
            return None
        shares = dp.trust is Trust.SHARES
        servers = 2 if dp.trust is Trust.EACH else 1
        return NoisyVector(
            words=self._whole_length,
            clients=self.most_clients,
            clip=dp.clip,
            top=self.quantizer.top,
            noise=dp.noise,
            sources=max(1, self.least_survivors - self.corrupt_shares) if shares else 1,
            most_sources=self.cohort if shares else servers,
            counts=dp.counts,
            correlated=self.correlation.one_round if dp.correlated else 0.0,
        )

    @cached_property
    def correlation(self) -> Correlation:
        """How noise is correlated over the rounds of a training, and who may be in which of them.

        Optimised coefficients are the same on one machine; others read them in the plan.
        """
        dp, bound = self.dp, self.participation
        if dp is None or not dp.correlated or dp.coefficients:
            return Correlation(BandedInverse() if dp is None else dp.inverse, bound)
        return Correlation(optimised(bound, dp.terms), bound)

    @cached_property
    def ring(self) -> Ring:
        noisy = self.noisy_vector
        ring = self.quantizer.ring(self.most_clients) if noisy is None else noisy.ring
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
            decoy_share=self.privacy.decoy_share,
        )

    @cached_property
    def most_union(self) -> int:
        """The most rows that a cohort's union can have, over all tables that clients choose from.

        What all clients may name, decoys included, and false positives of the encoding: these are
        few and independent, and exceed twice their mean and 40 with probability 2^-70 at most.
        """
        held = self.union.max_rows * len(self.roots)
        each = held + decoy_count(held, self.privacy.decoy_share)
        named = union_bound(self.domain, self.cohort, each)
        spurious = ceil(2 * self._encoding.expected_false_positives) + 40
        return min(self.domain, named + spurious)

    @property
    def union_is_exact(self) -> bool:
        """Whether all rows of an opened union are held: no decoys, and no false positives."""
        privacy, spurious = self.privacy, self._encoding.expected_false_positives
        return not (privacy.decoy_share or privacy.add or spurious)

    def union_encoding(self, round_id: RoundId) -> UnionEncoding:
        """The union's encoding with this round's public hash seed."""
        seed = hashlib.sha256(self.digest + int(round_id).to_bytes(8, "little")).digest()
        return self._encoding.with_seed(int.from_bytes(seed[:8], "little"))

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """The sums of a round, in order."""
        if not self.by_rows:
            return (StageSpec(name="update", group=self.ring, dense=self._whole_length),)
        rows = tuple(
            RowSumSpec(table=self.table_id(t.name), width=t.width + 1) for t in self.tables
        )
        update = StageSpec(name="update", group=self.ring, dense=self.model.dense + 1, tables=rows)
        if not self.has_union or self.scheme is Scheme.TWO_SERVER:
            return (update,)
        return (self._union_stage, update)

    @property
    def _whole_length(self) -> int:
        """Words of a whole model, or of the dense part and all listed rows, with the weight."""
        counted = self.counts_rows or self.by_rows
        # Counted and not numbered: a table may be larger than memory.
        sent = {t.name: len(self.listed[t.name]) if self.listed else t.rows for t in self.tables}
        rows = sum(sent[t.name] * (t.width + counted) for t in self.tables)
        return self.model.dense + rows + 1

    @property
    def _union_stage(self) -> StageSpec:
        encoding = self._encoding
        return StageSpec(name="union", group=encoding.group, dense=encoding.length)

    @property
    def narrows(self) -> bool:
        """Whether two servers process only the cohort's union."""
        if self.scheme is not Scheme.TWO_SERVER or self.two_server.domain is Domain.WHOLE:
            return False
        large = any(t.rows > self.two_server.row_limit for t in self.tables)
        return large or self.two_server.domain is Domain.UNION

    @property
    def has_union(self) -> bool:
        """Whether a round begins with a private set union."""
        return (self.scheme is Scheme.SECURE_SUBMODEL and not self.listed) or self.narrows

    def union_sum(self, round_id: RoundId) -> SecAggParams:
        """The secure sum of a union that stands by itself, before two servers begin.

        Always in the active setting, whatever `[security] threat` is: with unsigned keys the leader
        could play all peers of a client and read its set. Everybody has a signing key there.
        """
        sums = self._secagg(round_id, (self._union_stage,))
        return replace(sums, threat=Threat.ACTIVE, graph=GraphKind.COMPLETE)

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
    def read(cls, path: Path, *, own_task: bool = False) -> Plan:
        try:
            if path.stat().st_size > toml.MOST_BYTES:
                raise ConfigError(
                    f"{path}: {path.stat().st_size:,} bytes are too many for a plan",
                    hint=f"a plan has at most {toml.MOST_BYTES:,}; {toml.EXAMPLE}",
                )
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not text", hint=toml.EXAMPLE) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", hint=toml.EXAMPLE) from error
        return cls.parse(text, source=str(path), own_task=own_task)

    @classmethod
    def parse(cls, text: str, *, source: str = "plan", own_task: bool = False) -> Plan:
        """`own_task`: it is for a task of one's own, which is not named in it."""
        parts = toml.parse(text, source)
        try:
            plan = cls(**parts)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}", hint=error.hint or toml.EXAMPLE) from error
        if not plan.is_complete and not plan.task.name and not own_task:
            raise ConfigError(
                f"{source}: the model has neither tables nor a dense part, and there is no task",
                hint="add a [task], a [[table]], or dense = N in [model]",
            )
        return plan

    def _repr_html_(self) -> str:
        """For a notebook: the plan as its file."""
        return f"<pre>{escape(self.to_toml())}</pre>"

    def to_toml(self) -> str:
        """The plan as a file that reads back to the same plan."""
        return toml.write(self)
