"""`trigrid parity` and `trigrid prove`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trigrid.cli.app import JobFile, Json, Overrides, Quiet, app, examples, print_json, searched_job, trainable

if TYPE_CHECKING:
    from trigrid.report.console import Console
    from trigrid.spec.job import Job


@app.command(
    help_epilogue=examples(
        "trigrid parity examples/parity.toml",
        "trigrid parity examples/parity.toml --options job --world 4 --model.tied true",
        "trigrid parity examples/parity.toml --layouts tp2pp2dp2 --zero 3 --dtype bf16",
    )
)
def parity(
    job: JobFile,
    *overrides: Overrides,
    layouts: Annotated[
        str,
        Parameter(help="`all`: every TP × PP × DP of up to WORLD processes; or a list: `tp2pp2dp2,tp8`."),
    ] = "all",
    options: Annotated[
        Literal["pairs", "job"] | None,
        Parameter(
            help="`pairs`: other options in each layout, so that every two of them meet, in a few more jobs than "
            "layouts; `job`: those of the job. By default `pairs` with `--layouts all`, else `job`."
        ),
    ] = None,
    zero: Annotated[str, Parameter(help="ZeRO stages to try, comma-separated.")] = "0,1,2,3",
    world: Annotated[int, Parameter(help="Processes to use at most.")] = 8,
    dtype: Annotated[
        Literal["fp64", "fp32", "bf16"] | None,
        Parameter(help="Number format of the comparison; left out: all of them among pairs, else fp64."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare layouts with the single process, parameter by parameter, over three steps.

    In fp64 gradients must agree to 1e-10, weights to 1e-9, the loss to 1e-12; in fp32 the first step's gradients to
    1e-5; in bf16 a layout may be 1.25 times as far from fp32 as the single process. Exits with 1 where one does not.
    """
    from trigrid.check.matrix import as_json_value, choose, run_matrix, verdict_table
    from trigrid.check.pairs import OPTIONS
    from trigrid.report.console import Console

    say = Console(quiet).say
    resolved = trainable(job, [*overrides, "--run.precision", dtype or "fp64"])
    varied = dict(OPTIONS) if (options or ("pairs" if layouts == "all" else "job")) == "pairs" else {}
    if dtype:
        varied.pop("run.precision", None)
    jobs = choose(resolved, layouts, zero, world, varied, say)
    verdicts = run_matrix(jobs, say)
    if as_json:
        print_json([as_json_value(job, verdict) for job, verdict in zip(jobs, verdicts, strict=True)])
    else:
        print(verdict_table(jobs, verdicts, varied))
    if not all(verdict.passed for verdict in verdicts):
        sys.exit(1)


@app.command(
    help_epilogue=examples(
        "trigrid prove examples/llama3-405b.toml",
        "trigrid prove examples/llama3-405b.toml --quick",
        "trigrid prove examples/llama3-405b.toml --zero 3 --ranks 0,777",
        "trigrid prove llama3-8b --gpus 64 --tp 4 --pp 2 --snapshot memory.json",
    )
)
def prove(
    *arguments: Overrides,
    gpus: Annotated[int | None, Parameter(help="GPUs to use at most, where a model is named.")] = None,
    ranks: Annotated[
        str, Parameter(help="Ranks to run, comma-separated; by default one for each kind of pipeline rank.")
    ] = "",
    snapshot: Annotated[
        Path | None, Parameter(help="Write memory over the step here, for Perfetto or chrome://tracing.")
    ] = None,
    quick: Annotated[
        bool,
        Parameter(
            negative="", help="Cut the model to one layer a stage and the step to two microbatches a pipeline rank."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the real training program of ranks of a job of any size, without GPUs and without their peers.

    ARGUMENTS are those of `trigrid plan`: a job file or a model, and flags that give values of a job. State, memory at
    the peak, communication and operations are counted in the program itself and laid beside the prediction; exits with
    1 where state, communication or operations differ.
    """
    from trigrid.check.prove import prove as run
    from trigrid.check.prove_text import proofs_json, proofs_text
    from trigrid.check.quick import quick as cut
    from trigrid.check.roles import chosen, roles
    from trigrid.report.console import Console

    console = Console(quiet)
    job = _job(arguments, gpus, console)
    job, kept = cut(job) if quick else (job, "")
    shown = chosen(job, _numbers(ranks)) if ranks else roles(job)
    if job.run.compile:
        console.say("run.compile: what runs and is counted is the program before it is compiled")
    with console.waiting("running the program"):
        proofs = run(job, shown, console.say)
    if snapshot:
        from trigrid.check.snapshot import write_snapshot

        write_snapshot(job, proofs, snapshot)
        console.say(f"{snapshot} is written; open it in https://ui.perfetto.dev")
    if as_json:
        print_json({**proofs_json(proofs), "cut_to": kept})
    else:
        print(proofs_text(proofs))
        if kept:
            print(f"\nquick form, cut to {kept}")
    if not all(proof.holds for proof in proofs):
        sys.exit(1)


def _job(arguments: Sequence[str], gpus: int | None, console: Console) -> Job:
    """The job that is asked for, if the engine can run it; what is left open of a model's layout is searched."""
    from trigrid.errors import Problem, Refused
    from trigrid.plan.scheduled import check_schedule
    from trigrid.spec.rules import check_trainable

    if arguments and arguments[0].endswith(".toml"):
        if gpus is not None:
            raise Refused([Problem("gpus", gpus, f"{arguments[0]} says how many: give tp, pp or dp")])
        return trainable(Path(arguments[0]), arguments[1:])
    stated = any(flag in ("--cp", "--parallel.cp") for flag in arguments)
    # Context parallelism is planned and not run yet.
    job = searched_job([*arguments, *(() if stated else ("--parallel.cp", "1"))], gpus)
    if problems := check_trainable(job):
        raise Refused(problems)
    check_schedule(job)
    layout, batch = job.parallel, job.batch
    console.say(
        f"{job.model.name}: TP {layout.tp} × PP {layout.pp} × DP {layout.dp}, ZeRO-{layout.zero}, {layout.schedule}, "
        f"{batch.microbatches(layout)} microbatches of {batch.micro_batch}"
    )
    return job


def _numbers(text: str) -> tuple[int, ...]:
    from trigrid.errors import Problem, Refused

    parts = [part.strip() for part in text.split(",")]
    if not all(part.lstrip("-").isdigit() for part in parts):
        raise Refused([Problem("ranks", text, "must be whole numbers with commas between them", ("0,777",))])
    return tuple(dict.fromkeys(int(part) for part in parts))
