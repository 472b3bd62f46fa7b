"""What goes with what in a job: each rule gives the reason and the nearest legal values.

`check` refuses what cannot run anywhere, `check_trainable` what only the planner knows; `warnings` names what runs
badly. Rules about the network that a group crosses need the grid and live there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from math import isfinite, isqrt
from typing import Any

from trigrid.errors import Problem
from trigrid.spec.batch import solve_batch
from trigrid.spec.job import Job
from trigrid.spec.layout import AXES, V_SHAPED, Layout, zero_policy
from trigrid.spec.run_rules import compile_problems, run_problems

# Above every real count, and small enough that looking for the nearest divisors takes no time.
LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1
LARGEST_PORT = 2**16 - 1
FROM_ZERO = {
    "model.experts.shared_ffn",
    "model.experts.dense_layers",
    "model.latent.q_rank",
    "parallel.zero",
    "parallel.prefetch",
    "parallel.bucket_numel",
    "parallel.stage_layers",
    "optimizer.warmup_steps",
    "data.workers",
    "run.seed",
    "run.validate_every",
    "run.trace_step",
    "checkpoint.every",
    "checkpoint.keep_every",
    "faults.max_rewinds",
}
MAY_BE_EMPTY = {"data.cache", "parallel.schedule_file", "cluster.calibration", "cluster.topology"}
HIGHEST = {"run.seed": LARGEST_SEED, "run.prometheus_port": LARGEST_PORT}


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; `ends` is written as in mathematics: "[)" has `low` and not `high`."""

    low: float
    high: float
    ends: str

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.ends[0] == "[" else value > self.low
        below = value <= self.high if self.ends[1] == "]" else value < self.high
        return above and below and isfinite(value)

    def __str__(self) -> str:
        return f"{self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"

    def nearest(self, value: float) -> tuple[float, ...]:
        """The end that `value` lies beyond, where that end is legal itself."""
        if value <= self.low:
            return (self.low,) if self.ends[0] == "[" else ()
        return (self.high,) if self.ends[1] == "]" and value > self.high else ()


POSITIVE = Range(0.0, float("inf"), "()")
NOT_NEGATIVE = Range(0.0, float("inf"), "[)")
RANGES = {
    "model.norm_eps": POSITIVE,
    "model.rope_theta": POSITIVE,
    "model.rope_scaling.factor": Range(1.0, float("inf"), "[)"),
    "model.rope_scaling.low_freq_factor": POSITIVE,
    "model.rope_scaling.high_freq_factor": POSITIVE,
    "cluster.nic_gbit": NOT_NEGATIVE,
    "cluster.nvlink_gb_s": NOT_NEGATIVE,
    "cluster.oversubscription": Range(1.0, float("inf"), "[)"),
    "cluster.power_w": NOT_NEGATIVE,
    "cluster.pue": Range(1.0, 3.0, "[]"),
    "cluster.price": NOT_NEGATIVE,
    "optimizer.lr": POSITIVE,
    "optimizer.decay_share": Range(0.0, 1.0, "(]"),
    "optimizer.min_lr_ratio": Range(0.0, 1.0, "[]"),
    "optimizer.beta1": Range(0.0, 1.0, "[)"),
    "optimizer.beta2": Range(0.0, 1.0, "[)"),
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip_norm": NOT_NEGATIVE,
    "run.dropout": Range(0.0, 1.0, "[)"),
    "run.attention_dropout": Range(0.0, 1.0, "[)"),
    "data.weights": POSITIVE,
    "faults.spike_sigmas": POSITIVE,
    "faults.start_s": POSITIVE,
    "faults.first_step_s": POSITIVE,
    "faults.step_s": POSITIVE,
    "faults.checkpoint_s": POSITIVE,
    "faults.grace_s": POSITIVE,
    "data.validation_fraction": Range(0.0, 0.5, "[]"),
}


def check(job: Job) -> list[Problem]:
    """Every reason why `job` cannot run; rules that compare fields wait until each field is sound by itself."""
    return check_singly(job) or check_together(job)


def check_singly(job: Job) -> list[Problem]:
    """Every reason why a field of `job` cannot have its value, whatever the others are."""
    return [p for key, value in _leaves(job) for p in check_value(key, value)]


def check_together(job: Job) -> list[Problem]:
    """Every reason why fields of `job`, each sound by itself, do not go with each other."""
    return check_layout(job) + run_problems(job)


