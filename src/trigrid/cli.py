"""The command line: one thin function per command, importing what it needs when it runs.

Data goes to standard output, everything said along the way to standard error.
Exit codes: 0 done, 1 the job ran and failed or a law is broken, 2 a mistake in what was asked.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import App, Parameter

import trigrid
from trigrid.errors import Refused, RunFailed, TrigridError
from trigrid.launch.place import RUN_DIR_VARIABLE
from trigrid.spec.job import Job

app = App(
    name="trigrid",
    version=trigrid.__version__,
    help="Plan, prove and run 3D-parallel training of large language models.",
    help_format="markdown",
)

JobFile = Annotated[Path, Parameter(help="The job, a TOML file.")]
Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True, help="Values that replace those of the file: `--parallel.tp 4`, or short `--tp 4`."
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on standard output.")]


@app.command
def train(
    job: JobFile,
    *overrides: Overrides,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Print the resolved job and the grid, start nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a job on this machine, or as a rank of a launcher that started this process.

    Started by hand it runs torchrun for all ranks of the layout. Under torchrun or srun it joins as one of their ranks.

    **Examples**

    ```
    trigrid train examples/tiny-3d.toml
    trigrid train examples/tiny-3d.toml --parallel.tp 4 --parallel.pp 1 --steps 20
    trigrid train examples/tiny-3d.toml --dry-run
    torchrun --nproc-per-node 8 -m trigrid train examples/tiny-3d.toml
    ```
    """
    from trigrid.grid import golden_rules, grid_of
    from trigrid.job import dump_job
    from trigrid.launch.place import find_place
    from trigrid.report.console import say
    from trigrid.spec.rules import warnings

    place = find_place(os.environ)
    resolved = _trainable(job, overrides, place.world if place else None)
    grid = grid_of(resolved)
    first = place is None or place.rank == 0
    if first and RUN_DIR_VARIABLE not in os.environ:
        for warning in [*warnings(resolved), *golden_rules(grid)]:
            say(f"warning: {warning}")
    if dry_run:
        if not first:
            return
        if as_json:
            _print_json({"job": asdict(resolved), "groups": {a: grid.groups(a) for a in ("tp", "pp", "zero", "dp")}})
        else:
            print(f"{dump_job(resolved)}\n# the grid: {grid.world} ranks\n{_commented(grid.picture())}")
        return

    from trigrid.train import local, trainer

    if place is None and resolved.parallel.world > 1:
        local.check_room(resolved)
        run_dir = trainer.open_run(resolved, job.stem)
        say(f"starting {resolved.parallel.world} processes on this machine")
        local.run_local(resolved, ("train", str(job), *overrides, *(["--json"] if as_json else [])), run_dir)
        return
    summary = trainer.run_rank(resolved, job.stem, place)
    if summary is not None:
        if as_json:
            _print_json(asdict(summary))
        else:
            print(trainer.describe(summary))


@app.command
def parity(
    job: JobFile,
    *overrides: Overrides,
    layouts: Annotated[
        str,
        Parameter(help="`all`: every TP × PP × DP of 1, 2, 4 … WORLD processes; or a list: `tp2pp2dp2,tp8`."),
    ] = "all",
    zero: Annotated[str, Parameter(help="ZeRO stages to try, comma-separated.")] = "0,1,2,3",
    world: Annotated[int, Parameter(help="Processes to use at most.")] = 8,
    dtype: Annotated[Literal["fp64", "fp32", "bf16"], Parameter(help="Number format of the comparison.")] = "fp64",
    as_json: Json = False,
) -> None:
    """Compare layouts with the single process, parameter by parameter, over three steps.

    In fp64 gradients must agree to 1e-10, weights to 1e-9, the loss to 1e-12; in fp32 the first step's gradients to
    1e-5; in bf16 a layout may be 1.25 times as far from fp32 as the single process. Exits with 1 where one does not.

    **Examples**

    ```
    trigrid parity examples/parity.toml
    trigrid parity examples/parity.toml --layouts tp2pp2dp2 --zero 3
    trigrid parity examples/parity.toml --world 4 --dtype fp32 --model.tied true
    ```
    """
    from trigrid.check.matrix import as_json_value, choose, run_matrix, verdict_table
    from trigrid.report.console import say

    resolved = _trainable(job, [*overrides, "--run.precision", dtype])
    verdicts = run_matrix(resolved, choose(resolved, layouts, zero, world, say), say)
    if as_json:
        _print_json([as_json_value(verdict) for verdict in verdicts])
    else:
        print(verdict_table(verdicts))
    if not all(verdict.passed for verdict in verdicts):
        sys.exit(1)


@app.command
def prove(
    job: JobFile,
    *overrides: Overrides,
    rank: Annotated[
        int | None, Parameter(help="The rank to run; by default one in the middle of the pipeline.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the real training program of one rank of a job of any size, without GPUs and without its peers.

    State and communication are counted from the program itself and laid beside the prediction; exits with 1 where
    they differ.

    **Examples**

    ```
    trigrid prove examples/llama3-405b.toml
    trigrid prove examples/llama3-405b.toml --zero 3 --rank 0
    ```
    """
    from trigrid.check.prove import prove as run
    from trigrid.report.console import say

    resolved = _trainable(job, overrides)
    say(f"running one rank of {resolved.parallel.world:,}: a step of one microbatch, then a whole one")
    proof = run(resolved, rank)
    if as_json:
        _print_json(asdict(proof))
    else:
        print(proof)
    if not proof.holds:
        sys.exit(1)


def main() -> None:
    """Entry point of the `trigrid` command."""
    try:
        app(exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        print(f"trigrid: {error}", file=sys.stderr)
        sys.exit(2)
    except TrigridError as error:
        _tell(error, f"trigrid: {error}")
        _leave(1 if isinstance(error, RunFailed) else 2)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "tokenizers"):
            raise
        print(f"trigrid: this command needs {error.name}: pip install 'trigrid[train]'", file=sys.stderr)
        _leave(2)
    except BrokenPipeError:
        # Whoever read our output has had enough of it.
        os._exit(1)
    except KeyboardInterrupt:
        print("trigrid: stopped", file=sys.stderr)
        _leave(130)
    except Exception as error:
        _tell(error, traceback.format_exc())
        _leave(1)


def _tell(error: Exception, text: str) -> None:
    """Say what went wrong; a rank of `trigrid train` leaves it where the process that started it finds and says it."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is None:
        print(text, file=sys.stderr)
        return
    from trigrid.train.failure import record

    record(Path(run_dir), int(os.environ["RANK"]), error)


def _leave(code: int) -> None:
    """Exit at once: threads of process groups that wait for ranks which are gone would hold up an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _trainable(path: Path, overrides: Sequence[str], world: int | None = None) -> Job:
    """The job of `path`, if the engine can run it."""
    from trigrid.job import load_job
    from trigrid.spec.rules import check_trainable

    job = load_job(path, overrides, world=world)
    if problems := check_trainable(job):
        raise Refused(problems)
    return job


def _commented(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines())


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))
