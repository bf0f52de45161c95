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
_BLOCK_BYTES = 8192
"""What a program reads at once, of one row."""
_MOST_SPLITS = 64
_PROGRAMS = 4096
"""About as many of one warp as run at once; where there were more, each takes more rows."""
_MOST_ROWS = 8


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
    BLOCK_L: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LN2: tl.constexpr,
):
    b = tl.program_id(1)
    first = tl.load(split_ptr + 2 * b)
    last = tl.load(split_ptr + 2 * b + 1)
    if DEPENDENT:  # the schedule is older than the kernel that this one waits for
        tl.extra.cuda.gdc_wait()
    if last > first:
        for i in tl.static_range(ROWS):
            m = tl.program_id(0) * ROWS + i
            if m < rows:
                _combine_row(
                    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, rows, b, m, first, last,
                    WIDTH, BLOCK_S, BLOCK_L, LN2,
                )  # fmt: skip


@triton.jit
def _combine_row(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, rows, b, m, first, last,
    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """Some columns of one row. Each lane joins every BLOCK_S-th split, then the lanes meet."""
    dims = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    lane = tl.arange(0, BLOCK_S)
    top_S = tl.full([BLOCK_S], -1e30, tl.float32)
    weight_S = tl.zeros([BLOCK_S], tl.float32)
    acc_SL = tl.zeros([BLOCK_S, BLOCK_L], tl.float32)
    for start in range(first, last + 1, BLOCK_S):
        part = start + lane
        slot = 2 * part + (part == first).to(tl.int32)
        row_S = slot.to(tl.int64) * rows + m
        there_S = part <= last
        lse_S = tl.load(partial_lse_ptr + row_S, mask=there_S, other=-float("inf"))
        partial_SL = tl.load(
            partial_ptr + row_S[:, None] * WIDTH + dims[None, :],
            mask=there_S[:, None] & (dims < WIDTH)[None, :],
            other=0.0,
        ).to(tl.float32)
        new_top_S = tl.maximum(top_S, lse_S)
        decay_S = tl.exp2(top_S - new_top_S)
        share_S = tl.exp2(lse_S - new_top_S)
        weight_S = weight_S * decay_S + share_S
        acc_SL = acc_SL * decay_S[:, None] + partial_SL * share_S[:, None]
        top_S = new_top_S
    top = tl.max(top_S, 0)
    share_S = tl.exp2(top_S - top)
    weight = tl.sum(weight_S * share_S, 0)
    out_L = tl.sum(acc_SL * share_S[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    row = b.to(tl.int64) * rows + m
    tl.store(out_ptr + row * WIDTH + dims, out_L.to(out_ptr.dtype.element_ty), mask=dims < WIDTH)
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

    Where the device allows it, the launch is a dependent one: its programs start while the kernel
    before it, which writes the partial results, still runs. ``split_B2`` must be older than that.

    Args:
        partial_SML: each slot's normalised output, bf16 or float32.
        partial_lse_SM: its log-sum-exp to base two, float32; minus infinity for no token.
        split_B2: first and last part of each request, int32.
        out_BML: written for split requests only, bf16 or float32.
        lse_BM: likewise, float32, natural logarithm.
    """
    batch, rows, width = out_BML.shape
    splits, columns = _block(partial_SML, batch)
    column_blocks = triton.cdiv(width, columns)
    rows_each = triton.next_power_of_2(triton.cdiv(rows * batch * column_blocks, _PROGRAMS))
    rows_each = min(rows_each, _MOST_ROWS)
    dependent = launches_dependents(out_BML.device)
    _combine_kernel[(triton.cdiv(rows, rows_each), batch, column_blocks)](
        partial_SML,
        partial_lse_SM,
        split_B2,
        out_BML,
        lse_BM,
        rows,
        WIDTH=width,
        BLOCK_S=splits,
        BLOCK_L=columns,
        ROWS=rows_each,
        DEPENDENT=dependent,
        LN2=_LN2,
        num_warps=1,
        launch_pdl=dependent,
    )


def _block(partial_SML: torch.Tensor, batch: int) -> tuple[int, int]:
    """Splits and columns that a program reads at once: splits first, as many as a request of
    average length has."""
    slots, _, width = partial_SML.shape
    splits = min(triton.next_power_of_2(triton.cdiv(slots // 2, batch) + 1), _MOST_SPLITS)
    columns = _BLOCK_BYTES // (splits * partial_SML.element_size())
    return splits, min(triton.next_power_of_2(width), columns)
