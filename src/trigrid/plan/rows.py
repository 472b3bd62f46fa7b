"""Published measurements as cases that can be planned: one row of evidence, what it states, what it leaves open.

A fact comes from its column, else from what the row's notes say in so many words (the rate of a NIC, the size of a
shard group), else from the trainer that the source names. What is open and would change the plan is not guessed: see
`Case.open`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trigrid.plan.facts import Row, Unplannable, fabric_of, nic_of, software_of
from trigrid.plan.setup import Setup
from trigrid.plan.software import Software
from trigrid.spec.gpu import Gpu, gpus, load_gpu
from trigrid.spec.model import Experts, LatentAttention, ModelSpec

GIB = 2**30
LONG = 16384
GPT_VOCABULARY = 51200
LATENT = LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)

SUSPECT = re.compile(r"\[suspect:? ([^\]]*)\]")
SHARD_GROUP = re.compile(r"zero1=(-?\d+)")


@dataclass(frozen=True)
class Case:
    """A row that can be planned.

    open: why the row is not scored, by what it leaves open. alternatives: setups of which the row does not say which
    one ran. nic_Bps: None where it is open. format: of the blocks' products. meter: what the memory figure is
    ("allocated", "reserved", "device"), rank: of which pipeline rank it is (None: the fullest). fabric: as in Machine.
    benchmark: whether the time is one, or that of a functional test with debugging on. time_doubt, memory_doubt: why
    that figure alone is not scored.
    """

    id: str
    source: str
    model: str
    family: str
    spec: ModelSpec
    gpu: Gpu
    gpus_per_node: int
    nic_Bps: float | None
    software: Software
    format: str
    setup: Setup
    open: tuple[str, ...]
    alternatives: tuple[Setup, ...]
    assumptions: tuple[str, ...]
    measured_step_s: float | None
    measured_memory_bytes: float | None
    meter: str
    rank: int | None = None
    fabric: str = ""
    benchmark: bool = True
    time_doubt: str = ""
    memory_doubt: str = ""


def source_of(row_id: str) -> str:
    """The source of a row, the prefix of its id."""
    return row_id.rsplit("-", 1)[0]


def read_case(values: Mapping[str, str]) -> Case:
    """The case of one row. Raises Unplannable with what is missing."""
    row = Row(values)
    gpu = _gpu(row)
    spec = _spec(row)
    number_format = _format(row, gpu)
    software = software_of(row)
    setup, alternatives = _setup(row, spec, software)
    node = row.whole("nvlink_domain") or row.whole("gpus_per_node") or gpu.nvlink_domain
    node = max(node, gpu.nvlink_domain if gpu.nvlink_domain > 8 else node)
    nic = nic_of(row, row.whole("gpus_per_node") or 8)
    if setup.world <= node:
        nic = gpu.nic_Bps
    step = _measured_step(row, spec, setup)
    memory = row.number("peak_mem_gib")
    doubt = (SUSPECT.search(row.notes) or ["", ""])[1]
    if "look SWAPPED" in row.notes:
        doubt = "step time: seconds and TFLOPs look swapped in the source"
    many = setup.world > node
    return Case(
        id=row.text("id"),
        source=source_of(row.text("id")),
        model=row.text("model_name"),
        family=_family(spec, setup, number_format, many),
        spec=spec,
        gpu=gpu,
        gpus_per_node=node,
        nic_Bps=nic,
        software=software,
        format=number_format,
        setup=setup,
        open=tuple(row.open),
        alternatives=alternatives,
        assumptions=tuple(row.assumed),
        measured_step_s=step,
        measured_memory_bytes=None if memory is None else memory * GIB,
        meter=_meter(row),
        fabric=fabric_of(row),
        benchmark="not a tuned benchmark" not in row.notes and "not tuned" not in row.notes,
        time_doubt=_time_doubt(row, software, doubt),
        memory_doubt=f"the evidence doubts its memory: {doubt}" if doubt.startswith("memory") else "",
        rank=setup.pp - 1 if "last rank" in row.text("mem_kind") else row.whole("mem_rank"),
    )


def _family(spec: ModelSpec, setup: Setup, number_format: str, many: bool) -> str:
    if spec.experts:
        return "moe"
    if number_format.startswith("fp8"):
        return "low precision"
    if setup.sequence >= LONG:
        return "long context"
    return "dense multi-node" if many else "dense single-node"


def _time_doubt(row: Row, software: Software, doubt: str) -> str:
    if doubt and not doubt.startswith("memory"):
        return f"the evidence doubts its time: {doubt}"
    if software.name == "torchtune" and "cumulative technique" in row.notes:
        return "samples are packed: how many tokens each attends to is open"
    return ""


def _gpu(row: Row) -> Gpu:
    text = row.text("gpu").lower()
    if not text:
        raise Unplannable("gpu is not given")
    if "h100" in text and ("500w" in text or "95gb" in text or "96gb" in text):
        return load_gpu("h100-96g-500w")
    if " or " in text:
        raise Unplannable(f"gpu is one of several: {text}")
    name = text.split(" (")[0].replace(" ", "-")
    for known in sorted(gpus().values(), key=lambda g: -len(g.name)):
        if name in (known.name, *known.aliases):
            return known
    raise Unplannable(f"gpu {text} is not in the catalogue")


def _spec(row: Row) -> ModelSpec:
    hidden, layers, heads = row.needed("hidden"), row.needed("layers"), row.needed("heads")
    gated = row.text("ffn_gated") in ("1", "true")
    ffn = row.whole("ffn_hidden")
    if ffn is None:
        if gated:
            raise Unplannable("ffn_hidden is not given")
        ffn = 4 * hidden
        row.assume("ffn_hidden", ffn, "4 · hidden")
    vocab = row.whole("vocab_padded") or row.whole("vocab")
    if vocab is None and (re.search(r"vocab (printed as |~)250k", row.notes) or "tr11-176B-ml" in row.text("source")):
        vocab = 250880
        row.assume("vocab", vocab, "BLOOM's: its slurm file, about 250k by the notes")
    if vocab is None:
        vocab = GPT_VOCABULARY
        row.assume("vocab", vocab, "GPT-2's, padded")
    kv_heads = row.whole("kv_heads") or heads
    experts, latent, dim = _experts(row), None, row.whole("head_dim") or hidden // heads
    if "mla" in row.text("attention").lower():
        latent, dim, kv_heads = LATENT, LATENT.nope_dim + LATENT.rope_dim, heads
    llama = gated or experts is not None
    tied = row.text("tied") in ("1", "true")
    if not row.text("tied"):
        untied = "untie" in row.notes.lower()
        tied = not untied and ("tied embeddings" in row.notes.lower() or not llama)
        row.assume("tied", tied)
    return ModelSpec(
        name=row.text("model_name") or "row",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        ffn=ffn,
        vocab=vocab,
        context=row.whole("seq") or 2048,
        block="llama" if llama else "gpt",
        tied=tied,
        experts=experts,
        latent=latent,
    )


def _experts(row: Row) -> Experts | None:
    count = row.whole("n_experts")
    if not count:
        return None
    width = row.whole("moe_ffn_hidden") or row.whole("ffn_hidden")
    if not width:
        raise Unplannable("moe_ffn_hidden is not given")
    return Experts(
        count=count,
        top_k=row.needed("top_k"),
        ffn=width,
        shared_ffn=row.whole("shared_expert_ffn") or 0,
        dense_layers=row.whole("dense_layers") or 0,
    )


def _format(row: Row, gpu: Gpu) -> str:
    text = row.text("precision").lower()
    if not text:
        row.open.append("precision is open")
        return "bf16" if "bf16" in gpu.formats else "fp16"
    if "fp4" in text:
        raise Unplannable(f"precision {text} is not modelled")
    if "fp8" in text:
        if "fp8" not in gpu.formats:
            raise Unplannable(f"{gpu.name} has no fp8")
        rowwise = "rowwise" in row.notes.lower() or "rowwise" in row.text("fp8_recipe").lower()
        return "fp8-rowwise" if rowwise else "fp8"
    found = "fp16" if text.startswith("fp16") else "bf16" if text.startswith("bf16") else text
    if found not in gpu.formats:
        raise Unplannable(f"precision {text} is not modelled on {gpu.name}")
    return found


def _setup(row: Row, spec: ModelSpec, software: Software) -> tuple[Setup, tuple[Setup, ...]]:
    sequence, world = row.needed("seq"), row.needed("gpus")
    tp, cp, pp = row.whole("tp") or 0, row.whole("cp") or 1, row.whole("pp") or 1
    if not tp:
        raise Unplannable("tp is not given")
    dp = world // (tp * cp * pp)
    if dp * tp * cp * pp != world:
        raise Unplannable(f"tp · cp · pp = {tp * cp * pp} does not divide {world} GPUs")
    if spec.heads % tp or spec.ffn % tp:
        raise Unplannable(f"tp = {tp} does not divide the heads or the width of the model")
    batch = row.needed("gbs")
    schedule, virtual = _schedule(row, pp)
    zero = _zero(row, dp * cp, tp * pp)
    group = row.whole("zero_group") or int((SHARD_GROUP.search(row.notes) or ["", "-1"])[1])
    replicate = dp // group if 0 < group < dp and dp % group == 0 else 1
    if row.notes.lower().startswith("hsdp"):
        replicate = max(1, dp // (row.whole("gpus_per_node") or 8))
    mode, share = _recompute(row)
    sp = row.text("sp")
    if not sp and tp > 1:
        row.assume("sp", int(software.kernels.regather and software.kernels.fused_attention))
    parallel = sp == "1" if sp else software.kernels.regather and software.kernels.fused_attention
    base = Setup(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=row.whole("ep") or 1,
        dp_replicate=replicate,
        zero=zero,
        gather_per_use=zero == 3,
        reduce_per_microbatch=zero >= 2,
        schedule=schedule,
        virtual=virtual,
        sequence=sequence,
        sequence_parallel=parallel,
        recompute=mode,
        recomputed=share,
        order=("pp", "dp", "cp", "tp") if software.name.startswith("megatron") else ("dp", "pp", "cp", "tp"),
    )
    if base.ep > 1 and (spec.experts is None or (dp * cp) % base.ep or spec.experts.count % base.ep):
        raise Unplannable(f"ep = {base.ep} does not divide dp · cp = {dp * cp} and the experts")
    if base.ep > 1 and tp > 1:
        row.open.append("how TP cuts the experts is open")
    if pp * virtual > spec.layers:
        raise Unplannable(f"{pp * virtual} stages for {spec.layers} layers")
    if "type:transformer" in row.notes or (software.name == "megatron-deepspeed" and (spec.layers + 2) % pp == 0):
        base = base._replace(stage_layers=_with_ends(spec.layers, pp))
    elif software.name == "megatron-deepspeed" and spec.layers % pp:
        base = base._replace(stage_layers=_first_full(spec.layers, pp))
    return _batched(row, base, batch)


def _with_ends(layers: int, pp: int) -> tuple[int, ...]:
    """Embedding and head counted as layers, where layers alone do not divide (BLOOM's 70 on 12 stages)."""
    if layers % pp == 0 or pp == 1:
        return ()
    each = (layers + 2) // pp
    return (each - 1, *((each,) * (pp - 2)), each - 1)


def _first_full(layers: int, pp: int) -> tuple[int, ...]:
    """DeepSpeed fills stages in turn and leaves the rest to the last: 78 on 12 are 7 each and 1 (says BigScience)."""
    each, found, left = -(-layers // pp), [], layers
    for stage in range(pp):
        here = min(each, left - (pp - stage - 1))
        found.append(here)
        left -= here
    return tuple(found)


def _batched(row: Row, base: Setup, batch: int) -> tuple[Setup, tuple[Setup, ...]]:
    """With the micro-batch, or with every one that is possible where the row leaves it open."""
    given = row.whole("mbs")
    options = []
    for micro in (given,) if given else (1, 2, 4, 8, 16):
        microbatches = batch / (base.dp * micro)
        if microbatches >= 1 and (microbatches == int(microbatches) or given):
            options.append(base._replace(micro_batch=micro, microbatches=max(1, round(microbatches))))
    if not options:
        raise Unplannable(f"gbs = {batch} does not fit dp = {base.dp} and mbs = {given or 'open'}")
    if not given:
        row.assume("mbs", options[0].micro_batch)
    every = list(options)
    if row.text("vpp") == "" and base.schedule == "interleaved":
        row.assume("vpp", base.virtual)
        layers = row.needed("layers")
        virtual = [v for v in (1, 2, 3, 4, 6, 8) if layers % (base.pp * v) == 0]
        every = [o._replace(virtual=v) for o in options for v in virtual or [1]]
    if row.text("zero_stage") == "" and base.dp * base.cp > 1:
        stages = (0, 1) if base.tp * base.pp > 1 else (0, 1, 3)
        every = [o._replace(zero=z, gather_per_use=z == 3, reduce_per_microbatch=z == 3) for o in every for z in stages]
    return options[0], tuple(option for option in every if option != options[0])


def _schedule(row: Row, pp: int) -> tuple[str, int]:
    text, virtual = row.text("schedule").lower(), row.whole("vpp") or 1
    if pp == 1:
        return "1f1b", 1
    if text.startswith("zb-1p"):
        return "zb-h1", 1
    if text.startswith("zb"):
        raise Unplannable(f"schedule {text} is not modelled")
    if text.startswith("gpipe"):
        return "gpipe", 1
    if virtual > 1 or text.startswith("interleaved"):
        return "interleaved", virtual
    return "1f1b", 1


def _zero(row: Row, copies: int, cut: int) -> int:
    stage = row.whole("zero_stage")
    if stage is not None:
        if stage not in (0, 1, 2, 3):
            raise Unplannable(f"zero_stage = {stage}")
        return stage
    if copies > 1:
        row.assume("zero_stage", 1)
    del cut
    return 1 if copies > 1 else 0


def _recompute(row: Row) -> tuple[str, float]:
    text = row.text("recompute").lower()
    share = row.number("recompute_fraction")
    if not text:
        row.open.append("recomputation is open")
        return "none", 1.0
    if text.startswith("selective (every 2nd"):
        return "full", 0.5
    technique = re.search(r"technique: \+([^.]*)", row.notes)
    if technique and technique[1] in ("optimizer in backward", "activation offloading", "8-bit AdamW"):
        row.open.append(f"{technique[1]} is not modelled")
    if text == "selective" and "fms-fsdp" in row.text("source") and share is None:
        row.open.append("the share of the blocks that are recomputed is open")
    if text in ("none", "selective", "full"):
        return text, share if share is not None else 1.0
    row.open.append(f"recomputation of {text.removeprefix('other:')} is not modelled")
    return "none", 1.0


def _measured_step(row: Row, spec: ModelSpec, setup: Setup) -> float | None:
    """Seconds of a step: as stated, or from tokens/s, or from a printed FLOP rate by its own printed formula."""
    step = row.number("step_time_s")
    if step:
        return step
    batch = setup.dp * setup.micro_batch * setup.microbatches
    rate = row.number("tokens_per_s_per_gpu")
    if rate:
        row.assume("step_time_s", "from tokens/s")
        return batch * setup.sequence / (rate * setup.world)
    flops = row.number("tflops_per_gpu")
    if flops and row.text("flops_convention").startswith("hw: 96*B*s*l*h^2"):
        h, s = spec.hidden, setup.sequence
        work = 96 * batch * s * spec.layers * h * h * (1 + s / (6 * h) + spec.vocab / (16 * spec.layers * h))
        row.assume("step_time_s", "from TFLOP/s by the source's own formula")
        return work / (flops * 1e12 * setup.world)
    return None


def _meter(row: Row) -> str:
    kind = row.text("mem_kind").lower()
    if "reserved" in kind and "allocated/reserved" not in kind:
        return "reserved"
    if "allocated" in kind and "allocated/reserved" not in kind:
        return "allocated"
    if "active" in kind:
        return "allocated"
    if "nvidia-smi" in kind:
        return "device"
    return "unstated" if kind else ""
