"""Kubernetes: a job as manifests, a Kubeflow TrainJob (v2) with its runtime, or a plain JobSet; pods run torchrun.

The job travels in a ConfigMap, resolved, so that pods need no copy of the file. All pods start again together, from the
last checkpoint: a pod that is evicted does not count as a failure, whatever its exit code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from trigrid.errors import Problem, Refused
from trigrid.job import dump_job
from trigrid.launch.options import Kubernetes
from trigrid.launch.place import LAUNCH_VARIABLE
from trigrid.launch.shape import Shape
from trigrid.launch.start import Start
from trigrid.spec.job import Job

JOB_FOLDER = "/etc/trigrid"
NODE = "node"
PORT = 29_500
MARGIN_S = 30
"""Beyond the time of grace, until the kubelet kills."""
LONGEST_NAME = 28
"""A launch adds its time, pods their number and five letters, and JobSet refuses what is longer than 63 characters."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?0[box]\w+|[yYnN]", re.ASCII)
"""Text that some reader of YAML takes for a number or a truth value."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class _Order:
    """All that a manifest is made of."""

    name: str
    job: Job
    shape: Shape
    start: Start
    asked: Kubernetes


def kubernetes_name(start: Start, stamp: str) -> str:
    """A name of the job in Kubernetes, which `stamp` makes its own."""
    return f"{_label(start.name)}-{stamp}"


def render_kubernetes(name: str, job: Job, shape: Shape, start: Start, asked: Kubernetes) -> str:
    """The manifests as YAML. Raises Refused for what would be lost with the
    pods, and where something is missing."""
    if problems := list(_problems(job, start)):
        raise Refused(problems)
    order = _Order(name, job, shape, start, asked)
    manifests = [_config_map(order), *(_train_job(order) if asked.kind == "trainjob" else [_job_set(order)])]
    if asked.namespace:
        for manifest in manifests:
            manifest["metadata"]["namespace"] = asked.namespace
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _problems(job: Job, start: Start) -> Iterator[Problem]:
    if not start.image:
        yield Problem("--container", "not given", "pods need an image with trigrid in it", ("registry/trigrid:0.1",))
    out = PurePosixPath(_folder(start), job.run.out)
    if not any(out.is_relative_to(mount.target) and not mount.read_only for mount in start.mounts):
        reason = "is on no mount that can be written: it would end with each pod, and each would have its own"
        yield Problem("run.out", job.run.out, reason, ("--mount CLAIM:/job",))


def _folder(start: Start) -> str:
    """Where pods start: at the first mount that can be written."""
    return next((mount.target for mount in start.mounts if not mount.read_only), "/")


def _label(name: str) -> str:
    """Names begin with a letter (RFC 1035)."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"job-{label}")[:LONGEST_NAME].rstrip("-")


def _config_map(order: _Order) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": order.name},
        "data": {_file(order): dump_job(order.job)},
    }


def _file(order: _Order) -> str:
    return f"{order.start.name}.toml"


def _train_job(order: _Order) -> list[Manifest]:
    """A runtime of its own, since those of a cluster know neither the job's volumes nor how it starts again. The
    controller tells torchrun its ranks and its address (PET_…)."""
    group = "trainer.kubeflow.org"
    pods = _pods(order, ())
    (nodes,) = pods["replicatedJobs"]
    nodes["template"] = {"metadata": {"labels": {f"{group}/trainjob-ancestor-step": "trainer"}}, **nodes["template"]}
    runtime = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": order.name},
        "spec": {"mlPolicy": {"numNodes": order.shape.nodes, "torch": {}}, "template": {"spec": pods}},
    }
    train_job = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": order.name, **_queue(order)},
        "spec": {
            "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": order.name},
            "trainer": {"numNodes": order.shape.nodes, "numProcPerNode": order.shape.per_node},
        },
    }
    return [runtime, train_job]


def _job_set(order: _Order) -> Manifest:
    """torchrun is told by flags what a TrainJob's controller tells it by its environment."""
    nodes = order.shape.nodes
    flags = (
        f"--nnodes={nodes}",
        f"--nproc-per-node={order.shape.per_node}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={order.name}-{NODE}-0-0.{order.name}",
        f"--master-port={PORT}",
    )
    pods = _pods(order, flags)
    pods["replicatedJobs"][0]["template"]["spec"] |= {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": order.name, **_queue(order)},
        "spec": pods,
    }


def _queue(order: _Order) -> Manifest:
    return {"labels": {"kueue.x-k8s.io/queue-name": order.asked.queue}} if order.asked.queue else {}


def _pods(order: _Order, flags: Sequence[str]) -> Manifest:
    """A JobSet's specification of one pod for each node."""
    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rule = {
        "name": "evicted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    one_for_each_node = {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [evicted]},
        "template": {"spec": _pod(order, flags)},
    }
    return {
        "failurePolicy": {"maxRestarts": order.start.restarts, "rules": [rule]},
        "replicatedJobs": [{"name": NODE, "template": {"spec": one_for_each_node}}],
    }


def _pod(order: _Order, flags: Sequence[str]) -> Manifest:
    start, grace_s = order.start, round(order.job.faults.grace_s)
    volumes, mounts = _volumes(order)
    command = [
        start.python,
        "-m",
        "torch.distributed.run",
        *flags,
        "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2",
    ]
    command += [f"--shutdown-timeout={grace_s}", "-m", "trigrid", "train", f"{JOB_FOLDER}/{_file(order)}"]
    # Ranks that start again under this name go on with the same run; what is prepared once, every pod must see.
    own = {LAUNCH_VARIABLE: order.name, "XDG_CACHE_HOME": f"{_folder(start)}/.cache"}
    # A module in the folder must not stand in for one of the library's.
    own["PYTHONSAFEPATH"] = "1"
    # Kubernetes would put variables in.
    given = {name: value.replace("$", "$$") for name, value in start.environment.items()}
    resources = _resources(order)
    container = {
        "name": NODE,
        "image": start.image,
        "workingDir": _folder(start),
        "command": [*command, *(word.replace("$", "$$") for word in start.arguments)],
        "env": [{"name": key, "value": value} for key, value in {**own, **given}.items()],
        **({"resources": {"limits": resources}} if resources else {}),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s + MARGIN_S,
        "containers": [container],
        "volumes": volumes,
    }


def _volumes(order: _Order) -> tuple[list[Manifest], list[Manifest]]:
    """The volumes of a pod, and where its container sees them."""
    volumes: list[Manifest] = [
        {"name": "job", "configMap": {"name": order.name}},
        # What a container has by itself, 64 MiB, is too little for NCCL.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[Manifest] = [{"name": "job", "mountPath": JOB_FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(order.start.mounts):
        read_only = {"readOnly": True} if mount.read_only else {}
        if mount.source.startswith("/"):
            source: Manifest = {"hostPath": {"path": mount.source}}
        else:
            source = {"persistentVolumeClaim": {"claimName": mount.source, **read_only}}
        volumes.append({"name": f"mount-{number}", **source})
        mounts.append({"name": f"mount-{number}", "mountPath": mount.target, **read_only})
    return volumes, mounts


def _resources(order: _Order) -> dict[str, str]:
    found = {order.asked.gpu_resource: str(order.shape.per_node)} if order.start.gpus else {}
    for text in order.asked.resource:
        name, _, amount = text.partition("=")
        if not (name and amount):
            raise Refused([Problem("--resource", text, "is no NAME=AMOUNT", ("memory=900Gi", "rdma/hca=8"))])
        found[name] = amount
    return found


class _Dumper(yaml.SafeDumper):
    """Text of several lines is written as such, and what looks like a number as text."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
