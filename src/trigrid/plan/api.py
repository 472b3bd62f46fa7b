"""Plans and searches from Python."""

from __future__ import annotations

from trigrid.errors import Problem, Refused
from trigrid.plan.found import Found
from trigrid.plan.layouts import neutral
from trigrid.plan.plan import Plan, make_plan
from trigrid.plan.search import search_layouts
from trigrid.plan.software import Software, load_software
from trigrid.plan.space import KNOBS
from trigrid.spec.cluster import Cluster
from trigrid.spec.gpu import load_gpu
from trigrid.spec.job import Batch, Job, Run
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec
from trigrid.spec.models import resolve_model
from trigrid.spec.rules import check


def plan(
    model: str | ModelSpec,
    cluster: str | Cluster = "h100",
    layout: Layout | None = None,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
    micro_batch: int = 1,
    software: str | Software | None = None,
) -> Plan:
    """The plan of training `model` in `layout` on `cluster`.

    model: a name of the catalogue, the path of a config.json, or a shape; cluster: an accelerator's name, or a whole
    cluster; global_batch: sequences of a step, by default one microbatch per pipeline stage and data-parallel rank;
    sequence: tokens, by default the model's longest up to 8,192; software: by default this project's engine.
    Raises Refused for names that the catalogues lack, and with every rule that the layout breaks.
    """
    layout = layout or Layout()
    batch = global_batch or layout.dp * micro_batch * layout.pp
    job = _job(model, cluster, layout, batch, sequence, micro_batch)
    if problems := check(job):
        raise Refused(problems)
    return make_plan(job, _trainer(software))


def search(
    model: str | ModelSpec,
    cluster: str | Cluster = "h100",
    *,
    gpus: int,
    global_batch: int,
    sequence: int | None = None,
    software: str | Software | None = None,
    **fixed: object,
) -> Found:
    """The best layouts of `model` on at most `gpus` GPUs of `cluster`; see `plan` for the arguments.

    fixed: knobs of the layout that are not searched, by their names in a job (tp, zero, micro_batch, recompute, …).
    Raises Refused as `plan` does, and where no layout goes with GPUs and batch.
    """
    known = {*KNOBS, *Layout.__dataclass_fields__}
    if unknown := [name for name in fixed if name not in known]:
        raise Refused([Problem(unknown[0], fixed[unknown[0]], "no knob of a layout has this name", tuple(KNOBS))])
    if fixed.get("schedule") == "auto":
        reason = "is made for one layout: search with a named schedule, then plan the layout found with auto"
        raise Refused([Problem("schedule", "auto", reason, ("1f1b", "interleaved"))])
    micro_batch = fixed.get("micro_batch", 1)
    assert isinstance(micro_batch, int)
    stated = {name: value for name, value in fixed.items() if name != "micro_batch"}
    layout = neutral(Layout(**stated), frozenset(fixed))  # type: ignore[arg-type]
    job = _job(model, cluster, layout, global_batch, sequence, micro_batch)
    if problems := check(job):
        raise Refused(problems)
    opened = set(KNOBS) - fixed.keys()
    if "zero" in fixed:
        opened -= {"gather", "reduce"}
    if not job.model.experts:
        opened -= {"ep"}
    found = search_layouts(job, _trainer(software), open=frozenset(opened), gpus=gpus)
    if found is None:
        raise Refused([Problem("gpus", gpus, "no layout goes with the global batch and the degrees given")])
    return found


def _job(
    model: str | ModelSpec,
    cluster: str | Cluster,
    layout: Layout,
    global_batch: int,
    sequence: int | None,
    micro_batch: int,
) -> Job:
    spec = resolve_model(model) if isinstance(model, str) else model
    if isinstance(cluster, str):
        cluster = Cluster(gpu=cluster, gpus_per_node=load_gpu(cluster).nvlink_domain)
    return Job(
        model=spec,
        batch=Batch(global_batch=global_batch, sequence=sequence or min(spec.context, 8192), micro_batch=micro_batch),
        run=Run(steps=1),
        parallel=layout,
        cluster=cluster,
    )


def _trainer(software: str | Software | None) -> Software | None:
    return load_software(software) if isinstance(software, str) else software
