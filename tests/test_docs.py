"""What the documents say exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trigrid.cli import app
from trigrid.errors import Refused
from trigrid.job import job_from_text, load_job
from trigrid.job.reference import TITLE, reference
from trigrid.job.sources import SHORT_FLAGS
from trigrid.job.starter import starter

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


JOB_PAGE = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
WRONG_JOB = """\
[model]
name = "llama3-8b"
[parallel]
dp = 4

[training]
local_batch_size = 4
[batch]
global_batch = 30
sequence = 1024
micro_batch = 2
[optimizer]
warmup_steps = 50
[run]
steps = 50
"""


def test_the_job_page_ends_with_the_tables_of_the_code() -> None:
    prose, title, _ = JOB_PAGE.partition(TITLE)
    same = f"{prose}{reference()}\n" == JOB_PAGE
    assert same, f"docs/job.md: replace everything from {title!r} on with what `trigrid schema --markdown` prints"


def test_the_job_page_shows_messages_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(WRONG_JOB, encoding="utf-8")
    with pytest.raises(Refused) as refused:
        load_job(tmp_path / "job.toml", ["--min-lr", "1e-5"], env={})
    shown = [
        line for block in re.findall(r"^```text\n(.*?)^```$", JOB_PAGE, re.M | re.S) for line in block.splitlines()
    ]
    assert shown
    assert sorted(shown) == sorted(str(refused.value).replace(f"{tmp_path}/", "").splitlines())


def test_the_job_page_names_every_short_form() -> None:
    (row,) = [line for line in JOB_PAGE.splitlines() if line.startswith("| short forms |")]
    assert {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", row)} == SHORT_FLAGS.keys()


def test_the_example_of_a_blend_is_a_job() -> None:
    (block,) = [b for b in re.findall(r"^```toml\n(.*?)^```$", JOB_PAGE, re.M | re.S) if "weights" in b]
    job = job_from_text(starter(["--steps", "3"], {}).replace("[data]\n", block))
    assert job.data.weights == (1.0, 1.0, 6.0)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_name_jobs_that_load(document: Path, tmp_path: Path) -> None:
    """Every `trigrid …` line of a code block is understood; its job and its overrides are accepted."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.M | re.S):
        for line in block.splitlines() if not language else []:
            words = shlex.split(line.partition("#")[0])
            if len(words) < 3 or "trigrid" not in words:
                continue
            words = words[words.index("trigrid") + 1 :]
            command, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
            job, overrides = bound.arguments.get("job"), bound.arguments.get("overrides", ())
            if command.__name__ == "init":
                (tmp_path / job).write_text(starter(overrides, {}))
            elif job:
                load_job(tmp_path / job if (tmp_path / job).exists() else ROOT / job, overrides)


@pytest.mark.parametrize("job", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_legal(job: Path) -> None:
    """R85."""
    load_job(job)


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
