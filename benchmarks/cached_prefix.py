"""Time to the first token where prefill has cached most of a prompt, over KV transfer.

    python -m tpla.benchmarks.cached_prefix --json OUT --model deepseek-v3-attention \\
        --transfer nccl --contexts 8192,32768,65536

One decode worker and two prefill workers with dummy weights of the true shapes, asked in turn. One
hands a cached prefix to the transfer before the forward of what follows it, as SGLang does
("early"); the other, on the same GPU, hands both over after that forward ("late").
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from tpla.benchmarks.command import command_line
from tpla.benchmarks.half_load import LoadError
from tpla.benchmarks.machine import describe_machine
from tpla.benchmarks.systems_report import SystemsReport
from tpla.benchmarks.timing_model import write_timing_model
from tpla.core.config import Role, Transfer
from tpla.core.config.environment import EARLY_SEND_VARIABLE
from tpla.workers.deployment import ProcessPlan
from tpla.workers.ports import free_ports
from tpla.workers.supervisor import StartFailed, Supervisor

_console = Console(stderr=True, highlight=False)
_EARLY_SEND = {"early": "1", "late": "0"}
_SHARED = ("--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none")
_WORDS = range(100, 10_000)
_REQUEST_SECONDS = 300


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        contexts: tokens of a prefix, whole pages of 64.
        suffix: tokens that follow it and are not cached.
        repetitions: prompts of each prefix and way, after one that has it cached.
        flags, prefill_flags, decode_flags: of all workers, and of each kind.
    """

    model: str
    layers: int | None
    transfer: Transfer
    contexts: tuple[int, ...]
    suffix: int
    repetitions: int
    start_timeout: float
    logs: Path
    flags: tuple[str, ...]
    prefill_flags: tuple[str, ...]
    decode_flags: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One prefix, sent one way; ``uncached_ms`` is of its first prompt, ``ratio_to_late`` above one
    where this way is faster."""

    benchmark: str
    model: str
    transfer: str
    system: str
    context: int
    suffix: int
    ttft_ms: float
    least_ms: float
    most_ms: float
    uncached_ms: float
    ratio_to_late: float | None


@dataclass(frozen=True)
class Endpoint:
    """Where a worker serves; prefill's ranks are found at ``bootstrap_port``."""

    name: str
    port: int
    bootstrap_port: int = 0


def worker(role: Role, endpoint: Endpoint, model: Path, plan: Plan) -> ProcessPlan:
    """The process of one worker."""
    command = [
        *(sys.executable, "-m", "tpla.core.cli", "worker", role.value, "--model", str(model)),
        *("--port", str(endpoint.port), "--transfer", plan.transfer.value, *_SHARED, *plan.flags),
    ]
    if role is Role.PREFILL:
        early_send = f"{EARLY_SEND_VARIABLE}={_EARLY_SEND[endpoint.name]}"
        bootstrap = ("--disaggregation-bootstrap-port", str(endpoint.bootstrap_port))
        command = ["env", early_send, *command, "--mode", "mla", *bootstrap, *plan.prefill_flags]
    else:
        command += ["--mode", "snapmla", *plan.decode_flags]
    return ProcessPlan(endpoint.name, tuple(command), f"http://127.0.0.1:{endpoint.port}/health")


async def time_to_first_token(
    prefill: Endpoint, decode: Endpoint, ids: Sequence[int], cached: int
) -> float:
    """Milliseconds until decode has one, of a prompt of which prefill has ``cached`` tokens.

    Raises:
        LoadError: a worker refused, or prefill had not cached so much.
    """
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.SystemRandom().randrange(1, 2**62),
    }
    async with httpx.AsyncClient(timeout=_REQUEST_SECONDS, trust_env=False) as client:
        begun = time.perf_counter()
        prefilling = asyncio.create_task(_answer(client, prefill, body))
        await _answer(client, decode, body)
        elapsed = time.perf_counter() - begun
        found = (await prefilling)["meta_info"]["cached_tokens"]
    if found < cached:
        raise LoadError(f"prefill had cached {found} of {cached} tokens; has its pool room?")
    return 1e3 * elapsed


async def _answer(
    client: httpx.AsyncClient, endpoint: Endpoint, body: dict[str, Any]
) -> dict[str, Any]:
    response = await client.post(f"http://127.0.0.1:{endpoint.port}/generate", json=body)
    if response.status_code != 200:
        raise LoadError(f"{endpoint.name}: {response.status_code}: {response.text[:500]}")
    answer: dict[str, Any] = response.json()
    return answer


