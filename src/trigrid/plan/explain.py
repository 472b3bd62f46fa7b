"""Why a printed figure is what it is: its formula, its inputs and where the formula is from."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from trigrid.errors import Problem, Refused

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
        "allocated ÷ share − allocated",
        ("memory.reserved_share", "memory.reserved_share_expandable"),
        "plan/constants.toml",
    ),
    "memory.runtime": Formula(
        "context + communicators × buffers of one",
        ("memory.context_bytes", "communicators", "memory.communicator_bytes"),
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
        "a share of the step that grows with the ranks", ("world", "jitter.share"), "plan/constants.toml"
    ),
    "time.fixed": Formula("a constant of the software's generation", ("generation",), "plan/constants.toml"),
    "step_s": Formula(
        "sum of the parts; low and high from the errors on rows held out", ("interval.time",), "docs/accuracy.md"
    ),
    "bubble_ratio": Formula(
        "idle ÷ busy time of all ranks", ("pp", "virtual_stages", "microbatches"), "Narayanan 2021"
    ),
    "idle_share": Formula(
        "idle ÷ pipeline time of all ranks", ("pp", "virtual_stages", "microbatches"), "Narayanan 2021"
    ),
    "tokens_per_s": Formula("global_batch · sequence ÷ step", ("global_batch", "sequence"), "definition"),
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


def explain(plan: Plan, figure: str) -> Explanation:
    """The explanation of `figure` of `plan`: memory.CATEGORY (of the fullest stage), time.PART, step_s, …

    Raises Refused with the closest names.
    """
    formula = FORMULAS.get(figure)
    if formula is None:
        closest = tuple(get_close_matches(figure, FORMULAS)) or tuple(FORMULAS)
        raise Refused([Problem("explain", figure, "no figure of a plan has this name", closest)])
    facts = plan.facts
    value, unit = plan.figure(figure)
    return Explanation(figure, value, unit, formula.text, {k: facts[k] for k in formula.inputs}, formula.source)
