"""What each stage of a chunk's way costs by itself: on the host that begins it, and on the device.

Stages of different chunks overlap, so the slowest limits a long transfer, and the sum is the
latency of a short one. Gather, digest and scatter are CUDA graph replays, as in ``helper_kernels``;
send and receive are chunks back to back through a group of the data plane. Host microseconds are
those that a call takes to return.
"""

from __future__ import annotations

import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from tpla.benchmarks.helper_kernels import pointers
from tpla.benchmarks.kernel_timing import graph_us
from tpla.core.latent_layout import CacheLayout
from tpla.kernels.gather_pages import prepare_gather_pages
from tpla.kernels.prepared_launch import PreparedLaunch
from tpla.kernels.row_digest import prepare_row_digest
from tpla.kernels.scatter_pages import prepare_scatter_pages
from tpla.workers.transfer.pair_group import (
    DECODE_RANK,
    PREFILL_RANK,
    Pending,
    host_store,
    join_group,
    join_store,
)

_CALLS, _PATIENCE_SECONDS = 20, 60.0


def kernel_stages(pool: Any, layout: CacheLayout, pages: int) -> list[dict[str, Any]]:
    """Gather, digest and scatter of ``pages`` pages on the device of a prefill pool."""
    device, tokens = pool.kv_buffer[0].device, pages * pool.page_size
    (run,) = layout.runs
    pointer_Y = pointers(pool.kv_buffer)
    rows_YTB = torch.empty(run.shape(tokens), dtype=torch.uint8, device=device)
    word_W = rows_YTB.view(-1).view(torch.int64)
    start_1, result_1, tally_2 = torch.zeros(4, dtype=torch.int64, device=device).split((1, 1, 2))
    target = [torch.empty_like(rows_YTB[0]) for _ in run.layers]
    target_Y, page_N = pointers(target), torch.randperm(pages, device=device)
    dtype, size = pool.kv_buffer[0].dtype, pool.page_size
    launches = {
        "gather": prepare_gather_pages(pointer_Y, dtype, page_N, size, run.layout, rows_YTB),
        "digest": prepare_row_digest(word_W, start_1, tally_2, result_1),
        "scatter": prepare_scatter_pages(rows_YTB, target_Y, page_N, size, run.layout),
    }
    with torch.cuda.device(device):
        return [
            {"stage": name, "device_us": _device_us(launch), "host_us": _host_us(launch)}
            for name, launch in launches.items()
        ]


def wire_stage(
    pipe: Connection, backend: str, rank: int, device: torch.device, nbytes: int
) -> dict[str, Any]:
    """One end of chunks of ``nbytes`` that follow each other; the other end runs this, too."""
    if rank == PREFILL_RANK:
        store = host_store(_PATIENCE_SECONDS)
        pipe.send(store.port)
    else:
        store = join_store("127.0.0.1", pipe.recv(), _PATIENCE_SECONDS)
    group = join_group(backend, store, rank, device, _PATIENCE_SECONDS, _PATIENCE_SECONDS)
    chunk_B = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    begin = group.send if rank == PREFILL_RANK else group.recv
    for _ in range(group.lanes):
        _finish([begin(chunk_B)])  # a lane's first makes its connection
    calls, pending, begun = [], [], time.perf_counter()
    for _ in range(_CALLS):
        before = time.perf_counter()
        pending.append(begin(chunk_B))
        calls.append(time.perf_counter() - before)
    _finish(pending)
    device_us = (time.perf_counter() - begun) / _CALLS * 1e6
    group.abort()
    stage = {PREFILL_RANK: "send", DECODE_RANK: "receive"}[rank]
    return {"stage": stage, "device_us": device_us, "host_us": statistics.median(calls) * 1e6}


def _finish(pending: list[Pending]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all(each.done() for each in pending):
        if time.monotonic() > deadline:
            raise RuntimeError("no figure: the other rank did not take part")
        time.sleep(0)


def _device_us(launch: PreparedLaunch) -> float:
    return graph_us(lambda _: launch(), 1)


def _host_us(launch: PreparedLaunch) -> float:
    seconds = []
    for _ in range(_CALLS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        launch()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) * 1e6
