"""The only place that reads or writes environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

WORKER_CONFIG_VARIABLE = "TPLA_WORKER_CONFIG"
"""Carries a worker's configuration as JSON into the processes that SGLang spawns."""

API_KEY_VARIABLE = "TPLA_API_KEY"
"""Key that clients of the router must present; empty means none."""


def read(name: str, default: str | None = None) -> str | None:
    """Value of environment variable ``name``, or ``default``."""
    return os.environ.get(name, default)


def put(values: Mapping[str, str], *, override: bool = True) -> None:
    """Set variables for this process and those it starts."""
    environment: MutableMapping[str, str] = os.environ
    for name, value in values.items():
        if override:
            environment[name] = value
        else:
            environment.setdefault(name, value)


SGLANG_ANY_WORKER = {
    # Else /health generates a token: a second at least, and a time-out while the scheduler is busy.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
"""What SGLang itself needs in every worker."""

EARLY_SEND_VARIABLE = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
"""Of SGLang: whether prefill sends a cached prefix before the forward of what follows it."""

SGLANG_TIERED_PREFILL_CACHE = {
    # Else prefill sends a prefix that another request of its batch has asked to be fetched from
    # host memory, before that has begun: no event says when it is there.
    EARLY_SEND_VARIABLE: "0",
}
"""What SGLang needs in a prefill worker whose cache goes beyond the GPU."""

SGLANG_UNLESS_SET = {
    # Else a worker whose scheduler has failed stands still for 65 s, its connections open, to let
    # debuggers look at it: requests hang, and its restart begins only then.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
"""What SGLang does in every worker unless an operator asks for other."""

NCCL_TRANSFER = {
    # Else torch's watchdog ends the whole worker, with its other peers' requests, when an operation
    # of one pair's group fails, or when it looks at one just when the group is aborted because the
    # peer is gone. The pair's own threads see both, and SGLang has watchdogs of its own.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""What torch needs in a worker that transfers over NCCL."""

SGLANG_CPU_ENGINE = {
    # Without a GPU SGLang must be told to use its CPU engine, before its first import.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Its top-k and sampling helpers are torch.compile'd: 25-38 s of g++ at the first request.
    "TORCHDYNAMO_DISABLE": "1",
    # One thread a rank: with more, ranks fight for the cores (41-295 ms a step instead of 8).
    "OMP_NUM_THREADS": "1",
    # CUDA keeps the RoPE table in fp32; the CPU path casts it to the model's dtype otherwise.
    "SGLANG_ROPE_CACHE_FP32": "1",
    # A GPU host that serves on CPU must not initialise CUDA in any process.
    "CUDA_VISIBLE_DEVICES": "",
}
"""What SGLang itself needs on a host without a GPU, with the reason for each."""

LOCAL_TOKENIZER = {
    # Else transformers asks the hub about it: 47 s of retries on a host without a network.
    "HF_HUB_OFFLINE": "1",
}
"""What a process needs that loads a tokenizer from a folder."""
