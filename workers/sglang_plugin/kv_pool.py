"""The decode pool: one rank's latent rows, laid out by :class:`CacheLayout`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc
from sglang.srt.runtime_context import get_parallel

from tpla.core.checkpoint import Manifest
from tpla.core.config import Mode, WorkerConfig
from tpla.core.latent_layout import (
    CacheLayout,
    LatentLayout,
    ModelPlan,
    RankShard,
    ShardPlan,
)
from tpla.kernels.ref.latent_rows import pack_rows, unpack_rows

_BULK_COPY_BYTES = 16
"""Hopper's bulk copies, which the decode kernels read by, begin at multiples of this."""


class LatentKVPool(MLATokenToKVPool):
    """SGLang's MLA pool with opaque byte rows.

    ``kv_buffer[layer]`` is ``[slots, 1, row_bytes]`` uint8 with the row bytes of that layer, so
    SGLang's own retraction, moving and buffer accounting, which work on whole rows, hold unchanged.
    Slot 0 is SGLang's dummy slot.

    Args:
        layout: rows of the layers that this process holds.
        pool_arguments: of SGLang's pool.
    """

    def __init__(self, layout: CacheLayout, **pool_arguments: Any) -> None:
        self.layout = layout
        super().__init__(
            kv_lora_rank=max(each.latent_width for each in layout.layers),
            qk_rope_head_dim=layout.qk_rope_head_dim,
            **pool_arguments,
        )

    def _create_buffers(self) -> None:
        self.store_dtype = torch.uint8
        slots = self.size + self.page_size
        self.kv_buffer = [
            torch.zeros((slots, 1, each.row_bytes), dtype=torch.uint8, device=self.device)
            for each in self.layout.layers
        ]

    def layer_layout(self, layer_id: int) -> LatentLayout:
        """Row of a layer, by its number in the model."""
        return self.layout.layers[layer_id - self.start_layer]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor | None
    ) -> None:
        """Quantise and store new tokens, ``cache_k [T, 1, L + D]``; values are the latent."""
        loc, _, _ = unwrap_write_loc(loc_info)
        layout = self.layer_layout(layer.layer_id)
        width = layout.latent_width
        k_TR = cache_k.view(-1, width + layout.qk_rope_head_dim)
        rows_TB = pack_rows(k_TR[:, :width], k_TR[:, width:], layout)
        self.kv_buffer[layer.layer_id - self.start_layer][loc, 0] = rows_TB

    def rows(self, layer_id: int) -> torch.Tensor:
        """All rows of a layer, ``[slots, row_bytes]`` uint8."""
        return self.kv_buffer[layer_id - self.start_layer][:, 0]

    def read_latents(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents ``[K, L]`` and RoPE keys ``[K, D]`` of ``slots [K]``, float32."""
        return unpack_rows(self.rows(layer_id)[slots], self.layer_layout(layer_id))


def cache_plan(config: WorkerConfig, configurator: Any, manifest: Manifest | None) -> ModelPlan:
    """The plan a decode worker serves: the manifest's for mode tpla, the whole latent otherwise.

    It covers the layers that this process holds, one pipeline stage's.
    """
    info = configurator.layer_info
    if config.mode is Mode.TPLA:
        assert manifest is not None  # the self-check refuses to start without one
        return manifest.plan.part(info.start_layer, info.end_layer)
    whole = ShardPlan(configurator.model_config.kv_lora_rank)
    return ModelPlan.uniform(whole, info.end_layer - info.start_layer)


def rank_layout(config: WorkerConfig, plan: ModelPlan, qk_rope_head_dim: int) -> CacheLayout:
    """Layout of this process's rank."""
    parallel = get_parallel()
    shard = RankShard(parallel.attn_tp_rank, parallel.attn_tp_size, plan.groups)
    align = _BULK_COPY_BYTES if config.device == "cuda" else 4
    return CacheLayout(plan, shard.group, qk_rope_head_dim, config.kv_format, row_align=align)


def build_pool(
    config: WorkerConfig, manifest: Manifest | None, configurator: Any, max_total_num_tokens: int
) -> LatentKVPool:
    """What replaces ``KVCacheConfigurator._build_mla_kv_pool`` on decode workers."""
    model = configurator.model_config
    plan = cache_plan(config, configurator, manifest)
    return LatentKVPool(
        rank_layout(config, plan, model.qk_rope_head_dim),
        size=max_total_num_tokens,
        page_size=configurator.server_args.page_size,
        dtype=configurator.kv_cache_dtype,
        layer_num=configurator.layer_info.num_effective_layers,
        device=configurator.device,
        enable_memory_saver=configurator.server_args.enable_memory_saver,
        start_layer=configurator.layer_info.start_layer,
        end_layer=configurator.layer_info.end_layer,
    )


def cell_bytes(config: WorkerConfig, manifest: Manifest | None, configurator: Any) -> int:
    """Bytes of one token over the layers of this process; SGLang sizes the pool by it."""
    plan = cache_plan(config, configurator, manifest)
    return rank_layout(config, plan, configurator.model_config.qk_rope_head_dim).token_bytes
