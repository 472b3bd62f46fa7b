"""Files as they are rendered, and the command that renders them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.launched import FOLDER, TINY, kubernetes_example, slurm_example, start
from helpers.slurm import need

from trigrid.cli import app
from trigrid.errors import Refused
from trigrid.job import load_job
from trigrid.launch.options import Slurm
from trigrid.launch.partitions import minutes, partition_problems, read_partitions
from trigrid.launch.shape import Shape, shape_of
from trigrid.launch.start import Mount
from trigrid.launch.submit import MEANT

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


def test_documents_show_what_is_rendered() -> None:
    assert blocks("launch-slurm.md", "bash") == [slurm_example()]
    assert blocks("launch-kubernetes.md", "yaml") == [kubernetes_example("trainjob"), kubernetes_example("jobset")]


SCRIPTS: dict[str, dict[str, Any]] = {
    "shown": {},
    "spaces": {"folder": Path("/home/my me/llm"), "environment": {"A": "b 'c'"}},
    "pyxis": {"image": "registry#trigrid:0.1", "mounts": (Mount("/data", "/data", True),), "python": "python3"},
    "apptainer": {"image": "trigrid.sif", "slurm": Slurm(container_runtime="apptainer", cpus_per_rank=4)},
    "shared": {"slurm": Slurm(exclusive=False, gpu_type="h100", setup=("module load cuda",), switches="1@5:00")},
}


@pytest.mark.parametrize("values", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_are_sound(values: dict[str, Any], tmp_path: Path) -> None:
    need("shellcheck", package="shellcheck")
    script = tmp_path / "job.sbatch"
    script.write_text(slurm_example(**values))
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_containers_see_the_folder_and_what_is_mounted() -> None:
    values = SCRIPTS["pyxis"]
    text = slurm_example(**values)
    assert f"'--container-image=registry#trigrid:0.1' --container-workdir={FOLDER}" in text
    assert f"--container-mounts={FOLDER}:{FOLDER},/data:/data:ro" in text
    assert " python3 -P -m trigrid train " in text
    text = slurm_example(**SCRIPTS["apptainer"])
    assert f"apptainer exec --nv --pwd {FOLDER} --bind {FOLDER}:{FOLDER} trigrid.sif" in text
    assert "srun --kill-on-bad-exit=1 --distribution=block --cpus-per-task=4" in text
    with pytest.raises(Refused, match="is on no mount of the container; nearest legal: --mount /elsewhere:/elsewhere"):
        slurm_example(**values | {"file": Path("/elsewhere/job.toml")})


def test_the_script_finds_the_marker_where_the_container_writes_it() -> None:
    """It runs outside: a run.out that is elsewhere there would never be requeued, one on no mount be lost."""
    values = {"image": "trigrid.sqsh", "mounts": (Mount("/scratch/me", "/out"), Mount("/data", "/data", True))}
    text = slurm_example(out="/out/runs", **values)
    assert text.count('/scratch/me/runs/"$_TRIGRID_LAUNCH/preempted.json"') == text.count("preempted.json") == 3
    assert '/out/runs/"$_TRIGRID_LAUNCH/preempted.json"' in slurm_example(out="/out/runs")
    for out in ("/data/runs", "/lost"):
        with pytest.raises(Refused, match=f"run.out = {out}: is on no mount of the container that can be written"):
            slurm_example(out=out, **values)


def test_what_stopped_in_order_does_not_start_again_though_its_exit_code_is_not_zero() -> None:
    (loop,) = re.findall(r"^for .*?^done$", slurm_example(), re.M | re.S)
    assert loop.splitlines()[1] == '    [[ -e runs/"$_TRIGRID_LAUNCH/preempted.json" ]] && break'


def test_what_slurm_would_misread_is_refused() -> None:
    for time in ("8h", "1:2:3:4", "", "1:1", "-5", "1-", "::"):
        with pytest.raises(Refused, match="--time"):
            slurm_example(Slurm(time=time))
    with pytest.raises(Refused, match="--partition = 'a b': is not one word"):
        slurm_example(Slurm(partition="a b"))
    with pytest.raises(Refused, match="--constraint = 'a#b': is not one word"):
        slurm_example(Slurm(constraint="a#b"))
    with pytest.raises(Refused, match="--time = 2: SIGUSR1 comes 120 s before the end"):
        slurm_example(Slurm(time="2"))
    for asked, told in (
        ({"slurm": Slurm(cpus_per_rank=0)}, "--cpus-per-rank = 0: must be 1 or more"),
        ({"slurm": Slurm(gpu_type="h100"), "gpus": False}, "--gpu-type = h100: means nothing for ranks on CPUs"),
        ({"mounts": (Mount("/data", "/data"),)}, "--mount = /data:/data: means nothing without a container"),
    ):
        with pytest.raises(Refused, match=told):
            slurm_example(**asked)
    with pytest.raises(Refused, match="is more than a line"):
        slurm_example(folder=Path("/home/me\nrm -rf x"))


def test_the_signal_leaves_the_time_of_grace() -> None:
    assert "#SBATCH --signal=USR1@120\n" in slurm_example()
    asked = r'grep -qs "\"checkpoint\": \"[^\"]*\", \"signal\": \"$1\"" runs/'
    assert asked in slurm_example()
    assert "if stopped_by SIGUSR1 || { stopped_by SIGTERM && preempted; }; then\n" in slurm_example()


@pytest.mark.parametrize(
    ("text", "number"),
    [("10", 10), ("10:30", 10.5), ("1:00:00", 60), ("1-00:00:00", 1440), ("7-00", 10_080), ("infinite", None)],
)
def test_times_of_slurm(text: str, number: float | None) -> None:
    assert minutes(text) == number


def test_partitions_as_sinfo_tells_them() -> None:
    first, second = read_partitions("gpu*|1-00:00:00|4|gpu:h100:8(S:0-1),nic:2|up\nold|infinite|1|gpu:2|down\n")
    assert (first.partition, first.default, first.count, first.gpus, first.up) == ("gpu", True, 4, {"h100": 8}, True)
    assert (second.default, second.gpus, second.up) == (False, {"": 2}, False)


@pytest.mark.parametrize(
    ("partition", "told"),
    [("gpu,old", []), ("old,gpu", []), ("gpu,odl", ["odl"]), ("old", ["old"])],
)
def test_of_several_partitions_one_is_enough(partition: str, told: list[str]) -> None:
    there = read_partitions("gpu*|1-00:00:00|4|gpu:h100:8(S:0-1),nic:2|up\nold|infinite|1|gpu:8|down\n")
    problems = partition_problems(there, Slurm(partition=partition), Shape(1, 8), gpus=True)
    assert [problem.value for problem in problems] == told


def test_shapes() -> None:
    job = load_job(TINY, env={})
    assert shape_of(job, None, None) == Shape(1, 8)
    assert shape_of(job, 2, None) == shape_of(job, None, 4) == shape_of(job, 2, 4) == Shape(2, 4)
    wide = load_job(TINY, ("--cluster.gpus_per_node", "2"), env={})
    assert shape_of(wide, None, None) == Shape(4, 2)
    odd = load_job(TINY, ("--cluster.gpus_per_node", "3"), env={})
    with pytest.raises(Refused, match=r"8 ranks do not fill nodes of 3 .*nearest legal: 1, 2, 4"):
        shape_of(odd, None, None)
    # A job that says itself that its tensor parallelism crosses nodes has been warned of it.
    assert shape_of(load_job(TINY, ("--cluster.gpus_per_node", "1"), env={}), 8, None) == Shape(8, 1)


def launch(*words: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        app(["launch", str(TINY), *words], exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--on", "slurm"), "--on = sbatch: Slurm's sbatch is not installed on this machine"),
        (("--on", "kubernetes", "--container", "x", "--mount", "a:/a"), "--on = kubectl: kubectl is not installed"),
        (("--on", "kubernetes"), "--container = not given: pods need an image"),
        (("--on", "local", "--partition", "x"), "--partition = x: means nothing on local; nearest legal: --on slurm"),
        (("--on", "slurm", "--queue", "x"), "--queue = x: means nothing on slurm; nearest legal: --on kubernetes"),
        (("--on", "slurm", "--max-restarts", "-1"), "--max-restarts = -1: must be 0 or more"),
        (("--on", "slurm", "--partitoin", "x"), "partitoin = x: there is no such key"),
    ],
)
def test_mistakes(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refused) as refused:
        launch(*words)
    assert told in str(refused.value)
    assert capsys.readouterr().out == ""


def test_a_dry_run_needs_no_scheduler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    launch("--on", "slurm", "--nodes", "2", "--ranks-per-node", "4", "--json", "--dry-run", "--steps", "30")
    answer = json.loads(capsys.readouterr().out)
    assert (answer["name"], answer["nodes"], answer["ranks_per_node"]) == ("tiny-3d", 2, 4)
    assert answer["text"].endswith('exit "$code"\n')
    assert f"-m trigrid train {TINY} --steps 30\n" in answer["text"]


def test_local_is_train(capsys: pytest.CaptureFixture[str]) -> None:
    launch("--on", "local", "--dry-run", "--steps", "30")
    told = capsys.readouterr().out
    assert "steps = 30\n" in told
    assert "# dp 1  pp 1  tp [6 7]" in told


def test_words_of_refusals_lead_to_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option that Slurm may refuse is one of the command."""
    with pytest.raises(SystemExit):
        app(["launch", "--help"])
    told = capsys.readouterr().out
    assert all(option in told for option in MEANT.values())


def test_a_start_knows_its_command() -> None:
    assert start().command[:5] == (f"{FOLDER}/.venv/bin/python", "-P", "-m", "trigrid", "train")
