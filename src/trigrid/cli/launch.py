"""`trigrid launch`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from trigrid.cli.app import JobFile, Json, Overrides, Quiet, app, examples, print_json, trainable
from trigrid.errors import Problem, Refused
from trigrid.launch.options import Kubernetes, Options, Slurm


def _group(name: str, order: int) -> Parameter:
    return Parameter(name="*", group=Group(name, sort_key=order), negative_iterable=())


@app.command(
    help_epilogue=examples(
        "trigrid launch job.toml --on local",
        "trigrid launch job.toml --on slurm --partition gpu --time 8:00:00",
        "trigrid launch job.toml --on slurm --nodes 2 --container trigrid.sqsh",
        "trigrid launch job.toml --on kubernetes --container IMAGE --mount work:/job",
        "trigrid launch job.toml --on kubernetes --kind jobset … --dry-run",
    )
)
def launch(
    job: JobFile,
    *overrides: Overrides,
    on: Annotated[Literal["local", "slurm", "kubernetes"], Parameter(help="Where to start it.")],
    dry_run: Annotated[bool, Parameter(negative="", help="Print what would be submitted, submit nothing.")] = False,
    resume: Annotated[str | None, Parameter(help="Go on with a run, as `trigrid train` does.")] = None,
    max_restarts: Annotated[int, Parameter(help="Times that all ranks start again after a failure.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    options: Annotated[Options, _group("Slurm and Kubernetes", 1)] = Options(),  # noqa: B008
    slurm: Annotated[Slurm, _group("Slurm", 2)] = Slurm(),  # noqa: B008
    kubernetes: Annotated[Kubernetes, _group("Kubernetes", 3)] = Kubernetes(),  # noqa: B008
) -> None:
    """Start a job on this machine, under Slurm or in Kubernetes; the job file is the same for all.

    For Slurm it submits an sbatch file, for Kubernetes manifests; --dry-run prints them. Where the scheduler takes
    the machine away, the job starts again and goes on from its last checkpoint.
    """
    _check_options(on, options, slurm, kubernetes)
    if on == "local":
        from trigrid.cli.train import train

        train(
            job,
            *overrides,
            dry_run=dry_run,
            resume=resume,
            max_restarts=max_restarts,
            as_json=as_json,
            quiet=quiet,
        )
        return
    from trigrid.grid import golden_rules, grid_of
    from trigrid.launch.kubernetes import kubernetes_name, render_kubernetes
    from trigrid.launch.shape import shape_of
    from trigrid.launch.slurm import render_slurm
    from trigrid.launch.start import start_of
    from trigrid.launch.submit import submit_kubernetes, submit_slurm
    from trigrid.report.console import Console
    from trigrid.spec.rules import warnings

    console = Console(quiet)
    nodes, per_node = options.nodes, options.ranks_per_node
    resolved = trainable(job, overrides, nodes * per_node if nodes and per_node else None)
    for warning in [*warnings(resolved), *golden_rules(grid_of(resolved))]:
        console.warn(str(warning))
    shape = shape_of(resolved, nodes, per_node)
    arguments = ["--resume", resume] if resume else []
    start = start_of(resolved, job, overrides, options, arguments, max_restarts)
    name = kubernetes_name(start, time.strftime("%Y%m%d-%H%M%S")) if on == "kubernetes" else start.name
    if on == "slurm":
        text = render_slurm(resolved, shape, start, slurm)
    else:
        text = render_kubernetes(name, resolved, shape, start, kubernetes)
    answer: dict[str, object] = {"on": on, "name": name, "nodes": shape.nodes, "ranks_per_node": shape.per_node}
    if dry_run:
        answer["text"] = text
        said = text.rstrip("\n")
    elif on == "slurm":
        number = submit_slurm(text, shape, slurm, start.gpus)
        log = start.folder / f"{start.name}-{number}.out"
        answer |= {"job": number, "log": str(log), "run": f"{resolved.run.out}/slurm-{number}"}
        said = f"job {number}; its log: {log}; its run, once it has begun: {answer['run']}"
    else:
        created = submit_kubernetes(text, kubernetes.namespace).splitlines()
        answer |= {"created": created, "run": f"{resolved.run.out}/{name}"}
        said = "\n".join([*created, f"its run, on the first mount, once it has begun: {answer['run']}"])
    if as_json:
        print_json(answer)
    else:
        print(said)


def _check_options(on: str, options: Options, slurm: Slurm, kubernetes: Kubernetes) -> None:
    """Raises Refused for a flag that means nothing where the job is started."""
    mine = {"local": (), "slurm": (options, slurm), "kubernetes": (options, kubernetes)}[on]
    problems = []
    for group, where in ((options, "slurm or kubernetes"), (slurm, "slurm"), (kubernetes, "kubernetes")):
        if group in mine:
            continue
        standard = asdict(type(group)())
        for name, value in asdict(group).items():
            if value != standard[name]:
                problems.append(
                    Problem(f"--{name.replace('_', '-')}", value, f"means nothing on {on}", (f"--on {where}",))
                )
    if problems:
        raise Refused(problems)
