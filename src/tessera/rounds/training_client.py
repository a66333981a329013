"""TrainingClient: what a client does alike before one server and between two.

It starts once, receives messages of the round and of the sum inside it, shows what is to be trained
and goes on when it is given the update. Which steps lie between is its own round's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tessera import wire
from tessera.crypto.entropy import RootedEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, ServerFault
from tessera.ids import SERVER, Party
from tessera.learning.tables.submodel import Ids, ModelUpdate, Submodel
from tessera.plan import UNION
from tessera.protocols.machine import (
    Follower,
    Left,
    Moved,
    Outbound,
    RoundOutcome,
    RoundOver,
    shortened,
)
from tessera.rounds import encode, schemes, select
from tessera.rounds.encode import Clipped, UpdateWords
from tessera.rounds.messages import UnionOpened, most_union_bytes
from tessera.rounds.party import ClientRoundSetup
from tessera.rounds.resolve import resolve
from tessera.rounds.root import coins_of
from tessera.rounds.sums import SumClient
from tessera.wire.stored import Kept


@dataclass(frozen=True, slots=True)
class TrainingOutput:
    """What came out of training; None: nothing."""

    update: ModelUpdate | None


class TrainingClient(Follower[ClientRoundSetup]):
    """One client in one round of training.

    Known to this client only, in the process that trained, and not stored: how much was `clipped`,
    why it sent zeros instead of an update (`broken`), and the rows with a delta (`written`).
    """

    TWO_SERVERS: ClassVar[bool]
    INVITED: ClassVar[type[Any]]
    """The state before the start."""
    OFFERING: ClassVar[type[Any]]
    """The state that waits for a union."""
    TRAINING: ClassVar[type[Any]]
    """The state that waits for an update: the only one with something `pending`."""

    def __init__(self, setup: ClientRoundSetup) -> None:
        super().__init__(setup, self.INVITED())

    def _set_up(self, setup: ClientRoundSetup) -> None:
        super()._set_up(setup)
        schemes.check(type(self).__name__, setup.plan, two_servers=self.TWO_SERVERS)
        self.plan, self.me = setup.plan, setup.party
        self._local, self._entropy = setup.local, setup.entropy
        agreed = resolve(setup.plan)
        self._rows, self._noise = agreed.rows, agreed.noise
        self.clipped, self.broken = Clipped(), ""
        self.written: dict[str, Ids] = {}
        self._submodel: tuple[Any, Submodel] | None = None  # of this state, worked out once

    def _must_begin(self) -> None:
        if not isinstance(self.state, self.INVITED):
            raise MisuseError("a round is started once")
        self._local.must_be_settled()

    # --- messages -------------------------------------------------------------------------------

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        kind = wire.kind_of(data)
        if isinstance(self.state, self.INVITED) and kind is not RoundOver:
            raise MisuseError("a round is started before it receives")
        own = sender != SERVER or kind in self.FROM_SERVER or kind is RoundOver
        if own or getattr(self.state, "sum", None) is None:
            self._check_length(kind, data)
            return super().receive(sender, data)
        return self._stepped(type(self)._on_sum, data)

    def take(self, message: Kept[Any]) -> list[Outbound]:
        """A message of the round's own that was never bytes, in an ideal round."""
        return self._stepped(self.STEPS[type(self.state), type(message.message)], message)

    def _stepped(self, step: Any, message: Any) -> list[Outbound]:
        try:
            following, out = self._apply(step, message)
        except ServerFault as fault:
            raise self._leave(fault) from None
        self._move(following, b"")
        return out

    def _on_sum(self, state: Any, data: bytes) -> Moved:
        """A message of the sum's, which judges itself whether it is due."""
        raise NotImplementedError

    def _told(self, outcome: RoundOutcome) -> None:
        self._local.told(self.round_id, outcome)

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._submodel = None

    def _leave(self, fault: ServerFault) -> ServerFault:
        """For good: later messages are not read."""
        self._end(Left(reason=shortened(fault.reason)))
        return fault

    # --- the union ------------------------------------------------------------------------------

    def _check_length(self, kind: type[Any] | None, data: bytes) -> None:
        """A union is bounded by the plan before anything is made of it: a bitmap that names every
        row is short on the wire and 64 times as long in memory."""
        plan = self.plan
        if kind is UnionOpened and isinstance(self.state, self.OFFERING):
            most = most_union_bytes(plan.most_union, plan.domain, len(plan.roots))
            if len(data) > most:
                size = f"{len(data)} bytes where the cap is {most}"
                raise self._leave(self._fault(f"sent a union of {size}"))

    def _check_union(self, total: SumClient, message: UnionOpened) -> None:
        if message.round_id != self.round_id:
            raise self._fault(f"sent the union of round {message.round_id}")
        if not total.knows_survivors(UNION):
            raise self._fault("sent a union that is not due")
        if flaw := select.union_flaw(self.plan, message):
            raise self._fault(flaw)

    # --- training -------------------------------------------------------------------------------

    @property
    def coins(self) -> Secret:
        """What the training of `pending` draws from."""
        assert isinstance(self.state, self.TRAINING)
        return coins_of(self.state.root)

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now, once it is here; nothing before, and nothing after."""
        return self._fetched(self.state) if isinstance(self.state, self.TRAINING) else None

    def _fetched(self, state: Any) -> Submodel:
        if self._submodel is None or self._submodel[0] is not state:
            self._submodel = (state, self._submodel_of(state))
        return self._submodel[1]

    def _submodel_of(self, state: Any) -> Submodel:
        raise NotImplementedError

    def supply(self, update: ModelUpdate | None) -> list[Outbound]:
        """Go on with what came out of the training of `pending`; None: nothing did."""
        if not isinstance(self.state, self.TRAINING):
            raise MisuseError("an update is not due: nothing was fetched, or it was given already")
        following, out = self._apply(type(self)._on_update, TrainingOutput(update))
        self._move(following, b"")
        return out

    def _on_update(self, state: Any, supplied: TrainingOutput) -> Moved:
        raise NotImplementedError

    def _sound(self, update: ModelUpdate | None, trained: Mapping[str, Ids]) -> ModelUpdate | None:
        """The update, if it can be sent; None, and `broken` says why, if zeros are to be sent."""
        self.broken = encode.flaw(self.plan, update, trained)
        return None if self.broken else update

    def _words(
        self, update: ModelUpdate, trained: Mapping[str, Ids], root: RootedEntropy
    ) -> UpdateWords:
        """Into words at once: the update itself is not stored."""
        words = encode.update_words(
            self.plan,
            update,
            trained,
            root.secret(Label.ROUNDING),
            round_id=self.round_id,
            residual=self._local.residual_in(self.plan),
            noise=self._noise.share_stream(root, self.round_id, self.me),
        )
        self.clipped, self.written = words.clipped, dict(words.written)
        return words
