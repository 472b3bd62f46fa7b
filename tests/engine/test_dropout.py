"""Dropout: good hashes, the same masks on every layout, nothing kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.jobs import named, small_job
from helpers.masks import Masks, masks_of
from torch import Tensor

from trigrid.check.parity import Reference, batch, judge, reference, run_rank, share
from trigrid.check.pool import Pool
from trigrid.engine.comm import Comm
from trigrid.engine.dropout import Dropout, _mix, dropped
from trigrid.engine.units import Microbatch
from trigrid.grid import grid_of
from trigrid.models.attention import Drop, causal_attention
from trigrid.models.build import build_engine
from trigrid.spec.job import Data, Job

CPU = torch.device("cpu")
RATES = (0.001, 0.1, 0.5, 0.9)


def site(rate: float, *, seed: int = 0, unit: str = "layers.0", name: str = "ffn") -> Dropout:
    return Dropout(rate, seed, unit, name, CPU)


def microbatch(samples: Tensor, sequence: int) -> Microbatch:
    tokens_SB = torch.zeros(sequence, len(samples), dtype=torch.int64)
    return Microbatch(tokens_SB, tokens_SB, torch.ones(()), samples_B=samples)


def mask(dropout: Dropout, samples: Tensor, sequence: int, width: int, first: int = 0) -> Tensor:
    """True where an element is dropped [S, B, H]."""
    ones_SBH = torch.ones(sequence, len(samples), width)
    return dropout.hidden(ones_SBH, microbatch(samples, sequence), first) == 0


def layout_job(name: str, *, hidden: float = 0.2, attention: float = 0.3, **fields: object) -> Job:
    model = {"block": "gpt", "kv_heads": 8} if fields.pop("gpt", False) else {}
    job = small_job(named(name, **fields), **model)
    return replace(job, run=replace(job.run, dropout=hidden, attention_dropout=attention))


# The hash


def test_rows_are_counted_by_splitmix64() -> None:
    """Published outputs of the generator from the state 1234567."""
    wanted = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    found = _mix(torch.tensor(1234567), torch.arange(4))
    assert tuple(int(n) % 2**64 for n in found) == wanted


def test_elements_are_hashed_as_whole_numbers_say() -> None:
    """The same hash in Python's integers, which do not wrap around by themselves."""
    rows = torch.randint(-(2**63), 2**63 - 1, (50,), generator=torch.Generator().manual_seed(1))
    columns = 40
    for rate in (*RATES, 0.0, 1 - 2**-40):
        wanted = [[in_integers(int(row), column, rate) for column in range(columns)] for row in rows]
        assert dropped(rows, columns, rate).tolist() == wanted


def in_integers(row: int, column: int, rate: float) -> bool:
    low, high = row % 2**32, row % 2**64 >> 32
    x = (low + column * 0x9E3779B9) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32 ^ high
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return (x + 2**31) % 2**32 < min(round(rate * 2**32), 2**32 - 1)


@pytest.mark.parametrize("rate", RATES)
def test_as_many_are_dropped_as_asked(rate: float) -> None:
    """Of all, of each row and of each column, within what chance allows: 5 standard deviations of a binomial."""
    gone = mask(site(rate), torch.arange(8), 512, 384).double()
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(gone.mean() - rate) <= 5 * deviation / math.sqrt(gone.numel())
    for dims in ((0,), (1,), (2,), (0, 1), (1, 2)):
        means = gone.mean(dims)
        n = gone.numel() // means.numel()
        excess = ((means - rate).abs() * math.sqrt(n) / deviation).max()
        # Small rates are far from normal in short rows.
        assert excess <= 6 + 3 / (deviation * math.sqrt(n)), dims


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_of_neighbours_have_nothing_in_common(rate: float) -> None:
    """Columns, rows, samples, sites, units and seeds side by side: correlations within 5 of their deviations."""
    samples = torch.arange(100, 108)
    base = mask(site(rate), samples, 256, 256)

    def other(**changes: object) -> Tensor:
        return mask(site(rate, **changes), samples, 256, 256)  # type: ignore[arg-type]

    pairs = {f"{step} columns": (base[..., step:], base[..., :-step]) for step in (1, 2, 3, 8, 64, 128)}
    pairs |= {f"{step} rows": (base[step:], base[:-step]) for step in (1, 2, 7, 128)}
    pairs |= {f"{step} samples": (base[:, step:], base[:, :-step]) for step in (1, 4)}
    pairs["diagonal"] = (base[1:, :, 1:], base[:-1, :, :-1])
    pairs["site"] = (base, other(name="attention"))
    pairs["layer"] = (base, other(unit="layers.1"))
    pairs["seed"] = (base, other(seed=1))
    pairs["step"] = (base, mask(site(rate), samples + 8, 256, 256))
    for what, (a, b) in pairs.items():
        assert abs(correlation(a, b)) <= 5 / math.sqrt(a.numel()), what


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


