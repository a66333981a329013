"""Every exception tessera raises on purpose; each says who has to act.

    TesseraError
    |- ConfigError        the parameters cannot work; change the plan (has a hint)
    |  |- DataMissing     the files of a published data set are not there; fetch them
    |  `- RoundRefused    this client is not in this round: too early, or one too many; others go on
    |- PeerError          the other side broke the protocol; drop that peer, the round may go on
    |- ServerFault        the server broke the protocol; this client has left the round for good
    |  `- GroupFault      the group that a client was given is not proven; it has not joined
    |     |- ForkedSnapshot
    |     |- SkippedSnapshot
    |     |- SmallSnapshot
    |     |- WrongBeacon
    |     |- WrongMember
    |     |- TwoGroups
    |     |- WrongSignature
    |     `- ExpiredLeaf
    |- RoundAborted       too few answered; nothing was revealed, a new round may start
    |- RoundIsOver        the round has ended and its state is erased; the message came too late
    |- MisuseError        our caller broke the contract: a bug on this side, never caught inside
    |  `- WrongSnapshot   a stored state of another role, party, round or plan
    |- CryptoError        bytes that do not verify, unseal or combine; roles turn it into the above
    `- WireError          bytes that are not a valid message; carriers turn it into the above
       |- UnknownVersion
       |- UnknownTag
       |- Truncated
       |- Oversized
       |- TrailingBytes
       `- Malformed       right shape, impossible content

Messages give round, phase, peer, what came and what was due, and never the payload.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from tessera.ids import ClientId, RoundId


class TesseraError(Exception):
    """The root of the tree; `hint`, where there is one, says what to do next."""

    hint: str | None = None


__version__: Final = "0.1.0.dev0"

DISTRIBUTION: Final = "tessera-fl"
"""What is installed; the package that it brings is `tessera`. On PyPI `tessera` is somebody else's
project: no text of ours tells anybody to install that."""


def install(*extras: str) -> str:
    """The command that installs tessera with these optional parts."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    return f"pip install '{DISTRIBUTION}{wanted}'"


def as_python(hint: str) -> str:
    """A hint of the command line for somebody who calls functions: --min-rows is min_rows=."""
    return re.sub(
        r"(?<![\w-])--([a-z][a-z-]*)", lambda found: f"{found[1].replace('-', '_')}=", hint
    )


class ConfigError(TesseraError):
    """The parameters cannot work together. Nothing has been sent."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:  # shown below a traceback, where options are arguments
            self.add_note(f"hint: {as_python(hint)}")


class DataMissing(ConfigError):
    """Files of a published data set are not there; the hint says what to get, and from where."""


class RoundRefused(ConfigError):
    """This client does not take part in this round: it would be one too early, or one too many.

    Nothing has been sent or charged, and the round goes on without it. `record` is what it has to
    remember of the refusal, if anything.
    """

    def __init__(self, message: str, *, hint: str, record: object = None) -> None:
        super().__init__(message, hint=hint)
        self.record = record


class PeerError(TesseraError):
    """The other side broke the protocol. Drop that peer; the round may go on."""

    def __init__(
        self, reason: str, *, round_id: RoundId, phase: str, peer: ClientId | str | None
    ) -> None:
        who = peer if isinstance(peer, str) or peer is None else f"client {peer}"
        super().__init__(f"round {round_id}, {phase}: {who} {reason}")
        self.reason = reason
        self.round_id = round_id
        self.phase = phase
        self.peer = peer


class ServerFault(TesseraError):
    """The server broke the protocol. This client has left the round and does not come back."""

    def __init__(self, reason: str, *, round_id: RoundId, phase: str) -> None:
        super().__init__(f"round {round_id}, {phase}: the server {reason}")
        self.reason = reason
        self.round_id = round_id
        self.phase = phase


class GroupFault(ServerFault):
    """The group that a client was given does not follow from what was signed. It has not joined.

    Of a party that reveals values of a beacon: it has revealed nothing.
    """

    hint = "nothing was sent: ask whoever ran `tessera keys`, and other members, what they have"

    def __init__(self, reason: str, *, snapshot: int) -> None:
        super().__init__(reason, round_id=RoundId(0), phase="membership")
        self.args = (f"snapshot {snapshot}: {reason}",)
        self.snapshot = snapshot


class ForkedSnapshot(GroupFault):
    """Two snapshots of one number, or one that does not follow the one before it."""


class SkippedSnapshot(GroupFault):
    """Snapshots are missing, or a client was left out of one in which it had its turn."""


class SmallSnapshot(GroupFault):
    """Too few newcomers: their neighbours could be chosen by whoever adds clients."""


class WrongBeacon(GroupFault):
    """A value is missing, is not the committed one, or is for another snapshot."""


class WrongMember(GroupFault):
    """A leaf is not the one that the beacon puts into the group."""


class TwoGroups(GroupFault):
    """A client has a group already, or is twice in one."""


class WrongSignature(GroupFault):
    """A snapshot or a value of the beacon that its party did not sign."""


class ExpiredLeaf(GroupFault):
    """A member's certificate is past its date."""


class RoundAborted(TesseraError):
    """Too few answered. Nothing was revealed; the engine may start a new round.

    `reason` says in plain words who or what is missing.
    """

    def __init__(
        self, *, round_id: RoundId, phase: str, answered: int, needed: int, reason: str = ""
    ) -> None:
        self.reason = reason or f"{answered} answered, {needed} are needed"
        super().__init__(f"round {round_id}, {phase}: {self.reason}")
        self.round_id = round_id
        self.phase = phase
        self.answered = answered
        self.needed = needed


class RoundIsOver(TesseraError):
    """The round has ended, and what this side stored of it is erased. Nothing was read."""

    def __init__(self, *, round_id: RoundId, outcome: str, reason: str) -> None:
        because = f" ({reason})" if reason else ""
        super().__init__(f"round {round_id} is over: {outcome}{because}")
        self.round_id = round_id
        self.outcome = outcome
        self.reason = reason


class MisuseError(TesseraError):
    """Our caller broke the contract. A bug on this side, never caught inside tessera."""


class WrongSnapshot(MisuseError):
    """A stored state of another role, party, round or plan than the one to be woken."""


class CryptoError(TesseraError):
    """Signatures that do not verify, boxes that cannot be unsealed, shares that do not combine."""


class WireError(TesseraError):
    """Bytes that are not a valid message of this version of tessera."""


class UnknownVersion(WireError):
    """The first byte names a format this build does not read."""


class UnknownTag(WireError):
    """No record with this tag, or not one of those expected here."""


class Truncated(WireError):
    """The bytes end before the record does."""


class Oversized(WireError):
    """A length is over its cap. Nothing was allocated for it."""


class TrailingBytes(WireError):
    """Bytes are left over after a complete record."""


class Malformed(WireError):
    """A field holds a value its type does not allow, such as an unsorted set."""


def closest(wanted: str, names: Iterable[str]) -> str:
    """A hint for a misspelt name: the one that was meant, or those there are."""
    known = sorted(names)
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there are: {', '.join(known) or 'none'}"
