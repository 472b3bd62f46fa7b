"""`trigrid checkpoint`: look into checkpoints, verify them, exchange them with transformers, cut them anew."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from trigrid.cli.app import Json, Overrides, Quiet, app, examples, print_json
from trigrid.errors import Problem, Refused

if TYPE_CHECKING:
    from trigrid.checkpoint.reading import BoxReader
    from trigrid.report.console import Console

checkpoint = App(name="checkpoint", help="Look into checkpoints, verify them, exchange them, cut them anew.")
app.command(checkpoint)

CheckpointPath = Annotated[
    Path, Parameter(help="A checkpoint, or the folder of a run, whose newest complete checkpoint is meant.")
]
Destination = Annotated[Path, Parameter(help="The folder to make; it must not be there yet.")]
TokenizerFile = Annotated[
    Path | None, Parameter(help="A tokenizers JSON, SentencePiece or tiktoken file; left out: the run's.")
]


@checkpoint.command(
    help_epilogue=examples(
        "trigrid checkpoint inspect runs/tiny",
        "trigrid checkpoint inspect runs/tiny/checkpoints/step-00000040 --json",
    )
)
def inspect(path: CheckpointPath, *, as_json: Json = False) -> None:
    """Show what a checkpoint holds: where the run stood, model, layout, files, and parameters.

    Only the manifest and the job are read; `trigrid checkpoint verify` reads every file.
    """
    from trigrid.checkpoint.describe import as_json_value, describe
    from trigrid.checkpoint.manifest import read_manifest
    from trigrid.checkpoint.reading import find_checkpoint, job_of

    found = find_checkpoint(path)
    manifest = read_manifest(found)
    job = job_of(found, manifest)
    if as_json:
        print_json(as_json_value(found, manifest, job))
    else:
        print(describe(found, manifest, job))


@checkpoint.command(
    help_epilogue=examples(
        "trigrid checkpoint verify runs/tiny",
        "trigrid checkpoint verify imported --json",
    )
)
def verify(path: CheckpointPath, *, as_json: Json = False, quiet: Quiet = False) -> None:
    """Compare every file of a checkpoint with its digest, and every shape with the manifest's and the model's.

    Exits with 1 where anything differs, and names it.
    """
    from trigrid.checkpoint.reading import faults_of, find_checkpoint
    from trigrid.report.console import Console

    found = find_checkpoint(path)
    with Console(quiet).waiting(f"reading {found}"):
        manifest, faults = faults_of(found)
    if as_json:
        print_json({"path": str(found), "sound": not faults, "faults": faults})
    elif faults:
        print("\n".join(faults))
    else:
        assert manifest is not None
        print(f"{found}: sound, {_files(len(manifest.files), manifest.bytes)}")
    if faults:
        sys.exit(1)


@checkpoint.command(
    help_epilogue=examples(
        "trigrid checkpoint convert Qwen3-0.6B imported",
        "trigrid checkpoint convert runs/tiny exported",
        "trigrid checkpoint convert imported exported --dtype fp32 --max-file-gb 2",
    )
)
def convert(
    src: Annotated[Path, Parameter(help="A Hugging Face folder, a checkpoint, or the folder of a run.")],
    dst: Destination,
    *,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32", "fp64"] | None,
        Parameter(help="Number format of an export; left out: the one that the run computed in."),
    ] = None,
    max_file_gb: Annotated[float | None, Parameter(help="Size of an export's files, in GB; 5 by default.")] = None,
    tokenizer: TokenizerFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Import a Hugging Face folder as a checkpoint, or export a checkpoint of any layout to transformers.

    The direction follows from what SRC is. Tensors pass one piece at a time. An import has weights alone, at step 0,
    from which `trigrid train --resume` begins with moments of zero.
    """
    from trigrid.checkpoint.from_huggingface import import_folder, is_huggingface
    from trigrid.checkpoint.manifest import NAME, read_manifest
    from trigrid.report.console import Console

    console = Console(quiet)
    if is_huggingface(src) and not (src / NAME).is_file():
        flags = (("--dtype", dtype), ("--max-file-gb", max_file_gb), ("--tokenizer", tokenizer))
        if given := [Problem(flag, value, "is for an export; SRC is imported") for flag, value in flags if value]:
            raise Refused(given)
        with console.progress() as progress:
            job = import_folder(src, dst, progress)
        files, size = read_manifest(dst).files, read_manifest(dst).bytes
        console.say(f"{dst}: {job.model.name} in {_files(len(files), size)}")
        if as_json:
            print_json({"direction": "import", "path": str(dst), "files": [f.name for f in files], "bytes": size})
        return
    if max_file_gb is not None and not 0 < max_file_gb < float("inf"):
        raise Refused([Problem("--max-file-gb", max_file_gb, "must be a number above 0")])
    _export(src, dst, dtype, max_file_gb, tokenizer, as_json, console)


