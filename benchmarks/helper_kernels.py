"""The kernels around decode attention beside a plain copy, in one run on one GPU.

    python -m tpla.benchmarks.helper_kernels --json OUT

DeepSeek-V3, TP2, two latent groups: 128 heads of a rank, latent 256. Each kernel is compared with
its torch reference before it is timed; one that differs is reported and not timed, and the command
exits with 1. Times are medians of CUDA graph replays that walk through independent sets of inputs
and outputs, which together exceed the L2 cache tenfold or number ``MOST_SETS``.

``bytes``: what must be read and written at least once, a row with its padding. ``copy_pct``: bytes
per second as a share of this run's copy bandwidth (4 GiB, read + written). A launch that moves
little is bounded by its latency instead: ``same_size_copy_us`` is torch's copy of as many bytes,
timed in the same way.

Shape suffixes as in the kernels' modules; R sets.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tpla.benchmarks.command import command_line
from tpla.benchmarks.kernel_cases import (
    COLD_BYTES,
    KV_LORA_RANK,
    PAGE_SIZE,
    QK_ROPE_HEAD_DIM,
    KernelCase,
)
from tpla.benchmarks.kernel_timing import Ceilings, graph_us, measure_ceilings
from tpla.benchmarks.kernels import header
from tpla.core.latent_layout import KVFormat, LatentLayout
from tpla.kernels.append_latents import append_latents
from tpla.kernels.fetch_latents import fetch_latents
from tpla.kernels.gather_pages import gather_pages
from tpla.kernels.prepare_queries import prepare_queries
from tpla.kernels.ref import append_latents as ref_append
from tpla.kernels.ref import fetch_latents as ref_fetch
from tpla.kernels.ref import gather_pages as ref_gather
from tpla.kernels.ref import prepare_queries as ref_prepare
from tpla.kernels.ref import scatter_pages as ref_scatter
from tpla.kernels.ref.latent_rows import pack_rows, unpack_rows
from tpla.kernels.scatter_pages import scatter_pages

BATCHES = (64, 128, 512)
MIGRATED_TOKENS, LAYERS = 4096, 61
QK_NOPE_HEAD_DIM, POSITIONS = 128, 4096
MOST_SETS = 512
TIES = 0.002
"""Share of values next to a rounding tie, which may fall on either side of it. BF16 latents over
amax / 448 meet exact ties often; the kernels' tests tell ties from errors, value by value."""
FP8_STEP, BF16_STEP = 2.0**-3, 2.0**-7
EPS = 1e-6


@dataclass
class Row:
    """One line of the report; ``us`` and what follows from it are null where the check failed."""

    kernel: str
    model: str
    tp: int
    groups: int
    heads: int
    latent: int
    kv_format: str
    batch: int
    us: float | None
    bytes: int
    gb_per_s: float | None
    copy_pct: float | None
    same_size_copy_us: float


@dataclass
class Bench:
    """One kernel at one size: ``launch`` takes a set's index, ``check`` looks at set 0."""

    kernel: str
    case: KernelCase
    bytes: int
    sets: int
    launch: Callable[[int], None]
    check: Callable[[], bool]


