"""Start one worker: SGLang with the plug-in, its mode and its transfer backend."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from tpla.core.checkpoint import Manifest, fingerprint
from tpla.core.config import Mode, Role, Transfer, WorkerConfig, parse_worker_config
from tpla.core.config.environment import (
    NCCL_TRANSFER,
    SGLANG_ANY_WORKER,
    SGLANG_CPU_ENGINE,
    WORKER_CONFIG_VARIABLE,
    put,
)
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import RankShard
from tpla.workers.devices import resolve_device
from tpla.workers.ports import free_ports
from tpla.workers.sglang_plugin.names import CUDA_ATTENTION_BACKEND

TRANSFER_BACKENDS = {Transfer.ZMQ: "tpla_zmq", Transfer.NCCL: "tpla_nccl"}

AUTO_TRANSFER = "auto"

_DEFAULT_HOST = "127.0.0.1"


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
    attention_ranks = _attention_ranks(options.sglang_arguments, device)
    if config.role is Role.DECODE:
        RankShard(0, attention_ranks, config.groups)
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


def sglang_command_line(config: WorkerConfig, sglang_arguments: tuple[str, ...]) -> list[str]:
    """Arguments for SGLang's own server: our defaults, then the user's."""
    given = {argument.split("=", 1)[0] for argument in sglang_arguments}
    defaults = {
        "--model-path": config.model,
        "--disaggregation-mode": config.role.value,
        "--disaggregation-transfer-backend": TRANSFER_BACKENDS[config.transfer],
        "--host": _DEFAULT_HOST,
        # SGLang's own choice is a port for outgoing connections, which may be taken by the time
        # that the ranks meet there.
        "--nccl-port": str(*free_ports(1)),
    }
    if config.device == "cpu":
        # --max-total-tokens bounds the pool. The fraction is of memory that all processes of the
        # host share: a small one makes a worker refuse to start because others start beside it.
        defaults |= {"--device": "cpu", "--dtype": "float32", "--mem-fraction-static": "0.8"}
        # SGLang's own choice, xgrammar, has no CPU form: a request with a grammar ends the worker.
        defaults["--grammar-backend"] = "llguidance"
    else:
        # Kernels read BF16 activations and, fastest, pages of 64; both roles share the page size.
        defaults |= {"--dtype": "bfloat16", "--page-size": "64"}
        if config.role is Role.DECODE:
            defaults["--attention-backend"] = CUDA_ATTENTION_BACKEND
    arguments = [part for pair in defaults.items() if pair[0] not in given for part in pair]
    if "--enable-metrics" not in given:
        arguments.append("--enable-metrics")
    return [*arguments, *sglang_arguments]


def environment_for(config: WorkerConfig) -> dict[str, str]:
    """Variables that the worker and the processes it spawns need."""
    variables = {WORKER_CONFIG_VARIABLE: config.model_dump_json(), **SGLANG_ANY_WORKER}
    if config.transfer is Transfer.NCCL:
        variables |= NCCL_TRANSFER
    if config.device == "cpu":
        variables |= SGLANG_CPU_ENGINE
    return variables


def serve(config: WorkerConfig, sglang_arguments: tuple[str, ...]) -> None:
    """Run SGLang's server until it is told to stop.

    Raises:
        HookError: SGLang is not the pinned release, or a hook is not in place.
    """
    put(environment_for(config))
    host = _option(sglang_arguments, "--host") or _DEFAULT_HOST
    if host not in {"0.0.0.0", "::"}:
        # KV sockets listen where the server does, not on whichever interface SGLang finds.
        put({"SGLANG_HOST_IP": host}, override=False)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from tpla.workers.sglang_plugin.hooks import required_targets
    from tpla.workers.sglang_plugin.selfcheck import check_hooked, check_version

    check_version()
    check_hooked(required_targets(config))
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sglang_command_line(config, sglang_arguments)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


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


def _attention_ranks(arguments: tuple[str, ...], device: str) -> int:
    """Ranks that share a request's attention: all, or those of one data-parallel rank."""
    tp_size = _whole_number(arguments, "--tp-size", "--tensor-parallel-size", "--tp")
    if "--enable-dp-attention" not in arguments:
        return tp_size
    if device == "cpu":
        raise ConfigError(
            "--enable-dp-attention: SGLang's gathers between data-parallel ranks have no CPU form; "
            "leave it out, or serve with --device cuda"
        )
    dp_size = _whole_number(arguments, "--dp-size", "--data-parallel-size", "--dp")
    if tp_size % dp_size:
        raise ConfigError(f"--tp-size {tp_size} is not a multiple of --dp-size {dp_size}")
    return tp_size // dp_size


def _whole_number(arguments: tuple[str, ...], *names: str) -> int:
    text = _option(arguments, *names) or "1"
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{names[0]} {text!r} is not a positive whole number")
    return int(text)


def _option(arguments: tuple[str, ...], *names: str) -> str | None:
    """Value of an SGLang flag, given as ``--name value`` or ``--name=value``."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in names:
            return value or (arguments[index + 1] if index + 1 < len(arguments) else "")
    return None


def _parse_fault(text: str | None) -> dict[str, object] | None:
    """``KIND[:after=N][:count=N][:delay_seconds=S]``."""
    if not text:
        return None
    kind, *settings = text.split(":")
    pairs = dict(setting.partition("=")[::2] for setting in settings)
    return {"kind": kind, **pairs}
