"""One accelerator with its networks and the constants that hold for it, resolved once for many plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trigrid.plan.constants import of_generation, shipped
from trigrid.plan.measured import Measured
from trigrid.spec.gpu import Gpu

UNMEASURED = Measured()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """gpus_per_node: ranks of an NVLink domain; nodes_per_leaf: under one switch. Bandwidths are one way, per GPU.

    oversubscription: how many times less the spine carries than the leaves. values: constants by name.
    fabric: "" for InfiniBand and RoCE, "opa" for Omni-Path, which has no direct access to the GPUs' memory; "opa_far"
    where, besides, ranks are not bound to the socket of their NIC. measured: what prices its operations instead of the
    constants, as far as it goes.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes_per_leaf: int
    nvlink_Bps: float
    nic_Bps: float
    oversubscription: float
    values: Mapping[str, float]
    fabric: str = ""
    measured: Measured = UNMEASURED

    def hbm(self, generation: str) -> float:
        """Bytes a second of memory-bound operations of a software generation."""
        if self.measured.passes:
            return self.measured.passes.Bps
        return self.gpu.hbm_Bps * self.values[f"hbm.{generation}"]

    def gemm_flops(self, number_format: str) -> float:
        """FLOP/s of a large product in `number_format`."""
        gpu = self.gpu
        plain = number_format.split("-")[0]
        kind = number_format if plain == "fp8" else "half"
        peak = gpu.peak_flops[plain] * gpu.sustained.get(plain, 0.8)
        return peak * of_generation(self.values, "gemm", gpu.generation, kind)

    @property
    def nvlink(self) -> float:
        """Bytes a second of a ring inside the NVLink domain."""
        return self.nvlink_Bps * of_generation(self.values, "nvlink", self.gpu.generation)

    @property
    def nic(self) -> float:
        """Bytes a second of a collective over one GPU's NIC."""
        if self.fabric:
            return self.nic_Bps * self.values[f"nic.{self.fabric}"]
        return self.nic_Bps * of_generation(self.values, "nic", self.gpu.generation)


def make_machine(
    gpu: Gpu,
    *,
    gpus_per_node: int | None = None,
    nodes_per_leaf: int = 32,
    nic_Bps: float | None = None,
    nvlink_Bps: float | None = None,
    oversubscription: float = 1.0,
    values: Mapping[str, float] | None = None,
    fabric: str = "",
    measured: Measured = UNMEASURED,
) -> Machine:
    """`gpu` in a cluster; what is left out is the catalogue's. `measured` replaces what was measured of either."""
    gpu = measured.accelerator or gpu
    return Machine(
        gpu=gpu,
        gpus_per_node=gpus_per_node or gpu.nvlink_domain,
        nodes_per_leaf=nodes_per_leaf,
        nvlink_Bps=nvlink_Bps or gpu.nvlink_Bps,
        nic_Bps=nic_Bps or gpu.nic_Bps,
        oversubscription=oversubscription,
        values={**(values or shipped()), **measured.values},
        fabric=fabric,
        measured=measured,
    )
