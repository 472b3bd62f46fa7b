from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trigrid.data.dataset import TokenDataset
from trigrid.data.loader import Batch, Loader, read_ahead
from trigrid.data.tokens import TokenWriter
from trigrid.errors import Refused

SEQUENCE = 4
TOKENS = 10 * SEQUENCE + 3
GLOBAL_BATCH = 24


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """The stream 60000, 60001, ... in documents of 7 tokens: above int16, so that a wrong dtype would show."""
    with TokenWriter(tmp_path / "t", 65_000) as writer:
        for start in range(0, TOKENS, 7):
            writer.add(range(60_000 + start, 60_000 + min(start + 7, TOKENS)))
            writer.end_document()
    return tmp_path / "t"


@pytest.fixture
def loader(prefix: Path) -> Loader:
    return of(TokenDataset(prefix, SEQUENCE, 65_000))


def of(*datasets: TokenDataset, seed: int = 5, weights: Sequence[float] = (), documents: bool = True) -> Loader:
    return Loader(datasets, weights=weights, seed=seed, global_batch=GLOBAL_BATCH, documents=documents)


def first_tokens(loader: Loader, step: int) -> list[int]:
    """Which samples make the batch, told by their first tokens."""
    return ((loader.batch(step * GLOBAL_BATCH, 0, 1, 1).tokens[:, 0, 0] - 60_000) // SEQUENCE).tolist()


def read(dataset: TokenDataset, sample: int) -> list[int]:
    """The tokens of a sample and the last label."""
    tokens, labels = np.empty((2, dataset.sequence), dtype=np.int64)
    dataset.read(sample, tokens, labels)
    assert labels[:-1].tolist() == tokens[1:].tolist()
    return [*tokens.tolist(), int(labels[-1])]


def parts(batch: Batch) -> list[Tensor]:
    assert batch.documents is not None
    return [batch.tokens, batch.labels, batch.documents]


@pytest.mark.parametrize(("tokens", "samples"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_number_of_samples(tmp_path: Path, tokens: int, samples: int) -> None:
    with TokenWriter(tmp_path / "t", 100) as writer:
        writer.add(range(tokens))
        writer.end_document()
    dataset = TokenDataset(tmp_path / "t", SEQUENCE, 100)
    assert len(dataset) == samples
    expected = [list(range(i * SEQUENCE, i * SEQUENCE + SEQUENCE + 1)) for i in range(samples)]
    assert [read(dataset, sample) for sample in range(samples)] == expected
    with pytest.raises(AssertionError, match="out of range"):
        read(dataset, samples)


def test_a_stream_shorter_than_a_sample_is_refused_with_the_numbers(prefix: Path) -> None:
    assert len(TokenDataset(prefix, TOKENS - 1, 65_000)) == 1
    with pytest.raises(Refused) as refused:
        TokenDataset(prefix, TOKENS, 65_000)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value, problem.legal) == ("batch.sequence", TOKENS, (TOKENS - 1,))
    assert f"holds {TOKENS} tokens, and one sample takes {TOKENS + 1}" in problem.reason


def test_shapes_types_and_labels(loader: Loader) -> None:
    batch = loader.batch(0, 1, 2, 3)
    for tensor in parts(batch):
        assert tensor.shape == (4, 3, SEQUENCE)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert int(batch.tokens.min()) >= 60_000


@pytest.mark.parametrize("step", [0, 1, 7, 10**9])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 8, 12, 24])
def test_every_layout_sees_the_same_global_batch(loader: Loader, step: int, dp: int) -> None:
    """R77, R78, R94."""
    consumed = step * GLOBAL_BATCH
    whole = [tensor.flatten(0, 1) for tensor in parts(loader.batch(consumed, 0, 1, 1))]
    share = GLOBAL_BATCH // dp
    for micro_batch in (size for size in range(1, share + 1) if share % size == 0):
        ranks = [parts(loader.batch(consumed, dp_rank, dp, micro_batch)) for dp_rank in range(dp)]
        for tensors, expected in zip(zip(*ranks, strict=True), whole, strict=True):
            assert all(tensor.shape == (share // micro_batch, micro_batch, SEQUENCE) for tensor in tensors)
            assert torch.equal(torch.cat([tensor.flatten(0, 1) for tensor in tensors]), expected)


def test_epochs_follow_one_another_inside_batches(loader: Loader) -> None:
    """10 samples, batches of 24: every run of ten places is one epoch, each in its own order."""
    places = [sample for step in range(5) for sample in first_tokens(loader, step)]
    epochs = [tuple(places[start : start + 10]) for start in range(0, 120, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs)


def test_order_depends_on_the_seed_only(prefix: Path, loader: Loader) -> None:
    dataset = TokenDataset(prefix, SEQUENCE, 65_000)
    assert first_tokens(of(dataset, seed=5), 3) == first_tokens(loader, 3)
    assert first_tokens(of(dataset, seed=6), 3) != first_tokens(loader, 3)


@pytest.mark.parametrize("consumed", [1, 23, 25, 240])
def test_a_run_goes_on_after_any_number_of_samples(loader: Loader, consumed: int) -> None:
    """R78: also where the batch had another size before."""
    both = torch.cat([loader.batch(0, 0, 1, 1).tokens, *(loader.batch(24 * n, 0, 1, 1).tokens for n in range(1, 12))])
    assert torch.equal(loader.batch(consumed, 0, 1, 1).tokens, both[consumed : consumed + GLOBAL_BATCH])


def test_documents_of_every_token(tmp_path: Path) -> None:
    lengths = [3, 0, 1, 8, 2, 0, 5, 4]
    with TokenWriter(tmp_path / "t", 100, longest_sequence=3) as writer:
        for number, length in enumerate(lengths):
            writer.add([number] * length)
            writer.end_document()
    dataset = TokenDataset(tmp_path / "t", 4, 100)
    row = np.empty(4, dtype=np.int64)
    numbers = []
    for sample in range(len(dataset)):
        dataset.documents(sample, row)
        numbers.append(row.tolist())
    assert [read(dataset, sample)[:4] for sample in range(5)] == [
        [0, 0, 0, 2],
        [3, 3, 3, 3],
        [3, 3, 3, 3],
        [4, 4, 6, 6],
        [6, 6, 6, 7],
    ]
    assert numbers == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize("sequence", [1, 3, 4])
@pytest.mark.parametrize(("first", "stop"), [(0, 2), (1, 3), (2, 7), (0, None)])
def test_a_range_of_documents(prefix: Path, first: int, stop: int | None, sequence: int) -> None:
    """The last document is one of a single token."""
    dataset = TokenDataset(prefix, sequence, 65_000, first, stop)
    stream = list(range(60_000, 60_000 + TOKENS))[7 * first : TOKENS if stop is None else 7 * stop]
    assert len(dataset) == (len(stream) - 1) // sequence
    for sample in range(len(dataset)):
        assert read(dataset, sample) == stream[sample * sequence : (sample + 1) * sequence + 1]


@pytest.mark.parametrize(("code", "wrong"), [("<i4", -1), ("<i4", 100), ("<u2", 65_535)])
def test_an_id_that_the_model_lacks_is_refused(tmp_path: Path, code: str, wrong: int) -> None:
    """In tokens that others wrote; under tensor parallelism it would pass for an id of another rank."""
    with TokenWriter(tmp_path / "t", 70_000 if code == "<i4" else 65_000) as writer:
        writer.add([7] * 9)
        writer.end_document()
    ids = np.full(9, 7, dtype=code)
    ids[8] = wrong
    (tmp_path / "t.bin").write_bytes(ids.tobytes())
    loader = of(TokenDataset(tmp_path / "t", 4, 100))
    with pytest.raises(Refused, match=f"model.vocab = 100: .*/t holds the id {wrong}"):
        loader.batch(0, 0, 1, 1)


@pytest.mark.parametrize(("weights", "of_the_second"), [((), 24), ((1, 1), 108), ((7, 1), 27)])
def test_a_blend_of_two_files(prefix: Path, weights: Sequence[float], of_the_second: int) -> None:
    """Of 216 places; the first file has eight samples, the second one."""
    loader = of(
        TokenDataset(prefix, SEQUENCE, 65_000, 0, 5), TokenDataset(prefix, SEQUENCE, 65_000, 5), weights=weights
    )
    drawn = torch.cat([loader.batch(step * GLOBAL_BATCH, 0, 1, 1).tokens[:, 0, 0] for step in range(9)])
    assert int((drawn >= 60_000 + 35).sum()) == of_the_second


def test_any_number_of_threads_reads_the_same(loader: Loader) -> None:
    def batches(workers: int) -> list[list[Tensor]]:
        read = read_ahead(lambda step: loader.batch(step * GLOBAL_BATCH, 0, 2, 3), range(20), workers)
        return [parts(batch) for batch in read]

    alone = batches(0)
    assert len(alone) == 20
    for workers in (1, 3):
        for ours, theirs in zip(batches(workers), alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_reading_ahead_stays_a_few_steps_ahead_and_raises_what_it_met(workers: int) -> None:
    begun: list[int] = []

    def read(step: int) -> int:
        begun.append(step)
        if step == 12:
            raise OSError("the disk is gone")
        return step

    steps = read_ahead(read, range(1000), workers)
    assert [next(steps) for _ in range(12)] == list(range(12))
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    assert max(begun) <= 12 + 2 * workers


@pytest.mark.parametrize(("dp_rank", "dp", "micro_batch"), [(0, 5, 1), (0, 2, 5), (2, 2, 1), (-1, 2, 1)])
def test_a_batch_that_does_not_divide_is_a_bug(loader: Loader, dp_rank: int, dp: int, micro_batch: int) -> None:
    with pytest.raises(AssertionError):
        loader.batch(0, dp_rank, dp, micro_batch)
