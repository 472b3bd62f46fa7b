"""megatron-core's own reader accepts our token files, and we read what its builder writes.

It is installed alone (`--no-deps`) into pytest's cache folder. Of its dependencies the module needs torch, numpy and
packaging, which are here; no stand-ins. Like `make test` itself this
needs a package registry, once.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trigrid.data.inspect import inspect
from trigrid.data.prepare import prepare, prepare_folder
from trigrid.data.progress import Progress
from trigrid.data.tokens import TokenWriter, open_tokens
from trigrid.errors import Refused
from trigrid.spec.job import Data

VERSION = "0.16.1"
# Sequences of documents, one list each; the second file needs more than 16 bits.
WRITTEN: dict[str, list[list[list[int]]]] = {
    "uint16": [[[1, 2, 3]], [[4], [5, 60_000]], [[7, 8]]],
    "int32": [[[1, 100_000]], [[3, 4], [5], [6, 7]], [[9]]],
    "int64": [[[1]], [[2, 3]]],
}
PROGRAM = """
import json, sys
from pathlib import Path
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

task = json.loads(sys.stdin.read())
read = {}
for prefix in task["read"]:
    for mmap in (True, False):
        data = IndexedDataset(prefix, mmap=mmap)
        bounds = data.document_indices.tolist()
        documents = [numpy.concatenate([data[i] for i in range(a, b)]).tolist() for a, b in zip(bounds, bounds[1:])]
        read.setdefault(prefix, []).append({"dtype": data.index.dtype.__name__, "documents": documents})
for dtype, documents in task["write"].items():
    prefix = f"{task['folder']}/{dtype}"
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, dtype))
    for number, sequences in enumerate(documents):
        if number % 2:
            builder.add_document([id for sequence in sequences for id in sequence], list(map(len, sequences)))
        else:
            for sequence in sequences:
                builder.add_item(torch.tensor(sequence))
            builder.end_document()
    builder.finalize(prefix + ".idx")
print(json.dumps(read))
"""


@pytest.fixture(scope="session")
def megatron(request: pytest.FixtureRequest) -> Path:
    """The folder that holds the package."""
    folder = Path(request.config.cache.mkdir(f"megatron-core-{VERSION}"))  # type: ignore[union-attr]
    if not (folder / f"megatron_core-{VERSION}.dist-info").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*command, f"megatron-core=={VERSION}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder


def run_megatron(megatron: Path, folder: Path, prefixes: list[Path]) -> dict[str, list[Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=json.dumps({"read": list(map(str, prefixes)), "write": WRITTEN, "folder": str(folder)}),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(megatron)},
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_they_read_ours_and_we_read_theirs(
    megatron: Path, make_corpus: Callable[..., Path], tokenizer_file: Path, tmp_path: Path, quiet: Progress
) -> None:
    made = prepare_folder(
        [str(make_corpus())],
        str(tokenizer_file),
        tmp_path / "out",
        vocab=0,
        validation_fraction=0.2,
        text_key="text",
        workers=1,
        progress=quiet,
    )
    several = tmp_path / "several"
    with TokenWriter(several, 100_000, longest_sequence=2) as writer:
        for document in ([1, 2, 99_999], [4], [5, 6, 7, 8, 9]):
            writer.add(document)
            writer.end_document()
    ours = [made.train[0].prefix, made.validation[0].prefix, several]
    read = run_megatron(megatron, tmp_path, ours)
    for prefix in ours:
        file = open_tokens(prefix)
        bounds = [file.begins(document) for document in range(file.document_count + 1)]
        documents = [file.tokens[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]
        assert read[str(prefix)] == [{"dtype": file.tokens.dtype.name, "documents": documents}] * 2
    assert read[str(several)][0]["documents"] == [[1, 2, 99_999], [4], [5, 6, 7, 8, 9]]

    for dtype, documents in WRITTEN.items():
        flat = [[id for sequence in document for id in sequence] for document in documents]
        file = open_tokens(tmp_path / dtype)
        assert file.tokens.dtype.name == dtype
        assert file.lengths.tolist() == [len(sequence) for document in documents for sequence in document]
        bounds = [file.begins(document) for document in range(file.document_count + 1)]
        assert [file.tokens[a:b].tolist() for a, b in itertools.pairwise(bounds)] == flat
        (found,) = inspect(tmp_path / dtype, 0, False, quiet).files
        assert found.largest_id == max(map(max, flat))
        corpus = (str(tmp_path / f"{dtype}.bin"),)
        job = prepare(Data(corpus=corpus, validation_fraction=0.1, cache=str(tmp_path / "cache")), 200_000, quiet)
        assert (job.train[0].stop_document, job.validation[0].first_document) == (len(flat) - 1, len(flat) - 1)
        assert (job.train[0].tokens, job.validation[0].tokens) == (sum(map(len, flat[:-1])), len(flat[-1]))
    (tmp_path / "int32.bin").write_bytes((tmp_path / "int32.bin").read_bytes()[:-4])
    with pytest.raises(Refused, match=r"int32\.bin: is truncated: 28 bytes; 8 tokens of 4 bytes: 32"):
        open_tokens(tmp_path / "int32")
