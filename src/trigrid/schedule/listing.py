"""List scheduling: a pipeline played forward in time by a policy, which yields the order of actions of each rank."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from trigrid.schedule.actions import Action, Kind
from trigrid.schedule.limits import Limits
from trigrid.schedule.replay import Durations


class Work(NamedTuple):
    """What is to be scheduled. placement: rank of each stage; split: backwards may be in two halves."""

    durations: Durations
    microbatches: int
    placement: tuple[int, ...]
    limits: Limits
    split: bool


class Policy(NamedTuple):
    """caps: by rank, bytes that it may hold; forwards_first: before gradients; deep, back_deep: of forwards, of
    gradients, those of the rank's later stage first.

    patience: waits for what is sure to come within this share of what it could do meanwhile. lag: with more weight
    backwards put off, they go before forwards; None: only where nothing else is ready. split: backwards are in halves.
    """

    caps: tuple[float, ...]
    forwards_first: bool
    deep: bool
    back_deep: bool
    patience: float
    lag: int | None
    split: bool


def listed(work: Work, policy: Policy) -> tuple[tuple[Action, ...], ...] | None:
    """Each rank's actions in order; None where the caps leave ranks waiting for room for ever."""
    return _Listing(work, policy).run()


class _Listing:
    def __init__(self, work: Work, policy: Policy) -> None:
        self.work, self.policy = work, policy
        stages, m, ranks = len(work.placement), work.microbatches, len(work.limits.most_bytes)
        self.mine = [[s for s in range(stages) if work.placement[s] == rank] for rank in range(ranks)]
        size = work.limits.forward_bytes
        # What an input backward leaves for the weights may be more than it gives back.
        self.grows = [max(0, w - f) if policy.split else 0 for f, w in zip(size, work.limits.weight_bytes, strict=True)]
        # Room is kept for that and the later stages of the same microbatch, or a rank may fill up and never go on.
        self.needs = []
        for s, rank in enumerate(work.placement):
            later = sum(size[t] for t in self.mine[rank] if t > s)
            self.needs.append(size[s] + later + max(self.grows[t] for t in self.mine[rank]))
        self.forwards, self.gradients = [0] * stages, [0] * stages
        self.forward_at = [[0.0 if s == 0 else inf] * m for s in range(stages)]
        self.gradient_at = [[inf] * m for _ in range(stages)]
        self.owed: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
        self.held = [0.0] * ranks
        self.free = [0.0] * ranks
        self.links: dict[tuple[int, int], float] = {}
        self.events = [(0.0, rank) for rank in range(ranks)]
        self.done: list[list[Action]] = [[] for _ in range(ranks)]

    def run(self) -> tuple[tuple[Action, ...], ...] | None:
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free[rank] and (action := self._chosen(rank, now)) is not None:
                self._do(rank, action, now)
        whole = all(done == self.work.microbatches for done in self.gradients) and not any(self.owed)
        return tuple(map(tuple, self.done)) if whole else None

    def _chosen(self, rank: int, now: float) -> Action | None:
        """What `rank` starts now, or None where it waits."""
        policy, d, m = self.policy, self.work.durations, self.work.microbatches
        forward = gradient = None
        forward_due = gradient_due = inf
        full = False
        room = policy.caps[rank] - self.held[rank]
        for s in self.mine[rank]:
            k = self.gradients[s]
            if k < self.forwards[s]:
                at = self.gradient_at[s][k]
                if at > now:
                    gradient_due = min(gradient_due, at)
                elif self.grows[s] > room:
                    full = True
                elif gradient is None or policy.back_deep:
                    gradient = (s, k)
            k = self.forwards[s]
            if k < m and self.needs[s] <= room:
                at = self.forward_at[s][k]
                if at > now:
                    forward_due = min(forward_due, at)
                elif forward is None or policy.deep:
                    forward = (s, k)
        owed = self.owed[rank]
        if gradient and not (policy.forwards_first and forward):
            return Action(Kind.INPUT if policy.split else Kind.BACKWARD, *gradient)
        if owed and (full or (policy.lag is not None and len(owed) > policy.lag)):
            return Action(Kind.WEIGHT, *owed[0])
        if forward:
            late = gradient_due - now < policy.patience * d.forward_s[forward[0]]
            return None if late else Action(Kind.FORWARD, *forward)
        if owed:
            due = min(forward_due, gradient_due)
            late = due - now < policy.patience * d.weight_s[owed[0][0]]
            return None if late else Action(Kind.WEIGHT, *owed[0])
        return None

    def _do(self, rank: int, action: Action, now: float) -> None:
        kind, s, k = action
        d, limits = self.work.durations, self.work.limits
        if kind is Kind.FORWARD:
            end = now + d.forward_s[s]
            self.forwards[s] += 1
            self.held[rank] += limits.forward_bytes[s]
            if s + 1 < len(self.work.placement):
                self.forward_at[s + 1][k] = self._arrives(s, s + 1, end)
            else:
                self.gradient_at[s][k] = end
        elif kind is Kind.WEIGHT:
            end = now + d.weight_s[s]
            self.owed[rank].popleft()
            self.held[rank] -= limits.weight_bytes[s]
        else:
            self.gradients[s] += 1
            self.held[rank] -= limits.forward_bytes[s]
            if kind is Kind.INPUT:
                end = now + d.input_s[s]
                self.owed[rank].append((s, k))
                self.held[rank] += limits.weight_bytes[s]
            else:
                end = now + d.backward_s[s]
            if s:
                self.gradient_at[s - 1][k] = self._arrives(s, s - 1, end)
        self.done[rank].append(action)
        self.free[rank] = end
        heappush(self.events, (end, rank))

    def _arrives(self, source: int, target: int, end: float) -> float:
        """When the result of stage `source` is at stage `target`, whose rank will look for it then."""
        sender, receiver = self.work.placement[source], self.work.placement[target]
        if sender == receiver:
            return end
        leaves = max(end, self.links.get((sender, receiver), 0.0))
        arrives = self.links[sender, receiver] = leaves + self.work.durations.p2p_s[min(source, target)]
        heappush(self.events, (arrives, receiver))
        return arrives
