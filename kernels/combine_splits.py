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

from tpla.kernels.dependent_launch import launches_dependents

_LN2 = 0.6931471805599453
_BLOCK = 4096
"""Numbers that a program reads at once."""
_MOST_SPLITS = 64


@triton.jit
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    split_ptr,
    out_ptr,
    lse_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LN2: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    lane = tl.arange(0, BLOCK_S)
    first = tl.load(split_ptr + 2 * b)
    last = tl.load(split_ptr + 2 * b + 1)
    if DEPENDENT:  # the schedule is older than the kernel that this one waits for
        tl.extra.cuda.gdc_wait()
    if last > first:
        # Each lane joins every BLOCK_S-th split; nothing crosses threads before the lanes meet.
        top_SM = tl.full([BLOCK_S, BLOCK_M], -1e30, tl.float32)
        weight_SM = tl.zeros([BLOCK_S, BLOCK_M], tl.float32)
        acc_SML = tl.zeros([BLOCK_S, BLOCK_M, BLOCK_L], tl.float32)
        for start in range(first, last + 1, BLOCK_S):
            part = start + lane
            slot = 2 * part + (part == first).to(tl.int32)
            row_SM = slot.to(tl.int64)[:, None] * rows + m[None, :]
            there_SM = (part <= last)[:, None] & (m < rows)[None, :]
            lse_SM = tl.load(partial_lse_ptr + row_SM, mask=there_SM, other=-float("inf"))
            partial_SML = tl.load(
                partial_ptr + row_SM[:, :, None] * WIDTH + dims[None, None, :],
                mask=there_SM[:, :, None] & (dims < WIDTH)[None, None, :],
                other=0.0,
            )
            new_top_SM = tl.maximum(top_SM, lse_SM)
            decay_SM = tl.exp2(top_SM - new_top_SM)
            share_SM = tl.exp2(lse_SM - new_top_SM)
            weight_SM = weight_SM * decay_SM + share_SM
            acc_SML = acc_SML * decay_SM[:, :, None] + partial_SML * share_SM[:, :, None]
            top_SM = new_top_SM
        top_M = tl.max(top_SM, 0)
        share_SM = tl.exp2(top_SM - top_M[None, :])
        weight_M = tl.sum(weight_SM * share_SM, 0)
        out_ML = tl.sum(acc_SML * share_SM[:, :, None], 0)
        out_ML = out_ML / tl.where(weight_M == 0.0, 1.0, weight_M)[:, None]
        row_M = b.to(tl.int64) * rows + m
        tl.store(
            out_ptr + row_M[:, None] * WIDTH + dims[None, :],
            out_ML.to(out_ptr.dtype.element_ty),
            mask=(m < rows)[:, None] & (dims < WIDTH)[None, :],
        )
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + row_M, (top_M + tl.log2(weight_M)) * LN2, mask=m < rows)


def combine_splits(
    partial_SML: torch.Tensor,
    partial_lse_SM: torch.Tensor,
    split_B2: torch.Tensor,
    out_BML: torch.Tensor,
    lse_BM: torch.Tensor,
) -> None:
    """Join the partial results of every request that more than one part worked on.

    Where the device allows it, the launch is a dependent one: its programs start while the kernel
    before it, which writes the partial results, still runs. ``split_B2`` must be older than that.

    Args:
        partial_SML: each slot's normalised output, float32.
        partial_lse_SM: its log-sum-exp to base two, float32; minus infinity for no token.
        split_B2: first and last part of each request, int32.
        out_BML: written for split requests only, bf16 or float32.
        lse_BM: likewise, float32, natural logarithm.
    """
    batch, rows, width = out_BML.shape
    block_s, block_m, block_l = _block(partial_SML.shape[0] // 2, batch, rows, width)
    dependent = launches_dependents(out_BML.device)
    _combine_kernel[(triton.cdiv(rows, block_m), batch, triton.cdiv(width, block_l))](
        partial_SML,
        partial_lse_SM,
        split_B2,
        out_BML,
        lse_BM,
        rows,
        WIDTH=width,
        BLOCK_S=block_s,
        BLOCK_M=block_m,
        BLOCK_L=block_l,
        DEPENDENT=dependent,
        LN2=_LN2,
        num_warps=4,
        launch_pdl=dependent,
    )


def _block(parts: int, batch: int, rows: int, width: int) -> tuple[int, int, int]:
    """Splits, rows and columns that a program reads at once: splits first, as many as a request of
    average length has, then columns, then rows."""
    splits = min(triton.next_power_of_2(triton.cdiv(parts, batch) + 1), _MOST_SPLITS)
    columns = min(triton.next_power_of_2(width), _BLOCK // splits)
    return splits, min(triton.next_power_of_2(rows), _BLOCK // (splits * columns)), columns
