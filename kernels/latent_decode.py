"""Decode attention over packed latent rows: paged, split over the device, FP8 or BF16.

Two kernels share the schedule, the partial results and the combine step:
:mod:`tpla.kernels.triton_decode` reads everything, :mod:`tpla.kernels.hopper_decode` reads whole
FP8 pages on Hopper faster.

Shape suffixes: B requests, Q query tokens, H heads of this rank, L latent elements of this rank,
D RoPE dims, N block-table entries, S token slots.
"""

from __future__ import annotations

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.combine_splits import combine_splits
from tpla.kernels.decode_call import DecodeCall
from tpla.kernels.decode_workspace import DecodeWorkspace
from tpla.kernels.hopper_decode import hopper_decode, reads_on_hopper
from tpla.kernels.triton_decode import triton_decode

_LOG2E = 1.4426950408889634


def latent_decode(
    q_latent_BQHL: torch.Tensor,
    q_rope_BQHD: torch.Tensor,
    q_scale_BQH: torch.Tensor | None,
    rows_SB: torch.Tensor,
    table_BN: torch.Tensor,
    length_B: torch.Tensor,
    layout: LatentLayout,
    page_size: int,
    softmax_scale: float,
    workspace: DecodeWorkspace,
    out_BQHL: torch.Tensor,
    lse_BQH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last ``Q`` positions of each request to its cached rows.

    Query ``i`` stands at position ``length - Q + i`` and sees positions up to its own.

    Args:
        q_latent_BQHL: absorbed queries; float8_e4m3fn with ``q_scale_BQH``, else bfloat16.
        q_rope_BQHD: RoPE parts, bfloat16; divided by ``q_scale_BQH`` where that is given.
        q_scale_BQH: float32 scale of each quantised query, or ``None``.
        rows_SB: the pool, ``[slots, row_bytes]`` uint8, rows of ``layout`` in BF16 or FP8.
        table_BN: int32 page of each ``page_size`` tokens; entries beyond the length are not read.
        length_B: cached tokens of each request, int32; the schedule's lengths.
        layout: where the bytes lie in a row.
        page_size: tokens of a page; slot = page * page_size + offset.
        softmax_scale: factor of the logits.
        workspace: scratch memory, scheduled for ``length_B``.
        out_BQHL: written, bfloat16 or float32.
        lse_BQH: written, float32, natural logarithm; minus infinity where a query sees no token.

    Returns:
        ``out_BQHL`` and ``lse_BQH``.

    Raises:
        ConfigError: the row format or RoPE width is not one the kernel reads.
        ValueError: a tensor does not fit the others.
    """
    call = DecodeCall(
        q_latent_BQHL, q_rope_BQHD, q_scale_BQH, rows_SB, table_BN, length_B, layout, page_size,
        softmax_scale * _LOG2E, workspace, out_BQHL, lse_BQH,
    )  # fmt: skip
    call.check()
    (hopper_decode if reads_on_hopper(call) else triton_decode)(call)
    combine_splits(
        workspace.partial_SML,
        workspace.partial_lse_SM,
        workspace.split_B2,
        out_BQHL.view(-1, workspace.rows, layout.latent_width),
        lse_BQH.view(-1, workspace.rows),
    )
    return out_BQHL, lse_BQH
