"""Every code block of the documents is run, or says why not."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers.blocks import DOCUMENTS, ROOT, Block, Note, blocks, words_of
from helpers.exchanged import huggingface_folder

from trigrid.cli import app
from trigrid.data import corpus
from trigrid.job import job_from_text, load_job
from trigrid.job.starter import starter
from trigrid.train import stopping

BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
STAMP = "20261130-204043"
"""Of the runs that documents name."""
SMALL = {
    "MODEL__VOCAB": 280,
    "MODEL__HIDDEN": 32,
    "MODEL__HEADS": 8,
    "MODEL__KV_HEADS": 2,
    "MODEL__HEAD_DIM": 4,
    "MODEL__FFN": 64,
    "BATCH__SEQUENCE": 32,
    "BATCH__GLOBAL_BATCH": 4,
    "PARALLEL__TP": 1,
    "PARALLEL__PP": 1,
    "PARALLEL__DP": 1,
    "OPTIMIZER__WARMUP_STEPS": 0,
    "RUN__STEPS": 2,
    "RUN__TRACKERS": "[]",
    "RUN__VALIDATE_EVERY": 0,
}
"""The environment in which a job is trained: it changes values of its file, to those of seconds on one process."""
TABLE = """\
# nThread 1 nGpus 4
# Collective test starting: {}_perf
#   size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong
8 2 float sum -1 10.0 0.00 0.00 0 10.0 0.00 0.00 0
4000000 1000000 float sum -1 1000.0 4.00 {} 0 1000.0 4.00 {} 0
"""
"""What nccl-tests print."""
PRODUCTS = "m,n,k,dtype,tflops\n512,512,512,fp32,1\n512,512,512,bf16,2\n"
READ = {"sh", "python", "toml", "text"}
"""Languages whose blocks are run here; of others another test is to be named."""


def called(words: list[str], env: dict[str, object]) -> None:
    """`trigrid WORDS` in this process, on one rank and without handlers of signals."""
    given = {f"TRIGRID_{name}": str(value) for name, value in env.items()}
    with patch.dict(os.environ, given), patch.object(stopping, "install"), patch.object(stopping, "grant"):
        with pytest.raises(SystemExit) as ended:
            app(words, exit_on_error=False, print_error=False)
        assert not ended.value.code, words


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what documents presuppose: the examples, a run of the demo, a model of Hugging Face's, tables of
    others' measurements, a calibration."""
    folder = tmp_path_factory.mktemp("documents")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, share in (("all_reduce", "6.00"), ("all_gather", "3.00")):
        (folder / f"{name}.txt").write_text(TABLE.format(name, share, share))
    (folder / "gemms.csv").write_text(PRODUCTS)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        whole = corpus._stdlib_files
        # Of Python's own source a few files are enough.
        patched.setattr(corpus, "_stdlib_files", lambda progress: (whole(progress)[0], whole(progress)[1][:60]))
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        torch.set_num_threads(1)
        called(["init", "job.toml", "--model.heads", "8"], {})
        called(["train", "examples/tiny-3d.toml", "--quiet"], SMALL)
        (run,) = (folder / "runs").iterdir()
        for name in (f"tiny-3d-{STAMP}", f"job-{STAMP}", "NAME"):
            shutil.copytree(run, folder / "runs" / name)
        shutil.rmtree(run)
        huggingface_folder(folder / "Qwen3-0.6B", load_job(folder / "runs" / "NAME" / "job.toml").model)
        shutil.copytree(folder / "Qwen3-0.6B", folder / "path" / "to")
        called(["calibrate", "--nccl-tests", "all_reduce.txt", "--gemms", "gemms.csv", "--out", "cluster.toml"], {})
        yield folder


def test_no_block_is_overlooked() -> None:
    """A fence that is indented, or has more than a language, would be."""
    for document in DOCUMENTS:
        fences = re.findall(r"^\s*(?:```|~~~)", document.read_text(encoding="utf-8"), re.M)
        assert len(fences) == 2 * len([block for block in BLOCKS if block.document == document]), document


