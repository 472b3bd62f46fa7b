"""A run that is killed again and again, at moments drawn by chance, and resumed until it is through."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from helpers.runs import metrics, ranks_of, start
from trigrid.report.events import read_events

LOOK_S = 0.02
LONGEST_S = 300.0


@dataclass(frozen=True)
class Kill:
    """what: "rank N" or "tree"; within: what the run was at, "start", "step" or "checkpoint"; step: the last recorded;
    lost: steps after the newest checkpoint; gone_s: from the kill to the end of all processes."""

    what: str
    within: str
    step: int
    lost: int
    gone_s: float


def killed_until_done(job: Path, flags: tuple[object, ...], out: Path, kills: int, seed: int) -> Iterator[Kill]:
    """Run `job` in `out`, kill and resume it `kills` times, and let it come to its end; yields each kill."""
    draw = random.Random(seed)
    for number in range(kills + 1):
        process = start("train", job, *flags, "--run.out", out, "--resume", "latest", "--quiet")
        try:
            if number < kills:
                yield _kill(job, out, process.pid, draw)
            _, err = process.communicate(timeout=LONGEST_S)
            assert number < kills or process.returncode == 0, err
        finally:
            process.kill()
            for pid in ranks_of(job).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _kill(job: Path, out: Path, launcher: int, draw: random.Random) -> Kill:
    within = draw.choice(["start", "step", "checkpoint"])
    _wait_until(within, job, out, launcher, draw)
    ranks, begun_s = ranks_of(job), time.monotonic()
    if ranks and draw.random() < 0.5:
        rank = draw.choice(sorted(ranks))
        what, victims = f"rank {rank}", [ranks[rank]]
    else:
        what, victims = "tree", [launcher, *ranks.values()]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while _alive(launcher) or ranks_of(job):
        assert time.monotonic() < begun_s + LONGEST_S, "processes outlive the kill"
        time.sleep(LOOK_S)
    gone_s = time.monotonic() - begun_s
    step = max(steps_of(out, "step"), default=0)
    saved = max((int(path.name.removeprefix("step-")) for path in out.glob("*/checkpoints/step-*")), default=0)
    return Kill(what, within, step, max(0, step - saved), gone_s)


def _wait_until(within: str, job: Path, out: Path, launcher: int, draw: random.Random) -> None:
    """Until the run is at what it is to be killed in, or has come to its end before that."""
    steps, checkpoints = len(steps_of(out, "step")), len(steps_of(out, "checkpoint_begin"))
    more = draw.randint(1, 3)
    reached = {
        "start": lambda: ranks_of(job),
        "step": lambda: len(steps_of(out, "step")) >= steps + more,
        "checkpoint": lambda: len(steps_of(out, "checkpoint_begin")) > checkpoints,
    }[within]
    deadline = time.monotonic() + LONGEST_S
    while not reached() and _alive(launcher):
        assert time.monotonic() < deadline, f"the run never came to a {within}"
        time.sleep(LOOK_S)
    time.sleep(draw.uniform(0, {"start": 4.0, "step": 0.3, "checkpoint": 0.05}[within]))


def _alive(pid: int) -> bool:
    """Whether the process runs: one that has ended, and that nobody has waited for yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_of(out: Path, kind: str) -> list[int]:
    """Of all records of steps, or events of another kind, in all runs of `out`."""
    return [
        entry["step"]
        for folder in (out.iterdir() if out.is_dir() else ())
        for entry in (metrics(folder, kind) if kind == "step" else read_events(folder))
        if entry["kind"] == kind
    ]


def ended_run(out: Path) -> Path:
    """The only run of `out` that came to its end."""
    (folder,) = (path for path in out.iterdir() if any(event["kind"] == "end" for event in read_events(path)))
    return folder
