"""Preparing and reading token files, beside the field's own libraries.

    pip install --no-deps --target PEERS megatron-core
    python benchmarks/data.py --peers PEERS

Preparing: the same documents as JSON Lines, the same tokenizer, two processes each. Hugging Face `datasets` maps the
tokenizer over its own loader and writes Arrow; Megatron's pool feeds its IndexedDatasetBuilder. Reading: batches of
random samples of the same token file, in this process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from paired import compare
from tokenizers import Tokenizer

from trigrid.data.corpus import resolve
from trigrid.data.dataset import TokenDataset
from trigrid.data.loader import Loader
from trigrid.data.prepare import Prepared, prepare_folder
from trigrid.data.tokens import TokenWriter, open_tokens

WORKERS = 2
VOCAB = 8192
SEQUENCE, ROWS, BATCHES = 2048, 16, 64


def quiet(stage: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


def write_documents(path: Path, copies: int) -> None:
    """The standard library's source as JSON Lines, `copies` times."""
    (stdlib,) = resolve(["stdlib"], quiet)
    texts = [Path(source.path).read_text(encoding="utf-8") for source in stdlib.sources]
    with path.open("w", encoding="utf-8") as out:
        for _ in range(copies):
            for text in texts:
                out.write(json.dumps({"text": text}) + "\n")


def prepare(documents: Path, tokenizer: str, out: Path) -> Prepared:
    return prepare_folder(
        [str(documents)],
        tokenizer,
        out,
        vocab=VOCAB,
        validation_fraction=0.0,
        text_key="text",
        workers=WORKERS,
        progress=quiet,
    )


_tokenizer: Tokenizer


def _load(path: Path) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_file(str(path))


def _encode_line(line: str) -> list[int]:
    return _tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids


def preparers(documents: Path, tokenizer: Path, folder: Path, peers: bool) -> dict[str, Callable[[], int]]:
    """Each tokenises `documents` into a folder of its own and returns the number of tokens."""
    number = count()

    def trigrid() -> int:
        out = folder / f"trigrid-{next(number)}"
        made = prepare(documents, str(tokenizer), out)
        return sum(part.tokens for part in made.train)

    def datasets() -> int:
        import datasets

        datasets.disable_progress_bars()
        cache = folder / f"datasets-{next(number)}"
        loaded: Any = datasets.load_dataset("json", data_files=str(documents), split="train", cache_dir=str(cache))
        library = Tokenizer.from_file(str(tokenizer))

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            return {"ids": [e.ids for e in library.encode_batch_fast(batch["text"], add_special_tokens=False)]}

        encoded = loaded.map(encode, batched=True, num_proc=WORKERS, remove_columns=loaded.column_names)
        encoded.save_to_disk(str(cache / "out"))
        return sum(len(row) + 1 for row in encoded.data.column("ids"))

    def megatron() -> int:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        prefix = folder / f"megatron-{next(number)}"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        tokens = 0
        with multiprocessing.Pool(WORKERS, _load, (tokenizer,)) as pool, documents.open(encoding="utf-8") as lines:
            for ids in pool.imap(_encode_line, lines, 32):
                builder.add_document([*ids, 0], [len(ids) + 1])
                tokens += len(ids) + 1
        builder.finalize(f"{prefix}.idx")
        return tokens

    return {"trigrid": trigrid, "datasets": datasets, **({"megatron-core": megatron} if peers else {})}


class _EndOfDocument:
    """What GPTDataset asks of a tokenizer."""

    eod, pad, vocab_size, unique_identifiers = 0, -1, VOCAB, {"name": "none"}


def readers(prefix: Path, folder: Path, peers: bool) -> dict[str, Callable[[], int]]:
    """Each reads BATCHES batches of random samples, tokens and labels, and returns the number of tokens."""
    done = BATCHES * ROWS * SEQUENCE
    place = count(step=BATCHES * ROWS)
    data = TokenDataset(prefix, SEQUENCE, VOCAB)

    def reading(loader: Loader) -> Callable[[], int]:
        def read() -> int:
            start = next(place)
            for batch in range(BATCHES):
                loader.batch(start + batch * ROWS, 0, 1, ROWS)
            return done

        return read

    return {
        "trigrid": reading(Loader([data], seed=0, global_batch=ROWS)),
        "trigrid with documents": reading(Loader([data], seed=0, global_batch=ROWS, documents=True)),
        "datasets": _datasets_reader(prefix, folder, done),
        **({"megatron-core": _megatron_reader(prefix, done)} if peers else {}),
    }


def _datasets_reader(prefix: Path, folder: Path, done: int) -> Callable[[], int]:
    import datasets

    tokens = np.asarray(open_tokens(prefix).tokens)
    samples = (len(tokens) - 1) // SEQUENCE

    def rows() -> Iterator[dict[str, Any]]:
        for sample in range(samples):
            yield {"ids": tokens[sample * SEQUENCE : (sample + 1) * SEQUENCE + 1].astype(np.int32)}

    packed: Any = datasets.Dataset.from_generator(rows, cache_dir=str(folder / "packed")).with_format("torch")
    order = np.random.default_rng(0).permutation(samples)

    def read() -> int:
        for batch in range(BATCHES):
            ids = packed[order[np.arange(batch * ROWS, (batch + 1) * ROWS) % samples]]["ids"].long()
            ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        return done

    return read


def _megatron_reader(prefix: Path, done: int) -> Callable[[], int]:
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE,
        split="1,0,0",
        tokenizer=_EndOfDocument(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low = GPTDataset.build_low_level_dataset(str(prefix), config)
    documents = np.arange(GPTDataset.numel_low_level_dataset(low), dtype=np.int32)
    data = GPTDataset(low, str(prefix), documents, None, Split.train, config)

    def read() -> int:
        for batch in range(BATCHES):
            samples = [data[(batch * ROWS + row) % len(data)] for row in range(ROWS)]
            torch.stack([sample["tokens"] for sample in samples])
            torch.stack([sample["labels"] for sample in samples])
        return done

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder that megatron-core is installed in")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--copies", type=int, default=2, help="how often the standard library's source is taken")
    arguments = parser.parse_args()
    if arguments.peers:
        warnings.filterwarnings("ignore")
        sys.path.insert(0, str(arguments.peers.resolve()))
    else:
        print("without --peers: megatron-core is left out")
    folder = Path(tempfile.mkdtemp(prefix="trigrid-benchmark-"))
    try:
        documents = folder / "documents.jsonl"
        write_documents(documents, arguments.copies)
        first = prepare(documents, "train", folder / "first")
        tokenizer = folder / "first" / "tokenizer.json"
        prepared = preparers(documents, tokenizer, folder, arguments.peers is not None)
        compare(f"preparing {documents.stat().st_size / 1e6:.0f} MB", "tokens", prepared, arguments.rounds)

        tokens = np.asarray(open_tokens(first.train[0].prefix).tokens)
        with TokenWriter(folder / "large", VOCAB) as writer:
            for _ in range(max(1, 50_000_000 // len(tokens))):
                for part in np.array_split(tokens, 2000):
                    writer.add(part)
                    writer.end_document()
        compare("reading", "tokens", readers(folder / "large", folder, arguments.peers is not None), arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
