"""Latent rows in torch: the reference of every kernel that writes or reads the cache.

Shape suffixes: T tokens, L latent elements of this rank, D RoPE dims, B bytes of a row.
Source of the FP8 row: SnapMLA, per-token quantisation and scale domain alignment.
"""

from __future__ import annotations

import torch

from tpla.core.latent_layout import AMAX_FLOOR, FP8_MAX, KVFormat, LatentLayout

_DTYPES = {KVFormat.FP32: torch.float32, KVFormat.BF16: torch.bfloat16}


def quantize_latent(latent_TL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a token: ``scale = amax / 448``, ``values = latent / scale``.

    Args:
        latent_TL: any float dtype.

    Returns:
        values ``[T, L]`` float8_e4m3fn and scale ``[T]`` float32.
    """
    latent = latent_TL.float()
    scale_T = latent.abs().amax(-1).clamp_min(AMAX_FLOOR) / FP8_MAX
    values = (latent / scale_T[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values, scale_T


def pack_rows(latent_TL: torch.Tensor, rope_TD: torch.Tensor, layout: LatentLayout) -> torch.Tensor:
    """Encode latents and RoPE keys as rows.

    Args:
        latent_TL: this rank's part of the latent (core, then slice), any float dtype.
        rope_TD: RoPE keys, any float dtype.
        layout: where the bytes go.

    Returns:
        ``[T, row_bytes]`` uint8; padding bytes are zero.
    """
    rows_TB = torch.zeros(
        (latent_TL.shape[0], layout.row_bytes), dtype=torch.uint8, device=latent_TL.device
    )
    if layout.has_scale:
        latent, scale_T = quantize_latent(latent_TL)
        rope = (rope_TD.float() / scale_T[:, None]).to(torch.bfloat16)
        _put(rows_TB, layout.scale_offset, scale_T[:, None])
    else:
        dtype = _DTYPES[layout.kv_format]
        latent, rope = latent_TL.to(dtype), rope_TD.to(dtype)
    _put(rows_TB, 0, latent)
    _put(rows_TB, layout.rope_offset, rope)
    return rows_TB


def unpack_rows(rows_TB: torch.Tensor, layout: LatentLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode rows that :func:`pack_rows` wrote.

    Returns:
        latent ``[T, L]`` float32 and RoPE key ``[T, D]`` float32, in the model's own domain.
    """
    if layout.has_scale:
        latent, rope, scale_T = stored_values(rows_TB, layout)
        return latent * scale_T[:, None], rope * scale_T[:, None]
    dtype = _DTYPES[layout.kv_format]
    latent = _get(rows_TB, 0, layout.latent_bytes, dtype)
    return latent, _get(rows_TB, layout.rope_offset, layout.rope_bytes, dtype)


def stored_values(
    rows_TB: torch.Tensor, layout: LatentLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 rows as they are stored, not multiplied by their scales.

    Returns:
        latent ``[T, L]``, RoPE key ``[T, D]`` and scale ``[T]``, float32.
    """
    latent = _get(rows_TB, 0, layout.latent_bytes, torch.float8_e4m3fn)
    rope = _get(rows_TB, layout.rope_offset, layout.rope_bytes, torch.bfloat16)
    return latent, rope, _get(rows_TB, layout.scale_offset, 4, torch.float32)[:, 0]


def _get(rows_TB: torch.Tensor, offset: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return rows_TB[:, offset : offset + size].contiguous().view(dtype).float()


def _put(rows_TB: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    values_bytes = values.contiguous().view(torch.uint8)
    rows_TB[:, offset : offset + values_bytes.shape[1]] = values_bytes