def sets_of(size: int) -> int:
    """Sets of ``size`` bytes to walk through."""
    return min(-(-COLD_BYTES // size), MOST_SETS)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values on the device."""
    return torch.randn(*shape, device="cuda").to(dtype)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory to be written, none of it right by chance: every byte is part of a NaN."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda").view(dtype).view(shape)


def rotation(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and a table of cosines and sines."""
    angle = torch.rand(POSITIONS, QK_ROPE_HEAD_DIM // 2, device="cuda") * 6.28
    table = torch.cat((angle.cos(), angle.sin()), -1)
    return torch.randint(0, POSITIONS, (tokens,), device="cuda"), table


def close(found: torch.Tensor, expected: torch.Tensor, step: float) -> bool:
    """Whether kernel and reference agree, but for a relative ``step`` of values next to a tie."""
    least = expected.abs().amax(-1, keepdim=True) * 2.0**-17  # a step of the smallest FP8 values
    apart = (found - expected).abs()
    within = bool((apart <= 1.01 * step * expected.abs() + least).all())
    return within and float((apart > 1e-5 * expected.abs()).float().mean()) <= TIES


def close_rows(rows: torch.Tensor, expected: torch.Tensor, layout: LatentLayout) -> bool:
    """The same of encoded rows."""
    latent, rope = unpack_rows(rows.flatten(0, -2), layout)
    expected_latent, expected_rope = unpack_rows(expected.flatten(0, -2), layout)
    return close(latent, expected_latent, FP8_STEP) and close(rope, expected_rope, BF16_STEP)


def prepare_bench(case: KernelCase) -> Bench:
    """Queries of ``case.batch`` tokens."""
    tokens, heads, width = case.batch, case.heads, case.layout.latent_width
    nope, rope = QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM
    per_head = 2 * (nope + rope) + width + 4 + 2 * rope
    size = tokens * heads * per_head + 2 * heads * nope * width + tokens * (4 * rope + 8)
    sets = sets_of(size)
    q_RTHR = normal(sets, tokens, heads, nope + rope)
    w_RHNL = torch.stack([normal(heads, nope, width) * nope**-0.5 for _ in range(sets)])
    position, table = rotation(tokens)
    latent = empty(sets, tokens, heads, width, dtype=torch.float8_e4m3fn)
    scale = empty(sets, tokens, heads, dtype=torch.float32)
    turned = empty(sets, tokens, heads, rope, dtype=torch.bfloat16)

    def call(kernel: Callable[..., None], i: int) -> None:
        kernel(
            q_RTHR[i, ..., :nope], q_RTHR[i, ..., nope:], w_RHNL[i], position, table, latent[i],
            scale[i], turned[i],
        )  # fmt: skip

    def values() -> tuple[torch.Tensor, torch.Tensor]:
        one = scale[0][..., None]
        return latent[0].float() * one, turned[0].float() * one

    def check() -> bool:
        call(prepare_queries, 0)
        found_latent, found_rope = values()
        call(ref_prepare.prepare_queries, 0)
        latent, rope = values()
        return close(found_latent, latent, FP8_STEP) and close(found_rope, rope, BF16_STEP)

    return Bench("prepare_queries", case, size, sets, lambda i: call(prepare_queries, i), check)


def append_bench(case: KernelCase) -> Bench:
    """Rows of ``case.batch`` new tokens."""
    tokens, rank, rope, layout = case.batch, KV_LORA_RANK, QK_ROPE_HEAD_DIM, case.layout
    size = tokens * (2 * (rank + rope) + 4 * rope + 16 + layout.row_bytes) + 2 * rank
    sets = sets_of(size)
    k_RTR = normal(sets, tokens, rank + rope)
    gamma = normal(rank)
    position, table = rotation(tokens)
    slot = torch.randperm(sets * tokens, device="cuda").view(sets, tokens)
    rows = empty(sets * tokens, layout.row_bytes, dtype=torch.uint8)

    def call(kernel: Callable[..., None], i: int) -> None:
        kernel(
            k_RTR[i, :, :rank], k_RTR[i, :, rank:], gamma, EPS, position, table, slot[i], layout,
            rows,
        )  # fmt: skip

    def check() -> bool:
        call(append_latents, 0)
        found = rows[slot[0]]
        call(ref_append.append_latents, 0)
        return close_rows(found, rows[slot[0]], layout)

    return Bench("append_latents", case, size, sets, lambda i: call(append_latents, i), check)


def fetch_bench(case: KernelCase) -> Bench:
    """``case.batch`` cached tokens from anywhere in the pool."""
    tokens, layout, rope = case.batch, case.layout, QK_ROPE_HEAD_DIM
    width = layout.latent_width
    size = tokens * (layout.used_bytes + 8 + 2 * (width + rope))
    sets = sets_of(size)
    dtype = torch.float32
    latent, key = normal(sets * tokens, width, dtype=dtype), normal(sets * tokens, rope)
    rows = pack_rows(latent, key, layout)
    slot = torch.randperm(sets * tokens, device="cuda").view(sets, tokens)
    out_RTR = empty(sets, tokens, width + rope, dtype=torch.bfloat16)

    def call(kernel: Callable[..., None], i: int) -> None:
        kernel(rows, slot[i], layout, out_RTR[i, :, :width], out_RTR[i, :, width:])

    def check() -> bool:
        call(fetch_latents, 0)
        found = out_RTR[0].clone()
        call(ref_fetch.fetch_latents, 0)
        return torch.equal(found, out_RTR[0])

    return Bench("fetch_latents", case, size, sets, lambda i: call(fetch_latents, i), check)


def pointers(buffers: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Address of each layer's buffer, on its device."""
    return torch.tensor([buffer.data_ptr() for buffer in buffers], device=buffers[0].device)


def page_sets(sets: int, pages: int) -> torch.Tensor:
    """Pages of each set, in random places of one pool."""
    order = torch.randperm(sets * pages, device="cuda")
    return order.to(torch.int32).view(sets, pages)


def gather_bench(case: KernelCase) -> Bench:
    """All layers of ``case.batch`` tokens out of the prefill pool."""
    tokens, rank, rope, layout = case.batch, KV_LORA_RANK, QK_ROPE_HEAD_DIM, case.layout
    size = LAYERS * tokens * (2 * (layout.latent_width + rope) + layout.row_bytes)
    sets = sets_of(size)
    pool_YSR = torch.empty(LAYERS, sets * tokens, rank + rope, dtype=torch.bfloat16, device="cuda")
    pool_YSR.normal_()
    pages = page_sets(sets, tokens // PAGE_SIZE)
    pointer_Y = pointers(pool_YSR)
    staging = empty(sets, LAYERS, tokens, layout.row_bytes, dtype=torch.uint8)

    def call(kernel: Callable[..., None], i: int) -> None:
        # The pool is named so that it lives as long as its addresses are used.
        kernel(pointer_Y, pool_YSR.dtype, pages[i], PAGE_SIZE, layout, staging[i])

    def check() -> bool:
        call(gather_pages, 0)
        found = staging[0].clone()
        call(ref_gather.gather_pages, 0)
        return close_rows(found, staging[0], layout)

    return Bench("gather_pages", case, size, sets, lambda i: call(gather_pages, i), check)


def scatter_bench(case: KernelCase) -> Bench:
    """All layers of ``case.batch`` received tokens into the decode pool."""
    tokens, layout = case.batch, case.layout
    size = 2 * LAYERS * tokens * layout.row_bytes
    sets = sets_of(size)
    staging = torch.empty(
        sets, LAYERS, tokens, layout.row_bytes, dtype=torch.uint8, device="cuda"
    ).random_()
    pool_YSB = empty(LAYERS, sets * tokens, layout.row_bytes, dtype=torch.uint8)
    pages = page_sets(sets, tokens // PAGE_SIZE)
    pointer_Y = pointers(pool_YSB)

    def call(kernel: Callable[..., None], i: int) -> None:
        kernel(staging[i], pointer_Y, pages[i], PAGE_SIZE, layout)

    def check() -> bool:
        pool_YSB.fill_(0xFF)
        call(scatter_pages, 0)
        found = pool_YSB.clone()
        pool_YSB.fill_(0xFF)
        call(ref_scatter.scatter_pages, 0)
        return torch.equal(found, pool_YSB)

    return Bench("scatter_pages", case, size, sets, lambda i: call(scatter_pages, i), check)


def same_size_copy_us(size: int) -> float:
    """Microseconds of a copy that reads and writes ``size`` bytes in all."""
    sets = sets_of(size)
    source, target = (torch.empty(sets, size // 2, dtype=torch.uint8, device="cuda") for _ in "ab")

    def copy(i: int) -> None:
        target[i].copy_(source[i])

    return graph_us(copy, sets)


def run(bench: Bench, ceilings: Ceilings) -> Row:
    """Check, then time."""
    us = graph_us(bench.launch, bench.sets) if bench.check() else None
    gb_per_s = None if us is None else bench.bytes / us / 1e3
    case = bench.case
    return Row(
        bench.kernel,
        case.model,
        case.tp,
        case.groups,
        case.heads,
        case.layout.latent_width,
        case.kv_format.value,
        case.batch,
        us,
        bench.bytes,
        gb_per_s,
        None if gb_per_s is None else 100 * gb_per_s / ceilings.copy_gb_per_s,
        same_size_copy_us(bench.bytes),
    )


def show(row: Row) -> None:
    """One line for people."""
    start = f"{row.kernel:16s} {row.kv_format} h={row.heads} L={row.latent} T={row.batch:<5d}"
    if row.us is None:
        print(f"{start} differs from its reference; not timed", flush=True)
        return
    print(
        f"{start} {row.us:8.1f} us {row.bytes / 1e6:7.1f} MB {row.gb_per_s:6.0f} GB/s "
        f"{row.copy_pct:5.1f} % of copy  (a copy of this size: {row.same_size_copy_us:.1f} us)",
        flush=True,
    )


def main() -> int:
    """Run every case; 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--commit", help="for the header, where git cannot tell")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    command = command_line("helper_kernels")
    report: dict[str, Any] = {"header": {**header(ceilings, arguments.commit), "command": command}}
    report["rows"] = rows = []
    print(ceilings, flush=True)
    plans = [
        (build, batch) for build in (prepare_bench, append_bench, fetch_bench) for batch in BATCHES
    ]
    plans += [(build, MIGRATED_TOKENS) for build in (gather_bench, scatter_bench)]
    for build, batch in plans:
        row = run(build(KernelCase("DeepSeek-V3", 128, 2, 2, KVFormat.FP8, batch, 1)), ceilings)
        torch.cuda.empty_cache()
        show(row)
        rows.append(asdict(row))
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["us"] is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
