"""What is alive on a rank of this project's engine at each action of a step, unit by unit.

While a unit works there are: what all microbatches under way keep; the unit's own storages (units.py); weights that
ZeRO-3 has gathered for it and ahead of it; its whole gradients, where those of each microbatch are reduced, and the
shard that comes of them; in the last backward of a step what the reductions of units that are through with it have
received, where gradients are reduced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from trigrid.plan.units import Working
from trigrid.schedule import Action, Kind, Schedule, make_schedule, messages_alive

NUMBERS = {kind: number for number, kind in enumerate(Kind)}
EMBEDDING, HEAD = "embedding", "head"


class Moment(NamedTuple):
    """The fullest moment of an action, in bytes. total: of its own microbatch, and of what is no microbatch's; of it,
    kept: activations that were there or stay, head: whatever the head has, arrived: the message that a backward starts
    from; unit: its kind."""

    total: float
    kept: float
    head: float
    arrived: float
    unit: str


class Zero(NamedTuple):
    """Bytes per element of: weights while they are gathered, and of the shard that is sent meanwhile, where it is a
    copy in another format; gradients while they are whole; what there is at the end of their reduction, for each
    microbatch; what waits for the update, reduced once a step, and the sum that is made of it first, if it is no sum
    yet. ahead: units whose weights are gathered ahead."""

    gathered: float
    sent: float
    whole: float
    shard: float
    once: float
    summed: float
    ahead: int


class Line(NamedTuple):
    """The units of a stage in order, by their kinds, with elements of weights: of the bucket of each, of those that are
    open while it runs in a forward, in a whole backward and in one of the input; leaves: no unit before it has the same
    bucket."""

    kinds: tuple[tuple[str, int], ...]
    own: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    of_input: tuple[int, ...]
    leaves: tuple[bool, ...]


class Chunk(NamedTuple):
    """A stage. kept: from forward to backward; later: from the backward of the input to that of the weights; moments:
    of each kind of action; last: of the last backward of a step; reduced: what waits for the update from there on,
    buckets: elements of each; embedding: of what is kept, the embedding's; head: of what is kept and what waits, the
    head's."""

    kept: float
    later: float
    moments: tuple[Moment, ...]
    last: tuple[Moment, ...]
    reduced: float
    buckets: tuple[int, ...]
    embedding: float
    head: tuple[float, float]

    @property
    def before(self) -> tuple[float, ...]:
        """What an action finds of its microbatch, by its kind."""
        return (0.0, self.kept, self.kept, self.later)[: len(self.moments)]

    @property
    def after(self) -> tuple[float, ...]:
        """What it leaves."""
        return (self.kept, 0.0, self.later, 0.0)[: len(self.moments)]


def line(kinds: tuple[tuple[str, int], ...], sizes: Mapping[str, int], shared: int, ahead: int) -> Line:
    """sizes: elements of a unit of each kind; shared: most elements of a bucket that neighbours share."""
    numel: list[int] = []
    at: list[int] = []
    for kind, count in kinds:
        for _ in range(count):
            if numel and numel[-1] + sizes[kind] <= shared:
                numel[-1] += sizes[kind]
            else:
                numel.append(sizes[kind])
            at.append(len(numel) - 1)
    last = len(at) - 1
    first = min(last, int(kinds[0][0] == EMBEDDING))

    def opened(start: int, stop: int) -> int:
        return sum(numel[at[start] : at[stop] + 1])

    return Line(
        kinds,
        own=tuple(numel[bucket] for bucket in at),
        forward=tuple(opened(unit, min(unit + ahead, last)) for unit in range(last + 1)),
        backward=tuple(opened(max(unit - ahead, 0), unit) for unit in range(last + 1)),
        of_input=tuple(opened(max(unit - ahead, first), unit) for unit in range(last + 1)),
        leaves=tuple(unit == 0 or at[unit - 1] != at[unit] for unit in range(last + 1)),
    )


