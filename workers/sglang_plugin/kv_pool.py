"""The decode pool: one rank's latent rows, laid out by :class:`LatentLayout`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc
from sglang.srt.runtime_context import get_parallel

from tpla.core.checkpoint import Manifest
from tpla.core.config import Mode, WorkerConfig
from tpla.core.latent_layout import LatentLayout, RankShard, ShardPlan
from tpla.kernels.ref.latent_rows import pack_rows, unpack_rows

_BULK_COPY_BYTES = 16
"""Hopper's bulk copies, which the decode kernels read by, begin at multiples of this."""


class LatentKVPool(MLATokenToKVPool):
    """SGLang's MLA pool with opaque byte rows.

    ``kv_buffer[layer]`` is ``[slots, 1, row_bytes]`` uint8, so SGLang's own retraction, moving and
    buffer accounting, which work on whole rows, hold unchanged. Slot 0 is SGLang's dummy slot.
    """

    def __init__(self, layout: LatentLayout, **pool_arguments: Any) -> None:
        self.layout = layout
        super().__init__(
            kv_lora_rank=layout.latent_width,
            qk_rope_head_dim=layout.qk_rope_head_dim,
            **pool_arguments,
        )

    def _create_buffers(self) -> None:
        self.store_dtype = torch.uint8
        slots = self.size + self.page_size
        self.kv_buffer = [
            torch.zeros((slots, 1, self.layout.row_bytes), dtype=torch.uint8, device=self.device)
            for _ in range(self.layer_num)
        ]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor | None
    ) -> None:
        """Quantise and store new tokens, ``cache_k [T, 1, L + D]``; values are the latent."""
        loc, _, _ = unwrap_write_loc(loc_info)
        width = self.layout.latent_width
        k_TR = cache_k.view(-1, width + self.layout.qk_rope_head_dim)
        rows_TB = pack_rows(k_TR[:, :width], k_TR[:, width:], self.layout)
        self.kv_buffer[layer.layer_id - self.start_layer][loc, 0] = rows_TB

    def rows(self, layer_id: int) -> torch.Tensor:
        """All rows of a layer, ``[slots, row_bytes]`` uint8."""
        return self.kv_buffer[layer_id - self.start_layer][:, 0]

    def read_latents(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents ``[K, L]`` and RoPE keys ``[K, D]`` of ``slots [K]``, float32."""
        return unpack_rows(self.rows(layer_id)[slots], self.layout)


def shard_plan(config: WorkerConfig, kv_lora_rank: int, manifest: Manifest | None) -> ShardPlan:
    """The plan a decode worker serves: the manifest's for mode tpla, the whole latent otherwise."""
    if config.mode is Mode.TPLA:
        assert manifest is not None  # the self-check refuses to start without one
        return manifest.plan
    return ShardPlan(kv_lora_rank)


def rank_layout(config: WorkerConfig, plan: ShardPlan, qk_rope_head_dim: int) -> LatentLayout:
    """Layout of this process's rank."""
    parallel = get_parallel()
    shard = RankShard(parallel.attn_tp_rank, parallel.attn_tp_size, plan.groups)
    align = _BULK_COPY_BYTES if config.device == "cuda" else 4
    return LatentLayout(plan, shard.group, qk_rope_head_dim, config.kv_format, row_align=align)


def build_pool(
    config: WorkerConfig, manifest: Manifest | None, configurator: Any, max_total_num_tokens: int
) -> LatentKVPool:
    """What replaces ``KVCacheConfigurator._build_mla_kv_pool`` on decode workers."""
    model = configurator.model_config
    plan = shard_plan(config, model.kv_lora_rank, manifest)
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


def cell_bytes(
    config: WorkerConfig, manifest: Manifest | None, configurator: Any, num_layers: int
) -> int:
    """Bytes of one token over all layers; SGLang sizes the pool by it."""
    model = configurator.model_config
    plan = shard_plan(config, model.kv_lora_rank, manifest)
    return rank_layout(config, plan, model.qk_rope_head_dim).row_bytes * num_layers
