"""Memory of this project's engine: programs on a tape, and the fullest moment of a rank's actions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from trigrid.blueprint.claims import claims
from trigrid.blueprint.terms import Kernels, saved_bytes
from trigrid.plan.alive import Zero, reduced
from trigrid.plan.compute import Cut
from trigrid.plan.constants import shipped
from trigrid.plan.engine_memory import EngineMemory
from trigrid.plan.setup import Setup
from trigrid.plan.software import SOFTWARE
from trigrid.plan.tape import Gradients, Storage, Tape
from trigrid.plan.units import Unit
from trigrid.spec.models import load_model

ENGINE = SOFTWARE["trigrid"]
KERNELS = {
    "as it is": ENGINE.kernels,
    "gathered again": replace(ENGINE.kernels, regather=True),
    "documents": replace(ENGINE.kernels, documents=True),
    "scores dropped": replace(ENGINE.kernels, fused_attention=False, hashed_dropout=True, hashed_scores=True),
    "in pieces": replace(ENGINE.kernels, loss="pieces", pieces=4),
}


def test_a_tape_counts_what_is_alive() -> None:
    """y = f(x) keeps x and y; its backward makes the gradient of x beside that of y, and then lets go."""
    tape = Tape()
    x = tape.make(3)
    y = tape.make(5)

    def back() -> Gradients:
        gradient = tape.take(y)
        found = tape.make(x.size)
        tape.drop(gradient)
        return [(x, found)]

    tape.record(back, x, y)
    tape.drop(y)
    assert tape.now == 3 + 5
    y.gradient = tape.make(5)
    tape.backward()
    assert tape.most == 3 + 5 + 5 + 3
    assert tape.now == 3 + 3


def test_a_second_gradient_is_added_into_a_storage_of_its_own() -> None:
    tape = Tape()
    x = Storage(0)
    tape.give(x, tape.make(4))
    tape.give(x, tape.make(4))
    assert (tape.most, tape.now) == (12, 4)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "qwen3-8b"])
def test_programs_keep_what_the_claims_say(name: str, kernels: str) -> None:
    """But for a few numbers of each token: sums of norms, places of labels."""
    spec, use = load_model(name), KERNELS[kernels]
    for (tp, sp), recompute in product([(1, False), (8, False), (8, True)], ["none", "selective"]):
        cut = Cut(tp, 1, 1, sp, 2, 2048)
        # Others gather the head's input again, too.
        for kind in (spec.block,) if use.regather else (spec.block, "head"):
            found = Unit(spec, use, cut, 2, recompute, True).working(kind).kept
            claimed = saved_bytes(
                claims(spec, kind, use).saved,
                tokens=cut.tokens,
                sequence=cut.sequence,
                tp=tp,
                sequence_parallel=sp,
                compute_bytes=2,
                selective=recompute == "selective",
            )
            few = 4 * (10 + 2 * spec.heads) * cut.tokens
            assert claimed - 1 <= found <= claimed + few, (kind, tp, sp, recompute)


def test_gradients_of_weights_do_not_wait_for_the_end_of_a_backward() -> None:
    """A block of 405B: with few tokens its backward has one product's gradient at a time, not all of them."""
    spec = load_model("llama3-405b")
    unit = Unit(spec, ENGINE.kernels, Cut(8, 1, 1, True, 1, 64), 2, "none", False).working("llama")
    largest = spec.hidden * 2 * spec.ffn / 8 * 2
    assert largest < unit.whole < 1.1 * largest


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)],
)
def test_the_closed_form_is_never_below_the_replay(schedule: str, virtual: int) -> None:
    """Of equal stages, whatever is recomputed and sharded; in 1F1B the two are equal."""
    memory = EngineMemory(replace(load_model("llama3-8b"), layers=24), ENGINE, shipped())
    for pp, zero, recompute, sequence in product((2, 3, 4), (0, 1, 2, 3), ("none", "selective", "full"), (512, 4096)):
        for m in (1, 2, pp, 2 * pp, 3 * pp):
            setup = Setup(
                tp=2,
                pp=pp,
                dp=4,
                zero=zero,
                gather_per_use=zero == 3,
                reduce_per_microbatch=zero >= 2,
                schedule=schedule,
                virtual=virtual,
                microbatches=m,
                recompute=recompute,
                sequence=sequence,
            )
            if schedule == "interleaved" and m % pp:
                continue
            for rank in range(pp):
                closed, replayed = (memory.use(setup, rank, exact=e).training_bytes for e in (False, True))
                assert closed >= replayed - 16, (setup, rank)
                assert schedule != "1f1b" or m <= pp or closed <= replayed * 1.005, (setup, rank)


def test_what_has_waited_is_summed_bucket_by_bucket() -> None:
    """Of four ranks: parts of 4 bytes an element, then each bucket's sum of 1 beside all that is left of them."""
    sharing = Zero(*(0.0,) * 5, once=4.0, summed=1.0, copied=0.0, ahead=0)
    assert reduced([100, 10], sharing) == (110, 440 + 100)
    # The first one gives up 400 for 100, and then the second needs 1000.
    assert reduced([100, 1000], sharing) == (1100, 4400 - 300 + 1000)
    assert reduced([10, 1000], sharing._replace(once=1.0, summed=0.0)) == (1010, 1010)


def test_kernels_that_a_norm_needs_are_named() -> None:
    """Written out, a norm of bf16 has five times its numbers in fp32 beside it; as one kernel it has its result."""
    spec, cut = replace(load_model("llama3-8b"), ffn=1024), Cut(1, 1, 1, False, 1, 4096)
    kernels = Kernels(selective="cheap")
    one, out = (
        Unit(spec, replace(kernels, fused_norm=f), cut, 2, "none", False).working("llama") for f in (True, False)
    )
    assert out.whole > one.whole
    assert out.kept == one.kept
