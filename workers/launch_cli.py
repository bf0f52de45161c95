"""``tpla launch``: a whole deployment on this host."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tpla.core.checkpoint import REFERENCE_MODEL
from tpla.core.config import Mode
from tpla.core.errors import CheckpointError, ConfigError, TplaError
from tpla.workers.deployment import (
    DeploymentOptions,
    DeploymentPlan,
    plan_deployment,
    served_name,
    url_from_here,
)
from tpla.workers.devices import gpu_count, resolve_device
from tpla.workers.supervisor import Supervisor, printable, run_to_its_end, stop_signals

_console = Console(stderr=True, highlight=False)


def launch() -> None:
    """Parse the command line and run a deployment until Ctrl-C or SIGTERM."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        epilog="Every other flag is passed to each worker, as are those of --prefill-flags and "
        "--decode-flags to each of one role: tpla worker's own, or SGLang's; --router-flags are "
        "tpla router's.",
    )(_launch)
    try:
        app()
    except TplaError as error:
        _console.print(f"tpla launch: {error}", style="red", markup=False)
        sys.exit(2)


def _launch(
    context: typer.Context,
    prefill: Annotated[int, typer.Option(help="prefill ranks (GPUs, where there are any)")] = 1,
    decode: Annotated[int, typer.Option(help="decode ranks")] = 2,
    model: Annotated[Path, typer.Option(help="checkpoint; default: the embedded model")] = (
        REFERENCE_MODEL
    ),
    mode: Annotated[Mode, typer.Option(help="what decode does with the latent")] = Mode.TPLA,
    groups: Annotated[int, typer.Option(help="latent groups; each decode TP is a multiple")] = 2,
    core_dims: Annotated[
        str | None,
        typer.Option(
            help="shared core of a conversion made now: one number, or one for each layer "
            "[32; the embedded model's was chosen layer by layer]"
        ),
    ] = None,
    kv_format: Annotated[str | None, typer.Option(help="fp8, bf16 or fp32 [fp8]")] = None,
    transfer: Annotated[
        str, typer.Option(help="zmq, nccl (GPUs alone) or auto: nccl on GPUs, zmq on the CPU")
    ] = "auto",
    transfer_timeout: Annotated[float, typer.Option(help="seconds, any wait of a migration")] = 30,
    prefill_tp: Annotated[int, typer.Option(help="ranks of one prefill worker")] = 1,
    decode_tp: Annotated[int, typer.Option(help="ranks of one decode worker")] = 2,
    prefill_flags: Annotated[
        str, typer.Option(help="flags for prefill workers alone, quoted as one")
    ] = "",
    decode_flags: Annotated[
        str, typer.Option(help="flags for decode workers alone, quoted as one")
    ] = "",
    router_flags: Annotated[str, typer.Option(help="flags for the router, quoted as one")] = "",
    device: Annotated[
        str, typer.Option(help="auto, cuda or cpu; auto takes GPUs where there are any")
    ] = "auto",
    host: Annotated[str, typer.Option(help="address of the endpoint")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port of the endpoint")] = 8000,
    calibration: Annotated[
        Path | None, typer.Option(help="text to convert an unconverted model with")
    ] = None,
    state: Annotated[Path, typer.Option(help="converted models and logs")] = Path(".tpla"),
    start_timeout: Annotated[float, typer.Option(help="seconds until all must serve")] = 600,
    convert_only: Annotated[
        bool, typer.Option("--convert-only", help="make the checkpoint to serve, print it, and end")
    ] = False,
) -> None:
    """Start prefill workers, decode workers and the router; stop them all on Ctrl-C."""
    options = DeploymentOptions(
        prefill=prefill,
        decode=decode,
        model=model,
        mode=mode,
        groups=groups if mode is Mode.TPLA else 1,
        core_dims=core_dims,
        kv_format=kv_format,
        transfer=transfer,
        transfer_timeout=transfer_timeout,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        host=host,
        port=port,
        state=state,
        calibration=calibration,
        gpus=gpu_count() if resolve_device(device) == "cuda" else 0,
        sglang_arguments=tuple(context.args),
        prefill_arguments=_words("--prefill-flags", prefill_flags),
        decode_arguments=_words("--decode-flags", decode_flags),
        router_arguments=_words("--router-flags", router_flags),
    )
    plan = plan_deployment(options)
    _convert(options, plan)
    if convert_only:
        print(plan.model)
    else:
        _run(options, plan, start_timeout)


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}; quote it as for a shell") from error


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--state: {folder} cannot be made ({error.strerror}); give a folder that can be "
            "written to, for logs and converted models"
        ) from error
    return folder


def _convert(options: DeploymentOptions, plan: DeploymentPlan) -> None:
    """Make the checkpoint to serve, where it does not exist yet.

    Raises:
        CheckpointError: it could not be made; the command has said why.
        ConfigError: --state cannot be made.
    """
    _make(options.state)
    for command in plan.conversion:
        if run_to_its_end(command):
            raise CheckpointError(f"nothing to serve: {shlex.join(command[1:])} failed, as it says")


def _run(options: DeploymentOptions, plan: DeploymentPlan, start_timeout: float) -> None:
    supervisor = Supervisor(_make(options.state / "logs"), _console)
    for stop_signal in stop_signals():
        signal.signal(stop_signal, lambda *_: supervisor.request_stop())
    try:
        _start(options, plan, supervisor, start_timeout)
        supervisor.watch()
    finally:
        _console.print("stopping ...")
        supervisor.stop()
        _console.print("stopped")


def _start(
    options: DeploymentOptions, plan: DeploymentPlan, supervisor: Supervisor, timeout: float
) -> None:
    begun = time.monotonic()
    _console.print(
        f"[bold]serving {plan.model}[/] with these commands (logs: {options.state}/logs)"
    )
    for process in (*plan.workers, plan.router):
        _console.print(f"  {printable(process)}", soft_wrap=True, markup=False)
        supervisor.start(process)
    with _console.status("starting", refresh_per_second=2) as status:
        ready = supervisor.wait_ready(timeout, lambda names: status.update(f"waiting for {names}"))
    if not ready:
        return
    address = f"{url_from_here(options.host, options.port)}/v1"
    _console.print(f"[bold green]ready[/] after {time.monotonic() - begun:.0f} s at {address}; try")
    _console.print(_sample_curl(address, served_name(options.model)), soft_wrap=True, markup=False)


def _sample_curl(address: str, model: str) -> str:
    return (
        f"  curl {address}/chat/completions -H 'Content-Type: application/json' -d "
        f'\'{{"model": "{model}", "messages": [{{"role": "user", "content": '
        '"My locker code is 4821. What is my locker code?"}]}\''
    )
