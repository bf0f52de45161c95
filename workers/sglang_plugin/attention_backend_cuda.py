"""SGLang attention backend of decode workers on GPUs: the kernels of :mod:`tpla.kernels`.

Shape suffixes: T tokens, one of each request; H heads of this rank; N nope dims; C whole latent;
L this rank's latent; D RoPE dims; P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel

from tpla.core.errors import ConfigError
from tpla.core.latent_layout import PVFormat, RankShard
from tpla.kernels.append_latents import append_latents
from tpla.kernels.hopper_decode import require_fp8_values
from tpla.kernels.latent_decode import latent_decode
from tpla.kernels.prepare_queries import prepare_queries
from tpla.workers.sglang_plugin.decode_step import DecodeStep
from tpla.workers.sglang_plugin.kv_pool import LatentKVPool


@dataclass(frozen=True)
class Rotation:
    """RoPE of a step: positions, and float32 cosines, then sines, of each position."""

    position_T: torch.Tensor
    cos_sin_PD: torch.Tensor
    interleaved: bool


class LatentDecodeBackend(AttentionBackend):
    """Decode attention over :class:`LatentKVPool`, from unnormalised latents and plain queries.

    It takes over more than SGLang's backends do: norm, RoPE, absorption and quantisation happen in
    the kernels that write the cache and the queries. :class:`FusedDecodeAttention` calls
    :meth:`append` and :meth:`attend`; SGLang itself only prepares the step.

    Raises:
        ConfigError: speculative decoding is asked for, which the pool's layers do not serve, or
            P V in FP8 for rows or on a device whose kernel has none.
    """

    needs_cpu_seq_lens = False  # lengths never leave the device

    def __init__(self, runner: Any, pv_format: PVFormat) -> None:
        super().__init__()
        # SGLang's forward context reads both attributes off the backend.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool: LatentKVPool = runner.token_to_kv_pool
        algorithm = runner.server_args.speculative_algorithm
        if algorithm is not None:
            raise ConfigError(
                f"--speculative-algorithm {algorithm}: decode workers on GPUs serve one token a "
                "step; leave it out"
            )
        parallel, layout = get_parallel(), self.token_to_kv_pool.layout
        shard = RankShard(parallel.attn_tp_rank, parallel.attn_tp_size, layout.plan.groups)
        self._heads = runner.model_config.num_attention_heads // shard.head_shards
        self._pv_format = pv_format
        if pv_format is PVFormat.FP8:
            pool = self.token_to_kv_pool
            for run in layout.runs:
                require_fp8_values(run.layout, pool.page_size, torch.device(pool.device))
        # Where SGLang scatters tokens to the ranks that share a request's attention, eager batches
        # are padded to a multiple of these, beyond the requests that the pool has room for.
        ranks = parallel.attn_tp_size
        self._step = self._make_step(-(-self.req_to_token_pool.size // ranks) * ranks)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called once, before the first capture; batches are padded to sizes up to ``max_bs``."""
        if max_bs > self._step.max_requests:
            self._step = self._make_step(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a request that pads a batch: it reads the pool's dummy slot."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step; eager steps come here too."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if not mode.is_decode():
            raise ConfigError(
                f"a decode worker was given a batch of mode {mode.name}; prompts go to prefill "
                "workers, through the router"
            )
        batch = forward_batch.batch_size
        self._step.fill(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices[:batch],
            forward_batch.seq_lens[:batch],
        )

    def append(
        self, layer_id: int, latent_TR: torch.Tensor, norm: Any, rotation: Rotation, slot_T: Any
    ) -> None:
        """Store a step's tokens: ``latent_TR [T, C + D]`` as the projection left it."""
        layout = self.token_to_kv_pool.layer_layout(layer_id)
        rank = layout.plan.kv_lora_rank
        append_latents(
            latent_TR[:, :rank],
            latent_TR[:, rank:],
            norm.weight,
            norm.variance_epsilon,
            rotation.position_T,
            rotation.cos_sin_PD,
            slot_T,
            layout,
            self.token_to_kv_pool.rows(layer_id),
            interleaved=rotation.interleaved,
        )

    def attend(
        self,
        layer_id: int,
        q_THR: torch.Tensor,
        w_kc_HNL: torch.Tensor,
        rotation: Rotation,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Latent outputs ``[T, H, L]`` in bfloat16 of queries ``[T, H, N + D]``, unrotated."""
        layout, step = self.token_to_kv_pool.layer_layout(layer_id), self._step
        tokens, heads, _ = q_THR.shape
        width, rope = layout.latent_width, layout.qk_rope_head_dim
        nope = q_THR.shape[-1] - rope
        q_latent = q_THR.new_empty(
            tokens, heads, width, dtype=torch.float8_e4m3fn if layout.has_scale else torch.bfloat16
        )
        q_rope = q_THR.new_empty(tokens, heads, rope, dtype=torch.bfloat16)
        scale = q_THR.new_empty(tokens, heads, dtype=torch.float32) if layout.has_scale else None
        prepare_queries(
            q_THR[..., :nope], q_THR[..., nope:], w_kc_HNL, rotation.position_T,
            rotation.cos_sin_PD, q_latent, scale, q_rope, interleaved=rotation.interleaved,
        )  # fmt: skip
        out_BQHL = q_THR.new_empty(tokens, 1, heads, width, dtype=torch.bfloat16)
        latent_decode(
            q_latent[:, None],
            q_rope[:, None],
            None if scale is None else scale[:, None],
            self.token_to_kv_pool.rows(layer_id),
            step.table_BN,
            step.length_B,
            layout,
            step.page_size,
            softmax_scale,
            step.workspace(layout),
            out_BQHL,
            q_THR.new_empty(tokens, 1, heads, dtype=torch.float32),
        )
        return out_BQHL[:, 0]

    def _make_step(self, max_requests: int) -> DecodeStep:
        pool = self.token_to_kv_pool
        max_tokens = self.req_to_token_pool.req_to_token.shape[1]
        return DecodeStep(
            max_requests, max_tokens, self._heads, pool.layout, self._pv_format, pool.page_size,
            pool.device,
        )  # fmt: skip
