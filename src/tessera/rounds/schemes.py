"""The table of schemes: all that tells one from another, once.

A scheme is how updates are summed and how rows are chosen; phases, forecasts, attacks and pages
follow from these two. Beside them an entry has what nothing else could say: who learns what, and
who must be honest. Everybody who asks "which scheme" asks here. To add one is an entry, and its
roles; `tests/rounds/test_schemes.py` walks the table through every command and page.

The phases of a round stand here too, in order, and what messages and phases are counted as: engines
read in which of them a client can be missing, and what bytes and seconds are spent on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from tessera.errors import ConfigError, MisuseError
from tessera.plan import Plan, Scheme
from tessera.plan.reference import texts_of
from tessera.rounds.select import (
    GroupRows,
    ListedRows,
    NamedRows,
    NarrowedRows,
    RandomisedRows,
    Rows,
    Shown,
    UnseenRows,
)
from tessera.rounds.sums import GroupSum, MaskedSum, PlainSum, Sum
from tessera.rounds.two_server.shared_sum import NarrowedSum, SharedSum

KEYS: Final = "keys"
UNION: Final = "union"
CHOICE: Final = "choice"
ROWS_DOWN: Final = "rows down"
UPDATE: Final = "update"
UNMASK: Final = "unmask"
CATEGORIES: Final = (KEYS, UNION, CHOICE, ROWS_DOWN, UPDATE, UNMASK)
"""Cost categories, in the order in which a round comes to them."""

OVER: Final = "RoundOver"
START: Final = "start"
"""In place of a message: a client's first step answers none."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a round, for the `visit`-th time from 0.

    `dropouts`: a simulated client may drop out in it. `category` is what the servers' seconds up to
    its end are spent on.
    """

    name: str
    visit: int
    category: str
    dropouts: bool


@dataclass(frozen=True, slots=True)
class CostCategories:
    """What is counted as what, by kind of message.

    `answers` are a client's seconds, which are known by the message that it answers. Both sums of a
    round with a union send the same kinds: before it is opened they are the union's.
    """

    messages: Mapping[str, str]
    answers: Mapping[str, str]

    def __add__(self, other: CostCategories) -> CostCategories:
        return CostCategories(
            MappingProxyType({**self.messages, **other.messages}),
            MappingProxyType({**self.answers, **other.answers}),
        )


# --- one server, in the clear ---------------------------------------------------------------------


def plain_phases(_: Plan) -> tuple[Phase, ...]:
    """The whole model is sent to everybody, and comes back."""
    return (Phase("collect", 0, UPDATE, dropouts=True),)


def plain_row_phases(plan: Plan) -> tuple[Phase, ...]:
    """Rows are named first, in the clear."""
    return (Phase("reveal", 0, CHOICE, dropouts=True), *plain_phases(plan))


PLAIN: Final = CostCategories(
    messages=MappingProxyType(
        {
            "PlainRows": CHOICE,
            "Download": ROWS_DOWN,
            "PlainInput": UPDATE,
            "SparsePlainInput": UPDATE,
            OVER: UPDATE,
        }
    ),
    answers=MappingProxyType({START: KEYS, "Download": UPDATE, OVER: UPDATE}),
)

# --- masked sums ----------------------------------------------------------------------------------


def masked_phases(plan: Plan) -> tuple[Phase, ...]:
    """Keys, then the sum."""
    return (*_masked_keys(dropouts=True), *_masked_update(plan, 0))


def masked_row_phases(plan: Plan) -> tuple[Phase, ...]:
    """Keys once, then the sum of the union, the rows that are named, and the sum of updates."""
    return (
        *_masked_keys(dropouts=True),
        *_masked_union(active=plan.security.signs, dropouts=True),
        Phase("reveal", 0, CHOICE, dropouts=True),
        *_masked_update(plan, 1),
    )


def _masked_keys(*, dropouts: bool) -> list[Phase]:
    return [Phase(name, 0, KEYS, dropouts) for name in ("advertise", "share")]


def _masked_union(*, active: bool, dropouts: bool) -> list[Phase]:
    names = ("collect", "consistency", "unmask") if active else ("collect", "unmask")
    return [Phase(name, 0, UNION, dropouts) for name in names]


def _masked_update(plan: Plan, visit: int) -> list[Phase]:
    names = plan.security.after_collect
    after = [Phase(name, visit, UNMASK, dropouts=True) for name in names]
    return [Phase("collect", visit, UPDATE, dropouts=True), *after]


MASKED: Final = CostCategories(
    messages=MappingProxyType(
        {
            "Advert": KEYS,
            "Roster": KEYS,
            "ShareBoxes": KEYS,
            "ForwardedShares": KEYS,
            "UnionOpened": UNION,
            "NextStage": UNION,
            "RevealedSet": CHOICE,
            "RowGroups": CHOICE,
            "Download": ROWS_DOWN,
            "MaskedInput": UPDATE,
            OVER: UPDATE,
            "SurvivorList": UNMASK,
            "ConsistencySignature": UNMASK,
            "ConsistencyProof": UNMASK,
            "RevealedShares": UNMASK,
            # Fixed groups that wait.
            "Deposit": KEYS,
            "Leave": KEYS,
            "Fetch": ROWS_DOWN,
            "Assignment": ROWS_DOWN,
            "EpochWork": ROWS_DOWN,
            "ComeBack": ROWS_DOWN,
            "Delivery": UPDATE,
        }
    ),
    answers=MappingProxyType(
        {
            START: KEYS,
            "Roster": KEYS,
            "ForwardedShares": UNION,  # opens its shares, then masks its part of the union
            "UnionOpened": CHOICE,
            "NextStage": CHOICE,
            "Download": UPDATE,
            "RowGroups": UPDATE,
            OVER: UPDATE,
            "SurvivorList": UNMASK,
            "ConsistencyProof": UNMASK,
            "Assignment": UPDATE,
            "EpochWork": UPDATE,
            "ComeBack": UPDATE,
        }
    ),
)

# --- two servers ----------------------------------------------------------------------------------


def two_server_phases(plan: Plan, collect: int = 0) -> tuple[Phase, ...]:
    """Rows are read, then written; `collect` is the visit of the phase that collects reports."""
    return (
        Phase("handshake", 0, KEYS, dropouts=False),
        Phase("query", 0, ROWS_DOWN, dropouts=True),
        Phase("answer", 0, ROWS_DOWN, dropouts=False),
        Phase("collect", collect, UPDATE, dropouts=True),
        *(Phase(name, 0, UNMASK, dropouts=False) for name in plan.two_server.after_collect),
    )


def narrowed_phases(plan: Plan) -> tuple[Phase, ...]:
    """A union first, always summed in the active setting."""
    union = _masked_union(active=True, dropouts=False)
    return (*_masked_keys(dropouts=False), *union, *two_server_phases(plan, collect=1))


TWO_SERVER: Final = MASKED + CostCategories(
    messages=MappingProxyType(
        {
            "SignedHeader": KEYS,
            "Query": CHOICE,
            "QueryAnswers": ROWS_DOWN,
            "WriteReport": UPDATE,
        }
    ),
    answers=MappingProxyType({"SignedHeader": CHOICE, "QueryAnswers": ROWS_DOWN}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What each party is left with after a round, in sentences; `plan` has it in one clause."""

    server: str
    clients: str
    honest: str
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeEntry:
    """One scheme. `no_epsilon` says why index privacy has none, where that is so."""

    scheme: Scheme
    title: str
    sum: Sum
    rows: Rows
    phases: Callable[[Plan], tuple[Phase, ...]]
    costs: CostCategories
    knowledge: Knowledge
    no_epsilon: str = ""
    no_epsilon_because: str = ""

    @property
    def name(self) -> str:
        """As a plan has it."""
        return self.scheme.value

    @property
    def description(self) -> str:
        """One sentence: the one in the reference of a plan's keys."""
        return texts_of(Scheme)[self.scheme.name]

    # --- what follows ---------------------------------------------------------------------------

    @property
    def federated(self) -> bool:
        """Whether there are rounds, clients and messages at all."""
        return self.sum.federated

    @property
    def masks(self) -> bool:
        """Whether clients mask their inputs with each other."""
        return self.sum.masks

    @property
    def two_servers(self) -> bool:
        return self.sum.two_servers

    @property
    def hides(self) -> bool:
        """Whether no single server sees a client's update, by masks or by shares."""
        return self.sum.hides

    @property
    def by_rows(self) -> bool:
        """Whether a client fetches and writes some rows, and not the whole model."""
        return self.rows.chosen

    @property
    def randomises(self) -> bool:
        """Whether clients answer at random about a union's rows: a quorum and an epsilon apply."""
        return self.rows.randomised

    @property
    def capped(self) -> bool:
        """Whether `max_rows` bounds what a client names, so that sizes tell nothing."""
        return self.rows.capped

    def shown(self, plan: Plan, *, rated: bool = False) -> frozenset[Shown]:
        """What runs by this plan show to servers; `rated`: of a rating task."""
        return self.sum.shown(plan, self.rows, rated=rated)

    def phase(self, plan: Plan, name: str, visit: int) -> Phase:
        """The phase of a round by this plan; `MisuseError` if it does not come to it."""
        for phase in self.phases(plan):
            if (phase.name, phase.visit) == (name, visit):
                return phase
        raise MisuseError(f"scheme {self.name}: a round has no phase {name!r}, visit {visit}")


