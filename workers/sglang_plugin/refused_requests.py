"""Requests that SGLang refuses before they are queued are answered then, and open no room.

SGLang 0.5.16 replaces the prompt of such a request by a single token and queues it none the less.
What it refuses depends on a rank's own pool: where only one role does, the two legs would move
different numbers of pages and report a damaged transfer, which both are charged with. A refusal
before the room is known (an unknown session) would end decode's scheduler.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT


def answer_refused_at_once(
    original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> None:
    """Around ``Scheduler._add_request_to_queue``; a retracted request has a room already."""
    retracted = kwargs.get("is_retracted", args[0] if args else False)
    if retracted or not isinstance(req.to_finish, FINISH_ABORT):
        original(scheduler, req, *args, **kwargs)
        return
    answer = AbortReq(rid=req.rid, finished_reason=req.to_finish.to_json())
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, req)