def test_patterns_of_eight_neighbours_are_equally_frequent() -> None:
    """χ² over the 256 patterns of eight columns, of eight rows and of eight samples at a rate of a half."""
    gone = mask(site(0.5), torch.arange(64), 256, 256).long()
    powers = 2 ** torch.arange(8)
    for dim in (0, 1, 2):
        numbers = (gone.movedim(dim, -1).unflatten(-1, (-1, 8)) * powers).sum(-1)
        counts = torch.bincount(numbers.flatten(), minlength=256).double()
        expected = counts.sum() / 256
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        # 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert abs(chi2 - 255) <= 5 * 22.6, dim


# What is done with it


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_stays_is_scaled_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    dropout, rows = site(0.1), microbatch(torch.arange(3), 20)
    x_SBH = torch.randn(20, 3, 40, dtype=dtype, requires_grad=True)
    y_SBH = dropout.hidden(x_SBH, rows, 0)
    gone = mask(dropout, torch.arange(3), 20, 40)
    kept = torch.where(gone, 0.0, x_SBH / 0.9)
    torch.testing.assert_close(y_SBH, kept, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)
    assert 0.05 < gone.double().mean() < 0.15
    gradient = torch.randn_like(x_SBH)
    (found,) = torch.autograd.grad(y_SBH, x_SBH, gradient)
    assert torch.equal(found, torch.where(gone, torch.zeros_like(gradient), gradient * (1 / 0.9)))


def test_off_is_off() -> None:
    x_SBH = torch.randn(4, 2, 8)
    assert site(0.0).hidden(x_SBH, microbatch(torch.arange(2), 4), 0) is x_SBH
    without = replace(microbatch(torch.arange(2), 4), samples_B=None)
    assert site(0.5).hidden(x_SBH, without, 0) is x_SBH


def test_it_traces_as_one_graph() -> None:
    """What a compiler sees: plain operations, no generator, no break; the same bits."""
    dropout = site(0.3)

    def both(x_SBH: Tensor, samples_B: Tensor) -> Tensor:
        batch = Microbatch(x_SBH, x_SBH, samples_B, samples_B=samples_B)
        return x_SBH + dropout.hidden(x_SBH, batch, 5)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    x_SBH = torch.randn(6, 2, 8, requires_grad=True)
    samples_B = torch.tensor([3, 9])
    wanted, found = both(x_SBH, samples_B), compiled(x_SBH, samples_B)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x_SBH)[0] for y in (wanted, found)))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_unfused_attention(kv_heads: int, documents: bool, again: bool) -> None:
    """Against the formula under autograd, with the same mask."""
    batch, heads, sequence, width = 2, 6, 10, 8
    generator = torch.Generator().manual_seed(3)

    def drawn(n: int) -> Tensor:
        return torch.randn(batch, n, sequence, width, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = drawn(heads), drawn(kv_heads), drawn(kv_heads)
    dropout = site(0.3)
    rows = dropout.rows(microbatch(torch.arange(batch), sequence), range(heads), sequence)
    seen = torch.ones(sequence, sequence, dtype=torch.bool).tril().expand(batch, 1, -1, -1)
    if documents:
        numbers = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
        seen = seen & (numbers[:, None] == numbers)
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -math.inf) if documents else None
    found = causal_attention(q, k, v, mask, Drop(lambda: rows, 0.3), again)

    wide_k, wide_v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = (q @ wide_k.mT / math.sqrt(width)).masked_fill(~seen, -math.inf).softmax(-1)
    gone = dropped(rows, sequence, 0.3)
    wanted = (scores * ~gone / 0.7) @ wide_v
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(y, (q, k, v), gradient) for y in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_rows_of_heads_are_the_same_on_whoever_has_them() -> None:
    batch = microbatch(torch.arange(5, 8), 12)
    whole = site(0.1).rows(batch, range(8), 12)
    assert torch.equal(whole[:, 4:6], site(0.1).rows(batch, range(4, 6), 12))
    assert whole.unique().numel() == whole.numel()


