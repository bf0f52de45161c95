"""Rotary position embedding of a tile, for the kernels that rotate queries and keys.

Each pair (a, b) of a vector turns by its position's angle: (a cos - b sin, b cos + a sin). The two
are neighbours (interleaved, DeepSeek) or lie half a vector apart (NeoX).

Shape suffixes: T tokens of the tile, D RoPE dims, P positions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(
    x_TD,
    token_T,
    ok_T,
    position_ptr,
    cos_sin_ptr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """``x_TD`` float32 turned to the positions of ``token_T``; unchanged without ``position_ptr``.

    ``cos_sin_ptr``: float32 ``[P, D]``, cosines in the first half of a row, sines in the second.
    """
    TOKENS: tl.constexpr = x_TD.shape[0]
    HALF: tl.constexpr = ROPE // 2
    if position_ptr is None:
        return x_TD
    else:  # without it the compiler would go on with what follows
        position_T = tl.load(position_ptr + token_T, mask=ok_T, other=0).to(tl.int64)
        at = position_T[:, None] * ROPE + tl.arange(0, HALF)[None, :]
        cos = tl.load(cos_sin_ptr + at, mask=ok_T[:, None], other=0.0)
        sin = tl.load(cos_sin_ptr + at + HALF, mask=ok_T[:, None], other=0.0)
        if INTERLEAVED:
            a, b = tl.split(tl.reshape(x_TD, [TOKENS, HALF, 2]))
        else:
            a, b = tl.split(tl.permute(tl.reshape(x_TD, [TOKENS, 2, HALF]), [0, 2, 1]))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
        if not INTERLEAVED:
            turned = tl.permute(turned, [0, 2, 1])
        return tl.reshape(turned, [TOKENS, ROPE])
