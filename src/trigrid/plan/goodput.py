"""How often to save a checkpoint, and how much of the time a job is productive: closed forms (docs/goodput.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, expm1, log, sqrt

# Llama 3 (Grattafiori 2024, section 3.3.4 and table 5): 466 interruptions in 54 days on 16,384 GPUs, 47 of them planned
# and 419 not, with more than 90 % of the time effective.
LLAMA3_GPUS, LLAMA3_DAYS, LLAMA3_UNEXPECTED, LLAMA3_PLANNED, LLAMA3_SHARE = 16_384, 54, 419, 47, 0.9
MTBF_GPU_S = LLAMA3_DAYS * 86400 * LLAMA3_GPUS / LLAMA3_UNEXPECTED
STALL_S, WRITE_S, RESTART_S = 2.0, 60.0, 600.0
"""Of a save and of a restart where nothing else is known; the restart with its detection."""
DETECT_S = 60.0
"""From a failure until it is known, where nothing else is: part of RESTART_S."""
CAUSES = ("productive", "checkpoint", "lost work", "detection", "restart")
"""Where the time of a long run goes, without remainder."""


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """How a long run fails and recovers, in seconds.

    mtbf_s: mean time between failures of the whole job; interval_s: training between the snapshots of two checkpoints,
    at least write_s; stall_s: what a snapshot stops training for; write_s: from then until it is safe, beside training
    (0 where training waits for all of it, which is then in stall_s); detect_s: from a failure until it is known;
    restart_s: from then to training again, in which the job may fail again, and is then detected and restarted anew.
    """

    mtbf_s: float
    interval_s: float
    stall_s: float = STALL_S
    write_s: float = WRITE_S
    detect_s: float = DETECT_S
    restart_s: float = RESTART_S - DETECT_S

    def __post_init__(self) -> None:
        assert min(self.mtbf_s, self.interval_s) > 0
        assert min(self.stall_s, self.write_s, self.detect_s, self.restart_s) >= 0
        assert self.interval_s >= self.write_s

    @property
    def period_s(self) -> float:
        """From snapshot to snapshot."""
        return self.interval_s + self.stall_s


def expected(run: LongRun) -> Mapping[str, float]:
    """Shares of the wall time by cause, in the order of CAUSES; their sum is 1.

    Exact where times between failures are exponential: means over one cycle, from training through a failure to
    training again. With M between failures, work τ, stall δ, write w, detection D and restart R, a cycle takes
    (M + D)·e^(R/M) and keeps τ·e^(−w/M) / (e^((τ+δ)/M) − 1) of work. With w = D = 0 that is the complete cost function
    of Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps).
    """
    m, begun = run.mtbf_s, exp(-run.restart_s / run.mtbf_s)
    kept = run.interval_s * exp(-(run.write_s + run.period_s) / m) / -expm1(-run.period_s / m)
    stalled = m * exp(-run.interval_s / m) * -expm1(-run.stall_s / m) / -expm1(-run.period_s / m)
    # A cycle has 1 / begun restarts, one of which succeeds; all that follows is for one restart.
    seconds = (
        kept * begun,
        stalled * begun,
        max(0.0, m - kept - stalled) * begun,
        run.detect_s,
        m * -expm1(-run.restart_s / m),
    )
    return {cause: value / (m + run.detect_s) for cause, value in zip(CAUSES, seconds, strict=True)}


def best_interval_s(mtbf_s: float, stall_s: float, write_s: float = 0.0) -> float:
    """Seconds of training between two snapshots that keep most work, at least write_s.

    √(2δM) · (1 + √(δ/2M)/3 + (δ/2M)/9) − δ, or M where δ ≥ 2M: the higher-order estimate of Daly 2006, whose first
    term is Young 1974 (A first order approximation to the optimum checkpoint interval). Detection, restart and the
    time to write do not move the optimum as long as one checkpoint is safe before the next begins.
    """
    ratio = stall_s / (2 * mtbf_s)
    if ratio >= 1:
        return max(write_s, mtbf_s)
    return max(write_s, sqrt(2 * stall_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s)


def longest_restart_s(run: LongRun, share: float) -> float:
    """The restart time at which `share` of the time is productive, all else as in `run`: `expected`, solved for R.

    Below 0 where not even a restart without delay would do.
    """
    m = run.mtbf_s
    kept = log(run.interval_s) - (run.write_s + run.period_s) / m - log(-expm1(-run.period_s / m))
    return m * (kept - log(share * (m + run.detect_s)))


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What a job of so many GPUs has to expect: interval_s between checkpoints, and shares of the time."""

    gpus: int
    mtbf_job_s: float
    interval_s: float
    stall_share: float
    lost_share: float
    restart_share: float

    @property
    def productive_share(self) -> float:
        return 1.0 - self.stall_share - self.lost_share - self.restart_share


def goodput(gpus: int) -> Goodput:
    """With the best interval, and what is presumed where nothing is known of checkpoints and restarts; failures as many
    for each GPU as Llama 3 had."""
    mtbf = MTBF_GPU_S / gpus
    run = LongRun(mtbf_s=mtbf, interval_s=best_interval_s(mtbf, STALL_S, WRITE_S))
    shares = expected(run)
    return Goodput(
        gpus=gpus,
        mtbf_job_s=mtbf,
        interval_s=run.interval_s,
        stall_share=shares["checkpoint"],
        lost_share=shares["lost work"],
        restart_share=shares["detection"] + shares["restart"],
    )
