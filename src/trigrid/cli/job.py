"""`trigrid init` and `trigrid schema`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trigrid.cli.app import Json, Overrides, Quiet, app, examples, print_json
from trigrid.errors import Problem, Refused


@app.command(
    help_epilogue=examples(
        "trigrid init job.toml",
        "trigrid init job.toml --model.name llama3-8b --tp 8 --global-batch 64",
    )
)
def init(
    job: Annotated[Path, Parameter(help="The file to write.")],
    *overrides: Overrides,
    force: Annotated[bool, Parameter(negative="", help="Replace the file where there is one.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a job with a comment on every key, ready to train as it is on this machine."""
    from trigrid.job.starter import starter
    from trigrid.report.console import Console

    if job.is_dir():
        raise Refused([Problem("JOB", job, "is a folder, not a file", (job / "job.toml",))])
    if job.exists() and not force:
        raise Refused([Problem("JOB", job, "there is such a file already; --force replaces it")])
    text = starter(overrides, os.environ, job.parent)
    aside = job.with_name(f".{job.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(job)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise Refused([Problem("JOB", job, f"cannot be written: {error.strerror}")]) from None
    Console(quiet).say(f"{job} is written; next:  trigrid train {job}")
    if as_json:
        print_json({"job": str(job)})


@app.command(
    help_epilogue=examples(
        "trigrid schema > job.schema.json",
        "trigrid schema --markdown",
    )
)
def schema(
    *,
    markdown: Annotated[bool, Parameter(negative="", help="Print tables for people instead.")] = False,
) -> None:
    """Print the JSON schema of job files: editors complete and check a job that begins with `#:schema FILE`."""
    from trigrid.job.reference import reference
    from trigrid.job.schema import job_schema

    if markdown:
        print(reference())
    else:
        print_json(job_schema())
