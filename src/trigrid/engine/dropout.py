"""Dropout (Srivastava 2014) whose masks are hashes of what each element is.

Whether an element is dropped follows from the job's seed, the unit, the site in it, the number of the sample in the
run and the element's place in the global tensor, and from nothing else. So a mask is the same on every layout, is not
kept for backward but made again, and there is no generator whose state could get out of step.

Two hashes: rows (a token, or a query of a head) are counted into keys of 64 bits by SplitMix64 (Steele, Lea and Flood
2014, with the multipliers of Stafford's variant 13), the elements of a row by the finaliser of MurmurHash3 (Appleby
2011), which takes one half of the row's key before its first multiplication and the other before its second.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trigrid.engine.units import Microbatch


def _signed(bits: int, value: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


GAMMA = _signed(64, 0x9E3779B97F4A7C15)
MIX_1, MIX_2 = _signed(64, 0xBF58476D1CE4E5B9), _signed(64, 0x94D049BB133111EB)
WEYL = _signed(32, 0x9E3779B9)
MURMUR_1, MURMUR_2 = _signed(32, 0x85EBCA6B), _signed(32, 0xC2B2AE35)


class Dropout:
    """Dropout at one site of one unit; `rate` is the probability with which an element is dropped."""

    def __init__(self, rate: float, seed: int, unit: str, site: str, device: torch.device):
        digest = hashlib.blake2b(f"{seed}/{unit}/{site}".encode(), digest_size=8).digest()
        self.rate = rate
        self._key = torch.tensor(int.from_bytes(digest, "little", signed=True), device=device)

    def draws(self, microbatch: Microbatch) -> bool:
        return self.rate > 0 and microbatch.samples_B is not None

    def hidden(self, x_SBH: Tensor, microbatch: Microbatch, first: int) -> Tensor:
        """x_SBH with its elements dropped or divided by 1 − rate; `first` is the place of its first token."""
        if not self.draws(microbatch):
            return x_SBH
        return _DropHidden.apply(x_SBH, self._key, microbatch.samples_B, first, self.rate)  # type: ignore[no-untyped-call, no-any-return]

    def rows(self, microbatch: Microbatch, heads: range, queries: int) -> Tensor:
        """rows_BNS, the keys of an attention's rows on the global `heads`."""
        assert microbatch.samples_B is not None
        samples_B = _mix(self._key, microbatch.samples_B)
        heads_N = torch.arange(heads.start, heads.stop, device=samples_B.device)
        places_S = torch.arange(queries, device=samples_B.device)
        return _mix(_mix(samples_B[:, None], heads_N)[..., None], places_S)


def dropped(rows: Tensor, columns: int, rate: float) -> Tensor:
    """Which elements of `columns` in each row are dropped, bool [..., columns], from the keys `rows` [...]."""
    halves = rows.unsqueeze(-1).view(torch.int32)
    first, second = halves[..., :1], halves[..., 1:]
    x = first + torch.arange(columns, dtype=torch.int32, device=rows.device) * WEYL
    x.bitwise_xor_(_shifted(x, 16, 32)).mul_(MURMUR_1).bitwise_xor_(second)
    # The finaliser's last step changes the lower half alone, which decides one comparison in 65,536 at most.
    x.bitwise_xor_(_shifted(x, 13, 32)).mul_(MURMUR_2)
    return torch.lt(x, min(round(rate * 2**32), 2**32 - 1) - 2**31)


def drop_(x: Tensor, gone: Tensor, rate: float) -> Tensor:
    """`x` itself, zero where `gone` and divided by 1 − rate elsewhere."""
    return x.mul_(1 / (1 - rate)).masked_fill_(gone, 0.0)


class _DropHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, key: Tensor, samples_B: Tensor, first: int, rate: float) -> Tensor:
        ctx.save_for_backward(key, samples_B)
        ctx.first, ctx.rate = first, rate
        return _drop_hidden(x_SBH, key, samples_B, first, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, None, None, None, None]:
        key, samples_B = ctx.saved_tensors
        return _drop_hidden(grad_SBH, key, samples_B, ctx.first, ctx.rate), None, None, None, None


def _drop_hidden(x_SBH: Tensor, key: Tensor, samples_B: Tensor, first: int, rate: float) -> Tensor:
    length, _, width = x_SBH.shape
    places_S = torch.arange(first, first + length, device=x_SBH.device)
    rows_SB = _mix(_mix(key, samples_B), places_S[:, None])
    return drop_(x_SBH.clone(), dropped(rows_SB, width, rate), rate)


def _mix(key: Tensor, counter: Tensor) -> Tensor:
    """SplitMix64's output number `counter` from the state `key`, int64; int64 wraps around."""
    x = key + (counter + 1) * GAMMA
    x = (x ^ _shifted(x, 30, 64)) * MIX_1
    x = (x ^ _shifted(x, 27, 64)) * MIX_2
    return x ^ _shifted(x, 31, 64)


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """`x` shifted right as if it had no sign."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
