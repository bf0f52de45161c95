"""What a worker holds right now, so that a leak can be seen: ``GET /server_info`` of the worker."""

from __future__ import annotations

from typing import Any

from tpla.core.config import worker_config_from_environment


def add_to_internal_state(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``Scheduler.get_internal_state``: add slots, pages and rooms under ``tpla``."""
    queue = scheduler.disagg_decode_prealloc_queue
    queues: dict[str, int] = {"waiting": len(scheduler.waiting_queue)}
    if queue is not None:
        transfer = scheduler.disagg_decode_transfer_queue
        queues["prealloc"] = len(queue.queue)
        queues["retracted"] = len(queue.retracted_queue)
        queues["transfer"] = len(transfer.queue)
    else:
        queue = scheduler.disagg_prefill_bootstrap_queue
        queues["bootstrap"] = len(queue.queue)
        queues["inflight"] = len(scheduler.disagg_prefill_inflight_queue)
    allocator = scheduler.token_to_kv_pool_allocator
    evictable = scheduler.tree_cache.evictable_size() if hasattr(scheduler, "tree_cache") else 0
    layout = getattr(allocator.get_kvcache(), "layout", None)
    config = worker_config_from_environment()
    output.internal_state["tpla"] = {
        "instance_id": config.instance_id if config is not None else None,
        "pool_tokens": int(allocator.size),
        "free_tokens": int(allocator.available_size()),
        "cached_tokens": int(evictable),
        "free_request_slots": int(scheduler.req_to_token_pool.available_size()),
        "free_metadata_slots": int(scheduler.req_to_metadata_buffer_idx_allocator.available_size()),
        "running": len(scheduler.running_batch.reqs),
        "queues": queues,
        "token_bytes": layout.token_bytes if layout is not None else None,
        "transfer": _transfers(queue.kv_manager),
    }
    return output


def _transfers(manager: Any) -> dict[str, Any] | None:
    """None under another transfer backend, such as SGLang's fake one for decode alone."""
    from tpla.workers.sglang_plugin.kv_manager import TplaKVManager

    return manager.accounting() if isinstance(manager, TplaKVManager) else None
