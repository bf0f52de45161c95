"""DeepSeek attention of one TPLA decode rank: h / (k / g) heads over one slice of the latent.

Shape suffixes: H heads of this rank, N nope dims, C whole latent, L this rank's latent, V value
dims. Source: TPLA, sharded decode; the shared core and the per-head logit scales are ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models import deepseek_v2
from sglang.srt.runtime_context import get_parallel

from tpla.core.checkpoint import KEYS_TENSOR, VALUES_TENSOR, Manifest, values_path
from tpla.core.errors import HookError
from tpla.core.latent_layout import CORE_VALUE_GROUP, RankShard, ShardPlan
from tpla.workers.sglang_plugin.output_projection import ScatteredOutput


def slice_absorbed_weights(
    w_kc_HNC: torch.Tensor,
    w_vc_HCV: torch.Tensor,
    plan: ShardPlan,
    group: int,
    logit_scale_H: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the absorbed projections.

    Keys: core dims as they are, slice dims times the head's logit scale. Values: core dims count on
    group 0 alone, since every group's attention output holds them and the all-reduce sums groups.

    Returns:
        ``w_kc [H, N, L]`` and ``w_vc [H, L, V]``, contiguous, in the given dtypes.
    """
    start, stop = plan.slice_bounds(group)
    core = plan.core_dims
    scale_H11 = logit_scale_H.to(w_kc_HNC.device, torch.float32)[:, None, None]
    slice_kc = (w_kc_HNC[..., start:stop].float() * scale_H11).to(w_kc_HNC.dtype)
    w_kc_HNL = torch.cat([w_kc_HNC[..., :core], slice_kc], -1)
    core_vc = (
        w_vc_HCV[:, :core] if group == CORE_VALUE_GROUP else torch.zeros_like(w_vc_HCV[:, :core])
    )
    w_vc_HLV = torch.cat([core_vc, w_vc_HCV[:, start:stop]], 1)
    return w_kc_HNL.contiguous(), w_vc_HLV.contiguous()


@contextmanager
def _head_sharding(shard: RankShard, scatter_output: bool) -> Iterator[None]:
    """Let SGLang's constructor see the head shards as its attention TP group.

    With ``scatter_output`` its o_proj, the one row-parallel projection there, is ours.
    """
    original, projection = deepseek_v2.get_parallel, deepseek_v2.RowParallelLinear

    class HeadParallel:
        """The real parallel state, with attention TP narrowed to the head shards."""

        attn_tp_rank = shard.head_rank
        attn_tp_size = shard.head_shards

        def __getattr__(self, name: str) -> Any:
            return getattr(original(), name)

    deepseek_v2.get_parallel = HeadParallel
    if scatter_output:
        deepseek_v2.RowParallelLinear = functools.partial(ScatteredOutput, shard)
    try:
        yield
    finally:
        deepseek_v2.get_parallel, deepseek_v2.RowParallelLinear = original, projection


def read_fitted(path: Path, name: str, group: int, first: int, heads: int) -> torch.Tensor:
    """This rank's part of a layer's fitted projections, on the CPU.

    Values are ``[H, L, V]``, keys ``[H, N, L]``, as SGLang has its absorbed weights.
    """
    with safe_open(path, framework="pt") as file:
        part: torch.Tensor = file.get_slice(name)[group, first : first + heads]
    return part


