"""Handing a rendered job to the scheduler's own program."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from trigrid.errors import Problem, Refused, RunFailed
from trigrid.launch.options import Slurm
from trigrid.launch.partitions import QUESTION, partition_problems, read_partitions
from trigrid.launch.shape import Shape

MEANT = {
    # "Invalid account or account/partition combination": sinfo has just known the partition.
    "account": "--account",
    "partition": "--partition",
    "qos": "--qos",
    "feature": "--constraint",
    "reservation": "--reservation",
    "gres": "--gpu-type",
    "time limit": "--time",
    "node count": "--nodes",
}
"""A word of a scheduler's refusal → the option that it means."""
ANSWER_S = 120


def need(program: str, what: str) -> None:
    """Raises Refused where there is no `program` here."""
    if shutil.which(program) is None:
        reason = f"{what} is not installed on this machine, or not on PATH; --dry-run prints the file without it"
        raise Refused([Problem("--on", program, reason)])


def submit_slurm(script: str, shape: Shape, slurm: Slurm, gpus: bool) -> str:
    """Submit the sbatch file; the job's number. Raises Refused where it would be refused, or would never start."""
    need("sbatch", "Slurm's sbatch")
    there = read_partitions(_ask(QUESTION))
    if problems := list(partition_problems(there, slurm, shape, gpus)):
        raise Refused(problems)
    # The number, and behind a semicolon the cluster.
    return _ask(("sbatch", "--parsable"), script).strip().partition(";")[0]


def submit_kubernetes(manifests: str, namespace: str | None) -> str:
    """Create the objects; what kubectl says of them. Raises Refused where they are refused."""
    need("kubectl", "kubectl")
    where = ("--namespace", namespace) if namespace else ()
    return _ask(("kubectl", "create", *where, "--filename", "-"), manifests).strip()


def _ask(command: Sequence[str], text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{command[0]} has not answered within {ANSWER_S} s") from None
    except OSError as error:
        raise RunFailed(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip()
    option = next((option for word, option in MEANT.items() if word in said.lower()), None)
    if command[0] == "sbatch" and option:
        # Each of its lines says the same in other words, the last one best.
        last = said.splitlines()[-1].rpartition(": ")[2]
        raise Refused([Problem(option, "refused by Slurm", last)])
    # kubectl may have made some objects before one was refused.
    made = f"; made before that: {', '.join(done.stdout.split())}" if done.stdout.strip() else ""
    raise RunFailed(f"{' '.join(command[:2])} failed: {said}{made}")
