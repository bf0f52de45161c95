"""Partial attention results of one request joined by their log-sum-exp.

Parts write at most two partial results each: slot ``2 p`` for the request that part ``p`` found
already begun, slot ``2 p + 1`` for the request that it leaves unfinished. So the parts
``first..last`` of a request own the slots ``2 first + 1, 2 (first + 1), ..., 2 last``.

Shape suffixes: B requests, S slots, M query rows (query token, head), L latent elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LN2 = 0.6931471805599453


@triton.jit
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    split_ptr,
    out_ptr,
    lse_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LN2: tl.constexpr,
):
    m = tl.program_id(0)
    b = tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    first = tl.load(split_ptr + 2 * b)
    last = tl.load(split_ptr + 2 * b + 1)
    if last > first:
        top = -float("inf")
        for start in range(first, last + 1, BLOCK_S):
            part = start + tl.arange(0, BLOCK_S)
            slot = 2 * part + (part == first).to(tl.int32)
            lse_S = tl.load(
                partial_lse_ptr + slot.to(tl.int64) * rows + m,
                mask=part <= last,
                other=-float("inf"),
            )
            top = tl.maximum(top, tl.max(lse_S, 0))
        shift = tl.where(top == -float("inf"), 0.0, top)
        weight = 0.0
        acc_L = tl.zeros([BLOCK_L], tl.float32)
        for start in range(first, last + 1, BLOCK_S):
            part = start + tl.arange(0, BLOCK_S)
            slot = 2 * part + (part == first).to(tl.int32)
            row = slot.to(tl.int64) * rows + m
            lse_S = tl.load(partial_lse_ptr + row, mask=part <= last, other=-float("inf"))
            weight_S = tl.exp2(lse_S - shift)
            partial_SL = tl.load(
                partial_ptr + row[:, None] * WIDTH + dims[None, :],
                mask=(part <= last)[:, None] & (dims < WIDTH)[None, :],
                other=0.0,
            )
            acc_L += tl.sum(weight_S[:, None] * partial_SL, 0)
            weight += tl.sum(weight_S, 0)
        out_L = acc_L / tl.where(weight == 0.0, 1.0, weight)
        row = b.to(tl.int64) * rows + m
        tl.store(out_ptr + row * WIDTH + dims, out_L.to(out_ptr.dtype.element_ty), dims < WIDTH)
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + row, (top + tl.log2(weight)) * LN2)


def combine_splits(
    partial_SML: torch.Tensor,
    partial_lse_SM: torch.Tensor,
    split_B2: torch.Tensor,
    out_BML: torch.Tensor,
    lse_BM: torch.Tensor,
) -> None:
    """Join the partial results of every request that more than one part worked on.

    Args:
        partial_SML: each slot's normalised output, float32.
        partial_lse_SM: its log-sum-exp to base two, float32; minus infinity for no token.
        split_B2: first and last part of each request, int32.
        out_BML: written for split requests only, bf16 or float32.
        lse_BM: likewise, float32, natural logarithm.
    """
    batch, rows, width = out_BML.shape
    block_l = min(128, triton.next_power_of_2(width))
    _combine_kernel[(rows, batch, triton.cdiv(width, block_l))](
        partial_SML,
        partial_lse_SM,
        split_B2,
        out_BML,
        lse_BM,
        rows,
        WIDTH=width,
        BLOCK_L=block_l,
        BLOCK_S=16,
        LN2=_LN2,
        num_warps=2,
    )
