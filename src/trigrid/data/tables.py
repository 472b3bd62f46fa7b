"""Tables of documents: Parquet and Arrow files, folders saved by `datasets`, and what `datasets` streams from a hub.

The libraries are loaded only when a corpus holds such a thing. Files are read as they lie: nothing is copied into the
cache of `datasets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any

from trigrid.data.corpus import KEY, Source, hub_name
from trigrid.data.lines import nearest
from trigrid.data.optional import library
from trigrid.data.pieces import Block
from trigrid.errors import Problem, Refused

BATCH_ROWS = 256
Advance = Callable[[int], None]
Cut = Iterator[tuple[int, int, int]]


def cut(source: Source, text_key: str, shard_bytes: int) -> Cut:
    """Ranges of about `shard_bytes`, each with the bytes of text that it counts for: row groups of a Parquet file, rows
    of an Arrow file or saved data set, files of a hub's data set (bytes not known: 0).

    Raises Refused for a table that cannot be read or has no column `text_key`.
    """
    with _readable(source):
        if source.kind == "parquet":
            yield from _cut_parquet(source, text_key, shard_bytes)
        elif source.kind == "hub":
            data_set = _hub(source)
            if data_set.column_names:
                _check_column(source, data_set.column_names, text_key)
            yield from ((index, index + 1, 0) for index in range(data_set.num_shards))
        else:
            rows, size_bytes = _row_table(source, text_key)
            step = max(1, shard_bytes * rows // max(size_bytes, 1))
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                yield start, stop, size_bytes * stop // rows - size_bytes * start // rows


def table_blocks(source: Source, start: int, stop: int, text_key: str, advance: Advance) -> Iterator[Block]:
    """The documents of a range that `cut` gave. Raises Refused, naming the row, for one that is no text."""
    with _readable(source):
        match source.kind:
            case "parquet":
                rows: Iterator[tuple[int, Iterable[Any]]] = _parquet_rows(source, start, stop, text_key)
            case "hub":
                rows = _hub_rows(source, start, text_key)
            case "saved":
                data_set = _saved(source).select_columns(text_key)
                batches = range(start, stop, BATCH_ROWS)
                rows = ((at, data_set[at : min(at + BATCH_ROWS, stop)][text_key]) for at in batches)
            case _:
                column = _arrow(source).column(text_key)
                batches = range(start, stop, BATCH_ROWS)
                rows = ((at, column.slice(at, min(BATCH_ROWS, stop - at)).to_pylist()) for at in batches)
        for first, texts in rows:
            size_bytes = 0
            for row, text in enumerate(texts, first):
                where = f"{source.path}, row {row}"
                if not isinstance(text, str):
                    kind = "nothing" if text is None else type(text).__name__
                    raise Refused([Problem("data.text_key", text_key, f"holds {kind}, not text", where=where)])
                size_bytes += len(text)
                yield Block(text=text, last=True, where=where)
            advance(size_bytes)


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    """Errors of the libraries, of which there are many kinds, as Refused."""
    try:
        yield
    except (Refused, GeneratorExit, MemoryError):
        raise
    except Exception as error:
        reason = f"cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise Refused([Problem(KEY, source.path, reason)]) from error


def _check_column(source: Source, columns: list[str], text_key: str) -> None:
    if text_key not in columns:
        reason = "the table has no such column"
        raise Refused([Problem("data.text_key", text_key, reason, nearest(text_key, columns), source.path)])


def _cut_parquet(source: Source, text_key: str, shard_bytes: int) -> Cut:
    file = library("pyarrow.parquet", KEY, source.path).ParquetFile(source.path)
    _check_column(source, file.schema_arrow.names, text_key)
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    columns = [[group.column(index) for index in range(group.num_columns)] for group in groups]
    sizes = [
        sum(column.total_uncompressed_size for column in of_group if column.path_in_schema == text_key)
        for of_group in columns
    ]
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    for _, members in groupby(range(len(sizes)), key=lambda index: starts[index] // shard_bytes):
        chosen = list(members)
        yield chosen[0], chosen[-1] + 1, sum(sizes[index] for index in chosen)


def _parquet_rows(source: Source, start: int, stop: int, text_key: str) -> Iterator[tuple[int, Iterable[Any]]]:
    file = library("pyarrow.parquet", KEY, source.path).ParquetFile(source.path, memory_map=True)
    row = sum(file.metadata.row_group(index).num_rows for index in range(start))
    for batch in file.iter_batches(BATCH_ROWS, row_groups=list(range(start, stop)), columns=[text_key]):
        yield row, batch.column(0).to_pylist()
        row += batch.num_rows


def _row_table(source: Source, text_key: str) -> tuple[int, int]:
    """Rows of the table, and bytes of its texts."""
    if source.kind == "saved":
        data_set = _saved(source)
        _check_column(source, data_set.column_names, text_key)
        column = data_set.data.column(text_key)
    else:
        table = _arrow(source)
        _check_column(source, table.column_names, text_key)
        column = table.column(text_key)
    return len(column), column.nbytes


def _arrow(source: Source) -> Any:
    """The mapped table of a file in Arrow's stream format (as `datasets` writes it) or file format."""
    arrow = library("pyarrow", KEY, source.path)
    mapped = arrow.memory_map(source.path)
    try:
        return arrow.ipc.open_stream(mapped).read_all()
    except arrow.ArrowInvalid:
        return arrow.ipc.open_file(arrow.memory_map(source.path)).read_all()


def _saved(source: Source) -> Any:
    return library("datasets", KEY, source.path).load_from_disk(source.path)


def _hub(source: Source) -> Any:
    datasets = library("datasets", KEY, f"hf:{source.path}")
    name, split = hub_name(source.path)
    return datasets.load_dataset(name, split=split, streaming=True)


def _hub_rows(source: Source, index: int, text_key: str) -> Iterator[tuple[int, Iterable[Any]]]:
    data_set = _hub(source)
    part = data_set.shard(data_set.num_shards, index)
    for row, example in enumerate(part):
        if text_key not in example:
            _check_column(source, list(example), text_key)
        yield row, [example[text_key]]
