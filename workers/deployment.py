"""A whole deployment on one host: which processes, with which commands and ports."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tpla.core.checkpoint import MANIFEST_NAME, REFERENCE_MODEL, Manifest, fingerprint
from tpla.core.config import Mode, Role
from tpla.core.config.environment import API_KEY_VARIABLE
from tpla.core.errors import CheckpointError, ConfigError
from tpla.workers.launch import choose_transfer
from tpla.workers.ports import free_ports
from tpla.workers.sglang_arguments import option, replicated
from tpla.workers.sglang_plugin.names import TORCH_ATTENTION_BACKEND

_REFERENCE_CORES = {2: "0,0,0,32,64,96", 4: "0,0,0,64,64,64"}
"""The embedded model's shared cores, layer by layer, at the bytes of 32 dims in each: found by
``tpla plan deploy/reference_model --groups 2 --bytes-per-token 148 --calibration TEXT --max-tokens
16384 --context 1024``, for four groups with 124 bytes, text from ``python -m
tpla.convert.reference.text --documents 24``.
"""


_LONGEST_CORE = 40
"""Characters of a folder's name that tell its cores."""


@dataclass(frozen=True)
class DeploymentOptions:
    """What ``tpla launch`` was asked for.

    ``prefill`` and ``decode`` count ranks; each decode worker takes ``decode_tp`` of them and each
    prefill worker ``prefill_tp``. With ``gpus`` each rank has one of them, without any all run on
    the CPU.
    """

    prefill: int
    decode: int
    model: Path
    mode: Mode
    groups: int
    core_dims: str | None
    kv_format: str | None
    transfer: str
    transfer_timeout: float
    prefill_tp: int
    decode_tp: int
    host: str
    port: int
    state: Path
    calibration: Path | None
    gpus: int
    sglang_arguments: tuple[str, ...] = ()
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    router_arguments: tuple[str, ...] = ()

    def arguments_of(self, role: Role) -> tuple[str, ...]:
        """Flags that ``tpla launch`` passes on to each worker of a role."""
        own = self.prefill_arguments if role is Role.PREFILL else self.decode_arguments
        return (*self.sglang_arguments, *own)


@dataclass(frozen=True)
class ProcessPlan:
    """One process: its command, and the URL that answers 200 when it serves."""

    name: str
    command: tuple[str, ...]
    ready_url: str


@dataclass(frozen=True)
class DeploymentPlan:
    """Every process, in the order in which they are started."""

    model: Path
    workers: tuple[ProcessPlan, ...]
    router: ProcessPlan
    conversion: tuple[tuple[str, ...], ...] = field(default=())


def plan_deployment(options: DeploymentOptions) -> DeploymentPlan:
    """Choose ports and commands.

    Raises:
        ConfigError: ranks that do not divide into workers, more ranks than GPUs, or a key that
            would keep the router from its workers.
        CheckpointError: no model, one of the user's own that was not converted, or a conversion of
            another one in its place.
    """
    _refuse_keys(options)
    prefill_workers = _workers_of("prefill", options.prefill, options.prefill_tp)
    decode_workers = _workers_of("decode", options.decode, options.decode_tp)
    if options.mode is Mode.TPLA and options.decode_tp % options.groups:
        raise ConfigError(
            f"--decode-tp {options.decode_tp} is not a multiple of --groups {options.groups}; "
            "each latent group needs as many ranks as the others"
        )
    if options.gpus and options.prefill + options.decode > options.gpus:
        raise ConfigError(
            f"--prefill {options.prefill} and --decode {options.decode} ranks need a GPU each and "
            f"{options.gpus} are visible; ask for fewer ranks, or use --device cpu"
        )
    model, conversion = _converted_model(options)
    workers: list[ProcessPlan] = []
    router_arguments: list[str] = []
    ports = iter(free_ports(3 * prefill_workers + 2 * decode_workers))
    for index in range(prefill_workers):
        port, ranks_port, bootstrap_port = next(ports), next(ports), next(ports)
        extra = (
            *("--disaggregation-bootstrap-port", str(bootstrap_port)),
            *_gpu_flags(options, index * options.prefill_tp),
            *_prefill_flags(options),
        )
        workers.append(_worker(options, model, Role.PREFILL, index, port, ranks_port, extra))
        router_arguments += ["--prefill", f"http://127.0.0.1:{port}", str(bootstrap_port)]
    for index in range(decode_workers):
        port, ranks_port = next(ports), next(ports)
        extra = _gpu_flags(options, options.prefill + index * options.decode_tp)
        workers.append(_worker(options, model, Role.DECODE, index, port, ranks_port, extra))
        router_arguments += ["--decode", f"http://127.0.0.1:{port}"]
    return DeploymentPlan(model, tuple(workers), _router(options, router_arguments), conversion)


