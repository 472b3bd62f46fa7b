"""What the documents say exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.blocks import DOCUMENTS, ROOT

from trigrid.errors import Refused
from trigrid.job import load_job
from trigrid.job.reference import TITLE, reference
from trigrid.job.sources import SHORT_FLAGS

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


@pytest.mark.parametrize("job", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_legal(job: Path) -> None:
    """R85."""
    load_job(job)


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
