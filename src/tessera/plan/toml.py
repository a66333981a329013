"""A plan as TOML: read with every key checked, written back; and its digest, which binds rounds."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_origin, get_type_hints

from tessera.errors import ConfigError
from tessera.plan.scheme import Scheme
from tessera.plan.sections import (
    AGREED_BY_NOBODY,
    GROUPS,
    SECTIONS,
    PrivacyPlan,
    TablePlan,
    TaskPlan,
)
from tessera.privacy.index.response import LEVELS
from tessera.protocols.secagg.params import GraphKind, Threat

if TYPE_CHECKING:
    from tessera.plan.plan import Plan


RENAMED: Final[Mapping[tuple[str, str], str]] = {
    ("server", "memory"): "it is called beta2 now",
    ("server", "pull"): "it is called shrinkage now",
    ("privacy", "group"): "it is [groups] size now",
    ("privacy", "fixed_groups"): "it is [groups] size now",
    ("privacy", "one_participation"): 'it is [cohorts] drawn = "schedule" now',
    ("dp", "participation"): 'it is [cohorts] drawn = "secret" with this as its share now',
}
"""(section, key): the hint for a key that once had another name, or another place."""

# --- toml -----------------------------------------------------------------------------------------
#
# A plan as TOML: text to the parts of a plan, and a plan to text.
#
# Unknown keys are refused: a misspelt privacy setting must not fall back to a default in silence.


T = TypeVar("T")

MOST_BYTES: Final = 1 << 20
"""No plan is longer: checked before the file is read."""
MOST_NUMBER: Final = 2**63
"""No key of a plan needs a larger integer."""
EXAMPLE: Final = "`tessera plan --example` prints a plan"
LIKE: Final = {int: "10", float: "0.1", bool: "true", str: '"text"'}

TOP_LEVEL: Final[dict[str, type[Any]]] = {
    "federation": str,
    "scheme": Scheme,
    "cohort": int,
    "seed": int,
}


SPELT_OUT: Final = {
    ("[training]", "learning_rate"): "rate",
    ("[server]", "learning_rate"): "rate",
}
"""Keys that may be spelt out, in a file and in a dictionary alike."""

BY_TASK: Final = ("training", "server")
"""Sections whose keys a plan without a model takes from its task, where it leaves them out."""


def parse(text: str, source: str) -> dict[str, Any]:
    """The parts of a plan by the names of its fields; `source` is named in every refusal."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML: {error}", hint=EXAMPLE) from error
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"{source}: a number is too long", hint=EXAMPLE) from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply", hint=EXAMPLE) from error
    tables = raw.pop("table", [])
    if not isinstance(tables, list):
        raise ConfigError(
            f"{source}: table = {tables!r} is not a list", hint="begin each with [[table]]"
        )
    parts: dict[str, Any] = {
        "tables": tuple(build_section(TablePlan, t, source, "[[table]]") for t in tables)
    }
    given = {name: raw.pop(name) for name in SECTIONS if name in raw}
    for name, keys in given.items():
        parts[name] = build_section(SECTIONS[name], keys, source, f"[{name}]")
    if "task" in raw and not tables and not ("model" in parts and parts["model"].dense):
        parts["partial"] = {
            name: given_keys(parts.pop(name), given[name], f"[{name}]")
            for name in BY_TASK
            if name in given and len(given[name]) < len(fields(parts[name]))
        }
    if "task" in raw:
        parts["task"] = build_task(raw.pop("task"), source)
    for name, value in raw.items():
        if name not in TOP_LEVEL:
            raise _unknown(source, "", name, [*TOP_LEVEL, *SECTIONS, "task", "table"])
        parts[name] = _checked(name, TOP_LEVEL[name], value, source, "")
    for name in ("scheme", "cohort"):
        if name not in parts:
            raise ConfigError(f"{source}: {name} is missing", hint=EXAMPLE)
    return parts


def write(
    plan: Plan,
    names: Iterable[str] = SECTIONS,
    without: Collection[str] = (),
) -> str:
    """The plan with these sections, as a file that reads back to the same plan.

    Keys `without` which it is written are of the top level.
    """
    lines = [
        f"{name} = {toml_value(getattr(plan, name))}" for name in TOP_LEVEL if name not in without
    ]
    if plan.task.name:
        lines += ["", "[task]", f"name = {toml_value(plan.task.name)}"]
        options = sorted(plan.task.options.items())
        lines += [f"{name} = {toml_value(value)}" for name, value in options]
    for name in names:
        part = getattr(plan, name)
        if part is None and name in plan.partial:
            given = sorted(plan.partial[name].items())
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in given)]
        if part is None:
            continue
        keys = [
            f"{f.name} = {toml_value(getattr(part, f.name))}"
            for f in fields(part)
            if not (name == "privacy" and part.level and f.name in ("p1", "p2", "p3", "p4"))
        ]
        lines += ["", f"[{name}]", *keys] if keys else []
    for t in plan.tables:
        lines += ["", "[[table]]", *(f"{k} = {toml_value(v)}" for k, v in asdict(t).items())]
    return "\n".join(lines) + "\n"


