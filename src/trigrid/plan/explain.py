"""Why a printed figure is what it is: its formula, its inputs and where the formula is from."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from trigrid.errors import Problem, Refused
from trigrid.plan.figures import TOKENS, figures, inputs
from trigrid.plan.step import PARTS

if TYPE_CHECKING:
    from trigrid.plan.plan import Plan


class Formula(NamedTuple):
    """inputs: names of what the formula takes, as `facts` knows them, or of constants."""

    text: str
    inputs: tuple[str, ...]
    source: str


class Explanation(NamedTuple):
    figure: str
    value: float
    unit: str
    formula: str
    inputs: Mapping[str, object]
    source: str


LAYOUT = ("tp", "pp", "cp", "dp", "zero")
MEMORY = tuple(
    f"memory.{name}"
    for name in (
        *("weights", "master", "gradients", "optimizer", "activations", "logits", "transients", "buffers", "workspace"),
        *("allocator", "runtime"),
    )
)
FORMULAS: Mapping[str, Formula] = {
    "memory.weights": Formula(
        "parameters of the stage ÷ tp × bytes of a weight; none between uses in ZeRO-3",
        ("parameters_of_the_stage", "policy.weights", *LAYOUT),
        "Rajbhandari 2020, section 5",
    ),
    "memory.master": Formula(
        "parameters ÷ tp ÷ (dp · cp) from ZeRO-1 on × bytes of the optimizer's copy",
        ("parameters_of_the_stage", "policy.master", *LAYOUT),
        "Rajbhandari 2020, section 5",
    ),
    "memory.gradients": Formula(
        "parameters ÷ tp × bytes of a gradient; ÷ (dp · cp) where they are reduced per microbatch",
        ("parameters_of_the_stage", "policy.gradients", *LAYOUT),
        "Rajbhandari 2020, section 5",
    ),
    "memory.optimizer": Formula(
        "parameters ÷ tp ÷ (dp · cp) from ZeRO-1 on × bytes of the two moments",
        ("parameters_of_the_stage", "policy.moments", *LAYOUT),
        "Rajbhandari 2020, section 5",
    ),
    "memory.activations": Formula(
        "what each block saves for backward, by name in the blueprint's claims, × blocks × microbatches in flight",
        ("micro_batch", "sequence", "recompute", "schedule", "virtual_stages", "microbatches", "tp", "cp"),
        "Korthikanti 2022, section 4; Narayanan 2021, section 2.2",
    ),
    "memory.logits": Formula(
        "micro_batch · sequence ÷ cp · vocabulary ÷ tp × (compute format + fp32) and the head's saved inputs",
        ("micro_batch", "sequence", "vocab", "loss", "tp", "cp"),
        "blueprint/claims.py, head",
    ),
    "memory.transients": Formula(
        "one block's backward, units that ZeRO-3 gathers, gradients on their way, or the update's buffers",
        ("recompute", "zero", "micro_batch", "sequence"),
        "plan/memory.py",
    ),
    "memory.buffers": Formula(
        "stage boundaries being received", ("micro_batch", "sequence", "hidden"), "plan/memory.py"
    ),
    "memory.workspace": Formula("a constant", ("memory.workspace_bytes",), "plan/constants.toml"),
    "memory.allocator": Formula(
        "what comes and goes: allocated ÷ share − allocated",
        ("memory.reserved_share", "memory.reserved_share_pipeline", "memory.reserved_share_expandable"),
        "plan/constants.toml",
    ),
    "memory.runtime": Formula(
        "context + communicators × buffers of one + pairs of pipeline neighbours × theirs",
        (
            "memory.context_bytes",
            "memory.context_bytes_early",
            "communicators",
            "memory.communicator_bytes",
            "pairs",
            "memory.pair_bytes",
        ),
        "plan/constants.toml",
    ),
    "time.compute": Formula(
        "microbatches × Σ units: max(FLOPs ÷ rate, bytes ÷ HBM), or the host's launches where they take longer",
        ("microbatches", "micro_batch", "sequence", "recompute", "gpu", "gemm.half_k"),
        "plan/compute.py; Dao 2022 for attention",
    ),
    "time.tp": Formula(
        "exposed collectives of TP regions: bytes · (n − 1)/n ÷ bandwidth + latency, less what runs beside",
        ("tp", "micro_batch", "sequence", "hidden", "overlap_tp", "tier.tp"),
        "Shoeybi 2019; Korthikanti 2022; plan/network.py",
    ),
    "time.cp": Formula("keys and values around the ring, beyond attention", ("cp", "kv_heads", "tier.cp"), "Liu 2023"),
    "time.ep": Formula(
        "tokens to their experts and back: tokens · top_k · hidden, each direction",
        ("ep", "imbalance", "tier.ep"),
        "Lepikhin 2020; plan/network.py",
    ),
    "time.zero": Formula(
        "weights gathered and gradients reduced per use, beyond the compute they run beside",
        ("zero", "microbatches", "tier.zero"),
        "Rajbhandari 2020; Zhao 2023",
    ),
    "time.p2p": Formula("2 boundaries a microbatch, not overlapped", ("pp", "microbatches"), "plan/step.py"),
    "time.idle": Formula(
        "replayed schedule less the work of the fullest rank; (p − 1)/(v · m) of the work for equal stages",
        ("pp", "virtual_stages", "microbatches", "schedule"),
        "Narayanan 2021, section 2.2; Qi 2023",
    ),
    "time.reduce": Formula(
        "gradients of the stage over the data-parallel ranks, beyond the last backward",
        ("dp", "zero", "tier.zero", "overlap_dp"),
        "Rajbhandari 2020, section 7",
    ),
    "time.gather": Formula("weights gathered once a step", ("dp", "zero", "tier.zero"), "Rajbhandari 2020, section 7"),
    "time.tied": Formula(
        "the tied embedding's gradients, first and last stage", ("vocab", "hidden", "tp"), "Narayanan 2021"
    ),
    "time.optimizer": Formula(
        "bytes of gradients, master and moments of the shard, read and written ÷ HBM", ("zero", "dp"), "plan/step.py"
    ),
    "time.jitter": Formula(
        "a share of the step that grows with the copies of the model",
        ("dp", "cp", "jitter.share"),
        "plan/constants.toml",
    ),
    "time.fixed": Formula("a constant of the software's generation", ("generation",), "plan/constants.toml"),
    **{
        f"links.{name}": Formula(f"seconds of a step for which wires are busy with {what}", names, "plan/network.py")
        for name, what, names in (
            ("tp", "tensor parallelism", ("tp", "tier.tp", "nvlink_Bps", "nic_Bps", "microbatches")),
            ("cp", "context parallelism", ("cp", "tier.cp", "nvlink_Bps", "nic_Bps", "microbatches")),
            ("ep", "expert parallelism", ("ep", "tier.ep", "nvlink_Bps", "nic_Bps", "microbatches")),
            ("zero", "ZeRO's collectives of each use", ("zero", "tier.zero", "nvlink_Bps", "nic_Bps", "microbatches")),
            ("p2p", "stage boundaries", ("pp", "virtual_stages", "nvlink_Bps", "nic_Bps", "microbatches")),
            ("reduce", "gradients reduced once a step", ("dp", "zero", "tier.zero", "nvlink_Bps", "nic_Bps")),
            ("gather", "weights gathered once a step", ("dp", "zero", "tier.zero", "nvlink_Bps", "nic_Bps")),
            ("tied", "the tied embedding's sum", ("vocab", "hidden", "tp", "nvlink_Bps", "nic_Bps")),
        )
    },
    "traffic.tp": Formula(
        "regions entered and left in forward and backward × micro_batch · sequence · hidden, for each microbatch",
        ("micro_batch", "microbatches", "sequence", "hidden", "recompute"),
        "Shoeybi 2019, figure 4; Korthikanti 2022, section 4.2.2",
    ),
    "traffic.zero": Formula(
        "parameters of the first stage × bytes on the wire × times that they are gathered and reduced a step",
        ("zero", "gather_per_use", "reduce_per_microbatch", "microbatches"),
        "Rajbhandari 2020, section 7",
    ),
    "traffic.replicate": Formula(
        "gradients of a shard, summed over its copies", ("dp_replicate", "zero"), "Zhao 2023, section 3.2.2"
    ),
    "traffic.pp": Formula(
        "2 · microbatches · stages of a rank × micro_batch · sequence · hidden (÷ tp where it cuts the sequence)",
        ("microbatches", "virtual_stages", "micro_batch", "sequence", "hidden", "tp"),
        "Narayanan 2021, section 2.2",
    ),
    "memory.ceiling": Formula("what a process can allocate of the accelerator", ("gpu", "hbm_bytes"), "spec/gpus.toml"),
    "memory.total": Formula("sum of the categories, as the device sees it", MEMORY, "the ledger of the fullest stage"),
    "memory.allocated": Formula("sum of the categories but allocator and runtime", MEMORY[:-2], "torch's first meter"),
    "memory.reserved": Formula("sum of the categories but runtime", MEMORY[:-1], "torch's second meter"),
    "memory.margin": Formula(
        "total × the error that nine rows of ten held out stay below; not modelled",
        ("interval.memory",),
        "docs/accuracy.md",
    ),
    "parameters": Formula("of all units, each logical element once", ("layers", "hidden", "vocab"), "blueprint"),
    "memory_wall.state": Formula("parameters × bytes of the policy", ("parameters", "policy.total"), "definition"),
    "memory_wall.server": Formula("HBM of the GPUs of one server", ("gpus_per_node", "hbm_bytes"), "definition"),
    "memory_wall.deficit": Formula(
        "state − HBM of one server", ("parameters", "policy.total", "gpus_per_node", "hbm_bytes"), "definition"
    ),
    "training.seconds": Formula("tokens ÷ tokens/s", ("tokens", "tokens_per_s"), "definition"),
    "training.energy_kwh": Formula(
        "seconds × GPUs × power × PUE ÷ 3.6e6", ("tokens", "tokens_per_s", "world", "power_w", "pue"), "definition"
    ),
    "training.cost": Formula(
        "hours × GPUs × price of a GPU-hour", ("tokens", "tokens_per_s", "world", "price"), "definition"
    ),
    "goodput.mtbf_job_s": Formula(
        "seconds between unexpected stops of one GPU ÷ GPUs: 54 days · 16,384 ÷ 419",
        ("world",),
        "Llama 3 (Grattafiori 2024, section 3.3.4)",
    ),
    "goodput.interval_s": Formula(
        "max(write, √(2 · δ · M) · (1 + √(δ ÷ 2M) ÷ 3 + (δ ÷ 2M) ÷ 9) − δ), δ the stall of a save, M the job's MTBF",
        ("stall_s", "write_s", "goodput.mtbf_job_s"),
        "Daly 2006",
    ),
    "goodput.productive_share": Formula(
        "τ · e^(−(write + R) ÷ M) ÷ (e^((τ + δ) ÷ M) − 1) ÷ (M + detection), τ the interval, R the rest of the restart",
        ("goodput.interval_s", "goodput.mtbf_job_s", "stall_s", "write_s", "restart_s"),
        "Daly 2006; docs/goodput.md",
    ),
    "step_s.low": Formula(
        "step × (1 − the error that nine rows of ten held out stay below)",
        ("step_s", "interval.time"),
        "docs/accuracy.md",
    ),
    "step_s.high": Formula("step × (1 + the same)", ("step_s", "interval.time"), "docs/accuracy.md"),
    "tokens_per_s_per_gpu": Formula("tokens/s ÷ GPUs", ("tokens_per_s", "world"), "definition"),
    "step_s": Formula("sum of the parts, below 0.05 % too", tuple(f"time.{part}" for part in PARTS), "plan/step.py"),
    "bubble_ratio": Formula(
        "idle ÷ busy time of all ranks", ("pp", "virtual_stages", "microbatches"), "Narayanan 2021"
    ),
    "idle_share": Formula(
        "idle ÷ pipeline time of all ranks", ("pp", "virtual_stages", "microbatches"), "Narayanan 2021"
    ),
    "idle_share.equal": Formula(
        "(p − 1)/(v · m + p − 1): of 1F1B if all stages took equally long and messages no time",
        ("pp", "virtual_stages", "microbatches"),
        "Narayanan 2021, section 2.2",
    ),
    "tokens_per_s": Formula("global_batch · sequence ÷ step", ("global_batch", "sequence", "step_s"), "definition"),
    "mfu_full_attention": Formula(
        "model FLOPs of a token, all scores, × tokens/s ÷ (GPUs · dense peak)",
        ("gpu", "world"),
        "Chowdhery 2022, appendix B",
    ),
    "mfu_causal": Formula(
        "the same with the half of the scores that a causal mask leaves",
        ("gpu", "world"),
        "Megatron-Bridge's convention",
    ),
}


def explain(plan: Plan, figure: str, tokens: float = TOKENS) -> Explanation:
    """The explanation of `figure` of `plan`: memory.CATEGORY (of the fullest stage), time.PART, step_s, … (`figures`).

    Raises Refused with the closest names.
    """
    known = figures(plan, tokens)
    if figure not in known:
        closest = tuple(get_close_matches(figure, known)) or tuple(known)
        raise Refused([Problem("explain", figure, "no figure of a plan has this name", closest)])
    value, unit = known[figure]
    formula, facts = FORMULAS[figure], inputs(plan, tokens)
    return Explanation(figure, value, unit, formula.text, {k: facts[k] for k in formula.inputs}, formula.source)
