"""Whole deployments under rising load, ours and SGLang's, on the same GPUs in one run.

    python -m tpla.benchmarks.whole_system --json OUT --plot PNG --model kimi-k2-attention \\
        --prefill 2 --decode 2 --rates 1,2,3 --input-tokens 8192 --output-tokens 1024

Ours is what ``tpla launch`` starts: router, prefill workers, decode workers and KV migration.
SGLang's is one server whose tensor parallelism spans as many GPUs, which prefills and decodes.
Weights are dummies of the true shapes; each rate is sent by ``load_sweep`` as chat completions.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tpla.benchmarks import load_sweep
from tpla.benchmarks.command import command_line
from tpla.benchmarks.load_sweep import Bounds, Load
from tpla.benchmarks.machine import describe_machine
from tpla.benchmarks.plot_whole_system import draw
from tpla.benchmarks.systems_report import SystemsReport
from tpla.benchmarks.timing_model import write_timing_model, write_timing_tokenizer
from tpla.core.errors import ConfigError
from tpla.workers.deployment import ProcessPlan
from tpla.workers.ports import free_ports
from tpla.workers.supervisor import StartFailed, Supervisor

_console = Console(stderr=True, highlight=False)
_TPLA = "tpla-fp8"
_SGLANG_FLAGS = {
    "sglang-bf16": (),
    "sglang-fp8": ("--kv-cache-dtype", "fp8_e4m3"),
}
_SHARED = ("--load-format", "dummy", "--disable-radix-cache", "--grammar-backend", "none")
_FEWEST_PROMPTS = 8


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        model: a config of ``benchmarks/configs``.
        layers: fewer layers than the model has, or None.
        prefill, prefill_tp: ranks of our prefill workers, and of each.
        decode, decode_tp: the same of our decode workers.
        groups: latent groups.
        rates: requests a second, one after another.
        seconds: for which each rate lasts.
        input_tokens, output_tokens: of each request.
        bounds: what a good request keeps.
        start_timeout: seconds until a system serves.
        rate_timeout: seconds until a rate is given up.
        logs: where processes log.
        server_flags, prefill_flags, decode_flags, sglang_flags: flags of every server, of our two
            kinds of worker, and of SGLang's server.
    """

    model: str
    layers: int | None
    prefill: int
    prefill_tp: int
    decode: int
    decode_tp: int
    groups: int
    rates: tuple[float, ...]
    seconds: float
    input_tokens: int
    output_tokens: int
    bounds: Bounds
    start_timeout: float
    rate_timeout: float
    logs: Path
    server_flags: str
    prefill_flags: str
    decode_flags: str
    sglang_flags: str

    @property
    def gpus(self) -> int:
        return self.prefill + self.decode


def system_process(name: str, plan: Plan, model: Path, port: int) -> ProcessPlan:
    """What starts a system, as one process with children.

    Raises:
        ConfigError: no such system.
    """
    shared = ("--port", str(port), *_SHARED, *shlex.split(plan.server_flags))
    if name == _TPLA:
        command = [
            *(sys.executable, "-m", "tpla.core.cli", "launch", "--model", str(model)),
            *("--prefill", str(plan.prefill), "--prefill-tp", str(plan.prefill_tp)),
            *("--decode", str(plan.decode), "--decode-tp", str(plan.decode_tp)),
            *("--groups", str(plan.groups), "--state", str(plan.logs / name)),
            *("--start-timeout", str(plan.start_timeout)),
            *("--prefill-flags", plan.prefill_flags, "--decode-flags", plan.decode_flags),
        ]
        return ProcessPlan(name, (*command, *shared), f"http://127.0.0.1:{port}/ready")
    if name not in _SGLANG_FLAGS:
        raise ConfigError(f"no system {name}; choose from {_TPLA}, {', '.join(_SGLANG_FLAGS)}")
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--served-model-name", model.name, "--tp-size", str(plan.gpus)),
        *(*_SGLANG_FLAGS[name], *shlex.split(plan.sglang_flags)),
    ]
    return ProcessPlan(name, (*command, *shared), f"http://127.0.0.1:{port}/health")


@dataclass(frozen=True)
class Row(load_sweep.Row):
    """One rate on one system; the rest as of ``load_sweep``."""

    model: str
    system: str
    gpus: int
    goodput_per_gpu: float


