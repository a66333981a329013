"""Code by name and digest: what a bundle says of a task function, and what a client runs of it.

A bundle holds no code. It has the name of a function, `package.module:function`, and the digest of
the package's files. A client imports only what its own operator names, and nothing before name and
digest are the bundle's: until then files are read, not run. A package is all files of code below
its folder; a module outside of packages is its one file. What these import from elsewhere is not
in it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError

SUFFIXES: Final = (".py", ".so", ".pyd")
NAMED: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
HINT: Final = "package.module:function, in a folder of PYTHONPATH or the one you are in"


@dataclass(frozen=True, slots=True)
class NamedCode:
    """A function and the digest of the files that it is in."""

    name: str
    digest: bytes

    @classmethod
    def find(cls, name: str) -> NamedCode:
        """As it is here. Nothing of it is imported."""
        hashed = hashlib.sha256(Label.CODE.encode())
        for inside, path in _files(name):
            hashed.update(encode_context(inside, path.read_bytes()))
        return cls(name, hashed.digest())

    @classmethod
    def of(cls, function: Callable[..., Any]) -> NamedCode:
        """Of a function that is imported here."""
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or "<" in name:
            raise ConfigError(
                f"{name}: a function that clients cannot import by name",
                hint="put it into a module of its own, at the top level",
            )
        return cls.find(f"{module}:{name}")

    def checked(self, name: str) -> Callable[..., Any]:
        """The function of this name, imported, if it is the one that was packed."""
        if name != self.name:
            raise ConfigError(
                f"--task {name}: the bundle was packed with {self.name}",
                hint="nothing was imported; name the code that you agreed to run",
            )
        here = NamedCode.find(name)
        if here.digest != self.digest:
            raise ConfigError(
                f"{name}: its code here is {here.digest.hex()[:16]}, and the bundle was packed "
                f"with {self.digest.hex()[:16]}",
                hint="nothing was imported; install the version that was packed",
            )
        return imported(name)


def imported(name: str) -> Callable[..., Any]:
    """The function of this name."""
    _files(name)  # or it is refused by name
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function, None)
    except ImportError as error:
        raise ConfigError(f"{name}: {error}", hint=HINT) from error
    if not callable(found):
        raise ConfigError(f"{name}: {module} has no function {function!r}", hint=HINT)
    return found  # type: ignore[no-any-return]


def _files(name: str) -> list[tuple[str, Path]]:
    """The files that a name stands for, by their place in the package."""
    if not NAMED.fullmatch(name):
        raise ConfigError(f"{name!r} does not name a function", hint=HINT)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    top = name.partition(":")[0].partition(".")[0]
    spec = find_spec(top)  # of a name without a dot: nothing is imported
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        raise ConfigError(f"{name}: there is no module {top!r}", hint=HINT)
    if not spec.submodule_search_locations:
        return [(top, Path(str(spec.origin)))]
    found = [
        (path.relative_to(folder).as_posix(), path)
        for folder in map(Path, spec.submodule_search_locations)
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    ]
    return sorted(found)
