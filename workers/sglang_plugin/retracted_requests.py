"""Requests that decode has taken its pages from, to go on with when there are pages again.

What SGLang 0.5.16 keeps of one is its rows and its tokens. It waits for room with everything else
standing still, and goes on as if it were new.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def take_transferred_too(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.process_decode_queue``, which ends where a retracted request must wait.

    Transfers that have ended hold the pages and the reserve that it waits for. SGLang's loop for
    pipelines takes them at any time, and so does this.
    """
    if scheduler.disagg_decode_prealloc_queue.retracted_queue:
        transferred = scheduler.disagg_decode_transfer_queue.pop_transferred()
        scheduler.waiting_queue.extend(transferred)


def mark_accepted(result: None, grammar: Any, token: int) -> None:
    """After ``GuidanceGrammar.accept_token``, which is the only one of SGLang not to say so.

    The last token of a request that goes on is accepted again unless its grammar has one.
    """
    grammar.current_token = token


def count_earlier_tokens(result: None, batch: Any, *args: Any, **kwargs: Any) -> None:
    """After ``ScheduleBatch.prepare_for_prebuilt``: penalties know what was generated before.

    They have just been made anew, and learn the last token with the next step.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    prepared = [each for each in orchestrator.penalizers.values() if each.is_prepared()]
    for row, req in enumerate(batch.reqs):
        earlier = torch.tensor(req.output_ids[:-1], dtype=torch.int64, device=batch.device)
        for penalizer in prepared:
            of_request = _row(penalizer, row)
            for position in range(len(earlier)):
                of_request.cumulate_output_tokens(earlier[position : position + 1])


def _row(penalizer: Any, row: int) -> Any:
    """One request of a penalizer, which has a row for each in all its tensors, to write through."""
    of_request = copy.copy(penalizer)
    for name, value in vars(penalizer).items():
        if isinstance(value, torch.Tensor):
            setattr(of_request, name, value[row : row + 1])
    return of_request
