"""A line of 200 MB: text passes through in bounded memory, JSON Lines are refused in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from trigrid.data.tokens import open_tokens

LINE_BYTES = 200_000_000
PROGRAM = (
    "import resource, sys\n"
    "from pathlib import Path\n"
    "from trigrid.data.prepare import prepare_folder\n"
    "from trigrid.errors import Refused\n"
    "begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    "try:\n"
    "    prepare_folder([sys.argv[1]], sys.argv[2], Path(sys.argv[3]), vocab=0, validation_fraction=0.0,\n"
    "                   text_key='text', workers=1, progress=lambda *seen: None)\n"
    "except Refused as refused:\n"
    "    print(refused)\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin)\n"
)


def prepare_in_a_process(path: Path, tokenizer: Path, out: Path) -> tuple[str, int]:
    """What it said, and by how many bytes its memory grew."""
    command = [sys.executable, "-c", PROGRAM, str(path), str(tokenizer), str(out)]
    *said, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return "\n".join(said), int(grown) * 1024


def write_tokenizer(path: Path, cuttable: bool) -> Path:
    """A quick one: every word, or the whole text, is one unknown token."""
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "?": 1}, unk_token="?"))
    tokenizer.add_special_tokens(["</s>"])
    if cuttable:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json", cuttable=True)


def test_a_line_of_text(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "line.txt"
    words = b"many letters in a long word " + b"x" * 972
    path.write_bytes(words * (LINE_BYTES // len(words)))
    said, grown_bytes = prepare_in_a_process(path, tokenizer, tmp_path / "out")
    assert said == ""
    assert grown_bytes < 150e6
    file = open_tokens(tmp_path / "out" / "train")
    assert (file.document_count, len(file.tokens)) == (1, LINE_BYTES // len(words) * 6 + 2)


def test_a_line_of_json(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "line.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "short"}\n{"text": "')
        file.write(b"x" * LINE_BYTES)
        file.write(b'"}\n{"text": "after"}\n')
    said, grown_bytes = prepare_in_a_process(path, tokenizer, tmp_path / "out")
    assert said == f"{path}:2: data.corpus = {path}: the line is longer than 67,108,864 bytes, the limit"
    assert grown_bytes < 300e6
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_a_document_that_must_be_whole(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "whole.json", cuttable=False)
    path = tmp_path / "line.txt"
    path.write_bytes(b"word " * 2_000_000)
    said, grown_bytes = prepare_in_a_process(path, tokenizer, tmp_path / "out")
    assert said.startswith(f"data.corpus = {path}: holds a document of more than 8,388,608 bytes")
    assert grown_bytes < 150e6
