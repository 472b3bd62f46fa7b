"""What the documents say exists."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from trigrid.job import load_job
from trigrid.spec.job import Job

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_job_page_names_every_key() -> None:
    sections = dict(re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "job.md").read_text(), re.M | re.S))
    assert list(sections) == ["model", "parallel", "cluster", "batch", "optimizer", "data", "run"]
    for section, text in sections.items():
        rows = re.findall(r"^\| (`.*?`) \|", text, re.M)
        told = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
        assert told == {field.name for field in fields(get_type_hints(Job)[section])}, section


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_name_jobs_that_load(document: Path) -> None:
    """Every `trigrid …` line of a code block: its job and its overrides are accepted."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.M | re.S):
        for line in block.splitlines() if not language else []:
            words = shlex.split(line.partition("#")[0])
            if len(words) < 3 or "trigrid" not in words:
                continue
            job, *rest = words[words.index("trigrid") + 2 :]
            assert (ROOT / job).is_file(), line
            own = {"--dry-run": 1, "--layouts": 2, "--dtype": 2, "--rank": 2, "--world": 2}
            overrides = []
            while rest:
                taken = own.get(rest[0], 0)
                overrides += [] if taken else rest[:2]
                rest = rest[taken or 2 :]
            load_job(ROOT / job, overrides)


@pytest.mark.parametrize("job", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_legal(job: Path) -> None:
    """R85."""
    load_job(job)


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
