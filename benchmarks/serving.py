"""Decode throughput of whole workers, ours and SGLang's, in one run on one machine.

    python -m tpla.benchmarks.serving --json OUT --model deepseek-v3-attention --tp 2

Each system is started in turn as a decode worker with dummy weights of the true shapes, and given
batches of requests whose prompts count as prefilled already (SGLang's fake transfer). The KV that
they attend to is whatever the pool holds, which costs what real KV does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import httpx
import typer
from rich.console import Console

from tpla.benchmarks.decode_load import DecodeTimes, LoadError, NeverTogether, measure_decode
from tpla.benchmarks.machine import describe_machine
from tpla.benchmarks.serving_systems import BASELINE, SYSTEMS, ServingSystem, decode_worker
from tpla.benchmarks.timing_model import write_timing_model
from tpla.workers.ports import free_ports
from tpla.workers.supervisor import StartFailed, Supervisor

_console = Console(stderr=True, highlight=False)
_LARGEST = 0
_MOST_NEW_TOKENS = 1024


@dataclass
class Row:
    """One batch on one system; ``batch_asked`` 0 means the largest that its memory holds."""

    benchmark: str
    model: str
    layers: int
    system: str
    tp: int
    dp: int
    dcp: int
    groups: int
    kv_format: str
    context: int
    batch_asked: int
    batch: int
    max_total_tokens: int
    tokens_per_s: float
    itl_ms: float
    ratio_to_sglang_bf16: float | None = None


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    model: str
    layers: int | None
    tp: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    max_requests: int
    start_timeout: float
    logs: Path
    server_flags: tuple[str, ...]


def measure_system(system: ServingSystem, plan: Plan, directory: Path) -> list[Row]:
    """Start the system, measure every batch that it holds, stop it."""
    model = write_timing_model(plan.model, system.groups, directory, plan.layers)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    port, ranks_port = free_ports(2)
    limits = ("--max-running-requests", str(plan.max_requests), "--nccl-port", str(ranks_port))
    graphs = ("--cuda-graph-max-bs", str(plan.max_requests))
    process = decode_worker(system, model, plan.tp, port, (*limits, *graphs, *plan.server_flags))
    supervisor = Supervisor(plan.logs, _console)
    rows: list[Row] = []
    try:
        supervisor.start(process)
        supervisor.wait_ready(plan.start_timeout, lambda name: None)
        url = f"http://127.0.0.1:{port}"
        capacity = int(httpx.get(f"{url}/server_info", timeout=30).json()["max_total_num_tokens"])
        for context in plan.contexts:
            for asked in plan.batches:
                row = _measure(system, plan, url, context, asked, capacity)
                if row is not None:
                    row.layers = layers
                    rows.append(row)
                    show(row)
    finally:
        supervisor.stop()
    return rows


def _measure(
    system: ServingSystem, plan: Plan, url: str, context: int, asked: int, capacity: int
) -> Row | None:
    room = capacity * system.dp // (context + _MOST_NEW_TOKENS)
    batch = min(room, plan.max_requests) if asked == _LARGEST else asked
    if batch > room:
        _console.print(f"{system.name}: {batch} x {context} does not fit into {capacity} tokens")
        return None
    measure_decode(url, min(batch, 2), 64, 8)
    times = _times(url, batch, context, plan.new_tokens)
    return Row(
        "decode", plan.model, 0, system.name, plan.tp, system.dp, system.dcp, system.groups,
        system.kv_format, context, asked, batch, capacity, times.tokens_per_s, times.itl_ms,
    )  # fmt: skip


def _times(url: str, batch: int, context: int, new_tokens: int) -> DecodeTimes:
    """Long prompts take a while to arrive: the first request must still run when the last does."""
    while True:
        try:
            return measure_decode(url, batch, context, new_tokens)
        except NeverTogether:
            if new_tokens >= _MOST_NEW_TOKENS:
                raise
            new_tokens *= 2


def add_ratios(rows: list[Row]) -> None:
    """Throughput relative to SGLang's BF16 MLA at the same context and batch asked for."""
    base = {(r.context, r.batch_asked): r.tokens_per_s for r in rows if r.system == BASELINE}
    for row in rows:
        reference = base.get((row.context, row.batch_asked))
        row.ratio_to_sglang_bf16 = row.tokens_per_s / reference if reference else None


def show(row: Row) -> None:
    """One line for people."""
    ratio = "" if row.ratio_to_sglang_bf16 is None else f"  {row.ratio_to_sglang_bf16:.2f}x"
    largest = " (largest)" if row.batch_asked == _LARGEST else ""
    print(
        f"{row.system:12s} {row.batch:4d} x {row.context:<6d} {row.itl_ms:7.2f} ms "
        f"{row.tokens_per_s:8.0f} tokens/s{ratio}{largest}",
        flush=True,
    )


def main(
    out: Annotated[Path, typer.Option("--json", help="file to write")],
    model: Annotated[str, typer.Option(help="a config of benchmarks/configs")],
    tp: Annotated[int, typer.Option(help="ranks of each worker")] = 2,
    layers: Annotated[int | None, typer.Option(help="fewer layers than the model has")] = None,
    systems: Annotated[str, typer.Option(help="comma-separated")] = (
        "sglang-bf16,sglang-fp8,tpla-fp8"
    ),
    contexts: Annotated[str, typer.Option(help="comma-separated")] = "4096,16384,32768,65536",
    batches: Annotated[str, typer.Option(help="comma-separated; 0: the largest")] = "1,8,32,0",
    new_tokens: Annotated[int, typer.Option(help="tokens a request asks for")] = 256,
    max_requests: Annotated[int, typer.Option(help="largest batch of any system")] = 128,
    start_timeout: Annotated[float, typer.Option(help="seconds until a worker serves")] = 300,
    logs: Annotated[Path, typer.Option(help="where workers log")] = Path(".tpla/logs"),
    server_flags: Annotated[str, typer.Option(help="SGLang flags for every system")] = "",
    commit: Annotated[str | None, typer.Option(help="where git cannot tell")] = None,
) -> None:
    """Measure, print a line a batch, and write a JSON report."""
    plan = Plan(
        model, layers, tp, tuple(map(int, contexts.split(","))),
        tuple(map(int, batches.split(","))), new_tokens, max_requests, start_timeout,
        logs, tuple(server_flags.split()),
    )  # fmt: skip
    command = " ".join(["python -m tpla.benchmarks.serving", *sys.argv[1:]])
    report: dict[str, Any] = {"header": describe_machine(command, commit), "rows": []}
    rows: list[Row] = []
    failed: dict[str, str] = {}
    chosen = {system.name: system for system in SYSTEMS}
    for name in systems.split(","):
        with tempfile.TemporaryDirectory() as directory:
            try:
                rows += measure_system(chosen[name], plan, Path(directory))
            except (StartFailed, LoadError, httpx.HTTPError, aiohttp.ClientError) as error:
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
        add_ratios(rows)
        report |= {"rows": [asdict(row) for row in rows], "failed": failed}
        out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        show(row)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
