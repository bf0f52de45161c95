"""Entry point ``sglang.srt.plugins``: attaches TPLA to SGLang in every process of a worker.

Without a worker configuration in the environment (a plain ``import sglang``, another server) it
does nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpla.core.checkpoint import Manifest
from tpla.core.config import Mode, Role, WorkerConfig, worker_config_from_environment
from tpla.core.latent_layout import PVFormat
from tpla.workers.sglang_plugin import targets
from tpla.workers.sglang_plugin.names import CUDA_ATTENTION_BACKEND, TORCH_ATTENTION_BACKEND

TRANSFER_BACKEND_NAMES = ("tpla_zmq", "tpla_nccl")


def load() -> None:
    """Register every hook this worker needs; SGLang applies them when all plug-ins have loaded."""
    config = worker_config_from_environment()
    if config is None:
        return
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tpla.workers.sglang_plugin.selfcheck import check_version

    check_version()
    _offer_choices(server_args)
    _register_common(config, HookRegistry, HookType)
    if config.device == "cpu":
        from tpla.workers.sglang_plugin import cpu_engine

        cpu_engine.register(HookRegistry, HookType)
        _register_grammars(HookRegistry, HookType)
    if config.role is Role.PREFILL:
        _register_prefill(HookRegistry, HookType)
    else:
        _register_decode(config, HookRegistry, HookType)


def required_targets(config: WorkerConfig) -> tuple[targets.Target, ...]:
    """What must be hooked before a worker with this configuration may serve."""
    required: tuple[targets.Target, ...] = targets.EVERY_WORKER
    if config.device == "cpu":
        required += targets.CPU_WORKER
    if config.role is Role.PREFILL:
        required += targets.PREFILL_WORKER
    else:
        required += targets.DECODE_WORKER
        if config.mode is Mode.TPLA:
            required += targets.SHARDED_DECODE_WORKER
    return required


def load_manifest(config: WorkerConfig) -> Manifest | None:
    """The checkpoint's manifest where the mode needs one."""
    return Manifest.load(Path(config.model)) if config.mode is Mode.TPLA else None


def _offer_choices(server_args: Any) -> None:
    for name in (TORCH_ATTENTION_BACKEND, CUDA_ATTENTION_BACKEND):
        if name not in server_args.ATTENTION_BACKEND_CHOICES:
            server_args.add_attention_backend_choices([name])
    for name in TRANSFER_BACKEND_NAMES:
        if name not in server_args.DISAGG_TRANSFER_BACKEND_CHOICES:
            server_args.add_disagg_transfer_backend_choices([name])


def _register_common(config: WorkerConfig, registry: Any, hook_type: Any) -> None:
    from tpla.workers.sglang_plugin import (
        accounting,
        known_tokens,
        loaded_weights,
        transfer_backend,
    )

    def support_triton(original: Any, backend: str) -> bool:
        return backend != TORCH_ATTENTION_BACKEND and original(backend)

    support_triton.__module__ = __name__
    for name in TRANSFER_BACKEND_NAMES:
        transfer_backend.add_enum_member(name)
    around, after = hook_type.AROUND, hook_type.AFTER
    registry.register(targets.SUPPORT_TRITON.path, support_triton, around)
    registry.register(
        targets.MODEL_RUNNER_INIT.path,
        _named(functools.partial(_before_model_runner, config)),
        hook_type.BEFORE,
    )
    registry.register(targets.GET_KV_CLASS.path, transfer_backend.get_kv_class, around)
    attach = _named(functools.partial(transfer_backend.attach_pool, config))
    registry.register(targets.PREFILL_INIT_KV_MANAGER.path, attach, after)
    registry.register(targets.DECODE_INIT_KV_MANAGER.path, attach, after)
    registry.register(targets.GET_INTERNAL_STATE.path, accounting.add_to_internal_state, after)
    registry.register(targets.HANDLE_SHUTDOWN.path, _later("shutdown", "leave_loop"), after)
    registry.register(targets.VALIDATE_REQUEST.path, known_tokens.refuse_unknown_tokens, around)
    refused = _later("refused_requests", "answer_refused_at_once")
    registry.register(targets.ADD_TO_QUEUE.path, refused, around)
    for target in targets.UPDATE_WEIGHTS:
        registry.register(target.path, loaded_weights.refuse_update, around)


def _register_grammars(registry: Any, hook_type: Any) -> None:
    """Of llguidance, the only ones that SGLang has on CPUs."""
    first_mask = _later("failing_grammars", "refuse_without_first_mask")
    registry.register(targets.GRAMMAR_FROM_SERIALIZED.path, first_mask, hook_type.AROUND)
    later_masks = _later("failing_grammars", "allow_all_after_an_error")
    registry.register(targets.FILL_VOCAB_MASK.path, later_masks, hook_type.AROUND)


