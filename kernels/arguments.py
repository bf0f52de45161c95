"""Checks that the wrappers of kernels share."""

from __future__ import annotations

import torch

from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, LatentLayout

_WORD = 4


def require_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    contiguous: bool = True,
) -> None:
    """Refuse a tensor that a kernel would misread.

    Args:
        name: what the message calls it.
        tensor: to check.
        shape: what it must have.
        dtypes: any of which it may have.
        contiguous: whether all of it must be, or elements of the last dim alone.

    Raises:
        ValueError: shape, dtype or strides are others.
    """
    dense = tensor.is_contiguous() if contiguous else tensor.stride(-1) == 1 or shape[-1] == 1
    if tensor.shape != shape or tensor.dtype not in dtypes or not (dense or tensor.numel() == 0):
        kind = "contiguous" if contiguous else "contiguous in its last dim,"
        raise ValueError(
            f"{name} must be {kind} {shape} {dtypes}, "
            f"not {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )


def require_rotation(
    position_T: torch.Tensor | None, cos_sin_PD: torch.Tensor | None, tokens: int, rope: int
) -> None:
    """Refuse half a rotation, and one of another shape.

    Raises:
        ValueError: one of the two is missing or does not fit.
    """
    if position_T is None or cos_sin_PD is None:
        if position_T is not None or cos_sin_PD is not None:
            raise ValueError("position and cos_sin belong together; pass both, or neither")
        return
    require_tensor("position", position_T, (tokens,), (torch.int32, torch.int64))
    require_tensor("cos_sin", cos_sin_PD, (cos_sin_PD.shape[0], rope), (torch.float32,))


def require_layout(layout: LatentLayout, kernel: str) -> None:
    """Refuse a row that ``kernel`` cannot address.

    Raises:
        ConfigError: the row format or RoPE width is not one that the kernel knows.
    """
    rope = layout.qk_rope_head_dim
    if layout.kv_format is KVFormat.FP32:
        raise ConfigError(f"{kernel} knows bf16 and fp8 rows; kv_format=fp32 is for the CPU")
    if rope < 16 or rope & (rope - 1):
        raise ConfigError(f"qk_rope_head_dim={rope} must be a power of two >= 16")
    if layout.row_bytes % _WORD:
        raise ConfigError(f"row_bytes={layout.row_bytes} must be a multiple of {_WORD}")
