"""Parquet and Arrow files, saved data sets and what `datasets` streams, made here and read back."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trigrid.data import shards
from trigrid.data.corpus import resolve
from trigrid.data.documents import read_blocks
from trigrid.data.prepare import prepare_folder
from trigrid.data.progress import Progress
from trigrid.data.shards import Shard, cut_into_shards
from trigrid.errors import Refused

TEXTS = [f"row {number} é " * (number % 7) for number in range(500)]


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 5000)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "must stay empty")
    datasets.disable_progress_bars()


def parquet(path: Path) -> str:
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=37)
    return str(path)


def arrow(path: Path, stream: bool) -> str:
    table = pa.table({"text": pa.array(TEXTS, pa.large_string()), "id": range(len(TEXTS))})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=61)
    return str(path)


def saved(path: Path) -> str:
    data = datasets.Dataset.from_dict({"text": ["left out", *TEXTS]})
    data.select(range(1, len(TEXTS) + 1)).save_to_disk(str(path))
    return str(path)


def hub(path: Path) -> str:
    path.mkdir()
    for number in range(3):
        part = TEXTS[number * 200 : number * 200 + 200]
        pq.write_table(pa.table({"text": part}), path / f"train-{number:05}-of-00003.parquet")
    pq.write_table(pa.table({"text": ["other"]}), path / "test-00000-of-00001.parquet")
    return f"hf:{path}@train"


MAKERS = {
    "parquet": lambda folder: parquet(folder / "t.parquet"),
    "stream": lambda folder: arrow(folder / "t.arrow", stream=True),
    "file": lambda folder: arrow(folder / "t.arrow", stream=False),
    "saved": lambda folder: saved(folder / "saved"),
    "hub": lambda folder: hub(folder / "hub"),
}


def shards_of(entry: str, quiet: Progress, key: str = "text") -> tuple[Shard, ...]:
    (found,) = resolve([entry], quiet)
    return cut_into_shards([found.sources], key)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_row_is_a_document_in_order_and_once(tmp_path: Path, quiet: Progress, kind: str) -> None:
    made = shards_of(MAKERS[kind](tmp_path), quiet)
    assert len(made) >= 3
    found = [
        block.text for shard in made for span in shard.spans for block in read_blocks(span, "text", lambda size: None)
    ]
    assert found == TEXTS
    assert not list((tmp_path / "must stay empty").rglob("*.arrow"))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_key_that_is_no_column_is_refused_with_those_there_are(tmp_path: Path, quiet: Progress, kind: str) -> None:
    with pytest.raises(Refused, match=r"data.text_key = txt: the table has no such column; nearest legal: text"):
        shards_of(MAKERS[kind](tmp_path), quiet, "txt")


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_what_is_no_text_is_told_with_its_row(tmp_path: Path, quiet: Progress, kind: str) -> None:
    (tmp_path / "c").mkdir()
    path = tmp_path / "c" / f"t.{'parquet' if kind == 'parquet' else 'arrow'}"
    table = pa.table({"text": pa.array([*TEXTS, None])})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=37)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    spans = [span for shard in shards_of(str(tmp_path / "c"), quiet) for span in shard.spans]
    with pytest.raises(Refused, match=rf"{path}, row 500: data.text_key = text: holds nothing, not text"):
        list(read_blocks(spans[-1], "text", lambda size: None))


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_a_damaged_table_is_refused(tmp_path: Path, quiet: Progress, name: str) -> None:
    (tmp_path / name).write_bytes(b"no table at all" * 10)
    with pytest.raises(Refused, match=rf"data.corpus = .*{name}: cannot be read: "):
        shards_of(str(tmp_path / name), quiet)


def test_splits_of_a_saved_data_set_are_named(tmp_path: Path, quiet: Progress) -> None:
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("test", "train")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(Refused, match=r"both: holds several splits .*nearest legal: .*both/test, .*both/train"):
        resolve([str(tmp_path / "both")], quiet)
    assert len(resolve([str(tmp_path / "both" / "train")], quiet)[0].sources) == 1


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(Refused, match=r"data.corpus = nobody/nothing: cannot be read: "):
        shards_of("hf:nobody/nothing", quiet)


@pytest.mark.parametrize(("kind", "module"), [("parquet", "pyarrow"), ("saved", "datasets"), ("hub", "datasets")])
def test_a_missing_library_is_named_with_the_way_to_it(
    tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    entry = MAKERS[kind](tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Refused, match=rf"needs the library {module}.*, which is not installed: pip install 'trigrid"):
        shards_of(entry, quiet)


def test_tables_are_prepared_by_processes_too(tmp_path: Path, quiet: Progress, tokenizer_file: Path) -> None:
    entries = [parquet(tmp_path / "t.parquet"), arrow(tmp_path / "t.arrow", stream=True), saved(tmp_path / "saved")]
    moments: dict[int, list[tuple[int, int]]] = {1: [], 2: []}
    prepared = [
        prepare_folder(
            entries,
            str(tokenizer_file),
            tmp_path / f"out{workers}",
            vocab=0,
            validation_fraction=0.1,
            text_key="text",
            workers=workers,
            progress=lambda stage, done, total, to=seen: to.append((done, total)) if "tokenising" in stage else None,
        )
        for workers, seen in moments.items()
    ]
    assert prepared[0].hash == prepared[1].hash
    rows = sum(bool(text) for text in TEXTS) * len(entries)
    assert prepared[0].train[0].documents + prepared[0].validation[0].documents == rows
    for seen in moments.values():
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 50_000