def measure(
    prefills: Sequence[Endpoint], decode: Endpoint, context: int, plan: Plan
) -> dict[str, list[float]]:
    """Milliseconds by prefill worker, the uncached prompt's first; the workers take turns.

    Raises:
        LoadError: see :func:`time_to_first_token`.
    """
    prefix = random.choices(_WORDS, k=context)
    times: dict[str, list[float]] = {prefill.name: [] for prefill in prefills}
    for repetition in range(plan.repetitions + 1):
        for prefill in prefills:
            ids = [*prefix, *random.choices(_WORDS, k=plan.suffix)]
            cached = context if repetition else 0
            elapsed = asyncio.run(time_to_first_token(prefill, decode, ids, cached))
            times[prefill.name].append(elapsed)
    return times


def rows_of(times: dict[str, list[float]], context: int, plan: Plan) -> list[Row]:
    """Medians of the cached prompts, and how they compare."""
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    return [
        Row(
            "cached_prefix", plan.model, plan.transfer.value, name, context, plan.suffix,
            medians[name], min(each[1:]), max(each[1:]), each[0], medians["late"] / medians[name],
        )
        for name, each in times.items()
    ]  # fmt: skip


def measure_all(plan: Plan, model: Path, report: SystemsReport) -> None:
    """Start the workers, measure every prefix, stop them."""
    decode_port, *ports = free_ports(1 + 2 * len(_EARLY_SEND))
    decode = Endpoint("decode", decode_port)
    prefills = [
        Endpoint(name, port, bootstrap)
        for name, port, bootstrap in zip(_EARLY_SEND, ports[::2], ports[1::2], strict=True)
    ]
    supervisor = Supervisor(plan.logs, _console)
    try:
        supervisor.start(worker(Role.DECODE, decode, model, plan))
        for prefill in prefills:
            supervisor.start(worker(Role.PREFILL, prefill, model, plan))
        supervisor.wait_ready(plan.start_timeout, lambda waiting: None)
        measure(prefills, decode, plan.contexts[0], plan)  # kernels are compiled, groups joined
        for context in plan.contexts:
            for row in rows_of(measure(prefills, decode, context, plan), context, plan):
                report.add(row)
                show(row)
    finally:
        supervisor.stop()


def show(row: Row) -> None:
    """One line for people."""
    print(
        f"{row.transfer:4s} {row.system:5s} {row.context:6d} cached, {row.suffix} more: "
        f"{row.ttft_ms:8.2f} ms ({row.least_ms:.2f} to {row.most_ms:.2f}), "
        f"{row.ratio_to_late:.2f}x late; uncached {row.uncached_ms:.1f} ms",
        flush=True,
    )


def main(
    out: Annotated[Path, typer.Option("--json", help="file to write")],
    model: Annotated[str, typer.Option(help="a config of benchmarks/configs")],
    transfer: Annotated[Transfer, typer.Option(help="zmq or nccl")],
    layers: Annotated[int | None, typer.Option(help="fewer layers than the model has")] = None,
    contexts: Annotated[str, typer.Option(help="cached tokens")] = "8192,32768,65536",
    suffix: Annotated[int, typer.Option(help="tokens after them")] = 256,
    repetitions: Annotated[int, typer.Option(help="prompts of each prefix and way")] = 9,
    start_timeout: Annotated[float, typer.Option(help="seconds until the workers serve")] = 600,
    logs: Annotated[Path, typer.Option(help="where they log")] = Path(".tpla/logs"),
    server_flags: Annotated[str, typer.Option(help="flags of all workers")] = "",
    prefill_flags: Annotated[str, typer.Option(help="of both prefill workers")] = (
        "--mem-fraction-static 0.8 --max-total-tokens 200000"
    ),
    decode_flags: Annotated[str, typer.Option(help="of decode")] = "--base-gpu-id 1",
    commit: Annotated[str | None, typer.Option(help="where git cannot tell")] = None,
) -> None:
    """Measure prefix by prefix; print a line each and write a JSON report."""
    plan = Plan(
        model, layers, transfer, tuple(map(int, contexts.split(","))), suffix, repetitions,
        start_timeout, logs, tuple(server_flags.split()), tuple(prefill_flags.split()),
        tuple(decode_flags.split()),
    )  # fmt: skip
    report = SystemsReport(out, describe_machine(command_line("cached_prefix"), commit))
    with tempfile.TemporaryDirectory() as directory:
        folder = write_timing_model(plan.model, 1, Path(directory), plan.layers)
        report.measure_all(
            [transfer.value], lambda _: measure_all(plan, folder, report), (StartFailed, LoadError)
        )
    report.exit_if_failed()


if __name__ == "__main__":
    typer.run(main)
