"""The learning rate of each step."""

from __future__ import annotations

import math

from trigrid.spec.job import Optimizer


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Rate of step number `step`, from 0: linear to `lr` over the warm-up, whose last step reaches it, then down to
    lr × min_lr_ratio at the last of `steps`. Independent of the layout.

    Down by half a cosine (Loshchilov and Hutter 2017) or linearly; "wsd" stays at `lr` until the last `decay_share` of
    the steps (Hu 2024, section 4).
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    top = optimizer.warmup_steps
    if optimizer.decay == "wsd":
        top = max(top, steps - 1 - round(optimizer.decay_share * steps))
    left = steps - 1 - top
    progress = min(max((step - top) / left, 0.0), 1.0) if left > 0 else 0.0
    share = 0.5 * (1 + math.cos(math.pi * progress)) if optimizer.decay == "cosine" else 1 - progress
    floor = optimizer.lr * optimizer.min_lr_ratio
    return floor + (optimizer.lr - floor) * share