class _Stage:
    """units: by kind; boundary: bytes that units hand on; arrives: of the gradient that a stage behind has sent, which
    is there during a whole backward."""

    def __init__(self, line: Line, units: Mapping[str, Working], zero: Zero, boundary: float):
        self.line, self.units, self.zero, self.boundary = line, units, zero, boundary
        self.arrives = 0.0 if line.kinds[-1][0] == HEAD else boundary
        self.embeds = line.kinds[0][0] == EMBEDDING

    def forwards(self) -> Iterator[Moment]:
        kept, number = 0.0, 0
        for kind, count in self.line.kinds:
            unit = self.units[kind]
            for i in self._some(count):
                gathered = self._gathered(self.line.forward[number + i], self.line.own[number + i])
                before = kept + i * unit.kept
                yield _moment(kind, before, unit.kept, unit.forward + gathered, 0.0)
            kept, number = kept + count * unit.kept, number + count

    def _gathered(self, opened: int, own: int) -> float:
        return self.zero.gathered * opened + self.zero.sent * (opened - own)

    def backwards(self, kind: Kind, last: bool) -> Iterator[Moment]:
        """Of a backward, whole or of one half."""
        zero, reduced = self.zero, 0.0
        left = sum(count * self._held(name, kind) for name, count in self.line.kinds)
        number = len(self.line.own)
        arrives, halves = 0.0, kind is Kind.WEIGHT
        if halves:
            left += self.boundary if self.embeds else 0.0
        for name, count in reversed(self.line.kinds):
            unit, held = self.units[name], self._held(name, kind)
            if kind is Kind.INPUT and name == EMBEDDING:
                continue
            stays = unit.later if kind is Kind.INPUT else 0.0
            working = unit.of_input if kind is Kind.INPUT else unit.of_weights if kind is Kind.WEIGHT else unit.whole
            if name == EMBEDDING and kind is Kind.WEIGHT:
                # It runs its whole backward now, from the gradient that has waited.
                halves, left = False, left - self.boundary
            for i in self._some(count):
                at = number - 1 - i
                rest = left - (i + 1) * held + i * stays
                came = self._arrives(kind) if i else arrives
                waits = reduced + (zero.once * self._through(number, i) if last else 0.0)
                whole = 0.0 if kind is Kind.INPUT else zero.whole * self.line.own[at]
                opened, own = (self.line.of_input if kind is Kind.INPUT else self.line.backward)[at], self.line.own[at]
                gathered = 0.0 if halves else self._gathered(opened, own)
                yield _moment(name, rest + came, held, working + gathered + whole + waits, self._arrives(kind))
                if kind is not Kind.INPUT and self.line.leaves[at]:
                    shard = (zero.shard + (zero.once if last else 0.0)) * own
                    ahead = 0.0 if halves else gathered - zero.gathered * own
                    # What a unit gives to the one before it; an embedding's own gradient stays until it has left.
                    into = self.boundary if (kind is Kind.BACKWARD) != (name == EMBEDDING) else 0.0
                    rest += self._arrives(kind)
                    yield _moment(name, rest, 0.0, into + ahead + whole + waits + shard, self._arrives(kind))
            left -= count * (held - stays)
            if last:
                reduced += zero.once * self._through(number, count)
            arrives, number = self._arrives(kind), number - count

    def _arrives(self, kind: Kind) -> float:
        """Of the gradient that has come from a stage behind, after the unit that it was for."""
        if kind is Kind.INPUT and self.units[self.line.kinds[-1][0]].passed:
            return 0.0
        return 0.0 if kind is Kind.WEIGHT else self.arrives

    def _held(self, name: str, kind: Kind) -> float:
        unit = self.units[name]
        return unit.later if kind is Kind.WEIGHT and name != EMBEDDING else unit.kept

    def _through(self, number: int, count: int) -> int:
        """Elements of the buckets that `count` units before `number` leave."""
        pairs = zip(self.line.own[number - count : number], self.line.leaves[number - count : number], strict=True)
        return sum(own for own, leaves in pairs if leaves)

    def _some(self, count: int) -> Sequence[int]:
        """Of units alike those of which one is the fullest: the first ones and the last, before which weights are
        gathered ahead for fewer."""
        ends = 2 + self.zero.ahead
        return range(count) if count <= 2 * ends else (*range(ends), *range(count - ends, count))


def _moment(name: str, rest: float, kept: float, working: float, arrived: float) -> Moment:
    """rest: what other units keep; working: of the unit and beside it, of which it keeps `kept`."""
    head = name == HEAD
    return Moment(rest + working, rest + (0.0 if head else kept), working if head else 0.0, arrived, name)


def chunk(line: Line, units: Mapping[str, Working], zero: Zero, boundary: float, splits: bool) -> Chunk:
    """units: by kind; boundary: bytes that units hand on; splits: there are backwards in halves."""
    stage = _Stage(line, units, zero, boundary)
    kept = sum(count * units[name].kept for name, count in line.kinds)
    later = sum(count * units[name].later for name, count in line.kinds)
    if stage.embeds:
        later += units[EMBEDDING].kept + boundary
    kinds = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT) if splits else (Kind.BACKWARD,)
    # An embedding alone has no backward of its input.
    idle = Moment(kept, kept, 0.0, 0.0, EMBEDDING)
    forward = max(stage.forwards())
    moments = (forward, *(max(stage.backwards(kind, last=False), default=idle) for kind in kinds))
    last = moments
    if zero.once:
        last = (forward, *(max(stage.backwards(kind, last=True), default=idle) for kind in kinds))
    buckets = tuple(own for own, leaves in zip(line.own, line.leaves, strict=True) if leaves)
    head = units[HEAD] if line.kinds[-1][0] == HEAD else None
    heads = (head.kept, head.later) if head else (0.0, 0.0)
    embedding = units[EMBEDDING].kept if stage.embeds else 0.0
    return Chunk(kept, later, moments, last, zero.once * sum(buckets), buckets, embedding, heads)


