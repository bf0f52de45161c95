"""``tpla worker prefill|decode``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tpla.core.config import Mode, Role
from tpla.core.errors import TplaError
from tpla.core.latent_layout import PVFormat
from tpla.workers.launch import WorkerOptions, configure, serve

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def worker() -> None:
    """Parse the command line and run a worker; bad values end with one line and status 2."""
    # Until SGLang has handlers of its own. The first process of a container has no default action,
    # and would hold its GPUs until the grace period is over.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(
        context_settings=_PASS_THROUGH, epilog="Every other flag is SGLang's own, written out."
    )(_worker)
    try:
        app()
    except TplaError as error:
        print(f"tpla worker: {error}", file=sys.stderr)
        sys.exit(2)


def _worker(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="which half of the pair this is")],
    model: Annotated[Path, typer.Option(help="checkpoint folder, the same for both halves")],
    mode: Annotated[Mode, typer.Option(help="what decode does with the latent")] = Mode.TPLA,
    groups: Annotated[
        int | None, typer.Option(help="latent groups; must be those of the conversion")
    ] = None,
    kv_format: Annotated[
        str | None, typer.Option(help="decode rows: fp8, bf16 or fp32 (default fp8; mla: bf16)")
    ] = None,
    pv_format: Annotated[
        str,
        typer.Option(
            help="decode of fp8 rows: P V in fp16, or in fp8 as SnapMLA's, faster and less exact"
        ),
    ] = PVFormat.FP16.value,
    scatter_output: Annotated[
        bool | None,
        typer.Option(
            help="decode in mode tpla: add up the latent groups before o_proj, which is then held "
            "once and not by every group (default: do)",
        ),
    ] = None,
    transfer: Annotated[
        str,
        typer.Option(
            help="data plane of KV migration, the same for both halves: zmq, nccl (GPUs of one "
            "host) or auto: zmq; tpla launch knows more"
        ),
    ] = "zmq",
    transfer_timeout: Annotated[
        float, typer.Option(help="seconds after which any wait of a migration ends")
    ] = 30.0,
    device: Annotated[
        str, typer.Option(help="auto, cuda or cpu; auto takes GPUs where there are any")
    ] = "auto",
    fault: Annotated[
        str | None,
        typer.Option(help="drill: flip|drop|delay|exit[:after=N][:count=N][:delay_seconds=S]"),
    ] = None,
) -> None:
    """Start SGLang as a prefill or decode worker."""
    options = WorkerOptions(
        role=role,
        model=model,
        mode=mode,
        groups=groups,
        kv_format=kv_format,
        pv_format=pv_format,
        scatter_output=scatter_output,
        transfer=transfer,
        transfer_timeout=transfer_timeout,
        device=device,
        fault=fault,
        sglang_arguments=tuple(context.args),
    )
    serve(configure(options), options.sglang_arguments)
