"""What a rank may hold of microbatches under way, and the least time that a step can take within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from trigrid.schedule.actions import Schedule
from trigrid.schedule.memory import peak_bytes
from trigrid.schedule.replay import Durations


@dataclass(frozen=True, kw_only=True)
class Limits:
    """By stage, bytes held from a forward to its input backward (forward_bytes) and from there to the weight backward
    (weight_bytes), as in `peak_bytes`; most_bytes: by rank, what it may hold of them at most, inf for no limit.

    Any unit will do: with ones for bytes the limit is a number of chunks in flight.
    """

    forward_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    most_bytes: tuple[float, ...]

    @classmethod
    def chunks(cls, stages: int, most: Sequence[float]) -> Limits:
        """most: by rank, stages times microbatches that it may hold until their weight backward."""
        return cls(forward_bytes=(1,) * stages, weight_bytes=(1,) * stages, most_bytes=tuple(most))

    def allow(self, schedule: Schedule) -> bool:
        """Whether no rank ever holds more in `schedule`."""
        return self.peaks(schedule) is not None

    def peaks(self, schedule: Schedule) -> tuple[int, ...] | None:
        """By rank, the most that it holds in `schedule`; None where that is more than one may."""
        peaks = peak_bytes(schedule, self.forward_bytes, self.weight_bytes)
        return peaks if all(peak <= most for peak, most in zip(peaks, self.most_bytes, strict=True)) else None


def lower_bound(durations: Durations, placement: Sequence[int], microbatches: int, limits: Limits) -> float:
    """Seconds that no schedule of these stages can beat, whatever its order and however it splits backwards.

    The largest over all ranks of these, each a relaxation:
    - all its work, after the first microbatch has come to it;
    - all its forwards and input backwards after that, then the last gradient's way to the first stage and its weights;
    - the work that is left when its first gradient can arrive: until then it only runs forwards, as many as fit;
    - what it holds: each microbatch at least from its forward until its gradient can be back, in limited room.
    """
    stages, f = len(placement), durations.forward_s
    grad = [min(i, b) for i, b in zip(durations.input_s, durations.backward_s, strict=True)]
    back = [min(b, i + w) for b, i, w in zip(durations.backward_s, durations.input_s, durations.weight_s, strict=True)]
    hops = [d if placement[s] != placement[s + 1] else 0.0 for s, d in enumerate(durations.p2p_s)]
    reached = [0.0]  # When the first microbatch can be at each stage.
    for s in range(stages - 1):
        reached.append(reached[s] + f[s] + hops[s])
    returned = [0.0] * stages  # When its gradient can be there.
    returned[-1] = reached[-1] + f[-1]
    for s in reversed(range(stages - 1)):
        returned[s] = returned[s + 1] + grad[s + 1] + hops[s]
    # What follows at least when a gradient has left a stage.
    tails = [0.0] * stages
    for s in range(1, stages):
        tails[s] = hops[s - 1] + (tails[s - 1] + grad[s - 1] if s > 1 else back[0])
    best = 0.0
    for rank, most in enumerate(limits.most_bytes):
        mine = [s for s in range(stages) if placement[s] == rank]
        head, tail = min(reached[s] for s in mine), min(tails[s] for s in mine)
        first = min(returned[s] for s in mine)
        busy = microbatches * sum(f[s] + back[s] for s in mine)
        hasty = microbatches * sum(f[s] + grad[s] for s in mine)
        ahead = _forwards_within(most, [(f[s], limits.forward_bytes[s]) for s in mine], microbatches)
        start = max(head, first - ahead)
        best = max(best, start + busy, start + hasty + tail)
        if 0 < most < inf:
            area = sum(limits.forward_bytes[s] * (returned[s] + grad[s] - reached[s]) for s in mine)
            best = max(best, head + microbatches * area / most + tail)
    return best


def _forwards_within(most_bytes: float, stages: Sequence[tuple[float, int]], microbatches: int) -> float:
    """Seconds of forwards that a rank can run at most before it gives anything back, parts of them allowed."""
    room, found = most_bytes, 0.0
    for seconds, size in sorted(stages, key=lambda stage: stage[1] / stage[0] if stage[0] else inf):
        many = min(float(microbatches), room / size if size else inf)
        found, room = found + many * seconds, room - many * size
    return found
