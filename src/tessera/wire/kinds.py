"""Kinds of records: the tag of each, and its fields in wire order, read from the annotations.

A record inside another is written without a frame: its fields alone (`Nested`), or its tag before
them where it may be of several kinds (`OneOf`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

from tessera.errors import ConfigError, Malformed, MisuseError, UnknownTag
from tessera.wire.cursor import Reader
from tessera.wire.fields import TAG, Codec

R = TypeVar("R")

_KINDS: Final[dict[int, type[Any]]] = {}
_TAGS: Final[dict[type[Any], int]] = {}
_LAYOUTS: Final[dict[type[Any], tuple[tuple[str, Codec], ...]]] = {}
_LEASTS: Final[dict[type[Any], int]] = {}
_WITH_PARTS: Final[dict[type[Any], bool]] = {}


def record(tag: int) -> Callable[[type[R]], type[R]]:
    """Give a frozen dataclass its tag, under which it can travel or be stored on its own."""

    def register(kind: type[R]) -> type[R]:
        if not is_dataclass(kind) or tag in _KINDS:
            raise MisuseError(f"{kind.__name__}: not a dataclass, or tag {tag:#06x} is taken")
        _KINDS[tag] = kind
        _TAGS[kind] = tag
        return kind

    return register


def records() -> Mapping[int, type[Any]]:
    """Every record that can stand on its own, by tag."""
    return dict(_KINDS)


def kind_with(tag: int) -> type[Any] | None:
    """The kind of record that has this tag, if there is one."""
    return _KINDS.get(tag)


def tag_of(kind: type[Any]) -> int:
    """The tag under which records of this kind travel."""
    if kind not in _TAGS:
        raise MisuseError(f"{kind.__name__} has no tag")
    return _TAGS[kind]


def layout(kind: type[Any]) -> tuple[tuple[str, Codec], ...]:
    """The fields of a record in wire order, each with its codec; read from the annotations once."""
    if kind not in _LAYOUTS:
        hints = get_type_hints(kind, include_extras=True)
        _LAYOUTS[kind] = tuple((f.name, _codec_of(kind, hints[f.name])) for f in fields(kind))
    return _LAYOUTS[kind]


def _codec_of(kind: type[Any], hint: Any) -> Codec:
    if get_origin(hint) is Annotated:
        for extra in get_args(hint)[1:]:
            if isinstance(extra, Codec):
                return extra
    if isinstance(hint, type) and is_dataclass(hint):
        return Nested(hint)
    raise MisuseError(f"{kind.__name__}: no codec for a field of type {hint}")


def _least(kind: type[Any]) -> int:
    if kind not in _LEASTS:
        _LEASTS[kind] = sum(codec.least for _, codec in layout(kind))
    return _LEASTS[kind]


def _has_parts(kind: type[Any]) -> bool:
    if kind not in _WITH_PARTS:
        _WITH_PARTS[kind] = any(codec.has_parts for _, codec in layout(kind))
    return _WITH_PARTS[kind]


class Nested(Codec):
    """A record inside another, without a frame of its own."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind

    @property
    def least(self) -> int:  # type: ignore[override]
        return _least(self.kind)

    @property
    def has_parts(self) -> bool:  # type: ignore[override]
        return _has_parts(self.kind)

    def write(self, out: bytearray, value: Any) -> None:
        if type(value) is not self.kind:
            raise MisuseError(f"{type(value).__name__} where {self.kind.__name__} is due")
        for name, codec in layout(self.kind):
            codec.write(out, getattr(value, name))

    def read(self, source: Reader) -> Any:
        values = {name: codec.read(source) for name, codec in layout(self.kind)}
        try:
            return self.kind(**values)
        except ConfigError:  # its text quotes values, and what was received is not repeated
            raise Malformed(f"a {self.kind.__name__} of values that cannot be together") from None

    def references(self, value: Any) -> Iterator[Any]:
        for name, codec in layout(self.kind):
            yield from codec.references(getattr(value, name))


class OneOf(Codec):
    """A record that may be of several kinds, each known by its tag."""

    least = 2

    def __init__(self, *kinds: type[Any]) -> None:
        self.kinds = kinds

    @property
    def has_parts(self) -> bool:  # type: ignore[override]
        return any(_has_parts(kind) for kind in self.kinds)

    def write(self, out: bytearray, value: Any) -> None:
        if type(value) not in self.kinds:
            raise MisuseError(f"{type(value).__name__} is not one of the kinds due here")
        TAG.write(out, tag_of(type(value)))
        Nested(type(value)).write(out, value)

    def read(self, source: Reader) -> Any:
        tag = TAG.read(source)
        for kind in self.kinds:
            if tag_of(kind) == tag:
                return Nested(kind).read(source)
        raise UnknownTag(f"tag {tag:#06x} is not one of those due here")

    def references(self, value: Any) -> Iterator[Any]:
        return Nested(type(value)).references(value)
