"""The section [dp]: noise that keeps a budget per index, item, user or subject.

A section of its own and no default: a plan without it trains without noise. What the whole plan has
to be like for it is checked in `checks.py`; what it amounts to is `rounds/noise.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.crypto.correlated import BandedInverse
from tessera.errors import ConfigError
from tessera.learning.training.settings import LocalTraining
from tessera.privacy.dp.accounting import check_delta
from tessera.privacy.dp.correlation import TERMS, check_inverse
from tessera.privacy.dp.events import THE_SETUP_SUM
from tessera.privacy.dp.guarantee import Trust, Unit
from tessera.privacy.dp.mechanism import check_noise, check_rate
from tessera.privacy.dp.noise_setting import Drawn
from tessera.privacy.dp.subjects import Printed

SETUP_SHARE: Final = 0.05
"""Of the budget, for a set-up sum of a task whose plan does not say."""
BATCH: Final = 32
"""Examples that a batch is to have, where a task takes all of a client's at once."""
MOST_LISTED: Final = 2**24
"""Rows of a list are below this."""


class NoisyRows(StrEnum):
    """Which rows of a table a client fetches and writes."""

    OWN = "own"
    """Those that the scheme has it name: a number is given the union, or the rows."""
    ALL = "all"
    LIST = "list"
    SELECTED = "selected"


