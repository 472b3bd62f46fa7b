"""`trigrid generate`."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trigrid.cli.app import Json, Quiet, app, examples, print_json
from trigrid.cli.checkpoint import CheckpointPath, TokenizerFile
from trigrid.errors import Problem, Refused
from trigrid.spec.rules import LARGEST_SEED

if TYPE_CHECKING:
    from trigrid.report.console import Console
    from trigrid.spec.job import Job


@app.command(
    help_epilogue=examples(
        'trigrid generate runs/tiny --prompt "def main():"',
        'trigrid generate runs/tiny --prompt "import" --temperature 0 --tokens 40',
        'trigrid generate imported --prompt "Once" --top-k 50 --seed 7 --json',
    )
)
def generate(
    path: CheckpointPath,
    *,
    prompt: Annotated[str, Parameter(help="The beginning of the text; empty: a new text.")],
    tokens: Annotated[int, Parameter(help="Most tokens to add; the end of a text ends it earlier.")] = 100,
    temperature: Annotated[
        float, Parameter(help="Above 0: tokens are drawn, the lower the likelier ones; 0: always the likeliest one.")
    ] = 0.8,
    top_k: Annotated[int, Parameter(help="Draw from so many likeliest tokens alone; 0: from all.")] = 0,
    seed: Annotated[int, Parameter(help="Of the draws.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Parameter(help="Where to compute; auto: on a GPU if any.")
    ] = "auto",
    tokenizer: TokenizerFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let a checkpoint of any layout go on with a text, in one process.

    Each token is computed from the whole text before it, nothing is kept: long texts are slow. Of a text longer than
    the model's context only its end counts.
    """
    import torch

    from trigrid.checkpoint.reading import find_checkpoint, find_tokenizer, job_of, open_sound
    from trigrid.checkpoint.text import GrowingText, load_model
    from trigrid.data.tokenizer import check_fits, load_tokenizer
    from trigrid.models.generate import Sampling
    from trigrid.models.generate import generate as run
    from trigrid.report.console import Console

    _check(prompt, tokens, temperature, top_k, seed)
    console = Console(quiet)
    found = find_checkpoint(path)
    with console.waiting(f"verifying {found}"):
        reader = open_sound(found)
    job = job_of(found, reader.manifest)
    file = tokenizer or find_tokenizer(found, job)
    if file is None:
        raise Refused(
            [Problem("--tokenizer", "(not given)", f"needed: {found} does not say which tokenizer it is for")]
        )
    words = load_tokenizer(file, 1)
    check_fits(words, file, job.model.vocab)
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused([Problem("--device", device, "there is no CUDA device here", ("cpu",))])
    chosen = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    ids = [int(token) for token in words.encode_batch([prompt])[0]] or [words.separator]
    _warn(console, len(ids), tokens, job)

    with console.progress() as progress:
        model = load_model(reader, chosen, progress)
    growing, made, text = GrowingText(words, ids), list[int](), ""
    drawn = run(model, ids, Sampling(temperature=temperature, top_k=top_k, seed=seed))
    if not as_json:
        print(prompt, end="", flush=True)
    with console.progress() as progress:
        for token in islice(takewhile(lambda token: token != words.separator, drawn), tokens):
            made.append(token)
            piece = growing.add(token)
            text += piece
            if as_json:
                progress("writing (tokens)", len(made), tokens)
            else:
                print(piece, end="", flush=True)
    text += (rest := growing.end())
    if as_json:
        print_json({"prompt": prompt, "text": text, "tokens": made, "ended": len(made) < tokens, "path": str(found)})
    else:
        print(rest)


def _warn(console: Console, prompt: int, tokens: int, job: Job) -> None:
    """Say where the model will not see all of the text, or sees places that its run never trained."""
    context, sequence = job.model.context, job.batch.sequence
    if prompt > context:
        console.warn(f"the prompt has {prompt:,} tokens, of which the model sees the last {context:,}")
    elif prompt + tokens > context:
        console.warn(f"after {context:,} tokens the model sees the last {context:,} alone")
    if sequence < min(prompt + tokens, context):
        console.warn(
            f"the job that wrote this checkpoint has sequences of {sequence:,} tokens; later places may be untrained"
        )


def _check(prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> None:
    problems = [] if tokens >= 1 else [Problem("--tokens", tokens, "must be at least 1", (1,))]
    if not 0 <= temperature < float("inf"):
        problems.append(Problem("--temperature", temperature, "must be a number from 0 on", (0,)))
    if not 0 <= seed <= LARGEST_SEED:
        problems.append(Problem("--seed", seed, f"must be from 0 to {LARGEST_SEED}", (0,)))
    if not prompt.isprintable() and any("\ud800" <= character <= "\udfff" for character in prompt):
        problems.append(Problem("--prompt", ascii(prompt), "is no text in this terminal's encoding"))
    if top_k < 0:
        problems.append(Problem("--top-k", top_k, "must be at least 0", (0,)))
    if problems:
        raise Refused(problems)
