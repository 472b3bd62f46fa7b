"""Accelerators by name: the catalogue that ships with the package, with the source of every entry."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from trigrid.errors import Problem, Refused

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator: dense peaks, bandwidths in one direction.

    hbm_bytes: what a process can allocate. peak_flops: by number format. sustained: the share of that peak which the
    best large matrix product reaches. nvlink_domain: GPUs that NVLink joins in the usual server. nic_Bps: the usual
    NIC of one GPU. sms: units that the tiles of a matrix product are dealt to.
    """

    name: str
    generation: str
    hbm_bytes: int
    hbm_Bps: float
    peak_flops: Mapping[str, float]
    sustained: Mapping[str, float]
    nvlink_Bps: float
    nvlink_domain: int
    nic_Bps: float
    power_w: float
    sms: int
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def formats(self) -> tuple[str, ...]:
        """Number formats that its matrix units multiply."""
        return tuple(self.peak_flops)


@cache
def gpus() -> dict[str, Gpu]:
    """Every accelerator of the catalogue by name, in the file's order."""
    text = (files("trigrid.spec") / "gpus.toml").read_text(encoding="utf-8")
    return {name: _entry(name, fields) for name, fields in tomllib.loads(text).items()}


def load_gpu(name: str) -> Gpu:
    """The accelerator that `name` means, in any case. Raises Refused with the closest names where there is none."""
    found = _by_any_name().get(name.lower().strip())
    if found is None:
        closest = tuple(get_close_matches(name.lower(), _by_any_name())) or tuple(gpus())
        raise Refused([Problem("cluster.gpu", name, "no accelerator of the catalogue has this name", closest)])
    return found


@cache
def _by_any_name() -> dict[str, Gpu]:
    return {name: gpu for gpu in gpus().values() for name in (gpu.name, *gpu.aliases)}


def _entry(name: str, fields: dict[str, object]) -> Gpu:
    def number(key: str) -> float:
        value = fields[key]
        assert isinstance(value, int | float), (name, key)
        return float(value)

    def table(key: str) -> dict[str, float]:
        value = fields[key]
        assert isinstance(value, dict), (name, key)
        return {str(k): float(v) for k, v in value.items()}

    aliases = fields.get("aliases", [])
    assert isinstance(aliases, list)
    return Gpu(
        name=name,
        generation=str(fields["generation"]),
        hbm_bytes=int(number("hbm_visible_gib") * GIB),
        hbm_Bps=number("hbm_gb_s") * 1e9,
        peak_flops={k: v * 1e12 for k, v in table("dense_tflops").items()},
        sustained=table("sustained"),
        nvlink_Bps=number("nvlink_gb_s") * 1e9,
        nvlink_domain=int(number("nvlink_domain")),
        nic_Bps=number("nic_gbit") * 1e9 / 8,
        power_w=number("power_w"),
        sms=int(number("sms")),
        source=str(fields["source"]),
        aliases=tuple(map(str, aliases)),
    )
