"""A checkpoint in words and numbers."""

from __future__ import annotations

import re
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from trigrid.blueprint.decoder import parameter_count
from trigrid.checkpoint.manifest import DTYPES, Manifest
from trigrid.report.console import table
from trigrid.spec.job import Job

LAYER = re.compile(r"\Alayers\.\d+\.")


def as_json_value(path: Path, manifest: Manifest, job: Job) -> dict[str, Any]:
    """All that the manifest says but the boxes, and the job's model and layout."""
    return {
        "path": str(path),
        "trigrid": manifest.trigrid,
        **asdict(manifest.state),
        "model": asdict(job.model),
        "layout": asdict(job.parallel),
        "world": job.parallel.world,
        "files": [asdict(file) for file in manifest.files],
        "bytes": kind_bytes(manifest),
        "parameters": {
            name: {
                "shape": parameter.shape,
                "kinds": {kind: {"dtype": s.dtype, "parts": len(s.parts)} for kind, s in parameter.kinds.items()},
            }
            for name, parameter in manifest.tensors.items()
        },
    }


def describe(path: Path, manifest: Manifest, job: Job) -> str:
    """A page for a person; equal layers are one line."""
    state, model, layout = manifest.state, job.model, job.parallel
    degrees = " ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "pp", "dp"))
    sizes = ", ".join(f"{kind} {held / 1e6:,.1f} MB" for kind, held in kind_bytes(manifest).items())
    skipped = sum(stop - start for start, stop in state.skipped)
    lines = [
        f"checkpoint  {path}, written by trigrid {manifest.trigrid}",
        f"state       step {state.step:,}, {state.consumed:,} samples drawn, {state.updates:,} updates, "
        f"{skipped:,} samples passed over, {state.rewinds:,} rewinds",
        f"model       {model.name}: {parameter_count(model):,} parameters in {model.layers} layers",
        f"layout      {degrees}, ZeRO {layout.zero}, {layout.schedule}, world {layout.world:,}",
        f"files       {len(manifest.files):,}, {manifest.bytes / 1e6:,.1f} MB: {sizes}",
    ]
    return "\n".join([*lines, "", _parameters(manifest)])


def kind_bytes(manifest: Manifest) -> dict[str, int]:
    """Bytes of the weights, and of each moment where there are any."""
    found: dict[str, int] = {}
    for _, kind, parameter, stored in manifest.stored():
        found[kind] = found.get(kind, 0) + prod(parameter.shape) * DTYPES[stored.dtype].itemsize
    return found


def _parameters(manifest: Manifest) -> str:
    rows: dict[tuple[str, ...], int] = {}
    for name, parameter in manifest.tensors.items():
        kinds = ", ".join(f"{kind} {stored.dtype}" for kind, stored in parameter.kinds.items())
        row = (LAYER.sub("layers.*.", name), " × ".join(map(str, parameter.shape)), kinds)
        rows[row] = rows.get(row, 0) + 1
    return table(
        ["parameter", "shape", "times", "stored"],
        [[name, shape, str(times), kinds] for (name, shape, kinds), times in rows.items()],
    )