# Over layouts


@pytest.fixture(scope="module")
def alone() -> dict[bool, Masks]:
    """The single process's masks, the whole batch at once, of the GPT and of the Llama."""
    found = {}
    for gpt in (False, True):
        job = layout_job("tp1", gpt=gpt)
        found[gpt] = masks_of(0, replace(job, batch=replace(job.batch, micro_batch=8)), 1)
    return found


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tp2", {}),
        ("tp4", {"gpt": True}),
        ("tp2", {"sequence_parallel": True}),
        ("tp2dp2", {"sequence_parallel": True, "recompute": "selective", "zero": 3}),
        ("dp4", {"zero": 2}),
        ("tp2pp2", {"schedule": "gpipe", "gpt": True}),
    ],
    ids=str,
)
def test_every_layouts_masks_are_parts_of_the_single_process(
    pool: Pool, alone: dict[bool, Masks], name: str, fields: dict[str, object]
) -> None:
    """R41, exactly: replicated activations are dropped alike on all TP ranks, those cut along the sequence or over
    heads as what they are parts of, rows of DP ranks as their samples; backward makes the same masks again."""
    job = layout_job(name, **fields)
    rows = job.batch.global_batch // job.parallel.dp
    job = replace(job, batch=replace(job.batch, micro_batch=rows))
    whole, grid = alone[bool(fields.get("gpt"))], grid_of(job)
    assert whole.again
    blocks = job.model.layers // job.parallel.pp
    for rank, found in enumerate(pool.run(masks_of, job.parallel.world, job, 1)):
        at = grid.coord(rank)
        batch_part = slice(at.dp * rows, (at.dp + 1) * rows)
        length = job.batch.sequence // (job.parallel.tp if job.parallel.sequence_parallel else 1)
        first = at.tp * length if job.parallel.sequence_parallel else 0
        heads = job.model.heads // job.parallel.tp
        sites = whole.hidden[1 + 2 * blocks * at.pp :][: 2 * blocks]
        sites = [*whole.hidden[:1], *sites] if at.pp == 0 else sites
        scores = whole.scores[blocks * at.pp :][:blocks]
        assert (len(found.hidden), len(found.scores)) == (len(sites), len(scores))
        for mine, all_ in zip(found.hidden, sites, strict=True):
            assert torch.equal(mine, all_[first : first + length, batch_part]), rank
        for mine, all_ in zip(found.scores, scores, strict=True):
            assert torch.equal(mine, all_[batch_part, at.tp * heads : (at.tp + 1) * heads]), rank
        assert found.again, rank


def test_parts_that_should_differ_do(alone: dict[bool, Masks]) -> None:
    """R41, statistically: sites, halves of the sequence, samples and heads are unrelated."""
    hidden, scores = alone[False].hidden, alone[False].scores
    pairs = [(a, b) for i, a in enumerate(hidden) for b in hidden[i + 1 :]]
    pairs += [(a[:8], a[8:]) for a in hidden] + [(a[:, :4], a[:, 4:]) for a in hidden]
    pairs += [(a[:, :4], a[:, 4:]) for a in scores] + [(a[:4], a[4:]) for a in scores]
    worst = max(abs(correlation(a, b)) * math.sqrt(a.numel()) for a, b in pairs)
    assert worst <= 5