def build_section(kind: type[T], raw: Any, source: str, where: str) -> T:
    """One section; refuses unknown keys and values of another type, naming file and field."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: {where} = {raw!r} is a section, not a value", hint=EXAMPLE)
    hints = get_type_hints(kind)
    values = {}
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for spelt, value in raw.items():
        name = SPELT_OUT.get((where, spelt), str(spelt))
        if name not in known:
            raise _unknown(source, where, name, known)
        if name in values:
            raise ConfigError(
                f"{source}: {where} has {name} twice", hint=f"{spelt} is another name for it"
            )
        values[name] = _checked(name, hints[name], value, source, where)
    for f in fields(kind):  # type: ignore[arg-type]
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{source}: {where} {f.name} is missing", hint=EXAMPLE)
    given = values.keys() & {"p1", "p2", "p3", "p4"} if kind is PrivacyPlan else set()
    if given and values.setdefault("level", ""):
        raise ConfigError(
            f"{source}: {where} has a level and probabilities", hint="give one or the other"
        )
    try:
        built = kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {where} {error}", hint=error.hint or EXAMPLE) from error
    if given and len(given) < 4:
        missing = ", ".join(sorted({"p1", "p2", "p3", "p4"} - given))
        raise ConfigError(
            f"{source}: {where} {missing} is missing", hint="give all four, or a level"
        )
    return built


def given_keys(section: Any, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values that a section has of its own, by the names of its fields."""
    names = (SPELT_OUT.get((where, spelt), spelt) for spelt in raw)
    return {name: getattr(section, name) for name in names}


def build_task(raw: Any, source: str) -> TaskPlan:
    """Its options are the task's own business, and checked where it is loaded."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str) or not raw["name"]:
        raise ConfigError(f"{source}: [task] has no name", hint='such as name = "taobao-like"')
    options = {name: value for name, value in raw.items() if name != "name"}
    for name, value in options.items():
        _check_magnitude(f"[task] {name}", value, source)
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(
                f"{source}: [task] {name} = {value!r}", hint="options are numbers, texts or flags"
            )
    return TaskPlan(name=raw["name"], options=options)


def _check_magnitude(label: str, value: Any, source: str) -> None:
    if isinstance(value, int) and not -MOST_NUMBER <= value < MOST_NUMBER:
        raise ConfigError(
            f"{source}: {label} is a number of {value.bit_length()} bits",
            hint="integers in a plan have at most 63 bits",
        )


def _checked(name: str, kind: type[Any], value: Any, source: str, where: str) -> Any:
    label = f"{where} {name}".strip()
    if get_origin(kind) is Literal:
        kind = str  # its class knows which
    if issubclass(kind, (StrEnum, Threat, GraphKind)):
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(str(member.value) for member in kind)
            raise ConfigError(
                f"{source}: {label} = {value!r}", hint=f"it is one of {names}"
            ) from None
    _check_magnitude(label, value, source)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(
            f"{source}: {label} = {value!r} is not of type {kind.__name__}",
            hint=f"write {name} = {LIKE[kind]}",
        )
    if name == "level" and value not in ("", GROUPS, *LEVELS):
        known = ", ".join([GROUPS, *LEVELS])
        raise ConfigError(f"{source}: {label} = {value!r}", hint=f"levels: {known}")
    return value


def _unknown(source: str, where: str, name: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    hint = RENAMED.get((where.strip("[]"), name), hint)
    return ConfigError(f"{source}: unknown key {f'{where} {name}'.strip()}", hint=hint)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (StrEnum, Threat, GraphKind)):
        return json.dumps(str(value.value))
    if isinstance(value, str):
        # TOML knows no surrogate pairs, and wants DEL escaped, which JSON does not
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


# --- digest ---------------------------------------------------------------------------------------


def digest(plan: Plan, without: Collection[str] = ()) -> bytes:
    """SHA-256 of the plan's text without the sections that clients have no part in."""
    names = [name for name in SECTIONS if name not in AGREED_BY_NOBODY]
    return hashlib.sha256(write(plan, names, without).encode()).digest()
