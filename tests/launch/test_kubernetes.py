"""Manifests: what Kubernetes and Kubeflow would take of them, and whether what they start trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helpers.runs import metrics, wait_for, write_job
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

from trigrid.errors import Refused
from trigrid.job import job_from_text, load_job
from trigrid.launch.kubernetes import kubernetes_name, render_kubernetes
from trigrid.launch.options import Kubernetes, Options
from trigrid.launch.shape import shape_of
from trigrid.launch.start import start_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-3d.toml"
MODELS: dict[str, Any] = {
    "TrainJob": TrainerV1alpha1TrainJob,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
    "JobSet": JobsetV1alpha2JobSet,
}
VERSION = "1.33"
"""Of Kubernetes, whose schemas are asked."""
LONGEST_S = 300
"""For what takes seconds on an idle machine."""
EVERYTHING = Kubernetes(namespace="llm", queue="training", resource=("memory=900Gi", "rdma/hca=8"))


def rendered(
    asked: Kubernetes,
    *flags: str,
    job: Path = TINY,
    mount: tuple[str, ...] = ("work:/job", "/data:/data:ro"),
    **more: Any,
) -> list[dict[str, Any]]:
    resolved = load_job(job, flags, env={})
    options = Options(container="registry/trigrid:0.1", mount=mount, **more)
    start = start_of(resolved, job, flags, options, ("--resume", "latest"), 3)
    shape = shape_of(resolved, options.nodes, options.ranks_per_node)
    name = kubernetes_name(start, "20261201-053749")
    return list(yaml.safe_load_all(render_kubernetes(name, resolved, shape, start, asked)))


def pods_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The specification of the JobSet among them, or in their runtime."""
    spec = manifests[1]["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "everything"])
def test_kubernetes_and_kubeflow_take_the_manifests_whole(kind: Any, full: bool) -> None:
    """Core kinds against their strict schemas, the others through the models of their own clients, which drop what they
    do not know."""
    asked = Kubernetes(**{**vars(EVERYTHING), "kind": kind}) if full else Kubernetes(kind=kind)
    flags = ("--device", "cuda") if full else ()
    manifests = rendered(asked, *flags, nodes=2, env=("NCCL_DEBUG=INFO",))
    assert [manifest["kind"] for manifest in manifests] == ["ConfigMap", "TrainingRuntime", "TrainJob"][
        : 3 if kind == "trainjob" else 1
    ] + ["JobSet"] * (kind == "jobset")
    kubernetes_validate.validate(manifests[0], VERSION, strict=True)
    for manifest in manifests[1:]:
        assert MODELS[manifest["kind"]].from_dict(manifest).to_dict() == manifest
    for replicated in pods_of(manifests)["replicatedJobs"]:
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            "spec": replicated["template"]["spec"],
        }
        kubernetes_validate.validate(job, VERSION, strict=True)
    names = {manifest["metadata"]["name"] for manifest in manifests}
    assert names == {"tiny-3d-20261201-053749"}
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == ({"llm"} if full else {None})


