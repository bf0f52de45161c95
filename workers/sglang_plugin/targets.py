"""Every place where the plug-in attaches to SGLang 0.5.16, with the signature it expects there.

SGLang logs and swallows errors of plug-ins and hooks, so a hook that does not take would mean plain
MLA served silently. :mod:`tpla.workers.sglang_plugin.selfcheck` therefore verifies this table in
every worker, and the contract tests verify it without starting one.
"""

from __future__ import annotations

from dataclasses import dataclass

SGLANG_VERSION = "0.5.16"

_SRT = "sglang.srt."


@dataclass(frozen=True)
class Target:
    """A function or method of SGLang.

    Attributes:
        path: dotted path.
        parameters: names of its leading parameters, ``self`` included.
    """

    path: str
    parameters: tuple[str, ...]


SERVER_ARGS_POST_INIT = Target(_SRT + "server_args.ServerArgs.__post_init__", ("self",))
SUPPORT_TRITON = Target(_SRT + "utils.common.support_triton", ("backend",))
MODEL_RUNNER_INIT = Target(
    _SRT + "model_executor.model_runner.ModelRunner.__init__", ("self", "model_config")
)
GROUP_COORDINATOR_INIT = Target(
    _SRT + "distributed.parallel_state.GroupCoordinator.__init__",
    ("self", "group_ranks", "local_rank", "torch_distributed_backend", "use_pynccl"),
)
INIT_THREADS_BINDING = Target(_SRT + "utils.numa_utils.init_threads_binding", ("tp_rank",))
GET_ROPE_WRAPPER = Target(
    _SRT + "layers.rotary_embedding.factory.get_rope_wrapper", ("head_size", "rotary_dim")
)
ALLOC_EXTEND = Target(
    _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
    (
        "self",
        "prefix_lens",
        "prefix_lens_cpu",
        "seq_lens",
        "seq_lens_cpu",
        "last_loc",
        "extend_num_tokens",
    ),
)
ALLOC_DECODE = Target(
    _SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_decode",
    ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
)
GET_LAST_LOC = Target(
    _SRT + "mem_cache.allocation.get_last_loc",
    ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
)
GET_KV_CLASS = Target(
    _SRT + "disaggregation.utils.get_kv_class", ("transfer_backend", "class_type")
)
PREFILL_INIT_KV_MANAGER = Target(
    _SRT + "disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager", ("self",)
)
DECODE_INIT_KV_MANAGER = Target(
    _SRT + "disaggregation.decode.DecodePreallocQueue._init_kv_manager", ("self",)
)
GET_INTERNAL_STATE = Target(
    _SRT + "managers.scheduler.Scheduler.get_internal_state", ("self", "recv_req")
)
HANDLE_SHUTDOWN = Target(
    _SRT + "managers.scheduler.Scheduler.handle_shutdown", ("self", "recv_req")
)
VALIDATE_REQUEST = Target(
    _SRT + "managers.tokenizer_manager.TokenizerManager._validate_one_request",
    ("self", "obj", "input_ids"),
)
ADD_TO_QUEUE = Target(_SRT + "managers.scheduler.Scheduler._add_request_to_queue", ("self", "req"))
GRAMMAR_FROM_SERIALIZED = Target(
    _SRT + "constrained.llguidance_backend.GuidanceBackend._from_serialized",
    ("self", "serialized_grammar"),
)
FILL_VOCAB_MASK = Target(
    _SRT + "constrained.llguidance_backend.GuidanceGrammar.fill_vocab_mask",
    ("self", "vocab_mask", "idx"),
)
ACCEPT_TOKEN = Target(
    _SRT + "constrained.llguidance_backend.GuidanceGrammar.accept_token", ("self", "token")
)
TAKES_FROM_WAITING_QUEUE = (
    Target(_SRT + "managers.scheduler.Scheduler.abort_request", ("self", "recv_req")),
    Target(_SRT + "managers.scheduler.Scheduler._abort_on_waiting_timeout", ("self",)),
)
ABORT_BETWEEN_CHUNKS = Target(
    _SRT + "managers.scheduler.Scheduler.process_pending_chunked_abort", ("self",)
)
PROCESS_DECODE_QUEUE = Target(
    _SRT + "disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue",
    ("self",),
)
PREPARE_FOR_PREBUILT = Target(
    _SRT + "disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin."
    "prepare_for_prebuilt",
    ("self",),
)
ON_IDLE = Target(_SRT + "managers.scheduler.Scheduler.on_idle", ("self",))
BUILD_MLA_KV_POOL = Target(
    _SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool",
    ("self", "max_total_num_tokens"),
)
COMPUTE_CELL_SIZE = Target(
    _SRT + "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
    ("self", "kvc", "num_layers"),
)
LOAD_MODEL = Target(_SRT + "model_executor.model_runner.ModelRunner.load_model", ("self",))
_UPDATER = _SRT + "model_executor.model_runner_components.weight_updater.WeightUpdater."
UPDATE_WEIGHTS = (
    Target(_UPDATER + "update_weights_from_disk", ("self", "model_path", "load_format")),
    Target(_UPDATER + "update_weights_from_distributed", ("self", "names", "dtypes", "shapes")),
    Target(_UPDATER + "update_weights_from_tensor", ("self", "named_tensors")),
    Target(_UPDATER + "update_weights_from_ipc", ("self", "recv_req")),
)
POST_LOAD_WEIGHTS = Target(
    _SRT
    + "models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin.post_load_weights",
    ("self", "is_nextn", "weight_names"),
)

