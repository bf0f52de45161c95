"""Prefill pages of all layers encoded as one decode rank's rows, in one launch.

Prefill caches the whole latent, normalised and rotated, in the model's own precision. A rank's row
takes the core and its slice of it, quantised per token, with the RoPE key aligned to the scale.

Shape suffixes: Y layers, N pages, T tokens (N page_size), B bytes of a row, L latent elements of
this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.arguments import require_layout, require_tensor
from tpla.kernels.latent_rows import part_columns, row_views, slice_start, store_rows
from tpla.kernels.prepared_launch import PreparedLaunch

_SOURCES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_BLOCK_TOKENS = 16


# One binary for chunks of any number of pages, else some of a transfer wait for a compilation.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["pages_ptr"])
def _gather_kernel(
    layer_pointer_ptr,
    pages_ptr,
    row_latent_ptr,
    row_rope_ptr,
    row_word_ptr,
    tokens,
    SOURCE: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    SOURCE_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    CORE: tl.constexpr,
    START: tl.constexpr,
    ROPE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    layer = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < tokens
    dims = tl.arange(0, BLOCK_L)
    # An address read from memory has no known alignment; without it loads would be single elements.
    source = tl.load(layer_pointer_ptr + layer).to(tl.pointer_type(SOURCE))
    source = tl.multiple_of(source, 16)
    page = tl.load(pages_ptr + token // PAGE, mask=ok, other=0).to(tl.int64)
    cached = source + (page * PAGE + token % PAGE)[:, None] * SOURCE_STRIDE
    latent = tl.load(
        cached + part_columns(dims, CORE, START)[None, :],
        mask=ok[:, None] & (dims < WIDTH)[None, :],
        other=0.0,
    ).to(tl.float32)
    rope_at = SOURCE_ROPE + tl.arange(0, ROPE)[None, :]
    rope = tl.load(cached + rope_at, mask=ok[:, None], other=0.0).to(tl.float32)
    row = layer.to(tl.int64) * tokens + token
    store_rows(
        latent, rope, row, ok, row_latent_ptr, row_rope_ptr, row_word_ptr,
        ROW_BYTES, ROPE_OFFSET, SCALE_OFFSET, SCALED, BLOCK_L, ROPE,
    )  # fmt: skip


def gather_pages(
    layer_pointer_Y: torch.Tensor,
    dtype: torch.dtype,
    pages_N: torch.Tensor,
    page_size: int,
    layout: LatentLayout,
    staging_YTB: torch.Tensor,
) -> None:
    """Slice and quantise pages of a prefill pool for one decode rank.

    Args:
        layer_pointer_Y: int64 address of each layer's contiguous ``[slots, C + D]`` buffer, a
            multiple of 16; latents after the norm, RoPE keys rotated.
        dtype: of those buffers, bfloat16 or float32.
        pages_N: int32 or int64 pages to read, each within the pool.
        page_size: tokens of a page; slot = page * page_size + offset.
        layout: the rank's part, and where the bytes lie in a row.
        staging_YTB: written, ``[layers, N * page_size, row_bytes]`` uint8, padding bytes zero.

    Raises:
        ConfigError: the row format or RoPE width is not one that the kernel writes.
        ValueError: a tensor does not fit the others, or ``dtype`` is not one it reads.
    """
    prepare_gather_pages(layer_pointer_Y, dtype, pages_N, page_size, layout, staging_YTB)()


def prepare_gather_pages(
    layer_pointer_Y: torch.Tensor,
    dtype: torch.dtype,
    pages_N: torch.Tensor,
    page_size: int,
    layout: LatentLayout,
    staging_YTB: torch.Tensor,
) -> PreparedLaunch:
    """:func:`gather_pages` of whatever the tensors hold when it is launched.

    ``pages_N`` may lie in pinned host memory.
    """
    plan, rope = layout.plan, layout.qk_rope_head_dim
    layers, tokens = layer_pointer_Y.shape[0], pages_N.shape[0] * page_size
    require_layout(layout, "gather_pages")
    if dtype not in _SOURCES:
        raise ValueError(f"gather_pages reads {tuple(_SOURCES)}, not {dtype}")
    require_tensor("layer_pointer", layer_pointer_Y, (layers,), (torch.int64,))
    require_tensor("pages", pages_N, (pages_N.shape[0],), (torch.int32, torch.int64))
    require_tensor("staging", staging_YTB, (layers, tokens, layout.row_bytes), (torch.uint8,))
    return PreparedLaunch(
        _gather_kernel,
        (triton.cdiv(tokens, _BLOCK_TOKENS), layers),
        layer_pointer_Y,
        pages_N,
        *row_views(staging_YTB, layout),
        tokens,
        SOURCE=_SOURCES[dtype],
        SOURCE_STRIDE=plan.kv_lora_rank + rope,
        SOURCE_ROPE=plan.kv_lora_rank,
        PAGE=page_size,
        WIDTH=plan.latent_width,
        CORE=plan.core_dims,
        START=slice_start(layout),
        ROPE=rope,
        ROW_BYTES=layout.row_bytes,
        ROPE_OFFSET=layout.rope_offset,
        SCALE_OFFSET=layout.scale_offset,
        SCALED=layout.has_scale,
        BLOCK_T=_BLOCK_TOKENS,
        BLOCK_L=max(triton.next_power_of_2(plan.latent_width), 4),
        num_warps=4,
    )
