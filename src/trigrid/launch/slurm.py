"""Slurm: a job as an sbatch file that a person can read, change and submit by hand.

srun starts every rank itself, with no torchrun between: Slurm then binds, signals, counts and ends the ranks, a signal
reaches each of them once, and at 16,384 ranks its own tree of daemons starts them. What torchrun would add is a restart
of ranks on nodes that are still there, which is a loop of three lines here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import trigrid
from trigrid.errors import Problem, Refused
from trigrid.launch.options import Slurm
from trigrid.launch.partitions import minutes
from trigrid.launch.place import LAUNCH_VARIABLE, MARKER
from trigrid.launch.shape import Shape
from trigrid.launch.start import Mount, Start, assignments
from trigrid.spec.job import Job

SIGNAL = "USR1"
MARGIN_S = 60
"""Slurm looks at the clock once a minute, and sends its signal up to so much later than it was asked to."""
TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", re.ASCII)


def render_slurm(job: Job, shape: Shape, start: Start, slurm: Slurm) -> str:
    """The sbatch file. Raises Refused for what Slurm would misread, and for what would be lost."""
    options = list(_options(job, shape, start, slurm))
    if problems := list(_problems(job, start, slurm, options)):
        raise Refused(problems)
    marker = _marker(job, start)
    # Those of modules and of conda read variables that are not set.
    setup = ("set +u", *slurm.setup, "set -u") if slurm.setup else ()
    lines = ["#!/usr/bin/env bash", f"# {_title(job, shape, start)}", f"# Written by trigrid {trigrid.__version__}."]
    lines += [f"#SBATCH {option}" for option in options]
    lines += ["set -euo pipefail", "", *_meeting(marker), *assignments(start.environment), *setup, ""]
    lines += [*_ranks(start, slurm), "", *_run(start.restarts, marker), "", *_ending(marker)]
    return "\n".join([*lines, ""])


def _problems(job: Job, start: Start, slurm: Slurm, options: Sequence[str]) -> Iterator[Problem]:
    signal_s = _signal_s(job)
    if slurm.time is not None and not TIME.fullmatch(slurm.time):
        reason = (
            "is no time of Slurm: minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]"
        )
        yield Problem("--time", slurm.time, reason, ("24:00:00", "7-00"))
    elif 0 < (minutes(slurm.time) or 0) * 60 <= signal_s:
        reason = (
            f"SIG{SIGNAL} comes {signal_s} s before the end (faults.grace_s and a minute): at once, again and again"
        )
        yield Problem("--time", slurm.time, reason, (signal_s // 60 + 10,))
    if slurm.cpus_per_rank is not None and slurm.cpus_per_rank < 1:
        yield Problem("--cpus-per-rank", slurm.cpus_per_rank, "must be 1 or more", (1,))
    if slurm.gpu_type and not start.gpus:
        yield Problem("--gpu-type", slurm.gpu_type, "means nothing for ranks on CPUs", ("--device cuda",))
    if start.mounts and not start.image:
        yield Problem("--mount", start.mounts[0], "means nothing without a container", ("--container IMAGE",))
    for option in options:
        if "\n" in option:
            yield Problem("sbatch", repr(option), "is more than a line: the shell would run the rest")


def _title(job: Job, shape: Shape, start: Start) -> str:
    p = job.parallel
    nodes = f"{shape.nodes} node{'s' if shape.nodes > 1 else ''} of {shape.per_node}"
    return f"{start.name}: TP {p.tp} × PP {p.pp} × DP {p.dp} = {p.world} ranks on {nodes}."


def _options(job: Job, shape: Shape, start: Start, slurm: Slurm) -> Iterator[str]:
    yield f"--job-name={start.name}"
    named = ("partition", "account", "qos", "constraint", "reservation", "time", "switches")
    yield from (f"--{name}={_word(name, value)}" for name in named if (value := getattr(slurm, name)) is not None)
    yield f"--nodes={shape.nodes}"
    yield f"--ntasks-per-node={shape.per_node}"
    if slurm.cpus_per_rank:
        yield f"--cpus-per-task={slurm.cpus_per_rank}"
    if start.gpus:
        kind = f"{_word('gpu-type', slurm.gpu_type)}:" if slurm.gpu_type else ""
        yield f"--gres=gpu:{kind}{shape.per_node}"
    if slurm.exclusive:
        yield "--exclusive"
        yield "--mem=0"
    yield f"--chdir={shlex.quote(str(start.folder))}"
    yield f"--output={start.name}-%j.out"
    yield "--open-mode=append"
    yield f"--signal={SIGNAL}@{_signal_s(job)}"
    yield "--requeue"
    yield from slurm.sbatch


def _signal_s(job: Job) -> int:
    return round(job.faults.grace_s) + MARGIN_S


def _word(name: str, value: str) -> str:
    """A value that sbatch reads as one word: quotes and # mean something to it."""
    if not value or re.search(r"""[\s"'#\\]""", value):
        raise Refused([Problem(f"--{name.replace('_', '-')}", repr(value), "is not one word")])
    return value