def test_a_block_that_nobody_runs_says_why() -> None:
    """And who is named as running it is there."""
    faults = [f"{block.where}: {fault}" for block in BLOCKS for fault in faults_of(block)]
    assert not faults, "\n".join(faults)


def faults_of(block: Block) -> Iterator[str]:
    for note in block.notes:
        if note.what == "run by":
            file, _, name = note.said.partition("::")
            path = ROOT / file
            if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
                yield f"{note.said}: there is no such test"
        if note.words and not any(note.means(command) for command in block.commands):
            yield f"no command holds one of {note.words}"
    if len(block.notes) != block.comments.count("<!--"):
        yield f"a comment that is none of `not run`, `run by` and `output of`: {block.comments}"
    if block.language == "sh":
        for command in block.commands:
            if block.note_of(command) is None and not command.startswith("trigrid "):
                yield f"{command}: is run by nobody; name the test in a comment above, or why not"
    elif not block.notes and block.language not in READ - {"text"}:
        yield f"a block of {block.language or 'no language'}: name in a comment above who runs it, or why nobody does"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_are_run_from_top_to_bottom(
    document: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each document in a folder of its own; what is not run must at least be understood."""
    here = tmp_path / "here"
    shutil.copytree(trained, here)
    monkeypatch.chdir(here)
    # As wide as a page: whoever starts the tests may have another terminal.
    monkeypatch.delenv("COLUMNS", raising=False)
    if any("trigrid init job.toml" in block.text for block in BLOCKS if block.document == document):
        (here / "job.toml").unlink()
    printed: dict[str, str] = {}

    def ran(command: str) -> str:
        words = words_of(command)
        called(words, SMALL if words[0] == "train" or "local" in words else {})
        told = capsys.readouterr()
        printed[command] = told.out + told.err
        return printed[command]

    for block in (block for block in BLOCKS if block.document == document):
        if block.language == "sh":
            for command in block.commands:
                if block.note_of(command):
                    check_understood(command)
                else:
                    ran(command)
        elif block.language == "text":
            for note in block.notes:
                if note.what == "output of":
                    check_printed(block, note, printed.get(note.said) or ran(note.said))
        elif not block.notes and block.language == "python":
            exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
        elif not block.notes and block.language == "toml":
            check_toml(block.text)


def check_understood(command: str) -> None:
    """Its flags are those of the command, and its job, if it is there, takes its overrides."""
    if not re.search(r"(^|-m |\d )trigrid ", command):
        return
    _, bound, *_ = app.parse_args(words_of(command), exit_on_error=False, print_error=False)
    job = bound.arguments.get("job")
    if job and job.exists():
        load_job(job, bound.arguments.get("overrides", ()))


def check_printed(block: Block, note: Note, told: str) -> None:
    """Its lines, and in their order; a document may leave some out."""
    print(told)
    lines = iter([line.rstrip() for line in told.splitlines()])
    for line in map(str.rstrip, block.text.splitlines()):
        same = line.strip() in ("", "…") or any(line == other for other in lines)
        assert same, f"{block.where}: `{note.said}` prints something else than: {line}"


def check_toml(text: str) -> None:
    """A job, or a part of the one that `trigrid init` writes."""
    if "[model]" in text:
        job_from_text(text)
    elif section := re.search(r"^\[.+\]\n", text, re.M):
        job_from_text(starter(["--steps", "3"], {}).replace(section[0], text))
    else:
        job_from_text(text + starter([], {}))


def test_durations_of_the_page_are_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in BLOCKS if block.language == "csv"]
    file = tmp_path / "durations.csv"
    file.write_text(block.text)
    job = str(ROOT / "examples" / "tiny-3d.toml")
    called(["simulate", job, "--durations", str(file)], {})
    assert "rank 1 |" in capsys.readouterr().out
