"""Decode attention beside its roofline and its peers, in one run on one GPU.

    python -m tpla.benchmarks.kernels --json OUT [--sweep]

Each case is checked against float64 on the stored values before it is timed; a case that fails is
reported and not timed, and the command exits with 1. A shape that several models share is timed
once, and so is each peer. Kernels are compiled before, side by side. Times are medians of CUDA
graph replays over input sets that together exceed the L2 cache tenfold. The schedule (once a step
for all layers) and query preparation are not part of a row; the combine step is.

``roofline_pct``: the larger of bytes over this run's copy bandwidth and operations over this run's
matrix rates, as a share of the measured time. Bytes: latent, scale and RoPE key of each token once.
Operations: Q K and P V over the latent at the row format's rate, the RoPE part at BF16's.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton

from tpla.benchmarks.command import command_line, parse_batch
from tpla.benchmarks.kernel_cases import DecodeBench, KernelCase, cases, cosine_difference
from tpla.benchmarks.kernel_compile import compile_ahead
from tpla.benchmarks.kernel_peers import peer_us
from tpla.benchmarks.kernel_timing import Ceilings, graph_us, measure_ceilings
from tpla.benchmarks.machine import describe_machine
from tpla.core.latent_layout import KVFormat
from tpla.kernels.decode_workspace import DecodeTiling

COSINE_LIMIT, FP8_PV_COSINE_LIMIT = 5e-6, 5e-4
BATCHES = [(32, 32768), (1, 32768), (32, 4096), (128, 4096)]


@dataclass
class Row:
    """One line of the report."""

    kernel: str
    model: str
    tp: int
    groups: int
    heads: int
    latent: int
    kv_format: str
    pv_format: str
    batch: int
    context: int
    query_len: int
    us: float
    gb_per_s: float
    tflops: float
    roofline_pct: float
    cosine_difference: float
    tiling: dict[str, Any]
    peers: dict[str, dict[str, float]] = field(default_factory=dict)
    peers_absent: dict[str, str] = field(default_factory=dict)


def roofline_us(case: KernelCase, ceilings: Ceilings) -> float:
    """Least microseconds of the case on this machine."""
    fp8 = case.kv_format is KVFormat.FP8
    latent_rate = ceilings.fp8_tflops if fp8 else ceilings.bf16_tflops
    compute = case.latent_flops / latent_rate + case.rope_flops / ceilings.bf16_tflops
    return max(case.bytes_read / ceilings.copy_gb_per_s / 1e3, compute / 1e6)


def sweep(case: KernelCase) -> list[DecodeTiling]:
    """The default tiling and others worth trying on the case.

    The Hopper kernel chooses warps and stages itself, so these vary for the Triton kernel only.
    """
    base = case.tiling
    if case.batch < 8:
        return [replace(base, min_tiles=least) for least in (2, 3, 4, 6, 10)]
    wide = case.layout.latent_width > 256
    shapes = [(64, 8, 1)] if wide else [(64, 4, 1), (64, 4, 2)]
    found = [base]
    if case.heads > 64 and not wide:
        shapes.append((128, 8, 1))
        found.append(replace(base, block_rows=64))
    if case.fp8_weights:  # of the Hopper kernel alone
        return found
    for block_rows, num_warps, per_sm in shapes:
        for stages in (2, 3, 4):
            tiling = replace(base, hopper=False, block_rows=block_rows, num_warps=num_warps)
            found.append(replace(tiling, num_stages=stages, programs_per_sm=per_sm))
    return list(dict.fromkeys(found))


def run_case(case: KernelCase, tilings: list[DecodeTiling], ceilings: Ceilings) -> list[Row]:
    """Check, then time, the case under each tiling; NaN microseconds where a check fails."""
    bench = DecodeBench(case, quantized=case.kv_format is KVFormat.FP8)
    expected_out, expected_lse = bench.exact()
    rows = []
    for tiling in tilings:
        us = difference = math.nan
        try:
            workspace = bench.workspace(tiling)
            bench.out.fill_(math.nan)
            bench.launch(workspace, 0)
            difference = cosine_difference(bench.out, expected_out)
            close = torch.allclose(bench.lse.double(), expected_lse, atol=0, rtol=1e-3)
            limit = FP8_PV_COSINE_LIMIT if case.fp8_weights else COSINE_LIMIT
            if difference <= limit and close:
                us = graph_us(lambda i, w=workspace: bench.launch(w, i), bench.sets)  # type: ignore[misc]
        except triton.runtime.errors.OutOfResources as error:
            print(f"    {tiling}: {error}", file=sys.stderr)
        flops = case.latent_flops + case.rope_flops
        rows.append(
            Row(
                "latent_decode",
                case.model,
                case.tp,
                case.groups,
                case.heads,
                case.layout.latent_width,
                case.kv_format.value,
                case.pv_format,
                case.batch,
                case.context,
                case.query_len,
                us,
                case.bytes_read / us / 1e3,
                flops / us / 1e6,
                100 * roofline_us(case, ceilings) / us,
                difference,
                asdict(tiling),
            )
        )
    return rows


def header(ceilings: Ceilings, commit: str | None) -> dict[str, Any]:
    """What the numbers belong to."""
    command = command_line("kernels")
    return {
        **describe_machine(command, commit),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        **asdict(ceilings),
    }


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN: a figure that was not measured is null."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def show(row: Row) -> None:
    """One line for people."""
    tiling = row.tiling
    peers = " ".join(f"{n} {p['us']:.1f} ({p['ratio']:.2f}x)" for n, p in row.peers.items())
    print(
        f"{row.model} TP{row.tp} g{row.groups} {row.kv_format:4s} PV {row.pv_format:4s} "
        f"h={row.heads:<3d} "
        f"L={row.latent} {row.batch:>3d}x{row.context:<6d} {row.us:8.1f} us "
        f"{row.gb_per_s:6.0f} GB/s {row.tflops:5.0f} TF {row.roofline_pct:5.1f} %  "
        f"cos {row.cosine_difference:.1e}  rows{tiling['block_rows']} w{tiling['num_warps']} "
        f"s{tiling['num_stages']} x{tiling['programs_per_sm']} m{tiling['min_tiles']}  {peers}",
        flush=True,
    )


def measure(
    chosen: list[KernelCase], sweeping: bool, with_peers: bool, ceilings: Ceilings
) -> Iterator[list[Row]]:
    """Rows of one case after the other; shapes and peers that come again are timed once."""
    peers: dict[tuple[int, int, int, int], Any] = {}
    measured: dict[tuple[object, ...], list[Row]] = {}
    for case in chosen:
        if case.shape not in measured:
            tilings = sweep(case) if sweeping else [case.tiling]
            measured[case.shape] = run_case(case, tilings, ceilings)
            gc.collect()
            torch.cuda.empty_cache()
        key = (case.peer_heads, case.batch, case.context, case.query_len)
        if with_peers and key not in peers:
            peers[key] = peer_us(*key)
            gc.collect()
            torch.cuda.empty_cache()
        times, absent = peers.get(key, ({}, {}))
        yield [
            replace(
                row,
                model=case.model,
                tp=case.tp,
                groups=case.groups,
                peers={name: {"us": us, "ratio": us / row.us} for name, us in times.items()},
                peers_absent=absent,
            )
            for row in measured[case.shape]
        ]


def main() -> int:
    """Run every case; 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--sweep", action="store_true", help="also time other tilings")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--batch", action="append", help="BATCHxCONTEXT instead of the default shapes"
    )
    parser.add_argument("--commit", help="for the header, where git cannot tell")
    arguments = parser.parse_args()
    batches = [parse_batch(text) for text in arguments.batch or []] or BATCHES
    chosen = cases(batches)
    compile_ahead(chosen, arguments.peers)
    ceilings = measure_ceilings()
    report: dict[str, Any] = {"header": header(ceilings, arguments.commit), "rows": []}
    print(ceilings, flush=True)
    for rows in measure(chosen, arguments.sweep, arguments.peers, ceilings):
        for row in rows:
            show(row)
        report["rows"] += [asdict(row) for row in rows]
        arguments.json.write_text(json.dumps(_without_nan(report), indent=1) + "\n")
    absent = {item for row in report["rows"] for item in row["peers_absent"].items()}
    for name, reason in sorted(absent):
        print(f"no {name}: {reason}")
    failed = [row for row in report["rows"] if math.isnan(row["us"])]
    for row in failed:
        print(f"not timed: {row}", file=sys.stderr)
    return 1 if failed and not arguments.sweep else 0


if __name__ == "__main__":
    sys.exit(main())