def _export(
    src: Path,
    dst: Path,
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None,
    max_file_gb: float | None,
    tokenizer: Path | None,
    as_json: bool,
    console: Console,
) -> None:
    from trigrid.checkpoint.reading import find_tokenizer, job_of
    from trigrid.checkpoint.to_huggingface import SHARD_BYTES, export_folder

    reader = _opened(src, dst, console)
    if tokenizer is None:
        tokenizer = find_tokenizer(reader.folder, job_of(reader.folder, reader.manifest))
        if tokenizer is None or not tokenizer.is_file():
            gone = "no tokenizer is known" if tokenizer is None else f"the tokenizer {tokenizer} is gone"
            console.warn(f"{gone}: the export has none, and names no end of a text; --tokenizer gives one")
            tokenizer = None
    shard_bytes = SHARD_BYTES if max_file_gb is None else int(max_file_gb * 1e9)
    with console.progress() as progress:
        made = export_folder(reader, dst, progress, dtype=dtype, tokenizer=tokenizer, shard_bytes=shard_bytes)
    console.say(f"{dst}: {made.dtype} weights in {_files(len(made.files), made.bytes)}")
    if as_json:
        print_json({"direction": "export", "path": str(dst), **asdict(made)})


@checkpoint.command(
    help_epilogue=examples(
        "trigrid checkpoint reshard runs/tiny one --tp 1 --pp 1 --dp 1",
        "trigrid checkpoint reshard imported cut --tp 8 --zero 3",
    )
)
def reshard(
    src: CheckpointPath, dst: Destination, *overrides: Overrides, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Write a checkpoint again with the files of another layout; every number stays as it is, bit for bit.

    A resumed run does not need it, as it reads the checkpoint of any layout: files that fit its ranks only read faster.
    """
    from trigrid.checkpoint.manifest import read_manifest
    from trigrid.checkpoint.reshard import reshard as run
    from trigrid.report.console import Console

    console = Console(quiet)
    reader = _opened(src, dst, console)
    with console.progress() as progress:
        job = run(reader, dst, overrides, progress)
    files, size = read_manifest(dst).files, read_manifest(dst).bytes
    console.say(f"{dst}: {_files(len(files), size)} for a world of {job.parallel.world:,}")
    if as_json:
        print_json({"path": str(dst), "world": job.parallel.world, "files": [file.name for file in files]})


def _opened(src: Path, dst: Path, console: Console) -> BoxReader:
    """A reader of the checkpoint that `src` means, found sound; `dst` is looked at before that takes its time."""
    from trigrid.checkpoint.reading import find_checkpoint, open_sound
    from trigrid.checkpoint.writing import check_new

    found = find_checkpoint(src)
    check_new(dst, 0)
    with console.waiting(f"verifying {found}"):
        return open_sound(found)


def _files(count: int, size: int) -> str:
    return f"{count:,} file{'s' if count != 1 else ''}, {size / 1e6:,.1f} MB"
