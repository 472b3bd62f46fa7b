"""Every figure that a plan prints, by name, and what its explanation may say that it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from trigrid.plan.goodput import RESTART_S, STALL_S, WRITE_S, goodput
from trigrid.plan.plan import Plan
from trigrid.plan.setup import Setup

TOKENS = 1e12
"""Of the training that is told where none is asked."""


def memory_wall(plan: Plan) -> dict[str, float]:
    """Bytes of the whole state by the plan's precision policy, of one server's GPUs, and what is missing."""
    state = float(plan.parameters * plan.software.policy.total)
    server = float(plan.ceiling_bytes * plan.machine.gpus_per_node)
    return {
        "bytes_per_parameter": plan.software.policy.total,
        "state_bytes": state,
        "server_bytes": server,
        "deficit_bytes": max(0.0, state - server),
    }


def equal_idle_share(setup: Setup) -> float:
    """Idle ÷ pipeline of 1F1B, interleaved where there are virtual stages, if all stages took equally long and messages
    no time: (p − 1)/(v·m + p − 1) (Narayanan 2021, section 2.2)."""
    idle = setup.pp - 1
    return idle / (setup.virtual * setup.microbatches + idle)


def figures(plan: Plan, tokens: float = TOKENS) -> Mapping[str, tuple[float, str]]:
    """Value and unit of each figure. memory.*: of the fullest stage; training.*: of `tokens` tokens."""
    fullest, trained, kept, wall = plan.fullest, plan.training(tokens), goodput(plan.setup.world), memory_wall(plan)
    found: dict[str, tuple[float, str]] = {
        "parameters": (float(plan.parameters), "of all units"),
        "step_s": (plan.step_s.best, "s"),
        "step_s.low": (plan.step_s.low, "s"),
        "step_s.high": (plan.step_s.high, "s"),
        "tokens_per_s": (plan.tokens_per_s, "tokens/s"),
        "tokens_per_s_per_gpu": (plan.tokens_per_s_per_gpu, "tokens/s"),
        "mfu_full_attention": (plan.mfu_full_attention, "of the dense peak"),
        "mfu_causal": (plan.mfu_causal, "of the dense peak"),
        "training.seconds": (trained.seconds, "s"),
        "training.energy_kwh": (trained.energy_kwh, "kWh"),
        "goodput.productive_share": (kept.productive_share, "of the time"),
        "goodput.mtbf_job_s": (kept.mtbf_job_s, "s"),
        "goodput.interval_s": (kept.interval_s, "s"),
        "memory_wall.state": (wall["state_bytes"], "bytes"),
        "memory_wall.server": (wall["server_bytes"], "bytes"),
        "memory_wall.deficit": (wall["deficit_bytes"], "bytes"),
        "memory.ceiling": (plan.ceiling_bytes, "bytes"),
        "memory.total": (fullest.memory.total_bytes, "bytes"),
        "memory.allocated": (fullest.memory.allocated_bytes, "bytes"),
        "memory.reserved": (fullest.memory.reserved_bytes, "bytes"),
        "memory.margin": (fullest.margin_bytes, "bytes"),
        "bubble_ratio": (plan.time.bubble_ratio, "idle ÷ busy"),
        "idle_share": (plan.time.idle_share, "idle ÷ pipeline"),
        "idle_share.equal": (equal_idle_share(plan.setup), "idle ÷ pipeline"),
        **{f"memory.{name}": (float(held), "bytes") for name, held in fullest.memory.ledger.bytes.items()},
        **{f"time.{name}": (spent, "s") for name, spent in plan.time.parts_s.items()},
        **{f"links.{name}": (busy, "s") for name, busy in plan.time.links_s.items()},
        **{f"traffic.{axis}": (sent, "bytes") for axis, sent in plan.traffic_bytes.items()},
    }
    if trained.cost is not None:
        found["training.cost"] = (trained.cost, "in the price's currency")
    return found


def inputs(plan: Plan, tokens: float = TOKENS) -> Mapping[str, object]:
    """What explanations may name, by the names that they use."""
    cluster, machine, kept = plan.job.cluster, plan.machine, asdict(goodput(plan.setup.world))
    return {
        **plan.facts,
        **{f"memory.{name}": held for name, held in plan.fullest.memory.ledger.bytes.items()},
        **{f"time.{name}": spent for name, spent in plan.time.parts_s.items()},
        "layers": plan.job.model.layers,
        "parameters": plan.parameters,
        "policy.total": plan.software.policy.total,
        "step_s": plan.step_s.best,
        "tokens_per_s": plan.tokens_per_s,
        "tokens": tokens,
        "power_w": cluster.power_w or machine.gpu.power_w,
        "pue": cluster.pue,
        "price": cluster.price,
        "peak_flops": machine.gpu.peak_flops,
        "gpus_per_node": machine.gpus_per_node,
        "hbm_bytes": machine.gpu.hbm_bytes,
        "nvlink_Bps": machine.nvlink_Bps,
        "nic_Bps": machine.nic_Bps,
        "stall_s": STALL_S,
        "write_s": WRITE_S,
        "restart_s": RESTART_S,
        **{f"goodput.{name}": value for name, value in kept.items()},
        **{f"traffic.{axis}": sent for axis, sent in plan.traffic_bytes.items()},
    }
