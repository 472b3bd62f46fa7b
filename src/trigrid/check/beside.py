"""The ranks of a job among their peers and with data, beside ranks of it without either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trigrid.check.pool import Pool
from trigrid.check.prove import Line, Proof, program_software, prove_rank, trace_rank
from trigrid.check.roles import chosen
from trigrid.check.tracing import ACTIVATIONS, LOGITS, MESSAGES, QUEUE
from trigrid.ledger import STATE
from trigrid.plan.plan import make_plan
from trigrid.spec.job import Job

NEAR = 0.01
"""How far a real rank's peak may be from the fake one's."""
TRIES = 3
COUNTED = ("state", "calls", "payload", "flops")
KEPT = (*STATE, ACTIVATIONS, QUEUE, LOGITS, MESSAGES)
"""What no thread but the one that trains holds, and is equal after every action."""


@dataclass(frozen=True)
class Beside:
    """Proofs of all ranks of a job among their peers, in order, and of some of them alone."""

    real: tuple[Proof, ...]
    fake: tuple[Proof, ...]

    @property
    def pairs(self) -> list[tuple[Proof, Proof]]:
        return [(self.real[fake.rank], fake) for fake in self.fake]

    @property
    def peak_off(self) -> float:
        """The largest distance of a real peak from the fake one, as a share of the latter."""
        return max(abs(real.peak.total.traced / fake.peak.total.traced - 1) for real, fake in self.pairs)

    def unplanned(self) -> list[str]:
        """State, communication and operations of the real ranks that are not what was predicted, and what they did not
        give up."""
        return [line for proof in self.real for line in _unplanned(proof)]

    def differences(self) -> list[str]:
        """Everything that must be equal with peers and alone and is not, and peaks that are not near."""
        found = [line for pair in self.pairs for line in _differences(*pair)]
        return [*found, *([f"peaks are {self.peak_off:.1%} apart"] if self.peak_off > NEAR else [])]


def beside(job: Job, pool: Pool, ranks: Sequence[int]) -> Beside:
    """Two steps of all ranks of `job` on gloo, and of each of `ranks` alone.

    A thread of gloo may let go of a message late, so a real rank may hold too much, and never too little: where
    anything differs, the ranks among their peers run again.
    """
    job = replace(job, run=replace(job.run, device="cpu"))
    planned = make_plan(job, program_software(job))
    fake = tuple(prove_rank(job, role, planned) for role in chosen(job, tuple(ranks)))
    for _ in range(TRIES):
        found = Beside(tuple(pool.run(trace_rank, job.parallel.world, job, planned)), fake)
        if not (found.differences() or found.unplanned()):
            break
    return found


def _differences(real: Proof, fake: Proof) -> Iterator[str]:
    at = f"rank {real.rank}: "
    for what in COUNTED:
        counted, wanted = (_traced(getattr(proof, what)) for proof in (real, fake))
        for name in sorted(counted.keys() | wanted.keys()):
            if counted.get(name) != wanted.get(name):
                yield f"{at}{what} of {name} {counted.get(name, 0):,}, alone {wanted.get(name, 0):,}"
    if real.peak_state != fake.peak_state:
        yield f"{at}state within the step {real.peak_state}, alone {fake.peak_state}"
    if [sample.action for sample in real.samples] != [sample.action for sample in fake.samples]:
        yield f"{at}the actions of the step differ"
        return
    for here, alone in zip(real.samples, fake.samples, strict=True):
        for name in KEPT:
            if here.left[name] != alone.left[name]:
                yield f"{at}{name} after {here.action} {here.left[name]:,}, alone {alone.left[name]:,}"
    if real.peak.action == fake.peak.action:
        for line, theirs in zip(real.peak.memory, fake.peak.memory, strict=True):
            if abs(line.traced - theirs.traced) > NEAR * fake.peak.total.traced:
                yield f"{at}{line.name} at the peak {line.traced:,}, alone {theirs.traced:,}"


def _unplanned(proof: Proof) -> Iterator[str]:
    for what in COUNTED:
        lines: Sequence[Line] = getattr(proof, what)
        for line in lines:
            if not line.equal:
                yield f"rank {proof.rank}: {what} of {line.name} {line.traced:,}, planned {line.predicted:,}"
    yield from (f"rank {proof.rank}: {name} outlives the step, {n:,} bytes" for name, n in proof.left_over.items())
    yield from (f"rank {proof.rank}: weights of {name} outlive being given up" for name in proof.survivors)


def _traced(lines: Sequence[Line]) -> dict[str, int]:
    return {line.name: line.traced for line in lines}
