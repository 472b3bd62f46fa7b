"""The figures of a run: what is known at its start, each recorded step, its end."""

from __future__ import annotations

from dataclasses import dataclass

from trigrid.report.console import duration


@dataclass(frozen=True)
class Facts:
    """What is known before the first step. flops_per_token: model FLOPs of forward and backward, once with the whole
    matrix of attention scores (PaLM, appendix B), once with the half that a causal mask leaves. matmul_flops_per_s:
    measured on all ranks together, what MFU is a share of."""

    trigrid: str
    world: int
    device: str
    precision: str
    parameters: int
    steps: int
    tokens_per_step: int
    flops_per_token_full: float
    flops_per_token_causal: float
    matmul_flops_per_s: float
    data: str


@dataclass(frozen=True)
class Slowest:
    """The rank that is busy longest compared with the median of its pipeline stage: seconds in which a rank waits
    neither for data nor for other ranks."""

    rank: int
    busy_s: float
    usual_s: float


@dataclass(frozen=True)
class Interval:
    """Steps since the last record: how many; their seconds and those spent waiting for data, of the slowest rank; the
    largest peak of memory of any rank so far; who is slowest, where that is known."""

    steps: int
    seconds: float
    data_wait_s: float
    peak_memory_bytes: int
    slowest: Slowest | None = None


@dataclass(frozen=True)
class Rates:
    """Of the whole job, of one rank, and as shares of the matmul rate, with the conventions of `Facts`."""

    tokens_per_s: float
    tokens_per_s_per_rank: float
    flops_per_s_per_rank_full: float
    flops_per_s_per_rank_causal: float
    mfu_full: float
    mfu_causal: float


@dataclass(frozen=True)
class StepRecord(Rates):
    """One line of metrics.jsonl. step_s, data_wait_s: means over the steps since the last record; loss, norm and rate
    are of this step; tokens: from the first step to this one; slowest, usual: as in `Slowest`."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    step_s: float
    data_wait_s: float
    data_wait_share: float
    peak_memory_bytes: int
    eta_s: float
    slowest_rank: int | None = None
    slowest_busy_s: float | None = None
    usual_busy_s: float | None = None


@dataclass(frozen=True)
class Summary(Rates):
    """The end of a run. Losses are means over tokens; validation_loss is the last one measured; seconds: from the first
    step to the end of the last; rates are those of the median step."""

    first_loss: float
    last_loss: float
    validation_loss: float | None
    steps: int
    tokens: int
    seconds: float
    data_wait_share: float
    run_dir: str


def rates(facts: Facts, step_s: float) -> dict[str, float]:
    """The fields of `Rates` where a step takes `step_s`."""
    tokens_per_s = facts.tokens_per_step / step_s
    full, causal = tokens_per_s * facts.flops_per_token_full, tokens_per_s * facts.flops_per_token_causal
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_rank": tokens_per_s / facts.world,
        "flops_per_s_per_rank_full": full / facts.world,
        "flops_per_s_per_rank_causal": causal / facts.world,
        "mfu_full": full / facts.matmul_flops_per_s,
        "mfu_causal": causal / facts.matmul_flops_per_s,
    }


def describe(summary: Summary) -> str:
    """The end of a run in words."""
    validation = "" if summary.validation_loss is None else f", validation loss {summary.validation_loss:.4f}"
    return (
        f"{summary.steps} steps, {summary.tokens:,} tokens in {duration(summary.seconds)}\n"
        f"median step: {summary.tokens_per_s:,.0f} tok/s, {summary.tokens_per_s_per_rank:,.0f} per rank; "
        f"MFU {summary.mfu_full:.1%} with full attention, {summary.mfu_causal:.1%} causal; "
        f"data wait {summary.data_wait_share:.1%}\n"
        f"training loss {summary.first_loss:.4f} → {summary.last_loss:.4f}{validation}\n"
        f"job, metrics, loss curve and logs: {summary.run_dir}"
    )


class StepTable:
    """Recorded steps as lines under each other, of the same width for all of a run."""

    def __init__(self, steps: int) -> None:
        self._steps, self._width = steps, max(4, 2 * len(str(steps)) + 1)

    @property
    def header(self) -> str:
        # "/rank" belongs to what stands before it.
        return (
            f"{'step':>{self._width}}      loss     norm        lr       tok/s    /rank  TFLOP/s/rank     MFU  causal"
            "  peak GiB  wait     ETA"
        )

    def row(self, record: StepRecord) -> str:
        step = f"{record.step}/{self._steps}"
        return (
            f"{step:>{self._width}}  {record.loss:>8.4f}  {record.gradient_norm:>7.3f}  {record.learning_rate:>8.2e}"
            f"  {record.tokens_per_s:>10,.0f}  {record.tokens_per_s_per_rank:>7,.0f}"
            f"  {record.flops_per_s_per_rank_full / 1e12:>12.3f}  {record.mfu_full:>6.1%}  {record.mfu_causal:>6.1%}"
            f"  {record.peak_memory_bytes / 2**30:>8.2f}  {record.data_wait_share:>4.0%}  {duration(record.eta_s):>6}"
        )

    def validation(self, step: int, loss: float) -> str:
        place = f"{step}/{self._steps}"
        return f"{place:>{self._width}}  {loss:>8.4f}  validation loss"