def make_shard_attention(
    base: type, manifest: Manifest, checkpoint: Path, scatter_output: bool
) -> type:
    """Subclass SGLang's ``DeepseekV2AttentionMLA`` for the ranks of a TPLA decode worker.

    Args:
        base: SGLang's class.
        manifest: of the checkpoint.
        checkpoint: folder with value projections fitted for decode, if the manifest has any.
        scatter_output: add up the latent groups before o_proj, which then is held once.
    """

    class TPLAShardAttention(base):
        """Projections sharded over heads; keys and values restricted to the rank's slice."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            parallel = get_parallel()
            shard = RankShard(parallel.attn_tp_rank, parallel.attn_tp_size, manifest.plan.groups)
            with _head_sharding(shard, scatter_output):
                super().__init__(*args, **kwargs)
            if self.o_proj.reduce_results:
                raise HookError(
                    "o_proj reduces on its own; TPLA relies on SGLang's all-reduce over the whole "
                    "attention TP group. Use the pinned sglang release"
                )
            self.tpla_shard = shard
            self.tpla_plan = manifest.plan.layer(self.layer_id)
            self.w_kc: Any
            self.w_vc: Any
            self.kv_lora_rank: int
            self.attn_mqa = RadixAttention(
                self.num_local_heads,
                self.tpla_plan.latent_width + self.qk_rope_head_dim,
                self.scaling,
                num_kv_heads=1,
                layer_id=self.layer_id,
                v_head_dim=self.tpla_plan.latent_width,
                quant_config=None,
                prefix=f"{kwargs.get('prefix', '')}.attn_mqa",
            )

        def slice_weights(self) -> None:
            """Narrow ``w_kc`` and ``w_vc``, which SGLang has just made for the whole latent."""
            first = self.tpla_shard.head_rank * self.num_local_heads
            scales = manifest.logit_scales[self.layer_id][first : first + self.num_local_heads]
            group = self.tpla_shard.group
            logit_scale_H = torch.tensor([per_group[group] for per_group in scales])
            self.w_kc, self.w_vc = slice_absorbed_weights(
                self.w_kc, self.w_vc, self.tpla_plan, group, logit_scale_H
            )
            if manifest.aligned:
                self.w_vc = self._fitted(VALUES_TENSOR, self.w_vc)
            if manifest.keyed:
                self.w_kc = self._fitted(KEYS_TENSOR, self.w_kc)

        def _fitted(self, name: str, like: torch.Tensor) -> torch.Tensor:
            """This rank's part of a fitted projection, in place of its own slice ``like``."""
            path, group = values_path(checkpoint, self.layer_id), self.tpla_shard.group
            first = self.tpla_shard.head_rank * self.num_local_heads
            part = read_fitted(path, name, group, first, self.num_local_heads)
            assert part.shape == like.shape
            return part.to(like.device, like.dtype).contiguous()

        def forward_absorb_core(
            self, q_pe: Any, k_pe: Any, q_nope_out: Any, k_nope: Any, *rest: Any, **kwargs: Any
        ) -> torch.Tensor:
            """Cache and attend to the rank's part of the latent, which was normalised whole."""
            plan = self.tpla_plan
            start, stop = plan.slice_bounds(self.tpla_shard.group)
            k_part = torch.cat([k_nope[..., : plan.core_dims], k_nope[..., start:stop]], dim=-1)
            whole = self.kv_lora_rank
            self.kv_lora_rank = plan.latent_width  # SGLang shapes the attention output by it
            try:
                return super().forward_absorb_core(q_pe, k_pe, q_nope_out, k_part, *rest, **kwargs)
            finally:
                self.kv_lora_rank = whole

    return TPLAShardAttention


def slice_after_load(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``post_load_weights``: slice what it made, for the layers that it touched.

    SGLang copies into an existing ``w_kc``/``w_vc`` on a reload, so sliced ones are put away first.
    """
    attentions = [layer.self_attn for layer in self.model.layers if hasattr(layer, "self_attn")]
    sliced = [(attention, attention.w_kc, attention.w_vc) for attention in attentions]
    for attention in attentions:
        attention.w_kc = attention.w_vc = None
    original(self, *args, **kwargs)
    for attention, w_kc, w_vc in sliced:
        if attention.w_kc is None:  # a partial reload left this layer alone
            attention.w_kc, attention.w_vc = w_kc, w_vc
            continue
        if attention.use_deep_gemm_bmm or attention.w_kc.dtype == torch.float8_e4m3fn:
            raise HookError(
                "absorbed weights are quantised (SGL_USE_DEEPGEMM_BMM or per-tensor fp8), which "
                "TPLA cannot slice; unset it and use bf16 absorbed weights"
            )
        attention.slice_weights()
