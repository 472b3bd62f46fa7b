"""Figures that hold on a noisy machine: contestants take turns, and each round gives one ratio to the first of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from statistics import median


def compare(title: str, unit: str, contestants: Mapping[str, Callable[[], int]], rounds: int) -> None:
    """Run all `contestants` in turn, `rounds` times after one warm-up, and print what each did for each second.

    A contestant returns the amount of work that it did, in `unit`. CPU seconds are of this process and of its children
    that have ended; ratios are medians of the rounds' own, with their quartiles.
    """
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, work in contestants.items():
            cpu, wall = _cpu_s(), time.perf_counter()
            done = work()
            cpu, wall = _cpu_s() - cpu, time.perf_counter() - wall
            if round_:
                rates[name].append((done / cpu, done / wall))
    (first, own), *_ = rates.items()
    width = max(map(len, rates))
    print(f"\n{title}: {rounds} rounds in turn, medians; ratio to {first} in {unit} per CPU-second [quartiles]")
    for name, pairs in rates.items():
        ratios = sorted(mine / ours for (mine, _), (ours, _) in zip(pairs, own, strict=True))
        quartiles = f"[{ratios[len(ratios) // 4]:.2f}, {ratios[-1 - len(ratios) // 4]:.2f}]"
        cpu_rate, wall_rate = (median(column) for column in zip(*pairs, strict=True))
        print(
            f"  {name:{width}}  {cpu_rate:>12,.0f} {unit}/CPU-s  {wall_rate:>12,.0f} {unit}/s"
            f"  {median(ratios):>5.2f} {quartiles}",
            flush=True,
        )


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
