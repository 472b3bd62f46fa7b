"""What is alive on a rank of this project's engine at each action of a step, unit by unit.

While a unit works there are: what all microbatches under way keep; the unit's own storages (units.py); weights that
ZeRO-3 has gathered for it and ahead of it; its whole gradients, where those of each microbatch are reduced, and the
shard that comes of them; in the last backward of a step what the reductions of units that are through with it have
received, where gradients are reduced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trigrid.plan.backend import EXCHANGE_BYTES
from trigrid.plan.units import Working
from trigrid.schedule import Kind

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
    """Bytes per element of: weights while they are gathered, those that are trained and those that are not; the shard
    that is sent meanwhile, where it is a copy in another format, which only what is trained has; gradients of a
    microbatch while they are whole, and what their reduction receives into: both stay until the next one begins; what
    waits for the update, reduced once a step, and the sum that is made of it first, if it is no sum yet; what waits
    beside gradients that are summed as they are, of buckets of at most EXCHANGE_BYTES. ahead: units whose weights are
    gathered ahead."""

    gathered: float
    still: float
    sent: float
    whole: float
    arriving: float
    once: float
    summed: float
    copied: float
    ahead: int

    def waits(self, numel: int) -> float:
        """Of a bucket of so many elements."""
        copied = self.copied * numel
        return self.once * numel + (copied if copied <= EXCHANGE_BYTES else 0.0)


class Sizes(NamedTuple):
    """Elements of a unit on one TP rank, that are trained and that are not, and of the tied weight it shares, likewise:
    one of these two is 0."""

    trained: int
    still: int
    tied: int
    tied_still: int

    @property
    def numel(self) -> int:
        return sum(self)

    @property
    def gradients(self) -> int:
        return self.trained + self.tied


class Line(NamedTuple):
    """The units of a stage in order, by their kinds, and bytes of each.

    forward, backward, of_input: weights that are gathered while it works in a forward, in a whole backward and in one
    of the input; own: of them, those that it gives up when it is through. whole: its gradients while they are whole.
    closing: those and what is received, while their reduction begins, where it does; pending: what is left of that
    until the next one begins. waits: what waits for the update from there on, of buckets of so many elements. shares:
    some have a bucket together. embeds: it begins with an embedding that has a backward.
    """

    kinds: tuple[tuple[str, int], ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    of_input: tuple[float, ...]
    own: tuple[float, ...]
    whole: tuple[float, ...]
    closing: tuple[float, ...]
    pending: tuple[float, ...]
    waits: tuple[float, ...]
    buckets: tuple[int, ...]
    shares: bool
    embeds: bool


class Shared(NamedTuple):
    """Bytes that the blocks of a stage keep together of one microbatch, from the first one's forward to its backward,
    and while that makes them."""

    kept: float = 0.0
    making: float = 0.0


class Chunk(NamedTuple):
    """A stage. kept: from forward to backward; later: from the backward of the input to that of the weights; moments:
    of each kind of action, before it begins a reduction of its own, and from there on, where it does; last: of the last
    backward of a step; pending: what the last reduction that it has begun holds; reduced: what waits for the update
    from there on, of buckets of so many elements; embedding: of what is kept, the embedding's; head: of what is kept
    and what waits, the head's."""

    kept: float
    later: float
    moments: tuple[Moments, ...]
    last: tuple[Moments, ...]
    pending: float
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


class Moments(NamedTuple):
    """The fullest moment of an action before it begins a reduction of its own, beside which that of an earlier action
    may be under way, and from there on."""

    first: Moment
    then: Moment | None

    def most(self, pending: float) -> Moment:
        """The fuller one, where the earlier reduction holds so many bytes."""
        first = self.first._replace(total=self.first.total + pending) if pending else self.first
        return max(first, self.then) if self.then else first


