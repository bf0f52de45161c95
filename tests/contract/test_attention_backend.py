"""The torch backend inside SGLang's interface: decode over a pool of FP8 rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan, PVFormat
from tpla.kernels.ref.blockwise_attention import blockwise_attention
from tpla.kernels.ref.latent_attention import latent_attention
from tpla.workers.sglang_plugin.attention_backend import TorchLatentBackend
from tpla.workers.sglang_plugin.kv_pool import LatentKVPool

WIDTH, ROPE, HEADS, SCALE = 32, 16, 4, 0.2
LENGTHS = (150, 7)


@pytest.mark.parametrize("pv_format", list(PVFormat))
def test_a_decode_step_adds_up_rows_in_the_format_of_the_worker(pv_format: PVFormat) -> None:
    layout = CacheLayout(ModelPlan(WIDTH, 1, (0,)), 0, ROPE, KVFormat.FP8)
    pool = LatentKVPool(
        layout, size=256, page_size=1, dtype=torch.bfloat16, layer_num=1, device="cpu",
        enable_memory_saver=False, start_layer=0, end_layer=1,
    )  # fmt: skip
    slots = 1 + torch.randperm(256)
    req_to_token = torch.zeros(2, 256, dtype=torch.int32)
    for row, (length, start) in enumerate(zip(LENGTHS, (0, 150), strict=True)):
        req_to_token[row, :length] = slots[start : start + length].int()
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=HEADS, v_head_dim=WIDTH, qk_head_dim=WIDTH + ROPE, scaling=SCALE
    )
    pool.set_kv_buffer(layer, slots, torch.randn(256, 1, WIDTH + ROPE), None)
    batch = SimpleNamespace(
        batch_size=2, req_pool_indices=torch.tensor([0, 1]), seq_lens_cpu=torch.tensor(LENGTHS),
        out_cache_loc=torch.stack([req_to_token[row, n - 1] for row, n in enumerate(LENGTHS)]),
    )  # fmt: skip
    q, k = torch.randn(2, HEADS, WIDTH + ROPE), torch.randn(2, 1, WIDTH + ROPE)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token), token_to_kv_pool=pool
    )
    out = TorchLatentBackend(runner, pv_format).forward_decode(q.flatten(1), k, k, layer, batch)

    answers: dict[PVFormat, list[torch.Tensor]] = {PVFormat.FP16: [], PVFormat.FP8: []}
    for row, length in enumerate(LENGTHS):
        own = req_to_token[row, :length].long()
        query = (q[row, None, :, :WIDTH], q[row, None, :, WIDTH:])
        exact, _ = latent_attention(*query, *pool.read_latents(0, own), SCALE)
        answers[PVFormat.FP16].append(exact)
        rounded = blockwise_attention(*query, pool.rows(0)[own], layout.layers[0], SCALE)
        answers[PVFormat.FP8].append(rounded)
    expected, other = (
        torch.cat(answers[each]).flatten(1) for each in (pv_format, *(set(PVFormat) - {pv_format}))
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert (out - other).abs().max() > 1e-4
