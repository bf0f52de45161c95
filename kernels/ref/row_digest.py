"""Torch reference of :mod:`tpla.kernels.row_digest`, and the digest of rows on the CPU.

Shape suffixes: W 64-bit words.
"""

from __future__ import annotations

import torch

from tpla.kernels.arguments import require_tensor

STEP = 0x9E3779B97F4A7C15
"""Between the offsets of two words, and with the two factors those of SplitMix64."""
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
SHIFTS = (30, 27, 31)


def row_digest(word_W: torch.Tensor) -> torch.Tensor:
    """Same arguments and results as the kernel's wrapper."""
    require_tensor("words", word_W, (word_W.shape[0],), (torch.int64,))
    place_W = torch.arange(1, len(word_W) + 1, device=word_W.device)
    mixed_W = word_W + place_W * _signed(STEP)
    mixed_W = (mixed_W ^ _shift_right(mixed_W, SHIFTS[0])) * _signed(FIRST_FACTOR)
    mixed_W = (mixed_W ^ _shift_right(mixed_W, SHIFTS[1])) * _signed(SECOND_FACTOR)
    return (mixed_W ^ _shift_right(mixed_W, SHIFTS[2])).sum()


def _signed(value: int) -> int:
    """The same 64 bits as torch's integers show them."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(word_W: torch.Tensor, bits: int) -> torch.Tensor:
    """Zeros come in; torch's own shift brings copies of the sign."""
    return (word_W >> bits) & ((1 << (64 - bits)) - 1)
