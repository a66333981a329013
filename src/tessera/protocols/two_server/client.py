"""What a client of both protocols does first: check the signed header, then wait for its caller.

A client leaves (`ServerFault`) only for reasons that do not depend on its rows: signatures, digests
and lengths that everybody could check, and rows that fail their check, whichever they are. Failures
of training on the rows are handled by its caller, which sends zeros rather than nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.errors import MisuseError, ServerFault, WireError
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.protocols import wire
from tessera.protocols.machine import Left, Outbound, Steps, message_digest
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.two_server import handshake
from tessera.protocols.two_server.envelope import ReportContext
from tessera.protocols.two_server.handshake import check_header
from tessera.protocols.two_server.layouts import Layouts, layouts_of
from tessera.protocols.two_server.messages import ClientField, Header, Purpose, Round, SignedHeader
from tessera.protocols.two_server.params import Ids, TwoServerParams, TwoServerTable

MAX_HANDLED = 8

Handled = Annotated[tuple[bytes, ...], wire.Sequence(wire.Exactly(16), MAX_HANDLED)]


@wire.record(tag=0x0420)
@dataclass(frozen=True, slots=True, kw_only=True)
class Invited:
    """Knows the round; waits for the signed header."""

    round_id: Round
    me: ClientField


@wire.record(tag=0x0421)
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The header is signed and the bins are known; waits for its caller."""

    header: Header
    me: ClientField


class TwoServerClient:
    """One client in one round of one of the two protocols; `STEPS` says which messages it takes."""

    SNAPSHOT: ClassVar[type[Any]]
    PURPOSE: ClassVar[Purpose]
    FROM_SERVER: ClassVar[tuple[type[Any], ...]]
    STEPS: ClassVar[Steps]

    def __init__(
        self,
        params: TwoServerParams,
        me: ClientId,
        *,
        entropy: Entropy,
        identity: Identity,
        last_round: RoundId | None = None,
        state: Any = None,
        handled: tuple[bytes, ...] = (),
    ) -> None:
        """`last_round` is the highest round this client has ever joined; numbers only increase."""
        if last_round is not None and params.round_id <= last_round:
            raise ServerFault(
                f"started round {params.round_id} after round {last_round}",
                round_id=params.round_id,
                phase=handshake.PHASE,
            )
        self.params, self.me = params, me
        self._entropy, self._identity = entropy, identity
        self._handled = handled
        self.state: Any = state or Invited(round_id=params.round_id, me=me)

    @property
    def phase(self) -> str:
        return type(self.state).__name__

    @property
    def is_ready(self) -> bool:
        """Whether it waits for its caller to `submit`."""
        return isinstance(self.state, Prepared)

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """Take one message of the leader; a repeated delivery is ignored."""
        mark = message_digest(data)
        if mark in self._handled and not isinstance(self.state, Left):
            return []
        try:
            try:
                message = wire.decode(data, expect=self.FROM_SERVER)
            except WireError as error:
                raise self._fault(f"sent an invalid message: {error}") from error
            step = self.STEPS.get((type(self.state), type(message)))
            if step is None:
                raise self._fault(f"sent {type(message).__name__}, which is not due")
            self.state = step(self, self.state, message)
        except ServerFault as fault:
            self.state = Left(reason=fault.reason)
            raise
        self._handled += (mark,)
        return []

    def on_header(self, state: Invited, message: SignedHeader) -> Prepared:
        return Prepared(header=check_header(self.params, message), me=self.me)

    @property
    def header(self) -> Header:
        """What both servers signed, while this client waits for its caller."""
        if not isinstance(self.state, Prepared):
            raise MisuseError(f"nothing is due in state {self.phase}")
        return self.state.header

    def prepare(self, header: Header) -> None:
        """Go on with the header that the same client's other protocol has checked."""
        if not isinstance(self.state, Invited):
            raise MisuseError(f"a header is not due in state {self.phase}")
        self.state = Prepared(header=header, me=self.me)

    def resend(self) -> list[Outbound]:
        """What it has sent, again, byte for byte."""
        sent: bytes | None = getattr(self.state, "sent", None)
        if sent is None:
            return []
        kind = wire.kind_of(sent)
        return [Outbound(SERVER, kind.__name__ if kind else "", sent)]

    def snapshot(self) -> bytes:
        """Everything needed to go on elsewhere; stored before sending. Contains secrets."""
        return wire.encode(self.SNAPSHOT(state=self.state, handled=self._handled))

    @classmethod
    def restore(
        cls,
        snapshot: bytes,
        params: TwoServerParams,
        me: ClientId,
        *,
        entropy: Entropy,
        identity: Identity,
    ) -> Self:
        stored = wire.decode(snapshot, expect=[cls.SNAPSHOT])
        return cls(
            params,
            me,
            entropy=entropy,
            identity=identity,
            state=stored.state,
            handled=stored.handled,
        )

    # -- for the two protocols

    def _report_context(self, header: Header, report_id: bytes) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=header,
            purpose=self.PURPOSE,
            client=self.me,
            report_id=report_id,
        )

    def _new_report_context(self, header: Header) -> ReportContext:
        where = (self.params.federation, self.params.round_id, self.me, self.PURPOSE.value)
        report_id = self._entropy.secret(Label.REPORT_ID, *where).reveal()  # public, and unique
        return self._report_context(header, report_id)

    def _layouts(self, header: Header) -> Layouts:
        return layouts_of(self.params, header)

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.params.round_id, phase=self.phase)


def check_tables(given: Mapping[Any, Any], due: tuple[TwoServerTable, ...]) -> None:
    if given.keys() != {t.table for t in due}:
        raise MisuseError("two servers: rows of other tables than the round has")


def row_indices(spec: TwoServerTable, ids: Ids) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Our caller's rows: ascending ids of the domain, at most as many as the plan allows."""
    rows = spec.index(ids)
    if bool((rows[1:] <= rows[:-1]).any()):
        raise MisuseError(f"table {spec.table}: row ids ascend, without repeats")
    if len(rows) > spec.max_rows:
        raise MisuseError(f"table {spec.table}: {len(rows)} rows where max_rows is {spec.max_rows}")
    return rows
