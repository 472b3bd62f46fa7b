"""`trigrid parity` and `trigrid prove`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import Parameter

from trigrid.cli.app import JobFile, Json, Overrides, Quiet, app, examples, print_json, trainable


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
        "trigrid prove examples/llama3-405b.toml --zero 3 --rank 0",
    )
)
def prove(
    job: JobFile,
    *overrides: Overrides,
    rank: Annotated[
        int | None, Parameter(help="The rank to run; by default one in the middle of the pipeline.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the real training program of one rank of a job of any size, without GPUs and without its peers.

    State and communication are counted from the program itself and laid beside the prediction; exits with 1 where
    they differ.
    """
    from trigrid.check.prove import prove as run
    from trigrid.report.console import Console

    resolved = trainable(job, overrides)
    Console(quiet).say(f"running one rank of {resolved.parallel.world:,}: two steps, of which the second counts")
    proof = run(resolved, rank)
    if as_json:
        print_json(asdict(proof))
    else:
        print(proof)
    if not proof.holds:
        sys.exit(1)