def _refuse_keys(options: DeploymentOptions) -> None:
    for role in Role:
        if option(options.arguments_of(role), "--api-key") is not None:
            raise ConfigError(
                "--api-key would go to workers, which the router could not ask any more; set "
                f"{API_KEY_VARIABLE} (or --router-flags '--api-key KEY') for the endpoint's"
            )


def _workers_of(role: str, ranks: int, tp_size: int) -> int:
    if ranks < 1 or tp_size < 1 or ranks % tp_size:
        raise ConfigError(
            f"--{role} {ranks} ranks cannot be divided into workers of --{role}-tp {tp_size}; "
            f"use a multiple of {max(tp_size, 1)}"
        )
    return ranks // tp_size


def _gpu_flags(options: DeploymentOptions, first: int) -> tuple[str, ...]:
    """SGLang's flag for a worker's first GPU, counted among the visible ones."""
    return ("--base-gpu-id", str(first)) if options.gpus else ()


def _prefill_flags(options: DeploymentOptions) -> tuple[str, ...]:
    """On GPUs SGLang's own attention, except for the embedded model.

    Its heads are smaller than those of any DeepSeek, and SGLang's Triton prefill gave other tokens
    for some of its prompts; what it is served for are answers that can be checked.
    """
    if options.gpus and options.model == REFERENCE_MODEL:
        return ("--attention-backend", TORCH_ATTENTION_BACKEND)
    return ()


def _worker(
    options: DeploymentOptions,
    model: Path,
    role: Role,
    index: int,
    port: int,
    ranks_port: int,
    extra: tuple[str, ...],
) -> ProcessPlan:
    tp_size = options.prefill_tp if role is Role.PREFILL else options.decode_tp
    transfer = choose_transfer(options.transfer, gpus_of_one_host=options.gpus > 0)
    command = [
        *(sys.executable, "-m", "tpla.core.cli", "worker", role.value),
        *("--model", str(model), "--mode", options.mode.value),
        *("--device", "cuda" if options.gpus else "cpu"),
        *("--transfer", transfer, "--transfer-timeout", f"{options.transfer_timeout:g}"),
        *(("--kv-format", options.kv_format) if options.kv_format else ()),
        *("--served-model-name", served_name(options.model)),
        *("--port", str(port)),
        # Where its ranks meet: workers that start together must not choose the same.
        *(() if replicated(options.arguments_of(role)) else ("--nccl-port", str(ranks_port))),
        *("--tp-size", str(tp_size)),
        *extra,
        *options.arguments_of(role),
    ]
    return ProcessPlan(f"{role.value}-{index}", tuple(command), f"http://127.0.0.1:{port}/health")


def _router(options: DeploymentOptions, workers: list[str]) -> ProcessPlan:
    command = [
        *(sys.executable, "-m", "tpla.core.cli", "router", "--host", options.host),
        *("--port", str(options.port), "--model", served_name(options.model), *workers),
        *options.router_arguments,
    ]
    ready_url = f"{url_from_here(options.host, options.port)}/ready"
    return ProcessPlan("router", tuple(command), ready_url)


def url_from_here(host: str, port: int) -> str:
    """Where this host reaches what listens on ``host``, which may mean every address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def served_name(model: Path) -> str:
    """Name under which clients ask for the model."""
    return "tpla-reference" if model == REFERENCE_MODEL else model.resolve().name


def _converted_model(options: DeploymentOptions) -> tuple[Path, tuple[tuple[str, ...], ...]]:
    """The checkpoint to serve, and the commands that make it where it does not exist yet."""
    if not options.model.is_dir():
        raise CheckpointError(f"{options.model} is not a folder; point --model at a checkpoint")
    if options.mode is not Mode.TPLA:
        return options.model, ()
    if (options.model / MANIFEST_NAME).is_file():
        _check_groups(Manifest.load(options.model), options)
        return options.model, ()
    if options.model != REFERENCE_MODEL and options.calibration is None:
        raise CheckpointError(
            f"{options.model} is not converted for TPLA; give --calibration TEXT to convert it "
            f"now, or run: tpla convert {options.model} DST --groups {options.groups} "
            "--calibration TEXT"
        )
    core_dims = options.core_dims
    if core_dims is None:
        core_dims = default_core(options.model, options.groups)
    name = f"{served_name(options.model)}-g{options.groups}-core{_core_in_name(core_dims)}"
    target = options.state / "models" / name
    if (target / MANIFEST_NAME).is_file():
        _check_conversion(target, options)
        return target, ()
    text = options.calibration or options.state / "calibration.jsonl"
    commands: list[tuple[str, ...]] = []
    if options.calibration is None and not text.is_file():
        generate = ("-m", "tpla.convert.reference.text", "--out", str(text), "--documents", "40")
        commands.append((sys.executable, *generate))
    convert = ("-m", "tpla.core.cli", "convert", str(options.model), str(target))
    plan = ("--groups", str(options.groups), "--core-dims", core_dims)
    calibration = ("--calibration", str(text), "--max-tokens", "8192")
    # On CPUs, where the embedded model is served in float32.
    dtype = ("--dtype", "float32") if options.model == REFERENCE_MODEL else ()
    trust = [flag for flag in options.sglang_arguments if flag == "--trust-remote-code"]
    commands.append((sys.executable, *convert, *plan, *calibration, *dtype, *trust))
    return target, tuple(commands)


def _check_conversion(target: Path, options: DeploymentOptions) -> None:
    """Whether what an earlier launch converted is what this one would.

    Raises:
        CheckpointError: it was made of another checkpoint, or with a text of another name.
    """
    manifest = Manifest.load(target)
    if manifest.source_fingerprint != fingerprint(options.model):
        raise CheckpointError(
            f"{target} was converted from another checkpoint than {options.model}; remove that "
            "folder, or give this model a --state of its own"
        )
    read = manifest.calibration.get("path")
    if options.calibration is not None and options.calibration.name != read:
        raise CheckpointError(
            f"{target} was calibrated on {read}, not on {options.calibration}; leave --calibration "
            "out to serve it as it is, or remove that folder to convert it anew"
        )


def _core_in_name(core_dims: str) -> str:
    """As it was given, or a digest where a name with a number for each layer would be too long."""
    written = core_dims.replace(",", "-")
    return written if len(written) <= _LONGEST_CORE else xxhash.xxh3_64_hexdigest(written.encode())


def default_core(model: Path, groups: int) -> str:
    """Shared core dims of a conversion that ``tpla launch`` makes, as ``tpla convert`` takes them.

    With 32 of them the embedded model's KL to exact MLA falls about tenfold, and once more where
    the same bytes are divided by layer.
    """
    if model == REFERENCE_MODEL and groups in _REFERENCE_CORES:
        return _REFERENCE_CORES[groups]
    return "0" if groups == 1 else "32"


def _check_groups(manifest: Manifest, options: DeploymentOptions) -> None:
    if manifest.plan.groups != options.groups:
        raise ConfigError(
            f"--groups {options.groups}, but {options.model} was converted for "
            f"{manifest.plan.groups}; use --groups {manifest.plan.groups} or convert it again"
        )
