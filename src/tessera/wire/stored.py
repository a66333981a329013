"""A role's stored state: one record, and beside it the messages that the record names by digest.

What everybody has alike, or what is long (a roster, forwarded shares, a header), is stored once, as
the message it came in. A state holds it as `Kept`: in memory with the decoded message, in a
snapshot as 32 bytes. What a role is given when it is made (its parameters) is not stored either: it
is given again when the role is woken, and the snapshot has its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, Generic, TypeVar

from tessera import wire
from tessera.errors import Malformed, MisuseError, TrailingBytes, WrongSnapshot
from tessera.ids import ClientId, Party, RoundId
from tessera.wire.index_set import IndexSet, client_array, client_set

M = TypeVar("M")

MARK_BYTES: Final = 16
MAX_STATE_BYTES: Final = 1 << 36


@dataclass(frozen=True, eq=False)
class Kept(Generic[M]):
    """A message with the bytes it travelled in; a stored state has its digest instead."""

    data: bytes = field(repr=False)
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, message: M) -> Kept[M]:
        """A message of our own, encoded here."""
        return cls.received(message, *wire.framed(message))

    @classmethod
    def received(cls, message: M, data: bytes, digest: bytes) -> Kept[M]:
        """A message that was decoded from these bytes, whose digest (`wire`) is this."""
        kept = cls(data, digest)
        kept.__dict__["message"] = message
        return kept

    @cached_property
    def message(self) -> M:
        """Decoded when it is first needed: a role that is woken may not need it at all."""
        found: M = wire.decode_known(self.data)
        return found

    def forget_decoded(self) -> None:
        """Let go of the decoded message, where the bytes are enough from here on."""
        self.__dict__.pop("message", None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class Context:
    """What a stored state refers to: messages by digest, and what its role is given, by name."""

    messages: Mapping[bytes, bytes] = field(repr=False)
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)


class ByDigest(wire.Codec):
    """A `Kept` message of one kind: 32 bytes, which name it among the messages stored beside."""

    least = 32

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind

    def write(self, out: bytearray, value: Kept[Any]) -> None:
        if not isinstance(value, Kept) or wire.kind_of(value.data) is not self.kind:
            raise MisuseError(f"a kept {self.kind.__name__} is due here")
        out += value.digest

    def read(self, source: wire.Reader) -> Kept[Any]:
        digest = bytes(source.take(32))
        data = _context(source).messages.get(digest)
        if data is None:
            raise Malformed(f"a stored state names a {self.kind.__name__} that is not there")
        if wire.kind_of(data) is not self.kind or wire.digest_of(data) != digest:
            raise Malformed(f"a stored state names a {self.kind.__name__} that was changed")
        return Kept(data, digest)

    def references(self, value: Kept[Any]) -> Iterator[Kept[Any]]:
        yield value


class Supplied(wire.Codec):
    """What the role was given when it was made, and is given again when it is woken: no bytes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, out: bytearray, value: Any) -> None:
        return

    def read(self, source: wire.Reader) -> Any:
        return _given(source, self.name)


class Inner(wire.Codec):
    """A role inside another's state: its snapshot, and its messages among the outer one's.

    To read it, the outer role gives a function under this name: snapshot and messages -> the role.
    """

    least = 1

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, out: bytearray, value: Any) -> None:
        _BLOB.write(out, value.snapshot())

    def read(self, source: wire.Reader) -> Any:
        wake: Callable[[bytes, Mapping[bytes, bytes]], Any] = _given(source, self.name)
        return wake(_BLOB.read(source), _context(source).messages)

    def references(self, value: Any) -> Iterator[Kept[Any]]:
        for digest, data in value.messages.items():
            yield Kept(data, digest)


class ClientSet(wire.Codec):
    """A frozen set of clients, as a sorted `IndexSet`."""

    least = 1

    def __init__(self, cap: int) -> None:
        self.inner = IndexSet(cap)

    def write(self, out: bytearray, value: frozenset[ClientId]) -> None:
        self.inner.write(out, client_array(value))

    def read(self, source: wire.Reader) -> frozenset[ClientId]:
        return client_set(self.inner.read(source))


class Marks(wire.Codec):
    """The marks of handled messages: a set, in ascending order."""

    least = 1

    def write(self, out: bytearray, value: frozenset[bytes]) -> None:
        _BLOB.write(out, b"".join(sorted(value)))

    def read(self, source: wire.Reader) -> frozenset[bytes]:
        raw = _BLOB.read(source)
        found = [raw[at : at + MARK_BYTES] for at in range(0, len(raw), MARK_BYTES)]
        if len(raw) % MARK_BYTES or sorted(set(found)) != found:
            raise Malformed("the marks of handled messages are not an ascending set")
        return frozenset(found)


_BLOB: Final = wire.UpTo(MAX_STATE_BYTES)
PARTY: Final = wire.Converted(
    wire.TEXT,
    lambda party: party if isinstance(party, str) else f"client {party}",
    lambda text: ClientId(int(text[7:])) if text.startswith("client ") else text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose snapshot it is: a role of one party, in one round under certain parameters."""

    role: Annotated[str, wire.TEXT]
    party: Annotated[Party, PARTY]
    round_id: Annotated[RoundId, wire.U64]
    params: Annotated[bytes, wire.KEY] = field(repr=False)


@wire.record(tag=0x0010)
@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A role at rest. `handled` and `last` are the marks of messages it has handled, and of the one
    that led to its state; `state` is the state's tag and fields."""

    owner: Owner
    handled: Annotated[frozenset[bytes], Marks()] = field(repr=False)
    last: Annotated[bytes, wire.UpTo(MARK_BYTES)] = field(repr=False)
    state: Annotated[bytes, _BLOB] = field(repr=False)


def packed(owner: Owner, state: Any, handled: frozenset[bytes], last: bytes) -> bytes:
    """A snapshot as bytes."""
    body = bytearray()
    wire.OneOf(type(state)).write(body, state)
    return wire.encode(Snapshot(owner=owner, handled=handled, last=last, state=bytes(body)))


def unpacked(
    data: bytes, owner: Owner, states: tuple[type[Any], ...], context: Context
) -> tuple[Any, Snapshot]:
    """(the state, the snapshot around it); `WrongSnapshot` if it is somebody else's."""
    stored: Snapshot = wire.decode(data, expect=[Snapshot], cap=MAX_STATE_BYTES)
    for name in ("role", "party", "round_id", "params"):
        found, due = getattr(stored.owner, name), getattr(owner, name)
        if found != due:
            raise WrongSnapshot(
                f"a snapshot of another {_PART[name]}: {_shown(found)}, not {_shown(due)}"
            )
    source = wire.Reader(stored.state, context)
    state = wire.OneOf(*states).read(source)
    if source.left:
        raise TrailingBytes(f"{source.left} bytes follow a complete {type(state).__name__}")
    return state, stored


_PART: Final = {"role": "role", "party": "party", "round_id": "round", "params": "plan"}


def _shown(value: Any) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)


def references(state: Any) -> dict[bytes, bytes]:
    """The messages that a state names, by digest."""
    return {kept.digest: kept.data for kept in wire.Nested(type(state)).references(state)}


def _context(source: wire.Reader) -> Context:
    """What the state may refer to; nothing where a message is decoded."""
    return source.context if isinstance(source.context, Context) else Context({})


def _given(source: wire.Reader, name: str) -> Any:
    given = _context(source).given
    if name not in given:
        raise Malformed(f"a stored state needs {name}, which is not given here")
    return given[name]
