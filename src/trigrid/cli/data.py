"""`trigrid data`: prepare token files, and look into them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from trigrid.cli.app import Json, Quiet, app, examples, print_json
from trigrid.errors import Problem, Refused

TRAINED_VOCAB = 32_000

data = App(name="data", help="Prepare token files, and look into them.")
app.command(data)


@data.command(
    help_epilogue=examples(
        "trigrid data prepare stdlib --out tokens --vocab 4096",
        "trigrid data prepare wiki/*.jsonl.gz --tokenizer t.json --out wiki",
        "trigrid data prepare hf:NAME@train --tokenizer t.model --out tokens",
    )
)
def prepare(
    *inputs: Annotated[
        str,
        Parameter(
            help="Text files, folders, JSON Lines (.jsonl, .jsonl.gz), datasets (.parquet, saved folders, hf:NAME), "
            "or stdlib: the Python standard library's own source."
        ),
    ],
    out: Annotated[Path, Parameter(help="The folder to make.")],
    tokenizer: Annotated[
        str, Parameter(help="A tokenizers JSON, SentencePiece or tiktoken file; train: train one on the text.")
    ] = "train",
    vocab: Annotated[int | None, Parameter(help="Entries of a tokenizer that is trained; 32,000 by default.")] = None,
    text_key: Annotated[str, Parameter(help="Where a JSON object or a dataset's row holds its text.")] = "text",
    validation_fraction: Annotated[float, Parameter(help="Share of the documents that is held out.")] = 0.02,
    workers: Annotated[int | None, Parameter(help="Processes; by default one for each core.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tokenise text into Megatron's indexed format, a folder that a job names in data.corpus.

    Text is streamed; a call that was stopped is continued by the same call. The files are the same for any number of
    workers.
    """
    from trigrid.data.inspect import describe, inspect
    from trigrid.data.prepare import prepare_folder
    from trigrid.data.workers import cores
    from trigrid.report.console import Console

    problems = [
        Problem(key, value, "must be at least 1", (1,))
        for key, value in (("--workers", workers), ("--vocab", vocab))
        if value is not None and value < 1
    ]
    if vocab is not None and tokenizer != "train":
        problems.append(Problem("--vocab", vocab, f"is for a tokenizer that is trained; {tokenizer} has its own"))
    if problems:
        raise Refused(problems)
    with Console(quiet).progress() as progress:
        prepare_folder(
            inputs,
            tokenizer,
            out,
            vocab=vocab or TRAINED_VOCAB,
            validation_fraction=validation_fraction,
            text_key=text_key,
            workers=workers or cores(),
            progress=progress,
        )
        made = inspect(out, 0, False, progress)
    if as_json:
        print_json(asdict(made))
    else:
        print(describe(made))


@data.command(
    help_epilogue=examples(
        "trigrid data inspect tokens",
        "trigrid data inspect tokens --samples 3 --verify",
        "trigrid data inspect megatron/corpus_text_document --json",
    ),
    name="inspect",
)
def look(
    path: Annotated[Path, Parameter(help="A prepared folder, or the prefix of a .bin and an .idx file.")],
    *,
    samples: Annotated[int, Parameter(help="Documents to show of each file.")] = 2,
    verify: Annotated[
        bool, Parameter(negative="", help="Compute the hash and compare it with the recorded one.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what is in token files: counts, lengths of documents, the largest id, the hash, and the first documents."""
    from trigrid.data.inspect import describe, inspect
    from trigrid.report.console import Console

    if samples < 0:
        raise Refused([Problem("--samples", samples, "must be at least 0", (0,))])
    with Console(quiet).progress() as progress:
        found = inspect(path, samples, verify, progress)
    if as_json:
        print_json(asdict(found))
    else:
        print(describe(found))
