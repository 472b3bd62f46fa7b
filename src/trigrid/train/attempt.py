"""Ranks of one attempt find each other in a store that may still hold what ranks of earlier ones have left.

torchrun keeps one store for all of its attempts, and agents of several nodes do not count them alike (pytorch#135712):
one whose ranks are only started again for another's sake does not count that. So nothing that a rank is started with
tells who belongs to it, and a key may be of a process that is no more. Here each process has a name of its own, the
first rank numbers the attempt and calls all by their names, and who answers is there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import torch.distributed as dist

from trigrid.errors import RunFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.5
"""After which the first rank looks for processes that have taken the place of others."""
TOLD_S = 1.0
"""In which all ranks learn that the first one has failed, before the first one ends and the store with it."""
FAILED = "failed"


@dataclass(frozen=True)
class Attempt:
    """number: from 1 on; store: the part of the store that is this attempt's alone; words: on the first rank what each
    rank brought, by rank."""

    number: int
    store: Store
    words: tuple[str, ...] = ()


def gather(store: Store, rank: int, world: int, word: str, limit_s: float) -> Attempt:
    """The attempt of this rank, one of so many, each of which brings a word to the first one. A rank writes two keys
    and reads one, whatever their number.

    Raises RunFailed on the first rank where some have not come within `limit_s`, with their numbers; that ends the
    others.
    """
    if rank == 0:
        number = store.add("attempts", 1)
        own = _part(store, number)
        return Attempt(number, own, (word, *_call(store, own, number, range(1, world), limit_s)))
    name = uuid4().hex
    store.set(_name(rank), name)
    number = int(ask(store, _called(name)))
    own = _part(store, number)
    own.set(_here(rank), f"{name} {word}")
    return Attempt(number, own)


def ask(store: Store, key: str) -> str:
    """What the first rank answers; this process ends where that is a failure."""
    answer = store.get(key).decode()
    if answer == FAILED:
        # An end before the first rank's would have the launcher end that one, and its message with it.
        time.sleep(2 * TOLD_S)
        sys.exit(1)
    return answer


def answer(attempt: Attempt, answers: Sequence[str]) -> None:
    """What the first rank has for each, by rank."""
    keys = [_answer(rank) for rank in range(len(answers))]
    attempt.store.multi_set(keys, answers)  # type: ignore[attr-defined]


def answer_to(attempt: Attempt, rank: int) -> str:
    """What the first rank has for this one, as `ask`."""
    return ask(attempt.store, _answer(rank))


def refuse(attempt: Attempt, world: int) -> None:
    """The first rank cannot go on, and all others end."""
    answer(attempt, [FAILED] * world)
    time.sleep(TOLD_S)


def _call(store: Store, own: Store, number: int, others: Sequence[int], limit_s: float) -> list[str]:
    """The words of the others, all of whom have answered."""
    deadline_s = time.monotonic() + limit_s
    names, heres = ([key(rank) for rank in others] for key in (_name, _here))
    if not _waited(store, names, limit_s):
        raise _missing(store, own, others, [rank for rank in others if not store.check([_name(rank)])], limit_s)
    called: set[str] = set()
    while True:
        there = [name.decode() for name in store.multi_get(names)]
        if new := [name for name in there if name not in called]:
            store.multi_set([_called(name) for name in new], [str(number)] * len(new))  # type: ignore[attr-defined]
            called.update(new)
        if _waited(own, heres, POLL_S):
            told = [answer.decode().split(" ", 1) for answer in own.multi_get(heres)]
            # Who has answered may have ended since, and another process have its rank.
            if [name for name, _ in told] == there:
                return [word for _, word in told]
            time.sleep(POLL_S)
        if time.monotonic() > deadline_s:
            raise _missing(store, own, others, [rank for rank in others if not own.check([_here(rank)])], limit_s)


def _waited(store: Store, keys: list[str], limit_s: float) -> bool:
    """Whether all keys are there within that time."""
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except (dist.DistError, RuntimeError):
        return False
    return True


def _missing(store: Store, own: Store, others: Sequence[int], missing: Sequence[int], limit_s: float) -> RunFailed:
    """Says who has not come, and has those end who have."""
    for rank in others:
        if store.check([_name(rank)]):
            store.set(_called(store.get(_name(rank)).decode()), FAILED)
        own.set(_answer(rank), FAILED)
    time.sleep(TOLD_S)
    named = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
    return RunFailed(
        f"{len(missing)} of {len(others) + 1} ranks have not come within {limit_s:g} s (of faults.start_s): {named}; "
        "they have not started, or do not reach the first rank"
    )


def _part(store: Store, number: int) -> Store:
    return dist.PrefixStore(f"attempt {number}", store)  # type: ignore[attr-defined]


def _name(rank: int) -> str:
    return f"rank {rank}"


def _called(name: str) -> str:
    return f"called {name}"


def _here(rank: int) -> str:
    return f"here {rank}"


def _answer(rank: int) -> str:
    return f"answer {rank}"
