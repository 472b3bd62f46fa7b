"""A real Slurm on this machine's loopback: munged, slurmctld and one slurmd for each of four nodes on two leaves."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.runs import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol")
SBIN = "/usr/sbin:/sbin"
LOOKS = 5
"""At a job that is listed nowhere, before it counts as over."""
NODES = "node[1-4]"
TOPOLOGY = """\
SwitchName=leaf1 Nodes=node[1,3]
SwitchName=leaf2 Nodes=node[2,4]
SwitchName=spine Switches=leaf[1-2]
"""
CONF = """\
ClusterName=trial
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
TopologyPlugin=topology/tree
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=short Nodes={all_nodes} Default=YES MaxTime=10 GraceTime=240
PartitionName=urgent Nodes={all_nodes} PriorityTier=10
PartitionName=long Nodes=node[1-2]
PartitionName=gpu Nodes=node4
PartitionName=closed Nodes={all_nodes} State=DOWN
"""


def need(*programs: str, package: str) -> None:
    """Skip the test where one of `programs` is missing, or fail where nothing may be skipped (NO_SKIPS)."""
    missing = [program for program in programs if shutil.which(program, path=f"{os.environ['PATH']}:{SBIN}") is None]
    if missing:
        message = f"{', '.join(missing)} not installed: apt-get install {package}"
        if os.environ.get("NO_SKIPS"):
            pytest.fail(message)
        pytest.skip(message)


@dataclass(frozen=True)
class Slurm:
    """env: with which Slurm's programs, and ours, find this cluster."""

    folder: Path
    env: dict[str, str]

    def ask(self, *command: str, text: str = "") -> str:
        """Standard output of a command that must work."""
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, env=self.env)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Of a job, with the reason why it waits; empty once it is over. A job that is being requeued is listed
        nowhere for a moment."""
        command = ("squeue", "--noheader", "--format=%T %r", "--jobs", job)
        for _ in range(LOOKS):
            done = subprocess.run(command, capture_output=True, text=True, env=self.env)
            if done.stdout.strip() or "Invalid job id" in done.stderr:
                break
            time.sleep(0.5)
        return done.stdout.strip()

    def wait_for_end(self, job: str, timeout_s: float) -> None:
        wait_for(lambda: not self.state(job), timeout_s)


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """The cluster while the body of the `with` runs; then all of its processes have ended."""
    need(*PROGRAMS, package="slurm-wlm munge")
    controller, *ports = _free_ports(5)
    nodes = "\n".join(
        f"NodeName=node{number} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=8 "
        f"RealMemory=1000{' Gres=gpu:h100:4' if number == 4 else ''}"
        for number, port in enumerate(ports, 1)
    )
    conf = CONF.format(
        machine=socket.gethostname(),
        controller=controller,
        folder=folder,
        user=getpass.getuser(),
        nodes=nodes,
        all_nodes=NODES,
    )
    for name, text in (
        ("slurm.conf", conf),
        ("topology.conf", TOPOLOGY),
        ("gres.conf", f"NodeName=node4 Name=gpu Type=h100 File={folder}/gpu[0-3]\n"),
        ("cgroup.conf", "CgroupPlugin=autodetect\n"),
    ):
        (folder / name).write_text(text)
    (folder / "state").mkdir()
    for number in range(4):
        # What Slurm takes for the devices of GPUs.
        (folder / f"gpu{number}").touch()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{SBIN}"}
    munge = ("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}")
    munge += (f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log")
    daemons = [munge, ("slurmctld", "-D", "-c"), *(("slurmd", "-D", "-N", f"node{number}") for number in range(1, 5))]
    with (folder / "daemons.log").open("wb") as log, _reaped(env["SLURM_CONF"]):
        try:
            for daemon in daemons:
                subprocess.Popen(daemon, env=env, stdout=log, stderr=log, cwd=folder)
                if daemon is munge:
                    wait_for(lambda: (folder / "munge.socket").exists(), 60)
            slurm = Slurm(folder, env)
            wait_for(lambda: _idle(slurm) == 4, 120)
        except AssertionError:
            print((folder / "daemons.log").read_text()[-4000:])
            raise
        yield slurm


REAPER = """
import os, signal, sys
from pathlib import Path

sys.stdin.read()
for environ in Path("/proc").glob("[0-9]*/environ"):
    try:
        if f"SLURM_CONF={sys.argv[1]}" in environ.read_text(errors="replace").split("\\0"):
            os.kill(int(environ.parent.name), signal.SIGKILL)
    except OSError:
        pass
"""
"""Waits for the end of its standard input, and kills whatever has that cluster in its environment."""


@contextmanager
def _reaped(conf: str) -> Iterator[None]:
    """End the cluster's processes, and those of its jobs, with the `with`, and also where the tests are killed."""
    command = [sys.executable, "-c", REAPER, conf]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        reaper.communicate(timeout=60)


def _idle(slurm: Slurm) -> int:
    command = ("sinfo", "--noheader", "--partition=short", "--states=idle", "--format=%D")
    done = subprocess.run(command, capture_output=True, text=True, env=slurm.env)
    return int(done.stdout.strip() or 0)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports
