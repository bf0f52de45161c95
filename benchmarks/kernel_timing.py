"""Device time by CUDA graph replay, and the machine's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


def graph_us(launch: Callable[[int], None], sets: int, replays: int = 15) -> float:
    """Median microseconds of one launch.

    Args:
        launch: called with an input set's index; captured, so without host synchronisation.
        sets: input sets to walk through; at least 8 launches make a graph.
        replays: timed replays; the median is taken over them.
    """
    launches = max(8, sets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % sets)
    return _median_us(graph.replay, replays) / launches


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: copy GB/s (read + written), matrix product TFLOP/s."""

    copy_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float


def measure_ceilings(size: int = 8192) -> Ceilings:
    """Copy 4 GiB, multiply ``size`` cubed on random data; medians."""
    copy_us = _copy_us(2**32)
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    bf16_us = _median_us(lambda: torch.matmul(a, b, out=product))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
    one = torch.ones((), device="cuda")
    fp8_us = _median_us(
        lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    )
    flops = 2 * size**3
    return Ceilings(2**33 / copy_us / 1e3, flops / bf16_us / 1e6, flops / fp8_us / 1e6)


def _copy_us(size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return _median_us(lambda: target.copy_(source))


def _median_us(work: Callable[[], object], repeats: int = 15) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