_OPENED: Final = (
    "who took part and, at the end, the sum: which rows any client wrote, with sums and counts; "
    "if they collude, every client's rows and updates"
)
_MEMBERS: Final = "All other members of the fixed group: a holder is hidden among the honest ones."
_NOTHING_RANDOMISED: Final = "no index sets are randomised under it, so no epsilon applies."


def _no_phases(_: Plan) -> tuple[Phase, ...]:
    return ()


_ENTRIES: Final = (
    SchemeEntry(
        scheme=Scheme.CENTRAL,
        title="all data in one place",
        sum=Sum(),
        rows=Rows(),
        phases=_no_phases,
        costs=CostCategories(MappingProxyType({}), MappingProxyType({})),
        knowledge=Knowledge(
            server="Everything: every example of every client.",
            clients="Nothing of each other, until somebody publishes the model.",
            honest="Whoever runs the server, and everybody who can get at it.",
            plan="every example of every client",
        ),
        no_epsilon=_NOTHING_RANDOMISED,
    ),
    SchemeEntry(
        scheme=Scheme.FEDAVG,
        title="full model, plain",
        sum=PlainSum(),
        rows=Rows(),
        phases=plain_phases,
        costs=PLAIN,
        knowledge=Knowledge(
            server="Every client's whole update, by name: the rows that changed are the rows of "
            "its data, and examples can often be reconstructed from updates. Its number of "
            "examples.",
            clients="The whole model of every round they take part in, and nothing else.",
            honest="The server.",
            plan="every client's update, in the clear",
        ),
        no_epsilon=_NOTHING_RANDOMISED,
    ),
    SchemeEntry(
        scheme=Scheme.SUBMODEL,
        title="submodel, plain",
        sum=PlainSum(),
        rows=NamedRows(),
        phases=plain_row_phases,
        costs=PLAIN,
        knowledge=Knowledge(
            server="Every client's exact set of rows, by name; its update of each, and the number "
            "of examples behind it.",
            clients="The current values of the rows they name, and the dense part.",
            honest="The server.",
            plan="every client's rows and updates, in the clear",
        ),
        no_epsilon=_NOTHING_RANDOMISED,
    ),
    SchemeEntry(
        scheme=Scheme.SECURE_FEDAVG,
        title="full model, secure",
        sum=MaskedSum(),
        rows=Rows(),
        phases=masked_phases,
        costs=MASKED,
        knowledge=Knowledge(
            server="The sum over the survivors, hence which rows changed in the cohort; not whose "
            "in one round, but over several, when cohorts are drawn anew. Who took part, who "
            "dropped out and when.",
            clients="The whole model of every round; ids and public keys of everybody in the "
            "cohort.",
            honest="Clients: fewer than the threshold may collude with the server. Against a "
            "server that lies they also need each other's signing keys (the active setting).",
            plan="the sum of all updates, and so which rows changed",
        ),
        no_epsilon=_NOTHING_RANDOMISED,
        no_epsilon_because="where no rows are named",
    ),
    SchemeEntry(
        scheme=Scheme.SECURE_SUBMODEL,
        title="submodel, secure",
        sum=MaskedSum(),
        rows=RandomisedRows(),
        phases=masked_row_phases,
        costs=MASKED,
        knowledge=Knowledge(
            server="The union of the rows of each fixed group (at cpp1 to cpp5: of the cohort), "
            "exactly. For each row its sum and count; that of a row with one holder is its exact "
            "update. Whose it is stays hidden in a fixed group, for any number of rounds of that "
            "one group, from whoever knows no row of a member beforehand: one that is known leads "
            "to others by their values. At cpp1 to cpp5 also a randomised set of rows of each "
            "client, and rows below the quorum with who named them; over several rounds, sums and "
            "answers together identify most holders. Who took part and who dropped out.",
            clients="The union; who else named the rows they named themselves, and the values of "
            "those rows; ids and public keys of everybody in the fixed group or cohort.",
            honest="Clients. In a fixed group all other members: a holder is hidden among the "
            "honest ones. At cpp1 to cpp5 fewer than the threshold may collude with the server, "
            "and every row's group needs two honest members. Against a server that lies (the "
            "active setting) only fixed groups and cpp5 are offered.",
            plan="the union of the cohort's rows, every client's randomised index set, "
            "and the sum and count of each row",
        ),
    ),
    SchemeEntry(
        scheme=Scheme.TWO_SERVER,
        title="submodel, two servers",
        sum=SharedSum(),
        rows=UnseenRows(),
        phases=two_server_phases,
        costs=TWO_SERVER,
        knowledge=Knowledge(
            server="Each server alone: who took part and who dropped out, and keys and shares that "
            "look random to it. Both, once the sum is opened: which rows anybody wrote, with sum "
            "and count of each; a singleton row, written by one client, is that client's exact "
            "update, without its name. Where tables are narrowed to a union: that "
            "union, exactly.",
            clients="The current values of the rows they fetch, and the dense part. With a "
            "union: all of it, and ids and public keys of everybody in the cohort.",
            honest="One of the two servers: together they would know every row and update. Both, "
            "for correct results: either can corrupt a sum, and without the helper the round is "
            "aborted. With a union, clients too: fewer than the threshold may collude with the "
            "leader.",
            plan=f"each of them {_OPENED}",
        ),
        no_epsilon="no index privacy applies. No server sees which rows a client fetches or "
        "writes, so nothing is randomised and no epsilon is spent; what remains is what the opened "
        "sum reveals, in every round, and no noise is added to it.",
        no_epsilon_because="where neither server sees which rows are fetched or written unless "
        "the two collude",
    ),
)

