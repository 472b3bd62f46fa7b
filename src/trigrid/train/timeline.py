"""The real timeline of a step, written as `trigrid simulate` writes a planned one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from trigrid.engine.recorder import Held, Recorder, Span
from trigrid.engine.runtime import Engine
from trigrid.report import trace
from trigrid.report.host import resident_bytes

# Of a larger world one pipeline stands for all: the ranks that are first along data and tensor parallelism.
LARGEST_WORLD = 64
NAME = "trace.json"


def start_recording(engine: Engine) -> None:
    """Record the step that follows. Every rank must call this."""
    device = engine.device
    held = partial(torch.cuda.memory_allocated, device) if device.type == "cuda" else resident_bytes
    recorder = Recorder(device, held if held() else None)
    # The all-reduce ends at the same moment everywhere, but for the network's latency.
    engine.comm.all_reduce(torch.zeros(1, device=device), "world")
    recorder.start()
    engine.comm.recorder = recorder


def write_recording(engine: Engine, run_dir: Path, step: int) -> Path | None:
    """The file with all ranks' timelines of step number `step`, on rank 0. Every rank must call this."""
    comm, layout = engine.comm, engine.job.parallel
    recorder, comm.recorder = comm.recorder, None
    assert recorder is not None
    at = comm.coord
    speaks = layout.world <= LARGEST_WORLD or (at.dp, at.cp, at.tp) == (0, 0, 0)
    mine = (comm.rank, tuple(at), recorder.spans(), recorder.held()) if speaks else None
    gathered: list[tuple[int, tuple[int, ...], list[Span], list[Held]]] = [
        part for part in comm.gather_objects(mine) if part is not None  # type: ignore[misc]
    ]
    if comm.rank:
        return None
    spans = [
        trace.TraceSpan(rank, stream, *span[1:])
        for rank, _, recorded, _ in gathered
        for stream, span in _in_lanes(recorded)
    ]
    memory = [trace.Held(rank, *held) for rank, _, _, recorded in gathered for held in recorded]
    names = {rank: f"rank {rank}: dp {dp}, pp {pp}, tp {tp}" for rank, (dp, pp, _, tp), _, _ in gathered}
    job = engine.job
    facts = {
        "model": job.model.name,
        "schedule": layout.schedule_file or layout.schedule,
        "microbatches": job.batch.microbatches(layout),
        "step": step,
        "memory": "allocated by torch" if engine.device.type == "cuda" else "resident in the process",
    }
    path = run_dir / NAME
    trace.write_trace(trace.Trace(spans, memory, names, facts), path)
    return path


def _in_lanes(spans: Iterable[Span]) -> list[tuple[str, Span]]:
    """Each span with its stream, where those that overlap have a lane of their own each."""
    ends: dict[str, list[float]] = defaultdict(list)
    placed = []
    for span in sorted(spans, key=lambda s: (s.start_s, -s.stop_s)):
        lanes = ends[span.stream]
        free = next((lane for lane, end in enumerate(lanes) if end <= span.start_s), len(lanes))
        lanes[free : free + 1] = [span.stop_s]
        placed.append((span.stream if free == 0 else f"{span.stream} ({free + 1})", span))
    return placed
