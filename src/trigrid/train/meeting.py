"""Ranks tell each other where they run, before anything is made: the first one counts them anew or refuses for all.

Each rank writes two keys and reads two keys of the store, whatever their number.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from trigrid.errors import Refused
from trigrid.grid import grid_of
from trigrid.launch.hosts import read_topology
from trigrid.launch.place import Place
from trigrid.launch.seats import Seat, Seating, arrange, cautions, faults, picture
from trigrid.report.console import Console
from trigrid.spec.job import Faults, Job
from trigrid.train.attempt import FAILED, TOLD_S, Attempt, answer, answer_to, ask, gather, refuse
from trigrid.train.processes import start_limit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SHARE = 0.9
"""Of the time to start, after which those who are missing are named; the rest is for saying so."""
DONE = "first is done"


@dataclass(frozen=True)
class Met:
    """place: of this rank in the grid; attempt: that it belongs to."""

    place: Place
    attempt: Attempt


def take_seats(store: Store, place: Place, seat: Seat, job: Job, console: Console) -> Met:
    """The place of this rank in the grid, which the first one has chosen from the seats of all; it says where they are
    on its `console`.

    Raises Refused on the first rank where the job cannot train there, and RunFailed where some do not come; either ends
    the others.
    """
    return sit(store, place, seat, job.faults, console, lambda seats: _settle(seats, job, console, place))


def sit(
    store: Store, place: Place, seat: Seat, faults: Faults, console: Console, settle: Callable[[list[Seat]], Seating]
) -> Met:
    """The place of this rank where the first one seats all by `settle`, which may raise Refused, once they have told
    their seats; raises as `take_seats`."""
    seated = json.dumps(asdict(seat))
    attempt = gather(store, place.rank, place.world, seated, faults.start_s * SHARE, console.say)
    if place.rank == 0:
        try:
            seating = settle([_seat(word) for word in attempt.words])
        except Refused:
            refuse(attempt, place.world)
            raise
        # The rank of the grid for each rank of the launcher.
        ranks = {seat.rank: str(rank) for rank, seat in enumerate(seating.seats)}
        answer(attempt, [ranks[rank] for rank in range(place.world)])
    rank = int(answer_to(attempt, place.rank))
    if rank != place.rank:
        os.environ["RANK"] = str(rank)
    return Met(replace(place, rank=rank), attempt)


@contextmanager
def first_alone(store: Store | None, place: Place, faults: Faults) -> Iterator[None]:
    """The first rank does the body of the `with` while the others wait, each in its own; where it fails they end, and
    leave it to the first one to say why. store: None for a rank that is alone."""
    if store is None:
        yield
    elif place.rank:
        yield
        with start_limit(place, faults):
            ask(store, DONE)
    else:
        try:
            yield
        except BaseException:
            store.set(DONE, FAILED)
            time.sleep(TOLD_S)
            raise
        store.set(DONE, "yes")


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


def _seat(text: str) -> Seat:
    values = json.loads(text)
    return Seat(**{**values, "switches": tuple(values["switches"])})
