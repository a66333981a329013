"""Exposure: from four probabilities to epsilons, event probabilities, rows and bytes; and back.

The formulas of Niu et al. 2020 (MobiCom, section 5 and Table 3) and of its long version, Niu et al.
2019 (arXiv 1911.02254, V and Appendix A), and those the papers leave out: the exact epsilon after k
rounds, quorums, dropouts after the union, colluding clients. Every epsilon is per index, given the
union. Names follow the papers: p5 and p6 are the probabilities that a real row and another row are
revealed, p7 and p8 those of Event 1 and Event 2, n1 and n0 a row's holders and non-holders.

Events depend on how many clients of a cohort hold a row. The papers' table averages over rows, and
so do we; the mean number of holders (1.17 in Appendix A) put into the formulas gives other figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError
from tessera.privacy.index.response import LEAST, IndexPrivacy

LATER: Final = "in the first round of a period; 100% after one round without dropouts"
"""About a late dropout where everybody names the whole union: a round in which all are counted
shows the decoys, which stay for the period."""

Weights = npt.NDArray[np.float64]


# ------------------------------------------------------------------------------------- epsilons


def epsilon_of_answer(yes_if: Fraction, yes_if_not: Fraction) -> float:
    """The LDP epsilon of one yes-or-no answer: the largest |log-ratio| over the two answers.

    Lemmas 5.2 and 5.3. An answer that neither input can give (0/0, such as a no when both
    probabilities are 1) bounds nothing; one that only one input can give makes it infinite.
    """
    answers = ((yes_if, yes_if_not), (1 - yes_if, 1 - yes_if_not))
    possible = [(a, b) for a, b in answers if a or b]
    if any(not a or not b for a, b in possible):
        return math.inf
    return max(abs(math.log(a / b)) for a, b in possible)


def epsilon_per_round(privacy: IndexPrivacy) -> float:
    """The epsilon of the answers of a single round (Lemma 5.3)."""
    return epsilon_of_answer(privacy.exact_p5, privacy.exact_p6)


def epsilon_longitudinal(privacy: IndexPrivacy) -> float:
    """The epsilon of a whole period, however many rounds it has (Lemma 5.2, Theorem 5.4).

    An upper bound that many rounds approach unless p3 = p4, when no round reveals anything.
    """
    return epsilon_of_answer(Fraction(privacy.p1), Fraction(privacy.p2))


@lru_cache(maxsize=4096)  # a ledger asks for every period again with each answer
def epsilon_after(privacy: IndexPrivacy, rounds: int) -> float:
    """The exact epsilon of all the answers of `rounds` rounds of one period.

    The long version leaves this to future work, as a question of how well an attacker infers; the
    definition of LDP asks for the worst case, which is closed. With L the likelihood ratio of what
    was seen between a permanent yes and a permanent no, the ratio between a real and another row is
    (p1 L + 1 - p1) / (p2 L + 1 - p2). That is monotone in L, so the worst case is "always yes" or
    "always no". One round gives `epsilon_per_round`; many approach `epsilon_longitudinal`.
    """
    if rounds < 1:
        return 0.0
    worst = 0.0
    for yes, no in ((privacy.p3, privacy.p4), (1.0 - privacy.p3, 1.0 - privacy.p4)):
        if yes == no:  # impossible, or the same whatever the permanent answer was
            continue
        log_l = rounds * (log(yes) - log(no))
        worst = max(worst, abs(mixed(privacy.p1, log_l) - mixed(privacy.p2, log_l)))
    # the two agree in real numbers; here rounding must not pass the bound
    return min(worst, epsilon_longitudinal(privacy))


def mixed(p: float, log_l: float) -> float:
    """log(p L + 1 - p), up to a term that does not depend on p when L is infinite."""
    if log_l == math.inf:
        return log(p)
    return float(np.logaddexp(log(p) + log_l, log(1.0 - p)))


def log(value: float) -> float:
    """The natural logarithm, of zero too."""
    return math.log(value) if value > 0.0 else -math.inf


# --------------------------------------------------------------------------------------- cohorts


@dataclass(frozen=True, slots=True)
class Holders:
    """How many clients of a cohort truly hold a row of their union: (count, share of the rows)."""

    shares: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        total = math.fsum(share for _, share in self.shares)
        for count, share in self.shares:
            if count < 1 or not share >= 0.0:
                raise ConfigError(
                    f"holders: {count}={share} is not a count from 1 and a share from 0 up",
                    hint="every row of the union has a holder; write 1=0.867,2=0.110,3=0.023",
                )
        if not abs(total - 1.0) <= 1e-3:  # figures rounded to three digits pass
            raise ConfigError(
                f"holders: the shares sum to {total:.6g}, not to 1",
                hint="give the share of the union's rows for every number of holders",
            )

    @classmethod
    def of(cls, shares: Mapping[int, float]) -> Holders:
        return cls(tuple(sorted(shares.items())))

    @property
    def by_row(self) -> tuple[tuple[int, float], ...]:
        """(holders, probability) of a row of the union."""
        total = math.fsum(share for _, share in self.shares)
        return tuple((count, share / total) for count, share in self.shares if share)

    @property
    def mean(self) -> float:
        """Holders per row, on average: the cohort's set sizes summed, over the union's."""
        return math.fsum(count * share for count, share in self.by_row)

    @property
    def by_holding(self) -> tuple[tuple[int, float], ...]:
        """(holders, probability) of a row as one of its holders sees it: weighted by the count."""
        return tuple((count, count * share / self.mean) for count, share in self.by_row)


TAOBAO = Holders.of({1: 0.867, 2: 0.110, 3: 0.023})
"""100 clients of the papers' Taobao data. 86.7 % is printed in Table 3; the rest is our reading of
the mean of 1.17 in Appendix A and of the column p8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """A round's clients, for an observer of its sums; the defaults are the papers' setting."""

    clients: int
    holders: Holders
    min_group: int = 1  # rows revealed by fewer are not updated
    colluders: int = 0  # clients, chosen at random, that share all they know with the server
    dropout: float = 0.0  # of each client, on its own, between masking and the survivor list

    def __post_init__(self) -> None:
        if self.clients < 2:
            raise ConfigError(
                f"clients = {self.clients}: nobody hides in a cohort of one", hint="use 2 or more"
            )
        most = max(count for count, _ in self.holders.shares)
        if most > self.clients:
            raise ConfigError(
                f"holders: a row cannot have {most} holders among {self.clients} clients",
                hint="lower the count, or raise the number of clients",
            )
        if not 0 <= self.colluders < self.clients:
            raise ConfigError(
                f"colluders = {self.colluders} of {self.clients} clients leaves none to protect",
                hint="the number of colluders is 0 or more and below the number of clients",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"dropout = {self.dropout} is not a share of clients", hint="use 0 up to below 1"
            )
        if not 1 <= self.min_group <= self.clients:
            raise ConfigError(
                f"min_group = {self.min_group} does not fit a cohort of {self.clients}",
                hint="use 2 or more than the colluders by 2; 1 is the papers' setting",
            )

    @property
    def honest_quorum(self) -> int:
        """Honest members that a row's group surely has, colluders having joined every group."""
        return max(0, self.min_group - self.colluders)

    def honest(self) -> Iterator[tuple[float, int, int]]:
        """(probability, honest holders n1, honest non-holders n0) of a row of the union."""
        for count, share in self.holders.by_row:
            for lost, chance in hypergeometric(self.clients, count, self.colluders):
                n1 = count - lost
                yield share * chance, n1, self.clients - self.colluders - n1


