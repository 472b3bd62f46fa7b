"""What would make a job fit that does not, and which global batch would use the GPUs better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2

from trigrid.errors import Refused
from trigrid.plan.found import Candidate, Found
from trigrid.plan.front import fastest
from trigrid.plan.layouts import job_of
from trigrid.plan.plan import setup_of
from trigrid.plan.search import Searcher
from trigrid.plan.setup import Setup
from trigrid.plan.space import KNOBS, Space
from trigrid.spec.gpu import GIB, gpus
from trigrid.spec.rules import check

DEGREES = ("tp", "cp", "pp")
MORE_GPUS = ((5, 4), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (16, 1), (32, 1), (64, 1))
"""Times as many as asked, as fractions, that are tried in turn to make a job fit."""
FEW_REPLAYS = 5
MOST_DEGREES = 8
"""Near those found, for which another global batch is tried."""


@dataclass(frozen=True)
class Change:
    """A single change that makes a job fit; setup: in the layout that is then the fastest. gpus: where there are more
    of them; gpu: where it is another accelerator."""

    what: str
    step_s: float
    bytes: float
    setup: Setup
    gpus: int | None = None
    gpu: str | None = None


def changes_that_fit(found: Found) -> tuple[Change, ...]:
    """Single changes after which the job of `found`, which does not fit, does: those of the layout first, then more
    GPUs, another accelerator, shorter sequences."""
    space, software = found.space, found.software
    changes = []
    for knob in KNOBS:
        if knob in space.open or knob in ("dp", "gather", "reduce"):
            continue
        opened = {knob, "dp"} if knob in DEGREES else {knob}
        best = fastest(replace(space, open=space.open | opened), software)
        if best:
            name = {"virtual_stages": "virtual"}.get(knob, knob)
            before, after = getattr(setup_of(space.job, software), name), getattr(best.setup, name)
            changes.append(Change(f"{knob} {before} → {after}", best.step_s, best.bytes, best.setup))
    changes.sort(key=lambda change: change.step_s)
    node = space.job.cluster.gpus_per_node
    for times in MORE_GPUS:
        gpus, rest = divmod(space.gpus * times[0], times[1])
        if rest or (gpus > node and gpus % node):
            continue
        best = fastest(replace(space, gpus=gpus, open=space.open | {"dp"}), software)
        if best:
            changes.append(Change(f"{gpus:,} GPUs", best.step_s, best.bytes, best.setup, gpus=gpus))
            break
    return (*changes, *_elsewhere(found))


def _elsewhere(found: Found) -> Iterator[Change]:
    space, software = found.space, found.software
    wider = sorted((gpu for gpu in gpus().values() if gpu.hbm_bytes > found.chosen.bytes), key=lambda g: g.hbm_bytes)
    for gpu in wider:
        job = replace(space.job, cluster=replace(space.job.cluster, gpu=gpu.name, calibration=""))
        try:
            best = fastest(replace(space, job=job), software)
        except Refused:
            # It does not multiply the job's number format.
            continue
        if best:
            what = f"{gpu.name} of {gpu.hbm_bytes / GIB:.0f} GiB"
            yield Change(what, best.step_s, best.bytes, best.setup, gpu=gpu.name)
            return


def nearest_batch(found: Found) -> tuple[int, Candidate] | None:
    """A global batch near the one asked with which all GPUs are used and a token costs less time, and the best layout
    then, in degrees near those found; None where there is none, or where no GPU is spare."""
    space, chosen = found.space, found.chosen
    if not found.spare_gpus or "dp" not in space.open:
        return None
    asked = space.job.batch.global_batch
    best: tuple[float, int, Candidate] | None = None
    for tp, pp in _whole_degrees(space, chosen.setup):
        dp = space.gpus // (tp * pp * chosen.setup.cp)
        below = asked // dp * dp
        size = below if below and asked - below <= below + dp - asked else below + dp
        layout = replace(space.job.parallel, tp=tp, cp=chosen.setup.cp, pp=pp, dp=dp)
        job = replace(space.job, parallel=layout, batch=replace(space.job.batch, global_batch=size))
        opened = space.open - {"tp", "cp", "pp", "dp"}
        narrow = Space(job, opened, space.gpus, setup_of(job, found.software), space.selective)
        first = next(narrow.setups(), None)
        if first is None or check(job_of(job, first)):
            continue
        candidate = next(iter(Searcher(narrow, found.software).run(FEW_REPLAYS, slack=1.0).ranked), None)
        if candidate and (best is None or candidate.step_s / size < best[0]):
            best = (candidate.step_s / size, size, candidate)
    if best is None or best[0] >= chosen.step_s / asked:
        return None
    return best[1], best[2]


def _whole_degrees(space: Space, near: Setup) -> list[tuple[int, int]]:
    """(tp, pp) that use every GPU, those nearest to `near` first."""
    tensor = space.tensor() if "tp" in space.open else [near.tp]
    deepest = min(space.job.model.layers, space.gpus)
    pipeline = [pp for pp in range(1, deepest + 1) if space.pipings(pp)] if "pp" in space.open else [near.pp]
    whole = [(tp, pp) for tp in tensor for pp in pipeline if space.gpus % (tp * pp * near.cp) == 0]
    return sorted(whole, key=lambda two: abs(log2(two[0] / near.tp)) + abs(log2(two[1] / near.pp)))[:MOST_DEGREES]