SCHEMES: Final[Mapping[Scheme, SchemeEntry]] = MappingProxyType({e.scheme: e for e in _ENTRIES})
"""Every scheme, in the order in which pages have them."""
LISTED: Final = replace(
    SCHEMES[Scheme.SECURE_SUBMODEL],
    title="listed rows, secure",
    rows=ListedRows(),
    phases=masked_phases,
    knowledge=replace(
        SCHEMES[Scheme.SECURE_FEDAVG].knowledge,
        server="The sum over the survivors on every row of a public list, and nothing of other "
        "rows. Who took part, who dropped out and when.",
        clients="The listed rows of the model in every round; ids and public keys of everybody in "
        "the cohort.",
        plan="the sum of all updates on the listed rows",
    ),
    no_epsilon=_NOTHING_RANDOMISED,
    no_epsilon_because="where no rows are named",
)
"""Rows by a list in place of a union: what `secure-submodel` is where [dp] has the rows."""
GROUPED: Final = replace(
    SCHEMES[Scheme.SECURE_SUBMODEL],
    sum=GroupSum(),
    rows=GroupRows(),
    knowledge=replace(
        SCHEMES[Scheme.SECURE_SUBMODEL].knowledge,
        honest=_MEMBERS,
        plan="of each fixed group the union of its rows, and the sum and count of each row; which "
        "of its members holds a row only as a guess, bounded by B",
    ),
)
"""What `secure-submodel` is in fixed groups."""
GROUPED_WHOLE: Final = replace(
    SCHEMES[Scheme.SECURE_FEDAVG],
    sum=GroupSum(),
    knowledge=replace(
        SCHEMES[Scheme.SECURE_FEDAVG].knowledge,
        server="The sum over each fixed group, hence which rows changed in it; not whose, for any "
        "number of rounds of that one group, from whoever knows no row of a member beforehand. Who "
        "came when.",
        clients="The whole model; ids and public keys of everybody in the fixed group.",
        honest=_MEMBERS,
        plan="of each fixed group the sum of all updates, and so which rows changed; which of its "
        "members holds a row only as a guess, bounded by B",
    ),
)
"""What `secure-fedavg` is in fixed groups."""
NARROWED: Final = replace(
    SCHEMES[Scheme.TWO_SERVER],
    sum=NarrowedSum(),
    rows=NarrowedRows(),
    phases=narrowed_phases,
    knowledge=replace(
        SCHEMES[Scheme.TWO_SERVER].knowledge,
        plan=f"each of them exactly which rows the cohort has, decoys among them; {_OPENED}",
    ),
)
"""What `two-server` is where tables are narrowed to the cohort's union."""
WITHOUT_TABLES: Final = Scheme.SECURE_FEDAVG
"""What a plan for a model without tables has, unless it is told otherwise."""
UNDER_NOISE: Final = Scheme.TWO_SERVER
"""That of a plan for a model that is only trained with noise on its sums."""
DEFAULT: Final = Scheme.SECURE_SUBMODEL
"""The scheme of a command that is given none."""


def check(role: str, plan: Plan, *, two_servers: bool) -> None:
    """A `ConfigError` if the plan's scheme is not one of the role's own.

    A role that went on with another's would send in the clear what that scheme hides.
    """
    entry = of(plan)
    if not entry.federated or entry.two_servers is not two_servers:
        own = [e.name for e in SCHEMES.values() if e.federated and e.two_servers is two_servers]
        raise ConfigError(
            f"{role} does not run scheme {entry.name!r}", hint=f"it runs {', '.join(own)}"
        )


def of(plan: Plan) -> SchemeEntry:
    """The entry of the plan's scheme, or of what its other keys make of it."""
    groups = GROUPED if plan.by_rows else GROUPED_WHOLE
    variants = ((plan.listed, LISTED), (plan.grouped, groups), (plan.narrows, NARROWED))
    return next((entry for holds, entry in variants if holds), SCHEMES[plan.scheme])


def named(name: str, *, option: str = "scheme") -> SchemeEntry:
    """The scheme of this name; `ConfigError` if there is none, about this option."""
    try:
        return SCHEMES[Scheme(name)]
    except ValueError:
        raise ConfigError(
            f"{option} {name}: unknown scheme", hint=f"one of {', '.join(Scheme)}"
        ) from None
