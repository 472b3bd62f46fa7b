"""Names of hosts as Slurm writes them, and the switches above them."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from trigrid.errors import Problem, Refused

KEY = "cluster.topology"
Switches = dict[str, tuple[str, ...]]
"""Host → the switches above it, from the spine down to its leaf."""


def expand(hosts: str) -> tuple[str, ...]:
    """The hosts of a Slurm list such as `gpu[003-005,014],login1`. Raises ValueError where it is none."""
    if not re.fullmatch(r"(?:[^\[\],]|,(?!,)|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])*", hosts):
        raise ValueError(f"{hosts!r} is no list of hosts")
    names: list[str] = []
    for item in re.findall(r"(?:[^\[,]|\[[^\]]*\])+", hosts):
        parts = [_numbers(part[1:-1]) if part[0] == "[" else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", item)]
        names += ["".join(parts) for parts in product(*parts)]
    return tuple(names)


def _numbers(ranges: str) -> list[str]:
    """003-005,014 → 003, 004, 005, 014."""
    found = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found


def read_topology(path: str | Path) -> Switches:
    """The switches of a file as Slurm's topology.conf, or as `scontrol show topology` prints it.

    Raises Refused where it cannot be read, or is no tree of switches.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Refused([Problem(KEY, path, reason)]) from None
    above: dict[str, str] = {}
    hosts: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0]
        if not words.strip():
            continue
        values = {key.lower(): value for key, value in re.findall(r"(\w+)=(\S+)", words)}
        try:
            name = values["switchname"]
            # `scontrol` names the nodes of a spine's leaves once more.
            if "switches" in values:
                above |= dict.fromkeys(expand(values["switches"]), name)
            else:
                hosts |= dict.fromkeys(expand(values["nodes"]), name)
        except (KeyError, ValueError) as error:
            missing = f"{error.args[0]}= is missing" if isinstance(error, KeyError) else str(error)
            reason = f"{missing}; SwitchName=… with Nodes=… or Switches=… is expected"
            raise Refused([Problem(KEY, line.strip(), reason, where=f"{path}:{number}")]) from None
    return {host: _way_down(leaf, above, path) for host, leaf in hosts.items()}


def _way_down(leaf: str, above: dict[str, str], path: str | Path) -> tuple[str, ...]:
    way = [leaf]
    while (switch := above.get(way[0])) is not None:
        if switch in way:
            raise Refused([Problem(KEY, path, f"the switches {', '.join(sorted({*way}))} are above each other")])
        way.insert(0, switch)
    return tuple(way)


def in_order(name: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts names as a person does: node9 before node10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name))
