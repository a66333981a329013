"""What callers ask of the noise of a plan, answered for a plan without any.

`Noise` by itself is none at all, and answers so that nobody has to ask whether there is any. What a
budget adds is in `noise_account.py`, who adds noise to what in `noise.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tessera.crypto.correlated import BandedInverse
from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Words
from tessera.crypto.prg import Stream
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import ClientId, Party, RoundId
from tessera.learning.averaging import Divide
from tessera.learning.compression import Quantizer
from tessera.learning.popularity import Popularity
from tessera.learning.tables.submodel import Ids, ModelUpdate
from tessera.plan import DPPlan, Plan
from tessera.plan.noisy_vector import NoisyVector
from tessera.privacy.dp.events import (
    Bounds,
    ExactRelease,
    NoisySum,
)
from tessera.privacy.dp.guarantee import Guarantee
from tessera.privacy.dp.ledger import Entry, Ledger, Limit
from tessera.privacy.dp.noise_setting import (
    NoiseSetting,
)
from tessera.privacy.dp.subjects import PrintedNoise
from tessera.protocols.secagg.phases import StageSum
from tessera.rounds import schemes
from tessera.rounds.clipped_vector import (
    SumBounds,
)
from tessera.rounds.select import Rows

if TYPE_CHECKING:
    from tessera.rounds.messages import RoundResult

Values = npt.NDArray[np.float64]


class Figure(Enum):
    """What a figure of a run follows from (`events.py`)."""

    PUBLIC = auto()
    """From the plan, the list of clients and who of them answered, or the account itself."""
    METRIC = auto()
    """From held-out examples: charged where the sums that it is of have noise."""
    COHORT = auto()
    """From who was drawn: public, but where the account relies on its being secret."""
    ROWS = auto()
    """From which rows clients hold: public where none shows in what a client sends."""
    EXACT = auto()
    """From anything else of somebody's data."""


