"""Latent rows on the device: what the kernels that write them share.

Kernels address a row through three views of the same bytes (FP8 or BF16 latent, BF16 RoPE key,
float32 scale), at the byte offsets of :class:`LatentLayout`.

Shape suffixes: T tokens of a tile, L latent elements of this rank (padded to a power of two), D
RoPE dims, S token slots, B bytes of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpla.core.latent_layout import AMAX_FLOOR, FP8_MAX, LatentLayout

_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)
_FP8_MAX = tl.constexpr(FP8_MAX)


def row_views(rows: torch.Tensor, layout: LatentLayout) -> tuple[torch.Tensor, ...]:
    """Contiguous uint8 rows as latents, as RoPE keys and as float32 words."""
    latent = rows.view(torch.float8_e4m3fn if layout.has_scale else torch.bfloat16)
    return latent, rows.view(torch.bfloat16), rows.view(torch.float32)


def slice_start(layout: LatentLayout) -> int:
    """First latent dim of the rank's own slice."""
    return layout.plan.slice_bounds(layout.group)[0]


@triton.jit
def part_columns(dims, CORE: tl.constexpr, START: tl.constexpr):
    """Dims of the whole latent at which the rank's part lies: the core, then its slice."""
    if CORE == 0:
        return dims + START
    else:
        return tl.where(dims < CORE, dims, dims + (START - CORE))


@triton.jit
def token_scale(values_TL):
    """``amax / 448`` of each row, rounded as in the reference, and its reciprocal."""
    amax_T = tl.maximum(tl.max(tl.abs(values_TL), 1), _AMAX_FLOOR)
    scale_T = tl.div_rn(amax_T, _FP8_MAX)
    # One division a row: a product with the reciprocal is an ulp off a quotient at most, which
    # moves an FP8 code only where the quotient lies on a tie.
    return scale_T, tl.div_rn(1.0, scale_T)


@triton.jit
def to_fp8(values_TL, inverse_T):
    """Quantised values. The largest is 448 to within an ulp, so that none saturates; NaN stays."""
    return (values_TL * inverse_T[:, None]).to(tl.float8e4nv)


@triton.constexpr_function
def _power_of_two_from(least):
    """Least power of two that is no less. Triton's own cannot be called from a kernel in SGLang's
    processes, where another function stands in its place."""
    return 1 << (least - 1).bit_length()


@triton.jit
def store_rows(
    latent_TL,
    rope_TD,
    row_T,
    ok_T,
    latent_ptr,
    rope_ptr,
    word_ptr,
    ROW_BYTES: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Encode float32 values as the rows ``row_T`` (int64) where ``ok_T``, padding bytes zero.

    ``latent_TL`` is zero beyond the latent's width.
    """
    ITEM_BYTES: tl.constexpr = 1 if SCALED else 2
    TAIL: tl.constexpr = (ROW_BYTES - SCALE_OFFSET) // 4
    dims = tl.arange(0, BLOCK_L)
    latent_at = row_T[:, None] * (ROW_BYTES // ITEM_BYTES) + dims[None, :]
    latent_ok = ok_T[:, None] & (dims < ROPE_OFFSET // ITEM_BYTES)[None, :]
    rope_at = row_T[:, None] * (ROW_BYTES // 2) + ROPE_OFFSET // 2 + tl.arange(0, ROPE)[None, :]
    if SCALED:
        scale_T, inverse_T = token_scale(latent_TL)
        tl.store(latent_ptr + latent_at, to_fp8(latent_TL, inverse_T), mask=latent_ok)
        rope_TD = rope_TD * inverse_T[:, None]
    else:
        tl.store(latent_ptr + latent_at, latent_TL.to(tl.bfloat16), mask=latent_ok)
    tl.store(rope_ptr + rope_at, rope_TD.to(tl.bfloat16), mask=ok_T[:, None])
    if TAIL > 0:  # the scale and the padding behind it in one store
        word = tl.arange(0, _power_of_two_from(TAIL))[None, :]
        tail_at = row_T[:, None] * (ROW_BYTES // 4) + SCALE_OFFSET // 4 + word
        tail = tl.zeros_like(tail_at).to(tl.float32)
        if SCALED:
            tail = tl.where(word == 0, scale_T[:, None], tail)
        tl.store(word_ptr + tail_at, tail, mask=ok_T[:, None] & (word < TAIL))