def _mounts(start: Start) -> tuple[Mount, ...]:
    """Those that were asked for, and the folder of the start at its own path unless one of them has it. Raises Refused
    where the job file would not be seen."""
    mounts = start.mounts
    if not any(start.folder.is_relative_to(mount.target) for mount in mounts):
        mounts = (Mount(str(start.folder), str(start.folder)), *mounts)
    if not any(start.file.is_relative_to(mount.target) for mount in mounts):
        parent = start.file.parent
        raise Refused([Problem("job", start.file, "is on no mount of the container", (f"--mount {parent}:{parent}",))])
    return mounts


def _meeting(marker: str) -> Iterator[str]:
    yield "# Ranks meet on this node, the first one, at the address by which Slurm itself reaches it."
    yield 'node=$(scontrol show node "$SLURMD_NODENAME")'
    yield "node=${node##*NodeAddr=}"
    yield 'export MASTER_ADDR="${node%%[[:space:]]*}"'
    yield 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"'
    yield "# Ranks that start again under this name go on with the same run; a link of this name leads to it."
    yield f'export {LAUNCH_VARIABLE}="slurm-$SLURM_JOB_ID"'
    yield f"rm -f {marker}"


def _ranks(start: Start, slurm: Slurm) -> Iterator[str]:
    words = ["srun", "--kill-on-bad-exit=1", "--distribution=block"]
    if slurm.cpus_per_rank:
        # srun does not take it from sbatch.
        words.append(f"--cpus-per-task={slurm.cpus_per_rank}")
    before: list[str] = []
    if start.image and slurm.container_runtime == "pyxis":
        words += [f"--container-image={start.image}", f"--container-workdir={start.folder}"]
        words.append(f"--container-mounts={','.join(map(str, _mounts(start)))}")
    elif start.image:
        before = ["apptainer", "exec", *(["--nv"] if start.gpus else []), "--pwd", str(start.folder)]
        before += [word for mount in _mounts(start) for word in ("--bind", str(mount))]
        before.append(start.image)
    yield "ranks() {"
    yield f"    {shlex.join(words)} \\"
    if before:
        yield f"        {shlex.join(before)} \\"
    yield f"        {shlex.join(start.command)}"
    yield "}"


def _run(restarts: int, marker: str) -> Iterator[str]:
    yield "code=0"
    yield "ranks || code=$?"
    if restarts:
        yield f"# A rank that failed starts again with all others, up to {restarts} times, from the last checkpoint."
        yield f"for ((again = 1; code != 0 && again <= {restarts}; again++)); do"
        yield f"    [[ -e {marker} ]] && break"
        yield f'    echo "trigrid: start $again of {restarts} after a failure (exit code $code)" >&2'
        yield "    code=0"
        yield "    ranks || code=$?"
        yield "done"


def _ending(marker: str) -> Iterator[str]:
    yield "# Not the exit code but this file tells that the run was stopped by a signal and can go on. SIGTERM comes"
    yield "# with preemption, and with scancel, after which the job must not come back."
    yield f"""stopped_by() {{ grep -qs "\\"checkpoint\\": \\"[^\\"]*\\", \\"signal\\": \\"$1\\"" {marker}; }}"""
    yield """preempted() { grep -q 'PreemptTime=[0-9]' <<<"$(scontrol show job "$SLURM_JOB_ID")"; }"""
    yield f"if stopped_by SIG{SIGNAL} || {{ stopped_by SIGTERM && preempted; }}; then"
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def _marker(job: Job, start: Start) -> str:
    """The marker's path as a word of the script, which runs outside of the container. Raises Refused where a container
    has run.out on no mount that can be written: the run would end with it."""
    out = Path(job.run.out)
    if start.image:
        there = PurePosixPath(start.folder, out)
        mounts = [mount for mount in _mounts(start) if there.is_relative_to(mount.target)]
        nearest = max(mounts, key=lambda mount: len(PurePosixPath(mount.target).parts), default=None)
        if nearest is None or nearest.read_only:
            reason = "is on no mount of the container that can be written"
            raise Refused([Problem("run.out", job.run.out, reason, (f"--mount {there}:{there}",))])
        if nearest.source != nearest.target:
            out = Path(nearest.source, there.relative_to(nearest.target))
    return f"{shlex.quote(str(out))}/" + f'"${LAUNCH_VARIABLE}/{MARKER}"'
