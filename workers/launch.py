"""Start one worker: SGLang with the plug-in, its mode and its transfer backend."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from tpla.core.checkpoint import Manifest, check_complete, fingerprint
from tpla.core.config import Mode, Role, Transfer, WorkerConfig, parse_worker_config
from tpla.core.config.environment import (
    NCCL_TRANSFER,
    SGLANG_ANY_WORKER,
    SGLANG_CPU_ENGINE,
    SGLANG_TIERED_PREFILL_CACHE,
    SGLANG_UNLESS_SET,
    WORKER_CONFIG_VARIABLE,
    put,
)
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import RankShard
from tpla.workers.devices import resolve_device
from tpla.workers.sglang_arguments import (
    DEFAULT_HOST,
    attention_ranks,
    caches_beyond_the_device,
    option,
    refuse_what_cannot_be_served,
    refuse_what_sglang_would_complete,
    sglang_command_line,
    whole_number,
)

AUTO_TRANSFER = "auto"

_DEFAULT_BOOTSTRAP_PORT = "8998"
"""SGLang's."""


@dataclass(frozen=True)
class WorkerOptions:
    """What ``tpla worker`` was asked for; ``sglang_arguments`` pass through unchanged."""

    role: Role
    model: Path
    mode: Mode
    groups: int | None
    kv_format: str | None
    pv_format: str
    scatter_output: bool | None
    transfer: str
    transfer_timeout: float
    device: str
    fault: str | None
    sglang_arguments: tuple[str, ...]


def configure(options: WorkerOptions) -> WorkerConfig:
    """Check the options against the checkpoint.

    Raises:
        ConfigError: values that do not fit together.
        CheckpointError: the checkpoint cannot be served in this mode.
    """
    model = options.model.resolve()
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{model} has no config.json; point --model at a checkpoint folder")
    check_complete(model)
    device = resolve_device(options.device)
    groups = options.groups or 1
    if options.mode is Mode.TPLA:
        groups = _check_manifest(model, options.groups)
    timeout = options.transfer_timeout
    config = parse_worker_config(
        {
            "role": options.role,
            "model": str(model),
            "mode": options.mode,
            "groups": groups,
            "kv_format": options.kv_format or ("bf16" if options.mode is Mode.MLA else "fp8"),
            "pv_format": options.pv_format,
            "scatter_output": _scatters(options),
            # A worker alone does not know where its peers run.
            "transfer": choose_transfer(options.transfer, gpus_of_one_host=False),
            "timeouts": {"handshake": timeout, "reserve": timeout, "push": timeout, "ack": timeout},
            "device": device,
            "instance_id": uuid.uuid4().hex[:12],
            "fault": _parse_fault(options.fault),
        }
    )
    refuse_what_cannot_be_served(config.role, options.sglang_arguments)
    ranks = attention_ranks(options.sglang_arguments, device)
    if config.role is Role.DECODE:
        RankShard(0, ranks, config.groups)
    return config


def _scatters(options: WorkerOptions) -> bool:
    """Unless asked otherwise, wherever there are latent groups to add up: it was faster at every
    batch and context that was measured."""
    if options.scatter_output is None:
        return options.mode is Mode.TPLA and options.role is Role.DECODE
    return options.scatter_output


def choose_transfer(asked: str, gpus_of_one_host: bool) -> str:
    """``auto`` is nccl where both roles run on GPUs of one host, and zmq everywhere else."""
    if asked != AUTO_TRANSFER:
        return asked
    return (Transfer.NCCL if gpus_of_one_host else Transfer.ZMQ).value


def environment_for(config: WorkerConfig, sglang_arguments: tuple[str, ...] = ()) -> dict[str, str]:
    """Variables that the worker and the processes it spawns need."""
    variables = {WORKER_CONFIG_VARIABLE: config.model_dump_json(), **SGLANG_ANY_WORKER}
    if config.transfer is Transfer.NCCL:
        variables |= NCCL_TRANSFER
    if config.device == "cpu":
        variables |= SGLANG_CPU_ENGINE
    if config.role is Role.PREFILL and caches_beyond_the_device(sglang_arguments):
        variables |= SGLANG_TIERED_PREFILL_CACHE
    return variables


def serve(config: WorkerConfig, sglang_arguments: tuple[str, ...]) -> None:
    """Run SGLang's server until it is told to stop.

    Raises:
        ConfigError: another process listens where decode workers will ask for this one's KV, or
            an argument is not a flag of SGLang by its whole name.
        HookError: SGLang is not the pinned release, or a hook is not in place.
    """
    put(environment_for(config, sglang_arguments))
    put(SGLANG_UNLESS_SET, override=False)
    host = option(sglang_arguments, "--host") or DEFAULT_HOST
    if config.role is Role.PREFILL:
        _require_bootstrap_port(host, sglang_arguments)
    if host not in {"0.0.0.0", "::"}:
        # KV sockets listen where the server does, not on whichever interface SGLang finds.
        put({"SGLANG_HOST_IP": host}, override=False)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from tpla.workers.sglang_plugin.hooks import required_targets
    from tpla.workers.sglang_plugin.selfcheck import check_hooked, check_version

    check_version()
    check_hooked(required_targets(config))
    command_line = sglang_command_line(config, sglang_arguments)
    refuse_what_sglang_would_complete(command_line)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(command_line))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _require_bootstrap_port(host: str, sglang_arguments: tuple[str, ...]) -> None:
    """SGLang logs that the port is taken, and registers its ranks with whoever has it."""
    flag = "--disaggregation-bootstrap-port"
    if whole_number(sglang_arguments, "--node-rank", default=0) > 0:  # the first node listens
        return
    port = option(sglang_arguments, flag) or _DEFAULT_BOOTSTRAP_PORT
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{flag} {port} at {host}: {error}; give each prefill worker of a host its own"
            ) from error


def _check_manifest(model: Path, groups: int | None) -> int:
    manifest = Manifest.load(model)
    found = fingerprint(model)
    if manifest.fingerprint != found:
        raise CheckpointError(
            f"{model}: the weights are not those that tpla.json describes (fingerprint "
            f"{found[:12]}, expected {manifest.fingerprint[:12]}); convert the model again"
        )
    manifest.check_values(model)
    if groups is not None and groups != manifest.plan.groups:
        raise ConfigError(
            f"--groups {groups}, but {model} was converted for {manifest.plan.groups}; "
            f"run: tpla convert SRC DST --groups {groups}"
        )
    return manifest.plan.groups


def _parse_fault(text: str | None) -> dict[str, object] | None:
    """``KIND[:after=N][:count=N][:delay_seconds=S]``."""
    if not text:
        return None
    kind, *settings = text.split(":")
    pairs = dict(setting.partition("=")[::2] for setting in settings)
    return {"kind": kind, **pairs}