ATTENTION_CLASS = Target(_SRT + "models.deepseek_v2.DeepseekV2AttentionMLA", ("config",))
"""Replaced by assignment, because its subclass must be made after the class it derives from."""
ABSORBED_FORWARD = Target(
    ATTENTION_CLASS.path + ".forward_absorb_prepare",
    (
        "self",
        "positions",
        "hidden_states",
        "forward_batch",
        "zero_allocator",
        "llama_4_scaling",
        "prev_topk_indices",
    ),
)
PAGE_TABLE_KERNEL = Target(
    "sglang.kernels.ops.kvcache.kv_indices.create_flashmla_kv_indices_triton.fn",
    (
        "req_to_token_ptr",
        "req_pool_indices_ptr",
        "page_kernel_lens_ptr",
        "kv_start_idx",
        "kv_indices_ptr",
        "req_to_token_ptr_stride",
        "kv_indices_ptr_stride",
        "PAGED_SIZE",
    ),
)
USED_BY_CUDA_DECODE = (ABSORBED_FORWARD, PAGE_TABLE_KERNEL)
"""Overridden or called rather than hooked."""

EVERY_WORKER = (
    SUPPORT_TRITON,
    MODEL_RUNNER_INIT,
    GET_KV_CLASS,
    PREFILL_INIT_KV_MANAGER,
    DECODE_INIT_KV_MANAGER,
    GET_INTERNAL_STATE,
    HANDLE_SHUTDOWN,
    VALIDATE_REQUEST,
    ADD_TO_QUEUE,
    *UPDATE_WEIGHTS,
)
CPU_WORKER = (
    SERVER_ARGS_POST_INIT,
    GROUP_COORDINATOR_INIT,
    INIT_THREADS_BINDING,
    GET_ROPE_WRAPPER,
    ALLOC_EXTEND,
    ALLOC_DECODE,
    GET_LAST_LOC,
    ON_IDLE,
    GRAMMAR_FROM_SERIALIZED,
    FILL_VOCAB_MASK,
)
PREFILL_WORKER = (*TAKES_FROM_WAITING_QUEUE, ABORT_BETWEEN_CHUNKS)
DECODE_WORKER = (
    BUILD_MLA_KV_POOL,
    COMPUTE_CELL_SIZE,
    LOAD_MODEL,
    PROCESS_DECODE_QUEUE,
    PREPARE_FOR_PREBUILT,
    ACCEPT_TOKEN,
)
SHARDED_DECODE_WORKER = (POST_LOAD_WEIGHTS,)
ALL_HOOKED = EVERY_WORKER + CPU_WORKER + PREFILL_WORKER + DECODE_WORKER + SHARDED_DECODE_WORKER