class Unknown(StrEnum):
    """What becomes of records that name no subject."""

    ERROR = "error"
    ONE_SUBJECT = "one-subject"


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPlan:
    """Differential privacy of rows, examples, clients or persons, by clipping and noise.

    A plan without this section has none. What a number says, and against whom, is in
    docs/threat-model.md.
    """

    unit: Unit
    """What is protected: an "index", an "item", a "user" or a "subject".

    A row in all of a client's examples; one training example; all that a client sends; or a person,
    whose records may sit with several clients.
    """
    epsilon: float = 0.0
    """The budget per unit, over all rounds; 0: none, and `noise` is given.

    Training ends before the round that would pass it.
    """
    delta: float = 1e-6
    """Probability that the budget does not cover; below one over the people."""
    noise: float = 0.0
    """Standard deviation of the noise over `clip`; 0: the least for the budget.

    The least is for as many rounds of [simulation] as a client can be in by [cohorts]. It is
    written into the plan when a run begins.
    """
    clip: float = 1.0
    """Longest contribution of a unit: dense part, rows and local rows together.

    Unit index: of a client, whose examples each have `example_clip`.
    """
    per_row: int = 0
    """Unit index: examples of a client in a round that may change with one row.

    The client cuts its examples by its own coins: those with the row as their target, those with it
    in their histories, and those that take their place without the row, are at most this many.
    """
    example_clip: float = 0.0
    """Unit index: longest contribution of one example to what a client sends.

    A row moves that by 2 per_row example_clip at most, and by 2 clip; noise is for the smaller.
    """
    sampling: float = 1.0
    """Probability that an example, person or record is in a step's batch.

    By the client's own coins. What comes of a batch is divided by [training] batch, which is to be
    the expected number of examples. At user level it is 1: clients of a round are drawn publicly,
    which protects nobody.
    """
    steps: int = 1
    """Noisy steps of a client in a round, whatever data it has."""
    trust: Trust = Trust.LOCAL
    """Who adds noise: "local" clients, "server", "shares" of clients, "each" server.

    "local": each client, all of it, to its own; "server": to the sum, which it sees without;
    "shares": every client a part, under the masks of a secure sum; "each" of two servers all of it.
    """
    correlated: bool = False
    """Whether noise is correlated over rounds, so that most of it cancels in the model.

    With "server" and "each". Each round's noise is mixed with some of the rounds before it, in
    parts that are optimised for the rounds of [simulation] and for [cohorts]; it gains where a
    client is in few rounds that lie far apart. A training is charged as a whole, before a client's
    first message. `noise` is that of one round's own draw.
    """
    terms: int = 3
    """Rounds whose draws are in the noise of one, with `correlated`: 3 or 4.

    4 has 1 to 6 % less noise in the model, and takes a third more time to draw.
    """
    coefficients: str = ""
    """By which earlier draws are mixed in, the latest first, over 2^24; "": optimised.

    With `correlated`, such as "-8388608, -2097152". They are written into the plan when a run
    begins, since all have to have the same.
    """
    corrupt: int = 0
    """Clients whose shares of noise do not count; 0: as in [security], at least 1.

    With "shares". Every client knows its own share, so that one always counts as known.
    """
    rows: NoisyRows = NoisyRows.OWN
    """Rows of secure-submodel: its "own", "all", a public "list", or "selected".

    With its own rows a number is given the union. Otherwise everybody fetches and writes all rows
    of the list, and there is no union. "selected", in whole models and between two servers too:
    before the first round all clients mark their rows, and those whose noisy sum of marks is over
    the threshold are learnt; sums are divided by it.
    """
    selection: float = 0.1
    """Share of the budget for the popularity of rows, with rows = "selected"."""
    threshold: float = 2.0
    """Deviations of its noise that a row's popularity must be above.

    A row that nobody holds is selected once in 44 at 2, once in 741 at 3, and always at -10.
    """
    setup: float = 0.0
    """Share of the budget for the sum that a task takes before its first round.

    0: a twentieth, where the task takes one and the unit is "user". The sum of other units is
    exact, and their numbers are given it.
    """
    metrics: float = 0.1
    """Share of the budget for all tests, with metrics = "federated" and unit "user".

    The tests are those of [simulation]: every evaluate_every rounds, and after the last. Those of
    other units are exact, and their numbers are given them.
    """
    counted: int = 20
    """Examples that a client's part of such sums stands for, at most.

    A longer part is scaled down to this length: all its examples count, each for less.
    """
    row_list: str = ""
    """The list, such as "items 0-99, 205; tags 0-9"; other tables have all rows."""
    row_limit: int = 2**20
    """Most rows of a table that everybody fetches and writes."""
    counts: float = 0.0
    """Length that one example's count has in the clipped vector; 0: none is sent.

    Not with "local". Without counts every client weighs 1 in every row, and sums are divided by the
    number of clients, or of those that asked for the row. With them a delta weighs its examples, up
    to max_count in [update], and the sum is divided by the noisy sum of counts.
    """
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
    printed: Printed = Printed.NONE
    """Unit subject: "none", or a paper's "CentralSubDP" or "LocalSubDP", as printed.

    For comparison: neither keeps the epsilon that is given, and the ledger's number is infinite
    (docs/protocols/subject-privacy.md). A batch is [training] batch examples without replacement,
    and its noise goes by the most of one person in it; `sampling` is the paper's fraction, a batch
    over all examples. "CentralSubDP" takes trust = "server" and plain sums, one step a round.
    """

    def __post_init__(self) -> None:
        for name, kind in (
            ("unit", Unit),
            ("trust", Trust),
            ("rows", NoisyRows),
            ("drawn", Drawn),
            ("unknown", Unknown),
            ("printed", Printed),
        ):
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
            ("per_row", 0),
            ("corrupt", 0),
            ("row_limit", 1),
            ("counted", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}", hint=f"{name} is {least} or more"
                )
        if not 0.0 <= self.example_clip < math.inf:
            raise ConfigError(
                f"example_clip = {self.example_clip}", hint="example_clip is 0 or more"
            )
        if not 0.0 <= self.counts < math.inf:
            raise ConfigError(f"counts = {self.counts}", hint="counts is 0 or more")
        self._check_unit()
        self._check_printed()
        self._check_trust()
        self._check_correlated()
        self._check_rows()

    def _check_trust(self) -> None:
        """What only some who add noise can have."""
        trust = self.trust.value
        if self.trust is not Trust.SHARES and self.corrupt:
            raise ConfigError(
                f"corrupt = {self.corrupt} with trust = {trust!r}: no client's share counts",
                hint='leave it out, or use trust = "shares"',
            )
        if self.counts and not self.on_integers:
            raise ConfigError(
                f"counts = {self.counts:g} with trust = {trust!r}",
                hint='leave it out, or use trust = "server", "shares" or "each"',
            )
        if not self.in_the_sum:
            return
        if self.unit is Unit.ITEM:
            raise ConfigError(
                f'unit = "item" with trust = {trust!r}: noise on a sum of local steps protects '
                "none of their examples",
                hint='use trust = "local", or unit = "user"',
            )
        if (self.sampling, self.steps) != (1.0, 1) or self.drawn is Drawn.RECORDS:
            raise ConfigError(
                f"trust = {trust!r} with sampling = {self.sampling:g}, steps = {self.steps}, drawn "
                f"= {self.drawn.value!r}: a client's update is one vector, clipped as a whole",
                hint="leave them out: its own training is that of [training]",
            )

    def _check_correlated(self) -> None:
        """Where noise of one round can cancel that of another."""
        if self.terms not in TERMS:
            raise ConfigError(
                f"terms = {self.terms}", hint=f"terms is {' or '.join(map(str, TERMS))}"
            )
        if not self.correlated:
            if self.coefficients:
                raise ConfigError(
                    "coefficients without correlated: noise of every round is independent",
                    hint="leave them out, or use correlated = true",
                )
            return
        check_inverse(self.inverse)
        if self.coefficients and self.inverse.draws != self.terms:
            raise ConfigError(
                f"{self.inverse.draws - 1} coefficients with terms = {self.terms}",
                hint=f"give {self.terms - 1} of them, or leave them out",
            )
        if self.trust is Trust.SHARES:
            raise ConfigError(
                'correlated with trust = "shares": a client that drops out, or is in one round and '
                "not in the next, takes its part of the noise with it, and nothing cancels",
                hint='use trust = "server" or "each", or leave correlated out',
            )
        if self.trust is Trust.LOCAL:
            raise ConfigError(
                'correlated with trust = "local": each client adds noise of its own, and another '
                "cohort's noise cancels none of it",
                hint='use trust = "server" or "each", or leave correlated out',
            )
        if self.printed is not Printed.NONE:
            raise ConfigError(
                f"correlated with printed = {self.printed.value!r}, whose noise goes by the batch",
                hint="leave out the one or the other",
            )
        if self.counts:
            raise ConfigError(
                f"correlated with counts = {self.counts:g}: sums are divided by another number in "
                "every round, and noise of one would not cancel that of another",
                hint="leave counts out: every client weighs 1",
            )

    @property
    def inverse(self) -> BandedInverse:
        """As `coefficients` give it; without any, that of independent noise."""
        parts = [part.strip() for part in self.coefficients.split(",")] if self.coefficients else []
        if not all(re.fullmatch(r"-?[0-9]{1,9}", part) for part in parts):
            raise ConfigError(
                f"coefficients = {self.coefficients!r}",
                hint='integers over 2^24, such as "-8388608, -2097152", or leave them out',
            )
        return BandedInverse(tuple(map(int, parts)))

    def _check_printed(self) -> None:
        if self.printed is Printed.NONE:
            return
        name = self.printed.value
        source = Trust.SERVER if self.printed is Printed.CENTRAL else Trust.LOCAL
        if self.unit is not Unit.SUBJECT or self.trust is not source:
            raise ConfigError(
                f"printed = {name!r} with unit = {self.unit.value!r} and trust = "
                f"{self.trust.value!r}",
                hint=f'{name} has unit = "subject" and trust = "{source.value}"',
            )
        if not self.epsilon or self.noise:
            raise ConfigError(
                f"printed = {name!r} with epsilon = {self.epsilon:g} and noise = {self.noise:g}: "
                "its noise follows from its target and from every batch",
                hint="give epsilon and delta, and leave noise out",
            )
        if self.drawn is Drawn.RECORDS or self.cap:
            raise ConfigError(
                f"printed = {name!r} with drawn = {self.drawn.value!r} and cap = {self.cap}: its "
                "batches are of fixed size and are not cut",
                hint="leave both out",
            )
        if self.printed is Printed.CENTRAL and self.steps != 1:
            raise ConfigError(
                f"printed = {name!r} with steps = {self.steps}: clients send one gradient a round",
                hint="leave steps out",
            )

    def _check_rows(self) -> None:
        for name, none in (("selection", False), ("metrics", False), ("setup", True)):
            share = getattr(self, name)
            if not (0.0 < share < 1.0 or (none and not share)):
                raise ConfigError(
                    f"{name} = {share:g}", hint=f"{name} is a share of the budget, between 0 and 1"
                )
        if self.setup and self.unit is not Unit.USER:
            raise ConfigError(
                f"setup = {self.setup:g} with unit = {self.unit.value!r}: a client's part of a sum "
                "is clipped as a whole, which bounds nobody else",
                hint='leave it out, or use unit = "user"',
            )
        if not -10.0 <= self.threshold <= 10.0:
            raise ConfigError(f"threshold = {self.threshold:g}", hint="threshold is -10 to 10")
        if self.rows is NoisyRows.SELECTED and self.unit not in (Unit.USER, Unit.INDEX):
            raise ConfigError(
                f'rows = "selected" with unit = {self.unit.value!r}: a client\'s marks are clipped '
                "together, which bounds nobody else",
                hint='use unit = "user", rows = "all", or a public "list"',
            )
        if self.unit is Unit.INDEX and not self.listed:
            raise ConfigError(
                'unit = "index" with rows = "own": which rows are fetched, named or written shows '
                "the row itself, and no noise on values hides it",
                hint='use rows = "all", a public "list", or "selected"',
            )
        if self.row_list and self.rows in (NoisyRows.OWN, NoisyRows.ALL):
            raise ConfigError(f"row_list with rows = {self.rows.value!r}", hint='use rows = "list"')
        if self.rows is NoisyRows.LIST and not self.row_list:
            raise ConfigError(
                'rows = "list" without a row_list', hint='such as row_list = "items 0-99, 205"'
            )
        listed_rows(self.row_list)

    def _check_index(self) -> None:
        if self.unit is not Unit.INDEX:
            for name in ("per_row", "example_clip"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} = {getattr(self, name):g} with unit = {self.unit.value!r}",
                        hint='leave it out, or use unit = "index"',
                    )
            return
        if not (self.per_row and self.example_clip):
            raise ConfigError(
                'unit = "index" without per_row and example_clip: a row stands in any number of '
                "examples, and each moves other rows and the dense part",
                hint="such as per_row = 4 and example_clip = 0.1",
            )
        if self.sampling != 1.0 or self.counts:
            raise ConfigError(
                f'unit = "index" with sampling = {self.sampling:g} and counts = {self.counts:g}: '
                "there is no account of either for a row that stands in several examples",
                hint="leave both out: all examples that the cut leaves are used, and weigh 1",
            )
        if self.trust is not Trust.LOCAL and self.steps != 1:
            raise ConfigError(
                f'unit = "index" with trust = {self.trust.value!r} and steps = {self.steps}: noise '
                "on a sum of local steps protects none of their examples",
                hint='use steps = 1, or trust = "local": noise in every step',
            )

    def _check_unit(self) -> None:
        self._check_index()
        if self.unit is Unit.ITEM and self.trust is Trust.SERVER:
            raise ConfigError(
                'unit = "item" with trust = "server": a server that adds noise to a sum of local '
                "steps protects none of their examples",
                hint='use trust = "local", or unit = "user"',
            )
        if self.unit is Unit.USER and (self.sampling, self.steps) != (1.0, 1):
            raise ConfigError(
                f'unit = "user" with sampling = {self.sampling:g} and steps = {self.steps}: a '
                "client sends one update a round, and that it takes part is known",
                hint="leave both out: its own training is that of [training]",
            )
        if self.unit is not Unit.SUBJECT:
            for name, value in (("cap", 0), ("records_per_subject", 0), ("clients_per_subject", 1)):
                if getattr(self, name) != value:
                    raise ConfigError(
                        f"{name} = {getattr(self, name)} with unit = {self.unit.value!r}",
                        hint='leave it out, or use unit = "subject"',
                    )
        elif self.drawn is Drawn.RECORDS and not (self.records_per_subject and self.cap):
            raise ConfigError(
                "drawing records claims nothing without a bound on a person's records",
                hint="state records_per_subject and cap, or draw subjects",
            )

    @property
    def in_the_sum(self) -> bool:
        """Whether nobody sees a sum without noise, and no client has all of it."""
        return self.trust in (Trust.SHARES, Trust.EACH)

    @property
    def on_integers(self) -> bool:
        """Whether clients send one clipped vector of integers, whose sum has integer noise."""
        return self.trust is not Trust.LOCAL and self.printed is Printed.NONE

    @property
    def by_batches(self) -> bool:
        """Whether noise is in every step of a client's training, and not only in what it sends."""
        if self.unit is Unit.INDEX:
            return self.trust is Trust.LOCAL
        return self.unit is not Unit.USER and not self.in_the_sum

    @property
    def multiplier(self) -> float:
        """Deviation of the noise that counts, over the clip; 1 where it is not known yet."""
        return self.noise or 1.0

    @property
    def opened_by_setup(self) -> tuple[str, ...]:
        """What a set-up sum of the task opens without noise."""
        return () if self.setup else (THE_SETUP_SUM,)

    @property
    def by_examples(self) -> bool:
        """Whether a client's training clips its examples, or groups of them, one by one."""
        return self.by_batches or self.unit is Unit.INDEX

    @property
    def listed(self) -> bool:
        """Whether everybody has the same rows, which do not follow from anybody's data."""
        return self.rows is not NoisyRows.OWN