def hypergeometric(total: int, marked: int, drawn: int) -> Iterator[tuple[int, float]]:
    """(k, probability) of k marked ones among `drawn` of `total`."""
    ways = math.comb(total, drawn)
    for k in range(max(0, drawn + marked - total), min(marked, drawn) + 1):
        yield k, math.comb(marked, k) * math.comb(total - marked, drawn - k) / ways


def counted(trials: int, no: float, yes: float) -> Weights:
    """The coefficients of (no + yes x)^trials: how often k of the trials are counted.

    `no + yes` may be below 1: what is missing is what must not happen in any trial.
    """
    k = np.arange(trials + 1)
    if no == 0.0 or yes == 0.0:
        weights = np.zeros(trials + 1)
        weights[trials if no == 0.0 else 0] = (yes if no == 0.0 else no) ** trials
        return weights
    gamma = np.array([math.lgamma(i + 1) for i in range(trials + 1)])
    exponent = gamma[trials] - gamma - gamma[::-1] + k * math.log(yes) + (trials - k) * math.log(no)
    return np.asarray(np.exp(exponent), dtype=np.float64)


def at_least(weights: Weights, least: int) -> float:
    """The weight of `least` or more."""
    return float(weights[max(0, least) :].sum())


# ---------------------------------------------------------------------------------------- events


