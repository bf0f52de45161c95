"""Staging memory on the GPU: what its chunks run is compiled before the first one comes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.kernels.gather_pages import _gather_kernel
from tpla.kernels.row_digest import _digest_kernel
from tpla.kernels.scatter_pages import _scatter_kernel
from tpla.workers.transfer.cuda_pool_access import CudaDecodePages, CudaPrefillPages

pytestmark = pytest.mark.gpu

LATENT, ROPE, PAGES = 512, 64, 9
KERNELS = (_gather_kernel, _scatter_kernel, _digest_kernel)


def binaries() -> list[int]:
    """Of each kernel, compiled in this process for this GPU."""
    return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in KERNELS]


@pytest.mark.parametrize("core_dims", [(0, 0, 0), (0, 64, 0)], ids=["alike", "by layer"])
@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_no_chunk_waits_for_a_compiler(page_size: int, core_dims: tuple[int, ...]) -> None:
    for kernel in KERNELS:
        kernel.device_caches.clear()  # as in a process that has run none
    plan = ModelPlan(LATENT, 2, core_dims)
    layout = CacheLayout(plan, 1, ROPE, KVFormat.FP8, row_align=16)
    common = {"layer_num": len(core_dims), "page_size": page_size, "kv_lora_rank": LATENT}
    source = [
        torch.randn(PAGES * page_size, 1, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
        for _ in core_dims
    ]
    target = [
        torch.zeros(PAGES * page_size, 1, each.row_bytes, dtype=torch.uint8, device="cuda")
        for each in layout.layers
    ]
    page_bytes = page_size * layout.token_bytes
    prefill = CudaPrefillPages(SimpleNamespace(kv_buffer=source, **common))
    decode = CudaDecodePages(SimpleNamespace(kv_buffer=target, layout=layout, **common))
    outgoing, incoming = prefill.staging(layout, 5 * page_bytes), decode.staging(5 * page_bytes)
    ready = binaries()
    assert all(ready)
    for count in (1, 2, 3, 4, 5):
        pages = np.arange(count, dtype=np.int32)
        wire_B = outgoing.pack(pages, count)
        torch.cuda.synchronize()
        incoming.wire(count * page_bytes).copy_(wire_B)
        torch.cuda.synchronize()
        incoming.store(pages, count * page_bytes, count)
        assert incoming.intact()
    assert binaries() == ready
