"""Facts of a row of evidence: from its column, else from its notes, else from the trainer that its source names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from trigrid.plan.software import POLICIES, SOFTWARE, Software

# The trainer by what a source or its notes call it, the most particular first.
TRAINERS = (
    ("oneflow", "megatron-2021"),
    ("vtrain", "megatron-deepspeed"),
    ("bigscience", "megatron-deepspeed"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("2205.05198", "megatron-2022"),
    ("2401.10241", "megatron-2022"),
    ("dlperf", "megatron-2021"),
    ("deepspeed zero-3", "deepspeed"),
    ("deepspeedai", "deepspeed"),
    ("2104.04473", "megatron-2021"),
    ("torchtitan", "fsdp2"),
    ("2410.06511", "fsdp2"),
    ("fms-fsdp", "fsdp2-compiled"),
    ("llm-foundry", "fsdp"),
    ("internevo", "internevo"),
    ("torchtune", "torchtune"),
    ("megatron", "megatron"),
    ("simumax", "megatron"),
    ("nemo", "megatron"),
)
# From how many GPUs on a source ran with CUDA_LAUNCH_BLOCKING=1: BigScience's chronicle, "Hanging Issue", slurm file.
BLOCKING = (("tr11-176b-ml", 320),)
# Before this line of its chronicle (02-25) ranks were not bound to the socket of their NIC.
FAR = (("chronicles-prequel", 771),)
LINE = re.compile(r"line (\d+)")
BACKEND = re.compile(r"--attention-backend=(\w+)")
# NIC of a named cluster, in Gb/s per GPU (hardware.csv).
CLUSTERS = (("2104.04473", 200.0), ("2205.05198", 200.0), ("selene", 200.0), ("ndm a100", 200.0))
NIC_PER_NODE = re.compile(r"(\d+)\s?x\s?(\d+)\s?gb(?!/s per gpu)(?![a-z]*yte)", re.IGNORECASE)
NIC_PER_GPU = re.compile(r"(\d+)\s?gb(?:/s)?(?: rdma)?\s?(?:per gpu|/gpu)", re.IGNORECASE)
NIC_OF_NODE = re.compile(r"(\d+)\s?gb(?:/s)? (?:inter-node|ib/node)|(\d+)gb ib/node", re.IGNORECASE)
NIC_IN_BYTES = re.compile(r"ib (\d+)x(\d+)gb/s", re.IGNORECASE)


class Unplannable(Exception):
    """A row that says too little, or what the planner does not model."""


class Row:
    """One row's columns, with what had to be assumed."""

    def __init__(self, values: Mapping[str, str]):
        self.values = values
        self.notes = values.get("notes", "") or ""
        self.assumed: list[str] = []
        self.open: list[str] = []

    def text(self, key: str) -> str:
        return (self.values.get(key) or "").strip()

    def number(self, key: str) -> float | None:
        text = self.text(key)
        if not text:
            return None
        try:
            return float(text)
        except ValueError:
            raise Unplannable(f"{key} is no number: {text}") from None

    def whole(self, key: str) -> int | None:
        value = self.number(key)
        return None if value is None else int(value)

    def needed(self, key: str) -> int:
        value = self.whole(key)
        if not value or value < 0:
            raise Unplannable(f"{key} is not given")
        return value

    def assume(self, key: str, value: object, why: str = "") -> None:
        self.assumed.append(f"{key} = {value}{f': {why}' if why else ''}")


def software_of(row: Row) -> Software:
    """The trainer with what the row says of it."""
    named = row.text("framework").lower()
    where = f"{named} {row.text('source')} {row.notes}".lower()
    name = named if named in SOFTWARE else next((s for key, s in TRAINERS if key in where), "")
    if not name:
        name = "megatron" if (row.whole("tp") or 1) * (row.whole("pp") or 1) > 1 else "fsdp2"
        row.assume("framework", name)
    if name == "fsdp2" and row.text("compile") in ("1", "true"):
        name = "fsdp2-compiled"
    software = SOFTWARE[name]
    notes = row.notes.lower()
    if name == "torchtune" and row.text("compile") in ("1", "true"):
        kernels = replace(software.kernels, gate="recomputed", fused_passes=True, fused_norm=True, fused_rotary=True)
        software = replace(software, generation="fused", kernels=kernels)
    # DeepSpeed had bf16 before it had an optimizer that adds bf16 gradients in fp32.
    if name == "megatron-deepspeed" and (row.text("grad_dtype") == "fp32" or "bf16_optimizer" in notes):
        software = replace(software, policy=POLICIES["deepspeed-bf16"])
    if "no comm overlap" in notes:
        software = replace(software, overlap_tp="none", overlap_dp=False)
    if "asynctp" in notes.replace(" ", "") or row.text("tp_overlap") == "async":
        software = replace(software, overlap_tp="async")
    if "mp mode default" in notes:
        software = replace(software, policy=POLICIES["fsdp2"])
    if "cuda_launch_blocking=1" in notes or any(
        key in where and (row.whole("gpus") or 0) >= gpus for key, gpus in BLOCKING
    ):
        software = replace(software, blocking=True)
    if "not overlapped" in notes:
        software = replace(software, overlap_dp=False)
    attention = row.text("attention_impl").lower() or (BACKEND.search(notes) or ["", ""])[1]
    if attention:
        fused = attention not in ("unfused", "eager", "math")
        software = replace(software, kernels=replace(software.kernels, fused_attention=fused))
    if row.text("loss_impl").lower() == "chunked" or ("chunked" in notes and name == "torchtune"):
        software = replace(software, kernels=replace(software.kernels, loss="chunked"))
    elif row.text("loss_impl").lower() == "fused":
        software = replace(software, kernels=replace(software.kernels, loss="fused"))
    if row.text("dp_overlap") in ("0", "1"):
        software = replace(software, overlap_dp=row.text("dp_overlap") == "1")
    return software


def fabric_of(row: Row) -> str:
    """As in Machine."""
    if not re.search(r"\bOPA\b", row.notes):
        return ""
    line = int((LINE.search(row.notes) or ["", "0"])[1])
    far = any(key in row.text("source") and 0 < line < before for key, before in FAR)
    return "opa_far" if far else "opa"


def nic_of(row: Row, per_node: int) -> float | None:
    """Bytes a second of one GPU's NIC, where the row says it."""
    given = row.number("nic_gbit_per_gpu")
    if given:
        return given * 1e9 / 8
    if found := NIC_IN_BYTES.search(row.notes):
        return float(found[1]) * float(found[2]) * 1e9 / per_node
    if found := NIC_PER_GPU.search(row.notes):
        return float(found[1]) * 1e9 / 8
    if found := NIC_PER_NODE.search(row.notes):
        return float(found[1]) * float(found[2]) * 1e9 / 8 / per_node
    if found := NIC_OF_NODE.search(row.notes):
        return float(found[1] or found[2]) * 1e9 / 8 / per_node
    where = f"{row.text('source')} {row.notes}".lower()
    gbit = next((gbit for name, gbit in CLUSTERS if name in where), None)
    return None if gbit is None else gbit * 1e9 / 8