def line(
    kinds: tuple[tuple[str, int], ...], sizes: Mapping[str, Sizes], shared: int, zero: Zero, tied_before: bool
) -> Line:
    """sizes: of a unit of each kind; shared: most elements of a bucket that neighbours share; tied_before: the rank's
    embedding has the tied weight too, so that the head's gradients of it do not wait: the embedding's do."""
    units = [sizes[kind] for kind, count in kinds for _ in range(count)]
    groups: list[list[int]] = []
    held = 0
    for number, unit in enumerate(units):
        numel = unit.trained + unit.still
        if groups and held + numel <= shared:
            groups[-1].append(number)
            held += numel
        else:
            groups.append([number])
            held = numel
    at = [place for place, group in enumerate(groups) for _ in group]
    trained, still = ([sum(units[n][i] for n in group) for group in groups] for i in (0, 1))
    embeds = kinds[0][0] == EMBEDDING and units[0].gradients > 0
    last, first = len(units) - 1, int(kinds[0][0] == EMBEDDING)
    everyone = range(last + 1)

    def gathered(start: int, stop: int) -> tuple[float, float]:
        """Of units start..stop: (weights, shards that are sent)."""
        several = range(start, stop + 1)
        weights = sum(trained[i] for i in {at[n] for n in several if units[n].trained})
        frozen = sum(still[i] for i in {at[n] for n in several if units[n].still})
        weights += sum(units[n].tied for n in several)
        frozen += sum(units[n].tied_still for n in several)
        return zero.gathered * weights + zero.still * frozen, zero.sent * weights

    def opened(unit: int, start: int, stop: int) -> float:
        weights, sent = gathered(start, stop)
        return weights + sent - gathered(unit, unit)[1]

    def goes_on(n: int) -> bool:
        """Whether the unit before it has gradients in the same bucket."""
        return n > 0 and at[n - 1] == at[n] and units[n - 1].trained > 0

    own = [trained[at[n]] if units[n].trained else 0 for n in everyone]
    closed = [0 if goes_on(n) else own[n] for n in everyone]
    # Once a step: after the last unit that has any.
    done = [own[n] if n == next((i for i in groups[at[n]] if units[i].trained), -1) else 0 for n in everyone]
    tied = [0 if tied_before and n == last else units[n].tied for n in everyone]
    closings = [_closing(zero, own[n] + units[n].tied, (closed[n], units[n].tied), n == 0) for n in everyone]
    return Line(
        kinds,
        forward=tuple(opened(n, n, min(n + zero.ahead, last)) for n in everyone),
        backward=tuple(opened(n, max(n - zero.ahead, 0 if embeds else min(first, n)), n) for n in everyone),
        of_input=tuple(opened(n, max(n - zero.ahead, min(first, n)), n) for n in everyone),
        own=tuple(gathered(n, n)[0] for n in everyone),
        whole=tuple(zero.whole * (own[n] + units[n].tied) for n in everyone),
        closing=tuple(closing for closing, _ in closings),
        pending=tuple(pending for _, pending in closings),
        waits=tuple(zero.waits(done[n]) + zero.waits(tied[n]) for n in everyone),
        buckets=tuple(numel for pair in zip(done, tied, strict=True) for numel in pair if numel),
        shares=len(groups) <= last,
        embeds=embeds,
    )


def _closing(zero: Zero, open_numel: int, closed: tuple[int, int], tied_first: bool) -> tuple[float, float]:
    """(most while reductions begin of two buckets of so many elements, one after the other, what the last one holds),
    where gradients of `open_numel` elements are whole."""
    most = pending = 0.0
    left = zero.whole * open_numel
    for numel in (closed[::-1] if tied_first else closed) if zero.whole else ():
        if numel:
            most = max(most, left + zero.arriving * numel)
            left -= zero.whole * numel
            pending = (zero.whole + zero.arriving) * numel if zero.arriving else 0.0
    return most, pending


