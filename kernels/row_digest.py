"""A 64-bit digest of rows on the device, exact and the same as on the CPU.

Each word is added to a multiple of its place and mixed by SplitMix64's finaliser, which is one to
one, so that a change of any one word changes the sum of all for certain. The sum is of integers
modulo 2**64: no order of threads changes it. It guards against faults, not against an adversary.

Shape suffixes: W 64-bit words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpla.kernels.arguments import require_tensor
from tpla.kernels.prepared_launch import PreparedLaunch
from tpla.kernels.ref import row_digest as ref

_BLOCK_WORDS = 4096


# One binary for chunks of any number of pages, else some of a transfer wait for a compilation.
@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["digest_ptr"])
def _digest_kernel(
    word_ptr,
    digest_ptr,
    words,
    STEP: tl.constexpr,
    FIRST_FACTOR: tl.constexpr,
    SECOND_FACTOR: tl.constexpr,
    FIRST_SHIFT: tl.constexpr,
    SECOND_SHIFT: tl.constexpr,
    THIRD_SHIFT: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    ok = index < words
    word = tl.load(word_ptr + index, mask=ok, other=0).to(tl.uint64, bitcast=True)
    mixed = word + (index + 1).to(tl.uint64, bitcast=True) * STEP
    mixed = (mixed ^ (mixed >> FIRST_SHIFT)) * FIRST_FACTOR
    mixed = (mixed ^ (mixed >> SECOND_SHIFT)) * SECOND_FACTOR
    mixed = mixed ^ (mixed >> THIRD_SHIFT)
    mixed = tl.where(ok, mixed.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(digest_ptr, tl.sum(mixed, 0))


def row_digest(word_W: torch.Tensor) -> torch.Tensor:
    """Digest of a buffer, as it lies.

    Args:
        word_W: int64 view of the bytes.

    Returns:
        int64 scalar on the same device; not synchronised.

    Raises:
        ValueError: the words are not contiguous int64.
    """
    digest_1 = torch.zeros(1, dtype=torch.int64, device=word_W.device)
    if len(word_W):
        prepare_row_digest(word_W, digest_1)()
    return digest_1[0]


def prepare_row_digest(word_W: torch.Tensor, digest_1: torch.Tensor) -> PreparedLaunch:
    """A launch that adds a buffer's digest to ``digest_1``, modulo 2**64.

    Args:
        word_W: int64 view of the bytes, one word at least.
        digest_1: one int64 of the same device.

    Raises:
        ValueError: the words are not contiguous int64, or ``digest_1`` is not one of them.
    """
    require_tensor("words", word_W, (word_W.shape[0],), (torch.int64,))
    require_tensor("digest", digest_1, (1,), (torch.int64,))
    return PreparedLaunch(
        _digest_kernel,
        (triton.cdiv(len(word_W), _BLOCK_WORDS),),
        word_W,
        digest_1,
        len(word_W),
        STEP=ref.STEP,
        FIRST_FACTOR=ref.FIRST_FACTOR,
        SECOND_FACTOR=ref.SECOND_FACTOR,
        FIRST_SHIFT=ref.SHIFTS[0],
        SECOND_SHIFT=ref.SHIFTS[1],
        THIRD_SHIFT=ref.SHIFTS[2],
        BLOCK_W=_BLOCK_WORDS,
        num_warps=8,
    )
