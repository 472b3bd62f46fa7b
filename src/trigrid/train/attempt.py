"""Ranks of one attempt find each other in a store that may still hold what ranks of earlier ones have left.

torchrun keeps one store for all of its attempts, and agents of several nodes do not count them alike (pytorch#135712):
one whose ranks are only started again for another's sake does not count that. So nothing that a rank is started with
tells who belongs to it, and a key may be of a process that is no more. Here each process has a name of its own, the
first rank numbers the attempt and calls all by their names, and who answers is there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import torch.distributed as dist

from trigrid.errors import RunFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.5
"""Between two looks of the first rank at who is there, at most."""
TOLD_S = 1.0
"""In which all ranks learn that the first one has failed, before the first one ends and the store with it."""
TELL_S = 15.0
"""Between two words on who is waited for."""
FAILED = "failed"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Attempt:
    """number: from 1 on; store: the part of the store that is this attempt's alone; words: on the first rank what each
    rank brought, by rank."""

    number: int
    store: Store
    words: tuple[str, ...] = ()


def gather(store: Store, rank: int, world: int, word: str, limit_s: float, tell: Tell) -> Attempt:
    """The attempt of this rank, one of so many, each of which brings a word to the first one. A rank writes two keys
    and reads one, whatever their number. tell: what the first rank says where others keep it waiting.

    Raises RunFailed on the first rank where some have not come within `limit_s`, with their numbers; that ends the
    others.
    """
    if rank == 0:
        number = store.add("attempts", 1)
        own = _part(store, number)
        return Attempt(number, own, (word, *_call(store, own, number, range(1, world), limit_s, tell)))
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


def _call(store: Store, own: Store, number: int, others: Sequence[int], limit_s: float, tell: Tell) -> list[str]:
    """The words of the others, all of whom have answered."""
    begun_s = told_s = time.monotonic()
    names, heres = ([key(rank) for rank in others] for key in (_name, _here))
    called: set[str] = set()
    pause_s = 0.01
    while others:
        if named := store.check(names):
            there = [name.decode() for name in store.multi_get(names)]
            if new := [name for name in there if name not in called]:
                store.multi_set([_called(name) for name in new], [str(number)] * len(new))  # type: ignore[attr-defined]
                called.update(new)
            if own.check(heres):
                told = [answer.decode().split(" ", 1) for answer in own.multi_get(heres)]
                # Who has answered may have ended since, and another process have its rank.
                if [name for name, _ in told] == there:
                    return [word for _, word in told]
        now_s = time.monotonic()
        if now_s - begun_s > limit_s or now_s - told_s > TELL_S:
            at, keys = (own, heres) if named else (store, names)
            missing = [rank for rank, key in zip(others, keys, strict=True) if not at.check([key])]
            if now_s - begun_s > limit_s:
                raise _too_late(store, own, others, missing, limit_s)
            tell(f"still waiting for {_of_all(missing, others)} after {now_s - begun_s:.0f} s: {_listed(missing)}")
            told_s = now_s
        # A wait with a limit would have torch warn of each that is over.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
    return []


def _too_late(store: Store, own: Store, others: Sequence[int], missing: Sequence[int], limit_s: float) -> RunFailed:
    """Says who has not come, and has those end who have."""
    for rank in others:
        if store.check([_name(rank)]):
            store.set(_called(store.get(_name(rank)).decode()), FAILED)
        own.set(_answer(rank), FAILED)
    time.sleep(TOLD_S)
    return RunFailed(
        f"{_of_all(missing, others)} have not come within {limit_s:g} s (of faults.start_s): {_listed(missing)}; "
        "they have not started, or do not reach the first rank"
    )


def _of_all(missing: Sequence[int], others: Sequence[int]) -> str:
    return f"{len(missing)} of {len(others) + 1} ranks"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" …" if len(ranks) > 16 else "")


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
