"""Whole workers, ours and SGLang's, in one run on one machine: decode throughput, prefill TTFT.

    python -m tpla.benchmarks.serving --json OUT --model deepseek-v3-attention --tp 2
    python -m tpla.benchmarks.serving --json OUT --model deepseek-v3-attention --tp 2 \\
        --role prefill --systems sglang-bf16,tpla-fp8 --contexts 1024,4096,32768

Each system is started in turn as one worker with dummy weights of the true shapes; its other half
is SGLang's fake transfer. A decode worker is given batches of requests whose prompts count as
prefilled already: the KV that they attend to is whatever the pool holds, which costs what real KV
does. A prefill worker is given prompts one after another.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import httpx
import typer
from rich.console import Console

from tpla.benchmarks.command import command_line, parse_batch
from tpla.benchmarks.half_load import (
    DecodeTimes,
    LoadError,
    NeverTogether,
    measure_decode,
    measure_prefill,
    profile_decode,
    warm_up,
)
from tpla.benchmarks.machine import describe_machine
from tpla.benchmarks.serving_systems import BASELINE, SYSTEMS, ServingSystem, worker
from tpla.benchmarks.systems_report import SystemsReport
from tpla.benchmarks.timing_model import write_timing_model
from tpla.core.config import Role
from tpla.workers.ports import free_ports
from tpla.workers.supervisor import StartFailed, Supervisor

_console = Console(stderr=True, highlight=False)
_LARGEST = 0
_MOST_NEW_TOKENS = 1024


@dataclass
class Row:
    """One batch, or one length of prompts, on one system; ``batch_asked`` 0 means the largest batch
    that its memory holds. The ratio is of throughputs, or of TTFTs the other way round: above one,
    the system is faster than SGLang's BF16 MLA."""

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
    tokens_per_s: float | None = None
    itl_ms: float | None = None
    ttft_ms: float | None = None
    ratio_to_sglang_bf16: float | None = None


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    role: Role
    model: str
    layers: int | None
    tp: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    repetitions: int
    max_requests: int
    start_timeout: float
    logs: Path
    server_flags: tuple[str, ...]
    profile: tuple[int, int] | None


class Report(SystemsReport):
    """Rows beside SGLang's BF16 MLA; each is shown as it comes."""

    def add(self, row: Row) -> None:
        """As the base's, and shown."""
        super().add(row)
        show(row)

    def save(self) -> None:
        """As the base's, with every ratio that can be told by now."""
        add_ratios(self.rows)
        super().save()


def measure_system(system: ServingSystem, plan: Plan, directory: Path, report: Report) -> None:
    """Start the system, measure every batch that it holds, stop it."""
    model = write_timing_model(plan.model, system.groups, directory, plan.layers)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    port, ranks_port = free_ports(2)
    limits = ("--max-running-requests", str(plan.max_requests), "--nccl-port", str(ranks_port))
    graphs = ("--cuda-graph-max-bs-decode", str(plan.max_requests))
    flags = (*limits, *graphs, *plan.server_flags)
    process = worker(system, plan.role, model, plan.tp, port, flags)
    supervisor = Supervisor(plan.logs, _console)
    try:
        supervisor.start(process)
        supervisor.wait_ready(plan.start_timeout, lambda name: None)
        url = f"http://127.0.0.1:{port}"
        capacity = int(httpx.get(f"{url}/server_info", timeout=30).json()["max_total_num_tokens"])
        for context in plan.contexts:
            for asked in plan.batches:
                row = _row(system, plan, layers, context, asked, capacity)
                if _fill(row, system, plan, url):
                    report.add(row)
    finally:
        supervisor.stop()


def _row(
    system: ServingSystem, plan: Plan, layers: int, context: int, asked: int, capacity: int
) -> Row:
    """What is asked of the system; nothing is measured yet."""
    room = capacity * system.pools // (context + _MOST_NEW_TOKENS)
    batch = min(room, plan.max_requests) if asked == _LARGEST else asked
    return Row(
        plan.role.value, plan.model, layers, system.name, plan.tp, system.dp, system.dcp,
        system.groups, system.kv_format, context, asked, batch, capacity,
    )  # fmt: skip


