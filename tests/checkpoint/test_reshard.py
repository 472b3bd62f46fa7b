"""Saved under one layout, read under another: every element of every tensor is where it belongs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.jobs import frozen, named, small_job
from helpers.saved import filled_and_saved, read_and_saved, told

from trigrid.blueprint import decoder
from trigrid.check.pool import Pool
from trigrid.checkpoint.folder import path_of
from trigrid.checkpoint.manifest import read_manifest
from trigrid.checkpoint.reading import BoxReader
from trigrid.spec.layout import Layout

CHAIN = [
    named("tp1pp1dp1"),
    named("tp2pp2dp2", zero=1),
    named("tp1pp3dp1", schedule="1f1b"),
    named("tp1pp1dp8", zero=3),
    named("tp4pp1dp1", zero=0),
    named("tp1pp1dp3", zero=2),
    named("tp1pp2dp4", zero=3, dp_replicate=2),
    named("tp8pp1dp1", zero=3, sequence_parallel=True),
    named("tp1pp2dp2", zero=0, virtual_stages=3, schedule="interleaved"),
    named("tp1pp1dp5", zero=3, bucket_numel=20_000),
    named("tp2pp3dp1", zero=1),
    named("tp1pp2dp1", schedule="zbv", virtual_stages=2),
    named("tp1pp1dp7", zero=1),
    named("tp1pp1dp1"),
]


def hop(pool: Pool, layouts: list[Layout], run_dir: Path, tied: bool, precision: str) -> None:
    """Save under the first, then read and save under each of the others."""

    def job(layout: Layout):  # type: ignore[no-untyped-def]
        made = small_job(layout, precision=precision, tied=tied)
        return frozen(made) if tied else made

    world = layouts[0].world
    assert not any(pool.run(filled_and_saved, world, job(layouts[0]), run_dir, 0))
    for step, layout in enumerate(layouts[1:]):
        faults = pool.run(read_and_saved, layout.world, job(layout), run_dir, step, step + 1)
        assert not any(faults), (layouts[step], layout, faults)


@pytest.mark.parametrize(("tied", "precision"), [(False, "fp64"), (True, "bf16")])
def test_every_layout_reads_what_another_wrote(pool: Pool, tmp_path: Path, tied: bool, precision: str) -> None:
    """R65, R66 (larger worlds), R69 (3, 5, 7 ranks): each of a chain of layouts reads what the one before it wrote."""
    hop(pool, CHAIN, tmp_path, tied, precision)
    last = path_of(tmp_path, len(CHAIN) - 1)
    manifest = read_manifest(last)
    assert manifest.tensors.keys() == decoder(small_job(CHAIN[0], tied=tied).model).parameters.keys()
    for name, parameter in manifest.tensors.items():
        for kind, stored in parameter.kinds.items():
            whole = BoxReader(last, manifest).read(name, kind, [0] * len(parameter.shape), parameter.shape)
            assert torch.equal(whole, told(name, kind, parameter.shape).to(whole.dtype)), (name, kind, stored)


def test_more_ranks_than_elements(pool: Pool, tmp_path: Path) -> None:
    """R66: eight shards of parameters of two elements, so that some ranks have nothing of some of them."""
    tiny = {"hidden": 2, "heads": 1, "kv_heads": 1, "head_dim": 2, "ffn": 2, "vocab": 3, "layers": 2}
    layouts = [named("tp1pp1dp1"), named("tp1pp1dp8", zero=3), named("tp1pp1dp2", zero=1), named("tp1pp2dp4", zero=2)]
    jobs = [small_job(layout, **tiny) for layout in layouts]
    assert not any(pool.run(filled_and_saved, 1, jobs[0], tmp_path, 0))
    for step, (before, job) in enumerate(pairwise(jobs)):
        faults = pool.run(read_and_saved, job.parallel.world, job, tmp_path, step, step + 1)
        assert not any(faults), (before.parallel, job.parallel, faults)


def test_every_rank_writes_its_share(pool: Pool, tmp_path: Path) -> None:
    """Replicated state is written by all its holders, each a part: no rank writes more than twice the mean."""
    job = small_job(named("tp2pp1dp4", zero=0), ffn=64, vocab=64)
    job = replace(job, parallel=replace(job.parallel, dp_replicate=2))
    assert not any(pool.run(filled_and_saved, 8, job, tmp_path, 0))
    sizes = [file.bytes for file in read_manifest(path_of(tmp_path, 0)).files]
    assert len(sizes) == 8
    assert max(sizes) < 2 * sum(sizes) / 8