def event_1(privacy: IndexPrivacy, cohort: Cohort) -> float:
    """p7: a row's sum is one honest client's own update, and the server can tell whose.

    Theorem 5.5: n1 p5 (1-p5)^(n1-1) (1-p6)^n0, averaged over the rows of the union (the long
    version prints it without the factor n1). Beyond the theorem: colluders take their own part out
    of the sum, so only honest clients count; a row is summed if its group met `min_group` when it
    was formed; and members that drop out afterwards are not in the sum.
    """
    p5, p6, drop = privacy.p5, privacy.p6, cohort.dropout
    total = 0.0
    for share, n1, n0 in cohort.honest():
        if n1:
            others = np.convolve(
                counted(n1 - 1, 1.0 - p5, p5 * drop), counted(n0, 1.0 - p6, p6 * drop)
            )  # revealed but dropped, nobody else surviving
            total += share * n1 * p5 * (1.0 - drop) * at_least(others, cohort.honest_quorum - 1)
    return total


def event_2(privacy: IndexPrivacy, cohort: Cohort) -> float:
    """p8: a row's sum is empty, so that the server knows of its whole group that they lack the row.

    Theorem 5.5: (1-p5)^n1 (1 - (1-p6)^n0), averaged over the rows of the union, and extended to
    quorums, colluders and dropouts as in `event_1`.
    """
    p5, p6, drop = privacy.p5, privacy.p6, cohort.dropout
    total = 0.0
    for share, n1, n0 in cohort.honest():
        holders = counted(n1, 1.0 - p5, p5 * drop)  # no holder's update is in the sum
        anyone = np.convolve(holders, counted(n0, 1.0 - p6, p6))
        nobody = np.convolve(holders, counted(n0, 1.0 - p6, p6 * drop))  # no survivor at all
        quorum = cohort.honest_quorum
        total += share * max(0.0, float((anyone - nobody)[max(0, quorum) :].sum()))
    return total


def quorum_missed(privacy: IndexPrivacy, cohort: Cohort) -> float:
    """The share of the union's rows whose group is below `min_group`: they are not updated."""
    return below_quorum(privacy, cohort, survival=1.0)


def quorum_lost(privacy: IndexPrivacy, cohort: Cohort) -> float:
    """The share of rows whose group met `min_group` and is below it after dropouts.

    They are summed over fewer members than promised, unless the plan has a strict quorum. A group
    below its quorum before dropouts is below it afterwards, so this is a difference.
    """
    after = below_quorum(privacy, cohort, survival=1.0 - cohort.dropout)
    return max(0.0, after - quorum_missed(privacy, cohort))


def below_quorum(privacy: IndexPrivacy, cohort: Cohort, *, survival: float) -> float:
    """P(fewer than `min_group` clients reveal a row and survive, each with this probability)."""
    total = 0.0
    for n1, share in cohort.holders.by_row:
        sizes = np.convolve(
            counted(n1, 1.0 - privacy.p5 * survival, privacy.p5 * survival),
            counted(cohort.clients - n1, 1.0 - privacy.p6 * survival, privacy.p6 * survival),
        )
        total += share * float(sizes[: cohort.min_group].sum())
    return total