def check_layout(job: Job) -> list[Problem]:
    """The same of model, batch and layout alone."""
    rules = (_model, _experts, _tensor, _pipeline, _schedule, compile_problems, _data_parallel, _batch)
    return [p for rule in rules for p in rule(job)]


def check_value(key: str, value: object) -> list[Problem]:
    """Every reason why no job can have `value`, of the right type, under the dotted `key`."""
    return list(_value(key, value))


def whole_range(key: str) -> tuple[int, int]:
    """The smallest and the largest whole number that may stand, by itself or in an array, under the dotted `key`."""
    return int(key not in FROM_ZERO), HIGHEST.get(key, LARGEST_COUNT)


def check_trainable(job: Job) -> list[Problem]:
    """Every reason why `job`, though it can be planned, cannot be trained yet."""
    return list(_untrainable(job))


def warnings(job: Job) -> list[Problem]:
    """What a sound `job` will pay for needlessly."""
    found = []
    layout, batch = job.parallel, job.batch
    micro = batch.microbatches(layout)
    if micro < layout.pp:
        idle = layout.pp - 1
        found.append(
            Problem(
                "batch.global_batch",
                batch.global_batch,
                f"{micro} microbatches do not fill {layout.pp} pipeline stages: "
                f"bubble ratio (p - 1) / m = {idle} / {micro} = {idle / micro:.2f}",
                (layout.dp * batch.micro_batch * layout.pp,),
            )
        )
    policy = zero_policy(layout)
    if policy.gather_per_use and layout.pp > 1 and layout.dp_shard > 1 and micro > 1:
        reductions = micro if policy.reduce_per_microbatch else 1
        formula = "3·m·Ψ" if policy.reduce_per_microbatch else "(2·m + 1)·Ψ"
        found.append(
            Problem(
                "parallel.gather" if layout.gather == "per_use" else "parallel.zero",
                layout.gather if layout.gather == "per_use" else layout.zero,
                f"weights are gathered twice for each of m = {micro} microbatches: data-parallel traffic per step is "
                f"{formula} = {2 * micro + reductions}·Ψ, where ZeRO-1 moves 2·Ψ (Ψ: the stage's parameters)",
                ("per_step",) if layout.gather == "per_use" else (1, 2),
            )
        )
    return found


