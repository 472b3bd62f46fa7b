"""The learning rate of each step."""

from __future__ import annotations

import math

from trigrid.spec.job import Optimizer


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Rate of step number `step`, from 0: linear to `lr` over the warm-up, whose last step reaches it, then a half
    cosine down to lr × min_lr_ratio at the last of `steps`. Independent of the layout."""
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    left = steps - 1 - optimizer.warmup_steps
    progress = (step - optimizer.warmup_steps) / left if left > 0 else 0.0
    floor = optimizer.lr * optimizer.min_lr_ratio
    return floor + (optimizer.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
