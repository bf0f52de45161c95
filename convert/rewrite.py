"""The rewriting of one layer: fold the latent norm's weight, rotate both latent projections.

With gamma the weight of ``kv_a_layernorm`` and U orthogonal,

    W_DKV <- U^T W_DKV,   b_DKV <- U^T b_DKV,   W_UKV <- W_UKV diag(gamma) U,   gamma <- 1

leave the model's function as it was (TPLA, section 3.2 and Proposition 1). Only the first R rows of
``kv_a_proj_with_mqa`` are W_DKV; the others make the RoPE key and stay.

Shape suffixes: A = R + RoPE dims, E hidden size, R latent dims, B = heads * (nope + value dims).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpla.convert.block_fp8 import SCALE_SUFFIX
from tpla.convert.checkpoint_io import DTYPES, Checkpoint
from tpla.core.errors import CheckpointError

KV_A = "kv_a_proj_with_mqa.weight"
KV_A_BIAS = "kv_a_proj_with_mqa.bias"
NORM = "kv_a_layernorm.weight"
KV_B = "kv_b_proj.weight"


@dataclass(frozen=True)
class LatentProjections:
    """The tensors of one layer that touch the latent, float64.

    Attributes:
        kv_a_AE: down projection; R rows of W_DKV, then the RoPE key's.
        bias_A: its bias, if the model has one.
        gamma_R: weight of the latent's RMSNorm.
        kv_b_BR: up projection W_UKV.
    """

    kv_a_AE: torch.Tensor
    bias_A: torch.Tensor | None
    gamma_R: torch.Tensor
    kv_b_BR: torch.Tensor

    def rotate(self, rotation_RR: torch.Tensor) -> LatentProjections:
        """The same model with the latent in the basis ``rotation_RR`` and gamma = 1."""
        rank = self.gamma_R.shape[0]
        turn = rotation_RR.double()
        kv_a_AE = torch.cat([turn.T @ self.kv_a_AE[:rank], self.kv_a_AE[rank:]])
        bias_A = self.bias_A
        if bias_A is not None:
            bias_A = torch.cat([turn.T @ bias_A[:rank], bias_A[rank:]])
        kv_b_BR = (self.kv_b_BR * self.gamma_R) @ turn
        return LatentProjections(kv_a_AE, bias_A, torch.ones_like(self.gamma_R), kv_b_BR)

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors under their names inside ``self_attn``."""
        tensors = {KV_A: self.kv_a_AE, NORM: self.gamma_R, KV_B: self.kv_b_BR}
        if self.bias_A is not None:
            tensors[KV_A_BIAS] = self.bias_A
        return tensors


def attention_prefix(layer: int) -> str:
    """Prefix of the names of ``layer``'s attention tensors."""
    return f"model.layers.{layer}.self_attn."


def read_projections(checkpoint: Checkpoint, layer: int) -> LatentProjections:
    """Read one layer's latent projections, dequantised.

    Raises:
        CheckpointError: a tensor is absent or has an unexpected shape.
    """
    prefix = attention_prefix(layer)
    bias_A = checkpoint.load(prefix + KV_A_BIAS) if prefix + KV_A_BIAS in checkpoint else None
    result = LatentProjections(
        checkpoint.load(prefix + KV_A).double(),
        None if bias_A is None else bias_A.double(),
        checkpoint.load(prefix + NORM).double(),
        checkpoint.load(prefix + KV_B).double(),
    )
    rank = result.gamma_R.shape[0]
    if result.kv_b_BR.shape[1] != rank or result.kv_a_AE.shape[0] <= rank:
        raise CheckpointError(
            f"layer {layer}: {KV_B} {tuple(result.kv_b_BR.shape)} and {KV_A} "
            f"{tuple(result.kv_a_AE.shape)} do not fit a latent of {rank} dims"
        )
    return result


def encode_projections(
    checkpoint: Checkpoint, layer: int, rotated: LatentProjections, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """The rotated tensors as they are written, under their full names.

    Each keeps the dtype of the tensor that it replaces, unless ``dtype`` is given; block-FP8
    weights are quantised again in the same format.
    """
    prefix = attention_prefix(layer)
    written: dict[str, torch.Tensor] = {}
    for short, tensor in rotated.named().items():
        name = prefix + short
        if checkpoint.is_quantized(name):
            keep_from = rotated.gamma_R.shape[0] if short == KV_A else tensor.shape[0]
            values, scale = _requantize(checkpoint, name, tensor, keep_from)
            written[name], written[name + SCALE_SUFFIX] = values, scale
        else:
            written[name] = tensor.to(dtype or DTYPES[checkpoint.entry(name).dtype])
    return written


def _requantize(
    checkpoint: Checkpoint, name: str, tensor: torch.Tensor, keep_from: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise; rows from ``keep_from`` on did not change and keep their bytes if blocks allow."""
    block = checkpoint.block_fp8
    assert block is not None, name
    values, scale = block.quantize(tensor)
    old_values, old_scale = (
        checkpoint.entry(name).load(),
        checkpoint.entry(name + SCALE_SUFFIX).load(),
    )
    if keep_from % block.rows == 0:
        values = torch.cat([values[:keep_from], old_values[keep_from:]])
        scale[keep_from // block.rows :] = old_scale[keep_from // block.rows :].float()
    return values, scale.to(old_scale.dtype)
