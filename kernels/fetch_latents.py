"""Cached rows brought back to the model's own domain, in one launch.

For prefix reuse and chunked prefill, which attend in BF16: the latent is multiplied by its token's
scale, and so is the RoPE key, which was stored divided by it.

Source: SnapMLA, fused fetch and dequantisation.

Shape suffixes: T tokens, L latent elements of this rank, D RoPE dims, S token slots, B bytes of a
row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.arguments import require_layout, require_tensor
from tpla.kernels.latent_rows import row_views

_BLOCK_TOKENS = 8


@triton.jit
def _fetch_kernel(
    row_latent_ptr,
    row_rope_ptr,
    row_word_ptr,
    slot_ptr,
    latent_ptr,
    latent_stride,
    rope_ptr,
    rope_stride,
    tokens,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < tokens
    latent_ok = ok[:, None] & (tl.arange(0, BLOCK_L) < WIDTH)[None, :]
    dims = tl.arange(0, BLOCK_L)[None, :]
    rope_dims = tl.arange(0, ROPE)[None, :]
    slot = tl.load(slot_ptr + token, mask=ok, other=0)
    latent = tl.load(
        row_latent_ptr + slot[:, None] * LATENT_STRIDE + dims, mask=latent_ok, other=0.0
    )
    rope = tl.load(
        row_rope_ptr + slot[:, None] * (ROW_BYTES // 2) + ROPE_OFFSET // 2 + rope_dims,
        mask=ok[:, None],
        other=0.0,
    )
    if SCALED:
        scale = tl.load(
            row_word_ptr + slot * (ROW_BYTES // 4) + SCALE_OFFSET // 4, mask=ok, other=0.0
        )
        latent = (latent.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
        rope = (rope.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    out = token.to(tl.int64)[:, None]
    tl.store(latent_ptr + out * latent_stride + dims, latent, mask=latent_ok)
    tl.store(rope_ptr + out * rope_stride + rope_dims, rope, mask=ok[:, None])


def fetch_latents(
    rows_SB: torch.Tensor,
    slot_T: torch.Tensor,
    layout: LatentLayout,
    latent_TL: torch.Tensor,
    rope_TD: torch.Tensor,
) -> None:
    """Decode the rows of some tokens of one layer.

    Args:
        rows_SB: the pool, ``[slots, row_bytes]`` uint8.
        slot_T: int64 row of each token, each within the pool.
        layout: where the bytes lie in a row.
        latent_TL: written, bfloat16; contiguous in its last dim.
        rope_TD: likewise; may be a view of the same tensor.

    Raises:
        ConfigError: the row format or RoPE width is not one that the kernel reads.
        ValueError: a tensor does not fit the others.
    """
    tokens, width, rope = slot_T.shape[0], layout.latent_width, layout.qk_rope_head_dim
    require_layout(layout, "fetch_latents")
    require_tensor("rows", rows_SB, (rows_SB.shape[0], layout.row_bytes), (torch.uint8,))
    require_tensor("slot", slot_T, (tokens,), (torch.int64,))
    require_tensor("latent", latent_TL, (tokens, width), (torch.bfloat16,), contiguous=False)
    require_tensor("rope", rope_TD, (tokens, rope), (torch.bfloat16,), contiguous=False)
    views = row_views(rows_SB, layout)
    _fetch_kernel[(triton.cdiv(tokens, _BLOCK_TOKENS),)](
        *views,
        slot_T,
        latent_TL,
        latent_TL.stride(0),
        rope_TD,
        rope_TD.stride(0),
        tokens,
        WIDTH=width,
        ROPE=rope,
        LATENT_STRIDE=views[0].stride(0),
        ROW_BYTES=layout.row_bytes,
        ROPE_OFFSET=layout.rope_offset,
        SCALE_OFFSET=layout.scale_offset,
        SCALED=layout.has_scale,
        BLOCK_T=_BLOCK_TOKENS,
        BLOCK_L=max(triton.next_power_of_2(width), 4),
        num_warps=4,
    )
