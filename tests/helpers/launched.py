"""The files that the documents show, as they are rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trigrid.job import load_job
from trigrid.launch.kubernetes import render_kubernetes
from trigrid.launch.options import Kubernetes, Slurm
from trigrid.launch.shape import shape_of
from trigrid.launch.slurm import render_slurm
from trigrid.launch.start import Mount, Start

TINY = Path(__file__).parents[2] / "examples" / "tiny-3d.toml"
FOLDER = Path("/home/me/llm")
FLAGS = ("--device", "cuda")


def start(**values: Any) -> Start:
    """A start of the demo in a folder of nobody's."""
    usual: dict[str, Any] = {
        "name": "tiny-3d",
        "file": FOLDER / "tiny-3d.toml",
        "overrides": FLAGS,
        "arguments": (),
        "python": f"{FOLDER}/.venv/bin/python",
        "folder": FOLDER,
        "gpus": True,
        "restarts": 3,
        "image": None,
        "mounts": (),
        "environment": {},
    }
    return Start(**{**usual, **values})


def slurm_example(
    slurm: Slurm = Slurm(partition="gpu", time="8:00:00"),  # noqa: B008
    out: str = "runs",
    **values: Any,
) -> str:
    job = load_job(TINY, (*FLAGS, "--run.out", out), env={})
    return render_slurm(job, shape_of(job, 2, None), start(**values), slurm)


def kubernetes_example(kind: Any, name: str = "tiny-3d-20261201-053749") -> str:
    """The manifests after the ConfigMap."""
    job = load_job(TINY, FLAGS, env={})
    pods = start(image="registry/trigrid:0.1", python="python3", mounts=(Mount("work", "/job"),))
    asked = Kubernetes(kind=kind, queue="training")
    text = render_kubernetes(name, job, shape_of(job, 2, None), pods, asked)
    return text.partition("\n---\n")[2]