def _leaves(table: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted key and the value of every field that is not itself a table."""
    assert is_dataclass(table)
    for field in fields(table):
        value = getattr(table, field.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _value(key: str, value: object) -> Iterator[Problem]:
    match value:
        case bool() | None:
            return
        case int() | float() if key in RANGES:
            if value not in RANGES[key]:
                yield Problem(key, value, f"must be in {RANGES[key]}", RANGES[key].nearest(value))
        case int():
            low, high = whole_range(key)
            if not low <= value <= high:
                yield Problem(key, value, f"must be from {low} to {high}", (min(max(value, low), high),))
        case str():
            if not value and key not in MAY_BE_EMPTY:
                yield Problem(key, '""', "must not be empty")
        case tuple():
            yield from _array(key, value)


def _array(key: str, values: tuple[Any, ...]) -> Iterator[Problem]:
    low, high = whole_range(key)
    match key:
        case "data.corpus" if not (values and all(values)):
            yield Problem(key, list(values), "must name at least one corpus, none of them empty", ('["stdlib"]',))
        case "data.weights" if any(weight not in RANGES[key] for weight in values):
            yield Problem(key, list(values), f"each must be in {RANGES[key]}")
        case "run.trackers" if len(once := list(dict.fromkeys(values))) < len(values):
            yield Problem(key, list(values), "names a tracker more than once", (once,))
        case "parallel.stage_layers" if any(not low <= layers <= high for layers in values):
            yield Problem(key, list(values), f"each must be from {low} to {high}")


def _model(job: Job) -> Iterator[Problem]:
    model = job.model
    if model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            model.kv_heads,
            f"must divide model.heads = {model.heads}",
            _around(model.kv_heads, divisors(model.heads)),
        )
    if model.block == "gpt" and model.kv_heads != model.heads:
        yield Problem("model.kv_heads", model.kv_heads, 'block "gpt" has as many KV heads as heads', (model.heads,))
    if model.block == "llama" and model.head_dim % 2:
        yield Problem(
            "model.head_dim",
            model.head_dim,
            "must be even: rotary positions turn pairs of elements",
            tuple(n for n in (model.head_dim - 1, model.head_dim + 1) if n),
        )
    scaling = model.rope_scaling
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield Problem(
            "model.rope_scaling.low_freq_factor",
            scaling.low_freq_factor,
            f"must be below model.rope_scaling.high_freq_factor = {scaling.high_freq_factor}",
        )
    if job.batch.sequence > model.context:
        yield Problem(
            "batch.sequence", job.batch.sequence, f"exceeds model.context = {model.context}", (model.context,)
        )


def _experts(job: Job) -> Iterator[Problem]:
    model, layout = job.model, job.parallel
    experts, latent = model.experts, model.latent
    if experts and model.block != "llama":
        yield Problem("model.block", model.block, "a mixture of experts goes with the other block", ("llama",))
    if experts and experts.top_k > experts.count:
        reason = f"exceeds model.experts.count = {experts.count}"
        yield Problem("model.experts.top_k", experts.top_k, reason, (experts.count,))
    if experts and experts.dense_layers > model.layers:
        reason = f"exceeds model.layers = {model.layers}"
        yield Problem("model.experts.dense_layers", experts.dense_layers, reason, (model.layers,))
    if latent and latent.nope_dim + latent.rope_dim != model.head_dim:
        total = latent.nope_dim + latent.rope_dim
        yield Problem("model.head_dim", model.head_dim, f"latent attention has nope_dim + rope_dim = {total}", (total,))
    if layout.ep == 1:
        return
    if not experts:
        yield Problem("parallel.ep", layout.ep, "the model has no experts", (1,))
        return
    ranks, rows = layout.dp * layout.cp, experts.count
    if ranks % layout.ep or rows % layout.ep:
        legal = _around(layout.ep, [n for n in divisors(rows) if ranks % n == 0])
        reason = f"must divide dp · cp = {ranks} and model.experts.count = {rows}"
        yield Problem("parallel.ep", layout.ep, reason, legal)


def _tensor(job: Job) -> Iterator[Problem]:
    model, layout, sequence = job.model, job.parallel, job.batch.sequence
    if broken := _undivided(job, layout.tp):
        legal = [tp for tp in divisors(model.heads) if not _undivided(job, tp)]
        yield Problem("parallel.tp", layout.tp, "; ".join(broken), _around(layout.tp, legal))
    if layout.regather and not layout.sequence_parallel:
        reason = "needs parallel.sequence_parallel: without it nothing is gathered"
        yield Problem("parallel.regather", "true", reason, ("false",))
    if sequence % layout.loss_chunks:
        reason = f"must divide batch.sequence = {sequence}"
        nearest = _around(layout.loss_chunks, divisors(sequence))
        yield Problem("parallel.loss_chunks", layout.loss_chunks, reason, nearest)


def _undivided(job: Job, tp: int) -> list[str]:
    """What `tp` ranks cannot share evenly, as what is asked of tp."""
    model, sequence, found = job.model, job.batch.sequence, list[str]()
    if model.heads % tp:
        found.append(f"must divide model.heads = {model.heads}")
    if model.ffn % tp:
        found.append(f"must divide model.ffn = {model.ffn}")
    if model.kv_heads % tp and tp % model.kv_heads:
        found.append(f"must divide model.kv_heads = {model.kv_heads} or be a multiple of it")
    if job.parallel.sequence_parallel and sequence % tp:
        found.append(f"must divide batch.sequence = {sequence} under parallel.sequence_parallel")
    return found


def _pipeline(job: Job) -> Iterator[Problem]:
    layout, pp, layers = job.parallel, job.parallel.stages, job.model.layers
    given = layout.stage_layers
    if layout.virtual_stages > 1 and pp > layers:
        reason = f"more stages than layers: {layout.pp} ranks of them are {pp}, model.layers = {layers}"
        yield Problem("parallel.virtual_stages", layout.virtual_stages, reason, (max(1, layers // layout.pp),))
    elif pp > layers + 2:
        yield Problem(
            "parallel.pp",
            pp,
            f"more stages than units: {layers} layers, the embedding and the head fill {layers + 2}",
            (layers + 2,),
        )
    modes = layout.recompute
    if not isinstance(modes, str) and len(modes) != pp:
        last = modes[-1] if modes else "none"
        fitting = [*modes[:pp], *[last] * (min(pp, layers + 2) - len(modes))]
        reason = f"names {len(modes)} stages, {_stages_of(layout)}"
        yield Problem("parallel.recompute", list(modes), reason, (fitting, last))
    even = ("[] (as even as possible)",)
    if given and len(given) != pp:
        yield Problem("parallel.stage_layers", list(given), f"names {len(given)} stages, {_stages_of(layout)}", even)
    if given and sum(given) != layers:
        total = " + ".join(map(str, given))
        yield Problem(
            "parallel.stage_layers", list(given), f"{total} = {sum(given)} layers, model.layers = {layers}", even
        )
    # The first and the last stage always hold the embedding and the head, so only those between can be empty.
    empty = [stage for stage, held in enumerate(given) if not held and 0 < stage < len(given) - 1]
    if empty:
        yield Problem(
            "parallel.stage_layers",
            list(given),
            f"stage {', '.join(map(str, empty))} "
            "would hold nothing: only the first has the embedding and the last the head",
            even,
        )


def _stages_of(layout: Layout) -> str:
    if layout.virtual_stages == 1:
        return f"parallel.pp = {layout.pp}"
    return f"parallel.pp · parallel.virtual_stages = {layout.stages}"


def _schedule(job: Job) -> Iterator[Problem]:
    layout = job.parallel
    chunks, name = layout.virtual_stages, layout.schedule
    if name in V_SHAPED and chunks != 2:
        yield Problem("parallel.virtual_stages", chunks, f"each rank of schedule {name} has two stages", (2,))
    elif chunks > 1 and name not in (*V_SHAPED, "interleaved", "auto"):
        reason = f"schedule {name} has one stage per rank"
        yield Problem("parallel.virtual_stages", chunks, reason, (1,))
    if chunks > 1 and layout.pp == 1:
        yield Problem("parallel.virtual_stages", chunks, "without a pipeline there is nothing to interleave", (1,))


def _untrainable(job: Job) -> Iterator[Problem]:
    model, layout = job.model, job.parallel
    planned = "known to the planner only so far: it cannot be trained"
    if model.experts:
        yield Problem("model.experts", f"{model.experts.count} experts", planned)
    if model.latent:
        yield Problem("model.latent", f"kv_rank {model.latent.kv_rank}", planned)
    if layout.cp != 1:
        yield Problem("parallel.cp", layout.cp, "context parallelism is planned but not run yet", (1,))
    if layout.ep != 1:
        yield Problem("parallel.ep", layout.ep, "expert parallelism is planned but not run yet", (1,))


def _data_parallel(job: Job) -> Iterator[Problem]:
    layout = job.parallel
    if sorted(layout.order) != sorted(AXES):
        yield Problem(
            "parallel.order",
            list(layout.order),
            f"must name each of {', '.join(AXES)} once, slowest first",
            (list(AXES),),
        )
    if layout.dp % layout.dp_replicate:
        yield Problem(
            "parallel.dp_replicate",
            layout.dp_replicate,
            f"dp = dp_replicate · dp_shard: must divide parallel.dp = {layout.dp}",
            _around(layout.dp_replicate, divisors(layout.dp)),
        )
    if layout.gather == "per_use" and layout.zero != 3:
        yield Problem(
            "parallel.gather",
            layout.gather,
            f"only parallel.zero = 3 lets go of weights between uses, and it is {layout.zero}",
            ("auto", "per_step"),
        )
    if layout.reduce == "per_microbatch" and layout.zero == 0:
        yield Problem(
            "parallel.reduce",
            layout.reduce,
            "parallel.zero = 0 keeps whole gradients: reducing them more than once per step saves nothing",
            ("auto", "per_step"),
        )


def _batch(job: Job) -> Iterator[Problem]:
    batch = job.batch
    solved = solve_batch(global_batch=batch.global_batch, dp=job.parallel.dp, micro_batch=batch.micro_batch)
    if isinstance(solved, Problem):
        yield solved


@lru_cache(maxsize=1024)
def divisors(n: int) -> tuple[int, ...]:
    """Every divisor of `n`, from 1 on, in order."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _around(value: int, legal: Sequence[int]) -> tuple[int, ...]:
    """The nearest of the sorted `legal` values below and above `value`."""
    below, above = [n for n in legal if n < value], [n for n in legal if n > value]
    return (*below[-1:], *above[:1])
