"""SGLang attention backend in torch: prefill on whole latents, decode on shards of them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from tpla.core.latent_layout import PVFormat
from tpla.kernels.ref.blockwise_attention import blockwise_attention
from tpla.kernels.ref.latent_attention import latent_attention


class TorchLatentBackend(AttentionBackend):
    """Absorbed MLA, one request after another.

    Works with SGLang's own MLA pool (prefill) and with :class:`LatentKVPool` (decode). Head count
    and latent width come from the layer, because a TPLA shard's differ from SGLang's arithmetic.
    P V of FP8 rows in FP16 is taken for exact; in FP8 it is rounded as the kernels round it.
    """

    def __init__(self, runner: Any, pv_format: PVFormat) -> None:
        super().__init__()
        self._pv_format = pv_format
        # SGLang's forward context reads both attributes off the backend.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to prepare: lengths are read from the batch."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a row that pads a DP rank's batch: it reads the pool's dummy slot."""
        return 1

    def support_triton(self) -> bool:
        """Triton kernels of the engine are off with this backend."""
        return False

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attend from a chunk of each request; ``q [T, H (L + D)]``, ``k [T, 1, L + D]``."""
        query_lens = list(forward_batch.extend_seq_lens_cpu)
        return self._forward(q, k, layer, forward_batch, save_kv_cache, query_lens)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attend from one token of each request; shapes as in :meth:`forward_extend`."""
        query_lens = [1] * forward_batch.batch_size
        return self._forward(q, k, layer, forward_batch, save_kv_cache, query_lens)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        query_lens: list[int],
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, None)
        heads, latent_width = layer.tp_q_head_num, layer.v_head_dim
        q_THR = q.view(-1, heads, layer.qk_head_dim)
        out_THL = q_THR.new_empty(q_THR.shape[0], heads, latent_width)
        rows = forward_batch.req_pool_indices.tolist()
        seq_lens = forward_batch.seq_lens_cpu.tolist()
        start = 0
        for row, seq_len, query_len in zip(rows, seq_lens, query_lens, strict=True):
            block = slice(start, start + query_len)
            slots = self.req_to_token_pool.req_to_token[row, :seq_len].long()
            out_THL[block] = self._attend(layer, q_THR[block], slots).to(out_THL.dtype)
            start += query_len
        return out_THL.view(-1, heads * latent_width)

    def _attend(self, layer: Any, q_QHR: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Outputs ``[Q, H, L]`` in float32 of one request's last tokens."""
        pool, width = self.token_to_kv_pool, layer.v_head_dim
        q_latent_QHL, q_rope_QHD = q_QHR[..., :width], q_QHR[..., width:]
        if self._pv_format is PVFormat.FP8:
            rows_KB, layout = pool.rows(layer.layer_id)[slots], pool.layer_layout(layer.layer_id)
            return blockwise_attention(q_latent_QHL, q_rope_QHD, rows_KB, layout, layer.scaling)
        latent_KL, rope_KD = self._read(layer, slots)
        out, _ = latent_attention(q_latent_QHL, q_rope_QHD, latent_KL, rope_KD, layer.scaling)
        return out

    def _read(self, layer: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool
        if hasattr(pool, "read_latents"):
            return pool.read_latents(layer.layer_id, slots)
        rows = pool.get_key_buffer(layer.layer_id)[slots, 0].float()
        return rows[:, : layer.v_head_dim], rows[:, layer.v_head_dim :]