def test_a_wrong_field_would_be_seen() -> None:
    manifests = rendered(Kubernetes(kind="jobset"))
    pods_of(manifests)["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["imge"] = "x"
    assert JobsetV1alpha2JobSet.from_dict(manifests[1]).to_dict() != manifests[1]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    job["spec"] = pods_of(manifests)["replicatedJobs"][0]["template"]["spec"]
    with pytest.raises(kubernetes_validate.ValidationError, match="imge"):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_what_pods_get() -> None:
    manifests = rendered(EVERYTHING, "--device", "cuda", "--tp", "1", "--dp", "4", nodes=2, env=("A=b c",))
    pods = pods_of(manifests)
    assert pods["failurePolicy"]["maxRestarts"] == 3
    pod = pods["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4", "memory": "900Gi", "rdma/hca": "8"}
    assert {"name": "A", "value": "b c"} in container["env"]
    assert container["command"][:3] == ["python3", "-m", "torch.distributed.run"]
    assert container["workingDir"] == "/job"
    assert container["command"][-2:] == ["--resume", "latest"]
    assert {"name": "mount-1", "hostPath": {"path": "/data"}} in pod["volumes"]
    assert {"name": "mount-1", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    job = job_from_text(manifests[0]["data"]["tiny-3d.toml"])
    assert job == load_job(TINY, ("--device", "cuda", "--tp", "1", "--dp", "4"), env={})
    assert pod["terminationGracePeriodSeconds"] == job.faults.grace_s + 30
    assert manifests[2]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    assert manifests[2]["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 4}


def test_names_and_values_that_kubernetes_would_refuse_or_change() -> None:
    """It reads YAML 1.1, in which 1e-4 is a number and y is true, and puts $(NAME) in; names begin with a letter, and
    those of the last of many pods still have 63 characters at most."""
    job = load_job(TINY, env={})
    options = Options(container="x", mount=("data:/data:ro", "work:/job"), env=("LR=1e-4", "ASK=y", "PASS=a$$(B)"))
    start = start_of(job, Path(f"7B {'long' * 20}.toml"), (), replace(options, python="/opt/python"), (), 0)
    name = kubernetes_name(start, "20261201-053749")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-16383-abcde") <= 63
    text = render_kubernetes(name, job, shape_of(job, None, None), start, Kubernetes(kind="jobset"))
    assert "value: '1e-4'" in text
    assert "value: 'y'" in text
    pod = pods_of(list(yaml.safe_load_all(text)))["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (env["PASS"], env["XDG_CACHE_HOME"]) == ("a$$$$(B)", "/job/.cache")
    assert (container["workingDir"], container["command"][0]) == ("/job", "/opt/python")


@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ({"mount": ()}, {}, "run.out = runs: is on no mount that can be written"),
        ({"mount": ("work:/job:ro",)}, {}, "run.out = runs: is on no mount that can be written"),
        ({"mount": ("work",)}, {}, "--mount = work: is no mount"),
        ({"env": ("NO SUCH=1",)}, {}, "--env = NO SUCH=1: is no NAME=VALUE"),
        ({"env": ("NOT_SET_ANYWHERE",)}, {}, "--env = NOT_SET_ANYWHERE: is not set here"),
        ({}, {"resource": ("memory",)}, "--resource = memory: is no NAME=AMOUNT"),
        ({"nodes": 3}, {}, "--nodes = 3: 8 ranks do not fill nodes of equally many; nearest legal: 1, 2, 4"),
        ({"nodes": 2, "ranks_per_node": 2}, {}, "--nodes = 2: 2 · 2 = 4 ranks, and the job has 8; nearest legal: 4"),
        ({"nodes": 8}, {}, "parallel.tp = 2: a tensor-parallel group crosses nodes of 1 GPUs"),
    ],
)
def test_what_is_refused(options: dict[str, Any], asked: dict[str, Any], told: str) -> None:
    """R81: a run's folder that ends with its pod; R45, R82."""
    with pytest.raises(Refused) as refused:
        rendered(Kubernetes(**asked), **options)
    assert told in str(refused.value)


def pods(manifests: list[dict[str, Any]], folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """The pods of a JobSet as processes of this machine, each its own node by name."""
    job = pods_of(manifests)["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]} | {"OMP_NUM_THREADS": "1"}
    started = []
    for index in range(job["completions"]):
        command = " ".join(container["command"]).replace("$(JOB_COMPLETION_INDEX)", str(index))
        command = re.sub(r"--master-addr=\S+", "--master-addr=127.0.0.1", command)
        command = command.replace("--master-port=29500", f"--master-port={port}").replace("/etc/trigrid", str(folder))
        command = command.replace("python3", sys.executable, 1)
        started.append(
            subprocess.Popen(
                command.split(),
                cwd=container["workingDir"],
                env={**os.environ, **env, "SLURMD_NODENAME": f"pod-{index}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started


def test_pods_train_end_badly_when_evicted_and_go_on_with_the_run(tmp_path: Path) -> None:
    """R90: the JobSet's own command on two nodes of two ranks. SIGTERM to one pod stops and saves all; its exit code is
    not zero, so that no pod counts as done, and all pods of the next attempt go on with the same run."""
    job = write_job(tmp_path)
    flags = ("--tp", "2", "--dp", "2", "--run.trackers", "[]", "--run.validate_every", "0", "--steps", "100000")
    flags = (*flags, "--checkpoint.every", "100000")
    manifests = rendered(Kubernetes(kind="jobset"), *flags, job=job, mount=(str(tmp_path),), nodes=2)
    name = manifests[1]["metadata"]["name"]
    text = manifests[0]["data"]["job.toml"]
    config = tmp_path / "config"
    config.mkdir()
    (config / "job.toml").write_text(text)
    run = tmp_path / "runs" / name
    first = pods(manifests, config, 29_500 + os.getpid() % 3000)
    try:
        wait_for(lambda: run.exists() and metrics(run, "step"), LONGEST_S)
        first[1].send_signal(signal.SIGTERM)
        said = [first[1].communicate(timeout=LONGEST_S)[0]]
        # torchrun waits five minutes for its neighbour, and hears no signal meanwhile: JobSet ends the pod.
        wait_for(lambda: (run / "preempted.json").exists(), LONGEST_S)
        first[0].kill()
        said.insert(0, first[0].communicate(timeout=LONGEST_S)[0])
    finally:
        for pod in first:
            pod.kill()
    assert all(pod.returncode for pod in first)
    assert "  pod-0  ranks 0–1  dp 0  tp 0–1\n  pod-1  ranks 2–3  dp 1  tp 0–1\n  tp inside nodes" in said[0], said[0]
    stopped = metrics(run, "step")[-1]["step"]
    assert f"told to stop by SIGTERM after step {stopped}" in said[0]
    (config / "job.toml").write_text(text.replace("steps = 100000", f"steps = {stopped + 1}"))
    second = pods(manifests, config, 29_500 + (os.getpid() + 1) % 3000)
    try:
        said = [pod.communicate(timeout=LONGEST_S)[0] for pod in second]
    finally:
        for pod in second:
            pod.kill()
    assert [pod.returncode for pod in second] == [0, 0], said
    assert f"going on after step {stopped}" in said[0]
    assert [entry["step"] for entry in metrics(run, "step")] == list(range(1, stopped + 2))