def measure_system(name: str, plan: Plan, model: Path, report: SystemsReport) -> None:
    """Start the system, send every rate, stop it."""
    (port,) = free_ports(1)
    supervisor = Supervisor(plan.logs, _console)
    try:
        supervisor.start(system_process(name, plan, model, port))
        supervisor.wait_ready(plan.start_timeout, lambda waiting: None)
        _console.print(f"{name} serves")
        for rate in plan.rates:
            report.add(_measure_rate(name, plan, model, port, rate))
    finally:
        supervisor.stop()


def _measure_rate(name: str, plan: Plan, model: Path, port: int, rate: float) -> Row:
    prompts = max(_FEWEST_PROMPTS, round(rate * plan.seconds))
    load = Load(
        f"http://127.0.0.1:{port}", model, prompts, plan.input_tokens, plan.output_tokens,
        plan.rate_timeout, seed=1,
    )  # fmt: skip
    row = load_sweep.judge(load_sweep.send(load, model.name, rate), load, rate, plan.bounds)
    load_sweep.show([row])
    return Row(
        **{**asdict(row), "benchmark": "whole_system"},
        model=plan.model,
        system=name,
        gpus=plan.gpus,
        goodput_per_gpu=row.goodput_requests_per_s / plan.gpus,
    )


def main(
    out: Annotated[Path, typer.Option("--json", help="file to write")],
    model: Annotated[str, typer.Option(help="a config of benchmarks/configs")],
    systems: Annotated[str, typer.Option(help="comma-separated")] = "tpla-fp8,sglang-bf16",
    layers: Annotated[int | None, typer.Option(help="fewer layers than the model has")] = None,
    prefill: Annotated[int, typer.Option(help="our prefill ranks")] = 2,
    prefill_tp: Annotated[int, typer.Option(help="ranks of a prefill worker")] = 1,
    decode: Annotated[int, typer.Option(help="our decode ranks")] = 2,
    decode_tp: Annotated[int, typer.Option(help="ranks of a decode worker")] = 2,
    groups: Annotated[int, typer.Option(help="latent groups")] = 2,
    rates: Annotated[str, typer.Option(help="requests a second, comma-separated")] = "1,2,3",
    seconds: Annotated[float, typer.Option(help="for which each rate lasts")] = 30,
    input_tokens: Annotated[int, typer.Option(help="of a prompt")] = 8192,
    output_tokens: Annotated[int, typer.Option(help="of an answer")] = 1024,
    ttft_ms: Annotated[float, typer.Option(help="bound of a good request")] = 2000,
    tpot_ms: Annotated[float, typer.Option(help="bound of a good request")] = 20,
    start_timeout: Annotated[float, typer.Option(help="seconds until a system serves")] = 600,
    rate_timeout: Annotated[float, typer.Option(help="seconds until a rate is given up")] = 900,
    logs: Annotated[Path, typer.Option(help="where processes log")] = Path(".tpla/logs"),
    server_flags: Annotated[str, typer.Option(help="flags of every server")] = "",
    prefill_flags: Annotated[str, typer.Option(help="flags of our prefill workers")] = "",
    decode_flags: Annotated[str, typer.Option(help="flags of our decode workers")] = "",
    sglang_flags: Annotated[str, typer.Option(help="flags of SGLang's server")] = (
        "--decode-attention-backend flashmla --page-size 64 --dtype bfloat16"
    ),
    plot: Annotated[Path | None, typer.Option(help="picture to write")] = None,
    commit: Annotated[str | None, typer.Option(help="where git cannot tell")] = None,
) -> None:
    """Measure system by system; print a line a rate, write a JSON report and a picture."""
    bounds = Bounds(ttft_ms, tpot_ms)
    plan = Plan(
        model, layers, prefill, prefill_tp, decode, decode_tp, groups,
        tuple(map(float, rates.split(","))), seconds, input_tokens, output_tokens, bounds,
        start_timeout, rate_timeout, logs, server_flags, prefill_flags, decode_flags, sglang_flags,
    )  # fmt: skip
    header = {**describe_machine(command_line("whole_system"), commit), **asdict(bounds)}
    report = SystemsReport(out, header)
    with tempfile.TemporaryDirectory() as directory:
        folder = write_timing_model(plan.model, plan.groups, Path(directory), plan.layers)
        write_timing_tokenizer(folder)
        report.measure_all(
            systems.split(","),
            lambda name: measure_system(name, plan, folder, report),
            (StartFailed, load_sweep.GeneratorFailed),
        )
    if plot is not None:
        draw(report.plain_rows(), bounds, plot)
    report.exit_if_failed()


if __name__ == "__main__":
    typer.run(main)
