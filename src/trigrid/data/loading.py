"""The loaders of a job, and what is said of its data before it trains."""

from __future__ import annotations

from collections.abc import Sequence

from trigrid.data.dataset import TokenDataset
from trigrid.data.loader import Loader
from trigrid.data.sets import Prepared, TokenSet
from trigrid.errors import Problem, Refused
from trigrid.report.console import Console
from trigrid.spec.job import Job


def loaders(job: Job, data: Prepared) -> tuple[Loader, Loader | None]:
    """Of training and of held-out text. Raises Refused where a set is too small for one sample."""

    def loader(sets: Sequence[TokenSet]) -> Loader:
        sequence, vocab = job.batch.sequence, job.model.vocab
        return Loader(
            [TokenDataset(s.prefix, sequence, vocab, s.first_document, s.stop_document) for s in sets],
            weights=_weights(job, sets),
            seed=job.run.seed,
            global_batch=job.batch.global_batch,
            documents=job.data.document_attention,
        )

    training = loader(data.train)
    if not (job.run.validate_every and data.validation):
        return training, None
    try:
        return training, loader(data.validation)
    except Refused as refused:
        reason = "; ".join(f"too little text is held out: {problem.reason}" for problem in refused.problems)
        raise Refused([Problem("data.validation_fraction", job.data.validation_fraction, reason)]) from None


def tell_data(job: Job, data: Prepared, console: Console) -> None:
    """Name the data, and say how often each part of it will be seen."""
    tokenizer = f"; tokenizer {data.tokenizer}" if data.tokenizer else ""
    console.say(f"data {data.hash}: {'found' if data.cached else 'prepared'}{tokenizer}")
    shares = _weights(job, data.train) or tuple(part.tokens for part in data.train)
    for part, share in zip(data.train, shares, strict=True):
        drawn = job.run.steps * job.batch.global_batch * job.batch.sequence * share / sum(shares)
        of = f"{share / sum(shares):.1%} of each batch, " if len(data.train) > 1 else ""
        console.say(
            f"  {part.name}: {part.tokens:,} tokens to train on, {of}{drawn / part.tokens:.2f} passes in this run"
        )


def _weights(job: Job, sets: Sequence[TokenSet]) -> tuple[float, ...]:
    return tuple(job.data.weights[part.entry] for part in sets) if job.data.weights else ()
