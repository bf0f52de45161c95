"""Chunks through staging memory of a device: the rows that are read page by page, and verified.

Runs under ``TRITON_INTERPRET=1`` (see test_interpreter.py), where streams, events and pinned memory
have stand-ins that are always complete, or on a GPU.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.decode_cases import DEVICE
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.kernels.ref.row_digest import row_digest
from tpla.workers.transfer.cuda_pool_access import CudaDecodePages, CudaPrefillPages
from tpla.workers.transfer.cuda_staging import CudaOutgoing
from tpla.workers.transfer.pool_access import DecodePages
from tpla.workers.transfer.staging import signed

if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_interpreter.py", allow_module_level=True)

PAGE, PAGES, LATENT, ROPE = 4, 9, 64, 16
SEED, OTHER_SEED = (1 << 64) - 5, 17
CHUNKS = (
    (SEED, [7, 0, 3, 8, 1]),
    (OTHER_SEED, [2]),
    (SEED, [4, 5, 6]),
    (OTHER_SEED, [6, 2, 0, 4, 8]),  # as many as once before: launched as prepared then
    (SEED, [1]),
)
LAYOUTS = [
    CacheLayout(ModelPlan(LATENT, 2, (0, 0, 0)), 1, ROPE, KVFormat.FP8, row_align=16),
    CacheLayout(ModelPlan(LATENT, 2, (0, 32, 0)), 0, ROPE, KVFormat.BF16, row_align=16),
]


class _Complete:
    """A stream or an event of a device that is never busy."""

    device = torch.device("cpu")

    def synchronize(self) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        return
    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Complete())
    monkeypatch.setattr(torch.cuda, "Event", _Complete)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def settled(wire_B: torch.Tensor) -> torch.Tensor:
    """With what was begun complete: a staging's stream is not the one that this test copies on."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return wire_B


def pools(layout: CacheLayout) -> tuple[Any, Any]:
    """A prefill pool of random rows and an empty decode pool."""
    layers, slots = layout.plan.num_layers, PAGE * PAGES
    generator = torch.Generator().manual_seed(0)
    source = [
        torch.randn(slots, 1, LATENT + ROPE, generator=generator).bfloat16().to(DEVICE)
        for _ in range(layers)
    ]
    target = [
        torch.zeros(slots, 1, each.row_bytes, dtype=torch.uint8, device=DEVICE)
        for each in layout.layers
    ]
    common = {"layer_num": layers, "page_size": PAGE}
    return (
        SimpleNamespace(kv_buffer=source, kv_lora_rank=LATENT, **common),
        SimpleNamespace(kv_buffer=target, layout=layout, **common),
    )


def on_host(pool: Any) -> Any:
    """The same pool in host memory."""
    buffers = [buffer.cpu() for buffer in pool.kv_buffer]
    return SimpleNamespace(**{**vars(pool), "kv_buffer": buffers})


@pytest.mark.parametrize("layout", LAYOUTS, ids=["fp8", "bf16-by-layer"])
def test_a_chunk_packed_on_a_device_is_stored_bit_for_bit_and_verified(layout: CacheLayout) -> None:
    source, target = pools(layout)
    most = PAGE * layout.token_bytes * 5
    prefill, host = CudaPrefillPages(source), DecodePages(on_host(target))
    outgoing = prefill.staging(layout, most)
    incoming = CudaDecodePages(target).staging(most)
    for seed, pages in CHUNKS:
        wanted = np.array(pages, np.int32)
        nbytes = len(pages) * PAGE * layout.token_bytes
        wire_B = settled(outgoing.pack(wanted, seed)).cpu()
        word_W = wire_B.view(torch.int64)
        assert word_W[-1] == row_digest(word_W[:-1]) + signed(seed)
        assert np.array_equal(wire_B[:nbytes].numpy(), prefill.read(wanted, layout))
        settled(incoming.wire(nbytes).copy_(wire_B))
        incoming.store(wanted[::-1].copy(), nbytes, seed)
        assert incoming.intact() and incoming.stored()
        host.write(wanted[::-1].copy(), wire_B[:nbytes].numpy(), lambda: True)
    for stored, right in zip(target.kv_buffer, host._pool.kv_buffer, strict=True):
        assert torch.equal(stored.cpu(), right)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["fp8", "bf16-by-layer"])
def test_rows_through_host_memory_are_those_of_staging_memory(layout: CacheLayout) -> None:
    source, target = pools(layout)
    prefill, decode = CudaPrefillPages(source), CudaDecodePages(target)
    outgoing, host = prefill.staging(layout, PAGE * layout.token_bytes * 5), on_host(target)
    for seed, pages in reversed(CHUNKS):  # so that larger ones follow smaller ones
        wanted = np.array(pages, np.int32)
        rows = prefill.read(wanted, layout)
        assert np.array_equal(rows, settled(outgoing.pack(wanted, seed)).cpu()[: rows.nbytes])
        for sink in (decode, DecodePages(host)):
            assert not sink.write(wanted, np.full_like(rows, 0xEE), lambda: False)
            assert sink.write(wanted[::-1].copy(), rows, lambda: True)
    for stored, right in zip(target.kv_buffer, host.kv_buffer, strict=True):
        assert torch.equal(stored.cpu(), right)


@pytest.mark.parametrize("fault", ["damaged on the way out", "damaged on the wire", "other place"])
def test_rows_that_are_not_those_of_their_place_are_not_intact(fault: str) -> None:
    layout = LAYOUTS[0]
    source, target = pools(layout)
    nbytes, pages = 3 * PAGE * layout.token_bytes, np.array([1, 2, 5], np.int32)
    outgoing = CudaPrefillPages(source).staging(layout, nbytes)
    incoming = CudaDecodePages(target).staging(nbytes)
    wire_B = outgoing.pack(pages, SEED)
    if fault == "damaged on the way out":
        outgoing.damage()
    incoming.wire(nbytes).copy_(settled(wire_B))
    if fault == "damaged on the wire":
        incoming.wire(nbytes)[nbytes - 1] ^= 1
    settled(wire_B)
    incoming.store(pages, nbytes, OTHER_SEED if fault == "other place" else SEED)
    assert not incoming.intact()
    settled(incoming.wire(nbytes).copy_(settled(outgoing.pack(pages, SEED))))
    incoming.store(pages, nbytes, SEED)
    assert incoming.intact()


def test_pages_that_are_no_whole_number_of_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="an even --page-size"):
        CudaOutgoing(1 << 10, 12, lambda pages, rows: (), torch.cuda.Stream(DEVICE))