Ids: TypeAlias = npt.NDArray[np.uint64]


@lru_cache(maxsize=16)
def listed_rows(text: str) -> Mapping[str, Ids]:
    """The rows of each table that a list names: "items 0-99, 205; tags 0-9"."""
    found: dict[str, Ids] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, spans = part.partition(" ")
        ids = []
        for span in spans.split(","):
            first, _, last = span.strip().partition("-")
            if not first.isdecimal() or (last and not last.isdecimal()):
                raise ConfigError(
                    f"row_list: {part!r} is not a table with rows",
                    hint='such as row_list = "items 0-99, 205; tags 0-9"',
                )
            stop = int(last or first) + 1
            if not int(first) < stop <= MOST_LISTED:
                raise ConfigError(
                    f"row_list: {span.strip()!r} is not a range of rows",
                    hint="the smaller first, such as 0-99",
                )
            ids.append(np.arange(int(first), stop, dtype=np.uint64))
        rows = np.concatenate(ids)
        if name in found or len(np.unique(rows)) != len(rows):
            raise ConfigError(f"row_list names table {name!r}, or rows of it, twice")
        found[name] = np.sort(rows)
        found[name].flags.writeable = False
    return MappingProxyType(found)


def row_list_of(rows: Mapping[str, Ids]) -> str:
    """The inverse of `listed_rows`; a list of no rows cannot be written."""
    parts = []
    for name, ids in rows.items():
        ends = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1)
        starts, stops = np.r_[0, ends + 1], np.r_[ends, len(ids) - 1]
        spans = (
            f"{ids[a]}-{ids[b]}" if a != b else f"{ids[a]}"
            for a, b in zip(starts, stops, strict=True)
        )
        parts.append(f"{name} {', '.join(spans)}")
    return "; ".join(parts)


