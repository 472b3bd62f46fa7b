"""Ranks tell each other where they run, before anything is made: the first one counts them anew or refuses for all.

Each rank writes one key and reads one key of the store, whatever their number.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from trigrid.errors import Refused, RunFailed
from trigrid.grid import grid_of
from trigrid.launch.hosts import read_topology
from trigrid.launch.place import Place
from trigrid.launch.seats import Seat, Seating, arrange, cautions, faults, picture
from trigrid.report.console import Console
from trigrid.spec.job import Faults, Job
from trigrid.train.processes import start_limit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SHARE = 0.9
"""Of the time to start, after which those who are missing are named; the rest is for saying so."""
TOLD_S = 1.0
"""In which all ranks learn that the first one has failed, before the first one ends and the store with it."""
DONE, FAILED = "first is done", "failed"


def take_seats(store: Store, place: Place, seat: Seat, job: Job, console: Console) -> Place:
    """The place of this rank in the grid, which the first one has chosen from the seats of all; it says where they are
    on its `console`.

    Raises Refused on the first rank where the job cannot train there, and RunFailed where some do not come; either ends
    the others.
    """
    return sit(store, place, seat, job.faults.start_s * SHARE, lambda seats: _settle(seats, job, console, place))


def sit(store: Store, place: Place, seat: Seat, limit_s: float, settle: Callable[[list[Seat]], Seating]) -> Place:
    """The place of this rank where the first one seats all by `settle`, which may raise Refused, once they have told
    their seats, within `limit_s`; raises as `take_seats`."""
    store.set(_key("seat", place.rank), json.dumps(asdict(seat)))
    if place.rank == 0:
        try:
            keys, answers = _answers(settle(_all_seats(store, place.world, limit_s)))
            store.multi_set(keys, answers)  # type: ignore[attr-defined]
        except (Refused, RunFailed):
            keys = [_key("place", rank) for rank in range(place.world)]
            store.multi_set(keys, [FAILED] * place.world)  # type: ignore[attr-defined]
            time.sleep(TOLD_S)
            raise
    answer = _ask(store, _key("place", place.rank))
    if (rank := int(answer)) != place.rank:
        os.environ["RANK"] = answer
    return replace(place, rank=rank)


@contextmanager
def first_alone(store: Store | None, place: Place, faults: Faults) -> Iterator[None]:
    """The first rank does the body of the `with` while the others wait, each in its own; where it fails they end, and
    leave it to the first one to say why. store: None for a rank that is alone."""
    if store is None:
        yield
    elif place.rank:
        yield
        with start_limit(place, faults):
            _ask(store, DONE)
    else:
        try:
            yield
        except BaseException:
            store.set(DONE, FAILED)
            time.sleep(TOLD_S)
            raise
        store.set(DONE, "yes")


def _ask(store: Store, key: str) -> str:
    """What the first rank answers; this process ends where that is a failure."""
    answer = store.get(key).decode()
    if answer == FAILED:
        # An end before the first rank's would have the launcher end that one, and its message with it.
        time.sleep(2 * TOLD_S)
        sys.exit(1)
    return answer


def _settle(seats: list[Seat], job: Job, console: Console, place: Place) -> Seating:
    grid = grid_of(job)
    topology = read_topology(job.cluster.topology) if job.cluster.topology else None
    seating = arrange(seats, topology)
    if wrong := faults(seating, grid):
        raise Refused(wrong)
    if len(seating.hosts) > 1:
        console.say(picture(seating, grid, place.launcher))
    for caution in cautions(seating, grid):
        console.warn(str(caution))
    return seating


def _answers(seating: Seating) -> tuple[list[str], list[str]]:
    """The rank of the grid for each rank of the launcher."""
    pairs = [(_key("place", seat.rank), str(rank)) for rank, seat in enumerate(seating.seats)]
    return [key for key, _ in pairs], [rank for _, rank in pairs]


def _all_seats(store: Store, world: int, limit_s: float) -> list[Seat]:
    keys = [_key("seat", rank) for rank in range(world)]
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except (dist.DistError, RuntimeError):
        came = [rank for rank, key in enumerate(keys) if store.check([key])]
        missing = sorted({*range(world)} - {*came})
        named = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        raise RunFailed(
            f"{len(missing)} of {world} ranks have not come within {limit_s:g} s (of faults.start_s): {named}; they "
            "have not started, or do not reach the first rank"
        ) from None
    return [_seat(value) for value in store.multi_get(keys)]


def _seat(text: bytes) -> Seat:
    values = json.loads(text)
    return Seat(**{**values, "switches": tuple(values["switches"])})


def _key(kind: str, rank: int) -> str:
    return f"{kind} {rank}"
