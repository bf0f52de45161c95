"""Weights that decode does not keep: ``kv_b_proj``, once ``w_kc`` and ``w_vc`` are made of it.

Decode runs the absorbed form alone. SGLang sizes its KV pool by the memory that is free after the
model was loaded, so what is freed there becomes cache: 33.5 MB a layer and 2 GB in all for
DeepSeek-V3 in BF16, divided by the head shards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.models import deepseek_v2

from tpla.core.errors import HookError

logger = logging.getLogger(__name__)

_FREED = ("weight", "qweight")
"""Scales and zeros are small, and absorbed weights may share them."""


def free_after_load(output: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``ModelRunner.load_model``: free the projections of every layer.

    Raises:
        HookError: a layer has no absorbed weights, or no projection that could be freed.
    """
    freed = sum(_free(attention) for attention in _attentions(runner.model))
    logger.info("decode keeps no kv_b_proj: %.3f GB freed", freed / 1e9)
    return output


def _attentions(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, deepseek_v2.DeepseekV2AttentionMLA):
            yield module


def _free(attention: Any) -> int:
    """Bytes that a layer's projection held."""
    if attention.w_kc is None or attention.w_vc is None:
        raise HookError(
            f"layer {attention.layer_id} has no absorbed weights, without which decode cannot "
            "attend; use the pinned sglang release"
        )
    freed = 0
    for name, parameter in attention.kv_b_proj.named_parameters(recurse=False):
        if name in _FREED:
            freed += parameter.nbytes
            parameter.data = parameter.data.new_empty(0)
    if not freed:
        raise HookError(f"layer {attention.layer_id} has no kv_b_proj weight to free")
    return freed
