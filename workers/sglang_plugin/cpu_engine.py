"""What SGLang's engine needs on a host without a GPU, beyond its own CPU support."""

from __future__ import annotations

import time
from typing import Any

from tpla.workers.sglang_plugin import page_allocation_cpu, targets
from tpla.workers.sglang_plugin.names import TORCH_ATTENTION_BACKEND

_DEFAULT_MAX_TOTAL_TOKENS = 32_768
_DEFAULT_MAX_RUNNING_REQUESTS = 32
_PAUSE_SECONDS = 0.001


def server_defaults(self: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``ServerArgs.__post_init__``: choose what a CPU can run, keep what the user set."""
    self.device = "cpu"
    if self.attention_backend is None:
        self.attention_backend = TORCH_ATTENTION_BACKEND
    self.disable_overlap_schedule = True  # needs device streams
    self.disable_cuda_graph = True  # on CPU it means torch.compile and sgl_kernel ops
    self.sleep_on_idle = True  # a scheduler that spins takes the cores from the others
    if self.max_total_tokens is None:
        self.max_total_tokens = _DEFAULT_MAX_TOTAL_TOKENS
    if self.max_running_requests is None:
        self.max_running_requests = _DEFAULT_MAX_RUNNING_REQUESTS


def no_device_collectives(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``GroupCoordinator.__init__``: a CUDA torch would try NCCL on device "cpu"."""
    return args, {**kwargs, "use_pynccl": False, "use_custom_allreduce": False}


def no_thread_binding(original: Any, *, tp_rank: int, tp_size: int) -> str:
    """Around ``init_threads_binding``: it wants one NUMA node a rank; its answer is unused here."""
    return "0"


def plain_rope(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``get_rope_wrapper``: the CPU path accepts only yarn, plain RoPE has a native form."""
    if kwargs.get("device") == "cpu" and kwargs.get("rope_scaling") is None:
        from sglang.srt.layers.rotary_embedding.factory import get_rope

        return get_rope(*args, **{k: v for k, v in kwargs.items() if k != "device"})
    return original(*args, **kwargs)


def pause_without_batch(result: None, self: Any) -> None:
    """After ``Scheduler.on_idle``: nothing to run, though a request waits for its pages.

    SGLang spins here; on a few cores that takes them from the prefill worker that is waited for.
    """
    if not self.is_fully_idle():
        time.sleep(_PAUSE_SECONDS)


def register(registry: Any, hook_type: Any) -> None:
    """Register the CPU hooks with SGLang's ``HookRegistry``."""
    before, around, replace = hook_type.BEFORE, hook_type.AROUND, hook_type.REPLACE
    registry.register(targets.ON_IDLE.path, pause_without_batch, hook_type.AFTER)
    registry.register(targets.SERVER_ARGS_POST_INIT.path, server_defaults, before)
    registry.register(targets.GROUP_COORDINATOR_INIT.path, no_device_collectives, before)
    registry.register(targets.INIT_THREADS_BINDING.path, no_thread_binding, around)
    registry.register(targets.GET_ROPE_WRAPPER.path, plain_rope, around)
    registry.register(targets.ALLOC_EXTEND.path, page_allocation_cpu.alloc_extend, replace)
    registry.register(targets.ALLOC_DECODE.path, page_allocation_cpu.alloc_decode, replace)
    registry.register(targets.GET_LAST_LOC.path, page_allocation_cpu.get_last_loc, replace)
