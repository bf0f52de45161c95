"""New tokens' rows written into the pool, in one launch.

RMSNorm of the whole latent, RoPE of the key, the rank's part (core, then slice), quantisation per
token, scale domain alignment and the paged write::

    c = latent / sqrt(mean(latent^2) + eps) * gamma        (float32)
    s = amax |c[part]| / 448
    stored:  c[part] / s in FP8, R(position) rope / s in BF16, s

The latent and the RoPE key come as the projection left them; nothing is concatenated first.

Source: SnapMLA, fused K append; the norm runs over the whole latent, so it is exact on a slice.

Shape suffixes: T tokens, C whole latent, D RoPE dims, P positions, S token slots, B bytes of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.arguments import require_layout, require_rotation, require_tensor
from tpla.kernels.latent_rows import part_columns, row_views, slice_start, store_rows
from tpla.kernels.rotary import rotate

_FLOATS = (torch.bfloat16, torch.float32)


@triton.jit
def _append_kernel(
    latent_ptr,
    latent_stride,
    rope_ptr,
    rope_stride,
    gamma_ptr,
    eps,
    position_ptr,
    cos_sin_ptr,
    slot_ptr,
    row_latent_ptr,
    row_rope_ptr,
    row_word_ptr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    CORE: tl.constexpr,
    START: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    token = tl.program_id(0) + tl.arange(0, 1)
    slot = tl.load(slot_ptr + token)
    ok = slot >= 0
    whole = tl.arange(0, BLOCK_C)
    dims = tl.arange(0, BLOCK_L)
    latent = latent_ptr + token.to(tl.int64)[:, None] * latent_stride
    x = tl.load(latent + whole[None, :], mask=ok[:, None] & (whole < RANK)[None, :], other=0.0).to(
        tl.float32
    )
    mean_square = tl.div_rn(tl.sum(x * x, 1), RANK * 1.0)
    norm = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    columns = part_columns(dims, CORE, START)
    part_ok = ok[:, None] & (dims < WIDTH)[None, :]
    part = tl.load(latent + columns[None, :], mask=part_ok, other=0.0).to(tl.float32)
    part = part * norm[:, None]
    if gamma_ptr is not None:
        gamma = tl.load(gamma_ptr + columns, mask=dims < WIDTH, other=0.0).to(tl.float32)
        part = part * gamma[None, :]
    rope_at = token.to(tl.int64)[:, None] * rope_stride + tl.arange(0, ROPE)[None, :]
    rope = tl.load(rope_ptr + rope_at, mask=ok[:, None], other=0.0).to(tl.float32)
    rope = rotate(rope, token, ok, position_ptr, cos_sin_ptr, ROPE, INTERLEAVED)
    store_rows(
        part, rope, slot, ok, row_latent_ptr, row_rope_ptr, row_word_ptr,
        ROW_BYTES, ROPE_OFFSET, SCALE_OFFSET, SCALED, BLOCK_L, ROPE,
    )  # fmt: skip


def append_latents(
    latent_TC: torch.Tensor,
    rope_TD: torch.Tensor,
    gamma_C: torch.Tensor | None,
    eps: float,
    position_T: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    slot_T: torch.Tensor,
    layout: LatentLayout,
    rows_SB: torch.Tensor,
    interleaved: bool = True,
) -> None:
    """Normalise, rotate, quantise and store new tokens of one layer.

    Args:
        latent_TC: whole latents before the norm, bfloat16 or float32; contiguous in its last dim.
        rope_TD: RoPE keys, likewise; may be a view of the same tensor.
        gamma_C: weight of the norm, bfloat16 or float32, or ``None`` for one.
        eps: of the norm.
        position_T: int32 or int64, or ``None`` where ``rope_TD`` is already rotated.
        cos_sin_PD: float32 cosines, then sines, of each position, or ``None`` likewise.
        slot_T: int64 row of each token, no two alike; a negative one is not stored.
        layout: the rank's part, and where the bytes lie in a row.
        rows_SB: the pool, ``[slots, row_bytes]`` uint8; written at ``slot_T``, padding bytes zero.
        interleaved: pairs that rotate together are neighbours, not half a vector apart.

    Raises:
        ConfigError: the row format or RoPE width is not one that the kernel writes.
        ValueError: a tensor does not fit the others.
    """
    plan, rope, tokens = layout.plan, layout.qk_rope_head_dim, slot_T.shape[0]
    rank = plan.kv_lora_rank
    require_layout(layout, "append_latents")
    require_tensor("latent", latent_TC, (tokens, rank), _FLOATS, contiguous=False)
    require_tensor("rope", rope_TD, (tokens, rope), _FLOATS, contiguous=False)
    if gamma_C is not None:
        require_tensor("gamma", gamma_C, (rank,), _FLOATS)
    require_rotation(position_T, cos_sin_PD, tokens, rope)
    require_tensor("slot", slot_T, (tokens,), (torch.int64,))
    require_tensor("rows", rows_SB, (rows_SB.shape[0], layout.row_bytes), (torch.uint8,))
    # One warp to a token: its reductions stay in registers, and small batches still spread.
    _append_kernel[(tokens,)](
        latent_TC,
        latent_TC.stride(0),
        rope_TD,
        rope_TD.stride(0),
        gamma_C,
        eps,
        position_T,
        cos_sin_PD,
        slot_T,
        *row_views(rows_SB, layout),
        RANK=rank,
        WIDTH=plan.latent_width,
        CORE=plan.core_dims,
        START=slice_start(layout),
        ROPE=rope,
        INTERLEAVED=interleaved,
        ROW_BYTES=layout.row_bytes,
        ROPE_OFFSET=layout.rope_offset,
        SCALE_OFFSET=layout.scale_offset,
        SCALED=layout.has_scale,
        BLOCK_C=triton.next_power_of_2(rank),
        BLOCK_L=max(triton.next_power_of_2(plan.latent_width), 4),
        num_warps=1,
    )