class _Stage:
    """units: by kind; boundary: bytes that units hand on; arrives: of the gradient that a stage behind has sent, which
    is there during a whole backward."""

    def __init__(self, line: Line, units: Mapping[str, Working], zero: Zero, boundary: float, shared: Shared):
        self.line, self.units, self.zero, self.boundary, self.shared = line, units, zero, boundary, shared
        self.arrives = 0.0 if line.kinds[-1][0] == HEAD else boundary

    def forwards(self) -> Iterator[Moment]:
        kept, number, shared = 0.0, 0, self.shared.kept
        for kind, count in self.line.kinds:
            unit = self.units[kind]
            if shared and kind != EMBEDDING:
                yield _moment(kind, kept, 0.0, self.boundary + self.shared.making + self.line.forward[number], 0.0)
                kept, shared = kept + shared, 0.0
            for i in self._some(count):
                before = kept + i * unit.kept
                yield _moment(kind, before, unit.kept, unit.forward + self.line.forward[number + i], 0.0)
            kept, number = kept + count * unit.kept, number + count

    def backwards(self, kind: Kind, last: bool) -> Iterator[tuple[bool, Moment]]:
        """Of a backward, whole or of one half, and whether it has begun a reduction."""
        line, reduced, pending, begun = self.line, 0.0, 0.0, False
        left = sum(count * self._held(name, kind) for name, count in line.kinds)
        shared = 0.0 if kind is Kind.WEIGHT else self.shared.kept
        left += shared
        number = len(line.own)
        arrives, halves = 0.0, kind is Kind.WEIGHT
        if halves:
            left += self.boundary if line.embeds else 0.0
        for name, count in reversed(line.kinds):
            unit, held = self.units[name], self._held(name, kind)
            if name == EMBEDDING and (kind is Kind.INPUT or not line.embeds):
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
                waits = reduced + sum(line.waits[at + 1 : number]) if last else 0.0
                whole = 0.0 if kind is Kind.INPUT else line.whole[at]
                gathered = 0.0 if halves else (line.of_input if kind is Kind.INPUT else line.backward)[at]
                beside = gathered + whole + pending + waits
                yield begun, _moment(name, rest + came, held, working + beside, self._arrives(kind))
                if kind is not Kind.INPUT and (line.closing[at] or line.waits[at]):
                    begun, pending = begun or line.closing[at] > 0, line.pending[at] or pending
                    ahead = 0.0 if halves else gathered - line.own[at]
                    closing = line.closing[at] + waits + (line.waits[at] if last else 0.0)
                    # What a unit gives to the one before it; an embedding's own gradient stays until it has left.
                    into = self.boundary if (kind is Kind.BACKWARD) != (name == EMBEDDING) else 0.0
                    rest += self._arrives(kind) - (shared if at == self._first_block else 0.0)
                    yield begun, _moment(name, rest, 0.0, into + ahead + closing, self._arrives(kind))
            left -= count * (held - stays) + (shared if number - count == self._first_block else 0.0)
            if last:
                reduced += sum(line.waits[number - count : number])
            arrives, number = self._arrives(kind), number - count

    def _arrives(self, kind: Kind) -> float:
        """Of the gradient that has come from a stage behind, after the unit that it was for."""
        if kind is Kind.INPUT and self.units[self.line.kinds[-1][0]].passed:
            return 0.0
        return 0.0 if kind is Kind.WEIGHT else self.arrives

    @property
    def _first_block(self) -> int:
        return int(self.line.kinds[0][0] == EMBEDDING)

    def _held(self, name: str, kind: Kind) -> float:
        unit = self.units[name]
        return unit.later if kind is Kind.WEIGHT and name != EMBEDDING else unit.kept

    def _some(self, count: int) -> Sequence[int]:
        """Of units alike those of which one is the fullest: the first ones and the last, before which weights are
        gathered ahead for fewer. Units that share buckets are not alike."""
        ends = 2 + self.zero.ahead
        few = count <= 2 * ends or self.line.shares
        return range(count) if few else (*range(ends), *range(count - ends, count))


def _moment(name: str, rest: float, kept: float, working: float, arrived: float) -> Moment:
    """rest: what other units keep; working: of the unit and beside it, of which it keeps `kept`."""
    head = name == HEAD
    return Moment(rest + working, rest + (0.0 if head else kept), working if head else 0.0, arrived, name)


def chunk(line: Line, units: Mapping[str, Working], zero: Zero, boundary: float, splits: bool, shared: Shared) -> Chunk:
    """units: by kind; boundary: bytes that units hand on; splits: there are backwards in halves."""
    stage = _Stage(line, units, zero, boundary, shared)
    kept = shared.kept + sum(count * units[name].kept for name, count in line.kinds)
    later = sum(count * units[name].later for name, count in line.kinds)
    if line.embeds:
        later += units[EMBEDDING].kept + boundary
    kinds = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT) if splits else (Kind.BACKWARD,)
    # An embedding alone has no backward of its input.
    idle = Moment(kept, kept, 0.0, 0.0, EMBEDDING)

    def fullest_of(kind: Kind, last: bool) -> Moments:
        found = list(stage.backwards(kind, last))
        first, then = (max((m for begun, m in found if begun is which), default=None) for which in (False, True))
        return Moments(first or idle, then)

    forward = Moments(max(stage.forwards()), None)
    moments = (forward, *(fullest_of(kind, last=False) for kind in kinds))
    last = (forward, *(fullest_of(kind, last=True) for kind in kinds)) if any(line.waits) else moments
    pending = next((held for held in line.pending if held), 0.0)
    head = units[HEAD] if line.kinds[-1][0] == HEAD else None
    heads = (head.kept, head.later) if head else (0.0, 0.0)
    embedding = units[EMBEDDING].kept if line.embeds else 0.0
    return Chunk(kept, later, moments, last, pending, sum(line.waits), line.buckets, embedding, heads)


def reduced(buckets: Sequence[int], zero: Zero) -> tuple[float, float]:
    """Bytes of the reduced shards of buckets of so many elements, which wait for the update, and the most that there
    is while each has its sum made of what has waited, one after the other."""
    now = most = sum(zero.waits(numel) for numel in buckets)
    for numel in buckets:
        most = max(most, now + zero.summed * numel)
        if zero.summed or not zero.once:
            now += zero.summed * numel - zero.waits(numel)
    return now, most