def _register_prefill(registry: Any, hook_type: Any) -> None:
    from_queue = _later("dropped_requests", "clear_those_taken_from_the_queue")
    between_chunks = _later("dropped_requests", "clear_the_chunked_one")
    for target in targets.TAKES_FROM_WAITING_QUEUE:
        registry.register(target.path, from_queue, hook_type.AROUND)
    registry.register(targets.ABORT_BETWEEN_CHUNKS.path, between_chunks, hook_type.AROUND)


def _register_decode(config: WorkerConfig, registry: Any, hook_type: Any) -> None:
    from tpla.workers.sglang_plugin import kv_pool

    manifest = load_manifest(config)

    def build_pool(original: Any, self: Any, *, max_total_num_tokens: int) -> Any:
        return kv_pool.build_pool(config, manifest, self, max_total_num_tokens)

    def cell_size(original: Any, self: Any, kvc: Any, num_layers: int) -> int:
        return kv_pool.cell_bytes(config, manifest, kvc)

    registry.register(targets.BUILD_MLA_KV_POOL.path, build_pool, hook_type.AROUND)
    registry.register(targets.COMPUTE_CELL_SIZE.path, cell_size, hook_type.AROUND)
    free_after_load = _later("decode_weights", "free_after_load")
    registry.register(targets.LOAD_MODEL.path, free_after_load, hook_type.AFTER)
    _register_retraction(registry, hook_type)
    if config.mode is Mode.TPLA:
        slice_after_load = _later("attention_shard", "slice_after_load")
        registry.register(targets.POST_LOAD_WEIGHTS.path, slice_after_load, hook_type.AROUND)


def _register_retraction(registry: Any, hook_type: Any) -> None:
    for target, name in (
        (targets.PROCESS_DECODE_QUEUE, "take_transferred_too"),
        (targets.ACCEPT_TOKEN, "mark_accepted"),
        (targets.PREPARE_FOR_PREBUILT, "count_earlier_tokens"),
    ):
        registry.register(target.path, _later("retracted_requests", name), hook_type.AFTER)


def _later(module: str, name: str) -> Callable[..., Any]:
    """A hook of this package, for a module that imports what cannot be while plug-ins load."""

    def hook(*args: Any, **kwargs: Any) -> Any:
        found = importlib.import_module(f"tpla.workers.sglang_plugin.{module}")
        return getattr(found, name)(*args, **kwargs)

    hook.__name__ = hook.__qualname__ = name
    return hook


def _named(hook: functools.partial[Any]) -> functools.partial[Any]:
    """The registry prints a hook's name and module, which a partial lacks."""
    hook.__name__ = hook.func.__name__  # type: ignore[attr-defined]
    hook.__qualname__ = hook.func.__qualname__  # type: ignore[attr-defined]
    hook.__module__ = hook.func.__module__
    return hook


def _before_model_runner(config: WorkerConfig, *args: Any, **kwargs: Any) -> None:
    """Runs first in each scheduler process, when every module of SGLang can be imported."""
    from tpla.workers.sglang_plugin.selfcheck import check_hooked

    check_hooked(required_targets(config))
    if config.device == "cpu" or config.role is Role.PREFILL:
        from tpla.workers.sglang_plugin.attention_backend import TorchLatentBackend

        # Prefill is exact whatever decode does.
        pv_format = config.pv_format if config.role is Role.DECODE else PVFormat.FP16
        make_torch = functools.partial(TorchLatentBackend, pv_format=pv_format)
        _register_backend(TORCH_ATTENTION_BACKEND, make_torch)
    else:
        from tpla.workers.sglang_plugin.attention_backend_cuda import LatentDecodeBackend

        make_cuda = functools.partial(LatentDecodeBackend, pv_format=config.pv_format)
        _register_backend(CUDA_ATTENTION_BACKEND, make_cuda)
    if config.role is Role.DECODE:
        _install_attention(config)


def _register_backend(name: str, make_backend: Callable[[Any], Any]) -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    register_attention_backend(name)(make_backend)
    # The absorbed form for every batch. Names that SGLang does not know get its Triton handler,
    # which would expand the latent.
    AttentionBackendRegistry.register(name, lambda attention, batch: AttnForwardMethod.MLA)


def _install_attention(config: WorkerConfig) -> None:
    """Replace SGLang's attention class where decode differs from it."""
    from sglang.srt.models import deepseek_v2

    attention = deepseek_v2.DeepseekV2AttentionMLA
    if attention.__module__.startswith("tpla."):  # a second model runner in this process
        return
    if config.mode is Mode.TPLA:
        from tpla.workers.sglang_plugin.attention_shard import make_shard_attention

        manifest = load_manifest(config)
        assert manifest is not None
        attention = make_shard_attention(
            attention, manifest, Path(config.model), config.scatter_output
        )
    if config.device == "cuda":
        from tpla.workers.sglang_plugin.attention_fused import fuse_decode
        from tpla.workers.sglang_plugin.selfcheck import resolve

        for target in targets.USED_BY_CUDA_DECODE:
            resolve(target)
        attention = fuse_decode(attention)
    deepseek_v2.DeepseekV2AttentionMLA = attention