# --------------------------------------------------------------------------- rows, bytes, dropouts


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Expected rows per client and round; every client has the same number of real rows."""

    real: float
    union: float  # truly held by somebody
    decoys: float  # in the union, held by nobody
    permanent: float  # |S'| within the union
    revealed: float  # |S''|: fetched and uploaded
    succinct: float  # |S and S''|: trained


def expected_rows(
    privacy: IndexPrivacy,
    cohort: Cohort,
    *,
    real: float,
    decoys: float = 0.0,
    catalogue: int | None = None,
) -> RowCounts:
    """Set sizes for `real` rows per client (Niu et al. 2020, 5.2, with the union's true size).

    The paper bounds the union by n s; we divide that by the mean number of holders. `decoys` is the
    share of its set that a client adds to its union input, drawn from `catalogue` existing ids
    (unbounded if not given), where some fall on rows that are held anyway or on each other.
    """
    if not real > 0.0:
        raise ConfigError(f"rows = {real} per client leaves nothing to fetch", hint="use 1 or more")
    if not decoys >= 0.0:
        raise ConfigError(
            f"decoys = {decoys} is not a share of the set size",
            hint="0.1 is the default, 0 is none",
        )
    union = cohort.clients * real / cohort.holders.mean
    drawn = decoys * real
    if catalogue is None:
        empty = cohort.clients * drawn
    else:
        if catalogue < max(union, drawn):
            raise ConfigError(
                f"catalogue = {catalogue} is smaller than the union of about {union:.0f} rows",
                hint="the catalogue holds every id that exists",
            )
        empty = (catalogue - union) * (1.0 - (1.0 - drawn / catalogue) ** cohort.clients)
    other = union - real + empty
    return RowCounts(
        real=real,
        union=union,
        decoys=empty,
        permanent=privacy.p1 * real + privacy.p2 * other,
        revealed=privacy.p5 * real + privacy.p6 * other,
        succinct=privacy.p5 * real,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBytes:
    """Expected bytes of one client's rows in a round; the union and the dense part come on top."""

    indices: float  # the revealed set
    download: float
    upload: float

    @property
    def total(self) -> float:
        return self.indices + self.download + self.upload


def expected_bytes(
    rows: RowCounts, *, width: int, down_bits: int = 32, up_bits: int = 32, count_bits: int = 16
) -> RowBytes:
    """Bytes for rows of `width` values: down as they are, up masked and with their count.

    The revealed set is at best a bitmap over the union or a list of gaps, whichever is shorter (the
    entropy bound of a set of that size); the exact figure is what the encoding gives.
    """
    for name, value in (("width", width), ("down_bits", down_bits), ("up_bits", up_bits)):
        if value < 1:
            raise ConfigError(f"{name} = {value} carries no values", hint="use 1 or more")
    union = rows.union + rows.decoys
    share = min(1.0, rows.revealed / union)
    entropy = sum(p * math.log2(1.0 / p) for p in (share, 1.0 - share) if p > 0.0)
    return RowBytes(
        indices=union * entropy / 8,
        download=rows.revealed * width * down_bits / 8,
        upload=rows.revealed * (width * up_bits + count_bits) / 8,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LateDropout:
    """What the sum shows of a client that is in the union and drops out before the update."""

    exposed: float  # share of its real rows that come back with a count of zero
    empty: float  # rows of the union with a count of zero, expected
    confidence: float  # of those, the share that is truly this client's
    prior: float  # the same for any row of the union, before the update


def late_dropout(
    privacy: IndexPrivacy,
    cohort: Cohort,
    *,
    real: float,
    gone: int = 1,
    decoys: float = 0.0,
    catalogue: int | None = None,
) -> LateDropout:
    """Exposure of one of `gone` clients that drop out between union and update.

    Its rows are in the union, and those that no present client reveals and holds have a count of
    zero. Full-model secure aggregation would not show this: Theorem 5.6 (all probabilities 1 is as
    good as the full model) needs that nobody drops out in between. Zero counts also come from
    holders that answered no and from decoys; the guess "a row with count zero is this client's" is
    right with `confidence`, a ratio of expectations. Rows below the cohort's quorum are not summed
    and not counted as empty.
    """
    if not 1 <= gone < cohort.clients:
        raise ConfigError(
            f"gone = {gone} of {cohort.clients} clients is not a late dropout",
            hint="at least one client drops out and one survives",
        )
    rows = expected_rows(privacy, cohort, real=real, decoys=decoys, catalogue=catalogue)
    # The worst moment to drop out is after naming one's rows; with a quorum of 1 all are alike.
    left = left_behind(privacy, cohort, gone=gone, named=gone, rows=rows)
    return LateDropout(
        exposed=left.exposed,
        empty=left.empty,
        confidence=left.exposed * real / left.empty if left.empty else 0.0,
        prior=real / (rows.union + rows.decoys),
    )


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """`exposed`: share of a late dropout's rows that are empty; `empty`: such rows in all."""

    exposed: float
    empty: float


def left_behind(
    privacy: IndexPrivacy, cohort: Cohort, *, gone: int, named: int, rows: RowCounts
) -> LeftBehind:
    """Empty rows after `gone` clients dropped out, of whom `named` had named their rows before.

    A row is empty if no present holder answers yes, and either nobody named it or a quorum did: a
    client that drops out after naming its rows adds to their groups.
    """
    n, no = cohort.clients, 1.0 - privacy.p5

    def seen(holders: int, others: int) -> float:
        """P(0, or a quorum of these name the row): absent holders, and clients that lack it."""
        sizes = np.convolve(
            counted(holders, no, privacy.p5), counted(others, 1.0 - privacy.p6, privacy.p6)
        )
        return float(sizes[0] + sizes[cohort.min_group :].sum())

    def empty(holders: int, among: int, absent: int, late: int, own: int) -> float:
        """P(empty), for `holders` among so many clients; `absent` dropped out, `late` of them late.

        Late is after naming rows. `own` is 1 if one more such holder is the one in question.
        """
        total = 0.0
        for away, chance in hypergeometric(among, holders, absent):
            here = holders - away
            for late_holders, split in hypergeometric(absent, away, late):
                lacking = (late - late_holders) + (among - absent - here)
                total += chance * split * no**here * seen(late_holders + own, lacking)
        return total

    def its_own(holders: int) -> float:
        """Of a row whose holder is among those gone, having named it or not."""
        after, before = named / gone, 1.0 - named / gone
        found = 0.0
        if named:
            found += after * empty(holders - 1, n - 1, gone - 1, named - 1, 1)
        if named < gone:
            found += before * empty(holders - 1, n - 1, gone - 1, named, 0)
        return found

    held = math.fsum(p * empty(k, n, gone, named, 0) for k, p in cohort.holders.by_row)
    return LeftBehind(
        exposed=math.fsum(p * its_own(k) for k, p in cohort.holders.by_holding),
        empty=rows.union * held + rows.decoys * empty(0, n, gone, named, 0),
    )


# --------------------------------------------------------------------------------------- inverse


def choose(
    *,
    epsilon: float,
    cohort: Cohort,
    epsilon_one_round: float | None = None,
    max_rows_factor: float | None = None,
    decoys: float = 0.0,
) -> IndexPrivacy:
    """The probabilities that keep a wanted epsilon and traffic and reveal the most real rows.

    `epsilon` bounds a whole period, `epsilon_one_round` one round (the same if not given), and
    `max_rows_factor` the expected revealed rows as a multiple of the real ones.

    The pairs (p6, p5) of epsilon e form the triangle between (0,0), (1,1) and its corner
    (1, exp e) / (1 + exp e); we take the largest p5 in it that the traffic allows. What p3 and p4
    can make of a permanent pair is the triangle between (0,0), (1,1) and that pair. So with the
    permanent pair in the corner for `epsilon`, every pair of a smaller epsilon is within reach.
    Without `max_rows_factor` the corner is taken, as in the papers' levels (p5 + p6 = 1).
    """
    once = epsilon if epsilon_one_round is None else epsilon_one_round
    for name, value in (("epsilon", epsilon), ("epsilon of one round", once)):
        if not value >= 0.0:
            raise ConfigError(f"{name} = {value} is not an epsilon", hint="it is 0 or more")
    if once > epsilon:
        raise ConfigError(
            f"epsilon of one round = {once} is above {epsilon}, that of the whole period",
            hint="one round never costs more than all of them: lower it, or leave it out",
        )
    if max_rows_factor is not None and not max_rows_factor > 0.0:
        raise ConfigError(
            f"max rows factor = {max_rows_factor} leaves nothing to reveal", hint="use more than 0"
        )
    others = cohort.clients * (1.0 / cohort.holders.mean + decoys) - 1.0  # per real row
    p5, p6 = revealed_pair(once, others=others, budget=max_rows_factor)
    if epsilon == 0.0:
        return IndexPrivacy(p1=1.0, p2=1.0, p3=p5, p4=p5)
    p1 = 1.0 / (1.0 + math.exp(-epsilon))
    p2 = math.exp(-epsilon) * p1
    slope = min(1.0, (p5 - p6) / (p1 - p2))  # p3 - p4
    p4 = snap(p5 - slope * p1)
    return IndexPrivacy(p1=p1, p2=p2, p3=snap(p4 + slope), p4=p4)


def revealed_pair(epsilon: float, *, others: float, budget: float | None) -> tuple[float, float]:
    """The largest p5, then the least p6, with this epsilon such that p5 + others p6 <= budget.

    Without a budget the corner: beyond it a real row more costs exp(epsilon) others.
    """
    e = math.exp(-epsilon)
    corner = 1.0 / (1.0 + e)
    if budget is None:
        return corner, e * corner
    if budget <= corner * (1.0 + others * e):  # on the edge from (0, 0): p6 = e p5
        p5 = budget / (1.0 + others * e)
        return p5, e * p5
    if e == 0.0:
        return 1.0, 0.0
    # on the edge from the corner to (1, 1): 1 - p6 = (1 - p5) / e
    no = max(0.0, e * (1.0 + others - budget) / (e + others))
    return 1.0 - no, 1.0 - no / e


def snap(probability: float) -> float:
    """0 or 1 for what rounding left next to it, on either side."""
    if probability < LEAST:
        return 0.0
    return 1.0 if probability > 1.0 - LEAST else probability
