"""Rooms of aborted requests that SGLang drops without a word to their sender, or without the last.

Its prefill half takes such a request from the waiting queue, or from between two chunks, and nobody
polls the sender again: its room would stay for ever, and if decode was not told to abort, too,
both would wait for each other, each renewing the other's lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpla.workers.sglang_plugin.kv_manager import TplaKVSender


def clear_those_taken_from_the_queue(
    original: Any, scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around a method of ``Scheduler`` that takes aborted requests from its waiting queue."""
    before = list(scheduler.waiting_queue)
    result = original(scheduler, *args, **kwargs)
    if len(scheduler.waiting_queue) != len(before):
        kept = {id(req) for req in scheduler.waiting_queue}
        _clear(scheduler, (req for req in before if id(req) not in kept))
    return result


def clear_the_chunked_one(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler.process_pending_chunked_abort``."""
    before = scheduler.chunked_req
    result = original(scheduler, *args, **kwargs)
    if before is not None and scheduler.chunked_req is None:
        _clear(scheduler, [before])
    return result


def _clear(scheduler: Any, dropped: Iterable[Any]) -> None:
    """Unless another queue has the request, which is polled there and cleared."""
    queues = scheduler.disagg_prefill_bootstrap_queue.queue, scheduler.disagg_prefill_inflight_queue
    polled = {id(req) for queue in queues for req in queue}
    for req in dropped:
        sender = getattr(req, "disagg_kv_sender", None)
        if isinstance(sender, TplaKVSender) and id(req) not in polled:
            sender.abort()
            sender.clear()
