"""What the catalogues hold: models and accelerators, with their sources."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import wrap

from trigrid.report.console import table
from trigrid.report.plan import WIDTH
from trigrid.report.units import scaled
from trigrid.spec.gpu import GIB, gpus
from trigrid.spec.models import catalogue

ADDING = "docs/plan.md tells how to add one"


def models_text() -> str:
    """Models with their shapes, then the source of each."""
    rows, sources = [], []
    for name, entry in catalogue().items():
        spec = entry.spec
        experts = f"{spec.experts.top_k} of {spec.experts.count}" if spec.experts else ""
        shape = (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.ffn, spec.vocab, spec.context)
        rows.append([name, scaled(entry.parameters), *map(str, shape), experts])
        also = f" (also {', '.join(entry.aliases)})" if entry.aliases else ""
        sources += _source(f"{name}{also}", entry.source)
    header = ["model", "size", "layers", "hidden", "heads", "kv", "ffn", "vocab", "context", "experts"]
    return "\n".join([*_lines(table(header, rows)), "", *sources, "", ADDING])


def models_json() -> dict[str, object]:
    """Models with their exact parameters, shapes and sources."""
    return {
        "models": [
            {
                "name": name,
                "parameters": entry.parameters,
                "aliases": list(entry.aliases),
                "source": entry.source,
                "shape": asdict(entry.spec),
            }
            for name, entry in catalogue().items()
        ]
    }


def gpus_text() -> str:
    """Accelerators: dense peaks, one-way bandwidths, then the source of each."""
    rows, sources = [], []
    for gpu in gpus().values():
        half = "bf16" if "bf16" in gpu.peak_flops else "fp16"
        rows.append(
            [
                gpu.name,
                f"{gpu.hbm_bytes / GIB:.1f}",
                f"{gpu.hbm_Bps / 1e9:,.0f}",
                f"{gpu.peak_flops[half] / 1e12:,.0f}",
                f"{gpu.sustained.get(half, 0):.2f}" if half in gpu.sustained else "",
                f"{gpu.nvlink_Bps / 1e9:,.0f}",
                str(gpu.nvlink_domain),
                f"{gpu.nic_Bps * 8 / 1e9:,.0f}",
                f"{gpu.power_w:,.0f}",
            ]
        )
        also = f" (also {', '.join(gpu.aliases)})" if gpu.aliases else ""
        sources += _source(f"{gpu.name}{also}", gpu.source)
    header = ["gpu", "GiB", "HBM GB/s", "TFLOP/s", "sustained", "NVLink GB/s", "GPUs", "NIC Gb/s", "W"]
    about = "peaks are dense, in bf16 (or fp16); bandwidths are one way; GPUs: in one NVLink domain"
    return "\n".join([*_lines(table(header, rows)), about, "", *sources, "", ADDING])


def gpus_json() -> dict[str, object]:
    """Accelerators with their sources."""
    return {"gpus": [{**asdict(gpu), "aliases": list(gpu.aliases)} for gpu in gpus().values()]}


def _source(name: str, source: str) -> list[str]:
    return wrap(f"{name}: {source}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]
