"""Recipes of the documents for launchers that cannot be had here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers.runs import metrics, run_dir, write_job
from torch.distributed.run import get_args_parser

from trigrid.report.events import read_events

DOCS = Path(__file__).parents[2] / "docs"
FIRST = "10.0.0.7"
STAGES = "tp = 1\npp = 2\ndp = 1\n"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


def changed(text: str, *changes: tuple[str, str]) -> str:
    """`text` with what is of a cluster replaced; it must have been there."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_skypilots_task(tmp_path: Path) -> None:
    """Its command on two nodes, which are processes of this machine and each have a stage of the job."""
    job = write_job(tmp_path)
    job.write_text(changed(job.read_text(), ("[parallel]\n", f"[parallel]\n{STAGES}"), ("steps = 4", "steps = 2")))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    task, volume = map(yaml.safe_load, blocks("launch-skypilot.md", "yaml"))
    assert task["volumes"] == {"/job": volume["name"]}
    assert volume["config"]["access_mode"] == "ReadWriteMany"
    command = changed(task["run"], ("cd /job\n", f"cd {tmp_path}\n"), ("29500", port))
    told = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "1", "NODE_IPS": "127.0.0.1\n127.0.0.1"}
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # python3 is this one.
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {f"SKYPILOT_{name}": value for name, value in told.items()}
    nodes = [
        subprocess.Popen(("bash", "-c", command), env={**env, "SKYPILOT_NODE_RANK": rank}, start_new_session=True)
        for rank in "01"
    ]
    try:
        assert [node.wait(300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
    run = run_dir(job)
    assert [entry["step"] for entry in metrics(run, "step")] == [1, 2]
    assert next(event for event in read_events(run) if event["kind"] == "start")["world"] == 2


def skypilots_words(rank: int) -> list[str]:
    """What its task gives to Python on this of two nodes of eight GPUs, at addresses as in `stand_in`."""
    task = yaml.safe_load(blocks("launch-skypilot.md", "yaml")[0])
    told = {"NUM_NODES": "2", "NODE_RANK": str(rank), "NUM_GPUS_PER_NODE": "8", "NODE_IPS": f"{FIRST}\n10.0.0.9"}
    command = 'python3() { printf "%s\\n" "$@"; }\n' + changed(task["run"], ("cd /job\n", ""))
    env = {**os.environ, **{f"SKYPILOT_{key}": value for key, value in told.items()}}
    return subprocess.check_output(("bash", "-c", command), env=env, text=True).splitlines()


def torchruns(words: Sequence[str]) -> Namespace:
    """What torchrun understands."""
    assert tuple(words[:2]) == ("-m", "torch.distributed.run")
    return get_args_parser().parse_args(words[2:])


def stand_in(bundles: list[dict[str, int]]) -> dict[str, Any]:
    """Of Ray's modules: each task at once in a thread of its own, if the node that it is pinned to has room for it."""
    threads = ThreadPoolExecutor(8)

    class Group(list[dict[str, int]]):
        def ready(self) -> Future[None]:
            return threads.submit(lambda: None)

    def placement_group(asked: list[dict[str, int]], strategy: str) -> Group:
        assert strategy == "STRICT_SPREAD"
        bundles.extend(asked)
        return Group(asked)

    def pinned(group: Group, placement_group_bundle_index: int) -> dict[str, int]:
        return group[placement_group_bundle_index]

    def remote(max_retries: int, **asked: int) -> Callable[[Callable[..., Any]], SimpleNamespace]:
        # A node that Ray started again by itself would wait for the others.
        assert max_retries == 0

        def task(function: Callable[..., Any]) -> SimpleNamespace:
            def options(scheduling_strategy: dict[str, int]) -> SimpleNamespace:
                room = {f"num_{kind.lower()}s": count for kind, count in scheduling_strategy.items()}
                assert all(count <= room[kind] for kind, count in asked.items())
                return SimpleNamespace(remote=lambda *arguments: threads.submit(function, *arguments))

            return SimpleNamespace(options=options)

        return task

    def get(found: Any) -> Any:
        return [get(one) for one in found] if isinstance(found, list) else found.result(60)

    util = SimpleNamespace(get_node_ip_address=lambda: FIRST)
    return {
        "ray": SimpleNamespace(init=lambda: None, remote=remote, get=get, util=util),
        "ray.util": util,
        "ray.util.placement_group": SimpleNamespace(placement_group=placement_group),
        "ray.util.scheduling_strategies": SimpleNamespace(PlacementGroupSchedulingStrategy=pinned),
    }


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((0, 1), 1), ((-9, 0), 9)])
def test_rays_script(codes: tuple[int, int], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts on each node what SkyPilot's task starts there, as torchrun itself reads it."""
    (script,) = blocks("launch-ray.md", "python")
    of_skypilot = [skypilots_words(rank) for rank in range(2)]
    started: dict[int, Namespace] = {}

    def run(command: tuple[str, ...], cwd: str) -> SimpleNamespace:
        assert (command[0], cwd) == (sys.executable, "/shared")
        read = torchruns(command[1:])
        started[read.node_rank] = read
        return SimpleNamespace(returncode=codes[read.node_rank])

    bundles: list[dict[str, int]] = []
    monkeypatch.setattr(subprocess, "run", run)
    for name, module in stand_in(bundles).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(SystemExit) as ended:
        exec(compile(script, "on_ray.py", "exec"), {"__name__": "__main__"})
    assert ended.value.code == code
    assert bundles == [{"GPU": 8, "CPU": 8}] * 2
    assert started == {rank: torchruns(of_skypilot[rank]) for rank in range(2)}
