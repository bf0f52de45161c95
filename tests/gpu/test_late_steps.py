"""Rows that arrive while an older step still writes to their pages: the rows stay.

A decode step that was begun before its request was known to have ended writes one more row there,
when SGLang has given the pages to the next request.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.workers.transfer.cuda_pool_access import CudaDecodePages, CudaPrefillPages
from tpla.workers.transfer.digest import place_digest

pytestmark = pytest.mark.gpu

LATENT, ROPE, PAGE, PAGES, LAYERS = 512, 64, 64, 5, 3
BUSY_CYCLES = 200_000_000
"""A tenth of a second: rows are here much sooner."""
OLD_BYTE = 0xEE


@pytest.mark.parametrize("way", ["through host memory", "through staging memory"])
def test_rows_outlive_what_the_engine_had_begun_before(way: str) -> None:
    layout = CacheLayout(ModelPlan(LATENT, 2, (0,) * LAYERS), 0, ROPE, KVFormat.FP8, row_align=16)
    common = {"layer_num": LAYERS, "page_size": PAGE}
    cached = [
        torch.randn(PAGES * PAGE, 1, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
        for _ in range(LAYERS)
    ]
    target = [
        torch.zeros(PAGES * PAGE, 1, each.row_bytes, dtype=torch.uint8, device="cuda")
        for each in layout.layers
    ]
    prefill = CudaPrefillPages(SimpleNamespace(kv_buffer=cached, kv_lora_rank=LATENT, **common))
    decode = CudaDecodePages(SimpleNamespace(kv_buffer=target, layout=layout, **common))
    pages = np.arange(PAGES, dtype=np.int32)
    rows = prefill.read(pages, layout)
    assert decode.write(pages, rows, lambda: True)  # compiles the kernels
    right = [buffer.clone() for buffer in target]
    seed = place_digest((1, 0, 0, PAGES))
    incoming = decode.staging(rows.nbytes)
    wire_B = prefill.staging(layout, rows.nbytes).pack(pages, seed)
    torch.cuda.synchronize()
    incoming.wire(rows.nbytes).copy_(wire_B)
    torch.cuda.synchronize()

    engine, begun = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(engine):
        torch.cuda._sleep(BUSY_CYCLES)
        for buffer in target:
            buffer.fill_(OLD_BYTE)
        begun.record()
    decode.follow(begun)
    if way == "through host memory":
        assert decode.write(pages, rows, lambda: True)
    else:
        incoming.store(pages, rows.nbytes, seed)
        assert not incoming.stored()  # nobody has waited
        assert incoming.intact()
    torch.cuda.synchronize()
    for stored, expected in zip(target, right, strict=True):
        assert torch.equal(stored, expected)
