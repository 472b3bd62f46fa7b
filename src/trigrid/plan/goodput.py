"""How often to save a checkpoint, and how much of the time a job is productive."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

# Llama 3 (Grattafiori 2024, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs.
MTBF_GPU_S = 54 * 86400 * 16384 / 419
STALL_S, WRITE_S, RESTART_S = 2.0, 60.0, 600.0
"""Of a save and of a restart where nothing else is known."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """interval_s between checkpoints; productive_share: of the time, steps that count."""

    gpus: int
    mtbf_job_s: float
    interval_s: float
    stall_share: float
    lost_share: float
    restart_share: float

    @property
    def productive_share(self) -> float:
        return max(0.0, 1.0 - self.stall_share - self.lost_share - self.restart_share)


def goodput(
    gpus: int,
    *,
    stall_s: float = STALL_S,
    write_s: float = WRITE_S,
    restart_s: float = RESTART_S,
    mtbf_gpu_s: float = MTBF_GPU_S,
) -> Goodput:
    """The checkpoint interval max(write, √(2 · stall · MTBF of the job)) (Young 1974) and what it costs.

    stall_s: what an asynchronous save stops training for; write_s: until it is safe, before the next may begin;
    restart_s: from a failure to the first step again. A failure loses half an interval on average, and what was
    written but not yet safe.
    """
    mtbf = mtbf_gpu_s / gpus
    interval = max(write_s, sqrt(2 * stall_s * mtbf))
    return Goodput(
        gpus=gpus,
        mtbf_job_s=mtbf,
        interval_s=interval,
        stall_share=min(1.0, stall_s / (interval + stall_s)),
        lost_share=min(1.0, (interval / 2 + write_s) / mtbf),
        restart_share=min(1.0, restart_s / mtbf),
    )
