"""Draw the steps of roles on the pages of docs/protocols/ from the transition tables in the code.

    python scripts/draw_protocol.py            print all of them
    python scripts/draw_protocol.py --write    put them between the markers in their pages
    python scripts/draw_protocol.py --check    exit status 1 if a page shows anything else

The client's arrows are its table `STEPS`: where one leads is in the transition's return annotation,
what it sends is whatever message its body makes. The server's are `STEPS` (what is taken in which
phase) and `CLOSES` (what ends it): where those lead is whichever phase their bodies make.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from tessera.errors import PeerError, RoundAborted  # noqa: E402
from tessera.protocols.epochs.member import GroupMember  # noqa: E402
from tessera.protocols.epochs.server import GroupServer  # noqa: E402
from tessera.protocols.machine import Aborted, Left, Over, StateMachine  # noqa: E402
from tessera.protocols.secagg import client, server  # noqa: E402
from tessera.protocols.secagg.messages import FROM_CLIENT, FROM_SERVER, Advert  # noqa: E402
from tessera.protocols.secagg.phases import PHASES, Between, Done, SumAborted  # noqa: E402
from tessera.protocols.secagg.states import Advertised, Finished  # noqa: E402
from tessera.protocols.two_server.handshake import HelperHandshake, LeaderHandshake  # noqa: E402
from tessera.protocols.two_server.read.client import RetrievalClient  # noqa: E402
from tessera.protocols.two_server.read.server import RetrievalHelper, RetrievalLeader  # noqa: E402
from tessera.protocols.two_server.write.client import WriteClient  # noqa: E402
from tessera.protocols.two_server.write.helper import WriteHelper  # noqa: E402
from tessera.protocols.two_server.write.leader import WriteLeader  # noqa: E402

PAGES: Final = ROOT / "docs" / "protocols"
TWO_SERVER: Final = (
    LeaderHandshake,
    HelperHandshake,
    RetrievalClient,
    RetrievalLeader,
    RetrievalHelper,
    WriteClient,
    WriteLeader,
    WriteHelper,
)
PACKAGE: Final = "tessera.protocols"
BEGIN: Final = "<!-- {name} diagram: drawn by scripts/draw_protocol.py -->"
END: Final = "<!-- end of {name} diagram -->"


def client_diagram() -> str:
    """(state, message) -> next states, and what is sent with it."""
    lines = [f"[*] --> {Advertised.__name__}: join / {Advert.__name__}"]
    for (state, event), step in client.STEPS.items():
        came = event.__name__ if event in FROM_SERVER else f"submit {event.__name__}"
        for states, messages in _branches(step):
            label = f"{came} / {_names(messages)}" if messages else came
            lines += [f"{state.__name__} --> {n.__name__}: {label}" for n in states]
    ends = (Finished, Left)
    lines += [f"{end.__name__} --> [*]" for end in ends]
    lines += [
        f"note right of {Left.__name__}",
        "  from every state, on any message from the server that is not due or not right",
        "end note",
    ]
    return _mermaid(lines)


def server_diagram() -> str:
    """Phase -> phase by the clock, and what is taken in between."""
    taken = dict(server.STEPS.keys())
    lines = [f"[*] --> {next(iter(server.CLOSES)).__name__}: invite the cohort"]
    closing: dict[type[Any], Callable[..., Any]] = dict(server.CLOSES)
    closing[Between] = server.Server.begin_stage
    for phase, close in closing.items():
        if phase in taken:
            lines.append(f"{phase.__name__} --> {phase.__name__}: {taken[phase].__name__}")
        sent = _names(_made(close, FROM_SERVER, owner=server.Server))
        word = "begin_stage" if phase is Between else "close_phase"
        for following in _made(close, PHASES, owner=server.Server):
            label = f"{word} / {sent}" if sent else word
            lines.append(f"{phase.__name__} --> {following.__name__}: {label}")
        if _made(close, [RoundAborted], owner=server.Server):
            lines.append(f"{phase.__name__} --> {SumAborted.__name__}: {word} / too few")
    lines += [f"{end.__name__} --> [*]" for end in (Done, SumAborted)]
    return _mermaid(lines)


def role_table(role: type[StateMachine]) -> str:
    """State, what it takes and what it becomes: one line for every step."""
    lines = ["| state | takes | becomes |", "|---|---|---|"]
    steps = [(state, f"`{event.__name__}`", step) for (state, event), step in role.STEPS.items()]
    steps += [(state, "*close_phase*", step) for state, step in role.CLOSES.items()]
    order = list(role.STATES)
    for state, event, step in sorted(steps, key=lambda one: order.index(one[0])):
        becomes = [f"`{kind.__name__}`" for kind in _made(step, (*role.STATES, Over), owner=role)]
        if _stays(step):
            becomes.insert(0, "the same")
        if _made(step, [RoundAborted], owner=role):
            becomes.append(f"`{Aborted.__name__}`")
        if _made(step, [PeerError]):
            becomes = ["the same: it is late, a `PeerError` for that client"]
        lines.append(f"| `{state.__name__}` | {event} | {' or '.join(becomes)} |")
    return "\n".join(lines)


def _stays(step: Callable[..., Any]) -> bool:
    """Whether a step may return the state it was given."""
    given = list(inspect.signature(step).parameters)[1]
    return any(
        isinstance(node.value, ast.Tuple) and ast.unparse(node.value.elts[0]) == given
        for node in ast.walk(_tree(step))
        if isinstance(node, ast.Return)
    )


def role_tables(*roles: type[StateMachine]) -> str:
    return "\n\n".join(
        f"**{role.__name__}** (`{role.ROLE}`)\n\n{role_table(role)}" for role in roles
    )


DIAGRAMS: Final = {
    "secagg.md": {"client": client_diagram, "server": server_diagram},
    "epochs.md": {"group roles": lambda: role_tables(GroupMember, GroupServer)},
    "two-servers.md": {"two-server roles": lambda: role_tables(*TWO_SERVER)},
}


def _mermaid(lines: list[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"```mermaid\nstateDiagram-v2\n{body}\n```"


def _names(kinds: Collection[type[Any]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _returned_states(step: Callable[..., Any]) -> tuple[type[Any], ...]:
    """The states in `-> tuple[A | B, list[Any]]`."""
    state = get_args(get_type_hints(step)["return"])[0]
    return get_args(state) or (state,)


def _branches(
    step: Callable[..., Any],
) -> Iterator[tuple[tuple[type[Any], ...], list[type[Any]]]]:
    """(next states, messages sent) of a step itself, then of each function it returns through."""
    known = inspect.unwrap(step).__globals__
    through = [
        known[node.value.func.id]
        for node in ast.walk(_tree(step))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Name)
    ]
    elsewhere = {state for function in through for state in _returned_states(function)}
    own = tuple(state for state in _returned_states(step) if state not in elsewhere)
    if own:
        yield own, _made(step, FROM_CLIENT, without=through)
    for function in through:
        yield _returned_states(function), _made(function, FROM_CLIENT)


def _made(
    function: Callable[..., Any],
    kinds: Collection[type[Any]],
    *,
    owner: type[Any] | None = None,
    without: Collection[Callable[..., Any]] = (),
) -> list[type[Any]]:
    """Which of these records a function makes, itself or through the functions it calls.

    Calls are followed within the package, and with an `owner` also from method to method.
    """
    found: list[type[Any]] = []
    seen: set[Callable[..., Any]] = set(without)

    def walk(one: Callable[..., Any]) -> None:
        if one in seen:
            return
        seen.add(one)
        for called in _called(one, owner):
            if called in kinds and called not in found:
                found.append(called)
            elif inspect.isfunction(called) and called.__module__.startswith(PACKAGE):
                walk(called)

    walk(function)
    return [kind for kind in kinds if kind in found]


def _called(function: Callable[..., Any], owner: type[Any] | None) -> Iterator[Any]:
    """What the names called in a function's body stand for."""
    known = inspect.unwrap(function).__globals__
    for node in ast.walk(_tree(function)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func
        if isinstance(name, ast.Name):
            yield known.get(name.id)
        elif owner is not None and isinstance(name, ast.Attribute):
            if isinstance(name.value, ast.Name) and name.value.id == "self":
                yield getattr(owner, name.attr, None)


def _tree(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def redrawn(page: str, file: str = "secagg.md") -> str:
    """The page with its diagrams as the code has them now."""
    for name, draw in DIAGRAMS[file].items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"error: {file} has no place for the {name} diagram")
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{draw()}\n{end}{after}"
    return page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="put the diagrams into the page")
    choice.add_argument("--check", action="store_true", help="compare them with the page")
    chosen = parser.parse_args(arguments)
    if not chosen.write and not chosen.check:
        print("\n\n".join(draw() for drawn in DIAGRAMS.values() for draw in drawn.values()))
        return 0
    for file in DIAGRAMS:
        path = PAGES / file
        page = path.read_text(encoding="utf-8")
        if chosen.write:
            path.write_text(redrawn(page, file), encoding="utf-8")
        elif redrawn(page, file) != page:
            print(f"error: {path.relative_to(ROOT)} does not show the code's", file=sys.stderr)
            print("hint: `python scripts/draw_protocol.py --write` draws them", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