@pytest.fixture(scope="module")
def references(pool: Pool) -> dict[bool, Reference]:
    return {gpt: reference(layout_job("tp1", gpt=gpt), pool) for gpt in (False, True)}


@pytest.mark.parametrize(
    ("name", "micro_batch", "fields"),
    [
        ("tp2pp2dp2", 2, {"zero": 0, "sequence_parallel": True, "gpt": True}),
        ("tp2pp2dp2", 4, {"zero": 3}),
        ("tp4", 8, {"zero": 1, "sequence_parallel": True, "regather": True}),
        ("pp4dp2", 1, {"zero": 2, "schedule": "gpipe", "gpt": True}),
        ("dp8", 1, {"zero": 3, "recompute": "full"}),
    ],
    ids=str,
)
def test_fp64(
    pool: Pool, references: dict[bool, Reference], name: str, micro_batch: int, fields: dict[str, object]
) -> None:
    """Law 1 with dropout, however the batch is cut."""
    gpt = bool(fields.get("gpt"))
    job = layout_job(name, **fields)
    job = replace(job, batch=replace(job.batch, micro_batch=micro_batch))
    found = judge(job, pool.run(run_rank, job.parallel.world, job), references[gpt])
    assert found.passed, found


def test_it_makes_a_difference(references: dict[bool, Reference], pool: Pool) -> None:
    """Either dropout by itself, and the seed, change what is learnt."""
    base = layout_job("tp1")
    others = (
        layout_job("tp1", hidden=0.0),
        layout_job("tp1", attention=0.0),
        layout_job("tp1", hidden=0.0, attention=0.0),
    )
    losses = [references[False].losses, *(reference(job, pool).losses for job in others)]
    assert len({loss[0] for loss in losses}) == 4
    assert base.run.dropout == 0.2


def losses_of(job: Job) -> tuple[float, float, float]:
    """Of a validation, and of a step on the same tokens as first and as second of a run."""
    engine = build_engine(job, Comm(grid_of(job), 0), CPU)
    tokens, labels = (share(rows, job, 0) for rows in batch(job, 0))
    validation = engine.evaluate(tokens, labels)
    steps = [engine.step(tokens, labels, 0.0, consumed=consumed).loss for consumed in (0, job.batch.global_batch)]
    return validation, steps[0], steps[1]


def test_validation_drops_nothing_and_each_step_something_else() -> None:
    plain, with_it = losses_of(layout_job("tp1", hidden=0.0, attention=0.0)), losses_of(layout_job("tp1"))
    assert plain[0] == with_it[0]
    assert plain[1] == plain[2]
    assert len({*with_it, plain[1]}) >= 3
    assert with_it[1] != with_it[2]


def test_numbers_of_samples_are_needed() -> None:
    job = layout_job("tp1")
    engine = build_engine(job, Comm(grid_of(job), 0), CPU)
    tokens, labels = (share(rows, job, 0) for rows in batch(job, 0))
    with pytest.raises(AssertionError, match="numbers of samples"):
        engine.accumulate(tokens, labels)


def test_a_shorter_sequence_is_dropped_as_the_beginning_of_a_longer_one() -> None:
    samples = torch.arange(3)
    assert torch.equal(mask(site(0.2), samples, 7, 16), mask(site(0.2), samples, 16, 16)[:7])
    assert torch.equal(mask(site(0.2), samples, 9, 16, first=7), mask(site(0.2), samples, 16, 16)[7:])


def test_within_documents(pool: Pool) -> None:
    job = replace(layout_job("tp2dp2", sequence_parallel=True, zero=3), data=Data(document_attention=True))
    found = judge(job, pool.run(run_rank, 4, job), reference(job, pool))
    assert found.passed, found
