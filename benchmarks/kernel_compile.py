"""Kernels of a benchmark compiled before it begins, side by side, into Triton's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

from tpla.benchmarks.kernel_cases import DecodeBench, KernelCase
from tpla.benchmarks.kernel_peers import peer_us
from tpla.core.latent_layout import KVFormat

_CONTEXT = 1024
"""Few tokens; as in the timed cases, 16 divides their pages, which is part of a cache key."""


def compile_ahead(cases: list[KernelCase], peers: bool) -> None:
    """Launch every distinct shape once over few tokens, each in a process of its own.

    A failure is left to the timed run, which reports it where it belongs.
    """
    shapes: dict[tuple[object, ...], dict[int, KernelCase]] = {}
    peer_shapes: dict[int, dict[int, KernelCase]] = {}
    for case in cases:
        small = replace(case, context=_CONTEXT)
        shapes.setdefault(replace(small, batch=1).shape, {})[case.batch] = small
        peer_shapes.setdefault(case.peer_heads, {})[case.batch] = small
    work: list[Callable[[], None]] = [
        partial(_launch, list(own.values())) for own in shapes.values()
    ]
    if peers:
        work += [partial(_launch_peers, list(own.values())) for own in peer_shapes.values()]
    processes = min(len(work), os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(item) for item in work]:
            future.exception()


def _launch(cases: list[KernelCase]) -> None:
    for case in cases:
        bench = DecodeBench(case, quantized=case.kv_format is KVFormat.FP8)
        bench.launch(bench.workspace(), 0)


def _launch_peers(cases: list[KernelCase]) -> None:
    for case in cases:
        peer_us(case.peer_heads, case.batch, case.context, case.query_len)