class Noise:
    """The noise of a plan. This one is none: nothing is clipped, added, or charged for."""

    by: str = ""
    """Who adds it, as it is printed."""
    honest: str = ""
    """Who has to be honest for it, as it is printed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def rows(self) -> Rows:
        """How the plan's clients choose rows."""
        return schemes.of(self.plan).rows

    @property
    def dp(self) -> DPPlan:
        """The section; asked for only where there is one."""
        raise MisuseError("a plan without [dp] has no noise")

    @property
    def vector(self) -> NoisyVector | None:
        """The integers that a client sends as one vector, where their sum has integer noise."""
        return None

    @property
    def clips_examples(self) -> bool:
        """Whether training clips examples, or groups of them, most with noise in every step."""
        return False

    @property
    def server_deviation(self) -> float:
        """Of the noise that each of two servers adds to every word of its share; 0: none."""
        return 0.0

    @property
    def correlation(self) -> BandedInverse:
        """How the noise of a round is mixed with that of rounds before it."""
        return self.plan.correlation.inverse

    @property
    def in_the_sum(self) -> float:
        """Deviation of all noise on a round's sum, over the clip; an expectation, not a promise."""
        return 0.0

    @property
    def on_a_sum(self) -> float:
        """Deviation of all noise on each number of a round's sum."""
        return 0.0

    @property
    def selects_rows(self) -> bool:
        """Whether rows are selected by their popularity before the first round."""
        return False

    @property
    def noisy_metrics(self) -> bool:
        """Whether tests are sums of clients' statistics, with noise."""
        return False

    @property
    def bounds(self) -> Bounds:
        """How many rows, records and clients one unit can have, as the plan states it."""
        return Bounds()

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The plan's budget against everybody from whom its noise protects."""
        return ()

    def own_limits(self, *, epsilon: float, delta: float) -> tuple[Limit, ...]:
        """A client's own budget likewise; none where there is no noise that could keep one."""
        return ()

    @property
    def foreseen(self) -> tuple[Entry, ...]:
        """All that a training can cost one client, where noise keeps that finite."""
        return ()

    @property
    def lasts(self) -> int | None:
        """How many rounds with one client its budget lasts; None: there is no budget."""
        return None

    @property
    def exact(self) -> tuple[str, ...]:
        """What a round releases without noise, beside what has some."""
        return ()

    @property
    def opens_exactly(self) -> bool:
        """Whether a round releases anything of its clients without noise."""
        return True

    @property
    def covers_rows(self) -> bool:
        """Whether which rows a client holds is inside the number per user."""
        return False

    @property
    def follows_from_rounds(self) -> bool:
        """Whether noise is made for this number of rounds, and no other."""
        return False

    @property
    def only_simulated(self) -> str:
        """Why services do not carry it; "" if they do."""
        return ""

    @property
    def open_setting(self) -> str:
        """What of it a plan leaves to whoever completes the plan; "" if all is said."""
        return ""

    def check_clients(self) -> None:
        """Refuse clients that are synthetic, where there is noise to add."""

    @property
    def erases_logs(self) -> bool:
        """Whether what servers have drawn has to leave their logs once a round is over."""
        return False

    @property
    def of_people(self) -> DPPlan | None:
        """The section, where persons are protected that may have records at several clients."""
        return None

    @property
    def by_trainer(self) -> bool:
        """Whether it is in the updates that a trainer makes, and nobody adds more of it."""
        return False

    @property
    def per_row(self) -> int:
        """Examples of a client in a round that may change with one row; 0: rows are not it."""
        return 0

    @property
    def paper(self) -> PrintedNoise | None:
        """The noise of a paper's algorithm, where it is one."""
        return None

    @property
    def setting(self) -> NoiseSetting:
        """The account of one client; asked for only where there is one."""
        return self.setting_with(setup=False)

    def setting_with(self, *, setup: bool) -> NoiseSetting:
        """The same; `setup`: for a task with a set-up sum."""
        raise MisuseError("a plan without [dp] has no noise")

    # --- what a task is completed with ------------------------------------------------------------

    def with_selected(self, popularity: Popularity | None) -> Plan:
        """The plan with the selected rows as its list, where a scheme sums by such a list."""
        return self.plan

    def calibrated(self) -> Plan:
        """The plan with its noise: the least that keeps the budget, where none is given."""
        return self.plan

    # --- what a client trains and sends -----------------------------------------------------------

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        """Of a model that everybody is `sent`, the rows that a client with these trains."""
        return own

    def contribution(self, update: ModelUpdate, coins: Secret) -> ModelUpdate:
        """What leaves a client, before it is encoded; its own noise follows from its coins."""
        return update

    def share_stream(self, root: Entropy, round_id: RoundId, client: Party) -> Stream | None:
        """What a client's share of the noise follows from, where clients add shares."""
        return None

    # --- what is summed ---------------------------------------------------------------------------

    def cut(self) -> Callable[[Sequence[Words]], list[Words]] | None:
        """What cuts one client's words to what an honest client may send, where they are seen."""
        return None

    def on_sum(self, total: StageSum, secrets: Sequence[Secret], round_id: RoundId) -> StageSum:
        """An opened sum with what the server adds to it. The first secret is the round's own."""
        return total

    def sum_bounds(self, clients: int) -> SumBounds:
        """What honest clients can have summed to."""
        top, most = self.plan.quantizer.top, self.plan.update.max_count
        return SumBounds(clients=clients, top=top, max_count=most)

    def decoded(self, quantizer: Quantizer, words: Words) -> Values:
        """Sums of values, as real numbers."""
        return quantizer.decode(words, self.plan.ring)

    def on_means(
        self,
        result: RoundResult,
        entropy: Entropy,
        round_id: RoundId,
        largest: Mapping[ClientId, int] | None = None,
    ) -> RoundResult:
        """The means of a round with noise that is added to them; `largest` is for `PaperNoise`."""
        return result

    def divisors(self, popularity: Popularity | None) -> Divide | None:
        """What sums of rows are divided by, where rows were selected by their popularity."""
        return None

    # --- what is charged, and what is left --------------------------------------------------------

    def bare(self, *released: str) -> tuple[str, ...]:
        """Those of these releases that are a client's to charge for, as nothing has noise."""
        return released

    def events(self, round_id: RoundId, training: str = "") -> tuple[NoisySum, ...]:
        """What a client is charged for the noisy releases of a round, and of the test after it.

        Where noise is correlated over rounds, that is the whole training, by its name.
        """
        return ()

    def setup_events(self) -> tuple[NoisySum | ExactRelease, ...]:
        """What a client is charged for its part of the set-up sum, before it leaves."""
        return ()

    def selection_events(self) -> tuple[NoisySum, ...]:
        """What a client is charged for its marks, before the first round."""
        return ()

    def charge(self, ledger: Ledger, round_id: RoundId, training: str = "") -> None:
        """Charge for a round's noisy releases and for what is exact beside them.

        A training whose noise is correlated is charged once, under its name: another one is another
        charge.

        `BudgetExceeded` if the plan's budget does not cover it, or this client's own does not.
        """

    def charge_absent(self, ledger: Ledger, round_id: RoundId) -> None:
        """Charge for a round that this client was not drawn for, where that is a secret."""

    def affords(self, ledger: Ledger, round_id: RoundId, training: str = "") -> bool:
        """Whether the budget covers one more round."""
        return True

    def refusal(self, spent: Callable[[], str]) -> str:
        """Why a round cannot be, if a client's budget is `spent` after so many; "" if it is not."""
        return ""

    def guarantee(self, ledger: Ledger) -> Guarantee | None:
        """The worst of what is left after all that a ledger has, against those it protects from."""
        return None

    # --- statistics, tests and figures ------------------------------------------------------------

    def statistic_noise(self, what: str) -> float:
        """Deviation of the noise on such a sum, over the length of a client's part; 0: none."""
        return 0.0

    def may_test(self, round_id: RoundId) -> bool:
        """Whether clients were charged for a test after this round, or need not be."""
        return True

    def covers(self, figure: Figure) -> bool:
        """Whether such a figure may be passed on: charged, or public."""
        return True

    def warning(self, people: int) -> str:
        """The rule that its delta breaks among so many people, if it does; 0: unknown."""
        return ""

    def paper_facts(self) -> dict[str, Any] | None:
        """A paper's algorithm beside what holds, as plain values."""
        return None