def trained_with(dp: DPPlan | None, good: LocalTraining) -> LocalTraining:
    """A recommended training, less what does not go with this section."""
    if dp is None:
        return good
    if not dp.by_examples:
        return replace(good, clip=0.0)
    return replace(
        good, clip=0.0, weight_decay=0.0, epochs=1, examples=0, batch=good.batch or BATCH
    )


# --- participation --------------------------------------------------------------------------------
#
# How many clients are in a cohort that is drawn in secret, by a coin for each.
#
# Their number varies and nobody but the leader is to know it: sums are divided by the number that
# is expected, `cohort` in the plan. A round is held with `fewest_drawn` to `most_drawn` of them.
# Else it is given up, which everybody sees, and which tells somebody who knows all other coins the
# last one: `boundary` is how likely it is that they leave it so, and must be at most `GIVEN_UP`,
# which is in the account.


GIVEN_UP: Final = 1e-10
"""Most probability that a round is given up, or not, by one client's coin; charged to delta."""
LONGER: Final = 2.0**-40
"""Probability that more come than there is room for."""


def most_drawn(expected: int) -> int:
    """More come with probability `LONGER` at most, by Bernstein's inequality."""
    logs = -math.log(LONGER)
    return math.ceil(expected + logs / 3.0 + math.sqrt(logs**2 / 9.0 + 2.0 * expected * logs))


def fewest_drawn(expected: int, *, floor: int, dropout: float) -> int:
    """With fewer than this a round is not begun.

    So few that they hardly ever come, by Chernoff's bound; but of those who come `dropout` may
    leave, and `floor` have to stay.
    """
    rare = math.floor(expected - math.sqrt(-2.0 * expected * math.log(GIVEN_UP)))
    fewest = max(2, floor, rare)
    while fewest - int(dropout * fewest) < floor:
        fewest += 1
    return fewest


def boundary(fewest: int, *, expected: int, share: float) -> float:
    """Probability that fewer than `fewest` come of all but one client, each by a coin of `share`.

    There are as many as make `expected` the nearest number, or fewer by what rounding hides.
    """
    if share >= 1.0:
        return 0.0  # everybody is in, which is no secret
    others = math.ceil((expected - 0.5) / share) - 1
    log_odds = math.log(share) - math.log1p(-share)
    log_p, total = others * math.log1p(-share), 0.0
    for k in range(min(fewest, others + 1)):
        total += math.exp(log_p)
        log_p += log_odds + (math.log((others - k) / (k + 1)) if k < others else 0.0)
    return min(1.0, total)
