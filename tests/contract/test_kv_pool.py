"""The decode pool inside SGLang's: rows by layer, and the layers of one pipeline stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpla.core.config import Mode
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.workers.sglang_plugin.kv_pool import LatentKVPool, cache_plan

LATENT = 64


@pytest.mark.parametrize("start_layer", [0, 2])
def test_a_pool_keeps_each_layers_rows_in_that_layers_width(start_layer: int) -> None:
    layout = CacheLayout(ModelPlan(LATENT, 2, (0, 32)), 1, 16, KVFormat.FP8)
    pool = LatentKVPool(
        layout, size=32, page_size=16, dtype=torch.bfloat16, layer_num=2, device="cpu",
        enable_memory_saver=False, start_layer=start_layer, end_layer=start_layer + 1,
    )  # fmt: skip
    slots = torch.tensor([5, 9, 17])
    for layer, width in ((start_layer, 32), (start_layer + 1, 48)):
        assert pool.layer_layout(layer).latent_width == width
        k_TR = torch.randn(3, 1, width + 16)
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, k_TR, None)
        assert pool.rows(layer).shape == (48, width + 4 + 2 * 16)
        latent, rope = pool.read_latents(layer, slots)
        torch.testing.assert_close(latent, k_TR[:, 0, :width], rtol=0.07, atol=0.02)
        torch.testing.assert_close(rope, k_TR[:, 0, width:], rtol=0.02, atol=0.02)
    assert layout.token_bytes == sum(buffer.shape[-1] for buffer in pool.kv_buffer)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(Mode.TPLA, (512, 2, (32, 64))), (Mode.SNAPMLA, (512, 1, (0, 0)))],
)
def test_a_pipeline_stage_sizes_its_pool_by_its_own_layers(
    mode: Mode, expected: tuple[Any, ...]
) -> None:
    manifest: Any = SimpleNamespace(plan=ModelPlan(512, 2, (0, 32, 64, 0)))
    configurator = SimpleNamespace(
        layer_info=SimpleNamespace(start_layer=1, end_layer=3),
        model_config=SimpleNamespace(kv_lora_rank=512),
    )
    config: Any = SimpleNamespace(mode=mode)
    assert cache_plan(config, configurator, manifest) == ModelPlan(*expected)