def _fill(row: Row, system: ServingSystem, plan: Plan, url: str) -> bool:
    """Measure a row; False where the system's memory does not hold it."""
    if row.batch * row.context > row.max_total_tokens * system.pools:
        _console.print(f"{row.system}: {row.batch} x {row.context} tokens do not fit")
        return False
    if plan.role is Role.PREFILL:
        row.ttft_ms = measure_prefill(url, row.context, plan.repetitions)
        return True
    warm_up(url, min(row.batch, 2))
    times = _times(url, row.batch, row.context, plan.new_tokens)
    row.tokens_per_s, row.itl_ms = times.tokens_per_s, times.itl_ms
    if plan.profile == (row.batch_asked, row.context):
        name = f"{row.system}-{row.batch}x{row.context}"
        profile_decode(url, row.batch, row.context, plan.new_tokens, plan.logs, name)
    return True


def _times(url: str, batch: int, context: int, new_tokens: int) -> DecodeTimes:
    """Long prompts take a while to arrive, and the batch is timed while all of it runs."""
    while True:
        try:
            return measure_decode(url, batch, context, new_tokens)
        except NeverTogether:
            if new_tokens >= _MOST_NEW_TOKENS:
                raise
            new_tokens *= 2


def add_ratios(rows: list[Row]) -> None:
    """Speed relative to SGLang's BF16 MLA at the same context and batch asked for."""
    base = {(r.context, r.batch_asked): r for r in rows if r.system == BASELINE}
    for row in rows:
        reference = base.get((row.context, row.batch_asked))
        if reference is None:
            continue
        if row.tokens_per_s is not None and reference.tokens_per_s is not None:
            row.ratio_to_sglang_bf16 = row.tokens_per_s / reference.tokens_per_s
        if row.ttft_ms is not None and reference.ttft_ms is not None:
            row.ratio_to_sglang_bf16 = reference.ttft_ms / row.ttft_ms


def show(row: Row) -> None:
    """One line for people."""
    figures = {
        "ms a token": row.itl_ms,
        "tokens/s": row.tokens_per_s,
        "ms to the first token": row.ttft_ms,
        "times SGLang bf16": row.ratio_to_sglang_bf16,
    }
    shown = [f"{value:9.2f} {name}" for name, value in figures.items() if value is not None]
    batch = f"{row.batch:4d}{' (largest)' if row.batch_asked == _LARGEST else ''}"
    print(f"{row.system:12s} {batch} x {row.context:<6d} {' '.join(shown)}", flush=True)


def main(
    out: Annotated[Path, typer.Option("--json", help="file to write")],
    model: Annotated[str, typer.Option(help="a config of benchmarks/configs")],
    role: Annotated[Role, typer.Option(help="which half is measured")] = Role.DECODE,
    tp: Annotated[int, typer.Option(help="ranks of each worker")] = 2,
    layers: Annotated[int | None, typer.Option(help="fewer layers than the model has")] = None,
    systems: Annotated[str, typer.Option(help="comma-separated")] = (
        "sglang-bf16,sglang-fp8,tpla-fp8"
    ),
    contexts: Annotated[str, typer.Option(help="comma-separated")] = "4096,16384,32768,65536",
    batches: Annotated[str, typer.Option(help="comma-separated; 0: the largest")] = "1,8,32,0",
    new_tokens: Annotated[int, typer.Option(help="tokens a request asks for")] = 256,
    repetitions: Annotated[int, typer.Option(help="prompts of each length, prefill")] = 5,
    max_requests: Annotated[int, typer.Option(help="largest batch of any system")] = 128,
    start_timeout: Annotated[float, typer.Option(help="seconds until a worker serves")] = 300,
    logs: Annotated[Path, typer.Option(help="where workers log")] = Path(".tpla/logs"),
    server_flags: Annotated[str, typer.Option(help="SGLang flags for every system")] = "",
    profile: Annotated[str | None, typer.Option(help="BATCHxCONTEXT to trace kernels of")] = None,
    commit: Annotated[str | None, typer.Option(help="where git cannot tell")] = None,
) -> None:
    """Measure, print a line a batch, and write a JSON report."""
    plan = Plan(
        role, model, layers, tp, tuple(map(int, contexts.split(","))),
        (1,) if role is Role.PREFILL else tuple(map(int, batches.split(","))), new_tokens,
        repetitions, max_requests, start_timeout,
        logs, tuple(server_flags.split()), parse_batch(profile) if profile else None,
    )  # fmt: skip
    command = command_line("serving")
    report = Report(out, describe_machine(command, commit))
    chosen = {system.name: system for system in SYSTEMS}

    def measure(name: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            measure_system(chosen[name], plan, Path(directory), report)

    failures = (StartFailed, LoadError, httpx.HTTPError, aiohttp.ClientError)
    report.measure_all(systems.split(","), measure, failures)
    for row in report.rows:
        show(row)
    report.exit_if_failed()


if __name__ == "__main__":
    typer.run(main)
