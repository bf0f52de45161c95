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
@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["start_ptr", "result_ptr"])
def _digest_kernel(
    word_ptr,
    words,
    start_ptr,
    tally_ptr,
    result_ptr,
    SUBTRACT: tl.constexpr,
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
    tl.atomic_add(tally_ptr, tl.sum(mixed, 0))
    if tl.atomic_add(tally_ptr + 1, 1) == tl.num_programs(0) - 1:  # all others have added theirs
        digest = tl.atomic_xchg(tally_ptr, 0)
        tl.store(tally_ptr + 1, 0)
        start = tl.load(start_ptr)
        tl.store(result_ptr, start - digest if SUBTRACT else start + digest)


def row_digest(word_W: torch.Tensor) -> torch.Tensor:
    """Digest of a buffer, as it lies.

    Args:
        word_W: int64 view of the bytes.

    Returns:
        int64 scalar on the same device; not synchronised.

    Raises:
        ValueError: the words are not contiguous int64.
    """
    result_1 = torch.zeros(1, dtype=torch.int64, device=word_W.device)
    if len(word_W):
        tally_2 = torch.zeros(2, dtype=torch.int64, device=word_W.device)
        prepare_row_digest(word_W, torch.zeros_like(result_1), tally_2, result_1)()
    return result_1[0]


def prepare_row_digest(
    word_W: torch.Tensor,
    start_1: torch.Tensor,
    tally_2: torch.Tensor,
    result_1: torch.Tensor,
    subtract: bool = False,
) -> PreparedLaunch:
    """A launch that stores ``start_1`` plus a buffer's digest, modulo 2**64.

    Args:
        word_W: int64 view of the bytes, one word at least.
        start_1: one int64 of the device, or of pinned host memory.
        tally_2: two int64 of the device, zeros; the launch's own, and zeros again behind it.
        result_1: one int64 of the device, or of pinned host memory; written.
        subtract: store ``start_1`` minus the digest instead.

    Raises:
        ValueError: a tensor is not of contiguous int64, or not as long.
    """
    require_tensor("words", word_W, (word_W.shape[0],), (torch.int64,))
    require_tensor("start", start_1, (1,), (torch.int64,))
    require_tensor("tally", tally_2, (2,), (torch.int64,))
    require_tensor("result", result_1, (1,), (torch.int64,))
    return PreparedLaunch(
        _digest_kernel,
        (triton.cdiv(len(word_W), _BLOCK_WORDS),),
        word_W,
        len(word_W),
        start_1,
        tally_2,
        result_1,
        SUBTRACT=subtract,
        STEP=ref.STEP,
        FIRST_FACTOR=ref.FIRST_FACTOR,
        SECOND_FACTOR=ref.SECOND_FACTOR,
        FIRST_SHIFT=ref.SHIFTS[0],
        SECOND_SHIFT=ref.SHIFTS[1],
        THIRD_SHIFT=ref.SHIFTS[2],
        BLOCK_W=_BLOCK_WORDS,
        num_warps=8,
    )
