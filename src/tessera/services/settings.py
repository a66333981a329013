"""Settings that an operator may change: [service], which no digest covers.

The bundle has those that were packed. A file, the environment and options replace single ones, in
this order, and take effect when the process is started.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from tessera.errors import ConfigError
from tessera.plan import ServicePlan

PREFIX: Final = "TESSERA_SERVICE_"
"""Before the name of a setting in capitals: TESSERA_SERVICE_JOIN=30."""
SECTION: Final = "service"
KNOWN: Final[dict[str, type[int] | type[float]]] = {
    each.name: int if isinstance(each.default, int) else float for each in fields(ServicePlan)
}
NAMES: Final = ", ".join(KNOWN)


def service_settings(
    packed: ServicePlan,
    *,
    file: Path | None = None,
    given: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ServicePlan:
    """The settings of this process: those that were packed, with what this operator says."""
    found: dict[str, Any] = {}
    if file is not None:
        found |= _of_file(file)
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(PREFIX):
            found |= _checked(name.removeprefix(PREFIX).lower(), text, name)
    for each in given:
        name, equals, text = each.partition("=")
        if not equals:
            raise ConfigError(f"--service {each}", hint="write it as --service join=30")
        found |= _checked(name.strip(), text, f"--service {name.strip()}")
    return replace(packed, **found)


def _of_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", hint="a file of settings is TOML") from error
    section = content.pop(SECTION, None)
    if content or not isinstance(section, dict):
        other = f"[{next(iter(content))}]" if content else "no [service]"
        raise ConfigError(
            f"{path}: {other}; a file of settings has the section [service] and nothing else",
            hint=f"[service] has {NAMES}",
        )
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _checked(name, str(value), f"{path}: {name}")
    return found


def _checked(name: str, text: str, source: str) -> dict[str, Any]:
    kind = KNOWN.get(name)
    if kind is None:
        raise ConfigError(f"{source}: there is no such setting", hint=f"one of {NAMES}")
    try:
        return {name: kind(text)}
    except ValueError:
        what = "a whole number" if kind is int else "a number of seconds"
        raise ConfigError(f"{source} = {text!r}", hint=f"{name} is {what}") from None
