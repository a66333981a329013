"""What a client of both protocols does first: check the signed header, then wait for its caller.

A client leaves (`ServerFault`) only for reasons that do not depend on its rows: signatures, digests
and lengths that everybody could check, and rows that fail their check, whichever they are. Failures
of training on the rows are handled by its caller, which sends zeros rather than nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity
from tessera.crypto.prg import Label
from tessera.errors import MisuseError, ServerFault
from tessera.ids import SERVER, ClientId, RoundId
from tessera.protocols.machine import Follower, Moved, Outbound, UnderParams
from tessera.protocols.two_server import handshake
from tessera.protocols.two_server.handshake import check_header
from tessera.protocols.two_server.key_period import OwnKeyStore
from tessera.protocols.two_server.messages import Header, Purpose, SignedHeader
from tessera.protocols.two_server.params import Ids, TwoServerParams, TwoServerTable
from tessera.protocols.two_server.reports import Layouts, ReportContext, layouts_of
from tessera.wire.stored import ByDigest, Kept

KeptHeader = Annotated[Kept[SignedHeader], ByDigest(SignedHeader)]


@wire.record(tag=0x0420)
@dataclass(frozen=True, slots=True, kw_only=True)
class Invited:
    """Knows the round; waits for the signed header."""


@wire.record(tag=0x0421)
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The header is signed and the bins are known; waits for its caller."""

    signed: KeptHeader


@dataclass(frozen=True)
class TwoServerClientSetup(UnderParams):
    """`own_keys` stores its keys, where they last longer than a round."""

    params: TwoServerParams
    party: ClientId
    _: KW_ONLY
    entropy: Entropy
    identity: Identity
    own_keys: OwnKeyStore | None = None


class TwoServerClient(Follower[TwoServerClientSetup]):
    """One client in one round of one of the two protocols; `STEPS` says which messages it takes."""

    PURPOSE: ClassVar[Purpose]

    def __init__(self, setup: TwoServerClientSetup, *, last_round: RoundId | None = None) -> None:
        """`last_round` is the highest round this client has ever joined; numbers only increase."""
        if last_round is not None and setup.round_id <= last_round:
            raise ServerFault(
                f"started round {setup.round_id} after round {last_round}",
                round_id=setup.round_id,
                phase=handshake.PHASE,
            )
        super().__init__(setup, Invited())

    def _set_up(self, setup: TwoServerClientSetup) -> None:
        super()._set_up(setup)
        self.params, self.me, self._entropy = setup.params, setup.party, setup.entropy

    @property
    def is_ready(self) -> bool:
        """Whether it waits for its caller to `submit`."""
        return isinstance(self.state, Prepared)

    def _on_header(self, state: Invited, signed: Kept[SignedHeader]) -> Moved:
        check_header(self.params, signed.message)
        return Prepared(signed=signed), []

    @property
    def signed_header(self) -> Kept[SignedHeader]:
        """What both servers signed, while this client waits for its caller."""
        if not isinstance(self.state, Prepared):
            raise MisuseError(f"nothing is due in state {self.phase}")
        return self.state.signed

    def prepare(self, signed: Kept[SignedHeader]) -> None:
        """Go on with the header that the same client's other protocol has checked."""
        if not isinstance(self.state, Invited):
            raise MisuseError(f"a header is not due in state {self.phase}")
        self._move(Prepared(signed=signed), b"")

    def resend(self) -> list[Outbound]:
        """What it has sent, again, byte for byte."""
        sent: Kept[Any] | None = getattr(self.state, "sent", None)
        return [] if sent is None else [Outbound.again(SERVER, sent.data)]

    # -- for the two protocols

    def _report_context(self, header: Header, report_id: bytes) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=header,
            purpose=self.PURPOSE,
            client=self.me,
            report_id=report_id,
        )

    def _new_report_context(self, header: Header, content: bytes) -> ReportContext:
        """Seeds and keys follow from the report's id, and that from what the report says.

        A client that was set back and has trained again says something else, under other seeds:
        two reports under the same ones would show the difference of two updates, and its bins.
        """
        where = (self.params.federation, self.params.round_id, self.me, self.PURPOSE.value)
        own = self._entropy.secret(Label.REPORT_ID, *where, header.digest, content)
        return self._report_context(header, own.reveal())  # public, and unique

    def _layouts(self, header: Header) -> Layouts:
        return layouts_of(self.params, header)


def content_digest(*parts: bytes | np.ndarray[Any, Any]) -> bytes:
    """Of all that a report says; only ever an input of a keyed derivation."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else np.ascontiguousarray(part).view(np.uint8).data
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()


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
