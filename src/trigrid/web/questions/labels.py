"""What figures are called."""

from __future__ import annotations

from trigrid.report.plan import PART_NAMES

LABELS = {
    "parameters": "Parameters",
    "step_s": "Step",
    "step_s.low": "Step, low end",
    "step_s.high": "Step, high end",
    "tokens_per_s": "Tokens/s",
    "tokens_per_s_per_gpu": "Tokens/s per GPU",
    "mfu_full_attention": "MFU (full attention)",
    "mfu_causal": "MFU (causal half)",
    "training.seconds": "Training time",
    "training.energy_kwh": "Training energy",
    "training.cost": "Training cost",
    "goodput.productive_share": "Goodput",
    "goodput.mtbf_job_s": "Time between unexpected stops",
    "goodput.interval_s": "Checkpoint interval",
    "memory_wall.state": "State of the whole model",
    "memory_wall.server": "Memory of one server",
    "memory_wall.deficit": "Deficit of one server",
    "memory.ceiling": "Memory ceiling",
    "memory.total": "Memory on the device",
    "memory.allocated": "Memory allocated",
    "memory.reserved": "Memory reserved",
    "memory.margin": "Not modelled (margin)",
    "bubble_ratio": "Bubble ratio",
    "idle_share": "Idle share",
    "idle_share.equal": "Idle share of equal stages",
    "memory.weights": "Weights",
    "memory.master": "Master weights",
    "memory.gradients": "Gradients",
    "memory.optimizer": "Optimizer moments",
    "memory.activations": "Activations",
    "memory.logits": "Logits",
    "memory.transients": "Transients of a block",
    "memory.buffers": "Receive buffers",
    "memory.workspace": "Kernel workspace",
    "memory.allocator": "Reserved, not allocated",
    "memory.runtime": "Context and communicators",
}
AXES = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "pp": "pipeline", "zero": "ZeRO"}


def label(figure: str) -> str:
    """The name of a figure for people."""
    kind, _, name = figure.partition(".")
    if figure in LABELS:
        return LABELS[figure]
    if kind == "time":
        return f"Time: {PART_NAMES[name]}"
    words = AXES.get(name) or PART_NAMES.get(name, name).removesuffix(", exposed")
    return f"{'Wires busy' if kind == 'links' else 'Traffic'}: {words}"
