from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trigrid.data.loader import Loader, TokenDataset
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
    return Loader(TokenDataset(prefix, SEQUENCE), 5, GLOBAL_BATCH)


def first_tokens(loader: Loader, step: int) -> list[int]:
    """Which samples make the batch, told by their first tokens."""
    tokens, _ = loader.batch(step, 0, 1, 1)
    return ((tokens[:, 0, 0] - 60_000) // SEQUENCE).tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_number_of_samples(tmp_path: Path, tokens: int, samples: int) -> None:
    with TokenWriter(tmp_path / "t", 100) as writer:
        writer.add(range(tokens))
        writer.end_document()
    dataset = TokenDataset(tmp_path / "t", SEQUENCE)
    assert len(dataset) == samples
    expected = [list(range(i * SEQUENCE, i * SEQUENCE + SEQUENCE + 1)) for i in range(samples)]
    assert dataset.samples(np.arange(samples)).tolist() == expected
    with pytest.raises(AssertionError, match="out of range"):
        dataset.samples(np.array([samples]))


def test_a_stream_shorter_than_a_sample_is_refused_with_the_numbers(prefix: Path) -> None:
    assert len(TokenDataset(prefix, TOKENS - 1)) == 1
    with pytest.raises(Refused) as refused:
        TokenDataset(prefix, TOKENS)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value, problem.legal) == ("batch.sequence", TOKENS, (TOKENS - 1,))
    assert f"holds {TOKENS} tokens, and one sample takes {TOKENS + 1}" in problem.reason


def test_shapes_types_and_labels(loader: Loader) -> None:
    tokens, labels = loader.batch(0, 1, 2, 3)
    for tensor in (tokens, labels):
        assert tensor.shape == (4, 3, SEQUENCE)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert torch.equal(labels, tokens + 1)
    assert int(tokens.min()) >= 60_000


@pytest.mark.parametrize("step", [0, 1, 7, 10**9])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 8, 12, 24])
def test_every_layout_sees_the_same_global_batch(loader: Loader, step: int, dp: int) -> None:
    whole, whole_labels = (tensor.flatten(0, 1) for tensor in loader.batch(step, 0, 1, 1))
    share = GLOBAL_BATCH // dp
    for micro_batch in (size for size in range(1, share + 1) if share % size == 0):
        parts = [loader.batch(step, dp_rank, dp, micro_batch) for dp_rank in range(dp)]
        assert all(tokens.shape == (share // micro_batch, micro_batch, SEQUENCE) for tokens, _ in parts)
        assert torch.equal(torch.cat([tokens.flatten(0, 1) for tokens, _ in parts]), whole)
        assert torch.equal(torch.cat([labels.flatten(0, 1) for _, labels in parts]), whole_labels)


def test_epochs_follow_one_another_inside_batches(loader: Loader) -> None:
    """10 samples, batches of 24: every run of ten places is one epoch, each in its own order."""
    places = [sample for step in range(5) for sample in first_tokens(loader, step)]
    epochs = [tuple(places[start : start + 10]) for start in range(0, 120, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs)


def test_order_depends_on_the_seed_only(prefix: Path, loader: Loader) -> None:
    dataset = TokenDataset(prefix, SEQUENCE)
    assert first_tokens(Loader(dataset, 5, GLOBAL_BATCH), 3) == first_tokens(loader, 3)
    assert first_tokens(Loader(dataset, 6, GLOBAL_BATCH), 3) != first_tokens(loader, 3)


@pytest.mark.parametrize(("dp_rank", "dp", "micro_batch"), [(0, 5, 1), (0, 2, 5), (2, 2, 1), (-1, 2, 1)])
def test_a_batch_that_does_not_divide_is_a_bug(loader: Loader, dp_rank: int, dp: int, micro_batch: int) -> None:
    with pytest.raises(AssertionError):
        loader.batch(0, dp_rank, dp, micro_batch)
