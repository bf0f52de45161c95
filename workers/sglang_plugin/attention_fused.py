"""DeepSeek attention of a decode step on GPUs, around the kernels of :mod:`tpla.kernels`.

Between SGLang's projections stand three launches: the cache row (norm, RoPE, slice, quantisation),
the queries (absorption, RoPE, quantisation) and attention itself.

Shape suffixes: T tokens, H heads of this rank, L this rank's latent, V value dims.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.communicator import get_attn_tp_context
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.runner import get_is_capture_mode

from tpla.core.errors import HookError
from tpla.workers.sglang_plugin.attention_backend_cuda import Rotation


class FusedDecodeAttention:
    """Replaces the absorbed form of ``DeepseekV2AttentionMLA``; every rank of decode runs it."""

    def forward_absorb_prepare(
        self: Any,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        zero_allocator: Any,
        llama_4_scaling: Any = None,
        prev_topk_indices: Any = None,
    ) -> tuple[torch.Tensor, Rotation]:
        """Project; store the tokens' cache rows while the queries are projected."""
        if llama_4_scaling is not None or self.use_dsa or self.rotary_emb is None:
            raise HookError(
                "this model scales, selects or does not rotate its queries, which the decode "
                "kernels do not do; serve it with --device cpu, or with SGLang itself"
            )
        rotary = self.rotary_emb
        rotation = Rotation(positions, rotary.cos_sin_cache, not rotary.is_neox_style)
        if self.q_lora_rank is None:
            latent_TR = self.kv_a_proj_with_mqa(hidden_states)[0]
            self._append(latent_TR, rotation, forward_batch)
            q = self.q_proj(hidden_states)[0]
            return q.view(-1, self.num_local_heads, self.qk_head_dim), rotation
        widths = [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim]
        q_lora, latent_TR = get_attn_tp_context().fetch_qkv_latent().split(widths, dim=-1)
        if self.alt_stream is None or not get_is_capture_mode():
            self._append(latent_TR, rotation, forward_batch)
            return self.q_b_proj_forward(self.q_a_layernorm(q_lora)), rotation
        stream = torch.cuda.current_stream()
        self.alt_stream.wait_stream(stream)
        with torch.cuda.stream(self.alt_stream):
            self._append(latent_TR, rotation, forward_batch)
        q_THR = self.q_b_proj_forward(self.q_a_layernorm(q_lora))
        stream.wait_stream(self.alt_stream)
        return q_THR, rotation

    def forward_absorb_core(self: Any, q_THR: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Attend, project values and output; SGLang sums the result over the attention ranks."""
        latent_THL = get_attn_backend().attend(
            self.layer_id, q_THR, self.w_kc, rotation, self.scaling
        )
        tokens, heads, _ = latent_THL.shape
        value_THV = latent_THL.new_empty(tokens, heads, self.v_head_dim)
        torch.bmm(latent_THL.transpose(0, 1), self.w_vc, out=value_THV.transpose(0, 1))
        output: torch.Tensor = self.o_proj(value_THV.flatten(1))[0]
        return output

    def _append(self: Any, latent_TR: torch.Tensor, rotation: Rotation, forward_batch: Any) -> None:
        get_attn_backend().append(
            self.layer_id, latent_TR, self.kv_a_layernorm, rotation, forward_batch.out_cache_loc
        )


def fuse_decode(base: type) -> type:
    """Subclass an attention class, SGLang's own or a shard of it, for decode on GPUs."""
    return type("FusedDecodeAttentionMLA", (FusedDecodeAttention, base), {})
