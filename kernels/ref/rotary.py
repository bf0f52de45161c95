"""Torch reference of :mod:`tpla.kernels.rotary`.

Shape suffixes: T tokens, D RoPE dims, P positions.
"""

from __future__ import annotations

import torch


def rotate(
    x: torch.Tensor,
    position_T: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    interleaved: bool = True,
) -> torch.Tensor:
    """``x`` ``[T, ..., D]`` in float32 turned to its positions; unturned without them.

    Args:
        x: any float dtype.
        position_T: int32 or int64, or ``None``.
        cos_sin_PD: cosines in the first half of a row, sines in the second, or ``None``.
        interleaved: pairs that rotate together are neighbours, not half a vector apart.

    Returns:
        float32, in ``x``'s shape.
    """
    x = x.float()
    if position_T is None or cos_sin_PD is None:
        return x
    half = x.shape[-1] // 2
    angles = cos_sin_PD[position_T.long()].view(len(x), *[1] * (x.dim() - 2), 2, half)
    cos, sin = angles.unbind(-2)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if interleaved else -2)
    return turned.flatten(-2)