def reduced(buckets: Sequence[int], zero: Zero) -> tuple[float, float]:
    """Bytes of the reduced shards of buckets of so many elements, which wait for the update, and the most that there
    is while each has its sum made of what has waited, one after the other."""
    numel = sum(buckets)
    if not zero.summed:
        return zero.once * numel, zero.once * numel
    now = most = zero.once * numel
    for bucket in buckets:
        most = max(most, now + zero.summed * bucket)
        now += (zero.summed - zero.once) * bucket
    return now, most


# Ranks


class Turns(NamedTuple):
    """The actions of a rank, each as a number (`_place`), and how many messages are there during each of them
    (`schedule.messages_alive`); last: which of them is the first that is the last backward of a stage."""

    places: tuple[int, ...]
    messages: tuple[int, ...]
    last: int


def _place(number: int, kind: int, last: bool) -> int:
    """Of an action of `kind` of the rank's stage `number`, which is its last backward or not."""
    return 8 * number + 2 * kind + last


@lru_cache(maxsize=64)
def named_turns(name: str, pp: int, microbatches: int, virtual: int) -> tuple[Turns, ...]:
    """By rank of a named schedule, without rounds that are like those before."""
    if name != "gpipe":
        microbatches = min(microbatches, 3 * pp + microbatches % pp)
    return turns_of(make_schedule(name, pp, microbatches, virtual))


def turns_of(schedule: Schedule) -> tuple[Turns, ...]:
    """By rank."""
    return tuple(map(_turns, schedule.ranks, messages_alive(schedule)))


def _turns(actions: Sequence[Action], messages: tuple[int, ...]) -> Turns:
    numbers = {stage: number for number, stage in enumerate(sorted({action.stage for action in actions}))}
    last = {action.stage: at for at, action in enumerate(actions) if action.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    places = (
        _place(numbers[stage], NUMBERS[kind], last.get(stage) == at) for at, (kind, stage, _) in enumerate(actions)
    )
    return Turns(tuple(places), messages, min(last.values(), default=len(actions)))


class Fullest(NamedTuple):
    """The fullest moment of a rank's actions. total: all that is no state; messages: of it, those between stages; held:
    what other microbatches keep beside what the head has of them, `heads`; earlier: where shards wait for the update,
    the fullest moment before."""

    total: float
    messages: float
    held: float
    heads: float
    moment: Moment
    earlier: float = 0.0


def fullest(chunks: Sequence[Chunk], mine: Turns, boundary: float) -> Fullest:
    """Of a rank that holds `chunks`; boundary: bytes of a message."""
    places, messages, last = mine
    # By place: what an action has beside what was there, and what it leaves of that.
    beside: list[float] = []
    change: list[float] = []
    for chunk in chunks:
        for kind, (before, after) in enumerate(zip(chunk.before, chunk.after, strict=True)):
            beside += (chunk.moments[kind].total - before, chunk.last[kind].total - before)
            change += (after - before, after - before + chunk.reduced)
        # Backwards in halves that it does not have.
        beside += (0.0,) * (-len(beside) % _place(1, 0, False))
        change += (0.0,) * (-len(change) % _place(1, 0, False))
    held = accumulate([change[place] for place in places[:-1]], initial=0.0)
    totals = [here + beside[place] + boundary * n for here, place, n in zip(held, places, messages, strict=True)]
    most = max(totals)
    at = totals.index(most)
    number, (kind, ends) = places[at] // 8, divmod(places[at] % 8, 2)
    now = chunks[number]
    moment, waits = (now.last if ends else now.moments)[kind], any(chunk.reduced for chunk in chunks)
    heads = -now.head[kind == 3] if kind else 0.0
    if any(chunk.head[0] for chunk in chunks):
        for place in places[:at]:
            kept, later = chunks[place // 8].head
            heads += (kept, -kept, later - kept, -later)[place % 8 // 2]
    earlier = max(totals[:last], default=0.0) if waits and at >= last else 0.0
    waited = sum(chunks[place // 8].reduced for place in places[last:at] if place % 2)
    others = most - boundary * messages[at] - moment.total - waited
    return Fullest(most, boundary * messages[at], others - heads, heads, moment, earlier)
